"""Which model family reads which config: names to modules, imported when needed. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from longbatch.errors import UsageError
from longbatch.models.families.config import Config
from longbatch.models.quantized import read_scheme
from longbatch.models.spec import ModelSpec

_FAMILIES = "longbatch.models.families."

# `architectures` and `model_type` of config.json -> the module that describes the family.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
}
MODEL_TYPES: dict[str, str] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "gpt_oss": "gpt_oss",
}
_MAX_CONFIG_BYTES = 16 * 2**20


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed config.json.

    Raises `UsageError` for an unknown architecture (naming the known ones), for a quantized checkpoint that
    is not read (naming the method), and for settings of the family that are not supported.
    """
    read_scheme(config)
    module = import_module(_FAMILIES + _family(config))
    describe_family: Callable[[Mapping[str, Any]], ModelSpec] = module.describe
    return describe_family(config)


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of a model folder. End-of-text ids come from generation_config.json where it names them.

    Raises `UsageError` when the folder has no readable config.json or when its model is not supported.
    """
    spec = describe(read_json(model_dir / "config.json"))
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return spec
    eos_ids = Config(read_json(path), path.name).token_ids("eos_token_id")
    return replace(spec, eos_ids=eos_ids) if eos_ids else spec


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder. Raises `UsageError` naming the file and what is wrong with it."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_CONFIG_BYTES >> 20} MiB: not a settings file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} is missing", hint=_missing_hint(path.parent)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return value


def _missing_hint(folder: Path) -> str:
    if folder.is_file() or folder.suffix == ".gguf":
        return "make a model folder from a GGUF file with `longbatch convert FILE DIR`"
    if (folder / "adapter_config.json").is_file():
        return "this is an adapter (LoRA); give its base model with --model and this folder with --adapter"
    return "a model folder holds config.json, *.safetensors and tokenizer.json, as on the Hugging Face hub"


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if isinstance(names, list) and names:
        name, known = str(names[0]), ARCHITECTURES
    else:
        name, known = str(config.get("model_type")), MODEL_TYPES
    if name in known:
        return known[name]
    # A native architecture is read by our own code whatever its `auto_map` says; any other would need it.
    remote = " (it needs the remote code named by auto_map, which is never run)" if config.get("auto_map") else ""
    raise UsageError(f"model {name} is not supported{remote}", hint=f"known: {', '.join(known)}")
