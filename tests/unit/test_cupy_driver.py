"""The driver over CuPy asks CUDA for the right thing, on the right device, and says what CUDA refuses.

CuPy is a stand-in that notes its calls; its functions take what those of CuPy 13.6 and 14.2 take.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpikv.errors import MpikvError, UnsupportedError
from mpikv.spaces import arithmetic, source
from mpikv.spaces.cupy_driver import CupyDriver, devices
from mpikv.spaces.driver import Driver, OutOfDeviceMemory
from mpikv.spaces.tracing import trace

FLOAT32 = np.dtype(np.float32)
MIB = 1 << 20


class CudaError(RuntimeError):
    """As CuPy's three: CUDA's number is `status`."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaErrorNumber{status}: what it means")


class Event:
    def __init__(self, cupy: FakeCupy, block: bool = False, disable_timing: bool = False) -> None:
        assert disable_timing
        cupy.note("Event")
        self.ptr = 900 + len(cupy.calls)


class FakeCupy(types.ModuleType):
    """CuPy with two GPUs. calls: (device, function, arguments); fails: the status of the next call of a function."""

    __version__ = "14.2.0"

    def __init__(self) -> None:
        super().__init__("cupy")
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        self.current, self.n_devices, self.queried = 0, 2, 0
        self.texts: list[str] = []
        self.host: dict[int, Any] = {}
        runtime = types.SimpleNamespace(
            CUDARuntimeError=CudaError,
            memcpyDefault=4,
            streamNonBlocking=1,
            getDeviceCount=self.count,
            getDevice=lambda: self.current,
            setDevice=self.set_device,
            getDeviceProperties=self.properties,
            deviceGetPCIBusId=lambda device: f"0000:{device:02x}:00.0",
            malloc=lambda size: self.note("malloc", size) or 0x1000,
            free=lambda ptr: self.note("free", ptr),
            memGetInfo=lambda: (5, 7),
            hostAlloc=self.host_alloc,
            freeHost=lambda ptr: self.note("freeHost", ptr),
            hostRegister=lambda ptr, size, flags: self.note("hostRegister", ptr, size, flags),
            hostUnregister=lambda ptr: self.note("hostUnregister", ptr),
            ipcGetMemHandle=lambda ptr: self.note("ipcGetMemHandle", ptr) or bytes(range(64)),
            ipcOpenMemHandle=lambda handle: self.note("ipcOpenMemHandle", handle) or 0x2000,
            ipcCloseMemHandle=lambda ptr: self.note("ipcCloseMemHandle", ptr),
            streamCreateWithFlags=lambda flags: self.note("streamCreateWithFlags", flags) or 0x77,
            eventRecord=lambda event, stream: self.note("eventRecord", event, stream),
            streamWaitEvent=lambda stream, event: self.note("streamWaitEvent", stream, event),
            eventQuery=lambda event: self.note("eventQuery", event) or self.queried,
            memcpyAsync=lambda to, source, size, kind, stream: self.note("memcpyAsync", to, source, size, kind, stream),
        )
        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            driver=types.SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {})),
            compiler=types.SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
            nvrtc=types.SimpleNamespace(NVRTCError=type("NVRTCError", (RuntimeError,), {})),
            Event=lambda **kwargs: Event(self, **kwargs),
            UnownedMemory=lambda ptr, size, owner, device_id: ("memory", ptr, size, owner, device_id),
            MemoryPointer=lambda mem, offset: ("pointer", mem, offset),
        )
        self.ndarray = lambda shape, dtype, memptr: ("array", shape, dtype, memptr)

    def note(self, name: str, *args: Any) -> None:
        status = self.fails.pop(name, 0)
        if status:
            raise CudaError(status)
        self.calls.append((self.current, name, *args))

    def count(self) -> int:
        if "getDeviceCount" in self.fails:
            raise CudaError(self.fails["getDeviceCount"])
        return self.n_devices

    def set_device(self, device: int) -> None:
        self.current = device

    def properties(self, device: int) -> dict[str, Any]:
        return {"name": b"Fake A100", "uuid": bytes([device] * 16), "multiProcessorCount": 10}

    def host_alloc(self, size: int, flags: int) -> int:
        self.note("hostAlloc", size, flags)
        memory = (ctypes.c_uint8 * size)()
        self.host[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:  # noqa: N802 - CuPy's name
        assert options == source.OPTIONS
        self.texts.append(code)

        def get_function(name: str) -> Any:
            assert f" {name}(const {name}_table table)" in code

            def call(grid: Any, block: Any, args: Any, shared_mem: int, stream: Any) -> None:
                (table,) = args
                assert table.size == 1
                self.note("launch", grid, block, table, shared_mem, stream.ptr)

            return types.SimpleNamespace(kernel=call)

        return types.SimpleNamespace(get_function=get_function)

    def taken(self) -> list[tuple[Any, ...]]:
        """What has been called since the last time."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    yield fake
    assert fake.current == 0  # whatever happened, the caller's device is the current one


@pytest.fixture
def driver(cupy: FakeCupy) -> CupyDriver:
    """That of the second GPU."""
    made = CupyDriver(1)
    cupy.taken()
    return made


# --- which GPUs there are


def test_the_devices(cupy: FakeCupy) -> None:
    assert devices() == (2, "")


@pytest.mark.parametrize(("status", "said"), [(35, "Number35.*driver of NVIDIA"), (100, "CUDA_VISIBLE_DEVICES")])
def test_no_driver_and_no_device(cupy: FakeCupy, status: int, said: str) -> None:
    cupy.fails["getDeviceCount"] = status
    n_gpus, reason = devices()
    assert n_gpus == 0
    assert re.search(said, reason)
    with pytest.raises(UnsupportedError, match=f"GPU 0 cannot be used.*{said}"):
        CupyDriver(0)


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    n_gpus, reason = devices()
    assert n_gpus == 0
    assert "pip install" in reason
    with pytest.raises(UnsupportedError, match="pip install"):
        CupyDriver(0)


def test_none_of_them(cupy: FakeCupy) -> None:
    cupy.n_devices = 0
    assert devices().n_gpus == 0
    assert "nvidia-smi" in devices().reason


@pytest.mark.parametrize("number", [-1, 2])
def test_a_number_that_no_device_has(cupy: FakeCupy, number: int) -> None:
    with pytest.raises(UnsupportedError, match=f"GPU {number} .*this process sees 2"):
        CupyDriver(number)


def test_it_is_a_driver(driver: CupyDriver) -> None:
    assert (driver.number, driver.name, driver.uuid) == (1, "Fake A100", "0000:01:00.0-" + "01" * 16)
    assert repr(driver) == "CupyDriver(1)"
    wanted = {name for name in vars(Driver) if not name.startswith("_")}
    assert all(callable(getattr(driver, name)) for name in wanted)


def test_it_is_the_current_one_while_a_library_is_given_its_memory(driver: CupyDriver, cupy: FakeCupy) -> None:
    with driver.current():
        assert cupy.current == 1
        driver.free(0x1000)
        assert cupy.current == 1
    assert cupy.current == 0
    with pytest.raises(KeyError), driver.current():
        raise KeyError("of the library")
    assert cupy.current == 0


# --- memory


@pytest.mark.parametrize(("n_bytes", "allocated"), [(1, 2), (2 * MIB, 2), (2 * MIB + 1, 4), (0, 2)])
def test_allocations_are_whole_blocks(driver: CupyDriver, cupy: FakeCupy, n_bytes: int, allocated: int) -> None:
    assert driver.allocate(n_bytes) == 0x1000
    driver.free(0x1000)
    assert cupy.taken() == [(1, "malloc", allocated * MIB), (1, "free", 0x1000)]


def test_no_room(driver: CupyDriver, cupy: FakeCupy) -> None:
    cupy.fails["malloc"] = 2
    with pytest.raises(OutOfDeviceMemory, match=r"GPU 1 \(Fake A100\) has no room for 9 bytes: 5 of 7") as raised:
        driver.allocate(9)
    assert isinstance(raised.value, MpikvError)
    assert isinstance(raised.value, MemoryError)
    cupy.fails["malloc"] = 1
    with pytest.raises(MpikvError, match="Number1") as other:
        driver.allocate(9)
    assert not isinstance(other.value, MemoryError)


def test_pinned_memory_lives_as_long_as_arrays_of_it(driver: CupyDriver, cupy: FakeCupy) -> None:
    array = driver.pinned(100)
    assert (array.shape, array.dtype) == ((100,), np.uint8)
    address = array.ctypes.data
    assert cupy.taken() == [(1, "hostAlloc", 100, 1)]
    part = array.view(np.float32)[5:]
    part[:] = 3
    del array
    gc.collect()
    assert not cupy.taken()
    del part
    gc.collect()
    assert cupy.taken() == [(1, "freeHost", address)]
    assert driver.pinned(0).size == 0
    assert not cupy.taken()


def test_pinned_memory_of_a_gpu_that_has_failed(driver: CupyDriver, cupy: FakeCupy) -> None:
    array = driver.pinned(4)
    cupy.fails["freeHost"] = 700
    del array
    gc.collect()  # a warning about an exception that nobody catches would fail the test
    assert "freeHost" not in cupy.fails


def test_registered_memory(driver: CupyDriver, cupy: FakeCupy) -> None:
    memory = np.zeros(10)
    driver.register(memory)
    driver.unregister(memory)
    driver.register(memory[:0])
    driver.unregister(memory[:0])
    address = memory.ctypes.data
    assert cupy.taken() == [(1, "hostRegister", address, 80, 1), (1, "hostUnregister", address)]
    cupy.fails["hostRegister"] = 712
    with pytest.raises(MpikvError, match=r"locks 80 bytes.*Number712"):
        driver.register(memory)


def test_memory_of_other_processes(driver: CupyDriver, cupy: FakeCupy) -> None:
    handle = driver.export(0x1000)
    assert handle == bytes(range(64))
    assert driver.open(handle) == 0x2000
    driver.close(0x2000)
    assert cupy.taken() == [
        (1, "ipcGetMemHandle", 0x1000),
        (1, "ipcOpenMemHandle", handle),
        (1, "ipcCloseMemHandle", 0x2000),
    ]
    cupy.fails["ipcOpenMemHandle"] = 201
    with pytest.raises(MpikvError, match=r"IPC namespace.*Number201"):
        driver.open(handle)


def test_arrays_for_callers(driver: CupyDriver, cupy: FakeCupy) -> None:
    owner = object()
    memory = ("memory", 0x3000, 24, owner, 1)
    assert driver.as_caller(0x3000, (2, 3), FLOAT32, owner) == ("array", (2, 3), FLOAT32, ("pointer", memory, 0))
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    assert driver.as_caller(0x3000, (), bfloat16, owner)[1:3] == ((), bfloat16)
    cupy.__version__ = "13.6.0"
    with pytest.raises(UnsupportedError, match=r"CuPy 13.6.0 has no bfloat16"):
        driver.as_caller(0x3000, (), bfloat16, owner)


# --- order


def test_streams_and_events(driver: CupyDriver, cupy: FakeCupy) -> None:
    stream = driver.stream()
    event, other = driver.record(stream), driver.record(5, 0)
    driver.wait(stream, other)
    driver.wait(5, event, 0)
    assert cupy.taken() == [
        (1, "streamCreateWithFlags", 1),
        (1, "Event"),
        (1, "eventRecord", event.ptr, 0x77),
        (0, "Event"),
        (0, "eventRecord", other.ptr, 5),
        (1, "streamWaitEvent", 0x77, other.ptr),
        (0, "streamWaitEvent", 5, event.ptr),
    ]


def test_whether_an_event_is_done(driver: CupyDriver, cupy: FakeCupy) -> None:
    event = driver.record(1)
    assert driver.done(event)
    cupy.queried = 600
    assert not driver.done(event)
    cupy.queried = 700
    with pytest.raises(MpikvError, match=r"GPU 1 .*Number700.*cannot use the GPU any more.*CUDA_LAUNCH_BLOCKING"):
        driver.done(event)


# --- work


def test_copies(driver: CupyDriver, cupy: FakeCupy) -> None:
    driver.copy(1, 2, 30, 4)
    driver.copy(1, 2, 0, 4)
    assert cupy.taken() == [(1, "memcpyAsync", 1, 2, 30, 4, 4)]


def test_a_launch(driver: CupyDriver, cupy: FakeCupy) -> None:
    made = arithmetic.scale(FLOAT32)
    for factor in (0.5, 0.25):
        driver.launch(made, 10_000, [512, 1024], [factor], 7)
    calls = cupy.taken()
    assert len(cupy.texts) == 1  # compiled once
    for (device, name, grid, block, table, shared, stream), factor in zip(calls, (0.5, 0.25), strict=True):
        assert (device, name, shared, stream) == (1, "launch", 0, 7)
        assert (grid, block) == ((10, 1, 1), (256, 1, 1))  # four elements per thread
        assert table.tobytes() == source.table(made, [(10_000, [512, 1024], [factor])], 1).tobytes()


def test_a_large_launch_has_as_many_threads_as_the_gpu(driver: CupyDriver, cupy: FakeCupy) -> None:
    driver.launch(arithmetic.scale(FLOAT32), 1 << 30, [512, 1024], [2.0], 7)
    ((*_, grid, _, _, _, _),) = cupy.taken()
    assert grid == (10 * 8, 1, 1)


def test_launches_without_work(driver: CupyDriver, cupy: FakeCupy) -> None:
    driver.launch(arithmetic.scale(FLOAT32), 0, [512, 1024], [2.0], 7)
    driver.launch_many(arithmetic.scale(FLOAT32), [], 7)
    nothing, _ = trace(np.add, [FLOAT32] * 2)
    driver.launch(nothing, 5, [512, 1024], [], 7)
    assert not cupy.taken()
    assert not cupy.texts


def test_many_keys_are_few_launches(driver: CupyDriver, cupy: FakeCupy) -> None:
    made = arithmetic.scale(FLOAT32)
    room = source.most_entries(made)
    entries = [(n, [512 * n, 1024 * n], [float(n)]) for n in range(2 * room + 2)]
    driver.launch_many(made, entries, 7)
    kept = entries[1:]  # the first is empty
    found = cupy.taken()
    assert [grid for *_, grid, _, _, _, _ in found] == [(1, room, 1), (1, room, 1), (1, 1, 1)]
    for i, (*_, table, _, _) in enumerate(found):
        assert table.tobytes() == source.table(made, kept[i * room : (i + 1) * room], room).tobytes()
    assert len(cupy.texts) == 1
    assert f"entries[{room}]" in cupy.texts[0]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_a_strided_copy(driver: CupyDriver, cupy: FakeCupy, itemsize: int) -> None:
    to, from_ = (4096, [itemsize * 2, itemsize * 6]), (8192, [itemsize * 3, itemsize])
    driver.copy_strided(to, from_, (2, 3), itemsize, 9)
    driver.copy_strided(to, from_, (2, 0), itemsize, 9)
    ((_, _, grid, _, table, _, stream),) = cupy.taken()
    assert (grid, stream) == ((1, 1, 1), 9)
    assert table.tobytes() == source.strided_table(to, from_, (2, 3)).tobytes()
    (text,) = cupy.texts
    assert source._ELEMENTS[itemsize] in text


ERRORS: list[Callable[[FakeCupy], Exception]] = [
    lambda cupy: cupy.cuda.driver.CUDADriverError("no image\nfor this device"),
    lambda cupy: cupy.cuda.compiler.CompileException("no image\nfor this device"),
    lambda cupy: cupy.cuda.nvrtc.NVRTCError("no image\nfor this device"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_a_kernel_that_cannot_be_compiled(driver: CupyDriver, cupy: FakeCupy, error: Any) -> None:
    def refuse(**kwargs: Any) -> None:
        raise error(cupy)

    cupy.RawModule = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(MpikvError, match=r"GPU 1 \(Fake A100\) launches a kernel: no image for this device"):
        driver.launch(arithmetic.scale(FLOAT32), 5, [512, 1024], [2.0], 7)


def test_what_is_no_error_of_cudas_is_not_changed(driver: CupyDriver, cupy: FakeCupy) -> None:
    with pytest.raises(ValueError, match="zip"):
        driver.launch(arithmetic.scale(FLOAT32), 5, [512, 1024], [], 7)
