"""A profile as a person reads it: a table on standard output, and a picture of patterns and density."""

from __future__ import annotations

import io
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longbatch.output.files import disk_errors, replace_file
from longbatch.report.console import plain_table, standard_output
from longbatch.sparsity import PATTERNS, HeadChoice, LayerChoices, PatternSpec, Profile

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

# Of each pattern, in the order of the registry; more patterns than colours use them again.
COLORS = (
    (128, 128, 128),
    (31, 119, 180),
    (23, 150, 160),
    (214, 90, 30),
    (90, 60, 170),
    (44, 140, 60),
    (190, 40, 110),
)
CELL, GAP, MARGIN, TEXT = 18, 2, 16, 16
# A cell of density 0 is this much white.
PALEST = 0.8
# Where a picture keeps the hash of the profile that it shows.
PICTURE_KEY = "longbatch-profile"
# What a tolerance is about, by measure, where it is not a head's output.
_MEASURED = {"stream": "the hidden states", "model": "the hidden states, traded against time"}
NOTE = "density 0 to 1 from left to right; layers down, query heads across"


def print_profile(profile: Profile) -> None:
    """Print what a profile holds on standard output: facts, patterns, and one line for each layer."""
    console = standard_output()
    facts = plain_table("", "")
    for name, value in _facts(profile):
        facts.add_row(name, value)
    console.print(facts)
    console.print()
    table = plain_table("pattern", ">heads", ">density", ">worst error")
    for name, choices in _by_pattern(profile).items():
        label = " ".join([name, "/".join(PATTERNS[name].parameters)]).strip()
        table.add_row(label, f"{sum(number for _, number in choices)}", _density(choices), _worst(choices))
    console.print(table)
    console.print()
    table = plain_table(">layer", "selections", ">density", ">worst error", "patterns")
    for index, layer in enumerate(profile.choices):
        weighted = _weighted(layer, profile.num_heads)
        way = "per kv group" if layer.shared else "per head"
        table.add_row(str(index), way, _density(weighted), _worst(weighted), _patterns_text(layer))
    console.print(table)


def choices_text(layer: LayerChoices) -> str:
    """A layer in a few words: `6 vertical_slash, 3 dense per head; density 34%, worst error 0.041`."""
    counts = Counter(choice.spec.name for choice in layer.heads).most_common()
    each = [(choice, 1) for choice in layer.heads]
    names = ", ".join(f"{number} {name}" for name, number in counts)
    return f"{names} per {'kv group' if layer.shared else 'head'}; density {_density(each)}, worst error {_worst(each)}"


def draw_profile(profile: Profile, path: Path) -> None:
    """Write a PNG, whole or not at all: a row for each layer, a column for each query head, the pattern as colour, its
    density as strength. Cells of a kv group that share a selection are joined. Raises DiskError."""
    from PIL import Image, ImageDraw, ImageFont
    from PIL.PngImagePlugin import PngInfo

    font = ImageFont.load_default(TEXT - 4)
    title = _title(profile)
    left = MARGIN + 3 * TEXT
    top = MARGIN + 2 * TEXT
    step = CELL + GAP
    legend = top + step * profile.num_layers + TEXT
    names = [name for name in PATTERNS if name in _by_pattern(profile)]
    texts = max(font.getlength(text) for text in (title, NOTE))
    width = left + max(step * profile.num_heads, int(texts)) + MARGIN
    image = Image.new("RGB", (width, legend + (len(names) + 2) * TEXT + MARGIN), "white")
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, MARGIN - 4), title, fill="black", font=font)
    for head in range(0, profile.num_heads, 4):
        draw.text((left + step * head, top - TEXT), str(head), fill="black", font=font)
    for index, layer in enumerate(profile.choices):
        y = top + step * index
        if index % 2 == 0:
            draw.text((MARGIN, y), str(index), fill="black", font=font)
        wide = profile.num_heads // len(layer.heads)
        for place, choice in enumerate(layer.heads):
            x = left + step * wide * place
            draw.rectangle((x, y, x + step * wide - GAP - 1, y + CELL - 1), fill=_fill(choice))
    _draw_legend(draw, font, names, left, legend)
    notes, content = PngInfo(), io.BytesIO()
    notes.add_text(PICTURE_KEY, _digest(profile))
    image.save(content, format="PNG", pnginfo=notes)
    with disk_errors("write", path):
        replace_file(path, content.getvalue())


