"""One torch-free file per model family: `describe(config) -> ModelSpec`."""
