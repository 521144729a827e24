"""CuPy without a GPU, as the tests use it: what it finds, and that it finds nothing in work that is in order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_cupy import Machine, RaceError
from fake_nccl import CallOrderError

N = 64


def copied(cupy: Any, array: Any, stream: Any) -> tuple[np.ndarray, Any]:
    """Host memory that an array is copied to, and the event behind that."""
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


def test_a_stream_that_does_not_go_on() -> None:
    machine = Machine(eager=True)
    stream = machine.process().cuda.Stream()
    before = stream.record()
    machine.hold(stream)
    with stream:
        stream.process.zeros(N)
    event = stream.record()
    assert (before.done, event.done) == (True, False)
    machine.hold(stream, held=False)
    assert event.done


def test_errors() -> None:
    machine = Machine(memory_bytes=4096)
    cupy = machine.process()
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Out of memory allocating 8,192 bytes"):
        cupy.empty(8192, np.uint8)
    array = cupy.zeros(N)
    for wrong in (lambda: np.asarray(array), lambda: array + np.zeros(N), lambda: np.max(array, initial=0.0)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(NotImplementedError):
        np.maximum.reduce(array)
    with pytest.raises(AttributeError):
        _ = array.flags.writeable


def with_nccl(n: int, work: Any) -> list[Any]:
    """What `work(rank, cupy, comm)` gives on each rank, a thread."""
    machine = Machine(n)
    unique_id = machine.process().cuda.nccl.get_unique_id()

    def run(rank: int) -> Any:
        cupy = machine.process((rank,))
        comm = cupy.cuda.nccl.NcclCommunicator(n, unique_id, rank)
        try:
            return work(rank, cupy, comm)
        except AssertionError as error:
            comm.abort()
            return error

    with ThreadPoolExecutor(n) as ranks:
        return list(ranks.map(run, range(n), timeout=60))


def test_nccl_adds_and_work_behind_it_waits() -> None:
    n, gone = 3, threading.Barrier(3)

    def work(rank: int, cupy: Any, comm: Any) -> Any:
        stream, (floats, add, largest) = cupy.null, (7, 0, 2)
        array = cupy.zeros(n * N, np.float32)
        array += rank + 1
        whole = array.data.ptr
        part = whole + rank * N * 4
        if rank == 0:
            gone.wait(30)
        comm.reduceScatter(whole, part, N, floats, add, stream.ptr)
        comm.allGather(part, whole, N, floats, stream.ptr)
        made = array * 2  # new memory, before the others have come
        array += made
        host, event = copied(cupy, array, stream)
        early = event.done and rank > 0
        if rank:
            gone.wait(30)
        event.synchronize()
        for root in range(n):
            comm.broadcast(whole, whole, N, floats, root, stream.ptr)
            comm.reduce(part, part, N, floats, largest, root, stream.ptr)
        stream.synchronize()
        comm.destroy()
        return set(host.tolist()), set(array.get().tolist()), early

    assert with_nccl(n, work) == [({18.0}, {18.0}, False)] * n


def test_nccl_in_another_order_or_given_up() -> None:
    def order(rank: int, cupy: Any, comm: Any) -> Any:
        array = cupy.zeros(N, np.float32)
        comm.allReduce(array.data.ptr, array.data.ptr, N - rank, 7, 0, cupy.null.ptr)

    assert {type(one) for one in with_nccl(2, order)} == {CallOrderError, type(None)}

    def give_up(rank: int, cupy: Any, comm: Any) -> Any:
        array = cupy.zeros(N, np.uint8)
        if rank == 0:
            comm.allReduce(array.data.ptr, array.data.ptr, N, 1, 0, cupy.null.ptr)
            assert not cupy.null.record().done
        comm.abort()
        with pytest.raises(cupy.cuda.nccl.NcclError):
            comm.allReduce(array.data.ptr, array.data.ptr, N, 1, 0, cupy.null.ptr)
        return set(array.get())

    assert with_nccl(2, give_up) == [{0xFF}, {0}]


def test_calls_are_recorded() -> None:
    machine = Machine()
    array = machine.process().zeros(N, np.float32)
    array *= np.float64(2)
    array[3] = 7  # one element is a view
    assert (int(array[3]), array[3].shape, array[3].data.ptr - array.data.ptr) == (7, (), 12)
    np.take(array, array.astype(np.int64), axis=0)
    assert {
        fake_cupy.Call("multiply", ("float32", "float64"), ("out",), "float32", True),
        fake_cupy.Call("astype", ("float32",), (), "int64", True),
        fake_cupy.Call("take", ("float32", "int64"), ("axis",), "float32", False),
    } < machine.calls
