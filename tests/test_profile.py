"""`longbatch profile` as a command: searching, killing and continuing, showing, drawing, importing, refusing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
from engine_rows import word_tokenizer
from PIL import Image

from longbatch.cli import main
from longbatch.config import Settings
from longbatch.errors import ManifestError, UsageError
from longbatch.models import model_hash, read_spec
from longbatch.report.profile_view import choices_text, draw_profile
from longbatch.run.profile import calibration_documents
from longbatch.sparsity import HeadChoice, LayerChoices, PatternSpec, Profile

MINFERENCE = [
    {"0": ["vertical_and_slash", 1000, 6096, 336], "1": ["stream_llm", 100, 800, 1]},
    {"0": ["block_sparse", 1000, 6096, 0], "1": ["vertical_and_slash", 30, 800, 2]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save("llama", folder)
    word_tokenizer(folder)
    return folder


def words(count: int, seed: int = 0) -> str:
    return " ".join(f"w{(seed + 7 * i * i) % 197 + 3}" for i in range(count))


def manifest(folder: Path, *counts: int) -> Path:
    path = folder / "calibration.jsonl"
    rows = [{"id": str(row), "prompt": words(count, row)} for row, count in enumerate(counts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def search(model: Path, source: Path, out: Path, *flags: str) -> int:
    command = ["profile", str(model), "--calibration", str(source), "-o", str(out), "--tolerance", "0.5"]
    return main([*command, "--gpus", "0", *flags])


# --------------------------------------------------------------------------------------------- searching


def test_a_profile_is_made_for_its_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = manifest(tmp_path, 500, 300), tmp_path / "profile.json"
    assert search(model, source, out) == 0
    profile = Profile.load(out)
    profile.check(model_hash(model), read_spec(model))
    assert profile.tolerance == 0.5
    assert profile.calibration["lengths"] == [500, 300]
    assert profile.calibration["seconds"] < profile.calibration["dense_seconds"]
    assert profile.calibration["searched"] == [0, 1, 2, 3]
    chosen = [head for layer in profile.choices for head in layer.heads]
    assert any(not head.spec.is_dense for head in chosen)
    assert all(head.error is not None and head.error <= 0.5 for head in chosen)
    assert all(head.density is not None and 0 < head.density <= 1 for head in chosen)
    assert all(head.runner_up is not None and head.runner_up.spec != head.spec for head in chosen)
    printed = capsys.readouterr()
    assert "a_shape sinks/window" in printed.out
    assert "4 layers of 4 query heads and 2 kv heads" in printed.out
    assert "layer 4/4" in printed.err
    assert "their budgets reach 500 tokens" in printed.err
    with Image.open(tmp_path / "profile.png") as picture:
        assert picture.format == "PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.jsonl", "profile.json", "profile.png"]


@pytest.mark.parametrize("content", ["mine", "{}"])
def test_another_file_is_not_written_over(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    out = tmp_path / "profile.json"
    out.write_text(content)
    assert search(model, manifest(tmp_path, 200), out) == 2
    assert out.read_text() == content
    assert "is there already" in capsys.readouterr().err


def test_a_finished_search_is_only_printed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    assert search(model, manifest(tmp_path, 200), out) == 0
    before, printed = out.read_bytes(), capsys.readouterr().out
    assert search(model, manifest(tmp_path, 200), out) == 0
    assert printed == capsys.readouterr().out
    assert not (tmp_path / "profile.json.search").exists()
    assert search(model, manifest(tmp_path, 201), out) == 2
    assert out.read_bytes() == before


def test_quiet_says_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "other.png"
    assert search(model, manifest(tmp_path, 200), tmp_path / "p.json", "--quiet", "--picture", str(picture)) == 0
    assert capsys.readouterr() == ("", "")
    assert picture.exists()
    assert not (tmp_path / "p.png").exists()


def test_the_measure_is_part_of_a_search(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = manifest(tmp_path, 300), tmp_path / "p.json"
    assert search(model, source, out, "--measure", "stream") == 0
    printed = capsys.readouterr().out
    assert "0.5, relative L2 of the hidden states" in printed
    assert "traded" not in printed
    assert search(model, source, out) == 2
    assert search(model, source, out, "--measure", "model") == 2
    assert search(model, source, tmp_path / "traded.json", "--measure", "model") == 0
    assert "0.5, relative L2 of the hidden states, traded against time" in capsys.readouterr().out
    assert Profile.load(tmp_path / "traded.json").calibration["measure"] == "model"


def test_the_price_is_part_of_a_search(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = manifest(tmp_path, 300), tmp_path / "p.json"
    assert search(model, source, out, "--price", "density") == 0
    assert search(model, source, out) == 2
    found = Profile.load(out)
    assert (found.calibration["price"], found.calibration["priced_for"]) == ("density", "selected pairs alone")
    # At 300 tokens no pattern saves time, but most save pairs.
    assert found.calibration["seconds"] < found.calibration["dense_seconds"] / 2


def test_a_run_takes_the_profile(model: Path, tmp_path: Path) -> None:
    source, out = manifest(tmp_path, 400), tmp_path / "profile.json"
    assert search(model, source, out, "--quiet") == 0
    run = ["run", str(source), "--model", str(model), "-o", str(tmp_path / "out"), "--gpus", "0", "--quiet"]
    run += ["--max-tokens", "2", "--profile", str(out), "--min-sparse-length", "0"]
    assert main(run) == 0
    # A process can run a second time, here to find that nothing is left.
    assert main(run) == 0
    identity = json.loads((tmp_path / "out" / "run.json").read_text())["identity"]
    assert identity["attention"] == "profile"


# ------------------------------------------------------------------------------------- kill and continue


def started(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "longbatch", *command], env=environment, cwd=folder, stderr=subprocess.DEVNULL
    )


def test_killed_at_any_moment_it_comes_to_the_same_bytes(
    model: Path, tmp_path: Path, uninstalled_environment: dict[str, str]
) -> None:
    source = manifest(tmp_path, 700, 400)
    environment = {**uninstalled_environment, "SOURCE_DATE_EPOCH": "1700000000", "OMP_NUM_THREADS": "1"}
    flags = ["--tolerance", "0.5", "--gpus", "0", "--quiet"]
    whole = ["profile", str(model), "--calibration", str(source), "-o", "whole.json", *flags]
    begin = time.monotonic()
    assert started(whole, environment, tmp_path).wait(120) == 0
    taken = time.monotonic() - begin
    killed = [*whole[:5], "killed.json", *flags]
    state, layers_seen = tmp_path / "killed.json.search", set()
    for attempt in range(30):
        process = started(killed, environment, tmp_path)
        try:
            # Later and later, so that kills fall into loading, layers, and the end.
            process.wait(taken * (0.3 + 0.07 * attempt))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            layers_seen.add(len(list(state.glob("layer-*.json"))) if state.exists() else 0)
        else:
            assert process.returncode == 0
            break
    assert max(layers_seen, default=0) > 0
    assert (tmp_path / "killed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert (tmp_path / "killed.png").read_bytes() == (tmp_path / "whole.png").read_bytes()
    assert not state.exists()


def test_killed_between_the_profile_and_the_end_it_finishes(model: Path, tmp_path: Path) -> None:
    """The profile is written and what was kept is still there: the same command ends the work."""
    from longbatch.engine import search_state

    source, out = manifest(tmp_path, 300), tmp_path / "profile.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_state, "remove_state", lambda path: None)
        assert search(model, source, out, "--quiet") == 0
    before = out.read_bytes()
    assert (tmp_path / "profile.json.search").exists()
    assert search(model, source, out, "--quiet") == 0
    assert out.read_bytes() == before
    assert not (tmp_path / "profile.json.search").exists()


def test_another_search_may_not_go_on(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from longbatch.engine import search_state

    out = tmp_path / "profile.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_state, "remove_state", lambda path: None)
        assert search(model, manifest(tmp_path, 300), out, "--quiet") == 0
    assert search(model, manifest(tmp_path, 301), out, "--quiet") == 2
    assert "different: documents" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on(model: Path, tmp_path: Path, uninstalled_environment: dict[str, str]) -> None:
    source = manifest(tmp_path, 900, 900, 900, 900)
    command = ["profile", str(model), "--calibration", str(source), "-o", "p.json", "--tolerance", "0.2", "--gpus", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "longbatch", *command],
        env={**uninstalled_environment, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("p.json.search/layer-*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "hint: run the same command again to continue" in errors


# --------------------------------------------------------------------------------------------- documents


def documents(model: Path, source: Path, *lengths: int, **settings: object) -> tuple[list[int], list[str]]:
    said: list[str] = []
    found = calibration_documents(
        Settings(model=str(model), **settings),  # type: ignore[arg-type]
        [str(source)],
        model,
        read_spec(model),
        lengths,
        said.append,
    )
    return [len(ids) for ids in found], said


def test_documents_are_used_at_every_length_that_they_reach(model: Path, tmp_path: Path) -> None:
    source = manifest(tmp_path, 500, 200, 100)
    assert documents(model, source, 150, 400) == ([150, 400, 150], ["row 2 is left out: 100 tokens are too few"])
    assert documents(model, source)[0] == [500, 200]
    assert documents(model, source, limit=1)[0] == [500]


def test_a_document_is_cut_in_its_middle(model: Path, tmp_path: Path) -> None:
    source = manifest(tmp_path, 500)
    whole = calibration_documents(Settings(), [str(source)], model, read_spec(model), [], print)[0]
    cut = calibration_documents(Settings(), [str(source)], model, read_spec(model), [201], print)[0]
    assert cut.tolist() == [*whole[:100], *whole[-101:]]


def test_a_document_longer_than_the_model_takes_is_cut(model: Path, tmp_path: Path) -> None:
    assert documents(model, manifest(tmp_path, 3000)) == ([1024], [])


def test_broken_rows_are_left_out(model: Path, tmp_path: Path) -> None:
    source = manifest(tmp_path, 300)
    good = source.read_text()
    source.write_text('{"prompt": 3}\n' + good.replace('"0"', '"good"') + '{"prompt": ""}\n')
    lengths, said = documents(model, source)
    assert lengths == [300]
    assert [line.split(" is left out: ")[0] for line in said] == ["row 0", "row 2"]
    source.write_text('{"prompt": 3}\n')
    with pytest.raises(ManifestError, match="no calibration document is left"):
        documents(model, source)


@pytest.mark.parametrize("length", [0, 127, 1025])
def test_impossible_lengths_are_refused(model: Path, tmp_path: Path, length: int) -> None:
    with pytest.raises(UsageError, match="1,024"):
        documents(model, manifest(tmp_path, 300), length)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["-o", "p.json"], "a search needs documents"),
        (["--calibration", "calibration.jsonl"], "a profile needs a file"),
        (["--calibration", "calibration.jsonl", "-o", "p.json", "--tolerance", "0"], "--tolerance"),
        (["--calibration", "calibration.jsonl", "-o", "p.json", "--tolerance", "1.5"], "--tolerance"),
        (["--calibration", "calibration.jsonl", "-o", "p.json", "--lengths", "1K,x"], "--lengths"),
        (["--calibration", "calibration.jsonl", "-o", "."], "is a folder"),
        (["--calibration", "calibration.jsonl", "-o", "p.json", "--measure", "logits"], "one of output, stream, model"),
        (["--calibration", "calibration.jsonl", "-o", "p.json", "--price", "cents"], "one of time, density"),
        (["--calibration", "missing.jsonl", "-o", "p.json"], "missing.jsonl"),
    ],
)
def test_wrong_commands_are_refused(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest(tmp_path, 300)
    (tmp_path / "minference.json").write_text(json.dumps(MINFERENCE))
    assert main(["profile", str(model), "--gpus", "0", *flags]) in (2, 4)
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


# ----------------------------------------------------------------------------------- showing and drawing


def made_profile(shared: bool = True) -> Profile:
    def choice(text: str, density: float) -> HeadChoice:
        return HeadChoice(PatternSpec.parse(text), 0.02, density)

    group = (choice("vertical_slash:vertical=30,slash=800", 0.1), choice("dense", 1.0))
    heads = (choice("a_shape:sinks=128,window=512", 0.2), choice("a_shape", 0.3), *group)
    return Profile(
        choices=(LayerChoices(group, shared=True), LayerChoices(heads)),
        num_heads=4,
        num_kv_heads=2,
        model_hash="0123",
        tolerance=0.05,
        source="search",
    )


def test_show_prints_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_profile().save(tmp_path / "p.json")
    assert main(["profile", "--show", str(tmp_path / "p.json"), "--picture", str(tmp_path / "p.png")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "vertical_slash vertical/slash 3 10.0% 0.020" in lines
    assert "0 per kv group 55.0% 0.020 1 vertical_slash 30/800, 1 dense" in lines
    assert "1 per head 40.0% 0.020 1 a_shape 128/512, 1 a_shape 128/3968, 1 vertical_slash 30/800, 1 dense" in lines
    assert (tmp_path / "p.png").exists()


def test_showing_loads_no_torch(tmp_path: Path, uninstalled_environment: dict[str, str]) -> None:
    made_profile().save(tmp_path / "p.json")
    program = (
        "import sys; from longbatch.cli import main; code = main(['profile', '--show', sys.argv[1]])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "p.json")]
    subprocess.run(command, env=uninstalled_environment, check=True, stdout=subprocess.DEVNULL)


def test_a_layer_in_a_few_words() -> None:
    layers = made_profile().choices
    assert choices_text(layers[0]) == ("1 vertical_slash, 1 dense per kv group; density 55.0%, worst error 0.020")
    assert choices_text(LayerChoices((HeadChoice(PatternSpec.make("strided")),))) == (
        "1 strided per head; density ?, worst error ?"
    )


def test_the_picture_shows_patterns_by_colour_and_density_by_strength(tmp_path: Path) -> None:
    draw_profile(made_profile(), tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as picture:
        pixels = picture.convert("RGB")
    left, top, step = 16 + 48, 16 + 32, 20
    first, second = (
        [pixels.getpixel((left + step * head + 9, top + step * layer + 9)) for head in range(4)] for layer in (0, 1)
    )
    # A shared selection fills the cells of its group; the gap between them as well.
    assert first[0] == first[1] != first[2] == first[3]
    assert pixels.getpixel((left + 19, top + 9)) == first[0]
    assert pixels.getpixel((left + 19, top + step + 9)) == (255, 255, 255)
    assert second[2:] == [first[0], first[2]]
    # Both are the same pattern, and the one that selects more is darker.
    assert second[0] != second[1]
    assert all(sparse > dense for sparse, dense in zip(second[0], second[1], strict=True))


@pytest.mark.parametrize("num_heads", [1, 128])
def test_models_of_any_size_can_be_drawn(tmp_path: Path, num_heads: int) -> None:
    layer = LayerChoices((HeadChoice(PatternSpec.make("block_sparse")),) * num_heads)
    profile = Profile(
        choices=(layer,) * 3, num_heads=num_heads, num_kv_heads=None, model_hash=None, tolerance=None, source="test"
    )
    draw_profile(profile, tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.width >= 20 * num_heads


def test_a_minference_file_becomes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "minference.json", tmp_path / "p.json"
    source.write_text(json.dumps(MINFERENCE))
    assert main(["profile", "--import-minference", str(source), "-o", str(out)]) == 0
    profile = Profile.load(out)
    assert [str(head.spec) for layer in profile.choices for head in layer.heads] == [
        "vertical_slash:vertical=1000,slash=6096",
        "a_shape:sinks=100,window=800",
        "block_sparse:top_k=100,mass=0.0,block=64",
        "vertical_slash:vertical=30,slash=800",
    ]
    assert "any of these dimensions" in capsys.readouterr().out
    assert (tmp_path / "p.png").exists()
    assert main(["profile", "--import-minference", str(source), "-o", str(out)]) == 2


# ------------------------------------------------------------------------------------------ real weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2_dir", "gemma3_dir"])
def test_real_models_find_sparse_heads(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    from longbatch.bench.texts import Prose

    source = tmp_path / "texts.jsonl"
    source.write_text(json.dumps({"prompt": Prose(3).characters(12000)}) + "\n")
    folder: Path = request.getfixturevalue(name)
    out = tmp_path / "profile.json"
    assert search(folder, source, out, "--quiet", "--lengths", "1024") == 0
    profile = Profile.load(out)
    searched = profile.calibration["searched"]
    heads = [head for index in searched for head in profile.choices[index].heads]
    assert sum(not head.spec.is_dense for head in heads) > len(heads) / 4
    windowed = {index for index, layer in enumerate(read_spec(folder).layers) if layer.window is not None}
    assert windowed.isdisjoint(searched)
