"""The driver of fake GPUs: the methods of `Driver`, counted, and failing where a test wants it.

Each call holds the lock of the work (gpu_work.py), so that calls may come from any thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpikv import checks
from mpikv.arrays import HostArray
from mpikv.errors import MpikvError
from mpikv.spaces.driver import Driver, OutOfDeviceMemory
from mpikv.spaces.program import Entry, Program
from mpikv.spaces.routine import Routine
from mpikv.testing.gpu_memory import AccessError, Device, Memory
from mpikv.testing.gpu_process import Process
from mpikv.testing.gpu_work import FakeEvent, Stream, Use

METHODS = tuple(name for name, value in vars(Driver).items() if callable(value) and not name.startswith("_"))


class HostDriver:
    """The part of `FakeGpu` that a store sees."""

    def __init__(self, number: int, process: Process, device: Device) -> None:
        self.number = number
        self.name = "fake GPU"
        self.uuid = device.uuid
        self.process, self.device = process, device
        self.counts: Counter[str] = Counter()
        self._work = process.work
        self._made_current = threading.local()
        self._calls: Counter[str] = Counter()
        self._faults: list[tuple[str, int, bool, Exception]] = []

    # --- memory

    def allocate(self, n_bytes: int) -> int:
        """See `Driver`; full of NaN. Other views and other processes can open it. Example: see `export`."""
        with self._call("allocate"):
            address = self.process.allocate(self.device, checks.whole("n_bytes", n_bytes, 1))
            self.counts["allocations"] += 1
            return address

    def free(self, address: int) -> None:
        """See `Driver`; raises AccessError also while another view has it open. Used in the class's example."""
        with self._call("free"):
            self.process.free(address)
            self.counts["frees"] += 1

    def pinned(self, n_bytes: int) -> HostArray:
        """See `Driver`; full of NaN, page-locked until it and its views are let go. Used in the class's example."""
        with self._call("pinned"):
            memory = self.process.pinned(checks.whole("n_bytes", n_bytes))
            self.counts["pinned"] += 1
            return memory

    def register(self, memory: HostArray) -> None:
        """See `Driver`. memory: contiguous, of any dtype.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu, host = FakeGpu(), np.zeros(4)
        >>> gpu.register(host)
        >>> gpu.copy(gpu.allocate(32), host.ctypes.data, 32, gpu.stream())
        >>> gpu.synchronize()
        >>> gpu.unregister(host)
        """
        with self._call("register"):
            self.process.register(memory)
            self.counts["registered"] += 1

    def unregister(self, memory: HostArray) -> None:
        """See `Driver`. Example: see `register`."""
        with self._call("unregister"):
            self.process.unregister(memory)

    def export(self, address: int) -> bytes:
        """See `Driver`. For the other views of this GPU, and for other processes of this host.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> other, memory = gpu.view(), gpu.allocate(16)
        >>> opened = other.open(gpu.export(memory))
        >>> other.copy(other.allocate(16), opened, 16, other.stream())
        >>> other.synchronize()
        >>> other.close(opened)
        """
        with self._call("export"):
            exported = self.process.export(address, self.uuid)
            self.counts["exports"] += 1
            return exported

    def open(self, exported: bytes) -> int:
        """See `Driver`. Raises MpikvError where its owner has gone. Example: see `export`."""
        with self._call("open"):
            address = self.process.open(exported, self.device)
            self.counts["opens"] += 1
            return address

    def close(self, address: int) -> None:
        """See `Driver`. Example: see `export`."""
        with self._call("close"):
            self.process.close(address)

    # --- order

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """See `Driver`; `is_current` is true meanwhile. Example: see `is_current`."""
        with self._call("current"):
            before, self._made_current.here = self.is_current, True
        try:
            yield
        finally:
            self._made_current.here = before

    @property
    def is_current(self) -> bool:
        """Whether this thread is within `current`.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> with gpu.current():
        ...     gpu.is_current
        True
        >>> gpu.is_current
        False
        """
        return getattr(self._made_current, "here", False)

    def stream(self) -> int:
        """See `Driver`. Example: see `wait`."""
        with self._call("stream"):
            return self.process.new_stream(self.number)

    def record(self, stream: int, number: int | None = None) -> FakeEvent:
        """See `Driver`. Example: see `wait`."""
        with self._call("record"):
            event = self._work.record(self._stream_of(stream, number))
            self.counts["records"] += 1
            return event

    def wait(self, stream: int, event: FakeEvent, number: int | None = None) -> None:
        """See `Driver`.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> ours, theirs, memory, host = gpu.stream(), gpu.stream(), gpu.allocate(8), gpu.pinned(8)
        >>> gpu.copy(memory, host.ctypes.data, 8, ours)
        >>> gpu.wait(theirs, gpu.record(ours))
        >>> gpu.copy(gpu.allocate(8), memory, 8, theirs)
        """
        with self._call("wait"):
            self._work.wait(self._stream_of(stream, number), self.process.event(event))
            self.counts["waits"] += 1

    def done(self, event: FakeEvent) -> bool:
        """See `Driver`. Some work, of this stream or of others, is done first. Used in the class's example."""
        with self._call("done"):
            return self._work.done(self.process.event(event))

    # --- work

    def copy(self, to: int, source: int, n_bytes: int, stream: int) -> None:
        """See `Driver`. Example: see `wait`."""
        with self._call("copy"):
            n_bytes = checks.whole("n_bytes", n_bytes)
            self._copy((to, (1,)), (source, (1,)), (n_bytes,), 1, self._stream(stream))

    def copy_strided(
        self,
        to: tuple[int, Sequence[int]],
        source: tuple[int, Sequence[int]],
        shape: Sequence[int],
        itemsize: int,
        stream: int,
    ) -> None:
        """See `Driver`; counted as a copy, and as one of `strided`.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> columns, flat = gpu.array(np.arange(6.0).reshape(2, 3)), gpu.allocate(16)
        >>> second = columns[:, 1]
        >>> gpu.copy_strided((flat, [8]), (second.address, second.strides), [2], 8, gpu.current_stream)
        >>> gpu.counts['strided'], gpu.counts['device_to_device_bytes']
        (1, 16)
        """
        with self._call("copy_strided"):
            self._copy(to, source, shape, itemsize, self._stream_of(stream))
            self.counts["strided"] += 1

    def launch(
        self, program: Program | Routine, n_elems: int, addresses: Sequence[int], numbers: Sequence[Any], stream: int
    ) -> None:
        """See `Driver`. Arguments that overlap, one of them written, must be the same bytes and written once.

        >>> from mpikv.spaces.program import Argument, Operation, Program
        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> real = np.dtype('f4')  # x *= number: value 0 is loaded from x, 1 is the number, 2 their product
        >>> double = Program((Argument(real, 0, 2),), (real,), (Operation('multiply', real, (0, 1)),))
        >>> gpu = FakeGpu()
        >>> x = gpu.array(np.ones(3, real))
        >>> gpu.launch(double, 3, [x.address], [2.0], gpu.current_stream)
        >>> x.get()
        array([2., 2., 2.], dtype=float32)
        """
        with self._call("launch"):
            arguments = program.arguments
            if len(addresses) != len(arguments) or len(numbers) != len(program.numbers):
                raise AccessError(
                    f"launch: the program has {len(arguments)} arrays and {len(program.numbers)} numbers, "
                    f"not {len(addresses)} and {len(numbers)}"
                )
            arrays: list[HostArray] = []
            uses: list[Use] = []
            lengths = program.lengths(n_elems, numbers)
            for argument, length, address in zip(arguments, lengths, addresses, strict=True):
                at, writes = (address, (argument.dtype.itemsize,)), argument.last is not None
                array, use = self.process.array(at, (length,), argument.dtype, writes=writes)
                arrays.append(array)
                if use is not None:
                    _check_apart(use, uses)
                    uses.append(use)
            given = list(numbers)
            label = f"launch of {n_elems} elements"
            self._work.put(self._stream_of(stream), label, uses, lambda: program.run(arrays, given))
            self.counts["launches"] += 1

    def launch_many(self, program: Program | Routine, entries: Sequence[Entry], stream: int) -> None:
        """See `Driver`. Counts as one launch; the last entry is done first, since nothing orders them.

        >>> from mpikv.spaces import arithmetic
        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu, real = FakeGpu(), np.dtype('f4')
        >>> x, y = gpu.array(np.ones(3, real)), gpu.array(np.ones(2, real))
        >>> entries = [(one.size, [one.address] * 2, [factor]) for one, factor in ((x, 2.0), (y, 3.0))]
        >>> gpu.launch_many(arithmetic.scale(real), entries, gpu.current_stream)
        >>> x.get(), y.get()
        (array([2., 2., 2.], dtype=float32), array([3., 3.], dtype=float32))
        """
        with self._work.lock:
            for n_elems, addresses, numbers in reversed(entries):
                self.launch(program, n_elems, addresses, numbers, stream)
            self.counts["launches"] -= max(0, len(entries) - 1)

    def _copy(
        self,
        to: tuple[int, Sequence[int]],
        source: tuple[int, Sequence[int]],
        shape: Sequence[int],
        itemsize: int,
        stream: Stream,
    ) -> None:
        dtype, n_bytes = np.dtype((np.void, itemsize)), math.prod(shape) * itemsize
        out, written = self.process.array(to, shape, dtype, writes=True)
        values, read = self.process.array(source, shape, dtype, writes=False)
        if written is None or read is None:
            return
        _check_apart(written, [read], same=False)
        kind = _direction(read.memory, written.memory)

        def action() -> None:
            out[...] = values

        self._work.put(stream, f"copy of {n_bytes} bytes, {kind.replace('_', ' ')}", [read, written], action)
        self.counts[kind] += 1
        self.counts[f"{kind}_bytes"] += n_bytes

    # --- for tests

    def fail(self, method: str, nth: int = 1, error: Exception | None = None, *, always: bool = False) -> None:
        """Let the nth call of a method from now on raise an error, by default as a GPU's. always: those after it, too.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> gpu.fail('allocate', 2)
        >>> address = gpu.allocate(8)
        >>> gpu.allocate(8)
        Traceback (most recent call last):
        mpikv.spaces.driver.OutOfDeviceMemory: ...
        """
        if method not in METHODS:
            raise ValueError(f"a GPU has no method {method!r}; it has {', '.join(METHODS)}")
        if error is None:
            kind = OutOfDeviceMemory if method in ("allocate", "pinned") else MpikvError
            error = kind(f"GPU {self.number} ({self.name}): `{method}` fails, as the test wants it")
        self._faults.append((method, self._calls[method] + checks.whole("nth", nth, 1), always, error))

    # --- within

    @contextlib.contextmanager
    def _call(self, method: str) -> Iterator[None]:
        with self._work.lock:
            self.process.collect()
            self._calls[method] += 1
            for name, nth, always, error in self._faults:
                if name == method and (self._calls[method] == nth or (always and self._calls[method] > nth)):
                    raise error
            yield

    def _stream(self, number: int) -> Stream:
        """A stream by its number; a default stream is this GPU's."""
        return self.process.stream(number, self.number)

    def _stream_of(self, number: int, gpu: int | None = None) -> Stream:
        """A stream of a GPU, None: of this one, on which alone its kernels run and its events are recorded."""
        gpu = self.number if gpu is None else gpu
        stream = self.process.stream(number, gpu)
        if stream.gpu != gpu:
            raise AccessError(f"{stream} is no stream of GPU {gpu}")
        return stream


def _check_apart(use: Use, others: Sequence[Use], *, same: bool = True) -> None:
    """Within one piece of work: bytes that are written are no other argument's. same: unless all are, to be read."""
    for other in others:
        if not (use.writes or other.writes) or use.memory.bytes is not other.memory.bytes:
            continue
        alike = same and use.span == other.span and not (use.writes and other.writes)
        if not alike and use.span.overlap(other.span) is not None:
            raise AccessError(f"arguments of one call overlap in {use.memory}, and one of them is written")


def _direction(source: Memory, to: Memory) -> str:
    """What a copy is counted as."""
    if source.device is not None and to.device is not None and source.device is not to.device:
        return "peer"
    return "_to_".join("host" if memory.device is None else "device" for memory in (source, to))
