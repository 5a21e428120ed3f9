"""Times of everything that `longbatch bench attention` compares with: dense attention, MInference, FlexPrefill."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longbatch.attention import Piece, Segment, Tile
from longbatch.attention.choice import FLASH_3, OWN, has_flash_3
from longbatch.attention.kernels import attend_tile
from longbatch.attention.packed import TileWork
from longbatch.attention.state import cudnn
from longbatch.bench.attention_check import MOST_ERROR, MOST_RIVAL_ERROR, Check, check_rows, sampled_blocks
from longbatch.bench.attention_inputs import Inputs, structured_inputs
from longbatch.bench.attention_rivals import BLOCK, FlexPrefill, MInference
from longbatch.bench.vs_workload import slash, vertical
from longbatch.timing import median_seconds

# (q [N, H, D], k, v [N, Hkv, D], scale) -> [N, H, D].
Dense = Callable[[Tensor, Tensor, Tensor, float], Tensor]

OWN_DENSE = "longbatch, dense"
CHECKED_ROWS = 8
# Beyond this length dense attention warms up on so many tokens: a whole layer takes seconds, and all of it is timed.
LONGEST_WARM_UP = 1 << 17


@dataclass(frozen=True, slots=True)
class OtherTimes:
    """Seconds for all heads or layers of the model. density: share of the causal area that is executed, blocks counted
    whole; None where that is not known. error: relative RMS against float64 over the keys that it was to see."""

    estimate: float
    index: float
    attention: float
    error: float
    holds: bool
    density: float | None = None

    @property
    def total(self) -> float:
        return self.estimate + self.index + self.attention


def dense_kernels(device: torch.device) -> dict[str, Dense]:
    """Causal dense attention by name. longbatch's own kernel is among them, and FlashAttention-3 where its package is;
    these two run as the engine runs them."""
    if device.type != "cuda":
        return {"torch SDPA": _torch_sdpa}
    found = {"cuDNN SDPA": _cudnn, OWN_DENSE: engine_dense(OWN)}
    if has_flash_3():
        found[FLASH_3] = engine_dense(FLASH_3)
    return found


def engine_dense(name: str) -> Dense:
    """One of the engine's kernels over a whole prompt. What it makes ready for all layers is kept, and is no part of a
    layer's time."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        work = _whole_prompt(q.shape[0], q.shape[1:], k.shape[1:], q.dtype, q.device)
        return attend_tile(name, q, work, lambda reads: (k, v), scale=scale).out

    return run


@lru_cache(maxsize=2)
def _whole_prompt(length: int, *alike: Hashable) -> TileWork:
    """One for all tensors that are alike."""
    tile = Tile((Piece(Segment(0, 0, length), 0, length),))
    return TileWork.of(tile, None, exact_pages=False, dense=lambda piece: True)


def measure_dense(kernel: Dense, inputs: Inputs, num_layers: int, repeats: int) -> OtherTimes:
    """Dense attention of `num_layers` equal layers; one is timed."""
    q, k, v = inputs.q, inputs.k, inputs.v
    check, outs = Check(MOST_ERROR), [q]

    def work() -> None:
        outs[0] = kernel(q, k, v, inputs.scale)

    short = inputs.length > LONGEST_WARM_UP
    if short:
        # It still runs while the host gets the timed one ready, whose time that does not count then.
        kernel(q[:LONGEST_WARM_UP], k[:LONGEST_WARM_UP], v[:LONGEST_WARM_UP], inputs.scale)
    seconds = median_seconds(work, q.device, repeats=repeats, warmups=0 if short else 1)
    out = outs[0]

    def keys_before(row: int) -> Tensor:
        return torch.arange(row + 1, device=q.device)

    for number, row in enumerate(sampled_blocks(inputs.length, CHECKED_ROWS, 1, block=1)):
        head = number % q.shape[1]
        kv_head = head // inputs.group
        check_rows(check, q[:, head], k[:, kv_head], v[:, kv_head], out[:, head], keys_before, [row], inputs.scale)
    return OtherTimes(0.0, 0.0, seconds * num_layers, check.error, check.holds, 1.0)


