"""The engine: prefill in layer-major waves, paged decode, and what is read out of both."""

from longbatch.engine.engine import Engine
from longbatch.engine.limits import EngineLimits

__all__ = ["Engine", "EngineLimits"]
