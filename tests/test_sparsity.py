"""Pattern texts, profiles and MInference's files: what is read back, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from longbatch import __version__
from longbatch.errors import DiskError, UsageError
from longbatch.sparsity import (
    PATTERNS,
    HeadChoice,
    LayerChoices,
    LayerPatterns,
    PatternSpec,
    Profile,
    ProfileError,
    import_minference,
)

PUBLISHED = Path(__file__).resolve().parent.parent / "recipes" / "minference"


@dataclass(frozen=True)
class Layer:
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class Model:
    layers: tuple[Layer, ...]


MODEL = Model((Layer(4, 2),) * 2)


def some_profile() -> Profile:
    make = PatternSpec.make
    runner_up = HeadChoice(make("block_sparse", mass=0.95), 0.04, 0.5)
    per_head = tuple(
        HeadChoice(make("vertical_slash", slash=slash), 0.01, 0.25, runner_up) for slash in (50, 60, 70, 80)
    )
    return Profile(
        choices=(
            LayerChoices(per_head),
            LayerChoices((HeadChoice(make("dense"), 0.0, 1.0), HeadChoice(make("a_shape"))), shared=True),
        ),
        num_heads=4,
        num_kv_heads=2,
        model_hash="abc",
        tolerance=0.05,
        source="calibration",
        calibration={"documents": ["a", "ü"], "lengths": [4096]},
    )


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("dense", "dense"),
        ("a_shape", "a_shape:sinks=128,window=3968"),
        ("tri_shape:last=7", "tri_shape:sinks=128,window=3968,last=7"),
        ("vertical_slash:vertical=1000,slash=6096", "vertical_slash:vertical=1000,slash=6096"),
        (" vertical_slash : slash = 100 , vertical=3500", "vertical_slash:vertical=3500,slash=100"),
        ("block_sparse:mass=.5", "block_sparse:top_k=100,mass=0.5,block=64"),
        ("antidiagonal:threshold=1,stride=8", "antidiagonal:stride=8,threshold=1.0,block=128"),
        ("strided", "strided:stride=16,local=16,block=64"),
    ],
)
def test_a_pattern_text_is_read_and_given_back(text: str, full: str) -> None:
    spec = PatternSpec.parse(text.replace(" :", ":"))
    assert str(spec) == full
    assert PatternSpec.parse(full) == spec
    assert spec.parameters == tuple(sorted(spec.parameters))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no attention pattern ''"),
        ("vertical-slash", "no attention pattern 'vertical-slash'"),
        ("vertical_slash:top_k=5", "has no parameter 'top_k'"),
        ("dense:window=5", "has no parameter 'window'"),
        ("vertical_slash:vertical", "'vertical' in the attention pattern .* not of the form parameter=number"),
        ("vertical_slash:", "'' in the attention pattern"),
        ("vertical_slash:vertical=", "'vertical=' in the attention pattern"),
        ("vertical_slash:vertical=many", "'vertical=many' in the attention pattern"),
        ("vertical_slash:vertical=nan", "'vertical=nan' in the attention pattern"),
        ("vertical_slash:vertical=1,vertical=1", "sets vertical twice"),
        ("vertical_slash:vertical=0", "vertical of the pattern vertical_slash is 0, .* an integer from 1 to"),
        ("vertical_slash:vertical=1.5", "vertical of the pattern vertical_slash is 1.5, .* an integer"),
        ("vertical_slash:slash=-3", "is -3"),
        ("block_sparse:block=48", "block of the pattern block_sparse is 48, .* one of 64, 128"),
        ("antidiagonal:threshold=1.01", "threshold of the pattern antidiagonal is 1.01, .* a number from 0.0 to 1.0"),
        ("antidiagonal:stride=10", "one of 4, 8, 16, 32, 64"),
        ("a_shape:window=1e30", "is 1e[+]30"),
        (f"a_shape:window={'9' * 5000}", "window of the pattern a_shape is a number of 5,000 characters"),
        (f"a_shape:sinks=1,window=-{'0' * 5000}.5", "is a number of 5,003 characters"),
    ],
)
def test_a_wrong_pattern_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PatternSpec.parse(text)


def test_the_patterns_and_parameters_known_are_named() -> None:
    with pytest.raises(UsageError) as unknown:
        PatternSpec.parse("star")
    assert all(name in (unknown.value.hint or "") for name in PATTERNS)
    with pytest.raises(UsageError) as parameter:
        PatternSpec.make("strided", width=3)
    assert all(name in (parameter.value.hint or "") for name in ("stride", "local", "block"))


@pytest.mark.parametrize("value", [True, None, "64"])
def test_a_parameter_must_be_a_number(value: Any) -> None:
    with pytest.raises(UsageError, match="window of the pattern a_shape"):
        PatternSpec.make("a_shape", window=value)


def test_integers_stay_integers() -> None:
    spec = PatternSpec.make("block_sparse", top_k=7.0, mass=1)
    assert isinstance(spec["top_k"], int)
    assert isinstance(spec["mass"], float)
    assert spec.count("top_k") == 7
    with pytest.raises(KeyError):
        spec["window"]


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_has_its_module_and_sound_defaults(name: str) -> None:
    info = PATTERNS[name]
    spec = PatternSpec.make(name)
    assert dict(spec.parameters) == {key: parameter.default for key, parameter in info.parameters.items()}
    assert spec.kind == info.kind
    assert spec.is_dense == (name == "dense")
    assert info.help
    assert info.module == f"longbatch.attention.patterns.{name}"
    import_module(info.module)


def test_a_layer_is_dense_when_all_its_heads_are() -> None:
    dense, sparse = PatternSpec.make("dense"), PatternSpec.make("a_shape")
    assert LayerPatterns((dense, dense)).is_dense
    assert not LayerPatterns((dense, sparse)).is_dense


def test_a_profile_is_read_back(tmp_path: Path) -> None:
    profile = some_profile()
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    assert profile.tool_version == __version__
    assert profile.num_layers == 2
    assert profile.layers[1] == LayerPatterns((PatternSpec.make("dense"), PatternSpec.make("a_shape")), shared=True)
    replace(profile, model_hash=None).save(path)
    assert Profile.load(path).model_hash is None
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="cannot write the profile"):
        some_profile().save(tmp_path / "missing" / "profile.json")
    path = tmp_path / "folder.json"
    path.mkdir()
    with pytest.raises(DiskError, match="cannot write the profile"):
        some_profile().save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.json"]


def test_a_profile_fits_its_model() -> None:
    profile = some_profile()
    profile.check("abc", MODEL)
    replace(profile, model_hash=None).check("any", MODEL)
    with pytest.raises(ProfileError, match="for another model: its model_hash is abc, this model's xyz") as error:
        profile.check("xyz", MODEL)
    assert "longbatch profile" in (error.value.hint or "")
    with pytest.raises(ProfileError, match="2 layers, the model 3"):
        profile.check("abc", Model((Layer(4, 2),) * 3))
    with pytest.raises(ProfileError, match="4 heads in each layer, layer 1 of the model 8"):
        profile.check("abc", Model((Layer(4, 2), Layer(8, 2))))
    with pytest.raises(ProfileError, match="2 key/value heads in each layer, layer 0 of the model 4"):
        profile.check("abc", Model((Layer(4, 4),) * 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads 5 is not a multiple of num_kv_heads 2"),
        ({"num_kv_heads": 0}, "num_heads 4 is not a multiple of num_kv_heads 0"),
        ({"num_kv_heads": 8}, "num_heads 4 is not a multiple"),
        ({"num_kv_heads": 1}, r"layers\[1\].heads of the profile has 2 entries; one per key/value head makes 1"),
        ({"num_heads": 8}, r"layers\[0\].heads of the profile has 4 entries; one per head makes 8"),
        ({"num_kv_heads": None}, r"layers\[1\] of the profile is shared, which needs num_kv_heads"),
    ],
)
def test_a_profile_with_wrong_dimensions_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        replace(some_profile(), **changes)


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


def _drop(*path: str | int) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        del value[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("format"), "format in .* is missing"),
        (_set("format", to="x"), "format in .* must be 'longbatch-profile'"),
        (_set("version", to=2), "is a profile of version 2; this longbatch reads version 1"),
        (_set("version", to="1"), "version in .* must be an integer"),
        (_set("num_heads", to=True), "num_heads in .* must be an integer"),
        (_set("num_heads", to=3), "num_heads 3 is not a multiple"),
        (_set("num_layers", to=3), "num_layers in .* differs from the 2 layers listed"),
        (_set("model_hash", to=5), "model_hash in .* must be a text or null"),
        (_drop("model_hash"), "model_hash in .* is missing"),
        (_set("tolerance", to=-1), "tolerance in .* must be a number, not negative, or null"),
        (_set("tolerance", to="low"), "tolerance in .* must be a number"),
        (_set("tolerance", to=10**400), "tolerance in .* must be a number"),
        (_set("source", to="\ud800"), "source in .* holds half a character"),
        (_set("num_heads", to=10**400), "one per head makes 10{400}$"),
        (_set("calibration", to=[]), "calibration in .* must be an object"),
        (_set("calibration", "lengths", to=5), r"calibration\.lengths in .* must be a list"),
        (_set("calibration", "lengths", to=["a"]), r"calibration\.lengths in .* must be a list of positive integers"),
        (_set("calibration", "seconds", to="long"), r"calibration\.seconds in .* must be a number"),
        (_set("layers", to={}), "layers in .* must be a list"),
        (_set("layers", 1, to=7), r"layers\[1\] in .* must be an object"),
        (_drop("layers", 1, "shared"), r"layers\[1\].shared in .* is missing"),
        (_set("layers", 0, "shared", to=1), r"layers\[0\].shared in .* must be true or false"),
        (_drop("layers", 0, "heads", 2), r"layers\[0\].heads of the profile has 3 entries"),
        (_set("layers", 0, "heads", 2, to=None), r"layers\[0\].heads\[2\] in .* must be an object"),
        (_drop("layers", 0, "heads", 2, "pattern"), r"layers\[0\].heads\[2\].pattern in .* is missing"),
        (_set("layers", 0, "heads", 2, "pattern", to="star"), r"heads\[2\].pattern in .*: there is no .* 'star'"),
        (_drop("layers", 0, "heads", 2, "error"), r"layers\[0\].heads\[2\].error in .* is missing"),
        (_set("layers", 0, "heads", 1, "density", to=[1]), r"heads\[1\].density in .* must be a number"),
        (_set("layers", 0, "heads", 1, "density", to=float("inf")), r"heads\[1\].density in .* must be a number"),
        (
            _set("layers", 0, "heads", 1, "density", to=1.5),
            r"heads\[1\].density in .* at most 1, or null",
        ),
        (_set("layers", 0, "heads", 1, "error", to=10**400), r"heads\[1\].error in .* must be a number"),
        (_set("layers", 0, "heads", 1, "runner_up", "runner_up", to={}), r"runner_up.runner_up in .* of a runner-up"),
        (
            _set("layers", 0, "heads", 2, "pattern", to="a_shape:window=" + "1" * 5000),
            r"heads\[2\].pattern in .*: window of the pattern a_shape is a number of 5,000 characters",
        ),
        (_set("layers", 0, "heads", 1, "runner_up", to=[]), r"heads\[1\].runner_up in .* must be an object"),
        (_set("layers", 0, "heads", 1, "runner_up", "error", to=""), r"runner_up.error in .* must be a number"),
    ],
)
def test_a_damaged_profile_names_the_file_and_the_field(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    value = some_profile().as_json()
    change(value)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ProfileError, match=message) as error:
        Profile.load(path)
    assert str(path) in str(error.value)
    assert error.value.hint


def test_a_profile_without_layers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({**some_profile().as_json(), "num_layers": 0, "layers": []}))
    with pytest.raises(ProfileError, match=r"empty\.json: layers of the profile is empty") as error:
        Profile.load(path)
    assert error.value.hint


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": NaN', b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    for read in (Profile.load, import_minference):
        with pytest.raises(ProfileError, match=r"bad\.json is not valid JSON"):
            read(path)


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none.json cannot be read: No such file"):
        Profile.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text('"text"')
    with pytest.raises(ProfileError, match=r"the content in .* must be an object"):
        Profile.load(tmp_path / "text.json")


def test_a_minference_file_in_place_of_a_profile_is_recognized() -> None:
    path = next(PUBLISHED.glob("Llama*.json"))
    with pytest.raises(ProfileError, match="looks like a MInference pattern file") as error:
        Profile.load(path)
    assert "--import-minference" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("name", "layers", "heads", "budgets"),
    [
        (
            "Llama_3_8B_Instruct_262k_kv_out_v32_fit_o_best_pattern",
            32,
            32,
            {(1000, 6096): 473, (30, 800): 278, (100, 800): 153, (3500, 100): 89, (500, 700): 31},
        ),
        (
            "Qwen2.5_7B_Instruct_128k_instruct_kv_out_v32_fit_o_best_pattern",
            28,
            28,
            {(1000, 6096): 411, (3500, 100): 202, (30, 800): 91, (500, 700): 50, (100, 800): 24, (100, 750): 6},
        ),
        ("Qwen2.5_7B_Instruct_1M", 28, 28, None),
    ],
)
def test_published_files_are_imported(
    name: str, layers: int, heads: int, budgets: dict[tuple[int, int], int] | None, tmp_path: Path
) -> None:
    profile = import_minference(PUBLISHED / f"{name}.json")
    assert (profile.num_layers, profile.num_heads, profile.num_kv_heads) == (layers, heads, None)
    assert profile.model_hash is None
    assert name in profile.source
    specs = [spec for layer in profile.layers for spec in layer.heads]
    assert {spec.name for spec in specs} == {"vertical_slash"}
    counts = Counter((spec.count("vertical"), spec.count("slash")) for spec in specs)
    if budgets is None:
        assert (len(counts), counts[1000, 6096]) == (34, 321)
    else:
        assert counts == budgets
    profile.check("anything", Model((Layer(heads, 4),) * layers))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_minferences_other_types_are_imported(tmp_path: Path) -> None:
    path = tmp_path / "phi.json"
    path.write_text(
        json.dumps(
            [
                {
                    "0": ["stream_llm", 100, 800, 0.5],
                    "1": ["block_sparse", 1, 1, 3],
                    "2": ["vertical_and_slash", 30, 800, 1],
                }
            ]
        )
    )
    names = [str(spec) for spec in import_minference(path).layers[0].heads]
    assert names == [
        "a_shape:sinks=100,window=800",
        "block_sparse:top_k=100,mass=0.0,block=64",
        "vertical_slash:vertical=30,slash=800",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "must hold a list with one object per layer"),
        ([], "must hold a list with one object per layer"),
        ([[]], "layer 0 in .* must be an object with the keys 0, 1, 2"),
        ([{}], "layer 0 in .* must be an object"),
        ([{"1": ["vertical_and_slash", 1, 1, 0]}], "layer 0 in .* must be an object with the keys 0, 1, 2"),
        ([{"0": ["vertical_and_slash", 1, 1]}], r"head 0 of layer 0 in .* must be \[type, number, number, score\]"),
        ([{"0": ["vertical_and_slash", 1.5, 1, 0]}], "head 0 of layer 0"),
        ([{"0": ["vertical_and_slash", True, 1, 0]}], "head 0 of layer 0"),
        ([{"0": [["x"], 1, 1, 0]}], "head 0 of layer 0"),
        ([{"0": ["tri_shape", 1, 1, 0]}], "has the type 'tri_shape'; known: vertical_and_slash"),
        ([{"0": ["vertical_and_slash", 0, 1, 0]}], "head 0 of layer 0 in .*: vertical of the pattern .* is 0"),
        (
            [{"0": ["stream_llm", 1, 1, 0]}, {"0": ["stream_llm", 1, 1, 0], "1": ["stream_llm", 1, 1, 0]}],
            "layer 1 in .* has 2 heads, layer 0 1",
        ),
    ],
)
def test_a_wrong_minference_file_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=message) as error:
        import_minference(path)
    assert "wrong.json" in str(error.value)
