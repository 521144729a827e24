"""A GPU made of host memory, which finds mistakes in the order of what is done on it.

It is a `Driver` (mpikv/spaces/driver.py), as the one over CuPy is, so that whatever runs on a GPU runs here. It is
stricter than a GPU where that helps a test:

- Work waits in its stream until somebody asks whether an event is done; then some of it is done, in an order that is
  drawn from `seed` among those that streams and events allow.
- Two pieces of work that touch the same bytes, one of them writing, must be ordered: by their stream, by an event that
  is waited for, or since the host has seen the first done before the second was put in. Otherwise the second raises
  RaceError, whatever the drawn order would have been (gpu_work.py). The same holds for what the host does with such
  bytes, where it says so: `host_reads`, `host_writes`, `host_begins`, and the `get` of arrays.
- Streams wait for each other only where they are told to: the default stream is one like the others.
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
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpikv.arrays import HostArray
from mpikv.testing.fake_array import FakeArray
from mpikv.testing.gpu_driver import HostDriver
from mpikv.testing.gpu_memory import AccessError, Device, Memory
from mpikv.testing.gpu_process import LEGACY, Machine, Process
from mpikv.testing.gpu_work import Access, Action, RaceError, Use

__all__ = ["AccessError", "FakeGpu", "FakeGpus", "RaceError"]


class FakeGpu(HostDriver):
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
        super().__init__(
            number,
            Process(Machine(seed, eager)) if process is None else process,
            Device(f"GPU-fake-{number}", memory_bytes) if device is None else device,
        )
        self._current = threading.local()

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

    def __enter__(self) -> FakeGpu:
        """As of CuPy's devices, on which an array's own work is anyhow."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing ends."""

    def __repr__(self) -> str:
        return f"<{self.name} {self.number}>"

    def as_caller(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object) -> FakeArray:
        """See `Driver`.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> gpu.as_caller(gpu.allocate(8), (2,), np.dtype('f4'), None).get()
        array([nan, nan], dtype=float32)
        """
        with self._call("as_caller"):
            strides = np.empty(shape, np.dtype((np.void, dtype.itemsize))).strides
            values, use = self.process.array((address, strides), shape, dtype, writes=True)
            return FakeArray(self, None if use is None else use.memory, owner, values)

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

    def host_begins(self, address: int, n_bytes: int, *, writes: bool) -> object:
        """Raise as `host_reads` or `host_writes` do, and let work race with the host until `host_ends`.

        For messages: what MPI sends it reads until the request is done, and what it receives it writes until then.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> stream, memory, host = gpu.stream(), gpu.allocate(8), gpu.pinned(8)
        >>> sent = gpu.host_begins(memory, 8, writes=False)
        >>> gpu.copy(memory, host.ctypes.data, 8, stream)
        Traceback (most recent call last):
        mpikv.testing.gpu_work.RaceError: copy of 8 bytes, ... writes ... which the host ... reads: ...
        >>> gpu.host_ends(sent)
        >>> gpu.copy(memory, host.ctypes.data, 8, stream)
        """
        return self._host(address, n_bytes, writes=writes, lasts=True)

    def host_ends(self, began: Any) -> None:
        """End what `host_begins` returned. Example: see `host_begins`."""
        if began is not None:
            self._work.host_ends(began)

    def hold(self, held: bool = True) -> None:
        """From now on let nothing be done but by `advance`, `run_all`, `synchronize` and `get`: `done` only looks.

        For all GPUs that share a process or a device with this one. held: False ends it.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> gpu = FakeGpu()
        >>> gpu.hold()
        >>> first, second, memory = gpu.stream(), gpu.stream(), gpu.allocate(8)
        >>> for stream in (first, second):
        ...     gpu.copy(gpu.allocate(8), memory, 8, stream)
        >>> events = gpu.record(first), gpu.record(second)
        >>> gpu.advance(second), gpu.advance(second)
        (True, False)
        >>> [gpu.done(event) for event in events]
        [False, True]
        """
        with self._work.lock:
            self._work.held = held

    def advance(self, stream: int) -> bool:
        """Do the next piece of work of one stream, unless it waits for another. False: nothing was done.

        Example: see `hold`.
        """
        with self._work.lock:
            return self._work.advance(self._stream(stream))

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

    def _host(self, address: int, n_bytes: int, *, writes: bool, lasts: bool = False) -> Access | None:
        with self._work.lock:
            self.process.collect()
            use = self.process.bytes_at(address, n_bytes, writes=writes)
            return None if use is None else self._work.host_access(use, lasts=lasts)


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
