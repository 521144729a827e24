"""CuPy without a GPU: the part of it that the store calls, on host memory, stricter than a GPU where that helps a test.

`Machine` has GPUs, and `Machine.process` is CuPy as one process of it sees them: with threads as ranks each has its
own. Arrays are of `ndarray`, which NumPy's functions and `out=` work on as on CuPy's, and which never becomes a NumPy
array in silence. Names, arguments and errors are CuPy's; tests/contract compares them with the installed CuPy.

Work is done as soon as it is put into a stream. What a GPU would do later shows in three ways:

- Two pieces of work that touch the same bytes, one of them writing, must be ordered: by their stream, by an event that
  is waited for, or since the host has seen the first done before the second was put in. Else the second raises
  RaceError. A pool gives memory again to the stream that it had it from, whoever else still works on it, as CuPy does.
- What is copied to the host is there when the host has seen the event behind the copy; before, the memory is full of
  0xFF. What is copied from the host must not change before the host has seen that.
- An event is seen done after it was asked some times, or waited for. `Machine.hold` keeps a stream from going on.

What waits for other processes (NCCL's calls, fake_nccl.py) is a `Gate`. Work behind one that is not open is done when
it opens; until then new arrays that it makes hold what the same work makes of memory as it is.

New memory is full of 0xFF. `counts` says what was done; `calls` which of NumPy's functions, and how.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

LEGACY = 1
ALIGN = 512


class RaceError(AssertionError):
    """Work on the same bytes that nothing orders."""


class CUDARuntimeError(RuntimeError):
    """An error of CUDA's, with its number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: of the fake")
        self.status = status


class OutOfMemoryError(MemoryError):
    """As CuPy's."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class Call(NamedTuple):
    """How one of NumPy's functions was called, or a method of an array.

    inputs: dtypes of arrays and of NumPy's numbers, else types. output: the dtype of what it made or, if `into`, of
    what it wrote to.
    """

    name: str
    inputs: tuple[str, ...]
    keywords: tuple[str, ...]
    output: str
    into: bool


class Gate:
    """What work in a stream waits for. clock: what the work behind it is ordered after, when it is open."""

    def __init__(self) -> None:
        self.is_open = False
        self.clock: dict[int, int] = {}
        self._behind: list[Callable[[], object]] = []

    def open(self, clock: dict[int, int]) -> None:
        if not self.is_open:
            self.is_open, self.clock = True, clock
            for act in self._behind:
                act()

    @staticmethod
    def then(gates: list[Gate], act: Callable[[], object]) -> None:
        """Do it, when all of them are open."""
        shut = [one for one in gates if not one.is_open]
        if shut:
            shut[0]._behind.append(lambda: Gate.then(shut[1:], act))
        else:
            act()


class _Ordered:
    """A stream, or an event. clock: the work that is done when it has come so far. behind: the gates before that."""

    def __init__(self) -> None:
        self.clock: dict[int, int] = {}
        self.behind: list[Gate] = []

    def shut(self) -> list[Gate]:
        """The gates that are not open."""
        for gate in self.behind:
            if gate.is_open:
                _join(self.clock, gate.clock)
        self.behind = [gate for gate in self.behind if not gate.is_open]
        return self.behind

    def come_behind(self, other: _Ordered) -> None:
        other.shut()
        _join(self.clock, other.clock)
        self.behind = [*self.behind, *(gate for gate in other.behind if gate not in self.behind)]


class _Access(NamedTuple):
    begin: int
    end: int
    stream: int
    number: int
    writes: bool
    label: str


class _Bytes:
    """Memory of a GPU. data: its bytes. gpu: None for all of the host's."""

    def __init__(self, data: np.ndarray, gpu: int | None) -> None:
        self.data, self.gpu = data, gpu
        self.begin = data.ctypes.data
        self.end = self.begin + data.size
        self.log: list[_Access] = []
        self.freed = False


