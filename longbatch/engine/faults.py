"""What a failed step, or numbers that cannot be used, mean for the row that is to blame."""

from __future__ import annotations

import logging

import torch

from longbatch.engine.limits import EngineLimits
from longbatch.errors import DeviceError, RowError

_log = logging.getLogger(__name__)


def require_device(fault: BaseException) -> None:
    """Raise DeviceError where the device itself failed: every later step would fail too, whatever its rows."""
    if isinstance(fault, torch.AcceleratorError) and not is_out_of_memory(fault):
        raise DeviceError(f"the device failed: {fault}", hint="run the same command again to continue") from fault


# What PyTorch and the libraries under it say where they have no exception class for it.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether a step failed for lack of memory on the device or on the host."""
    if isinstance(fault, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(fault, RuntimeError) and any(words in str(fault) for words in _OUT_OF_MEMORY)


def row_error(fault: BaseException) -> RowError:
    """The error of a row whose step failed with no other row in it."""
    if is_out_of_memory(fault):
        return RowError("out_of_memory", "the device ran out of memory for this row alone; shorten it or use --dtype")
    return RowError("internal", f"{type(fault).__name__} in the model's forward; the log has the details")


def log_fault(what: str, fault: BaseException, error: RowError) -> None:
    """Where memory ran out is of no interest; where anything else failed is."""
    _log.warning("%s failed: %s", what, error.type, exc_info=None if error.type == "out_of_memory" else fault)


def nonfinite() -> RowError:
    """The error of a row whose numbers cannot be used."""
    return RowError(
        "nonfinite_logits",
        "the model gave NaN or infinite values for this row; try --dtype float32, or check the weights",
    )


def late(limits: EngineLimits) -> RowError:
    """The error of a row that takes longer than a row may."""
    return RowError(
        "row_timeout", f"the row took longer than {limits.row_seconds:g} seconds; raise --row-timeout, or ask for less"
    )