def measure_minference(
    rival: MInference, inputs: Inputs, heads: Mapping[tuple[int, int], int], repeats: int
) -> tuple[OtherTimes, dict[tuple[int, int], OtherTimes]]:
    """All heads of the mix, and one head of each class. heads: how many of each (vertical, slash) there are."""
    device, length = inputs.q.device, inputs.length
    q, k, v = (part[:, 0].contiguous()[None, None] for part in (inputs.q, inputs.k, inputs.v))
    classes = {}
    for budget in heads:
        columns = torch.from_numpy(vertical(length, budget[0])).to(device)
        distances = torch.from_numpy(slash(length, budget[1])).to(device)
        estimate = median_seconds(lambda: rival.estimate(q, k, *budget), device, repeats=repeats)  # noqa: B023
        making = median_seconds(lambda: rival.index(columns, distances, length), device, repeats=repeats)  # noqa: B023
        index = rival.index(columns, distances, length)
        attention = median_seconds(lambda: rival.attend(q, k, v, index), device, repeats=repeats)  # noqa: B023
        out, check = rival.attend(q, k, v, index), Check(MOST_RIVAL_ERROR)
        check_rows(
            check,
            q[0, 0],
            k[0, 0],
            v[0, 0],
            out[0, 0],
            lambda row: rival.keys_of_row(index, row),  # noqa: B023
            sampled_blocks(length, CHECKED_ROWS, 2, block=1),
            inputs.scale,
        )
        classes[budget] = OtherTimes(estimate, making, attention, check.error, check.holds)
    return _summed(classes, heads), classes


def measure_flex_blocks(
    rival: FlexPrefill, inputs: Inputs, heads: Mapping[tuple[int, int], int], repeats: int
) -> OtherTimes:
    """FlexPrefill's kernel on the workload in its own blocks, one K/V group of equal heads at a time."""
    device, length, group = inputs.q.device, inputs.length, inputs.group
    one = Inputs(inputs.q[:, :group].contiguous(), inputs.k[:, :1].contiguous(), inputs.v[:, :1].contiguous())
    classes = {}
    for budget in heads:
        blocks = rival.blocks(vertical(length, budget[0]), slash(length, budget[1]), length, device)
        classes[budget] = _flex_times(rival, one, [[blocks] * group], repeats)
    return _summed(classes, {budget: count / group for budget, count in heads.items()})


def measure_flex(rival: FlexPrefill, inputs: Inputs, num_heads: int, repeats: int) -> OtherTimes:
    """The whole of FlexPrefill by its own choice, on structured queries and keys, one K/V group at a time; `num_heads`
    heads in all."""
    group = inputs.group
    own = structured_inputs(inputs.length, group, inputs.q.shape[-1], inputs.q.dtype, inputs.q.device)
    q, k, v = own.q[None], own.k[None], own.v[None]
    estimate = median_seconds(lambda: rival.estimate(q, k, v), q.device, repeats=repeats)
    one = _flex_times(rival, own, rival.estimate(q, k, v), repeats)
    whole = OtherTimes(estimate, 0.0, one.attention, one.error, one.holds, one.density)
    return _summed({(0, 0): whole}, {(0, 0): num_heads / group})


def _flex_times(rival: FlexPrefill, inputs: Inputs, blocks: list[list[Tensor]], repeats: int) -> OtherTimes:
    q, k, v = inputs.q[None], inputs.k[None], inputs.v[None]
    device, num_blocks = q.device, -(-inputs.length // BLOCK)
    seconds = median_seconds(lambda: rival.attend(q, k, v, blocks), device, repeats=repeats)
    out, check = rival.attend(q, k, v, blocks), Check(MOST_RIVAL_ERROR)
    own = blocks[0][0]

    def keys_of(row: int) -> Tensor:
        chosen = own[own // num_blocks == row // BLOCK] % num_blocks
        keys = (chosen[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()
        return keys[keys <= row]

    rows = sampled_blocks(inputs.length, CHECKED_ROWS, 3, block=1)
    check_rows(check, q[0, :, 0], k[0, :, 0], v[0, :, 0], out[0, :, 0], keys_of, rows, inputs.scale)
    density = sum(len(one) for one in blocks[0]) / len(blocks[0]) / (num_blocks * (num_blocks + 1) / 2)
    return OtherTimes(0.0, 0.0, seconds, check.error, check.holds, density)


def _summed(classes: Mapping[tuple[int, int], OtherTimes], counts: Mapping[tuple[int, int], float]) -> OtherTimes:
    """Each class as often as it occurs; the density is the mean over heads."""

    def total(name: str) -> float:
        return float(sum(getattr(times, name) * counts[budget] for budget, times in classes.items()))

    known = all(times.density is not None for times in classes.values())
    return OtherTimes(
        total("estimate"),
        total("index"),
        total("attention"),
        max(times.error for times in classes.values()),
        all(times.holds for times in classes.values()),
        total("density") / sum(counts.values()) if known else None,
    )


def _torch_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return cudnn(q, k, v, scale=scale, causal=True).out