class Machine:
    """GPUs and what orders the work on them. eager: events are done when they are first asked."""

    def __init__(self, n_gpus: int = 1, *, memory_bytes: int = 1 << 30, seed: int = 0, eager: bool = False) -> None:
        self.lock = threading.RLock()
        self.n_gpus, self.memory_bytes, self.eager = n_gpus, memory_bytes, eager
        self.random = random.Random(seed)
        self.used = [0] * n_gpus
        self.counts: Counter[str] = Counter()
        self.calls: set[Call] = set()
        self.memory: dict[int, _Bytes] = {}  # by where it begins
        self.host = _Bytes(np.empty(0, np.uint8), None)
        self.seen: dict[int, int] = {}  # by stream: how much of its work the host has seen done
        self.held: dict[int, int] = {}  # by stream: how much of its work is done, of those that do not go on
        self.numbers = itertools.count(LEGACY + 10)
        self.down: list[tuple[int, int, np.ndarray, np.ndarray]] = []  # stream, number, host memory, what comes there
        self.up: list[tuple[int, int, np.ndarray, np.ndarray]] = []  # stream, number, host memory, what it was
        self.exported: dict[bytes, _Bytes] = {}
        self.peer_zeros = False  # what another process opens is zeros, as behind some IOMMUs
        self.failed = 0  # an error that sticks
        self.strangers = False  # whether memory that no GPU knows is taken, and not looked after
        self.nccl: dict[bytes, Any] = {}  # communicators; see fake_nccl.py
        self.nccl_failed = 0  # what NCCL notices of a call under way

    def process(self, visible: tuple[int, ...] | None = None) -> FakeCupy:
        """CuPy in a process. visible: which GPUs it sees, in its order."""
        return FakeCupy(self, tuple(range(self.n_gpus)) if visible is None else visible)

    def hold(self, stream: Any, held: bool = True) -> None:
        """Let no work that comes into a stream from now on be done; held: False ends that."""
        with self.lock:
            if held:
                self.held[stream.id] = stream.number
            else:
                self.held.pop(stream.id, None)

    def see(self, clock: dict[int, int]) -> None:
        """The host has seen this work done."""
        _join(self.seen, clock)
        for waiting, action in ((self.down, _arrive), (self.up, _unchanged)):
            due = [one for one in waiting if self.seen.get(one[0], 0) >= one[1]]
            waiting[:] = [one for one in waiting if self.seen.get(one[0], 0) < one[1]]
            for one in due:
                action(one)

    def find(self, address: int, n_bytes: int) -> _Bytes | None:
        for one in self.memory.values():
            if one.begin <= address and address + n_bytes <= one.end:
                return one
        return None

    def device_memory(self, gpu: int, n_bytes: int) -> _Bytes:
        """New memory. Raises OutOfMemoryError."""
        if self.used[gpu] + n_bytes > self.memory_bytes:
            raise OutOfMemoryError(n_bytes, self.used[gpu], self.memory_bytes)
        self.used[gpu] += n_bytes
        whole = np.full(n_bytes + ALIGN, 0xFF, np.uint8)
        skip = -whole.ctypes.data % ALIGN
        made = _Bytes(whole[skip : skip + n_bytes], gpu)
        self.memory[made.begin] = made
        return made

    def free(self, memory: _Bytes) -> None:
        with self.lock:
            if not memory.freed:
                memory.freed = True
                self.memory.pop(memory.begin, None)
                if memory.gpu is not None:
                    self.used[memory.gpu] -= memory.data.size

    def work(self, stream: Stream, label: str, uses: list[tuple[np.ndarray, bool]], *, host: bool = False) -> int:
        """Put work into a stream. uses: arrays, and whether they are written; host: the last in the host's memory.

        Raises RaceError.
        """
        if self.failed:
            raise CUDARuntimeError(self.failed)
        stream.shut()
        _join(stream.clock, self.seen)
        stream.number += 1
        stream.clock[stream.id] = stream.number
        for i, (values, writes) in enumerate(uses):
            if values.size:
                begin, end = _bounds(values)
                memory = self.host if host and i == len(uses) - 1 else self.find(begin, end - begin)
                if memory is None and self.strangers:
                    continue
                if memory is None:
                    raise RaceError(f"{label}: memory of {end - begin} bytes that is no GPU's, or was freed")
                self._note(memory, _Access(begin, end, stream.id, stream.number, writes, label), stream.clock)
        return stream.number

    def host_access(self, array: ndarray, *, writes: bool) -> None:
        """The host, or MPI, reads or writes an array's memory now. Raises RaceError where work may be under way."""
        with self.lock:
            if array.size:
                begin, end = _bounds(array._values)
                memory = self.find(begin, end - begin)
                for old in [] if memory is None else memory.log:
                    apart = old.end <= begin or end <= old.begin
                    if not apart and (old.writes or writes) and self.seen.get(old.stream, 0) < old.number:
                        raise RaceError(f"the host {'writes' if writes else 'reads'} what {old.label} has not ended")

    @staticmethod
    def _note(memory: _Bytes, new: _Access, clock: dict[int, int]) -> None:
        kept = []
        for old in memory.log:
            apart = old.end <= new.begin or new.end <= old.begin
            if not apart and (old.writes or new.writes) and clock.get(old.stream, 0) < old.number:
                raise RaceError(
                    f"{new.label} in stream {new.stream} {'writes' if new.writes else 'reads'} what {old.label} in "
                    f"stream {old.stream} {'writes' if old.writes else 'reads'}: nothing orders them"
                )
            covered = new.begin <= old.begin and old.end <= new.end
            replaced = covered and (new.writes or (not old.writes and old.stream == new.stream))
            if not replaced:
                kept.append(old)
        memory.log = [*kept, new]


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def _arrive(one: tuple[int, int, np.ndarray, np.ndarray]) -> None:
    one[2][...] = one[3]


