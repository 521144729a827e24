"""Device memory: CuPy's arrays on one GPU, and what is done with them there. Calls put work into streams and return.

Order. Each store has one stream of its own, in which all that it does with its arrays follows one after another; but
for long copies from the host while others go there: they are in a second one, and the first waits for them (`join`).
What a call reads of the caller's is copied in the caller's own stream, behind what he has begun to write and before
whatever he puts there next; so neither waits for the other, and the store's stream never waits for a gradient that is
still being computed unless somebody asks for that very array. What a call writes is written in the store's stream,
behind the caller's work as it was when the call was made; and the caller's stream waits for it.

Memory is CuPy's: a pool of the store's own. Copies of what callers push have a pool to themselves, since they are
written in other streams than the store's: what is let go of comes back to it once the store's stream has come so far.
What other ranks of the host read (spaces/peers) is in allocations of its own, which are kept.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.as_numpy import write as write_host
from mpikv.engine.backoff import wait_until
from mpikv.engine.operation import Operation
from mpikv.errors import StallError
from mpikv.spaces import callers
from mpikv.spaces.callers import Caller
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.gpu_events import EventRequest, EventWatcher
from mpikv.spaces.host import HostSpace
from mpikv.spaces.pinned import CopyCounts, Pinned

SLOW_S = 300.0  # copies between host and device end long before, or the GPU has failed
CHUNK_BYTES = 32 << 20  # of memory that others read; a longer array has one of its own
# CUDA takes shorter allocations out of one block, and another process that opens one of them sees them all (CUDA C++
# Programming Guide, interprocess communication).
ALLOCATION_BYTES = 2 << 20
ALIGN_BYTES = 512


class _Thread(threading.local):
    """How often the calling thread is in `DeviceSpace.here`."""

    depth = 0


class DeviceSpace:
    """The memory of one GPU, for one store."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.cupy = gpu, gpu.cupy
        cuda = self.cupy.cuda
        with gpu.current("makes streams"):
            self.stream, self.beside = cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)
        self._pool, self._pushes = cuda.MemoryPool(), cuda.MemoryPool()
        self.pinned, self.copies = Pinned(gpu), CopyCounts()
        self._watch = EventWatcher(gpu)  # of the store's stream
        self._callers_watch = EventWatcher(gpu)
        self._thread = _Thread()
        # What callers' streams write into arrays that the store's stream has not waited for, by the id of their memory:
        # the event behind it, and which stream it is.
        self._written: dict[int, tuple[Any, int]] = {}
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._lent: dict[int, Any] = {}  # memory of pushes that somebody refers to, by number
        # What nobody refers to: its number and its id. A deque, since that may happen at any moment, in any thread.
        self._returned: deque[tuple[int, int]] = deque()
        self._leaving: deque[tuple[Any, Any]] = deque()
        self.chunks: list[Any] = []  # memory that others read
        self._rest = (0, 0)  # where the free end of the last one begins, and its length
        self._closed = False

        class PushMemory(cuda.UnownedMemory):  # type: ignore[name-defined,misc]
            """Memory of the pool of pushes, which says when nobody refers to it any more."""

            def __del__(self) -> None:
                self.returned.append((self.number, id(self)))

        self._pushed = PushMemory

    @property
    def device(self) -> int:
        """See `Space`."""
        return self.gpu.number

    def rings(self, ring: Callable[[], None]) -> None:
        """Call this whenever something is done that somebody waits for. From any thread."""
        self._watch.ring = self._callers_watch.ring = ring

    @contextmanager
    def here(self) -> Iterator[None]:
        """See `Space`. What CUDA refuses becomes an error of ours."""
        thread = self._thread
        try:
            if thread.depth:
                thread.depth += 1
                try:
                    yield
                finally:
                    thread.depth -= 1
                return
            with self.gpu.current(), self.cupy.cuda.using_allocator(self._pool.malloc), self.stream:
                thread.depth = 1
                try:
                    yield
                finally:
                    thread.depth = 0
        except self.gpu.errors as error:
            raise self.gpu.failed(error) from error

    def stats(self) -> dict[str, int]:
        """See `Space`."""
        held = sum(pool.total_bytes() for pool in (self._pool, self._pushes)) + sum(one.size for one in self.chunks)
        return {**self.copies.stats(), "device_bytes": held}

    def close(self) -> None:
        """See `Space`. No other process may have the memory open. Arrays that somebody still has keep theirs."""
        if not self._closed:
            self._closed = True
            self.settle()
            for watch in (self._watch, self._callers_watch):
                watch.close()
            self.pinned.close()
            while self._returned:
                self._lent.pop(self._returned.popleft()[0])
            self._leaving.clear()
            self.chunks.clear()
            with self.gpu.current("gives memory back"):
                self._pool.free_all_blocks()
                self._pushes.free_all_blocks()

    # --- a caller's arrays

    def callers(self, arrays: Sequence[Any]) -> list[Any]:
        """See `Space`."""
        return [callers.seen(array, self.gpu) if callers.on_gpu(array) else array for array in arrays]

    def total(self, arrays: Sequence[Any], what: str, *, on_device: bool, combine: np.ufunc = np.add) -> Any:
        """See `Space`. Copied in the caller's streams; added in the store's."""
        with self.here():
            taken = [self._taken(array, what) for array in arrays]
            if len(taken) == 1:
                return taken[0]
            self.follow(*taken)
            total = taken[0].astype(sum_dtype(taken[0].dtype), copy=False)
            for other in taken[1:]:
                combine(total, other, out=total)
            return total.astype(taken[0].dtype, copy=False)

    def _taken(self, array: Any, what: str) -> Any:
        """A copy of the caller's array, flat."""
        if not isinstance(array, Caller):
            return self.from_host(HostSpace().total([array], what, on_device=False))
        values = array.values
        copied = self._room(values.size, values.dtype)
        if not values.size:
            return copied
        self.copies.count("device", values.nbytes)
        if array.number == self.device:
            with array.stream:
                np.copyto(copied.reshape(values.shape), values)
                self._written[id(copied.data.mem)] = array.stream.record(self.gpu.event()), array.stream.ptr
        else:  # no stream of another GPU works on this one's memory
            self.stream.wait_event(array.at)
            np.copyto(copied.reshape(values.shape), values)
            self._let_wait(array)
        return copied

    def _room(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        """New memory that any stream may write. In `here`."""
        n_bytes = n_elems * dtype.itemsize
        with self._lock:
            returned = [self._returned.popleft() for _ in range(len(self._returned))]
            for _, which in returned:
                if (written := self._written.pop(which, None)) is not None:  # nobody has read it
                    self.stream.wait_event(written[0])
            if returned:
                done = self.stream.record(self.gpu.event())
                self._leaving += [(done, self._lent.pop(number)) for number, _ in returned]
            while self._leaving and self._leaving[0][0].done:
                self._leaving.popleft()
            taken = self._pushes.malloc(n_bytes)
            memory = self._pushed(taken.ptr, n_bytes, self, self.device)
            memory.number, memory.returned = next(self._numbers), self._returned
            self._lent[memory.number] = taken
        return self.cupy.ndarray((n_elems,), dtype, self.cupy.cuda.MemoryPointer(memory, 0))

    def write(self, out: Any, values: Any, what: str) -> None:
        """See `Space`."""
        if not isinstance(out, Caller):
            write_host(out, self.to_host(values), what)
        elif out.values.size:
            with self.here():
                self.follow(values)
                self.stream.wait_event(out.at)
                cast = values.astype(out.values.dtype, copy=False)
                np.copyto(out.values, cast.reshape(out.values.shape))
                self.copies.count("device", out.values.nbytes)
                self._let_wait(out)

    def _let_wait(self, array: Caller) -> None:
        """Let what the caller does next come behind what the store has begun."""
        done = self.stream.record(self.gpu.event())
        with self.gpu.current(number=array.number):
            array.stream.wait_event(done)

    def in_place(self, array: Any, what: str) -> Any:
        """See `Space`: work on it comes behind the caller's, as it was when the array was seen."""
        if not isinstance(array, Caller) or not array.values.flags.c_contiguous or array.number != self.device:
            return None
        self._written[id(array.values.data.mem)] = array.at, array.stream.ptr
        with self.gpu.current():
            return array.values.reshape(-1)

    def lies_in(self, held: Any, array: Any) -> bool:
        """See `Space`."""
        if self.in_place(array, "") is None or array.values.data.ptr != held.data.ptr:
            return False
        self._written[id(held.data.mem)] = array.at, array.stream.ptr
        return True

    def hand_back(self, arrays: Sequence[Any]) -> None:
        """See `Space`: the streams of these arrays wait for all that the store has begun."""
        with self.here():
            for array in {(id(one.stream), one.number): one for one in arrays if isinstance(one, Caller)}.values():
                self._let_wait(array)

    # --- to the host and back

    def to_host(self, array: Any) -> HostArray:
        """See `Space`. Blocks until all that the store has begun with the array is done."""
        with self.here():
            self.follow(array)
            self.settle()
            self.copies.count("down", array.nbytes)
            values: HostArray = array.get()
            return values

    def from_host(self, values: HostArray) -> Any:
        """See `Space`. Blocks until the values are there."""
        with self.here():
            array = self.cupy.empty(values.shape, values.dtype)
            array.set(np.ascontiguousarray(values).reshape(values.shape))
            self.copies.count("up", array.nbytes)
            self.settle()
            return array

    def fetch(self, out: HostArray, array: Any) -> None:
        """Begin to copy an array to page-locked host memory of its length and dtype."""
        if array.size:
            with self.here():
                self.follow(array)
                array.data.copy_to_host_async(out.ctypes.data, array.nbytes, self.stream)
                self.copies.count("down", array.nbytes)

    def bring(self, array: Any, values: HostArray, *, beside: bool = False) -> None:
        """Begin to copy page-locked host memory, which must stay as it is until that is done, to an array.

        beside: in the second stream, which waits for nothing. The host must have seen that what the store and the
        caller have begun with this part of the array is done, and `join` has to come before the store goes on with it.
        """
        if array.size:
            with self.here():
                if not beside:
                    self.follow(array)
                stream = self.beside if beside else self.stream
                array.data.copy_from_host_async(values.ctypes.data, array.nbytes, stream)
                self.copies.count("up", array.nbytes)

    def join(self) -> None:
        """Order the store's stream behind what has been begun in the second one."""
        with self.here():
            self.stream.wait_event(self.beside.record(self.gpu.event()))

    # --- order

    def begun(self) -> Operation:
        """A request that is done when all is that the store has put into its stream by now."""
        with self.here():
            return EventRequest(self.gpu, self.stream.record(self.gpu.event()), self.stream.ptr, self._watch)

    def arrived(self, array: Any) -> Operation:
        """A request that is done when what the caller was writing when he pushed the array is there.

        Who waits for it before work on the array begins does not let the store's stream wait for it.
        """
        written = self._written.get(id(array.data.mem))
        event, stream = (None, 0) if written is None else written
        return EventRequest(self.gpu, event, stream, self._callers_watch)

    def settle(self) -> None:
        """Block until all that the store has begun is done. Raises StallError where the GPU does not end it."""
        wait_until(
            self.begun().test, lambda: False, SLOW_S, lambda: StallError(f"GPU {self.device} has not ended its work")
        )

    def follow(self, *arrays: Any) -> None:
        """Order the store's stream behind what callers have begun to write into these."""
        for array in arrays:
            written = self._written.pop(id(array.data.mem), None)
            if written is not None:
                self.stream.wait_event(written[0])

    # --- within the space

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        """See `Space`."""
        with self.here():
            return self.cupy.empty(n_elems, dtype)

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        """See `Space`."""
        with self.here():
            return self.cupy.zeros(n_elems, dtype)

    def shared_empty(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        """New memory that other ranks of the host can read (spaces/peers), for as long as the store lives."""
        n_bytes = max(1, n_elems * dtype.itemsize)
        length = -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
        with self.here():
            if self._rest[1] < length:
                whole = max(CHUNK_BYTES, -(-length // ALLOCATION_BYTES) * ALLOCATION_BYTES)
                self.chunks.append(self.cupy.cuda.Memory(whole))
                self._rest = self.chunks[-1].ptr, whole
            begin, left = self._rest
            self._rest = begin + length, left - length
            chunk = self.chunks[-1]
            return self.cupy.ndarray((n_elems,), dtype, self.cupy.cuda.MemoryPointer(chunk, begin - chunk.ptr))

    def copy(self, out: Any, values: Any) -> None:
        """See `Space`."""
        with self.here():
            if isinstance(values, np.ndarray) and values.ndim:
                values = self.from_host(values)
            if hasattr(values, "data") and isinstance(values, self.cupy.ndarray):
                self.follow(out, values)
                if out.dtype == values.dtype:
                    self.copies.count("device", out.nbytes)
                np.copyto(out, values, casting="unsafe")
            else:
                self.follow(out)
                out[...] = out.dtype.type(values)

    def cast(self, values: Any, dtype: np.dtype[Any]) -> Any:
        """See `Space`."""
        if values.dtype == dtype:
            return values
        with self.here():
            self.follow(values)
            return values.astype(dtype)

    def scale(self, values: Any, factor: float, out: Any) -> None:
        """See `Space`."""
        with self.here():
            self.follow(values, out)
            np.multiply(values, values.dtype.type(factor), out=out)
