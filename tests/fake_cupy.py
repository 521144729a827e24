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

# ruff: noqa: N802 - CuPy's names and parameters
from __future__ import annotations

import itertools
import math
import random
import threading
import weakref
from bisect import bisect
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_uint8
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

LEGACY = 1
ALIGN = 512


class RaceError(AssertionError):
    """Work on the same bytes that nothing orders."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: of the fake")
        self.status = status


class OutOfMemoryError(MemoryError):
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
        shut = [one for one in gates if not one.is_open]
        if shut:
            shut[0]._behind.append(lambda: Gate.then(shut[1:], act))
        else:
            act()


class _Own:
    """What each process has a class of: see `_Cuda`."""

    process: FakeCupy


class _Ordered(_Own):
    """A stream, or an event. clock: the work that is done when it has come so far. behind: the gates before that."""

    def __init__(self) -> None:
        self.machine = self.process.machine
        self.clock: dict[int, int] = {}
        self.behind: list[Gate] = []

    def shut(self) -> list[Gate]:
        for gate in self.behind:
            if gate.is_open:
                _join(self.clock, gate.clock)
        self.behind = [gate for gate in self.behind if not gate.is_open]
        return self.behind

    def come_behind(self, other: _Ordered) -> None:
        other.shut()
        _join(self.clock, other.clock)
        self.behind = [*self.behind, *(gate for gate in other.behind if gate not in self.behind)]


_Access = namedtuple("_Access", "begin end stream number writes label")


@dataclass(eq=False)
class _Copy:
    """One under way to the host, which gets these values when it has seen the end; or from it, where they must be."""

    stream: int
    number: int
    host: np.ndarray
    values: np.ndarray
    down: bool

    def arrive(self) -> None:
        if self.down:
            self.host[...] = self.values
        elif not np.array_equal(self.host, self.values):
            raise RaceError("host memory was changed while it was copied to the GPU")


class _Bytes:
    """Memory of a GPU; or all of the host's. log: the work that anything new must be ordered behind."""

    def __init__(self, data: np.ndarray, gpu: int) -> None:
        self.data, self.gpu = data, gpu
        self.begin = _bounds(data)[0]
        self.log: list[_Access] = []

    def race(self, new: _Access, clock: dict[int, int]) -> _Access | None:
        """What is not in order with new work."""
        begin, end, writes = new.begin, new.end, new.writes
        for old in self.log:
            near = old.begin < end and begin < old.end and (writes or old.writes)
            if near and clock.get(old.stream, 0) < old.number:
                return old
        return None

    def note(self, new: _Access) -> None:
        """Remember new work, for what it orders of the old."""
        begin, end, stream, writes = new.begin, new.end, new.stream, new.writes
        self.log = [
            old
            for old in self.log
            if not (begin <= old.begin and old.end <= end) or not (writes or (not old.writes and old.stream == stream))
        ]
        self.log.append(new)


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
        self._begins: list[int] = []  # the same, in order; empty since the last change
        self.host = _Bytes(np.empty(0, np.uint8), -1)
        self.seen: dict[int, int] = {}  # by stream: how much of its work the host has seen done
        self.held: dict[int, int] = {}  # by stream: how much of its work is done, of those that do not go on
        self.numbers = itertools.count(LEGACY + 10)
        self.copies: list[_Copy] = []
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
            self.held.pop(stream.id, None)
            self.held.update({stream.id: stream.number} if held else {})

    def check(self) -> None:
        if self.failed:
            raise CUDARuntimeError(self.failed)

    def see(self, clock: dict[int, int]) -> None:
        _join(self.seen, clock)
        due = [one for one in self.copies if self.seen.get(one.stream, 0) >= one.number]
        self.copies = [one for one in self.copies if one not in due]
        for one in due:
            one.arrive()

    def find(self, begin: int, end: int) -> _Bytes | None:
        # A list of its own: garbage that is collected meanwhile may free memory.
        begins = self._begins = self._begins or sorted(self.memory)
        i = bisect(begins, begin)
        found = self.memory.get(begins[i - 1]) if i else None
        return found if found is not None and end <= found.begin + found.data.size else None

    def device_memory(self, gpu: int, n_bytes: int) -> _Bytes:
        if self.used[gpu] + n_bytes > self.memory_bytes:
            raise OutOfMemoryError(n_bytes, self.used[gpu], self.memory_bytes)
        self.used[gpu] += n_bytes
        whole = np.full(n_bytes + ALIGN, 0xFF, np.uint8)
        skip = -whole.ctypes.data % ALIGN
        made = _Bytes(whole[skip : skip + n_bytes], gpu)
        self.memory[made.begin] = made
        self._begins = []
        return made

    def free(self, memory: _Bytes) -> None:
        with self.lock:
            del self.memory[memory.begin]
            self._begins = []
            self.used[memory.gpu] -= memory.data.size

    def work(self, stream: Stream, label: str, uses: list[tuple[np.ndarray, bool]], *, host: bool = False) -> int:
        """Put work into a stream. uses: arrays, and whether they are written; host: the last in the host's memory.

        Raises RaceError.
        """
        self.check()
        stream.shut()
        _join(stream.clock, self.seen)
        stream.number += 1
        stream.clock[stream.id] = stream.number
        for i, (values, writes) in enumerate(uses):
            if values.size:
                begin, end = _bounds(values)
                memory = self.host if host and i == len(uses) - 1 else self.find(begin, end)
                if memory is None and self.strangers:
                    continue
                if memory is None:
                    raise RaceError(f"{label}: memory of {end - begin} bytes that is no GPU's, or was freed")
                new = _Access(begin, end, stream.id, stream.number, writes, label)
                if old := memory.race(new, stream.clock):
                    raise RaceError(
                        f"{label} in stream {stream.id} {'writes' if writes else 'reads'} what {old.label} in stream "
                        f"{old.stream} {'writes' if old.writes else 'reads'}: nothing orders them"
                    )
                memory.note(new)
        return stream.number

    def host_access(self, array: ndarray, *, writes: bool) -> None:
        """The host, or MPI, reads or writes an array's memory now. Raises RaceError where work may be under way."""
        with self.lock:
            begin, end = _bounds(array._values) if array.size else (0, 0)
            memory = self.find(begin, end)
            old = memory and memory.race(_Access(begin, end, 0, 0, writes, ""), self.seen)
            if old:
                raise RaceError(f"the host {'writes' if writes else 'reads'} what {old.label} has not ended")


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def _bounds(values: np.ndarray) -> tuple[int, int]:
    """Where an array begins and ends. It may have steps, also backwards."""
    begin = end = values.__array_interface__["data"][0]
    if values.flags.c_contiguous:
        return begin, begin + values.nbytes
    for n, step in zip(values.shape, values.strides, strict=True):
        begin, end = begin + min(0, (n - 1) * step), end + max(0, (n - 1) * step)
    return begin, end + values.itemsize