def _unchanged(one: tuple[int, int, np.ndarray, np.ndarray]) -> None:
    if not np.array_equal(one[2], one[3]):
        raise RaceError("host memory was changed while it was copied to the GPU")


def _bounds(values: np.ndarray) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(values) if hasattr(np.lib, "array_utils") else np.byte_bounds(values)
    return int(low), int(high)


# --- streams and events


class Stream(_Ordered):
    """See CuPy's."""

    process: FakeCupy  # of its class; see `FakeCupy`
    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        super().__init__()
        if not null:
            self.process._touch()
        self.machine = self.process.machine
        self.id = next(self.machine.numbers)  # the default stream's, too, which each process has of its own
        self.ptr, self.device_id = LEGACY if null else self.id, self.process.cuda.runtime.getDevice()
        self.number = 0
        self.process.streams[self.ptr] = self

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        _, ptr = obj.__cuda_stream__()
        made = cls.__new__(cls)
        made.__dict__ = cls.process.streams[ptr or LEGACY].__dict__  # the same stream
        return made

    def record(self, event: Event | None = None) -> Event:
        made = self.process.cuda.Event() if event is None else event
        with self.machine.lock:
            if self.machine.failed:
                raise CUDARuntimeError(self.machine.failed)
            _join(self.clock, self.machine.seen)
            made.clock, made.behind = {}, []
            made.come_behind(self)
            made.asks = 0 if self.machine.eager else self.machine.random.randrange(3)
        return made

    def wait_event(self, event: Event) -> None:
        with self.machine.lock:
            self.come_behind(event)

    def synchronize(self) -> None:
        self.record().synchronize()

    def use(self) -> Stream:
        self.process.local.streams[-1:] = [self]
        return self

    def __enter__(self) -> Stream:
        current = self.process.cuda.runtime.getDevice()
        if self.ptr != LEGACY and current != self.device_id:
            raise RuntimeError(f"This stream was not created on device {current}")
        self.process.local.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.local.streams.pop()

    @property
    def done(self) -> bool:
        return self.record().done


class Event(_Ordered):
    """See CuPy's."""

    process: FakeCupy  # of its class

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        super().__init__()
        self.machine = self.process.machine
        self.asks = 0

    def record(self, stream: Stream | None = None) -> None:
        (self.process.cuda.get_current_stream() if stream is None else stream).record(self)

    def _held(self) -> bool:
        return bool(self.shut()) or any(
            self.clock.get(stream, 0) > number for stream, number in self.machine.held.items()
        )

    @property
    def done(self) -> bool:
        with self.machine.lock:
            if self.machine.failed:
                raise CUDARuntimeError(self.machine.failed)
            self.asks -= 1
            if self._held() or self.asks >= 0:
                return False
            self.machine.see(self.clock)
            return True

    def synchronize(self) -> None:
        while True:
            with self.machine.lock:
                if self.machine.failed:
                    raise CUDARuntimeError(self.machine.failed)
                if not self._held():
                    self.machine.see(self.clock)
                    return
            threading.Event().wait(0.001)


# --- memory


class Memory:
    """Memory of an allocation of its own, on the current GPU."""

    process: FakeCupy  # of its class

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, self.process.cuda.runtime.getDevice()
        machine = self.process.machine
        with machine.lock:
            self._bytes = machine.device_memory(self.process.visible[self.device_id], max(size, 1))
            machine.counts["mallocs"] += 1
        self.ptr = self._bytes.begin

    def __del__(self) -> None:
        if hasattr(self, "_bytes"):
            self.process.machine.free(self._bytes)


class UnownedMemory:
    """Memory that somebody else keeps."""

    process: FakeCupy  # of its class; see `FakeCupy`

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    """See CuPy's."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def copy_to_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        _copy_down(_process_of(self.mem), self.ptr, _address(mem), size, stream)

    def copy_from_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        _copy_up(_process_of(self.mem), self.ptr, _address(mem), size, stream)


def _process_of(memory: Any) -> FakeCupy:
    """Whose memory it is, or whoever made a view of it."""
    found: FakeCupy = memory.process
    return found


def _address(mem: Any) -> int:
    return int(mem.value if isinstance(mem, ctypes.c_void_p) else mem)


def at(address: int, size: int) -> np.ndarray:
    """Memory as NumPy sees it."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def _copy_down(process: FakeCupy, source: int, to: int, size: int, stream: Stream | None) -> None:
    machine = process.machine
    stream = process.cuda.get_current_stream() if stream is None else stream
    with machine.lock:
        _need_pinned(process, to, size)
        values, host = at(source, size), at(to, size)
        number = machine.work(stream, f"copy of {size} bytes to the host", [(values, False), (host, True)], host=True)
        machine.up[:] = [one for one in machine.up if not np.may_share_memory(one[2], host)]
        machine.down[:] = [one for one in machine.down if not np.may_share_memory(one[2], host)]
        Gate.then(stream.behind, lambda: machine.down.append((stream.id, number, host, values.copy())))
        host[...] = 0xFF
        machine.counts["down"] += 1
        machine.counts["down_bytes"] += size


