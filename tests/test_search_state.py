"""What a search keeps on the disk: another search's, damaged, removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_rows import random_ids, tiny_decoder

from longbatch.engine.search import Search
from longbatch.engine.search_state import SearchState, remove_state, state_folder
from longbatch.errors import UsageError
from longbatch.models.decoder import Decoder
from longbatch.plan.sparse_rates import REFERENCE


def state_in(folder: Path, **identity: str) -> SearchState:
    return SearchState.open(folder / "profile.json", identity, {"created": "now"})


def test_state_of_another_search_is_refused(tmp_path: Path) -> None:
    state_in(tmp_path, model="a", dtype="b")
    with pytest.raises(UsageError, match=r"different: model$"):
        state_in(tmp_path, model="other", dtype="b")
    again = SearchState.open(tmp_path / "profile.json", {"model": "a", "dtype": "b"}, {"created": "later"})
    assert again.facts == {"created": "now"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_damaged_state_is_named(tmp_path: Path, content: bytes) -> None:
    state = state_in(tmp_path)
    state.save_layer(3, {"a": 1})
    saved = state.layer(3)
    assert saved is not None
    assert saved.values == {"a": 1}
    assert state.layer(2) is None
    path = state_folder(tmp_path / "profile.json") / "layer-0003.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"layer-0003\.json"):
        state.layer(3)
    (path.parent / "search.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"search\.json"):
        state_in(tmp_path)


def test_state_is_removed_whole(tmp_path: Path) -> None:
    state_in(tmp_path).save_layer(0, {})
    remove_state(tmp_path / "profile.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"facts": {"created": "now"}}, "identity in .* is missing"),
        ({"identity": {}}, "facts in .* is missing"),
        ({"identity": [], "facts": {"created": "now"}}, "identity in .* must be an object"),
        ({"identity": {}, "facts": "now"}, "facts in .* must be an object"),
        ({"identity": {}, "facts": {}}, r"facts\.created in .* is missing"),
        ({"identity": {}, "facts": {"created": 5}}, r"facts\.created in .* must be a text"),
    ],
)
def test_a_search_without_its_identity_is_named(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    state_in(tmp_path)
    path = state_folder(tmp_path / "profile.json") / "search.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=message) as error:
        state_in(tmp_path)
    assert str(path) in error.value.message
    # Without it, the layers beside it would be taken for those of whatever search comes next.
    assert "delete its folder" in (error.value.hint or "")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("llama"))


def good_layer() -> dict[str, Any]:
    heads = [{"pattern": "dense", "error": 0.0, "density": 1.0} for _ in range(4)]
    return {"shared": False, "heads": heads, "seconds": 1.0, "dense_seconds": 1.0, "num_trials": 1}


def _with(**changes: Any) -> dict[str, Any]:
    return {**good_layer(), **changes}


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in good_layer().items() if key != name}


BAD_HEAD = {"pattern": "star", "error": 0.0, "density": 1.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *[(_without(name), f"{name} in .* is missing") for name in good_layer()],
        (_with(heads=[BAD_HEAD] * 4), r"heads\[0\]\.pattern in .*: there is no attention pattern 'star'"),
        (_with(heads=[{}] * 4), r"heads\[0\]\.pattern in .* is missing"),
        (_with(heads=good_layer()["heads"][:3]), "heads in .* has 3 entries; one per head makes 4"),
        (_with(shared=True), "heads in .* has 4 entries; one per key/value head makes 2"),
        (_with(seconds=None), "seconds in .* must be a number"),
        (_with(dense_seconds=10**400), "dense_seconds in .* must be a number"),
        (_with(num_trials="1"), "num_trials in .* must be an integer"),
    ],
)
def test_a_damaged_layer_is_named_before_anything_is_computed(
    decoder: Decoder, tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    state = state_in(tmp_path)
    # The last one: found when it is reached, all the others would have been searched.
    state.save_layer(3, content)
    with pytest.raises(UsageError, match=message) as error:
        Search(decoder, [random_ids(150, 0)], 0.3, REFERENCE, state)
    assert "layer-0003.json" in error.value.message
    assert error.value.hint


def test_a_whole_layer_is_taken(decoder: Decoder, tmp_path: Path) -> None:
    state = state_in(tmp_path)
    state.save_layer(0, good_layer())
    found = next(Search(decoder, [random_ids(150, 0)], 0.3, REFERENCE, state).run())
    assert (found.num_trials, found.seconds) == (1, 1.0)
