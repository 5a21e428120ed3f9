"""MInference's published pattern files (github.com/microsoft/MInference, minference/configs) as profiles. Torch-free.

Such a file is a list with one object per layer: {"head": [type, number, number, score]}. The score is left out of the
profile: it counts errors in one file and recall in another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longbatch.errors import UsageError
from longbatch.sparsity.patterns import PatternSpec
from longbatch.sparsity.profile import HeadChoice, LayerChoices, Profile, ProfileError, read_json

# MInference's type -> our pattern and the parameters that the two numbers are. Its block-sparse heads run with the
# 100 best blocks whatever the numbers say.
_TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "vertical_and_slash": ("vertical_slash", ("vertical", "slash")),
    "stream_llm": ("a_shape", ("sinks", "window")),
    "block_sparse": ("block_sparse", ()),
}


def import_minference(path: Path) -> Profile:
    """The profile that a MInference pattern file describes, one selection per query head, for any model with as many
    layers and heads.

    Raises ProfileError naming the file and the entry.
    """
    value = read_json(path)
    if not isinstance(value, list) or not value:
        raise ProfileError(f"{path} is not a MInference pattern file: it must hold a list with one object per layer")
    layers = []
    for index, layer in enumerate(value):
        if not isinstance(layer, dict) or set(layer) != {str(head) for head in range(len(layer))} or not layer:
            raise ProfileError(f"layer {index} in {path} must be an object with the keys 0, 1, 2, ... for its heads")
        heads = [_spec(layer[str(head)], f"head {head} of layer {index} in {path}") for head in range(len(layer))]
        layers.append(LayerChoices(tuple(HeadChoice(spec) for spec in heads)))
        if len(heads) != len(layers[0].heads):
            raise ProfileError(f"layer {index} in {path} has {len(heads)} heads, layer 0 {len(layers[0].heads)}")
    num_heads = len(layers[0].heads)
    return Profile(
        choices=tuple(layers),
        num_heads=num_heads,
        num_kv_heads=None,
        model_hash=None,
        tolerance=None,
        source=f"minference: {path.name}",
    )


def _spec(entry: Any, where: str) -> PatternSpec:
    numbers = entry[1:3] if isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str) else []
    if len(numbers) != 2 or any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise ProfileError(f"{where} must be [type, number, number, score]")
    if entry[0] not in _TYPES:
        raise ProfileError(f"{where} has the type {entry[0]!r}; known: {', '.join(_TYPES)}")
    name, parameters = _TYPES[entry[0]]
    try:
        return PatternSpec.make(name, **dict(zip(parameters, numbers, strict=False)))
    except UsageError as error:
        raise ProfileError(f"{where}: {error.message}", hint=error.hint) from None
