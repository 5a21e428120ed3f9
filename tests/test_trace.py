"""The stage timer."""

from __future__ import annotations

import threading
import time

import pytest

from longbatch.trace import Trace


def test_stages_add_up_and_nest() -> None:
    trace = Trace()
    for _ in range(3):
        with trace.stage("outer"), trace.stage("inner") as inner:
            time.sleep(0.01)
        assert inner.seconds >= 0.01
    trace.add("elsewhere", 2.5)
    totals = trace.totals()
    assert totals["outer"] >= totals["inner"] >= 0.03
    assert totals["elsewhere"] == 2.5
    assert trace.counts() == {"outer": 3, "inner": 3, "elsewhere": 1}


def test_a_stage_that_fails_is_counted() -> None:
    trace = Trace()
    with pytest.raises(ValueError, match="inside"), trace.stage("work"):
        raise ValueError("inside")
    assert trace.counts() == {"work": 1}


def test_threads_lose_nothing() -> None:
    trace = Trace()

    def work() -> None:
        for _ in range(2000):
            trace.add("work", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace.totals() == {"work": 8000.0}


@pytest.mark.gpu
def test_gpu_stages_measure_gpu_work() -> None:
    import torch

    trace = Trace(on_gpu=True)
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(10):
        with trace.stage("product"):
            matrix @ matrix
    totals = trace.totals()
    elapsed = time.monotonic() - start
    assert trace.counts() == {"product": 10}
    assert 0 < totals["product"] <= elapsed
