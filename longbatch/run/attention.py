"""How a run attends: what its settings come to for this model, on this device. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from longbatch.config import Settings
from longbatch.device import DeviceInfo
from longbatch.folders import cache_folder
from longbatch.models.spec import LayerSpec, ModelSpec
from longbatch.plan.sparse_cost import break_even
from longbatch.plan.sparse_rates import SparseRates, sparse_rates
from longbatch.plan.sparse_rows import SparseRows
from longbatch.sparsity import LayerPatterns, PatternSpec, Profile

PROFILE = "profile"


@dataclass(frozen=True)
class RunAttention:
    """layers: the patterns of every layer of the model; empty where every row is dense, and `why` then says why.

    name: what was asked for, whether or not it is used: `profile`, or the pattern that every head runs; None where
    nothing was. source: where the patterns come from, for a person. profile_hash: of the patterns in the profile.
    min_length: tokens from which a prompt runs sparse.
    """

    layers: tuple[LayerPatterns, ...] = ()
    name: str | None = None
    source: str = ""
    profile_hash: str | None = None
    min_length: int = 0
    why: str = ""

    @property
    def is_sparse(self) -> bool:
        """Whether long rows run sparse."""
        return bool(self.layers)

    def identity(self) -> dict[str, Any]:
        """What of it can change answers. Nothing where all is dense, as in runs that were started without any of it."""
        if not self.is_sparse:
            return {"attention": None, "profile_hash": None, "min_sparse_length": None}
        return {"attention": self.name, "profile_hash": self.profile_hash, "min_sparse_length": self.min_length}

    def asked(self, min_length: int | None) -> dict[str, Any]:
        """What a run was started with, apart from what that came to on its device. min_length: as given."""
        return {"attention": self.name, "profile_hash": self.profile_hash, "min_sparse_length": min_length}

    def dense(self, why: str) -> RunAttention:
        """The same asked for, and no row sparse."""
        return replace(self, layers=(), min_length=0, why=why)

    def as_begun(self, out: Path | None) -> RunAttention | None:
        """What the same, asked for without a least length, came to when the run in a folder began; None where none was
        begun, or with something else."""
        length = stored_length(out)
        if length is not None:
            return replace(self, min_length=length)
        content = _stored(out)
        try:
            if content["info"]["attention"] != self.asked(None) or "attention" in content["identity"]:
                return None
        except (KeyError, TypeError):
            return None
        return self.dense(f"{self.source}: not faster where this run began, and a run keeps to that")

    def describe(self) -> str:
        """One line for a person."""
        if not self.is_sparse:
            return f"dense ({self.why})"
        return f"sparse from {self.min_length:,} tokens ({self.source})"

    def rows(self, spec: ModelSpec, rates: SparseRates | None) -> SparseRows | None:
        """What sparse rows cost; None where no row is sparse, or sparse attention is no faster on the device."""
        if not self.is_sparse or rates is None:
            return None
        return SparseRows(tuple(_patterned(spec, self.layers)), self.min_length, rates)

    def as_json(self) -> dict[str, Any]:
        """JSON values for `from_json`."""
        layers = [{"heads": [str(head) for head in layer.heads], "shared": layer.shared} for layer in self.layers]
        return {
            "layers": layers,
            "name": self.name,
            "source": self.source,
            "profile_hash": self.profile_hash,
            "min_length": self.min_length,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunAttention:
        """What `as_json` described."""
        layers = [
            LayerPatterns(tuple(PatternSpec.parse(head) for head in layer["heads"]), layer["shared"])
            for layer in values["layers"]
        ]
        return cls(**{**values, "layers": tuple(layers)})


@dataclass(frozen=True)
class Device:
    """What is asked of the device only where it matters. say: told, in one line, before something takes seconds."""

    info: DeviceInfo
    dtype: str
    say: Callable[[str], None] = lambda text: None

    @cached_property
    def rates(self) -> SparseRates | None:
        """How fast it runs selections: measured once, None on a CPU. Raises DeviceError."""
        return sparse_rates(self.info, self.dtype, cache_folder(), self.say)


def resolve_attention(settings: Settings, spec: ModelSpec, model_hash: str, device: Device) -> RunAttention:
    """What the settings come to. Where no least length is given, a run that was started before keeps what they came to
    then, whatever device goes on with it.

    Raises UsageError where the profile is another model's or cannot be read.
    """
    chosen = _chosen(settings, spec, model_hash)
    if not chosen.is_sparse:
        return chosen
    patterned = list(_patterned(spec, chosen.layers))
    if not patterned:
        return chosen.dense(f"{chosen.source}: no layer of this model sees the whole prompt with uncapped scores")
    if all(patterns.is_dense for _, patterns in patterned):
        return chosen.dense(f"{chosen.source} has no sparse head")
    length = settings.min_sparse_length
    if length is None:
        begun = chosen.as_begun(settings.out)
        if begun is not None:
            return begun
    if length is None and device.rates is not None:
        length = break_even(patterned, device.rates)
    if length is None:
        reason = "never faster on this device; --min-sparse-length N runs it all the same"
        return chosen.dense(f"{chosen.source}: {reason}")
    return replace(chosen, min_length=length)


def stored_length(out: Path | None) -> int | None:
    """The least length of sparse rows that a run folder was started with, if it is one and has one."""
    content = _stored(out)
    try:
        found = content["identity"].get("min_sparse_length")
    except (KeyError, TypeError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def _stored(out: Path | None) -> Any:
    """What run.json says; nothing where there is none."""
    try:
        return json.loads(((out or Path()) / "run.json").read_bytes())
    except (OSError, ValueError):
        return {}


def _chosen(settings: Settings, spec: ModelSpec, model_hash: str) -> RunAttention:
    """The patterns that are asked for."""
    if settings.attention == "dense":
        return RunAttention(why="--attention dense")
    if settings.attention != "auto":
        pattern = PatternSpec.parse(settings.attention)
        layers = tuple(LayerPatterns((pattern,) * layer.num_heads, False) for layer in spec.layers)
        return RunAttention(layers, str(pattern), str(pattern))
    if settings.profile is None:
        return RunAttention(why="no profile")
    profile = Profile.load(settings.profile)
    profile.check(model_hash, spec)
    found = RunAttention(tuple(profile.layers), PROFILE, f"profile {settings.profile}")
    # The patterns change answers; when and with what they were found does not.
    content = json.dumps(found.as_json()["layers"]).encode()
    return replace(found, profile_hash=blake2b(content, digest_size=16).hexdigest())


def _patterned(spec: ModelSpec, layers: tuple[LayerPatterns, ...]) -> list[tuple[LayerSpec, LayerPatterns]]:
    """The layers that patterns can be used in, with theirs."""
    pairs = zip(spec.layers, layers, strict=True)
    return [(layer, patterns) for layer, patterns in pairs if layer.is_plain]
