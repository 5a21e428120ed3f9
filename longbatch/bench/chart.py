"""A chart of points joined by lines, one series for each legend entry, as a PNG. Needs nothing but pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from longbatch.errors import DiskError

# Distinguishable also without red and green: Okabe and Ito's palette (2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
WIDTH, HEIGHT = 960, 640
LEFT, RIGHT, TOP, BOTTOM = 100, 30, 60, 70
# Values on a logarithmic axis are at least this.
LEAST = 1e-7


def write_chart(
    path: Path,
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    limit: float | None = None,
) -> None:
    """Draw (x, y) points, x linear from 0 and y logarithmic. limit: a y that a dashed line marks. Raises DiskError
    where the file cannot be written."""
    from PIL import Image, ImageDraw, ImageFont

    points = [point for line in series.values() for point in line]
    x_most = max(x for x, _ in points) * 1.05 or 1.0
    y_values = [max(y, LEAST) for _, y in points] + ([limit] if limit is not None else [])
    low, high = math.floor(math.log10(min(y_values))), math.ceil(math.log10(max(y_values)))
    high = max(high, low + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_most
        up = (math.log10(max(y, LEAST)) - low) / (high - low)
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up

    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    font, large = ImageFont.load_default(15), ImageFont.load_default(18)
    draw.text((LEFT, 10), title, fill="black", font=large)
    for decade in range(low, high + 1):
        _, y = place(0, 10.0**decade)
        draw.line([(LEFT, y), (WIDTH - RIGHT, y)], fill="#DDDDDD")
        draw.text((LEFT - 12, y), f"1e{decade}", fill="black", font=font, anchor="rm")
    for tick in _ticks(x_most):
        x, bottom = place(tick, 10.0**low)
        draw.line([(x, TOP), (x, bottom)], fill="#DDDDDD")
        draw.text((x, bottom + 8), f"{tick:g}", fill="black", font=font, anchor="ma")
    draw.rectangle([LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM], outline="black")
    draw.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 24), x_name, fill="black", font=font, anchor="mm")
    draw.text((LEFT, TOP - 8), y_name, fill="black", font=font, anchor="ls")
    if limit is not None:
        _, y = place(0, limit)
        for start in range(LEFT, WIDTH - RIGHT, 12):
            draw.line([(start, y), (min(start + 6, WIDTH - RIGHT), y)], fill="black", width=2)
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(x, y) for x, y in sorted(line)]
        if len(places) > 1:
            draw.line(places, fill=colour, width=2)
        for x, y in places:
            draw.ellipse([x - 5, y - 5, x + 5, y + 5], fill=colour)
        row = TOP + 18 + 22 * number
        draw.ellipse([WIDTH - 330, row - 5, WIDTH - 320, row + 5], fill=colour)
        draw.text((WIDTH - 312, row), name, fill="black", font=font, anchor="lm")
    try:
        image.save(path, format="PNG")
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}") from error


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most`, four to ten of them."""
    step = 10.0 ** math.floor(math.log10(most))
    while most / step < 4:
        step /= 2
    return [step * number for number in range(int(most / step) + 1)]
