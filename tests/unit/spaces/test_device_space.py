"""Device memory on the fake CuPy: what the space puts into which stream, whose memory it is, and what CUDA refuses."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import gpu_of, one_gpu

from mpikv.arrays import tensors
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.spaces import callers
from mpikv.spaces.callers import CallersGpuArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.gpu import Gpu, OutOfDeviceMemory
from mpikv.spaces.named import Spaces

F4 = np.dtype(np.float32)


@pytest.fixture
def made() -> tuple[Any, DeviceSpace]:
    cupy, gpu = one_gpu()
    return cupy, DeviceSpace(gpu)


def total(space: DeviceSpace, *arrays: Any, **more: Any) -> Any:
    return space.total(space.callers_arrays(arrays), "a value", on_device=True, **more)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int64])
def test_arrays_of_callers_come_and_go(made: Any, dtype: Any) -> None:
    cupy, space = made
    values = np.arange(12).reshape(3, 4).astype(dtype)
    on_gpu = cupy.asarray(values)
    for first in (on_gpu, on_gpu.T, on_gpu[:, 1:3], on_gpu[0, 0], values):
        taken = total(space, first)
        expected = (first if isinstance(first, np.ndarray) else first.get()).reshape(-1)
        assert np.array_equal(space.to_host(taken), expected)
    assert space.to_host(total(space, on_gpu, on_gpu, values)).tolist() == (3 * values).reshape(-1).tolist()
    assert space.to_host(total(space, on_gpu, on_gpu, combine=np.maximum)).tolist() == values.reshape(-1).tolist()
    out, strided = cupy.zeros((4, 3), dtype), cupy.zeros((3, 4, 2), dtype)
    (one, two) = space.callers_arrays([out, strided[:, :, 1]])
    space.write(one, total(space, on_gpu), "out")
    space.write(two, total(space, on_gpu), "out")
    assert out.get().tolist() == values.reshape(4, 3).tolist()
    assert strided.get()[:, :, 1].tolist() == values.tolist()
    assert not strided.get()[:, :, 0].any()


def test_memory_within_the_space(made: Any) -> None:
    _, space = made
    a, b = space.from_host(np.arange(8, dtype=F4)), space.zeros(8, F4)
    space.copy(b, a)
    space.copy(b[:2], 7)
    space.scale(b, 0.5, b)
    assert space.to_host(b).tolist() == [3.5, 3.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert space.cast(b, F4) is b
    assert space.cast(b, np.dtype(np.int32)).dtype == np.int32
    space.copy(b, np.ones(8, F4))
    assert space.to_host(b).tolist() == [1] * 8
    host = space.page_locked(32).view(F4)
    space.download(host, a)
    assert host.view(np.uint8).tolist() == [0xFF] * 32  # not before the host has seen the copy end
    space.synchronize()
    assert host.tolist() == list(range(8))
    host[:] = 5
    space.upload(b, host)
    del host  # the space keeps it until it is copied
    gc.collect()
    with space.in_stream():
        np.add(b, b, out=b)
    assert space.to_host(b).tolist() == [10] * 8


def test_a_caller_may_go_on_at_once_and_is_not_waited_for(made: Any) -> None:
    """What is pushed is copied in the caller's stream; the store's own does not wait for it before somebody asks."""
    cupy, space = made
    machine = cupy.machine
    with cupy.cuda.Stream(non_blocking=True) as stream:
        grad = cupy.asarray(np.ones(4, F4))
        machine.hold(stream)  # a backward pass that takes long
        grad += 1
        pushed = total(space, grad)
        grad += 1  # the caller's next pass: not in what was pushed
        (out,) = space.callers_arrays([grad])
    assert not space.written(pushed).test()
    space.synchronize()  # nothing of that is behind the held stream
    machine.hold(stream, held=False)
    while not space.written(pushed).test():
        pass
    assert space.to_host(pushed).tolist() == [2] * 4
    space.write(out, pushed, "out")
    with stream:
        assert (grad + 1).get().tolist() == [3] * 4


def test_memory_of_a_push_is_used_again_only_behind_the_stores_stream() -> None:
    cupy, gpu = one_gpu(eager=True)
    space = DeviceSpace(gpu)
    grad = cupy.asarray(np.ones(4, F4))
    for _ in range(5):
        pushed = total(space, grad)
        space.wait_for_callers(pushed)
        with space.in_stream():
            pushed += 1
        del pushed
        grad += 1  # in another stream, in the order of which the next push is copied
    gc.collect()
    space.synchronize()
    before = cupy.machine.counts["mallocs"]
    for _ in range(20):
        pushed = total(space, grad)
        space.wait_for_callers(pushed)
        space.synchronize()
    assert cupy.machine.counts["mallocs"] <= before + 1
    total(space, grad)  # nobody has read it
    gc.collect()
    assert space.to_host(total(space, grad)).tolist() == [6] * 4


def test_in_place(made: Any) -> None:
    cupy, space = made
    spaces = Spaces(device=space)
    weight = cupy.asarray(np.ones((2, 2), F4))
    (caller,) = spaces.callers_arrays([weight])
    held = space.in_place(caller, "a weight")
    space.wait_for_callers(held)
    with space.in_stream():
        held *= np.float32(3)
    spaces.make_callers_wait([caller])
    assert (weight + 0).get().tolist() == [[3, 3], [3, 3]]
    assert space.is_view_of(held, spaces.callers_arrays([weight])[0])
    assert not space.is_view_of(held, spaces.callers_arrays([weight.copy()])[0])
    assert space.in_place(spaces.callers_arrays([weight.T[:1]])[0], "a weight") is None
    assert spaces.sums_of_squares([weight, np.full(3, 2.0)], ["a", "b"]) == [36.0, 12.0]
    spaces.scale(weight, 0.5, "a weight")
    assert weight.get().tolist() == [[1.5, 1.5], [1.5, 1.5]]


@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_another_gpus_arrays(step: int) -> None:
    """Also in a stream of its own there; and while the store's stream reads, the caller writes again."""
    cupy = Machine(2).process()
    space = DeviceSpace(gpu_of(cupy, 0))
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            other = cupy.asarray(np.arange(4 * step, dtype=F4))[::step]
            taken = total(space, other)
            other += 1
            assert space.to_host(taken).tolist() == [0, step, 2 * step, 3 * step]
            assert space.in_place(space.callers_arrays([other])[0], "a value") is None
            space.write(space.callers_arrays([other])[0], total(space, np.ones(4, F4)), "out")
            assert (other + 0).get().tolist() == [1] * 4


