"""Engines whose K/V are stored in fewer bits: what is stored and read where, and how far answers are from exact."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import new_cache, new_engine, random_ids, request, run_rows, tiny_decoder, word_tokenizer
from run_folders import results, run, settings_of, tiny_model, words, write_manifest

from longbatch.attention import DecodeStep, decode_attention
from longbatch.cache import Blocks, KVCache, Stretch, Writes
from longbatch.config.kv_formats import KV_DTYPES, kv_format
from longbatch.core import Prompt, Request, Result
from longbatch.engine import Spill
from longbatch.errors import ExitCode, UsageError
from longbatch.models.decoder import Decoder
from longbatch.prompt import Tokenizer
from longbatch.run import make_plan

__all__ = ["tiny_model"]

Row = tuple[Request, Prompt]
CPU = torch.device("cpu")
STORED = ["bf16", "fp8"]
# Largest mean distance of a log-probability from the exact one; tiny random models round far worse than trained ones.
MEAN_GAP = {"bf16": 0.005, "fp8": 0.06}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    made: dict[str, Decoder] = {}

    def get(case: str) -> Decoder:
        if case not in made:
            made[case] = tiny_decoder(tmp_path_factory.mktemp(case), case)
        return made[case]

    return get


@pytest.fixture
def model(models: Callable[[str], Decoder]) -> Decoder:
    return models("llama")


def generate(row: int, length: int, **fields: Any) -> Row:
    return request(row, **{"logprobs": 0, **fields}), Prompt(random_ids(length, row))


def score(row: int, length: int, seed: int | None = None) -> Row:
    ids = random_ids(length, row if seed is None else seed)
    return request(row, "score"), Prompt(ids, scored=(1, length))


def numbers(result: Result) -> np.ndarray:
    assert result.error is None, result.error
    return np.array([entry.logprob for entry in result.logprobs or ()])


def ids_of(result: Result) -> list[int]:
    return [entry.id for entry in result.logprobs or ()]


# ------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bytes_are_those_that_the_plan_counts(kv: str, dtype: str) -> None:
    described = kv_format(kv, dtype)
    made: list[int] = []
    for num_pages in (3, 5):
        cache = KVCache([(2, 16), (1, 8)], num_pages, dtype=getattr(torch, dtype), device=CPU, kv=described, num_open=7)
        made.append(cache.num_bytes)
    entries, heads = 2 * (2 * 16 + 8), 2 * (2 + 1)
    page = 64 * entries * described.entry_bytes + heads * described.block_bytes
    assert made[1] - made[0] == 2 * page
    # One of both more than are handed out.
    open_bytes = 8 * 64 * entries * getattr(torch, dtype).itemsize if described.has_open else 0
    assert made[0] == 4 * page + open_bytes


def filled(kv: str, length: int, table: list[int], open_block: int | None = 1) -> tuple[KVCache, torch.Tensor]:
    """A cache with one sequence of random K and V = 10 K; everything else in it is NaN or of a NaN scale."""
    cache = KVCache([(2, 8)], 6, dtype=torch.float32, device=CPU, kv=kv_format(kv, "float32"), num_open=3)
    for tensor in (*cache.keys[0], *cache.values[0], *cache.open_keys, *cache.open_values):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    k = torch.randn(length + 9, 2, 8)
    pages = np.array(table, dtype=np.int32)
    stretch = Stretch(9, 0, length, pages, open_block)
    writes = Writes.of([stretch], length + 9, CPU, has_open=cache.kv.has_open)
    assert writes is not None
    cache.write(0, writes, k, 10 * k)
    return cache, k[9:]


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("table", [[2, 3, 4], [4, 0, 3]], ids=["run", "scattered"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 150, 192])
def test_what_was_written_is_read(kv: str, table: list[int], length: int) -> None:
    cache, k = filled(kv, length, table)
    pages = np.array(table, dtype=np.int32)
    whole = length // 64 * 64
    precision = {"auto": 0.0, "bf16": 2**-8, "fp8": 2**-4}[kv]
    for start in {0, length - 1, max(0, length - 70)}:
        found_k, found_v = cache.read(0, pages, start, length, 1)
        assert found_k.dtype == torch.float32
        torch.testing.assert_close(found_k, k[start:], rtol=precision, atol=precision / 8)
        torch.testing.assert_close(found_v, 10 * k[start:], rtol=precision, atol=precision)
        if kv == "fp8":
            assert torch.equal(found_k[max(0, whole - start) :], k[max(start, whole) :]), "the open block is exact"
            assert whole <= start or not torch.equal(found_k[: whole - start], k[start:whole])


@pytest.mark.parametrize("kv", STORED)
def test_what_is_stored_can_be_put_elsewhere(kv: str) -> None:
    cache, _ = filled(kv, 128, [2, 3])
    stored = cache.stored(0, np.array([2, 3]), 0, 128)
    described = cache.described(0, np.array([2, 3]), 0, 128)
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()] == described
    other = KVCache([(2, 8)], 9, dtype=torch.float32, device=CPU, kv=cache.kv, num_open=1)
    other.restore(0, np.array([8, 1]), 0, 128, stored)
    for one, two in zip(other.read(0, np.array([8, 1]), 0, 128), cache.read(0, np.array([2, 3]), 0, 128), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(KeyError):
        other.restore(0, np.array([8, 1]), 0, 128, {"key.0": stored["key.0"]})
    with pytest.raises(ValueError, match="another form"):
        other.restore(0, np.array([8]), 0, 64, stored)


def test_parts_of_pages_are_not_stored_alone() -> None:
    cache, _ = filled("fp8", 128, [2, 3])
    for start, stop in ((0, 100), (10, 128)):
        with pytest.raises(ValueError, match="whole pages"):
            cache.stored(0, np.array([2, 3]), start, stop)


def test_an_open_block_that_is_full_becomes_a_page() -> None:
    """Token by token as in decode, and all at once as in prefill: the same bits."""
    expected, k = filled("fp8", 128, [2, 3])
    cache, _ = filled("fp8", 64, [2, 3])
    cache.write(0, Writes(torch.arange(0), blocks=Blocks(torch.tensor([0]), torch.tensor([2]))), k, 10 * k)
    for position in range(64, 128):
        full = Blocks(torch.tensor([64]), torch.tensor([3])) if position == 127 else None
        row = k[position : position + 1]
        cache.write(0, Writes(torch.tensor([64 + position % 64]), filled=full), row, 10 * row)
        read, _ = cache.read(0, np.array([2, 3]), 0, position + 1, 1)
        assert torch.equal(read[64:], k[64 : position + 1]) is (position < 127)
    for one, two in zip((*cache.keys[0], *cache.values[0]), (*expected.keys[0], *expected.values[0]), strict=True):
        rows = slice(128, 256) if len(one) > 6 else slice(2, 4)
        assert torch.equal(one[rows], two[rows])


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("length", [1, 64, 150])
def test_decode_reads_pages_and_the_open_block(length: int, window: int | None, softcap: float | None) -> None:
    cache, _ = filled("fp8", length, [4, 0, 3])
    pages = np.array([4, 0, 3])
    k, v = cache.read(0, pages, 0, length, 1)
    plain = KVCache([(2, 8)], 3, dtype=torch.float32, device=CPU)
    plain.write(0, Writes(torch.arange(length)), k, v)
    q = torch.randn(1, 4, 8)
    more: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": torch.tensor([0.1, 2, -1, 0])}
    expected = decode_attention(q, plain, 0, DecodeStep(length, (np.arange(3),), (length,)), **more)
    found = decode_attention(q, cache, 0, DecodeStep(length, (pages,), (length,), (1,)), **more)
    torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------------------------- the engine


def rows_of_all_tasks() -> list[Row]:
    labels = [random_ids(3, 60), random_ids(90, 61)]
    return [
        *(generate(i, n, max_tokens=m) for i, (n, m) in enumerate([(1, 70), (63, 3), (64, 66), (65, 1), (130, 100)])),
        score(5, 200),
        (request(6, "embed", pooling="mean"), Prompt(random_ids(100, 6))),
        (request(7, "classify", labels=("a", "b")), Prompt(random_ids(150, 7), branches=tuple(labels))),
    ]


@pytest.mark.parametrize("kv", STORED)
@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt_oss", "qwen2-window"])
def test_every_task_is_near_the_exact_answer(
    models: Callable[[str], Decoder], tokenizer: Tokenizer, kv: str, case: str
) -> None:
    model = models(case)
    rows = rows_of_all_tasks()
    expected = run_rows(new_engine(model, tokenizer), rows)
    found = run_rows(new_engine(model, tokenizer, kv=kv), rows)
    for key, result in found.items():
        exact = expected[key]
        if result.row < 5:
            # Until the two part, which a tie of a random model does.
            same = next((i for i, (a, b) in enumerate(zip(ids_of(result), ids_of(exact), strict=True)) if a != b), 999)
            assert same >= 1
            assert np.abs(numbers(result)[:same] - numbers(exact)[:same]).mean() < MEAN_GAP[kv]
        elif result.row == 6:
            assert result.embedding is not None
            np.testing.assert_array_equal(result.embedding, exact.embedding)
        else:
            np.testing.assert_allclose(numbers(result), numbers(exact), atol=1e-6)
    assert any(not np.array_equal(numbers(found[key]), numbers(expected[key])) for key in found if key.row != 6)


@pytest.mark.parametrize("kv", STORED)
@pytest.mark.parametrize(
    "limits", [{"num_pages": 7}, {"decode_rows": 2}, {"decode_rows": 1}, {"step_tokens": 64}], ids=str
)
def test_rows_do_not_depend_on_their_neighbours(
    model: Decoder, tokenizer: Tokenizer, kv: str, limits: dict[str, int]
) -> None:
    rows = [generate(i, n, max_tokens=m) for i, (n, m) in enumerate([(1, 70), (63, 3), (64, 66), (65, 5), (130, 80)])]
    alone: dict[Any, Result] = {}
    for row in rows:
        chunk = {"step_tokens": 64} if "step_tokens" in limits else {}
        alone |= run_rows(new_engine(model, tokenizer, kv=kv, **chunk), [row])
    together = run_rows(new_engine(model, tokenizer, kv=kv, **limits), rows)
    for key, result in together.items():
        assert result.logprobs == alone[key].logprobs


@pytest.mark.parametrize("kv", STORED)
@pytest.mark.parametrize("step_tokens", [64, 128, 100])
def test_chunks_see_what_is_stored(model: Decoder, tokenizer: Tokenizer, kv: str, step_tokens: int) -> None:
    row = score(0, 500)
    (exact,) = run_rows(new_engine(model, tokenizer), [row]).values()
    (found,) = run_rows(new_engine(model, tokenizer, kv=kv, step_tokens=step_tokens), [row]).values()
    first = step_tokens // 64 * 64 - 1
    np.testing.assert_allclose(numbers(found)[:first], numbers(exact)[:first], atol=1e-5)
    rest = np.abs(numbers(found)[first + 1 :] - numbers(exact)[first + 1 :])
    assert 1e-4 < rest.mean() < MEAN_GAP[kv]
    assert (rest > 0).mean() > 0.9


def test_tiles_that_are_no_pages_are_cut_where_both_end(model: Decoder, tokenizer: Tokenizer) -> None:
    limits = {"kv": "fp8", "tile_rows": 96}
    (found,) = run_rows(new_engine(model, tokenizer, step_tokens=200, **limits), [score(0, 700)]).values()
    (exact,) = run_rows(new_engine(model, tokenizer), [score(0, 700)]).values()
    gaps = np.abs(numbers(found) - numbers(exact))
    assert gaps[:191].max() < 1e-5
    assert 1e-4 < gaps[192:].mean() < MEAN_GAP["fp8"]


def test_a_shared_beginning_is_stored_once(model: Decoder, tokenizer: Tokenizer) -> None:
    beginning = random_ids(200, 0)
    rows = []
    for i in range(3):
        ids = np.concatenate([beginning, random_ids(5 + i, i + 1)])
        rows.append((request(i, logprobs=0, max_tokens=70), Prompt(ids)))
    found = run_rows(new_engine(model, tokenizer, kv="fp8"), rows)
    assert sum(result.usage.cached_tokens for result in found.values()) == 2 * 192
    alone = [run_rows(new_engine(model, tokenizer, kv="fp8"), [row]) for row in rows]
    for one in alone:
        for key, result in one.items():
            assert found[key].logprobs == result.logprobs


def test_labels_behind_chunks(model: Decoder, tokenizer: Tokenizer) -> None:
    labels = tuple(random_ids(n, 60 + n) for n in (3, 90, 64, 65, 10))
    row = request(0, "classify", labels=tuple("abcde")), Prompt(random_ids(300, 7), branches=labels)
    (exact,) = run_rows(new_engine(model, tokenizer), [row]).values()
    (found,) = run_rows(new_engine(model, tokenizer, kv="fp8", step_tokens=64), [row]).values()
    per_token = np.abs(numbers(found) - numbers(exact)) / np.array([len(label) for label in labels])
    assert (per_token > 0).all()
    assert per_token.max() < MEAN_GAP["fp8"]


@pytest.mark.parametrize("kv", STORED)
@pytest.mark.parametrize("task", ["generate", "score"])
def test_a_resumed_row_gives_the_same_bits(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, kv: str, task: str
) -> None:
    row = generate(0, 500, max_tokens=80) if task == "generate" else score(0, 500)
    limits = {"kv": kv, "step_tokens": 128}
    (expected,) = run_rows(new_engine(model, tokenizer, **limits), [row]).values()
    stopped = new_engine(model, tokenizer, **limits)
    stopped.spill = Spill(tmp_path, "model")
    asked = iter([False, False, True])
    assert list(stopped.run([[row]], lambda: next(asked))) == []
    assert stopped.cache.pool.num_free_open == stopped.cache.pool.num_open
    resumed = new_engine(model, tokenizer, **limits)
    resumed.spill = Spill(tmp_path, "model")
    (found,) = run_rows(resumed, [row]).values()
    assert found.notes == ["resumed at token 256"]
    assert found.logprobs == expected.logprobs
    other = new_engine(model, tokenizer, step_tokens=128)
    other.spill = Spill(tmp_path, "model")
    (result,) = run_rows(other, [row]).values()
    assert result.notes == [], "what another format stored is of no use"


def test_open_blocks_are_few(model: Decoder) -> None:
    pool = new_cache(model, kv="fp8", num_open=2).pool
    blocks = [pool.take_open(), pool.take_open()]
    assert sorted(block for block in blocks if block is not None) == [0, 1]
    with pytest.raises(MemoryError, match="all 2 open blocks"):
        pool.take_open()
    pool.give_open(1)
    assert pool.num_free_open == 1
    for wrong in (1, 2, -1):
        with pytest.raises(ValueError, match="nobody holds"):
            pool.give_open(wrong)
    assert new_cache(model, num_open=2).pool.take_open() is None


# ------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("kv", STORED)
def test_a_run_stores_what_it_is_told_and_keeps_to_it(tmp_path: Path, tiny_model: Path, kv: str) -> None:
    rows = [{"id": f"r{i}", "prompt": words(n, i), "max_tokens": 70} for i, n in enumerate((5, 64, 130))]
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "out"
    view = make_plan(settings_of(tiny_model, out, kv_dtype=kv, limit=1), [str(manifest)])
    assert view.kv_dtype == {"bf16": "bfloat16", "fp8": "fp8"}[kv]
    assert ("open K/V blocks" in dict(view.plan.budget.parts)) is (kv == "fp8")
    assert run(manifest, tiny_model, out, kv_dtype=kv, limit=1) is ExitCode.OK
    for other in KV_DTYPES:
        if other != kv:
            with pytest.raises(UsageError, match="kv_dtype"):
                run(manifest, tiny_model, out, kv_dtype=other)
    assert run(manifest, tiny_model, out, kv_dtype=kv) is ExitCode.OK
    assert [row["usage"]["completion_tokens"] for row in results(out)] == [70] * 3


def test_the_same_format_by_another_name_is_the_same_run(tmp_path: Path, tiny_model: Path) -> None:
    manifest, out = write_manifest(tmp_path / "manifest.jsonl", [{"id": "a", "prompt": words(5)}]), tmp_path / "out"
    assert run(manifest, tiny_model, out, dtype="bfloat16") is ExitCode.OK
    assert run(manifest, tiny_model, out, dtype="bfloat16", kv_dtype="bf16") is ExitCode.OK


def test_pages_need_no_triton(uninstalled_environment: dict[str, str]) -> None:
    """On a CPU, whose torch may have none."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from longbatch_kernels import kv_fp8, kv_plain\n"
        "x, at = torch.randn(64, 2, 8), torch.tensor([0])\n"
        "for kv in (kv_fp8, kv_plain):\n"
        "    pool = tuple(torch.zeros(shape, dtype=kind) for shape, kind in kv.tensors(1, 2, 8, torch.float32))\n"
        "    kv.quantize(x, at, pool, at)\n"
        "    assert (kv.dequantize_ref(pool, at, torch.float32) - x).abs().max() < 0.3\n"
    )
    subprocess.run([sys.executable, "-c", program], env=uninstalled_environment, check=True, timeout=120)