def _copy_up(process: FakeCupy, to: int, source: int, size: int, stream: Stream | None) -> None:
    machine = process.machine
    stream = process.cuda.get_current_stream() if stream is None else stream
    with machine.lock:
        _need_pinned(process, source, size)
        values, host = at(to, size), at(source, size)
        number = machine.work(stream, f"copy of {size} bytes from the host", [(values, True), (host, False)], host=True)

        def act() -> None:
            for one in [one for one in machine.down if np.may_share_memory(one[2], host)]:
                _arrive(one)  # ordered, as `work` has seen
                machine.down.remove(one)
            values[...] = host
            machine.up.append((stream.id, number, host, host.copy()))

        Gate.then(stream.behind, act)
        machine.counts["up"] += 1
        machine.counts["up_bytes"] += size


def _need_pinned(process: FakeCupy, address: int, size: int) -> None:
    if not any(begin <= address and address + size <= end for begin, end in process._pinned.items()):
        raise AssertionError("a copy from or to host memory that is not page-locked, or that two lockings share")


class MemoryPool:
    """See CuPy's: what is let go of is kept for the stream that it was made in."""

    process: FakeCupy  # of its class

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._free: dict[tuple[int, int, int], list[Memory]] = {}
        # All that is in use, and what nobody refers to: as long as it is here no garbage that refers to it frees it.
        self._taken: dict[int, Memory] = {}
        self._returned: deque[tuple[tuple[int, int, int], int]] = deque()
        self._total = self._used = 0

    def _take_back(self) -> None:
        while self._returned:
            arena, ptr = self._returned.popleft()
            self._free.setdefault(arena, []).append(self._taken.pop(ptr))
            self._used -= arena[2]

    def malloc(self, size: int) -> MemoryPointer:
        length = max(ALIGN, -(-size // ALIGN) * ALIGN)
        device, stream = self.process.cuda.runtime.getDevice(), self.process.cuda.get_current_stream().id
        with self.process.machine.lock:
            self._take_back()
            kept = self._free.setdefault((device, stream, length), [])
            if kept:
                memory = kept.pop()
                memory._bytes.data[...] = 0xFF
            else:
                memory = self.process.cuda.Memory(length)
                self._total += length
            self._used += length
            self._taken[memory.ptr] = memory
        return MemoryPointer(_Pooled(memory, (device, stream, length), self._returned), 0)

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        self._take_back()
        for (_, number, _), kept in self._free.items():
            if stream is None or stream.id == number:
                self._total -= sum(one.size for one in kept)
                kept.clear()

    def total_bytes(self) -> int:
        return self._total

    def used_bytes(self) -> int:
        self._take_back()
        return self._used


class _Pooled:
    def __init__(self, memory: Memory, arena: tuple[int, int, int], returned: deque[Any]) -> None:
        self._arena, self._returned, self._keep = arena, returned, memory
        self.process = memory.process
        self.ptr, self.size, self.device_id = memory.ptr, memory.size, memory.device_id

    def __del__(self) -> None:
        self._returned.append((self._arena, self.ptr))


class _Pinned:
    """Page-locked memory, as `alloc_pinned_memory` gives it: a buffer."""

    def __init__(self, process: FakeCupy, size: int) -> None:
        self.process, self.data = process, np.full(size, 0xFF, np.uint8)
        self.ptr = self.data.ctypes.data
        process._pinned[self.ptr] = self.ptr + size

    def __del__(self) -> None:
        self.process._unpin(self.ptr)


# --- arrays


class _Flags(NamedTuple):
    """All that CuPy's have: not whether it may be written to."""

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801 - as CuPy calls it
    """An array on a GPU."""

    process: FakeCupy  # of its class; see `FakeCupy`

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if memptr is None:
            memptr = (self.process.local.allocators or [self.process.pool.malloc])[-1](n_bytes)
        self.data, self._viewed = memptr, False
        extent = n_bytes if strides is None else sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if strides is not None:
            extent = extent + np.dtype(dtype).itemsize if n_bytes else 0
        buffer = at(memptr.ptr, extent) if n_bytes else np.empty(0, np.uint8)
        self._values = np.ndarray(shape, dtype, buffer.data if n_bytes else None, strides=strides)

    @classmethod
    def _of(cls, values: np.ndarray, data: MemoryPointer) -> ndarray:
        made = object.__new__(cls)
        made._values, made.data, made._viewed = values, data, True
        return made

    def _view(self, values: np.ndarray) -> ndarray:
        offset = values.ctypes.data - self._values.ctypes.data if values.size else 0
        pointer = MemoryPointer(self.data.mem, 0)
        pointer.ptr = self.data.ptr + offset
        return self._of(values, pointer)

    shape = property(lambda self: self._values.shape)
    strides = property(lambda self: self._values.strides)
    dtype = property(lambda self: self._values.dtype)
    size = property(lambda self: self._values.size)
    ndim = property(lambda self: self._values.ndim)
    nbytes = property(lambda self: self._values.nbytes)
    itemsize = property(lambda self: self._values.itemsize)
    T = property(lambda self: self._view(self._values.T))
    flags = property(
        lambda self: _Flags(self._values.flags.c_contiguous, self._values.flags.f_contiguous, not self._viewed)
    )
    device = property(lambda self: self.process.cuda.Device(self.data.device_id))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<fake cupy.ndarray {self.dtype}{self.shape}>"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.data.ptr if self.size else 0, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": self.process.cuda.get_current_stream().ptr,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    def __array__(self, *args: object, **kwargs: object) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    # what makes the host wait

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        current = self.process.cuda.get_current_stream() if stream is None else stream
        with self.process.machine.lock:
            self.process.machine.work(current, "get", [(self._values, False)])
            self.process.machine.counts["gets"] += 1
        found = np.empty(self.shape, self.dtype) if out is None else out
        current.synchronize()
        found[...] = self._values
        return found

    def _one(self) -> Any:
        self.process.machine.counts["syncs"] += 1
        return self.get()

    def __bool__(self) -> bool:
        return bool(self._one())

    def __int__(self) -> int:
        return int(self._one())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self._one())

    def item(self) -> Any:
        return self._one().item()

    def tolist(self) -> Any:
        return self._one().tolist()

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        self.process.machine.counts["sets"] += 1
        values = arr.copy()
        self.process._run("set", lambda: np.copyto(self._values, values), [], self)

    # views and work

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ndarray:
        wanted = shape[0] if len(shape) == 1 else shape
        view = self._values.reshape(wanted)
        if view.size and not np.shares_memory(view, self._values):
            return self.copy().reshape(wanted)
        return self._view(view)

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:  # noqa: A002 - as CuPy calls it
        return self._view(self._values.view(self.dtype if dtype is None else dtype))

    def astype(self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True) -> Any:
        if not copy and self.dtype == dtype:
            return self
        out = self.process.empty(self.shape, dtype)
        self.process._run("astype", lambda: np.copyto(out._values, self._values, casting="unsafe"), [self], out)
        return out

    def copy(self, order: str = "C") -> ndarray:
        return self.astype(self.dtype)

    def fill(self, value: Any) -> None:
        self[...] = value

    def __getitem__(self, slices: Any) -> ndarray:
        if _arrays_in(slices):
            return self.process._call("getitem", lambda values, at: values[at], (self, slices), {})
        parts = slices if isinstance(slices, tuple) else (slices,)
        if any(isinstance(one, (np.ndarray, list)) for one in parts):
            raise TypeError("stricter than CuPy, which copies an index of the host to the GPU and waits for that")
        if not any(one is Ellipsis for one in parts):
            parts = (*parts, Ellipsis)  # so that one element is a view, too
        return self._view(self._values[parts])

    def __setitem__(self, slices: Any, value: Any) -> None:
        if isinstance(value, (np.ndarray, list, tuple)) and np.ndim(value) > 0:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        where, values = _unwrapped(slices), _unwrapped(value)

        def act() -> None:
            self._values[where] = np.asarray(values).astype(self.dtype, copy=False)

        whole = self if _arrays_in(slices) else self[slices]
        self.process._run("setitem", act, [*_arrays_in(slices), *_arrays_in(value)], whole)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            if method not in ("reduce", "accumulate") or ufunc not in (np.add, np.multiply):
                raise NotImplementedError(f"`cupy_{ufunc.__name__}.{method}` is not supported yet")
            return self.process._call(f"{ufunc.__name__}.{method}", getattr(ufunc, method), inputs, kwargs)
        if wrong := set(kwargs) - UFUNC_KEYWORDS:
            raise TypeError(f"Wrong arguments {wrong}")
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
            if kwargs["out"] is not None and not isinstance(kwargs["out"], ndarray):
                raise TypeError(f"out must be cupy.ndarray, not {type(kwargs['out'])}")
        return self.process._call(ufunc.__name__, ufunc, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name in ("empty_like", "zeros_like", "full_like", "ones_like"):
            return self.process._like(name, *args, **kwargs)
        if name == "copyto":
            return self.process.copyto(*args, **kwargs)
        if name in ("asarray", "array", "arange"):
            return getattr(self.process, name)(*args, **kwargs)
        if name not in FUNCTIONS:
            return NotImplemented
        if name in ("reshape", "ravel"):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name == "broadcast_to":
            return self._view(func(self._values, *args[1:], **kwargs))
        if name in ("may_share_memory", "shares_memory"):
            return func(*map(_unwrapped, args), **kwargs)
        if wrong := set(kwargs) - set(FUNCTIONS[name]):
            raise TypeError(f"{name}() got an unexpected keyword argument {sorted(wrong)}")
        return self.process._call(name, func, args, kwargs)

    def sort(self, axis: int = -1, kind: Any = None) -> None:
        self.process._run("sort", lambda: self._values.sort(axis), [self], self)

    def _method(name: str) -> Any:  # noqa: N805 - makes methods
        def method(self: ndarray, *args: Any, **kwargs: Any) -> Any:
            return self.__array_function__(getattr(np, name), (), (self, *args), kwargs)

        return method

    max, min, sum, any, all, argsort = map(_method, ("max", "min", "sum", "any", "all", "argsort"))
    take, nonzero = map(_method, ("take", "nonzero"))
    del _method


UFUNC_KEYWORDS = {"out", "where", "dtype", "casting"}  # that CuPy takes
_PARAMETERS = {  # of functions of NumPy that CuPy has: its own, which are fewer
    "a axis dtype out keepdims": "sum prod",
    "a axis out keepdims": "max min amax amin any all",
    "a": "nonzero flatnonzero",
    "a axis bitorder": "packbits unpackbits",
    "a b max_work": "may_share_memory shares_memory",
    "a axis kind": "argsort sort",
    "tup axis out dtype casting": "concatenate stack",
    "a b out": "dot outer",
    "condition x y": "where",
    "a indices axis out": "take",
    "a kth axis": "argpartition",
    "a axis dtype out": "cumsum",
    "a b": "vdot",
    "a v side sorter": "searchsorted",
    "a repeats axis": "repeat",
    "A reps": "tile",
    "a a_min a_max out": "clip",
    "a decimals out": "round",
    "a b rtol atol equal_nan": "isclose",
    "a dtype": "ascontiguousarray",
    "array shape": "broadcast_to",
    "a axis": "count_nonzero",
    "x ord axis keepdims": "norm",  # of linalg
    "operands": "einsum",
    "a order": "ravel",
    "a newshape order copy": "reshape",
    "a n axis prepend append": "diff",
    "a ind v mode": "put",
}
FUNCTIONS = {name: parameters.split() for parameters, names in _PARAMETERS.items() for name in names.split()}


def _arrays_in(value: Any) -> list[ndarray]:
    if isinstance(value, ndarray):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for one in value for found in _arrays_in(one)]
    if isinstance(value, dict):
        return [found for one in value.values() for found in _arrays_in(one)]
    return []


def _unwrapped(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value._values
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unwrapped, value))
    if isinstance(value, dict):
        return {name: _unwrapped(one) for name, one in value.items()}
    return value


