"""A tiny random model in a folder that a whole run can use, and runs over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny_models
from engine_rows import word_tokenizer

from longbatch.config import Settings, resolve
from longbatch.errors import ExitCode
from longbatch.run.execute import execute


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


def make_tiny_model(folder: Path, case: str = "llama") -> Path:
    """A Llama of 200 words without end tokens, so that answers have the length asked for."""
    tiny_models.save(case, folder)
    word_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def words(length: int, seed: int = 0) -> str:
    """A prompt of so many tokens."""
    return " ".join(f"w{3 + (i * 7 + seed * 13) % 190}" for i in range(length))


def write_manifest(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A JSONL manifest."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings_of(model: Path, out: Path, **values: Any) -> Settings:
    """Settings of a run on the CPU, with 4 tokens an answer."""
    common = {"model": str(model), "out": out, "gpus": "0", "max_tokens": 4, "progress": "none", "quiet": True}
    return resolve({**common, **values}, environ={}).settings


def run(manifest: Path | str, model: Path, out: Path, **settings: Any) -> ExitCode:
    """A whole run in this process."""
    return execute(settings_of(model, out, **settings), [str(manifest)])


def results(out: Path) -> list[dict[str, Any]]:
    """The merged rows, in order."""
    return [row for file in sorted((out / "results").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