def at(address: int, size: int) -> np.ndarray:
    return np.frombuffer((c_uint8 * size).from_address(address), np.uint8)


# --- streams and events


class Stream(_Ordered):
    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        super().__init__()
        if not null:
            self.process._touch()
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
            self.machine.check()
            _join(self.clock, self.machine.seen)
            made.clock, made.behind = {}, []
            made.come_behind(self)
            made.asks = 0 if self.machine.eager else self.machine.random.randrange(3)
        return made

    def wait_event(self, event: Event) -> None:
        with self.machine.lock:
            self.machine.counts["waits"] += 1
            self.come_behind(event)

    def synchronize(self) -> None:
        self.record().synchronize()

    def __enter__(self) -> Stream:
        current = self.process.cuda.runtime.getDevice()
        if self.ptr != LEGACY and current != self.device_id:
            raise RuntimeError(f"This stream was not created on device {current}")
        self.process.local.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.local.streams.pop()


class Event(_Ordered):
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        super().__init__()
        self.asks = 0

    def _held(self) -> bool:
        self.machine.check()
        held = self.machine.held.items()
        return bool(self.shut()) or any(self.clock.get(stream, 0) > number for stream, number in held)

    @property
    def done(self) -> bool:
        with self.machine.lock:
            self.asks -= 1
            if self._held() or self.asks >= 0:
                return False
            self.machine.see(self.clock)
            return True

    def synchronize(self) -> None:
        while True:
            with self.machine.lock:
                if not self._held():
                    self.machine.see(self.clock)
                    return
            threading.Event().wait(0.001)


# --- memory


class Memory(_Own):
    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, self.process.cuda.runtime.getDevice()
        machine = self.process.machine
        with machine.lock:
            self._bytes = machine.device_memory(self.process.visible[self.device_id], max(size, 1))
            machine.counts["mallocs"] += 1
        self.ptr = self._bytes.begin
        weakref.finalize(self, machine.free, self._bytes).atexit = False


