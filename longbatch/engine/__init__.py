"""The engine: prefill in layer-major waves, paged decode, and what is read out of both."""

from longbatch.engine.engine import Engine
from longbatch.engine.limits import EngineAttention, EngineLimits
from longbatch.engine.spill import Spill
from longbatch.engine.warmup import warm_up

__all__ = ["Engine", "EngineAttention", "EngineLimits", "Spill", "warm_up"]
