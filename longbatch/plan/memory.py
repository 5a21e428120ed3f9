"""The memory budget: everything a run allocates on one device, summed before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from longbatch.config.kv_formats import KVFormat
from longbatch.errors import DeviceError
from longbatch.models.spec import ModelSpec
from longbatch.plan import selection_memory
from longbatch.plan.layer_memory import Formats
from longbatch.plan.peak import (
    PAGE_TOKENS,
    graph_bytes,
    kv_page_bytes,
    layer_token_bytes,
    logit_bytes,
    open_block_bytes,
    step_token_bytes,
    tile_bytes,
)

GIB = 2**30

# What a process needs beside its tensors: CUDA's context and libraries and the allocator's gaps on a GPU; the
# interpreter, torch and everybody else's work on a CPU.
_GPU_RESERVE_BYTES = 3 * GIB // 2
_GPU_RESERVE_SHARE = 0.04
_CPU_RESERVE_BYTES = GIB
_CPU_RESERVE_SHARE = 0.25
# Tokens whose Q, attention output and MLP exist at the same time.
_GPU_TILE_TOKENS = 8192
_CPU_TILE_TOKENS = 512
# A wave this long keeps every matrix product at full speed; more would only take pages from the cache.
_GPU_WAVE_TOKENS = 262_144
_CPU_WAVE_TOKENS = 16_384
_WAVE_SHARE = 0.25
# A CPU's memory is shared with others, so the cache there stops at what keeps the cores busy.
_CPU_KV_TOKENS = 65_536
# Longer prompts than this take more memory for the parts of their attention, in float32, than a budget counts.
_STATES_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Budget:
    """What one device can hold.

    wave_tokens: most tokens of one wave. kv_tokens: tokens that the K/V pages hold, a multiple of 64. tile_tokens:
    tokens whose Q, attention output and MLP exist at once. parts: the sum as (what, bytes), the reserve included;
    memory_bytes: what there is. chunk_tokens: most tokens in one step of a row alone, None for wave_tokens; a matter of
    time, which the job sets. weights: where those of the layers are kept, resident, host or disk; host_bytes: what
    they take in host memory beside a GPU.
    """

    wave_tokens: int
    kv_tokens: int
    tile_tokens: int
    parts: tuple[tuple[str, int], ...] = ()
    memory_bytes: int = 0
    chunk_tokens: int | None = None
    weights: str = "resident"
    host_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Sum of the parts."""
        return sum(num_bytes for _, num_bytes in self.parts)


def entry_bytes(spec: ModelSpec, kv: KVFormat) -> float:
    """Bytes of one stored number of K or V, with its share of what a format keeps beside them."""
    return kv_page_bytes(spec, kv) / (PAGE_TOKENS * spec.kv_entries_per_token)


