"""The run folder: one run a folder, private, and never mixed with other settings."""

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from output_rows import IDENTITY, make_folder

from longbatch.errors import DiskError, UsageError
from longbatch.output import RunFolder


def test_a_new_folder_is_private_and_holds_the_layout(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.path.iterdir()) == ["_work", "logs", "parts", "run.json"]


def test_an_empty_folder_of_the_user_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o755)
    assert stat.S_IMODE(make_folder(tmp_path).path.stat().st_mode) == 0o700


def test_the_same_settings_continue_the_run(tmp_path: Path) -> None:
    first = make_folder(tmp_path)
    again = RunFolder.create_or_open(tmp_path / "out", dict(reversed(IDENTITY.items())), {"version": "2"})
    assert (again.run_id, again.config_hash, again.info) == (first.run_id, first.config_hash, {"version": "1"})
    assert RunFolder.open(tmp_path / "out") == first


def test_every_differing_setting_is_named_with_both_values(tmp_path: Path) -> None:
    make_folder(tmp_path)
    other = {"model": "large", "sampling": {"temperature": 0.5}, "dtype": "float32", "task": "generate"}
    with pytest.raises(UsageError) as caught:
        RunFolder.create_or_open(tmp_path / "out", other, {})
    lines = caught.value.message.splitlines()[1:]
    assert sorted(lines) == [
        '  dtype: (not set) there, "float32" now',
        '  model: "tiny" there, "large" now',
        "  sampling.temperature: 0.0 there, 0.5 now",
    ]


def test_a_setting_that_is_null_is_one_that_an_older_version_did_not_store(tmp_path: Path) -> None:
    first = make_folder(tmp_path)
    assert RunFolder.create_or_open(tmp_path / "out", {**IDENTITY, "new": None}, {}).run_id == first.run_id


@pytest.mark.parametrize("name", ["prompt", "system"])
def test_private_texts_are_neither_stored_nor_shown(tmp_path: Path, name: str) -> None:
    folder = RunFolder.create_or_open(tmp_path / "out", {name: "canary one"}, {})
    assert "canary" not in (folder.path / "run.json").read_text()
    with pytest.raises(UsageError) as caught:
        RunFolder.create_or_open(tmp_path / "out", {name: "canary two"}, {})
    assert "canary" not in caught.value.message
    assert f"{name}: " in caught.value.message


def test_a_folder_with_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"not empty.*thesis\.tex"):
        make_folder(tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_what_a_kill_left_before_the_run_was_defined_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".run.json.123.tmp").write_text('{"form')
    assert make_folder(tmp_path).identity["model"] == "tiny"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a description"),
        (b'{"format": 1', "not a description"),
        (b"[]", "not a description"),
        (b'{"format": 1}', "not a description"),
        (b"\xff\xfe", "not a description"),
        (b'{"format": 99}', "newer version"),
    ],
)
def test_a_strange_run_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        RunFolder.open(tmp_path)


def test_a_folder_without_run_json_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run\.json"):
        RunFolder.open(tmp_path)


def test_of_many_that_start_at_once_one_defines_the_run(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(make_folder, [tmp_path] * 16))
    assert len({folder.run_id for folder in folders}) == 1
    assert json.loads((tmp_path / "out" / "run.json").read_bytes())["run_id"] == folders[0].run_id
    assert not list((tmp_path / "out").glob(".run.json.*"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that refuses writes even for root")
def test_a_folder_that_cannot_be_written_is_a_disk_error() -> None:
    with pytest.raises(DiskError, match=r"cannot create the run folder /proc/self/out"):
        RunFolder.create_or_open(Path("/proc/self/out"), IDENTITY, {})
    assert not os.path.exists("/proc/self/out")
