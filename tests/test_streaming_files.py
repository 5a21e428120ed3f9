"""Weights that are read from files while a run goes on: files that change meanwhile, and whole runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from reference_driver import forward
from run_folders import results, run, settings_of, tiny_model, words, write_manifest
from tiny_models import save

from longbatch import models
from longbatch.errors import DiskError, ExitCode, UsageError
from longbatch.models.decoder import Decoder
from longbatch.run.execute import execute

__all__ = ["tiny_model"]

CPU = torch.device("cpu")
IDS = torch.randint(3, 200, (90,), generator=torch.Generator().manual_seed(1))


def load(folder: Path, weights: str) -> Decoder:
    return models.load(folder, torch.float32, CPU, weights=weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers; not to be written to."""
    path = tmp_path_factory.mktemp("llama")
    save("llama", path)
    return path


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def test_a_file_that_is_deleted_is_still_read(folder: Path, tmp_path: Path) -> None:
    decoder = load(copy_of(folder, tmp_path), "disk")
    shutil.rmtree(tmp_path / "model")
    assert torch.equal(forward(decoder, IDS), forward(load(folder, "resident"), IDS))


def test_a_file_that_is_replaced_is_still_what_it_was(folder: Path, tmp_path: Path) -> None:
    path = copy_of(folder, tmp_path) / "model.safetensors"
    decoder = load(path.parent, "disk")
    other = tmp_path / "other"
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)
    assert torch.equal(forward(decoder, IDS), forward(load(folder, "resident"), IDS))


@pytest.mark.parametrize("keep", [0, 1000, -100])
def test_a_file_that_is_cut_short(keep: int, folder: Path, tmp_path: Path) -> None:
    path = copy_of(folder, tmp_path) / "model.safetensors"
    decoder = load(path.parent, "disk")
    whole = path.read_bytes()
    os.truncate(path, keep % len(whole))
    for _ in range(2):
        with pytest.raises(DiskError, match="were changed or cut short") as caught:
            forward(decoder, IDS)
        assert str(path) in caught.value.message
        assert "--weights host" in str(caught.value.hint)


def test_a_file_that_is_written_to(folder: Path, tmp_path: Path) -> None:
    path = copy_of(folder, tmp_path) / "model.safetensors"
    decoder = load(path.parent, "disk")
    forward(decoder, IDS)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DiskError, match="were changed"):
        forward(decoder, IDS)


def test_an_error_passes_when_the_file_is_back(folder: Path, tmp_path: Path) -> None:
    path = copy_of(folder, tmp_path) / "model.safetensors"
    decoder = load(path.parent, "disk")
    facts = path.stat()
    os.utime(path, ns=(1, 1))
    with pytest.raises(DiskError):
        forward(decoder, IDS)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert torch.equal(forward(decoder, IDS), forward(load(folder, "resident"), IDS))


def test_what_cannot_be_loaded_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    path = copy_of(folder, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    for weights in ("host", "disk"):
        with pytest.raises(UsageError, match="extra: "):
            load(path.parent, weights)


# ------------------------------------------------------------------------------------- runs


def test_runs_give_the_same_answers(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"id": f"r{row}", "prompt": words(10 + 40 * row, row), "logprobs": 2} for row in range(4)]
    manifest = write_manifest(tmp_path / "rows.jsonl", rows)
    found = {}
    for weights in ("resident", "host", "disk"):
        assert run(manifest, tiny_model, tmp_path / weights, weights=weights) is ExitCode.OK
        found[weights] = [(row["id"], row["text"], row["logprobs"]) for row in results(tmp_path / weights)]
        assert len(found[weights]) == 4
    assert found["host"] == found["disk"] == found["resident"]


def test_a_run_whose_model_is_cut_short(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished is saved, the error names the file, and the same command continues once the file is back."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    model, out = copy_of(tiny_model, tmp_path), tmp_path / "out"
    rows = [{"id": f"r{row}", "prompt": words(60 - row, row)} for row in range(4)]
    manifest = write_manifest(tmp_path / "rows.jsonl", rows)
    # A wave for each row, and no two of them at the same time.
    settings = settings_of(model, out, weights="disk", wave_tokens=64, kv_tokens=64)
    with pytest.raises(DiskError, match="were changed or cut short") as caught:
        execute(settings, [str(manifest)], engine="truncating_engine:load")
    assert str(model / "model.safetensors") in caught.value.message
    assert caught.value.exit_code is ExitCode.DISK
    assert 0 < sum(pq.read_table(path).num_rows for path in (out / "parts").glob("*.parquet")) < 4
    shutil.copy2(tiny_model / "model.safetensors", model)
    assert execute(settings, [str(manifest)]) is ExitCode.OK
    assert run(manifest, tiny_model, tmp_path / "whole") is ExitCode.OK
    texts = [[(row["id"], row["text"]) for row in results(folder)] for folder in (out, tmp_path / "whole")]
    assert texts[0] == texts[1]