def budget(
    spec: ModelSpec,
    device_memory_bytes: int,
    weight_bytes_per_param: float,
    kv: KVFormat,
    on_gpu: bool,
    *,
    wave_tokens: int | None = None,
    kv_tokens: int | None = None,
    weight_bytes: int | None = None,
    slot_bytes: int = 0,
    sparse_heads: int = 0,
    decode_rows: int = 0,
    weights_dtype: str = "auto",
    multiplies_fp8: bool = False,
) -> Budget:
    """Share out a device's memory.

    kv: how K/V are stored. wave_tokens, kv_tokens: fixed by the user, else chosen. weight_bytes: of all weights that
    stay there, where some are quantized or elsewhere, else as many per parameter. slot_bytes: of two layers, where
    those of others take turns in them. sparse_heads: query heads of a layer where some rows are prefilled sparse, else
    0. decode_rows: most sequences that decode at once, each with an open block where the format has them and, on a GPU,
    with its part of the memory that captured steps keep. weights_dtype, multiplies_fp8: as in `Formats`. Raises
    DeviceError where the weights leave no room for even a short prompt, or a fixed size does not fit.
    """
    formats = Formats(int(max(2.0, weight_bytes_per_param)), weights_dtype, kv, on_gpu, multiplies_fp8)
    if on_gpu:
        reserve = _GPU_RESERVE_BYTES + int(_GPU_RESERVE_SHARE * device_memory_bytes)
        tile_tokens, most_wave_tokens = _GPU_TILE_TOKENS, _GPU_WAVE_TOKENS
    else:
        reserve = _CPU_RESERVE_BYTES + int(_CPU_RESERVE_SHARE * device_memory_bytes)
        tile_tokens, most_wave_tokens = _CPU_TILE_TOKENS, _CPU_WAVE_TOKENS
    weights = int(spec.num_parameters * weight_bytes_per_param) if weight_bytes is None else weight_bytes
    tile = tile_bytes(spec, formats, tile_tokens, min(spec.max_length, _STATES_TOKENS))
    logits = logit_bytes(spec.vocab_size, decode_rows)
    # Every position may be read: then the last hidden states are there beside those before.
    wave_bytes = step_token_bytes(spec, formats) + spec.hidden_size * formats.width + layer_token_bytes(spec, formats)
    page_bytes = kv_page_bytes(spec, kv)
    open_blocks = decode_rows * open_block_bytes(spec, formats)
    decode = graph_bytes(spec, formats, decode_rows) if on_gpu and decode_rows else 0
    free = device_memory_bytes - reserve - weights - slot_bytes - tile - logits - open_blocks - decode
    selection = 0
    if sparse_heads:
        longest = min(spec.max_length, max(0, free) // page_bytes * PAGE_TOKENS)
        selection = selection_memory.bound(sparse_heads, longest, on_gpu)
        free -= selection
    history = 0
    if not formats.is_exact:
        # Before the keys of earlier chunks are attended to, one layer's are converted, and for sparse rows joined with
        # the chunk's own.
        longest = min(spec.max_length, max(0, free) // page_bytes * PAGE_TOKENS, kv_tokens or spec.max_length)
        history = (2 if sparse_heads else 1) * longest * layer_token_bytes(spec, formats)
        free -= history
    if free < PAGE_TOKENS * wave_bytes + page_bytes:
        needed = device_memory_bytes - free + PAGE_TOKENS * wave_bytes + page_bytes
        raise DeviceError(
            f"the model needs at least {needed / GIB:.1f} GiB and the device has {device_memory_bytes / GIB:.1f} GiB",
            hint="use a device with more memory, a smaller model, a smaller --dtype or --weights-dtype fp8"
            + ("" if slot_bytes else f", or --weights {'host' if on_gpu else 'disk'}"),
        )
    if wave_tokens is None:
        # The pages must hold a wave twice, so that rows go on decoding while the next ones are read.
        token_bytes = page_bytes // PAGE_TOKENS
        room = min(int(_WAVE_SHARE * free) // wave_bytes, free // (wave_bytes + 2 * token_bytes))
        wave_tokens = max(PAGE_TOKENS, min(most_wave_tokens, room // PAGE_TOKENS * PAGE_TOKENS))
    num_pages = (free - wave_tokens * wave_bytes) // page_bytes
    if kv_tokens is not None:
        num_pages = min(num_pages, -(-kv_tokens // PAGE_TOKENS))
    elif not on_gpu:
        num_pages = min(num_pages, -(-max(_CPU_KV_TOKENS, spec.max_length) // PAGE_TOKENS))
    if num_pages * PAGE_TOKENS < (kv_tokens or PAGE_TOKENS):
        raise DeviceError(
            f"the device has no room for a wave of {wave_tokens:,} tokens beside a cache of"
            f" {kv_tokens or PAGE_TOKENS:,} tokens",
            hint="lower --wave-tokens or --kv-tokens, or leave them out",
        )
    parts = (
        ("weights", weights),
        *((("two layers", slot_bytes),) if slot_bytes else ()),
        ("K/V pages", num_pages * page_bytes),
        *((("open K/V blocks", open_blocks),) if open_blocks else ()),
        *((("converted K/V", history),) if history else ()),
        ("wave", wave_tokens * wave_bytes),
        ("tile", tile),
        ("logits", logits),
        *((("decode steps", decode),) if decode else ()),
        *((("selection", selection),) if selection else ()),
        ("reserve", reserve),
    )
    return Budget(wave_tokens, num_pages * PAGE_TOKENS, tile_tokens, parts, device_memory_bytes)
