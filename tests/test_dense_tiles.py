"""Dense attention of a tile at once against its pieces one by one: where keys lie, windows, sinks, and whole models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rows import new_cache, new_engine, random_ids, request, run_rows, tiny_decoder, word_tokenizer
from sparse_engines import MIXED, logprobs, score, sparse_engine
from torch import Tensor

pytest.importorskip("triton")
from longbatch.attention import DenseKernels, Extent, Piece, Segment, Tile, attend
from longbatch.attention.choice import FLASH_2, FLASH_3, OWN, TORCH, DenseChoice, has_flash_3, shapes_of
from longbatch.attention.kernels import attend_tile, packed_kernels
from longbatch.attention.packed import Part, Read, TileWork
from longbatch.attention.state import with_sinks
from longbatch.cache import KVCache, Writes
from longbatch.cache.pages import pages_for
from longbatch.core import Prompt
from longbatch.engine.packing import Branch, Family, pack
from longbatch.engine.prefill import prefill
from longbatch.models.decoder import Decoder

GPU = pytest.mark.gpu
NEEDS_FLASH_3 = pytest.mark.skipif(not has_flash_3(), reason="flash_attn_interface is not installed")
KERNELS = [
    pytest.param(OWN, "cpu", torch.float32, 1e-5, id="longbatch-cpu"),
    pytest.param(OWN, "cuda", torch.bfloat16, 8e-3, id="longbatch", marks=GPU),
    pytest.param(FLASH_2, "cuda", torch.bfloat16, 8e-3, id="flash-2", marks=GPU),
    pytest.param(FLASH_3, "cuda", torch.bfloat16, 8e-3, id="flash-3", marks=[GPU, NEEDS_FLASH_3]),
]
# Pages that are neither consecutive nor in order, and some that are.
SCATTERED, CONSECUTIVE = np.array([7, 2, 4], dtype=np.int32), np.array([9, 10, 11, 12], dtype=np.int32)


class Memory:
    """K and V of a step and of pages; each page extent is filled with its own random numbers."""

    def __init__(self, num_tokens: int, kv_heads: int, dim: int, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def noise(rows: int) -> Tensor:
            return torch.randn(rows, kv_heads, dim, generator=generator).to(device, dtype)

        self.k, self.v = noise(num_tokens), noise(num_tokens)
        self.cache = KVCache([(kv_heads, dim)], 16, dtype=dtype, device=torch.device(device))
        self.cache.write(0, Writes(torch.arange(16 * 64, device=device)), noise(16 * 64), noise(16 * 64))

    def store(self, segment: Segment, pages: np.ndarray) -> None:
        """The segment's own K and V, as the engine does before it attends."""
        positions = np.arange(segment.offset, segment.stop)
        slots = torch.from_numpy(pages[positions // 64].astype(np.int64) * 64 + positions % 64).to(self.k.device)
        rows = slice(segment.base, segment.base + segment.length)
        self.cache.write(0, Writes(slots), self.k[rows], self.v[rows])

    def read(self, extent: Extent, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if extent.base is None:
            assert extent.pages is not None
            return self.cache.read(0, extent.pages, start, stop)
        rows = slice(extent.base + start - extent.start, extent.base + stop - extent.start)
        return self.k[rows], self.v[rows]

    def reads(self, reads: tuple[Read, ...]) -> tuple[Tensor, Tensor]:
        if not reads:
            return self.k, self.v
        parts = [self.read(*read) for read in reads]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])


def mixed_tile() -> tuple[Tile, list[tuple[Segment, np.ndarray]]]:
    """Whole prompts, the middle of one, a chunk whose pages hold all, a chunk whose pages do not, and a beginning of
    this step with two branches, one of which has an earlier chunk in pages too; and what is stored."""
    whole, middle, short = Segment(0, 0, 70), Segment(70, 0, 200), Segment(270, 0, 3)
    chunk = Segment(273, 150, 90, (Extent(0, 150, pages=CONSECUTIVE),))
    scattered = Segment(363, 130, 62, (Extent(0, 130, pages=SCATTERED),))
    apart = Segment(425, 100, 30, (Extent(0, 100, pages=SCATTERED[:2]),))
    trunk = Segment(455, 0, 64)
    branch = Segment(519, 64, 40, (Extent(0, 64, base=455),))
    later = Segment(559, 100, 21, (Extent(0, 64, base=455), Extent(64, 100, pages=CONSECUTIVE)))
    tile = Tile(
        (
            Piece(whole, 0, 70),
            Piece(middle, 90, 170),
            Piece(short, 0, 3),
            Piece(chunk, 160, 240),
            Piece(scattered, 130, 192),
            Piece(apart, 100, 130),
            Piece(trunk, 0, 64),
            Piece(branch, 64, 104),
            Piece(later, 100, 121),
        )
    )
    return tile, [(chunk, CONSECUTIVE), (scattered, SCATTERED)]


def by_pieces(q: Tensor, tile: Tile, memory: Memory, window: int | None, sinks: Tensor | None) -> Tensor:
    outs, low = [], 0
    for piece in tile.pieces:
        high = low + piece.stop - piece.start
        outs.append(attend(q[low:high], piece, memory.read, scale=0.125, window=window, sinks=sinks))
        low = high
    return torch.cat(outs)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("kernel", "device", "dtype", "tolerance"), KERNELS)
