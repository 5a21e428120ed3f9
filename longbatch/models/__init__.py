"""Models: what a decoder is (`read_spec`), its weights (`load`, `random_weights`), its identity (`model_hash`).

Importing this package loads no torch; the functions that return tensors import it when they are called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from longbatch.models.registry import describe, read_spec
from longbatch.models.spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec, StreamSpec

if TYPE_CHECKING:
    import torch

    from longbatch.models.decoder import Decoder

__all__ = [
    "LayerSpec",
    "ModelSpec",
    "MoeSpec",
    "RopeSpec",
    "StreamSpec",
    "describe",
    "load",
    "model_hash",
    "random_weights",
    "read_spec",
]


def load(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights_dtype: str = "auto",
    adapter: Path | None = None,
    weights: str = "resident",
) -> Decoder:
    """The decoder of a model folder, its weights cast to dtype and, for the weights_dtype `fp8`, the matrices of its
    layers quantized. adapter: folder of a LoRA adapter, merged into the weights. weights: where those of the layers
    are kept, `resident`, `host` or `disk`. Raises `UsageError` for what cannot be loaded."""
    from longbatch.models.loader import load_decoder

    return load_decoder(model_dir, dtype, device, weights_dtype, adapter, weights)


def random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    weights_dtype: str = "auto",
    weights: str = "resident",
) -> Decoder:
    """A decoder of the spec's shape with random weights, made on the device: for benchmarks and tests. weights: where
    those of the layers are kept, `resident` or `host`."""
    from longbatch.models.loader import random_decoder

    return random_decoder(spec, dtype, device, seed, weights_dtype, weights)


def model_hash(model_dir: Path) -> str:
    """What tells one model folder from another: 32 hex digits, see `longbatch.models.identity`."""
    from longbatch.models.identity import hash_model

    return hash_model(model_dir)
