"""Spilled rows: killed in the middle they go on from their last whole chunk, and answer as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_rows import word_tokenizer
from run_folders import results, run, words, write_manifest
from safetensors.torch import load_file
from spilling_engine import CHUNK, answer, make_engine, row_of

from longbatch.engine import Engine
from longbatch.errors import ExitCode
from longbatch.prompt import Tokenizer

TASKS = ["generate", "score", "embed", "classify"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chunks(folder: Path) -> list[Path]:
    """The chunk files below a folder, in order."""
    return sorted(folder.glob("*/chunk-*.safetensors"), key=lambda path: int(path.stem.removeprefix("chunk-")))


def stop_after(engine: Engine, num_steps: int, row: Any) -> None:
    """Run a row for so many steps and drop it."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > num_steps

    assert list(engine.run([[row]], should_stop)) == []


# --------------------------------------------------------------------------------------- real kills


@pytest.mark.parametrize("task", TASKS)
def test_a_killed_row_goes_on(
    tmp_path: Path, tokenizer: Tokenizer, task: str, uninstalled_environment: dict[str, str], root: Path
) -> None:
    expected = answer(make_engine(tokenizer, None), row_of(task))
    assert expected["answer"]["status"] == "ok"
    command = [sys.executable, str(root / "tests" / "spilling_engine.py"), task, str(tmp_path / "spill")]
    environment = {**uninstalled_environment, "OMP_NUM_THREADS": "1"}
    known = 0
    for _ in range(2 if task == "generate" else 1):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while len(chunks(tmp_path / "spill")) < known + 10:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        known = len(chunks(tmp_path / "spill"))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["answer"] == expected["answer"]
    resumed = known * CHUNK
    assert resumed >= 10 * CHUNK
    assert found["prefilled"] == expected["prefilled"] - resumed
    assert found["cached"] == resumed
    assert found["notes"] == [f"resumed at token {resumed:,}"]