@pytest.mark.parametrize("exact_pages", [False, True])
@pytest.mark.parametrize("window", [None, 20, 60, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 32)])
def test_equals_its_pieces(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    exact_pages: bool,
    kernel: str,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    tile, stored = mixed_tile()
    memory = Memory(580, kv_heads, dim, device, dtype)
    for segment, pages in stored:
        memory.store(segment, pages)
    q = torch.randn(tile.num_rows, heads, dim, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    sinks = torch.linspace(-1, 2, heads, device=device)
    work = TileWork.of(tile, window, exact_pages=exact_pages, dense=lambda piece: True)
    for _ in range(2):
        found = with_sinks(attend_tile(kernel, q, work, memory.reads, scale=0.125), sinks)
        assert relative(found, by_pieces(q, tile, memory, window, sinks)) <= tolerance
        # What was prepared serves other numbers too.
        q = q.flip(0).contiguous()


@pytest.mark.parametrize(("kernel", "device", "dtype", "tolerance"), KERNELS)
def test_pieces_that_are_left_out_change_nothing(
    kernel: str, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Those of sparse segments; the rows of the others are what they are in a tile of their own."""
    tile, stored = mixed_tile()
    memory = Memory(580, 2, 64, device, dtype)
    for segment, pages in stored:
        memory.store(segment, pages)
    q = torch.randn(tile.num_rows, 4, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    kept = [place in (1, 2, 5, 7) for place in range(len(tile.pieces))]
    work = TileWork.of(tile, None, exact_pages=True, dense=lambda piece: kept[tile.pieces.index(piece)])
    found = attend_tile(kernel, q, work, memory.reads, scale=0.125)
    expected, low = by_pieces(q, tile, memory, None, None), 0
    for piece, wanted in zip(tile.pieces, kept, strict=True):
        rows = slice(low, low + piece.stop - piece.start)
        low = rows.stop
        if wanted:
            assert relative(found.out[rows], expected[rows]) <= tolerance


def test_prompts_of_a_step_are_one_batch() -> None:
    """As many launches as there are places where keys lie, for however many pieces."""
    segments = [Segment(50 * number, 0, 50) for number in range(20)]
    work = TileWork.of(tile_of(segments), None, exact_pages=True, dense=lambda piece: True)
    assert work.before == ()
    assert [(batch.reads, len(batch.parts)) for batch in work.own] == [((), 20)]
    assert (work.num_queries, work.num_keys) == (50, 50)


def test_branches_of_one_beginning_are_two_batches() -> None:
    context = (Extent(0, 640, pages=np.arange(10, dtype=np.int32)),)
    segments = [Segment(30 * number, 640, 30, context) for number in range(5)]
    work = TileWork.of(tile_of(segments), None, exact_pages=True, dense=lambda piece: True)
    assert [(batch.causal, batch.reads, len(batch.parts)) for batch in work.before] == [
        (False, (Read(context[0], 0, 640),), 5)
    ]
    assert [(batch.causal, batch.reads, len(batch.parts)) for batch in work.own] == [(True, (), 5)]
    assert (work.num_queries, work.num_keys) == (30, 670)
    # Behind a window of 20 the keys of some queries lie in both.
    work = TileWork.of(tile_of(segments), 20, exact_pages=True, dense=lambda piece: True)
    assert (work.before, len(work.own)) == ((), 1)
    assert sum(stop - start for _, start, stop in work.own[0].reads) == 5 * (19 + 30)


def test_a_chunk_in_its_pages_is_one_batch() -> None:
    pages = np.arange(20, 40, dtype=np.int32)
    segment = Segment(0, 640, 300, (Extent(0, 640, pages=pages),))
    work = TileWork.of(Tile((Piece(segment, 700, 900),)), None, exact_pages=True, dense=lambda piece: True)
    ((read,),) = (batch.reads for batch in work.own)
    assert (work.before, read.start, read.stop) == ((), 0, 940)
    assert work.own[0].parts == (Part(0, 200, 700, 0, 940),)
    rounded = TileWork.of(Tile((Piece(segment, 700, 900),)), None, exact_pages=False, dense=lambda piece: True)
    assert (len(rounded.before), rounded.own[0].reads) == (1, ())


def test_a_window_that_no_prompt_outgrows_is_none() -> None:
    tile = tile_of([Segment(0, 0, 50), Segment(50, 0, 64)])
    assert TileWork.of(tile, 64, exact_pages=True, dense=lambda piece: True).window is None
    assert TileWork.of(tile, 63, exact_pages=True, dense=lambda piece: True).window == 63


def tile_of(segments: list[Segment]) -> Tile:
    return Tile(tuple(Piece(segment, segment.offset, segment.stop) for segment in segments))


# ------------------------------------------------------------------------------------------ whole models


def always(model: Decoder, kernel: str) -> DenseKernels:
    """The same kernel for every tile."""
    points = ((100, 100),)
    seconds = {TORCH: (2.0,), kernel: (1.0,)}
    return DenseKernels({shape: DenseChoice(points, seconds) for shape in shapes_of(model.spec.layers)})


def hidden_of(model: Decoder, dense: DenseKernels | None, step_tokens: int, tile_rows: int) -> Tensor:
    """Hidden states that a short row, a long one, and branches of a beginning read, in order."""
    cache = new_cache(model)
    branches = [Branch(owner, random_ids(40 + owner, owner), ((192, 232 + owner),), 300) for owner in (1, 2)]
    families = [
        Family([Branch(0, random_ids(30, 5), ((29, 30),), 300)]),
        Family([Branch(3, random_ids(270, 6), ((100, 120), (260, 270)), 300)]),
        Family(branches, random_ids(192, 7)),
    ]
    for family in families:
        if len(family.trunk):
            family.trunk_pages = cache.pool.allocate(pages_for(len(family.trunk)))
        for branch in family.branches:
            own = cache.pool.allocate(pages_for(len(branch.ids)))
            branch.pages = own if family.trunk_pages is None else np.concatenate([family.trunk_pages, own])
    steps = pack(families, step_tokens=step_tokens, tile_rows=tile_rows, device=model.device, dense=dense)
    return torch.cat([prefill(model, cache, packed.step) for packed in steps])


@pytest.mark.parametrize("case", ["llama", "gemma3-scaled-capped", "gpt_oss", "qwen2-window"])
@pytest.mark.parametrize(("step_tokens", "tile_rows"), [(4096, 4096), (4096, 64), (128, 64)])
def test_a_model_gives_the_same(case: str, step_tokens: int, tile_rows: int, tmp_path: Path) -> None:
    """Windows, sinks and capped layers; in one tile, in many, and in chunks."""
    model = tiny_decoder(tmp_path, case)
    expected = hidden_of(model, None, step_tokens, tile_rows)
    found = hidden_of(model, always(model, OWN), step_tokens, tile_rows)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_a_tile_needs_is_made_once_for_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longbatch_kernels import dense_attention as module

    model, calls = tiny_decoder(tmp_path), []
    true_prepare: Callable[..., object] = module.prepare_dense

    def prepare(*arguments: object, **named: object) -> object:
        calls.append(1)
        return true_prepare(*arguments, **named)

    monkeypatch.setattr(module, "prepare_dense", prepare)
    family = Family([Branch(0, random_ids(200, 0), ((199, 200),), 200)])
    (packed,) = pack([family], step_tokens=512, tile_rows=64, device=model.device, dense=always(model, OWN))
    prefill(model, new_cache(model), packed.step)
    # Four tiles, and in the last layer the one that is read.
    assert len(calls) == math.ceil(200 / 64) + 1
    assert len(model.layers) > 1


def test_sparse_and_dense_rows_share_a_tile(tmp_path: Path) -> None:
    model, tokenizer = tiny_decoder(tmp_path / "model"), word_tokenizer(tmp_path / "tokenizer")
    rows = [score(i, length) for i, length in enumerate((40, 250, 30, 7))]
    rows.append((request(9), Prompt(random_ids(90, 9))))
    found = []
    for dense in (None, always(model, OWN)):
        engine = sparse_engine(model, tokenizer, *MIXED, min_length=200, tile_rows=512)
        engine.dense = dense
        found.append(run_rows(engine, rows))
    for key, result in found[0].items():
        other = found[1][key]
        np.testing.assert_allclose(logprobs(other), logprobs(result), atol=1e-4)
        assert (other.attention_mode, other.attention_density) == (result.attention_mode, result.attention_density)
        assert other.text == result.text


def test_float32_keeps_its_pieces(tmp_path: Path) -> None:
    """torch where it is the fastest: bit for bit as without a choice."""
    model, tokenizer = tiny_decoder(tmp_path / "model"), word_tokenizer(tmp_path / "tokenizer")
    rows = [score(i, length) for i, length in enumerate((40, 250, 30))]
    expected = run_rows(new_engine(model, tokenizer), rows)
    engine = new_engine(model, tokenizer)
    engine.dense = always(model, TORCH)
    for key, result in run_rows(engine, rows).items():
        assert result.logprobs == expected[key].logprobs


# ------------------------------------------------------------------------------------------ real sizes


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [OWN, FLASH_2, pytest.param(FLASH_3, marks=NEEDS_FLASH_3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (28, 4, 128), (64, 8, 64), (8, 8, 96), (16, 8, 256)]
)
def test_real_sizes(heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype, kernel: str) -> None:
    """A packed tile of 8,192 rows: prompts of many lengths, the end of one of 20,000 tokens, branches of another."""
    assert kernel in packed_kernels()
    lengths = [1, 17, 100, 128, 129, 1000, 2000]
    segments, base = [], 0
    for length in lengths:
        segments.append(Segment(base, 0, length))
        base += length
    long, trunk = Segment(base, 0, 20_000), base + 20_000
    branches = [Segment(trunk + 5000 + 100 * number, 5000, 100, (Extent(0, 5000, base=trunk),)) for number in range(20)]
    pieces = [Piece(segment, 0, segment.length) for segment in segments]
    pieces += [Piece(long, 18_000, 20_000), *(Piece(branch, 5000, 5100) for branch in branches)]
    tile = Tile(tuple(pieces))
    memory = Memory(trunk + 7000, kv_heads, dim, "cuda", dtype)
    q = torch.randn(tile.num_rows, heads, dim, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    work = TileWork.of(tile, window, exact_pages=True, dense=lambda piece: True)
    state, low = attend_tile(kernel, q, work, memory.reads, scale=dim**-0.5), 0
    memory.k, memory.v = memory.k.float(), memory.v.float()
    for piece in tile.pieces:
        rows = slice(low, low + piece.stop - piece.start)
        low = rows.stop
        # In float32, by torch, from the same numbers.
        wanted = attend(q[rows].float(), piece, memory.read, scale=dim**-0.5, window=window)
        assert relative(state.out[rows], wanted) <= (6e-3 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [OWN, FLASH_2, pytest.param(FLASH_3, marks=NEEDS_FLASH_3)])
def test_a_model_on_the_gpu_gives_the_same(kernel: str, tmp_path: Path) -> None:
    """In bfloat16, beside torch piece by piece: as near as two roundings of the same numbers are."""
    from test_models_gpu import pair

    for family in ("llama", "gemma3", "gpt_oss"):
        _, model = pair(family, torch.bfloat16)
        for step_tokens, tile_rows in ((4096, 4096), (4096, 64), (128, 64)):
            expected = hidden_of(model, None, step_tokens, tile_rows).float()
            found = hidden_of(model, always(model, kernel), step_tokens, tile_rows).float()
            error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
            # Routing to another expert may change single rows a lot; the typical row must not move.
            assert float(error.median()) < 0.02
