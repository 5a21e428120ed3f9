"""Settings: which layer wins, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from longbatch.config import Settings, flag_name, help_text, resolve
from longbatch.errors import UsageError
from longbatch.folders import cache_folder, user_file


@pytest.fixture
def user_config(tmp_path: Path) -> Path:
    path = tmp_path / "home" / ".config" / "longbatch" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home"), **variables}


def test_defaults_are_greedy_and_on_the_device_there_is() -> None:
    settings = resolve({}, environ={"HOME": "/nonexistent"}, folder=Path("/nonexistent")).settings
    assert settings == Settings()
    assert (settings.generation_config, settings.max_tokens, settings.overlong) == ("greedy", 1024, "error")
    assert (settings.gpus, settings.dtype, settings.max_wave_seconds) == ("auto", "auto", 300.0)


def test_each_layer_wins_over_those_below_it(tmp_path: Path, user_config: Path) -> None:
    """Five settings, each set in one layer more than the one before."""
    user_config.write_text("seed = 1\nmax_tokens = 1\nlimit = 1\ndecode_batch = 1\n")
    (tmp_path / "longbatch.toml").write_text("max_tokens = 2\nlimit = 2\ndecode_batch = 2\n")
    environ = environment(tmp_path, LONGBATCH_LIMIT="3", LONGBATCH_DECODE_BATCH="3")
    resolved = resolve({"decode_batch": "4", "seed": None}, environ=environ, folder=tmp_path)
    settings, origins = resolved.settings, resolved.origins
    assert (settings.threads, origins["threads"]) == (None, "default")
    assert (settings.seed, origins["seed"]) == (1, str(user_config))
    assert (settings.max_tokens, origins["max_tokens"]) == (2, "longbatch.toml")
    assert (settings.limit, origins["limit"]) == (3, "environment LONGBATCH_LIMIT")
    assert (settings.decode_batch, origins["decode_batch"]) == (4, "flag --decode-batch")
    assert set(origins) == {item.name for item in fields(Settings)}


def test_pyproject_table_counts_only_without_longbatch_toml(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n[tool.longbatch]\nseed = 5\nmax-tokens = 6\n")
    resolved = resolve({}, environ=environment(tmp_path), folder=tmp_path)
    assert (resolved.settings.seed, resolved.settings.max_tokens) == (5, 6)
    assert resolved.origins["seed"] == "pyproject.toml [tool.longbatch]"
    (tmp_path / "longbatch.toml").write_text("seed = 7\n")
    settings = resolve({}, environ=environment(tmp_path), folder=tmp_path).settings
    assert (settings.seed, settings.max_tokens) == (7, 1024)


def test_a_named_file_takes_the_place_of_the_projects(tmp_path: Path) -> None:
    (tmp_path / "longbatch.toml").write_text("seed = 7\nmax_tokens = 7\n")
    named = tmp_path / "recipe.toml"
    named.write_text("seed = 8\n")
    by_flag = resolve({}, config_file=named, environ=environment(tmp_path), folder=tmp_path)
    by_variable = resolve({}, environ=environment(tmp_path, LONGBATCH_CONFIG=str(named)), folder=tmp_path)
    assert by_flag == by_variable
    assert (by_flag.settings.seed, by_flag.settings.max_tokens) == (8, 1024)
    with pytest.raises(UsageError, match="does not exist"):
        resolve({}, config_file=tmp_path / "none.toml", environ={}, folder=tmp_path)


@pytest.mark.parametrize("place", ["file", "user file", "environment", "flag"])
def test_an_unknown_key_is_an_error_with_the_near_name(place: str, tmp_path: Path, user_config: Path) -> None:
    environ, flags = environment(tmp_path), {}
    if place == "file":
        (tmp_path / "longbatch.toml").write_text("max_token = 5\n")
    elif place == "user file":
        user_config.write_text("max_token = 5\n")
    elif place == "environment":
        environ["LONGBATCH_MAX_TOKEN"] = "5"
    else:
        flags = {"max_token": 5}
    with pytest.raises(UsageError, match="max_token") as caught:
        resolve(flags, environ=environ, folder=tmp_path)
    assert caught.value.hint is not None
    assert "max_tokens" in caught.value.hint.lower()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_tokens = 'many'", "whole number"),
        ("max_tokens = 0", "at least 1"),
        ("max_tokens = -5", "at least 1"),
        ("max_tokens = true", "whole number"),
        ("max_tokens = [1]", "whole number"),
        ("max_wave_seconds = nan", "at least"),
        ("max_wave_seconds = 'soon'", "a number"),
        ("overlong = 'truncate'", "truncate-left"),
        ("dtype = 'bf16'", "bfloat16"),
        ("gpus = -1", "gpus"),
        ("gpus = 'every'", "gpus"),
        ("allow_failures = '5 %'", "allow_failures"),
        ("attention = 'a_shap'", "a_shape"),
        ("attention = 'a_shape:window=0'", "window"),
        ("min_sparse_length = -1", "at least 0"),
        ("verify_sample = -1", "at least 0"),
        ("quiet = 'maybe'", "true or false"),
        ("keep_columns = [1]", "list of names"),
        ("prompt = 5\nseed = 'x'", "whole number"),
        ("this is not toml", "not valid TOML"),
    ],
)
def test_a_bad_value_is_refused_where_it_stands(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "longbatch.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        resolve({}, environ=environment(tmp_path), folder=tmp_path)
    assert named in f"{caught.value.message} {caught.value.hint}"
    assert "longbatch.toml" in caught.value.message


def test_values_of_the_environment_are_converted(tmp_path: Path) -> None:
    environ = environment(
        tmp_path,
        LONGBATCH_MAX_ROW_BYTES="64MiB",
        LONGBATCH_WAVE_TOKENS="200k",
        LONGBATCH_KEEP_COLUMNS="title, year",
        LONGBATCH_QUIET="yes",
        LONGBATCH_JSON="0",
        LONGBATCH_OUT="some/where",
        LONGBATCH_MAX_WAVE_SECONDS="12.5",
        LONGBATCH_PROMPT="",
    )
    settings = resolve({}, environ=environ, folder=tmp_path).settings
    assert (settings.max_row_bytes, settings.wave_tokens, settings.max_wave_seconds) == (64 << 20, 200_000, 12.5)
    assert settings.keep_columns == ("title", "year")
    assert (settings.quiet, settings.json, settings.out) == (True, False, Path("some/where"))
    assert settings.prompt is None  # an empty variable is an unset one


@pytest.mark.parametrize(
    ("setting", "rows", "allowed"),
    [("0", 1000, 0), ("3", 1000, 3), ("2%", 1000, 20), ("0.5%", 100, 0), ("100%", 7, 7)],
)
def test_allowed_failures(setting: str, rows: int, allowed: int) -> None:
    assert Settings(allow_failures=setting).allowed_failures(rows) == allowed


def test_settings_are_frozen_and_json() -> None:
    settings = Settings(out=Path("x"), keep_columns=("a",))
    with pytest.raises(FrozenInstanceError):
        settings.seed = 1  # type: ignore[misc]
    assert settings.as_dict()["out"] == "x"
    assert settings.as_dict()["keep_columns"] == ["a"]


def test_identity_holds_what_changes_answers_and_no_more() -> None:
    assert set(Settings().identity()) == {
        "model",
        "dtype",
        "kv_dtype",
        "weights_dtype",
        "adapter",
        "task",
        "prompt",
        "system",
        "prompt_format",
        "overlong",
        "max_tokens",
        "generation_config",
        "seed",
        "attention",
        "profile",
        "min_sparse_length",
        "ignore_unsupported",
        "keep_columns",
    }


def test_a_limit_of_the_gap_needs_rows_to_measure() -> None:
    assert Settings(max_gap=0.0, verify_sample=1).max_gap == 0.0
    with pytest.raises(UsageError, match="max_gap needs rows to measure"):
        Settings(max_gap=0.1)


def test_every_setting_says_what_it_does() -> None:
    for item in fields(Settings):
        assert len(help_text(item.name)) > 10
    assert flag_name("max_wave_seconds") == "--max-wave-seconds"


def test_folders_follow_the_environment(tmp_path: Path) -> None:
    assert cache_folder({"LONGBATCH_CACHE_DIR": "/c"}) == Path("/c")
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/longbatch")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/longbatch")
    assert user_file({"XDG_CONFIG_HOME": "/x"}) == Path("/x/longbatch/config.toml")
    assert cache_folder({}).name == "longbatch"  # cron sets no HOME
