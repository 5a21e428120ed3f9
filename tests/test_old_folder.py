"""A run folder of an earlier release is read and continued by this one.

`tests/run-0.1.0/` holds a manifest of 6 rows, a tiny random model and a run that was stopped after 4 rows, one of them
still in a journal. Made by `python tests/test_old_folder.py FOLDER` with that release.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tiny_models
from run_folders import make_tiny_model, results, run, settings_of, words, write_manifest

from longbatch import __version__
from longbatch.core import Request, Result
from longbatch.errors import ExitCode
from longbatch.manifest import Manifest
from longbatch.output import ResultWriter, RunFolder, scan
from longbatch.run import make_plan
from longbatch.run.status import read_status

FIXTURES = sorted(Path(__file__).parent.glob("run-*"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_continued(fixture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(fixture, folder)
    stored = results_in_parts(folder / "out")
    assert len(scan(RunFolder.open(folder / "out"))) == 4
    assert read_status(folder / "out").rows_done == 4
    assert run(folder / "manifest.jsonl", folder / "model", folder / "out") is ExitCode.OK
    rows = results(folder / "out")
    assert [row["id"] for row in rows] == [f"r{i}" for i in range(6)]
    assert [row["finish_reason"] for row in rows] == ["length"] * 6
    kept = {row["id"]: row["text"] for row in rows}
    assert stored
    assert all(kept[id] == text for id, text in stored.items())


def results_in_parts(out: Path) -> dict[str, str]:
    """Texts by id of what stands in parts."""
    rows = [row for path in (out / "parts").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    return {row["id"]: row["text"] for row in rows}


def make(folder: Path) -> None:
    """Write the fixture with the release that is installed."""
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 128}
    tiny_models.CASES["smallest"] = ("LlamaConfig", sizes)
    make_tiny_model(folder / "model", "smallest")
    rows = [{"id": f"r{i}", "prompt": words(5 + i, i)} for i in range(6)]
    manifest, out = write_manifest(folder / "manifest.jsonl", rows), folder / "out"
    run(manifest, folder / "model", folder / "whole")
    run(manifest, folder / "model", out, limit=3)
    make_plan(settings_of(folder / "model", out), [str(manifest)])
    leave_in_journal(manifest, out, results(folder / "whole")[3]["text"])
    for path in (folder / "whole", out / "results", out / "logs"):
        shutil.rmtree(path)
    for path in (out / "_SUCCESS.json", *(out / "_work").glob("*.json"), folder / "model" / "generation_config.json"):
        path.unlink(missing_ok=True)
    content = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**content, "info": {"longbatch": __version__}}, indent=2) + "\n")


def leave_in_journal(manifest: Path, out: Path, text: str) -> None:
    """A fourth row whose result is in a journal and in no part, as after a kill."""
    request = list(Manifest.open([str(manifest)]).rows())[3]
    assert isinstance(request, Request)
    result = Result(request.key, request.row, text=text, finish_reason="length", fingerprint=request.fingerprint)
    writer = ResultWriter(RunFolder.open(out), "w0", 2)
    writer.append(result)
    writer.close(publish=False)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
