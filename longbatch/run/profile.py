"""Making a profile: model and calibration documents -> search -> profile and picture."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longbatch import __version__
from longbatch.config import Settings
from longbatch.config.kv_formats import plain_format
from longbatch.core import TASKS, Fault, Request
from longbatch.device import DeviceInfo, default_dtype, detect
from longbatch.errors import InterruptedRun, ManifestError, RowError, UsageError
from longbatch.folders import cache_folder
from longbatch.manifest import Manifest, ManifestOptions
from longbatch.models import ModelSpec, model_hash, read_spec
from longbatch.plan.candidates import candidates
from longbatch.plan.sparse_rates import PAIRS, REFERENCE, SparseRates, sparse_rates
from longbatch.plan.weights import budget_with_weights
from longbatch.prompt import PromptBuilder
from longbatch.report.profile_view import choices_text, draw_profile, print_profile, shows
from longbatch.report.units import seconds_text
from longbatch.run.job import DTYPE_BYTES, find_model, say_on_stderr
from longbatch.sparsity import Profile, ProfileError, import_minference

if TYPE_CHECKING:
    from longbatch.engine.search import LayerFound
    from longbatch.engine.search_state import SearchState

# A shorter document has too few keys to leave any out.
SHORTEST = 128
# Longer than any prompt, so that documents are cut here and not while they are read.
_UNCUT = 1 << 30
LINE_SECONDS = 30.0
# What of a search's identity is among the facts of its profile.
_CALIBRATION = ("documents", "measure", "price", "dtype")
# What --tolerance limits: the error of a head's attention output, or what it does to the hidden states. With `model`
# the latter is traded against time.
MEASURES = ("output", "stream", "model")
# What a selection costs: seconds on the device, or the pairs of query and key that it computes.
PRICES = ("time", "density")


@dataclass(frozen=True, slots=True)
class Goal:
    """What a search looks for. measure, price: among `MEASURES`, `PRICES`. Raises UsageError for what they are not, and
    for a tolerance that does not lie between 0 and 1."""

    tolerance: float
    measure: str
    price: str

    def __post_init__(self) -> None:
        for name, value, known in (("--measure", self.measure, MEASURES), ("--price", self.price, PRICES)):
            if value not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if not 0 < self.tolerance < 1:
            raise UsageError(f"--tolerance must lie between 0 and 1, not at {self.tolerance}")


def show_profile(path: Path, picture: Path | None) -> None:
    """Print a profile, and draw it if a picture is asked for. Raises ProfileError, DiskError."""
    profile = Profile.load(path)
    if picture is not None:
        _check_picture(picture, path, profile)
    print_profile(profile)
    if picture is not None:
        draw_profile(profile, picture)


def import_profile(path: Path, out: Path | None, picture: Path | None, *, quiet: bool) -> None:
    """Turn a MInference pattern file into a profile, written to `out`. Raises ProfileError, UsageError, DiskError."""
    target = _target(out)
    if target.exists():
        raise _taken(target)
    drawn = picture or _beside(target)
    _check_picture(drawn, target, None)
    _keep(import_minference(path), target, drawn, quiet=quiet)


def make_profile(
    settings: Settings,
    sources: Sequence[str],
    out: Path | None,
    goal: Goal,
    *,
    lengths: Sequence[int],
    picture: Path | None,
) -> None:
    """Search, write the profile and its picture, and print it. The same command again goes on where it was stopped, and
    only prints what is finished.

    settings: model, device, and how rows are read. lengths: tokens that documents are cut to; none if these
    are to be whole. Raises UsageError, ManifestError, DeviceError, DiskError, and InterruptedRun on Ctrl-C.
    """
    if not sources:
        raise UsageError("a search needs documents", hint="give some with --calibration MANIFEST")
    target = _target(out)
    drawn = picture or _beside(target)
    # Now, and not after hours of searching.
    _check_picture(drawn, target, _written(target))
    from longbatch.engine.search_state import remove_state, state_folder

    wanted = sorted(set(lengths))
    profile = search_profile(settings, sources, target, goal, lengths=wanted)
    _keep(profile, target, drawn, quiet=settings.quiet)
    if state_folder(target).exists():
        remove_state(target)


def _target(out: Path | None) -> Path:
    """Where the profile goes."""
    if out is None:
        raise UsageError("a profile needs a file", hint="give one with -o FILE")
    if not out.name or out.is_dir():
        raise UsageError(f"-o {out} is a folder", hint="give a file for the profile")
    return out


def _taken(out: Path) -> UsageError:
    return UsageError(f"{out} is there already", hint="delete it, or choose another -o")


def _beside(out: Path) -> Path:
    """Where the picture goes if nothing is said."""
    return out.with_suffix(".png")


def _written(out: Path) -> Profile | None:
    """The profile that is in the file already, if it is one."""
    try:
        return Profile.load(out) if out.exists() else None
    except ProfileError:
        return None


def _check_picture(picture: Path, out: Path, profile: Profile | None) -> None:
    """Raise UsageError where a picture would be written over the profile `out`, or over anything but a picture of
    `profile`, which is what a repeated command finds."""
    if picture.resolve() == out.resolve() or (picture.exists() and out.exists() and picture.samefile(out)):
        raise UsageError(
            f"the picture would be written over the profile {out}", hint="give it another name with --picture FILE"
        )
    if picture.exists() and (profile is None or not shows(picture, profile)):
        raise UsageError(
            f"{picture} is there already, and the picture would be written over it",
            hint="delete it, or give the picture another name with --picture FILE",
        )


def _keep(profile: Profile, out: Path, picture: Path, *, quiet: bool) -> None:
    """Write a profile and its picture, and print what is in it."""
    profile.save(out)
    # Again: a search takes long, and somebody may have come to use the name.
    _check_picture(picture, out, profile)
    draw_profile(profile, picture)
    if not quiet:
        print_profile(profile)


def search_profile(
    settings: Settings, sources: Sequence[str], out: Path, goal: Goal, *, lengths: Sequence[int]
) -> Profile:
    """Search, beside the file `out` that the profile will be, and return it. Raises as `make_profile` does."""
    from longbatch.engine.search_state import SearchState, state_folder

    say: Callable[[str], None] = (lambda text: None) if settings.quiet else say_on_stderr
    model_dir = find_model(settings.model, say)
    spec = read_spec(model_dir)
    if len({(layer.num_heads, layer.num_kv_heads) for layer in spec.layers}) > 1:
        raise UsageError("a profile needs a model with equally many heads in every layer")
    info = detect(settings.gpus)[0]
    dtype = default_dtype(info) if settings.dtype == "auto" else settings.dtype
    documents = calibration_documents(settings, sources, model_dir, spec, lengths, say)
    rates = PAIRS if goal.price == "density" else sparse_rates(info, dtype, cache_folder(), say) or REFERENCE
    digest = model_hash(model_dir)
    identity = {
        "model_hash": digest,
        "documents": [blake2b(ids.tobytes(), digest_size=16).hexdigest() for ids in documents],
        **asdict(goal),
        "dtype": dtype,
        "longbatch": __version__,
    }
    if out.exists() and not state_folder(out).exists():
        return _finished(out, identity)
    # Whoever goes on with the search, it stays the one that was begun.
    state = SearchState.open(out, identity, {"created": _now(), "device": info.name, "rates": asdict(rates)})
    try:
        rates = SparseRates(**state.facts["rates"])
    except (TypeError, ValueError) as error:
        raise state.fault("rates", f"are no rates: {error}") from None
    _say_plan([len(ids) for ids in documents], rates, say)
    try:
        found = list(_searched(settings, model_dir, info, dtype, documents, goal, rates, state, say))
    except KeyboardInterrupt:
        raise InterruptedRun(
            "stopped; finished layers are saved", hint="run the same command again to continue"
        ) from None
    return Profile(
        choices=tuple(layer.choices for layer in found),
        num_heads=spec.layers[0].num_heads,
        num_kv_heads=spec.layers[0].num_kv_heads,
        model_hash=digest,
        tolerance=goal.tolerance,
        source="search",
        created=state.facts["created"],
        calibration={
            **{name: identity[name] for name in _CALIBRATION},
            "lengths": [len(ids) for ids in documents],
            "device": state.facts["device"],
            "priced_for": rates.device,
            "seconds": sum(layer.seconds for layer in found),
            "dense_seconds": sum(layer.dense_seconds for layer in found),
            "searched": [index for index, layer in enumerate(found) if layer.num_trials],
        },
    )


def _finished(out: Path, identity: Mapping[str, object]) -> Profile:
    """The profile that an earlier process wrote, if it was this search that it finished."""
    try:
        profile = Profile.load(out)
    except ProfileError:
        raise _taken(out) from None
    own = {"model_hash": profile.model_hash, "tolerance": profile.tolerance, "longbatch": profile.tool_version}
    if {**own, **{name: profile.calibration.get(name) for name in _CALIBRATION}} != identity:
        raise _taken(out)
    return profile


def calibration_documents(
    settings: Settings,
    sources: Sequence[str],
    model_dir: Path,
    spec: ModelSpec,
    lengths: Sequence[int],
    say: Callable[[str], None],
) -> list[np.ndarray]:
    """The ids, int32 [N], of every document at every length that it reaches; without lengths, whole, as far as the
    model takes it. A document that is cut loses its middle, so that the end of the prompt stays the end.

    Raises UsageError for a length that the model does not take, ManifestError where nothing is left.
    """
    for length in lengths:
        if not SHORTEST <= length <= spec.max_length:
            raise UsageError(
                f"--lengths must lie between {SHORTEST} and the model's {spec.max_length:,}, not at {length}"
            )
    options = ManifestOptions(
        prompt=settings.prompt,
        system=settings.system,
        max_row_bytes=settings.max_row_bytes,
        limit=settings.limit,
        media_root=settings.media_root,
        ignore_unsupported=True,
    )
    manifest = Manifest.open(sources, options)
    builder = PromptBuilder(
        model_dir, _UNCUT, prompt_format=settings.prompt_format, document_root=manifest.root, default_max_tokens=1
    )
    documents: list[np.ndarray] = []
    for row, answer in _prompts(manifest, builder):
        if isinstance(answer, RowError):
            say(f"row {row} is left out: {answer.message}")
            continue
        wanted = [length for length in lengths if length <= len(answer)]
        if not lengths and len(answer) >= SHORTEST:
            wanted = [min(len(answer), spec.max_length)]
        if not wanted:
            say(f"row {row} is left out: {len(answer):,} tokens are too few")
        documents += [_cut(answer, length) for length in wanted]
    if not documents:
        raise ManifestError("no calibration document is left", hint="give longer ones, or smaller --lengths")
    return documents


def _prompts(manifest: Manifest, builder: PromptBuilder) -> Iterator[tuple[int, np.ndarray | RowError]]:
    """The ids of each row, or why there are none."""
    for found in manifest.rows():
        if isinstance(found, Fault):
            yield found.row, found.error
        elif found.sample == 0:
            try:
                yield found.row, builder.build(_read_only(found)).ids
            except RowError as error:
                yield found.row, error


def _read_only(request: Request) -> Request:
    """The request as a prompt of which nothing but reading is wanted."""
    return replace(request, task=TASKS["embed"], continuation=None, labels=())


def _cut(ids: np.ndarray, length: int) -> np.ndarray:
    if len(ids) <= length:
        return ids
    head = length // 2
    return np.concatenate([ids[:head], ids[len(ids) - (length - head) :]])


def _searched(
    settings: Settings,
    model_dir: Path,
    info: DeviceInfo,
    dtype: str,
    documents: Sequence[np.ndarray],
    goal: Goal,
    rates: SparseRates,
    state: SearchState,
    say: Callable[[str], None],
) -> Iterator[LayerFound]:
    """Every layer's outcome, each told as it comes."""
    import torch

    from longbatch.engine.search import Search
    from longbatch.models import load

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    spec, kv = read_spec(model_dir), plain_format(dtype)
    weights = budget_with_weights(settings.weights, spec, [info], DTYPE_BYTES[dtype], "auto", kv).weights
    model = load(model_dir, getattr(torch, dtype), torch.device(info.torch_name), weights=weights)
    progress = _Progress(len(model.layers), say)
    search = Search(model, documents, goal.tolerance, rates, state, progress.trial, measure=goal.measure)
    for layer in search.run():
        progress.layer(layer)
        yield layer


