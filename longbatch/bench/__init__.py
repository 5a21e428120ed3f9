"""Benchmarks behind `longbatch bench`: a registry of names to modules, imported when one is asked for.

A benchmark is a module with `measure(...) -> Iterable[Measurement]`, whose keyword-only arguments, all with defaults,
are the options of the command that it reads. It runs the rival or the limit beside longbatch, and checks longbatch's
results against a reference in the same run. One that gives its measurements as they come loses none when it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from longbatch.bench.report import Measurement
from longbatch.errors import UsageError

BENCHES = {
    "attention": "longbatch.bench.attention",
    "decode": "longbatch.bench.decode",
    "fidelity": "longbatch.bench.fidelity",
    "job": "longbatch.bench.job",
    "manifest": "longbatch.bench.scale",
    "memory": "longbatch.bench.memory",
    "prefill": "longbatch.bench.prefill",
    "resume": "longbatch.bench.resume",
    "soak": "longbatch.bench.soak",
    "weights": "longbatch.bench.weights",
}

__all__ = ["BENCHES", "Measurement", "find"]


def find(name: str) -> Callable[..., Iterable[Measurement]]:
    """The benchmark of a name; its keyword arguments are the options that it reads. Raises UsageError that lists the
    known ones."""
    if name not in BENCHES:
        raise UsageError(f"there is no benchmark {name!r}", hint=f"one of: {', '.join(BENCHES)}")
    measure: Callable[..., Iterable[Measurement]] = import_module(BENCHES[name]).measure
    return measure
