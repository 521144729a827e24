"""A GPU made of host memory, which finds mistakes in the order of what is done on it.

It is a `Driver` (mpikv/spaces/driver.py), as the one over CuPy is, so that whatever runs on a GPU runs here. It is
stricter than a GPU where that helps a test:

- Work waits in its stream until somebody asks whether an event is done; then some of it is done, in an order that is
  drawn from `seed` among those that streams and events allow.
- Two pieces of work that touch the same bytes, one of them writing, must be ordered: by their stream, by an event that
  is waited for, or since the host has seen the first done before the second was put in. Otherwise the second raises
  RaceError, whatever the drawn order would have been (gpu_work.py). The same holds for what the host does with such
  bytes, where it says so: `host_reads`, `host_writes`, and the `get` of arrays.
- New and freed memory is full of NaN. Memory that was freed, never made or of another process raises AccessError, and
  so does memory that is freed while it is used (gpu_memory.py).

Both errors are AssertionErrors: they tell of a mistake in the program, so that nothing may catch and survive them.

`view` is the same GPU as another process of the host sees it: with threads as ranks, each has its own. What work of one
view races with that of another is found as well, since the host alone can order them. Between processes, `export` and
`open` work as between views; their races are not found, but each one's own are.

`array` makes arrays such as a user's (fake_array.py). `counts` says exactly what was done, `fail` makes a call fail.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpikv import checks
from mpikv.arrays import HostArray
from mpikv.errors import MpikvError
from mpikv.spaces.driver import Driver, OutOfDeviceMemory
from mpikv.spaces.program import Program
from mpikv.testing.fake_array import FakeArray
from mpikv.testing.gpu_memory import AccessError, Device, Memory
from mpikv.testing.gpu_process import Machine, Process
from mpikv.testing.gpu_work import Action, FakeEvent, RaceError, Stream, Use

__all__ = ["AccessError", "FakeGpu", "FakeGpus", "RaceError"]

LEGACY, PER_THREAD = 1, 2  # default streams, as `__cuda_array_interface__` numbers them
METHODS = tuple(name for name, value in vars(Driver).items() if callable(value) and not name.startswith("_"))


class FakeGpu:
    """One GPU. The methods of `Driver` are described there; they raise RaceError and AccessError for mistakes.

    number: which of the process's. memory_bytes: how much its allocations and arrays may have together. seed: of the
    order in which work is done. eager: the chance that a piece of work is done as soon as it is put in. process,
    device: what `FakeGpus` and `view` share among GPUs.

    >>> from mpikv.testing.fake_gpu import FakeGpu
    >>> gpu = FakeGpu(memory_bytes=1024)
    >>> stream, memory, host = gpu.stream(), gpu.allocate(16), gpu.pinned(16)
    >>> host[:] = 7
    >>> gpu.copy(memory, host.ctypes.data, 16, stream)
    >>> event = gpu.record(stream)
    >>> while not gpu.done(event):  # which does some of the work
    ...     pass
    >>> gpu.counts['host_to_device'], gpu.counts['host_to_device_bytes'], gpu.left_bytes
    (1, 16, 1008)
    >>> gpu.free(memory)
    """

    def __init__(
        self,
        number: int = 0,
        memory_bytes: int = 1 << 30,
        seed: int = 0,
        *,
        eager: float = 0.0,
        process: Process | None = None,
        device: Device | None = None,
    ) -> None:
        self.number = number
        self.name = "fake GPU"
        self.process = Process(Machine(seed, eager)) if process is None else process
        self.device = Device(f"GPU-fake-{number}", memory_bytes) if device is None else device
        self.uuid = self.device.uuid
        self.counts: Counter[str] = Counter()
        self._work = self.process.work
        self._legacy = self._work.stream(number, self.process, LEGACY)
        self._of_threads: dict[int, Stream] = {}
        self._current = threading.local()
        self._calls: Counter[str] = Counter()
        self._faults: list[tuple[str, int, bool, Exception]] = []

    def view(self, number: int | None = None) -> FakeGpu:
        """Return this GPU as another process of the host sees it, with a number of its own.

        Memory and streams of one view are not the other's; see `export` and `open`.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> other = gpu.view()
        >>> other.uuid == gpu.uuid
        True
        """
        process = Process(self.process.machine)
        return FakeGpu(self.number if number is None else number, process=process, device=self.device)

    @property
    def left_bytes(self) -> int:
        """How much more can be allocated. Arrays give theirs back when they are let go. Used in the class's example."""
        with self._work.lock:
            self.process.collect()
            return self.device.memory_bytes - self.device.used_bytes

    @property
    def id(self) -> int:
        """Its number, as CuPy calls it: an array's `device` is its GPU.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu(1)
        >>> gpu.id, int(gpu)
        (1, 1)
        """
        return self.number

    def __int__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<{self.name} {self.number}>"

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

    def stream(self) -> int:
        """See `Driver`. Example: see `wait`."""
        with self._call("stream"):
            return self.process.new_stream(self.number)

    def record(self, stream: int) -> FakeEvent:
        """See `Driver`. Example: see `wait`."""
        with self._call("record"):
            event = self._work.record(self._stream(stream))
            self.counts["records"] += 1
            return event

    def wait(self, stream: int, event: FakeEvent) -> None:
        """See `Driver`.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> ours, theirs, memory, host = gpu.stream(), gpu.stream(), gpu.allocate(8), gpu.pinned(8)
        >>> gpu.copy(memory, host.ctypes.data, 8, ours)
        >>> gpu.wait(theirs, gpu.record(ours))
        >>> gpu.copy(gpu.allocate(8), memory, 8, theirs)
        """
        with self._call("wait"):
            self._work.wait(self._stream(stream), self.process.event(event))
            self.counts["waits"] += 1

    def done(self, event: FakeEvent) -> bool:
        """See `Driver`. Some work, of this stream or of others, is done first. Used in the class's example."""
        with self._call("done"):
            return self._work.done(self.process.event(event))

    # --- work

    def copy(self, to: int, source: int, n_bytes: int, stream: int) -> None:
        """See `Driver`. Example: see `wait`."""
        with self._call("copy"):
            self._copy((to, (1,)), (source, (1,)), (checks.whole("n_bytes", n_bytes),), 1, stream)

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
            self._copy(to, source, shape, itemsize, stream)
            self.counts["strided"] += 1

    def launch(
        self, program: Program, n_elems: int, addresses: Sequence[int], numbers: Sequence[Any], stream: int
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
            for argument, address in zip(arguments, addresses, strict=True):
                at, writes = (address, (argument.dtype.itemsize,)), argument.last is not None
                array, use = self.process.array(at, (n_elems,), argument.dtype, writes=writes)
                arrays.append(array)
                if use is not None:
                    _check_apart(use, uses)
                    uses.append(use)
            given = list(numbers)
            label = f"launch of {n_elems} elements"
            self._work.put(self._stream(stream), label, uses, lambda: program.run(arrays, given))
            self.counts["launches"] += 1

    def _copy(
        self,
        to: tuple[int, Sequence[int]],
        source: tuple[int, Sequence[int]],
        shape: Sequence[int],
        itemsize: int,
        stream: int,
    ) -> None:
        dtype, n_bytes, put_into = np.dtype((np.void, itemsize)), math.prod(shape) * itemsize, self._stream(stream)
        out, written = self.process.array(to, shape, dtype, writes=True)
        values, read = self.process.array(source, shape, dtype, writes=False)
        if written is None or read is None:
            return
        _check_apart(written, [read], same=False)
        kind = _direction(read.memory, written.memory)

        def action() -> None:
            out[...] = values

        self._work.put(put_into, f"copy of {n_bytes} bytes, {kind.replace('_', ' ')}", [read, written], action)
        self.counts[kind] += 1
        self.counts[f"{kind}_bytes"] += n_bytes

    # --- for tests

    def host_reads(self, address: int, n_bytes: int) -> None:
        """Raise RaceError where work that writes these bytes is not seen to be done. Before the host reads them.

        Addresses that no GPU knows are nobody's, and pass. Fake transports call it for what they send.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> stream, host = gpu.stream(), gpu.pinned(8)
        >>> gpu.copy(host.ctypes.data, gpu.allocate(8), 8, stream)
        >>> gpu.host_reads(host.ctypes.data, 8)
        Traceback (most recent call last):
        mpikv.testing.gpu_work.RaceError: the host (...) reads ...
        """
        self._host(address, n_bytes, writes=False)

    def host_writes(self, address: int, n_bytes: int) -> None:
        """Raise RaceError where work that uses these bytes is not seen to be done. Before the host writes them.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> stream, host = gpu.stream(), gpu.pinned(8)
        >>> gpu.copy(gpu.allocate(8), host.ctypes.data, 8, stream)
        >>> gpu.host_reads(host.ctypes.data, 8)
        >>> gpu.host_writes(host.ctypes.data, 8)
        Traceback (most recent call last):
        mpikv.testing.gpu_work.RaceError: the host (...) writes ...
        """
        self._host(address, n_bytes, writes=True)

    def run_all(self) -> None:
        """Do all work of all GPUs that share a process or a device with this one. The host has not seen it.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> event = gpu.record(gpu.stream())
        >>> gpu.run_all()
        >>> gpu.done(event)
        True
        """
        with self._work.lock:
            self.process.collect()
            self._work.run_all()

    def synchronize(self) -> None:
        """Do all work as `run_all` does, which the host has seen then. Raises MpikvError where some has failed.

        Example: see `register`.
        """
        with self._work.lock:
            self.process.collect()
            self._work.see_all()

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

    # --- a user's arrays

    def array(self, values: npt.ArrayLike, *, stream: int | None = None) -> FakeArray:
        """Return an array with a copy of these values, which comes there in a stream; None: in the current one.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> FakeGpu().array([1.0, 2.0]).get()
        array([1., 2.])
        """
        host = np.array(values, order="C")
        array = FakeArray.new(self, host.shape, host.dtype, self.current_stream if stream is None else stream)
        array.put_values(host, stream)
        return array

    @property
    def current_stream(self) -> int:
        """That of arrays, in this thread: the default stream, or that of `user_stream`. Example: see `user_stream`."""
        stack: list[int] = getattr(self._current, "stack", [])
        return stack[-1] if stack else LEGACY

    @contextlib.contextmanager
    def user_stream(self, stream: int | None = None) -> Iterator[int]:
        """A context in which arrays do their work in this stream, or in a new one, in this thread.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> with gpu.user_stream() as stream:
        ...     x = gpu.array([1.0])
        ...     gpu.current_stream == stream == x.__cuda_array_interface__['stream']
        True
        """
        with self._work.lock:
            stream = self.process.new_stream(self.number) if stream is None else stream
            self._stream(stream)
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        self._current.stack.append(stream)
        try:
            yield stream
        finally:
            self._current.stack.pop()

    def _array_memory(self, n_bytes: int, stream: int) -> tuple[Memory, HostArray]:
        """For `FakeArray`: new memory, and what keeps it. Later work of the stream may reuse the memory."""
        with self._work.lock:
            self.process.collect()
            return self.process.of_array(self.device, n_bytes, self._stream(stream))

    def _array_work(self, label: str, uses: Sequence[Use], action: Action, stream: int | None, *, wait: bool) -> None:
        """For `FakeArray`: put work into a stream, None: the current one, and wait until it is done."""
        with self._work.lock:
            self.process.collect()
            put_into = self._stream(self.current_stream if stream is None else stream)
            self._work.put(put_into, label, uses, action)
            if wait:
                self._work.finish(self._work.record(put_into))

    def _order(self, first: int, then: int) -> None:
        """For `FakeArray`: let what comes into the stream `then` come after what is in the stream `first`."""
        with self._work.lock:
            self._work.wait(self._stream(then), self._work.record(self._stream(first)))

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
        if number == LEGACY:
            return self._legacy
        if number == PER_THREAD:
            me = threading.get_ident()
            if me not in self._of_threads:
                self._of_threads[me] = self._work.stream(self.number, self.process, PER_THREAD)
            return self._of_threads[me]
        stream = self.process.streams.get(number)
        if stream is None:
            raise AccessError(f"{number!r} is no stream of this process on GPU {self.number}")
        return stream

    def _host(self, address: int, n_bytes: int, *, writes: bool) -> None:
        with self._work.lock:
            self.process.collect()
            use = self.process.bytes_at(address, n_bytes, writes=writes)
            if use is not None:
                self._work.host_access(use)


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


class FakeGpus(Sequence[FakeGpu]):
    """Several GPUs of one process, which can copy from each other and wait for each other's events.

    >>> from mpikv.testing.fake_gpu import FakeGpus
    >>> first, second = FakeGpus(2)
    >>> stream = second.stream()
    >>> second.copy(second.allocate(8), first.allocate(8), 8, stream)
    >>> second.counts['peer']
    1
    """

    def __init__(self, n: int, memory_bytes: int = 1 << 30, seed: int = 0, *, eager: float = 0.0) -> None:
        process = Process(Machine(seed, eager))
        self._gpus = [FakeGpu(number, memory_bytes, process=process) for number in range(n)]

    def __len__(self) -> int:
        return len(self._gpus)

    def __getitem__(self, index: Any) -> Any:
        return self._gpus[index]

    def view(self, numbers: Sequence[int] | None = None) -> FakeGpus:
        """Return these GPUs as another process sees them. numbers: which, in its order, as CUDA_VISIBLE_DEVICES says.

        >>> from mpikv.testing.fake_gpu import FakeGpus
        >>> gpus = FakeGpus(3)
        >>> [gpu.uuid for gpu in gpus.view([2, 0])]
        ['GPU-fake-2', 'GPU-fake-0']
        """
        process = Process(self._gpus[0].process.machine)
        seen = FakeGpus(0)
        for new, old in enumerate(range(len(self._gpus)) if numbers is None else numbers):
            seen._gpus.append(FakeGpu(new, process=process, device=self._gpus[old].device))
        return seen