class UnownedMemory(_Own):
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def copy_to_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        self._copy(mem, size, stream, down=True)

    def copy_from_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        self._copy(mem, size, stream, down=False)

    def _copy(self, mem: int, size: int, stream: Stream | None, *, down: bool) -> None:
        process = self.mem.process
        machine = process.machine
        stream = process.cuda.get_current_stream() if stream is None else stream
        with machine.lock:
            if not any(begin <= mem and mem + size <= end for begin, end in process._pinned.items()):
                raise AssertionError("a copy of host memory that is not page-locked")
            there, host = at(self.ptr, size), at(mem, size)
            label = f"copy of {size} bytes {'to' if down else 'from'} the host"
            number = machine.work(stream, label, [(there, not down), (host, down)], host=True)

            def forget(old: Callable[[_Copy], bool]) -> list[_Copy]:
                found = [one for one in machine.copies if old(one) and np.may_share_memory(one.host, host)]
                machine.copies = [one for one in machine.copies if one not in found]
                return found

            def act() -> None:
                if not down:
                    for one in forget(lambda one: one.down):
                        one.arrive()  # ordered, as `work` has seen
                    there[...] = host
                machine.copies.append(_Copy(stream.id, number, host, (there if down else host).copy(), down))

            if down:
                forget(lambda _: True)
                host[...] = 0xFF
            Gate.then(stream.behind, act)
            way = "down" if down else "up"
            machine.counts[way] += 1
            machine.counts[way + "_bytes"] += size


class MemoryPool(_Own):
    """See CuPy's: what is let go of is kept for the stream that it was made in."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int, int], list[Memory]] = {}
        # All that is in use, and what nobody refers to: as long as it is here no garbage that refers to it frees it.
        self._taken: dict[int, Memory] = {}
        self._returned: deque[tuple[tuple[int, int, int], int]] = deque()

    def _take_back(self) -> None:
        while self._returned:
            arena, ptr = self._returned.popleft()
            self._free.setdefault(arena, []).append(self._taken.pop(ptr))

    def malloc(self, size: int) -> MemoryPointer:
        length = max(ALIGN, -(-size // ALIGN) * ALIGN)
        arena = self.process.cuda.runtime.getDevice(), self.process.cuda.get_current_stream().id, length
        with self.process.machine.lock:
            self._take_back()
            if kept := self._free.get(arena):
                memory = kept.pop()
                memory._bytes.data[...] = 0xFF
            else:
                memory = self.process.cuda.Memory(length)
            self._taken[memory.ptr] = memory
        lent = self.process.cuda.UnownedMemory(memory.ptr, length, memory, memory.device_id)
        weakref.finalize(lent, self._returned.append, (arena, memory.ptr)).atexit = False
        return MemoryPointer(lent, 0)

    def free_all_blocks(self) -> None:
        self._take_back()
        self._free.clear()

    def total_bytes(self) -> int:
        with self.process.machine.lock:
            return sum(one.size for kept in (self._taken.values(), *self._free.values()) for one in kept)


# --- arrays

UFUNC_KEYWORDS = {"out", "where", "dtype", "casting"}  # that CuPy takes
_PARAMETERS = {  # of functions of NumPy that CuPy has: its own, which are fewer
    "a axis dtype out keepdims": "sum",
    "a axis out keepdims": "max min any all",
    "a": "nonzero flatnonzero",
    "a axis bitorder": "packbits unpackbits",
    "a b max_work": "may_share_memory",
    "a axis kind": "argsort sort",
    "tup axis out dtype casting": "concatenate stack",
    "a b out": "dot",
    "condition x y": "where",
    "a indices axis out": "take",
    "a kth axis": "argpartition",
    "a v side sorter": "searchsorted",
    "a dtype": "ascontiguousarray",
    "a axis": "count_nonzero",
}
FUNCTIONS = {name: parameters.split() for parameters, names in _PARAMETERS.items() for name in names.split()}
_Flags = namedtuple("_Flags", "c_contiguous f_contiguous")  # there is none that says whether it may be written to


def _waiting(convert: Any) -> Any:
    """A method that makes the host wait for the values."""
    return lambda self: convert(self._one())


def _function(name: str) -> Any:
    """A method that is as one of NumPy's functions."""
    return lambda self, *args, **kwargs: self.__array_function__(getattr(np, name), (), (self, *args), kwargs)


