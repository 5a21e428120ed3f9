"""How K/V are stored: what `--kv-dtype` names, in numbers that need no torch. The tensors themselves are made and read
by `longbatch_kernels.kv_NAME`; a new format is such a file, its entry here and its tests."""

from __future__ import annotations

from dataclasses import dataclass

_PLAIN_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A way to store K/V.

    name: as the plan shows it and a run is identified by; a dtype where numbers are stored as they are. module: NAME of
    the kernels' `kv_NAME`. entry_bytes: of one number. block_bytes: beside them, for K or for V of one page and head.
    has_open: whether only whole pages can be stored, so that each sequence's last one lies open, in the model's dtype,
    until it is full.
    """

    name: str
    module: str
    entry_bytes: float
    block_bytes: float = 0.0
    has_open: bool = False


def plain_format(dtype: str) -> KVFormat:
    """Numbers stored as they are: bfloat16, float16 or float32."""
    return KVFormat(dtype, "plain", _PLAIN_BYTES[dtype])


def kv_format(kv_dtype: str, dtype: str) -> KVFormat:
    """What a value of `--kv-dtype` means in a run whose model has a dtype."""
    if kv_dtype == "auto":
        return plain_format(dtype)
    return _FORMATS[kv_dtype]


_FORMATS = {
    "bf16": plain_format("bfloat16"),
    "fp8": KVFormat("fp8", "fp8", 1.0, block_bytes=4.0, has_open=True),
}
KV_DTYPES = ("auto", *_FORMATS)