def shows(picture: Path, profile: Profile) -> bool:
    """Whether a file is a picture that `draw_profile` made of this profile."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # Of a very large picture, which is none of ours and is not decoded.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(picture, formats=["PNG"]) as image:
                return bool(image.info.get(PICTURE_KEY) == _digest(profile))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombWarning, Image.DecompressionBombError):
        return False


def _digest(profile: Profile) -> str:
    """What tells a profile from every other."""
    return blake2b(json.dumps(profile.as_json(), sort_keys=True).encode(), digest_size=16).hexdigest()


def _draw_legend(draw: ImageDraw, font: FreeTypeFont | ImageFont, names: Sequence[str], left: int, top: int) -> None:
    for row, name in enumerate(names):
        for step in range(5):
            x = left + step * TEXT
            draw.rectangle((x, top + row * TEXT, x + TEXT - 1, top + (row + 1) * TEXT - 3), fill=_shade(name, step / 4))
        draw.text((left + 6 * TEXT, top + row * TEXT - 2), name, fill="black", font=font)
    draw.text((left, top + len(names) * TEXT), NOTE, fill="black", font=font)


def _fill(choice: HeadChoice) -> tuple[int, int, int]:
    return _shade(choice.spec.name, 1.0 if choice.density is None else choice.density)


def _shade(name: str, density: float) -> tuple[int, int, int]:
    """The pattern's colour, paler where it selects less."""
    red, green, blue = COLORS[list(PATTERNS).index(name) % len(COLORS)]
    pale = PALEST * (1 - density)
    return tuple(round(part + (255 - part) * pale) for part in (red, green, blue))  # type: ignore[return-value]


def _title(profile: Profile) -> str:
    every = [pair for layer in profile.choices for pair in _weighted(layer, profile.num_heads)]
    return f"{profile.source}: {profile.num_layers} layers, {profile.num_heads} heads, density {_density(every)}"


def _facts(profile: Profile) -> list[tuple[str, str]]:
    calibration: dict[str, Any] = dict(profile.calibration)
    every = [pair for layer in profile.choices for pair in _weighted(layer, profile.num_heads)]
    kv_heads = "any number of" if profile.num_kv_heads is None else str(profile.num_kv_heads)
    facts = [
        ("source", f"{profile.source}, longbatch {profile.tool_version}, {profile.created}"),
        ("model", profile.model_hash or "any of these dimensions"),
        ("heads", f"{profile.num_layers} layers of {profile.num_heads} query heads and {kv_heads} kv heads"),
    ]
    if profile.tolerance is not None:
        of = _MEASURED.get(str(calibration.get("measure")), "a head's output")
        facts.append(("tolerance", f"{profile.tolerance:g}, relative L2 of {of}"))
    if lengths := calibration.get("lengths"):
        facts.append(("documents", f"{len(lengths)} of {min(lengths):,} to {max(lengths):,} tokens"))
    if calibration.get("priced_for"):
        facts.append(("priced for", str(calibration["priced_for"])))
    seconds, dense = calibration.get("seconds"), calibration.get("dense_seconds")
    if seconds and dense:
        facts.append(("attention", f"{seconds:.3g} s predicted for these documents, {dense:.3g} s dense"))
    facts.append(("density", _density(every)))
    return facts


def _weighted(layer: LayerChoices, num_heads: int) -> list[tuple[HeadChoice, int]]:
    """Each choice with the query heads that use it."""
    return [(choice, num_heads // len(layer.heads)) for choice in layer.heads]


def _by_pattern(profile: Profile) -> dict[str, list[tuple[HeadChoice, int]]]:
    found: dict[str, list[tuple[HeadChoice, int]]] = {}
    for layer in profile.choices:
        for choice, number in _weighted(layer, profile.num_heads):
            found.setdefault(choice.spec.name, []).append((choice, number))
    return dict(sorted(found.items(), key=lambda item: -sum(number for _, number in item[1])))


def _patterns_text(layer: LayerChoices) -> str:
    counts = Counter(_short(choice.spec) for choice in layer.heads).most_common()
    return ", ".join(f"{number} {text}" for text, number in counts)


def _short(spec: PatternSpec) -> str:
    """`a_shape 16/192`: the numbers in the order in which the table of patterns names them."""
    numbers = "/".join(f"{spec[parameter]:g}" for parameter in PATTERNS[spec.name].parameters)
    return f"{spec.name} {numbers}".strip()


def _density(choices: Sequence[tuple[HeadChoice, int]]) -> str:
    """The mean over query heads, `?` where some were not measured."""
    known = [(choice.density, number) for choice, number in choices if choice.density is not None]
    if len(known) < len(choices):
        return "?"
    total = sum(density * number for density, number in known)
    return f"{100 * total / sum(number for _, number in known):.1f}%"


def _worst(choices: Sequence[tuple[HeadChoice, int]]) -> str:
    errors = [choice.error for choice, _ in choices if choice.error is not None]
    return f"{max(errors):.3f}" if errors else "?"