def test_slices_of_one_array_that_are_written_in_two_streams(made: Any) -> None:
    cupy, space = made
    whole, held = cupy.asarray(np.zeros(8, F4)), []
    cupy.null.synchronize()
    for part in (whole[:4], whole[4:]):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            cupy.machine.hold(stream)
            np.add(part, np.float32(1), out=part)
            held.append((stream, space.in_place(space.callers_arrays([part])[0], "a part")))
    written = space.written(held[0][1])
    for stream, _ in held:
        assert not written.test()
        cupy.machine.hold(stream, held=False)
    while not written.test():
        pass
    space.wait_for_callers(held[0][1], held[1][1])
    with space.in_stream():
        np.add(held[0][1], held[1][1], out=held[0][1])
    assert space.to_host(held[0][1]).tolist() == [2] * 4


def test_arrays_of_one_stream_wait_once(made: Any) -> None:
    """However many objects stand for the stream, such as PyTorch's of each tensor."""
    cupy, space = made
    arrays = space.callers_arrays([cupy.zeros(2, F4) for _ in range(3)])
    null = [cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, 0))) for _ in arrays]
    before = cupy.machine.counts["waits"]
    space.make_callers_wait([one._replace(stream=stream) for one, stream in zip(arrays, null, strict=True)])
    assert cupy.machine.counts["waits"] == before + 1


def test_the_copy_of_an_array_of_jax_is_waited_for(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA uses memory again that nobody refers to, in streams that wait for nothing of the store's."""
    cupy, space = made
    monkeypatch.setattr(tensors, "is_jax", lambda _array: True)
    memory = cupy.asarray(np.ones(4, F4))
    monkeypatch.setattr(callers, "callers_gpu_array", lambda *_: CallersGpuArray(memory, memory, cupy.null, 0, None))
    monkeypatch.setattr(callers, "on_gpu", lambda _array: True)
    pushed = total(space, memory)
    cupy.machine.host_access(memory, writes=True)  # as anybody may, who waits for nothing
    assert space.to_host(pushed).tolist() == [1] * 4


def test_a_thread_goes_back_to_the_gpu_that_its_caller_has_used_and_to_no_other() -> None:
    cupy = Machine(3).process()
    space = DeviceSpace(gpu_of(cupy, 2))
    space.zeros(4, F4)
    assert cupy.contexts == {2}  # none on GPU 0, where threads begin
    assert cupy.cuda.runtime.getDevice() == 2
    with cupy.cuda.Device(1):
        cupy.zeros(1)
        space.synchronize()
        assert cupy.cuda.runtime.getDevice() == 1
    current: list[int] = []
    thread = threading.Thread(target=lambda: (space.zeros(4, F4), current.append(cupy.cuda.runtime.getDevice())))
    thread.start()
    thread.join()
    assert (current, cupy.contexts) == ([2], {1, 2})


def test_memory_that_runs_out_says_what_to_do() -> None:
    _, gpu = one_gpu(memory_bytes=1 << 20)
    space = DeviceSpace(gpu)
    with pytest.raises(OutOfDeviceMemory, match=r"GPU 0 \(Fake GPU\) is out of memory: .* torch.cuda.empty_cache"):
        space.empty(1 << 20, F4)
    assert isinstance(OutOfDeviceMemory("x"), MemoryError)
    space.empty(1 << 10, F4)


def test_a_gpu_that_fails_ends_every_wait_with_an_error(made: Any) -> None:
    cupy, space = made
    request = space.stream_event()
    cupy.machine.failed = 700
    for call in (request.test, space.synchronize, lambda: space.zeros(1, F4)):
        with pytest.raises(MpikvError, match=r"GPU 0 .* cannot use the GPU any more.* compute-sanitizer"):
            call()


def test_who_waits_for_the_gpu_sleeps_and_is_woken(made: Any) -> None:
    cupy, space = made
    rung, woken = threading.Event(), threading.Event()
    space.on_done(rung.set)
    cupy.machine.hold(space.stream)
    space.zeros(4, F4)
    request = space.stream_event()

    class Waiter:
        def wake(self) -> None:
            woken.set()

    assert not request.test()
    assert request.wakes(Waiter())  # type: ignore[attr-defined]
    assert not woken.is_set()
    cupy.machine.hold(space.stream, held=False)
    assert woken.wait(30)
    assert rung.wait(30)
    assert request.test()
    space.close()


def test_cupy_that_is_too_old_or_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = Machine().process()
    with pytest.raises(UnsupportedError, match="GPU 1 cannot be used: this process sees 1"):
        Gpu(1, cupy)
    with pytest.raises(UnsupportedError, match="finds no GPU"):
        Gpu(0, Machine().process(()))
    monkeypatch.setattr(type(cupy), "__version__", "13.4.1")
    with pytest.raises(UnsupportedError, match=r"CuPy 13.4.1 is too old, 14 is needed"):
        Gpu(0, cupy)