class _Progress:
    """A line for each layer, and one every half minute while a layer takes longer."""

    def __init__(self, num_layers: int, say: Callable[[str], None]) -> None:
        self._num_layers, self._say = num_layers, say
        self._done = self._searched = 0
        self._begin = self._last = time.monotonic()

    def trial(self, layer: int, num_trials: int) -> None:
        """A pass over the documents is done."""
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._line(f"layer {layer + 1}/{self._num_layers}: {num_trials} passes so far")

    def layer(self, found: LayerFound) -> None:
        """A layer is done."""
        self._done += 1
        if not found.num_trials:
            return
        self._searched += 1
        taken = time.monotonic() - self._begin
        left = taken / self._done * (self._num_layers - self._done)
        self._line(f"layer {self._done}/{self._num_layers}: {choices_text(found.choices)}; {seconds_text(left)} left")

    def _line(self, text: str) -> None:
        self._last = time.monotonic()
        self._say(f"{time.strftime('[%H:%M:%S]')} {text}")


def _say_plan(lengths: Sequence[int], rates: SparseRates, say: Callable[[str], None]) -> None:
    useful, num_dense = candidates(lengths)
    say(f"{len(lengths)} documents of {min(lengths):,} to {max(lengths):,} tokens, priced for {rates.device}")
    if num_dense:
        say(
            f"{num_dense} of {len(useful) + num_dense} candidates are left out: their budgets reach {max(lengths):,} "
            "tokens, so that they would select everything"
        )


def _now() -> str:
    """The time, or what SOURCE_DATE_EPOCH says it is, for files that can be made again byte by byte."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    return moment.isoformat(timespec="seconds")