def _operand(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim > 0:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return _unwrapped(value)


def _kind(value: Any) -> str:
    """What a `Call` says of an argument."""
    if isinstance(value, (ndarray, np.generic, np.ndarray)):
        return str(value.dtype)
    if isinstance(value, (list, tuple)) and _arrays_in(value):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__


def _dtypes(made: Any) -> str:
    return (
        ", ".join(map(_dtypes, made)) if isinstance(made, tuple) else str(getattr(made, "dtype", type(made).__name__))
    )


def _fill(made: Any, found: Any) -> None:
    """Give arrays that were made before the values that have come."""
    if isinstance(made, tuple):
        for one, values in zip(made, found, strict=True):
            _fill(one, values)
    elif isinstance(made, ndarray):
        np.copyto(made._values, found)


class Device:
    """See CuPy's."""

    process: FakeCupy  # of its class

    def __init__(self, device: int | None = None) -> None:
        self.id = self.process.cuda.runtime.getDevice() if device is None else int(device)

    def use(self) -> None:
        self.process.cuda.runtime.setDevice(self.id)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        self.process.local.devices.append(self.process.cuda.runtime.getDevice())
        self.use()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.cuda.runtime.setDevice(self.process.local.devices.pop())


class _Local(threading.local):
    """What a thread has current."""

    def __init__(self) -> None:
        self.device = 0
        self.devices: list[int] = []
        self.streams: list[Any] = []
        self.allocators: list[Any] = []


class FakeCupy:
    """What `import cupy` gives in one process."""

    __version__ = "14.0.0+fake"

    def __init__(self, machine: Machine, visible: tuple[int, ...]) -> None:
        self.machine, self.visible = machine, visible
        self.streams: dict[int, Stream] = {}
        self._pinned: dict[int, int] = {}  # where page-locked memory begins and ends
        self.contexts: set[int] = set()  # GPUs on which this process has made one
        self.ndarray = self._own(ndarray)
        self.local = _Local()
        self.cuda = _cuda(self)
        self.null = self.cuda.Stream.null = self.cuda.Stream(null=True)
        self.pool = self.cuda.MemoryPool()

    def _own(self, cls: Any) -> Any:
        """A class of this process."""
        return type(cls.__name__, (cls,), {"process": self})

    def _unpin(self, begin: int) -> None:
        with self.machine.lock:
            end, host = self._pinned.pop(begin), self.machine.host
            host.log = [one for one in host.log if one.end <= begin or end <= one.begin]

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
        self._touch()
        return self.ndarray(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
        made = self.empty(shape, dtype)
        made[...] = 0
        return made

    def asarray(
        self, a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False
    ) -> ndarray:
        return self.array(a, dtype, bool(copy))

    def array(  # noqa: PLR0917 - CuPy's parameters
        self, obj: Any, dtype: Any = None, copy: bool = True, order: str = "K", subok: bool = False, ndmin: int = 0
    ) -> ndarray:
        if isinstance(obj, ndarray):
            found: ndarray = obj.astype(obj.dtype if dtype is None else dtype, copy=copy)
            return found
        values = np.asarray(obj, dtype)
        made = self.empty(values.shape, values.dtype)
        made.set(values)
        return made

    def arange(self, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
        return self._wrapped(np.arange(*([start] if stop is None else [start, stop]), step=step, dtype=dtype))

    def copyto(self, dst: Any, src: Any, casting: str = "same_kind", where: Any = None) -> None:
        chosen = {} if where is None else {"where": _operand(where)}
        if not isinstance(dst, ndarray):
            raise TypeError("Cannot copy to a NumPy array")

        def act() -> None:
            np.copyto(dst._values, _operand(src), casting=casting, **chosen)  # type: ignore[arg-type]

        if isinstance(src, ndarray) and src.data.device_id != dst.data.device_id:
            self.machine.counts["peer"] += 1
        self._run("copyto", act, _arrays_in([src, where]), dst, same_device=False)

    def _like(self, name: str, a: ndarray, *rest: Any, **kwargs: Any) -> ndarray:
        fill = kwargs.pop("fill_value", None)
        if name == "full_like" and fill is None:
            fill, *rest = rest
        dtype, shape = kwargs.get("dtype") or (rest[0] if rest else None), kwargs.get("shape")
        made = self.empty(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)
        if name != "empty_like":
            made[...] = {"zeros_like": 0, "ones_like": 1}.get(name, fill)
        return made

    def _touch(self) -> None:
        self.contexts.add(self.local.device)

    def _run(
        self,
        name: str,
        act: Callable[[], Any],
        reads: list[ndarray],
        into: ndarray | None = None,
        *,
        same_device: bool = True,
        call: Call | None = None,
    ) -> Any:
        """One piece of work in the current stream. into: what it writes to; None: it makes arrays, and what it gives is
        returned at once. call: how it was called, where that says more than the dtypes of the arrays."""
        self._touch()
        with self.machine.lock:
            uses = [*((one, False) for one in reads), *([(into, True)] if into is not None else [])]
            for one, _ in uses:
                if same_device and one.data.device_id not in (-1, self.local.device):
                    raise ValueError(
                        f"Array device must be same as the current device: array device = {one.data.device_id} while "
                        f"current = {self.local.device}"
                    )
            stream = self.cuda.get_current_stream()
            self.machine.work(stream, name, [(one._values, writes) for one, writes in uses])
            self.machine.counts["launches"] += 1
            if call is None:
                call = Call(name, tuple(str(one.dtype) for one in reads), (), _dtypes(into), into is not None)
            if into is None:
                found = _quietly(act)
                self.machine.calls.add(call._replace(output=_dtypes(found)))
                return found
            self.machine.calls.add(call)
            return Gate.then(stream.behind, lambda: _quietly(act))

    def _call(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of NumPy on arrays; the result is new arrays, or `out`."""
        call = Call(name, tuple(map(_kind, args)), tuple(sorted(kwargs)), "", False)
        out = kwargs.pop("out", None)
        if isinstance(out, tuple):
            (out,) = out
        plain = [_operand(one) for one in args]
        more = {name: _operand(one) for name, one in kwargs.items()}
        reads = _arrays_in([args, kwargs])
        if out is not None:
            more["out"] = out._values
            self._run(
                name, lambda: func(*plain, **more), reads, out, call=call._replace(output=_dtypes(out), into=True)
            )
            return out
        with self.machine.lock:
            made = self._wrapped(self._run(name, lambda: func(*plain, **more), reads, call=call))
            behind = self.cuda.get_current_stream().behind
            if behind:  # what it reads is not there yet
                Gate.then(behind, lambda: _fill(made, _quietly(lambda: func(*plain, **more))))
        return made

    def _wrapped(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(map(self._wrapped, found))
        if not isinstance(found, (np.ndarray, np.generic)):
            return found
        values = np.asarray(found)
        made = self.empty(values.shape, values.dtype)
        with self.machine.lock:
            self.machine.work(self.cuda.get_current_stream(), "result", [(made._values, True)])
            made._values[...] = values
        return made


def _quietly(act: Callable[[], Any]) -> Any:
    with np.errstate(all="ignore"):
        return act()


def _cuda(process: FakeCupy) -> Any:
    """The package `cupy.cuda`."""
    machine = process.machine

    def get_device() -> int:
        if machine.failed:
            raise CUDARuntimeError(machine.failed)
        return int(process.local.device)

    def set_device(device: int) -> None:
        if not 0 <= device < len(process.visible):
            raise CUDARuntimeError(101)
        process.local.device = device
        process.contexts.add(device)  # as CUDA does since 12
        machine.counts["set_device"] += 1

    def count() -> int:
        return len(process.visible)

    def properties(device: int) -> dict[str, Any]:
        return {"name": b"Fake GPU", "uuid": bytes([process.visible[device]] * 16), "multiProcessorCount": 4}

    def bus_id(device: int) -> str:
        return f"0000:{process.visible[device]:02x}:00.0"

    def memory_info() -> tuple[int, int]:
        used = machine.used[process.visible[process.local.device]]
        return machine.memory_bytes - used, machine.memory_bytes

    def register(ptr: int, size: int, flags: int) -> None:
        if any(begin < ptr + size and ptr < end for begin, end in process._pinned.items()):
            raise CUDARuntimeError(712)
        process._pinned[ptr] = ptr + size
        machine.counts["registered"] += 1

    def unregister(ptr: int) -> None:
        process._unpin(ptr)

    def export(devPtr: int) -> bytes:
        found = machine.memory.get(devPtr)
        if found is None:
            raise CUDARuntimeError(1)
        handle = devPtr.to_bytes(8, "little") + bytes(56)
        machine.exported[handle] = found
        return handle

    def open_(handle: bytes, flags: int = 1) -> int:
        found = machine.exported[handle]
        machine.counts["opened"] += 1
        if machine.peer_zeros:
            wrong = machine.device_memory(process.visible[process.local.device], found.data.size)
            wrong.data[...] = 0
            return wrong.begin
        return found.begin

    def close(devPtr: int) -> None:
        machine.counts["closed"] += 1

    def pinned(size: int) -> Any:
        return np.frombuffer(_PinnedBuffer(_Pinned(process, size)), np.uint8) if size else np.empty(0, np.uint8)

    @contextmanager
    def using_allocator(allocator: Any = None) -> Iterator[None]:
        process.local.allocators.append(process.pool.malloc if allocator is None else allocator)
        try:
            yield
        finally:
            process.local.allocators.pop()

    def get_current_stream(device_id: int = -1) -> Stream:
        return (process.local.streams or [process.null])[-1]

    runtime = SimpleNamespace(
        getDevice=get_device,
        setDevice=set_device,
        getDeviceCount=count,
        getDeviceProperties=properties,
        deviceGetPCIBusId=bus_id,
        hostRegister=register,
        hostUnregister=unregister,
        ipcGetMemHandle=export,
        ipcOpenMemHandle=open_,
        ipcCloseMemHandle=close,
        memGetInfo=memory_info,
        CUDARuntimeError=CUDARuntimeError,
    )
    import fake_nccl  # which imports this module

    return SimpleNamespace(
        runtime=runtime,
        nccl=fake_nccl.of(process),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        Stream=process._own(Stream),
        Event=process._own(Event),
        Device=process._own(Device),
        Memory=process._own(Memory),
        UnownedMemory=process._own(UnownedMemory),
        MemoryPointer=MemoryPointer,
        MemoryPool=process._own(MemoryPool),
        alloc_pinned_memory=pinned,
        using_allocator=using_allocator,
        get_current_stream=get_current_stream,
    )


class _PinnedBuffer:
    """What `np.frombuffer` takes of page-locked memory, and keeps."""

    def __new__(cls, memory: _Pinned) -> Any:
        array = (ctypes.c_uint8 * memory.data.size).from_address(memory.ptr)
        array._memory = memory
        return array