def test_a_killed_run_goes_on_inside_the_row(
    tmp_path: Path, uninstalled_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    monkeypatch.setitem(tiny_models.SIZES, "max_position_embeddings", 16384)
    tiny_models.save("llama", model)
    word_tokenizer(model)
    (model / "generation_config.json").unlink(missing_ok=True)
    rows = [{"id": "long", "prompt": words(12_000)}, {"id": "short", "prompt": words(5, 1)}]
    manifest, spill = write_manifest(tmp_path / "manifest.jsonl", rows), tmp_path / "spill"
    assert run(manifest, model, tmp_path / "expected", kv_tokens=16384) is ExitCode.OK
    command = [sys.executable, "-m", "longbatch", "run", str(manifest), "-o", str(tmp_path / "out")]
    flags = {"model": model, "spill": spill, "gpus": 0, "max-tokens": 4, "kv-tokens": 16384}
    # No chunk takes so short; each is one tile.
    flags["max-wave-seconds"] = 0.001
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(
        command, env=uninstalled_environment, stderr=subprocess.DEVNULL, start_new_session=True, cwd=tmp_path
    )
    deadline = time.monotonic() + 120
    while len(list(spill.glob("*/*/chunk-*"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    time.sleep(0.2)
    num_kept = len(list(spill.glob("*/*/chunk-*")))
    done = subprocess.run(command, env=uninstalled_environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.OK, done.stderr
    found, expected = results(tmp_path / "out"), results(tmp_path / "expected")
    assert [row["text"] for row in found] == [row["text"] for row in expected]
    assert found[0]["usage"]["cached_tokens"] >= num_kept * 512
    assert found[0]["notes"] == [f"resumed at token {found[0]['usage']['cached_tokens']:,}"]
    assert found[1]["notes"] is None
    assert list(spill.iterdir()) == [], "nothing is left of a finished run"


# ------------------------------------------------------------------------------------ what is kept


def test_what_is_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine, row = make_engine(tokenizer, tmp_path / "spill"), row_of("generate", 1000)
    expected = answer(engine, row)
    assert expected["notes"] == []
    files = chunks(tmp_path / "spill")
    assert [path.name for path in files] == [f"chunk-{number}.safetensors" for number in range(15)]
    tensors = load_file(files[3])
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        **{f"{kind}.{layer}": (CHUNK, 2, 8) for kind in ("key", "value") for layer in range(2)},
        "checksum": (4,),
    }
    assert os.stat(files[0].parent).st_mode & 0o777 == 0o700
    again = answer(engine, row)
    assert again["answer"] == expected["answer"]
    assert again["prefilled"] == 1000 - 15 * CHUNK, "the last chunk tells the answer, so it is always run"
    (result,) = engine.run([[row]])
    assert engine.spill is not None
    engine.spill.remove(engine.spill.folder_of(result))
    assert list((tmp_path / "spill").iterdir()) == []
    engine.spill.close()
    assert not (tmp_path / "spill").exists()


@pytest.mark.parametrize("length", [1, CHUNK])
def test_rows_of_one_chunk_leave_nothing(tmp_path: Path, tokenizer: Tokenizer, length: int) -> None:
    answer(make_engine(tokenizer, tmp_path / "spill"), row_of("generate", length))
    assert not (tmp_path / "spill").exists()


def test_other_chunks_than_before(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """What was kept in small chunks is good for larger ones, and the other way round."""
    row = row_of("score", 1000)
    expected = answer(make_engine(tokenizer, None), row)["answer"]
    for number, sizes in enumerate([(CHUNK, 4 * CHUNK), (4 * CHUNK, CHUNK)]):
        folder = tmp_path / str(number)
        stop_after(make_engine(tokenizer, folder, chunk_tokens=sizes[0]), 2, row)
        found = answer(make_engine(tokenizer, folder, chunk_tokens=sizes[1]), row)
        assert found["cached"] == 2 * sizes[0]
        for entry, other in zip(found["answer"]["logprobs"], expected["logprobs"], strict=True):
            assert entry[1] == pytest.approx(other[1], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_format(tmp_path: Path, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    """And scores without alternatives, whose lists are empty."""
    request, prompt = row_of("score", 1000)
    row = replace(request, sampling=replace(request.sampling, logprobs=None)), prompt
    expected = answer(make_engine(tokenizer, None, dtype=dtype), row)
    stop_after(make_engine(tokenizer, tmp_path, dtype=dtype), 6, row)
    found = answer(make_engine(tokenizer, tmp_path, dtype=dtype), row)
    assert found["answer"] == expected["answer"]
    assert found["cached"] == 6 * CHUNK


# ------------------------------------------------------------------------------ what cannot be used


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_in_header(path: Path) -> None:
    content = path.read_bytes()
    assert b'"stop": "256"' in content
    path.write_bytes(content.replace(b'"stop": "256"', b'"stop": "255"'))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def swap(path: Path) -> None:
    """Another chunk of the same row."""
    path.write_bytes((path.parent / "chunk-1.safetensors").read_bytes())


def lose(path: Path) -> None:
    path.unlink()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").touch()


@pytest.mark.parametrize(
    "damage", [truncate, empty, flip, flip_in_header, lengthen, swap, lose, replace_by_folder], ids=lambda d: d.__name__
)
def test_damaged_chunks(tmp_path: Path, tokenizer: Tokenizer, damage: Callable[[Path], None]) -> None:
    """Chunk 3 of 6 cannot be used: 0 to 2 are, and the rest is made again."""
    row = row_of("embed", 1000)
    expected = answer(make_engine(tokenizer, None), row)
    stop_after(make_engine(tokenizer, tmp_path), 6, row)
    files = chunks(tmp_path)
    assert len(files) == 6
    damage(files[3])
    (files[0].parent / ".chunk-6.safetensors.abcd.tmp").write_bytes(b"torn")
    seen: list[list[str]] = []
    engine = make_engine(tokenizer, tmp_path)

    def look() -> bool:
        seen.append(sorted(path.name for path in files[0].parent.iterdir()))
        return len(seen) == 1

    assert list(engine.run([[row]], look)) == []
    assert seen == [[f"chunk-{number}.safetensors" for number in range(3)]]
    found = answer(engine, row)
    assert found["answer"] == expected["answer"]
    assert found["cached"] == 3 * CHUNK
    assert found["prefilled"] == 1000 - 3 * CHUNK


@pytest.mark.parametrize("other", ["row", "model", "task", "dtype"])
def test_chunks_of_something_else(tmp_path: Path, tokenizer: Tokenizer, other: str) -> None:
    """The folder's name says that it is the row's, and yet its chunks are not."""
    row = row_of("generate", 1000)
    expected = answer(make_engine(tokenizer, None), row)
    stop_after(make_engine(tokenizer, tmp_path), 6, row)
    if other == "row":
        stop_after(make_engine(tokenizer, tmp_path / "other"), 6, row_of("generate", 1000, seed=1))
    elif other == "model":
        stop_after(make_engine(tokenizer, tmp_path / "other", model="another"), 6, row)
    elif other == "task":
        stop_after(make_engine(tokenizer, tmp_path / "other"), 6, row_of("score", 1000))
    else:
        text = b'"torch.float32"'
        (tmp_path / "other" / "x").mkdir(parents=True)
        for path in chunks(tmp_path):
            (tmp_path / "other" / "x" / path.name).write_bytes(
                reseal(path.read_bytes().replace(text, b'"torch.float16"'))
            )
    for path in chunks(tmp_path / "other"):
        next(tmp_path.glob(f"*/{path.name}")).write_bytes(path.read_bytes())
    found = answer(make_engine(tokenizer, tmp_path), row)
    assert found["answer"] == expected["answer"]
    assert (found["prefilled"], found["notes"]) == (1000, [])


def reseal(content: bytes) -> bytes:
    """The content with the checksum that belongs to it."""
    return content[:-4] + zlib.crc32(content[:-4]).to_bytes(4, "little")


def test_a_changed_row_leaves_nothing_of_the_old_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    request, prompt = row_of("generate", 1000)
    stop_after(make_engine(tokenizer, tmp_path), 6, (request, prompt))
    old = chunks(tmp_path)[0].parent
    stop_after(make_engine(tokenizer, tmp_path), 2, (replace(request, fingerprint=b"new"), prompt))
    assert not old.exists()
    assert len(chunks(tmp_path)) == 2


def test_a_disk_that_refuses_costs_the_row_nothing(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spill").write_text("this is a file")
    row = row_of("generate", 1000)
    found = answer(make_engine(tokenizer, tmp_path / "spill"), row)
    assert found == answer(make_engine(tokenizer, None), row)
    assert [record.message for record in caplog.records] == [
        f"a row's state cannot be kept in {tmp_path / 'spill'}: Not a directory"
    ]


def test_memory_that_runs_out_in_the_middle(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt, in smaller pieces, begins where the last one failed."""
    row = row_of("generate", 1000)
    engine = make_engine(tokenizer, tmp_path, chunk_tokens=4 * CHUNK)
    embed = engine.model.embed

    def failing(ids: Any) -> Any:
        if len(ids) == 4 * CHUNK and len(chunks(tmp_path)) == 2:
            raise MemoryError
        return embed(ids)

    monkeypatch.setattr(engine.model, "embed", failing)
    found = answer(engine, row)
    assert found["answer"]["status"] == "ok"
    assert found["prefilled"] == 1000 - 8 * CHUNK
    assert found["notes"] == [
        "out of memory: tiles of 32 rows",
        "resumed at token 512",
        "out of memory: chunks of 128 tokens",
        "resumed at token 512",
    ]
