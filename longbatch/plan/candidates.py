"""The patterns and budgets that a profile chooses from, and which of them select more than others. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longbatch.sparsity import PatternSpec

# Budgets from below MInference's smallest to beyond its largest; then what is left of its menu.
_VERTICAL = (30, 60, 100, 175, 250, 500, 750, 1000, 1500, 2000, 3500, 7000, 14000)
_SLASH = (100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 4800, 6096, 12192, 24384)
_MENU = ((100, 750), (500, 700), (1000, 4096))
_SINKS = (16, 128)
_WINDOWS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3968, 8000, 16000)
_TOP_K = (4, 8, 16, 24, 32, 48, 64, 100, 200, 400)
_MASS = (0.8, 0.9, 0.95, 0.98, 0.99)
_THRESHOLDS = (0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_KEY_MASS = (0.6, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
# Rows of a run, every which of them is sampled, and the window: from cheap to exact.
_RUNS = ((512, 16, 128), (512, 8, 128), (128, 8, 256), (128, 4, 128), (64, 2, 128))
# More blocks than any prompt has.
_ANY = 1 << 20

# By pattern: parameters of which a larger value selects more. All others must be equal for two specs to compare.
_GROWING = {
    "a_shape": ("sinks", "window"),
    "tri_shape": ("sinks", "window", "last"),
    "vertical_slash": ("vertical", "slash"),
    "block_sparse": ("top_k", "mass"),
    "antidiagonal": ("threshold",),
    "strided": ("local",),
    "stripes": ("mass",),
}


def grid() -> Iterator[PatternSpec]:
    """Every candidate but dense, which is always one."""
    for vertical in _VERTICAL:
        for slash in _SLASH:
            yield PatternSpec.make("vertical_slash", vertical=vertical, slash=slash)
    for vertical, slash in _MENU:
        yield PatternSpec.make("vertical_slash", vertical=vertical, slash=slash)
    for sinks in _SINKS:
        for window in _WINDOWS:
            yield PatternSpec.make("a_shape", sinks=sinks, window=window)
    yield PatternSpec.make("a_shape", sinks=100, window=800)
    for window in _WINDOWS[::2]:
        yield PatternSpec.make("tri_shape", sinks=128, window=window)
    for top_k in _TOP_K:
        yield PatternSpec.make("block_sparse", top_k=top_k)
    for mass in _MASS:
        yield PatternSpec.make("block_sparse", top_k=_ANY, mass=mass)
    for stride in (8, 16):
        for threshold in _THRESHOLDS:
            yield PatternSpec.make("antidiagonal", stride=stride, threshold=threshold)
    for stride in (4, 8, 16):
        for local in (4, 16):
            yield PatternSpec.make("strided", stride=stride, local=local)
    for rows, step, window in _RUNS:
        for mass in _KEY_MASS:
            yield PatternSpec.make("stripes", mass=mass, window=window, rows=rows, step=step)


def candidates(lengths: Sequence[int]) -> tuple[tuple[PatternSpec, ...], int]:
    """The grid for documents of these lengths, and how many of it are left out because their budget reaches the longest
    one, so that they would select everything."""
    all_of_them = list(grid())
    useful = tuple(spec for spec in all_of_them if budget(spec) < max(lengths))
    return useful, len(all_of_them) - len(useful)


def budget(spec: PatternSpec) -> float:
    """Keys that a query may always use, 0 where the data decide: from a prompt of that many tokens on a pattern selects
    less than all."""
    if spec.name == "vertical_slash":
        return max(spec["vertical"], spec["slash"])
    if spec.name in ("a_shape", "tri_shape"):
        return spec["sinks"] + spec["window"]
    if spec.name == "block_sparse":
        return 0 if spec["mass"] else spec["top_k"] * spec["block"]
    if spec.name == "strided":
        return spec["local"] * spec["block"]
    return 0


def covers(larger: PatternSpec, smaller: PatternSpec) -> bool:
    """Whether a pattern selects at least what another of its kind selects, whatever the data: the same one with larger
    budgets."""
    if larger.is_dense:
        return True
    if larger.name != smaller.name:
        return False
    growing = _GROWING.get(larger.name, ())
    for name, value in larger.parameters:
        other = smaller[name]
        if value < other if name in growing else value != other:
            return False
    # Both kinds of block_sparse have a top_k, one as its budget and one as a limit: they do not compare.
    return larger.name != "block_sparse" or bool(larger["mass"]) == bool(smaller["mass"])