def check_set(array: Any, arr: object) -> None:
    """What CuPy refuses of `array.set(arr)`."""
    if not isinstance(arr, np.ndarray):
        raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
    if array.dtype != arr.dtype:
        raise TypeError(f"{arr.dtype} array cannot be set to {array.dtype} array")
    if array.shape != arr.shape:
        raise ValueError(f"Shape mismatch. Old shape: {array.shape}, new shape: {arr.shape}")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise RuntimeError("Cannot set to non-contiguous array")


class ndarray(np.lib.mixins.NDArrayOperatorsMixin, _Own):  # noqa: N801 - as CuPy calls it
    """An array on a GPU."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        extent = n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if memptr is None:
            memptr = (self.process.local.allocators or [self.process.pool.malloc])[-1](n_bytes)
        if strides is not None and n_bytes:
            extent = np.dtype(dtype).itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        self.data = memptr
        self._values = np.ndarray(shape, dtype, at(memptr.ptr, extent).data if n_bytes else None, strides=strides)

    def _view(self, values: np.ndarray) -> ndarray:
        made = object.__new__(type(self))
        made._values, made.data = values, MemoryPointer(self.data.mem, 0)
        made.data.ptr = self.data.ptr + (values.ctypes.data - self._values.ctypes.data if values.size else 0)
        return made

    shape, strides, dtype, size, ndim, nbytes, itemsize = (
        property(attrgetter(f"_values.{name}"))
        for name in ("shape", "strides", "dtype", "size", "ndim", "nbytes", "itemsize")
    )
    T = property(lambda self: self._view(self._values.T))
    flags = property(lambda self: _Flags(self._values.flags.c_contiguous, self._values.flags.f_contiguous))
    device = property(lambda self: self.process.cuda.Device(self.data.device_id))

    def __len__(self) -> int:
        return len(self._values)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr if self.size else 0, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": self.process.cuda.get_current_stream().ptr,
            "version": 3,
        }

    def __array__(self, *args: object, **kwargs: object) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def get(self, stream: Any = None) -> np.ndarray:
        stream = self.process.cuda.get_current_stream() if stream is None else stream
        with self.process.machine.lock:
            self.process.machine.work(stream, "get", [(self._values, False)])
            self.process.machine.counts["gets"] += 1
        stream.synchronize()
        return self._values.copy()

    def _one(self) -> np.ndarray:
        self.process.machine.counts["syncs"] += 1
        return self.get()

    __bool__, __int__, __index__, __float__ = map(_waiting, (bool, int, int, float))
    item, tolist = map(_waiting, (np.ndarray.item, np.ndarray.tolist))
    max, min, sum, any, all, argsort, take = map(_function, ("max", "min", "sum", "any", "all", "argsort", "take"))

    def set(self, arr: np.ndarray) -> None:
        check_set(self, arr)
        self.process.machine.counts["sets"] += 1
        values = arr.copy()
        self.process._run("set", lambda: np.copyto(self._values, values), [], self)

    def reshape(self, *shape: Any) -> ndarray:
        wanted = shape[0] if len(shape) == 1 else shape
        view = self._values.reshape(wanted)
        if view.size and not np.shares_memory(view, self._values):
            return self.copy().reshape(wanted)
        return self._view(view)

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self._values.view(self.dtype if dtype is None else dtype))

    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True) -> Any:
        if not copy and self.dtype == dtype:
            return self
        out = self.process.empty(self.shape, dtype)
        self.process._run("astype", lambda: np.copyto(out._values, self._values, casting="unsafe"), [self], out)
        return out

    def copy(self) -> ndarray:
        return self.astype(self.dtype)

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
        self.process._run("setitem", act, _arrays_in([slices, value]), whole)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise NotImplementedError("stricter than CuPy, which has these methods of a few ufuncs only")
        if wrong := set(kwargs) - UFUNC_KEYWORDS:
            raise TypeError(f"Wrong arguments {wrong}")
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
            if kwargs["out"] is not None and not isinstance(kwargs["out"], ndarray):
                raise TypeError(f"out must be cupy.ndarray, not {type(kwargs['out'])}")
        return self.process._call(ufunc.__name__, ufunc, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = {"amax": "max", "amin": "min"}.get(func.__name__, func.__name__)  # as NumPy 1.24 calls them
        if name in ("empty_like", "zeros_like"):
            return self.process._like(name.partition("_")[0], *args, **kwargs)
        if name in ("asarray", "array", "arange", "copyto"):
            return getattr(self.process, name)(*args, **kwargs)
        if name not in FUNCTIONS:
            return NotImplemented
        if name == "may_share_memory":
            return func(*map(_unwrapped, args))
        if wrong := set(kwargs) - set(FUNCTIONS[name]):
            raise TypeError(f"{name}() got an unexpected keyword argument {sorted(wrong)}")
        return self.process._call(name, func, args, kwargs)


def _one_copy(dst: ndarray, src: ndarray) -> bool:
    """Whether it takes a copy of bytes alone."""
    return bool(dst.dtype == src.dtype and dst.flags.c_contiguous and src.flags.c_contiguous)


def _arrays_in(value: Any) -> list[ndarray]:
    if isinstance(value, ndarray):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for one in value for found in _arrays_in(one)]
    return []


def _unwrapped(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value._values
    return type(value)(map(_unwrapped, value)) if isinstance(value, (list, tuple)) else value


def _operand(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim > 0:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return _unwrapped(value)


def _kind(value: Any) -> str:
    """What a `Call` says of an argument, or of what was made."""
    if isinstance(value, (list, tuple)) and _arrays_in(value):
        return f"({', '.join(map(_kind, value))})"
    return str(value.dtype) if isinstance(value, (ndarray, np.generic, np.ndarray)) else type(value).__name__


def _fill(made: Any, found: Any) -> None:
    """Give arrays that were made before the values that have come."""
    for one, values in zip(made, found, strict=True) if isinstance(made, tuple) else [(made, found)]:
        np.copyto(one._values, values)


def _quietly(act: Callable[[], Any]) -> Any:
    with np.errstate(all="ignore"):
        return act()


# --- the module


class Device(_Own):
    def __init__(self, device: int | None = None) -> None:
        self.id = self.process.cuda.runtime.getDevice() if device is None else int(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        self.process.local.devices.append(self.process.cuda.runtime.getDevice())
        self.process.cuda.runtime.setDevice(self.id)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.cuda.runtime.setDevice(self.process.local.devices.pop())


class _Local(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.devices, self.streams, self.allocators = [], [], []


class FakeCupy:
    """What `import cupy` gives in one process. Classes that need it are this process's own."""

    __version__ = "14.0.0+fake"

    def __init__(self, machine: Machine, visible: tuple[int, ...]) -> None:
        self.machine, self.visible = machine, visible
        self.streams: dict[int, Stream] = {}
        self._pinned: dict[int, int] = {}  # where page-locked memory begins and ends
        self.contexts: set[int] = set()  # GPUs on which this process has made one
        self.ndarray = type("ndarray", (ndarray,), {"process": self})
        self.local = _Local()
        self.cuda = _Cuda(self)
        self.null = self.cuda.Stream.null = self.cuda.Stream(null=True)
        self.pool = self.cuda.MemoryPool()

    def _unpin(self, ptr: int) -> None:
        with self.machine.lock:
            end, host = self._pinned.pop(ptr), self.machine.host
            host.log = [one for one in host.log if one.end <= ptr or end <= one.begin]

    def empty(self, shape: Any, dtype: Any = float) -> ndarray:
        self._touch()
        return self.ndarray(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = float) -> ndarray:
        made = self.empty(shape, dtype)
        made[...] = 0
        return made

    def asarray(self, a: Any, dtype: Any = None) -> ndarray:
        return self.array(a, dtype, False)

    def array(self, obj: Any, dtype: Any = None, copy: bool = True) -> ndarray:
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
        if not isinstance(dst, ndarray):
            raise TypeError("Cannot copy to a NumPy array")
        if isinstance(src, ndarray) and src.device != dst.device and not _one_copy(dst, src):
            # What CuPy does: a copy in one piece there, one of that here, and then the values, each in the stream that
            # is current on the GPU where it is made.
            with src.device:
                there = src if src.flags.c_contiguous else src.copy()
            with dst.device:
                here = self.empty(there.shape, there.dtype)
                self._run("copyto", lambda: np.copyto(here._values, there._values), [there], here)
                self._run("copyto", lambda: np.copyto(dst._values, here._values, casting=casting), [here], dst)
            return
        values, chosen = _operand(src), True if where is None else _operand(where)
        reads = _arrays_in([src, where])
        self._run("copyto", lambda: np.copyto(dst._values, values, casting=casting, where=chosen), reads, dst)

    def _like(self, make: str, a: ndarray, dtype: Any = None, shape: Any = None) -> Any:
        return getattr(self, make)(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)

    def _touch(self) -> None:
        self.contexts.add(self.local.device)

    def _run(
        self, name: str, act: Any, reads: list[ndarray], into: ndarray | None = None, call: Call | None = None
    ) -> Any:
        """One piece of work in the current stream. into: what it writes to; None: it makes arrays, and what it gives is
        returned at once. call: how it was called, where that says more than the dtypes of the arrays."""
        self._touch()
        with self.machine.lock:
            uses = [*((one, False) for one in reads), *([(into, True)] if into is not None else [])]
            for one, _ in uses:
                if name != "copyto" and one.data.device_id not in (-1, self.local.device):
                    raise ValueError(
                        f"Array device must be same as the current device: array device = {one.data.device_id} while "
                        f"current = {self.local.device}"
                    )
            stream = self.cuda.get_current_stream()
            self.machine.work(stream, name, [(one._values, writes) for one, writes in uses])
            self.machine.counts["launches"] += 1
            call = call or Call(name, tuple(map(_kind, reads)), (), "", False)
            found = _quietly(act) if into is None else None
            made = found if into is None else into
            self.machine.calls.add(call._replace(output=_kind(made), into=into is not None))
            if into is not None:
                Gate.then(stream.behind, lambda: _quietly(act))
            return found

    def _call(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of NumPy on arrays; the result is new arrays, or `out`."""
        call = Call(name, tuple(map(_kind, args)), tuple(sorted(kwargs)), "", False)
        out = kwargs.pop("out", None)
        plain = [_operand(one) for one in args]
        more = {name: _operand(one) for name, one in kwargs.items()} | ({} if out is None else {"out": out._values})
        reads, act = _arrays_in([*args, *kwargs.values()]), partial(func, *plain, **more)
        with self.machine.lock:
            found = self._run(name, act, reads, out, call)
            if out is not None:
                return out
            made = self._wrapped(found)
            if behind := self.cuda.get_current_stream().behind:  # what it reads is not there yet
                Gate.then(behind, lambda: _fill(made, _quietly(act)))
        return made

    def _wrapped(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(map(self._wrapped, found))
        values = np.asarray(found)
        made = self.empty(values.shape, values.dtype)
        with self.machine.lock:
            self.machine.work(self.cuda.get_current_stream(), "result", [(made._values, True)])
            made._values[...] = values
        return made


class _Cuda:
    """The package `cupy.cuda`."""

    MemoryPointer = MemoryPointer

    def __init__(self, process: FakeCupy) -> None:
        import fake_nccl  # which imports this module

        self._process = process
        self.runtime, self.nccl = _Runtime(process), fake_nccl.of(process)
        self.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
        for one in (Stream, Event, Device, Memory, UnownedMemory, MemoryPool):
            setattr(self, one.__name__, type(one.__name__, (one,), {"process": process}))

    def alloc_pinned_memory(self, size: int) -> Any:
        made = np.full(size, 0xFF, np.uint8)
        if size:
            begin = made.ctypes.data
            self._process._pinned[begin] = begin + size
            weakref.finalize(made, self._process._unpin, begin).atexit = False
        return made

    @contextmanager
    def using_allocator(self, allocator: Any = None) -> Iterator[None]:
        self._process.local.allocators.append(self._process.pool.malloc if allocator is None else allocator)
        try:
            yield
        finally:
            self._process.local.allocators.pop()

    def get_current_stream(self) -> Stream:
        device = self.runtime.getDevice()
        here = [one for one in self._process.local.streams if one.ptr == LEGACY or one.device_id == device]
        return (here or [self._process.null])[-1]


class _Runtime:
    CUDARuntimeError = CUDARuntimeError

    def __init__(self, process: FakeCupy) -> None:
        self._process, self._machine = process, process.machine
        self.getDeviceCount = lambda: len(process.visible)
        self.getDeviceProperties = lambda device: {"name": b"Fake GPU", "uuid": bytes([process.visible[device]] * 16)}
        self.deviceGetPCIBusId = lambda device: f"0000:{process.visible[device]:02x}:00.0"

    def getDevice(self) -> int:
        self._machine.check()
        return int(self._process.local.device)

    def setDevice(self, device: int) -> None:
        if not 0 <= device < len(self._process.visible):
            raise CUDARuntimeError(101)
        self._process.local.device = device
        self._process.contexts.add(device)  # as CUDA does since 12

    def memGetInfo(self) -> tuple[int, int]:
        used = self._machine.used[self._process.visible[self._process.local.device]]
        return self._machine.memory_bytes - used, self._machine.memory_bytes
