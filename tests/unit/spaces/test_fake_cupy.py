"""CuPy without a GPU, as the tests use it: what it finds, and that it finds nothing in work that is in order."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cupy import Machine, RaceError

N = 64


def test_work_that_nothing_orders() -> None:
    cupy = Machine().process()
    one, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with one:
        array = cupy.zeros(N, np.float32)
    with other, pytest.raises(RaceError, match="nothing orders them"):
        np.add(array, 1, out=array)
    with other:
        np.add(cupy.zeros(N), 1)  # of its own
    other.wait_event(one.record())
    with other:
        array += 1
    event = other.record()
    with one, pytest.raises(RaceError):
        array += 1
    event.synchronize()  # the host has seen it
    with one:
        array += 1
    assert array.get(one).tolist() == [2] * N
