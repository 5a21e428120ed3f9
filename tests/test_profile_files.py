"""`longbatch profile`: which files it refuses to write over, which flags it refuses, damaged files it goes on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
from engine_rows import word_tokenizer
from PIL import Image

from longbatch.cli import main
from longbatch.engine import search_state
from longbatch.sparsity import HeadChoice, LayerChoices, PatternSpec, Profile

MINFERENCE = [{"0": ["vertical_and_slash", 1000, 6096, 336], "1": ["stream_llm", 100, 800, 1]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save("llama", folder)
    word_tokenizer(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.jsonl"
    path.write_text(json.dumps({"prompt": " ".join(f"w{7 * i * i % 197 + 3}" for i in range(220))}) + "\n")
    return path


def search(model: Path, source: Path, out: Path, *flags: str) -> int:
    command = ["profile", str(model), "--calibration", str(source), "-o", str(out), "--tolerance", "0.5", "--quiet"]
    return main([*command, "--gpus", "0", *flags])


def some_profile(path: Path, source: str = "test") -> Path:
    layer = LayerChoices((HeadChoice(PatternSpec.make("a_shape")),) * 2)
    Profile(
        choices=(layer,), num_heads=2, num_kv_heads=None, model_hash=None, tolerance=None, source=source, created="now"
    ).save(path)
    return path


# ---------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("flags", [[], ["--picture", "x.png"], ["--picture", "./folder/../x.png"]])
def test_a_picture_is_not_written_over_the_profile(
    model: Path,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert search(model, source, Path("x.png"), *flags) == 2
    errors = capsys.readouterr().err
    assert "written over the profile x.png" in errors
    assert "--picture FILE" in errors
    assert not Path("x.png").exists()
    assert not Path("x.png.search").exists()
    assert search(model, source, Path("x.png"), "--picture", "y.png") == 0
    assert Profile.load(Path("x.png")).num_layers == 4


def test_a_shown_or_imported_profile_is_not_drawn_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = some_profile(tmp_path / "p.json")
    before = path.read_bytes()
    (tmp_path / "link.png").hardlink_to(path)
    for picture in (path, tmp_path / "link.png"):
        assert main(["profile", "--show", str(path), "--picture", str(picture)]) == 2
        assert capsys.readouterr().out == ""
    assert path.read_bytes() == before
    patterns, out = tmp_path / "patterns.json", tmp_path / "q.png"
    patterns.write_text(json.dumps(MINFERENCE))
    assert main(["profile", "--import-minference", str(patterns), "-o", str(out)]) == 2
    assert main(["profile", "--import-minference", str(patterns), "-o", str(out), "--picture", str(patterns)]) == 2
    assert not out.exists()
    assert json.loads(patterns.read_text()) == MINFERENCE


def test_another_picture_is_not_written_over(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, out = tmp_path / "p.png", tmp_path / "p.json"
    for size in ((8, 8), (20000, 20000)):
        Image.new("1", size).save(picture)
        before = picture.read_bytes()
        assert search(model, source, out) == 2
        assert "p.png is there already" in capsys.readouterr().err
        # At once, and not after the search.
        assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.jsonl", "p.png"]
        some_profile(tmp_path / "other.json")
        assert main(["profile", "--show", str(tmp_path / "other.json"), "--picture", str(picture)]) == 2
        (tmp_path / "other.json").unlink()
        assert picture.read_bytes() == before
    picture.unlink()
    assert search(model, source, out) == 0
    other = tmp_path / "other.png"
    other.write_text("no picture")
    capsys.readouterr()
    assert search(model, source, out, "--picture", str(other)) == 2
    assert other.read_text() == "no picture"


def test_a_repeated_search_draws_its_own_picture_again(model: Path, source: Path, tmp_path: Path) -> None:
    picture, out = tmp_path / "p.png", tmp_path / "p.json"
    assert search(model, source, out) == 0
    before = picture.read_bytes()
    assert search(model, source, out) == 0
    assert picture.read_bytes() == before
    picture.unlink()
    assert search(model, source, out) == 0
    assert picture.read_bytes() == before
    assert main(["profile", "--show", str(out), "--picture", str(picture)]) == 0
    assert picture.read_bytes() == before
    some_profile(out)
    assert main(["profile", "--show", str(out), "--picture", str(picture)]) == 2
    assert picture.read_bytes() == before


# ------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--show", "p.json", "MODEL"], "MODEL"),
        (["--show", "p.json", "-o", "q.json"], "--out"),
        (["--show", "p.json", "--tolerance", "0.05"], "--tolerance"),
        (["--show", "p.json", "--import-minference", "patterns.json"], "--import-minference"),
        (["--show", "p.json", "--calibration", "x"], "--calibration"),
        (["--show", "p.json", "--gpus", "0"], "--gpus"),
        (["--show", "p.json", "--quiet"], "--quiet"),
        (["--import-minference", "patterns.json", "-o", "q.json", "MODEL"], "MODEL"),
        (["--import-minference", "patterns.json", "-o", "q.json", "--lengths", "16K"], "--lengths"),
        (["--import-minference", "patterns.json", "-o", "q.json", "--measure", "output"], "--measure"),
    ],
)
def test_what_has_no_effect_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    refused: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    some_profile(Path("p.json"))
    Path("patterns.json").write_text(json.dumps(MINFERENCE))
    assert main(["profile", *flags]) == 2
    assert f"takes no {refused}\n" in capsys.readouterr().err
    assert not Path("q.json").exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--show", "missing.json"], "missing.json"),
        (["--import-minference", "patterns.json"], "a profile needs a file"),
        (["--import-minference", "patterns.json", "-o", "."], "is a folder"),
    ],
)
def test_files_that_are_not_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("patterns.json").write_text(json.dumps(MINFERENCE))
    assert main(["profile", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_settings_from_elsewhere_are_no_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGBATCH_GPUS", "0")
    monkeypatch.setenv("LONGBATCH_QUIET", "1")
    assert main(["profile", "--show", str(some_profile(tmp_path / "p.json"))]) == 0
    assert "a_shape" in capsys.readouterr().out
    patterns = tmp_path / "patterns.json"
    patterns.write_text(json.dumps(MINFERENCE))
    assert main(["profile", "--import-minference", str(patterns), "-o", str(tmp_path / "q.json")]) == 0
    assert capsys.readouterr().out == ""


def test_lengths_are_written_as_for_bench(model: Path, source: Path, tmp_path: Path) -> None:
    source.write_text(json.dumps({"prompt": " ".join(f"w{i % 190 + 3}" for i in range(1024))}) + "\n")
    assert search(model, source, tmp_path / "p.json", "--lengths", "1k, 200,1024") == 0
    assert Profile.load(tmp_path / "p.json").calibration["lengths"] == [200, 1024]


# --------------------------------------------------------------------------------------- damaged searches


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({}, "facts.rates in"),
        (3, "facts.rates in"),
        ({"device": "x", "dense_flops": 1.0}, "facts.rates in"),
        (None, "facts.rates in"),
    ],
)
def test_a_search_with_damaged_rates_is_named(
    model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rates: object, message: str
) -> None:
    out = tmp_path / "p.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_state, "remove_state", lambda path: None)
        assert search(model, source, out) == 0
    path = tmp_path / "p.json.search" / "search.json"
    content = json.loads(path.read_text())
    content["facts"]["rates"] = rates if rates is not None else {**content["facts"]["rates"], "blocks_flops": 0}
    path.write_text(json.dumps(content))
    assert search(model, source, out) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "search.json" in errors
    assert "hint: delete its folder" in errors
