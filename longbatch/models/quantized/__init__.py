"""Quantized checkpoints: which are read, and how a stored weight becomes numbers again. Torch-free until a weight is.

`quantization_config` of config.json says the method. Each method that is read has a module with a function that makes
a `Scheme` of these settings; which tensors make one weight, and the sum that they stand for, is known there and nowhere
else. Weights are dequantized one by one while they are loaded. Which modules a checkpoint leaves as they were
(`ignore`, `modules_to_not_convert`, `lm_head`) is seen by the tensors that exist. Scales of activations and of K/V are
not read: activations stay as they are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longbatch.models.families.config import Config
from longbatch.models.quantized.awq import read_awq
from longbatch.models.quantized.compressed import read_compressed
from longbatch.models.quantized.gptq import read_gptq
from longbatch.models.quantized.scaled import read_fbgemm, read_fp8
from longbatch.models.quantized.scheme import Part, Scheme, refusal

__all__ = ["METHODS", "Part", "Scheme", "read_scheme"]

# `quant_method` of a config -> what makes its scheme. The method is refused by name if it is not here.
METHODS: dict[str, Callable[[Config], Scheme]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "compressed-tensors": read_compressed,
    "gptq": read_gptq,
    "awq": read_awq,
}
_KEYS = ("quantization_config", "compression_config")


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """How the weights of a parsed config.json are quantized; None if they are not.

    Raises `UsageError` naming the method, or the variant of it, that cannot be loaded, and for settings that are odd.
    """
    key = next((key for key in _KEYS if config.get(key)), None)
    if key is None:
        return None
    settings = config[key]
    if isinstance(settings, dict) and isinstance(settings.get("quantization_config"), dict):
        settings = {**settings, **settings["quantization_config"]}
    method = str(settings.get("quant_method", "unknown")) if isinstance(settings, dict) else "unknown"
    if method not in METHODS:
        raise refusal(method)
    return METHODS[method](Config(settings, f"config.json: {key}"))
