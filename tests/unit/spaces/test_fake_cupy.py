"""CuPy without a GPU, as the tests use it: what it finds, and that it finds nothing in work that is in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_cupy import Machine, RaceError

N = 64


def copied(cupy: Any, array: Any, stream: Any) -> tuple[np.ndarray, Any]:
    host = cupy.cuda.alloc_pinned_memory(array.nbytes)
    array.data.copy_to_host_async(host.ctypes.data, array.nbytes, stream)
    return host.view(array.dtype), stream.record()


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


def test_host_memory() -> None:
    """What is read too early is 0xFF; what changes on its way is found."""
    cupy = Machine().process()
    array = cupy.zeros(N, np.uint8)
    host, event = copied(cupy, array, cupy.null)
    assert set(host) == {0xFF}
    event.synchronize()
    assert set(host) == {0}
    array.data.copy_from_host_async(host.ctypes.data, N)
    host[0] = 1
    with pytest.raises(RaceError, match="changed while"):
        cupy.null.synchronize()
    with pytest.raises(AssertionError, match="not page-locked"):
        array.data.copy_from_host_async(np.zeros(N, np.uint8).ctypes.data, N)
    assert cupy.machine.counts["down_bytes"] == cupy.machine.counts["up_bytes"] == N


def test_memory_of_a_pool_comes_again() -> None:
    """To the stream that had it, full of 0xFF, while another one may still work on it."""
    cupy = Machine().process()
    one, other = cupy.cuda.Stream(), cupy.cuda.Stream()
    with one:
        array = cupy.zeros(N, np.uint8)
        other.wait_event(one.record())
        host, event = copied(cupy, array, other)
        address = array.data.ptr
        del array
        again = cupy.empty(N, np.uint8)
        assert again.data.ptr == address
        with pytest.raises(RaceError):
            again[...] = 1
        event.synchronize()
        again[...] = 1
    assert set(host) == {0}
