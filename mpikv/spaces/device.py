"""Device memory: CuPy's arrays on one GPU. Methods put work into CUDA streams and return before it is done.

Order. Each store has one stream, in which all work on its arrays runs in order. Arrays that a call reads are copied in
the caller's stream: after all writes that the caller has begun, and before his next work there. So neither waits for
the other; and the store's stream waits for a gradient that is still being computed only when some work needs that very
array. Arrays that a call writes are written in the store's stream, after the work that was in the caller's stream at
the time of the call, and the caller's stream waits for that.

Memory comes from a CuPy pool of the store. Copies of pushed arrays have a second pool, since they are written in other
streams than the store's: memory that is no longer referred to goes back to the pool when the store's stream has done
all its work until then.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.as_numpy import write as write_host
from mpikv.engine.backoff import wait_until
from mpikv.engine.operation import Operation
from mpikv.errors import StallError
from mpikv.observe.recorder import Recorder
from mpikv.spaces import callers
from mpikv.spaces.base import Space
from mpikv.spaces.callers import CallersGpuArray
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.gpu_events import EventRequest, EventWatcher

# Of `store.stats()`: copies to the host, from it, and on the device, and their bytes.
COPIES = tuple(f"copies_{kind}{suffix}" for kind in ("down", "up", "device") for suffix in ("", "_bytes"))
SLOW_S = 300.0  # the longest wait for the GPU's work: copies end long before, or the GPU has failed


class _Thread(threading.local):
    """depth: how many `DeviceSpace.in_stream` contexts the calling thread is in."""

    depth = 0


class DeviceSpace(Space):
    """The memory of one GPU, for one store."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.cupy = gpu, gpu.cupy
        self.recorder = Recorder()  # its store gives it its own
        cuda = self.cupy.cuda
        with gpu.current("makes streams"):
            self.stream = cuda.Stream(non_blocking=True)
        self._pool, self._pushes = cuda.MemoryPool(), cuda.MemoryPool()
        self._copies, self._copies_lock = Counter[str](), threading.Lock()
        self._watcher = EventWatcher(gpu)  # of the store's stream
        self._callers_watcher = EventWatcher(gpu)
        self._thread = _Thread()
        # Writes of callers into arrays for which the store's stream has not waited yet, by the id of the array's
        # memory: of each stream, by its address, an event after the writes. Slices of one array share the memory.
        self._callers_writes: dict[int, dict[int, Any]] = {}
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._push_memory: dict[int, Any] = {}  # memory of pushes that is referred to, by number
        # Number and id of such memory that is no longer referred to. A deque, since any thread may append at any time.
        self._released: deque[tuple[int, int]] = deque()
        self._leaving: deque[tuple[Any, Any]] = deque()  # released memory that is free once the event is done
        self._uploading: deque[tuple[Any, HostArray]] = deque()  # memory that is copied from until the event is done
        self._closed = False

        class PushMemory(cuda.UnownedMemory):  # type: ignore[name-defined,misc]
            """Memory of the pool of pushes, which reports when it is no longer referred to."""

            def __del__(self) -> None:
                self.released.append((self.number, id(self)))

        self._push_memory_class = PushMemory

    @property
    def device(self) -> int:
        return self.gpu.number

    def on_done(self, callback: Callable[[], None]) -> None:
        self._watcher.callback = self._callers_watcher.callback = callback

    @contextmanager
    def in_stream(self) -> Iterator[None]:
        """See `Space`. Errors of CUDA and CuPy are raised as those of this library."""
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
        held = self._pool.total_bytes() + self._pushes.total_bytes()
        return {**{name: self._copies[name] for name in COPIES}, "device_bytes": held}

    def _count(self, kind: str, n_bytes: int) -> None:
        """Count a copy that was begun. A lock is needed, since callers' threads and the progress thread count."""
        with self._copies_lock:
            self._copies[f"copies_{kind}"] += 1
            self._copies[f"copies_{kind}_bytes"] += n_bytes

    def close(self) -> None:
        """See `Space`. Arrays that are still referred to keep theirs."""
        if not self._closed:
            self._closed = True
            self.synchronize()
            for watcher in (self._watcher, self._callers_watcher):
                watcher.close()
            while self._released:
                self._push_memory.pop(self._released.popleft()[0])
            self._leaving.clear()
            self._uploading.clear()
            with self.gpu.current("frees memory"):
                self._pool.free_all_blocks()
                self._pushes.free_all_blocks()

    # --- a caller's arrays

    def callers_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        return [callers.callers_gpu_array(array, self.gpu) if callers.on_gpu(array) else array for array in arrays]

    def total(self, arrays: Sequence[Any], what: str, *, on_device: bool, combine: np.ufunc = np.add) -> Any:
        """See `Space`. Arrays are copied in the caller's streams and added in the store's."""
        with self.in_stream():
            copies = [self._flat_copy(array, what) for array in arrays]
            if len(copies) == 1:
                return copies[0]
            self.wait_for_callers(*copies)
            total = copies[0].astype(sum_dtype(copies[0].dtype), copy=False)
            for other in copies[1:]:
                combine(total, other, out=total)
            return total.astype(copies[0].dtype, copy=False)

    def _flat_copy(self, array: Any, what: str) -> Any:
        if not isinstance(array, CallersGpuArray):
            return self.from_host(Space().total([array], what, on_device=False))
        values = array.values
        copied = self._empty_push(values.size, values.dtype)
        if not values.size:
            return copied
        self._count("device", values.nbytes)
        if array.number == self.device:
            with array.stream:
                np.copyto(copied.reshape(values.shape), values)
                event = array.stream.record(self.gpu.event())
            self._note_write(copied, event, array.stream)
        else:  # a stream of another GPU must not work on this one's memory
            event = array.event
            if not values.flags.c_contiguous:  # CuPy would make this copy by itself, in a stream that waits for nothing
                with self.gpu.current(number=array.number), array.stream:
                    values = values.copy()
                    event = array.stream.record(self.gpu.event())
            self.stream.wait_event(event)
            np.copyto(copied.reshape(values.shape), values)
            event = self._make_caller_wait(array)
        if tensors.is_jax(array.array):  # XLA may use its memory again, in streams that do not wait for the copy
            event.synchronize()
        return copied

    def _note_write(self, array: Any, event: Any, stream: Any) -> None:
        """Note that a caller has begun to write into the array, in this stream, until the event."""
        with self._lock:
            before = self._callers_writes.get(id(array.data.mem), {})
            self._callers_writes[id(array.data.mem)] = {**before, stream.ptr: event}

    def _empty_push(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        """Return a new array that any stream may write. To be called in `in_stream`."""
        n_bytes = n_elems * dtype.itemsize
        with self._lock:
            released = [self._released.popleft() for _ in range(len(self._released))]
            for _, memory_id in released:
                for event in self._callers_writes.pop(memory_id, {}).values():  # it was never read
                    self.stream.wait_event(event)
            if released:
                done = self.stream.record(self.gpu.event())
                self._leaving += [(done, self._push_memory.pop(number)) for number, _ in released]
            while self._leaving and self._leaving[0][0].done:
                self._leaving.popleft()
            allocated = self._pushes.malloc(n_bytes)
            memory = self._push_memory_class(allocated.ptr, n_bytes, self, self.device)
            memory.number, memory.released = next(self._numbers), self._released
            self._push_memory[memory.number] = allocated
        return self.cupy.ndarray((n_elems,), dtype, self.cupy.cuda.MemoryPointer(memory, 0))

    def write(self, out: Any, values: Any, what: str) -> None:
        if not isinstance(out, CallersGpuArray):
            write_host(out, self.to_host(values), what)
        elif out.values.size:
            with self.in_stream():
                self.wait_for_callers(values)
                self.stream.wait_event(out.event)
                cast = values.astype(out.values.dtype, copy=False).reshape(out.values.shape)
                self._count("device", out.values.nbytes)
                if out.number == self.device or out.values.flags.c_contiguous:
                    np.copyto(out.values, cast)
                    self._make_caller_wait(out)
                else:  # CuPy makes several copies, of which only the caller's stream orders all
                    self._make_caller_wait(out)
                    with self.gpu.current(number=out.number), out.stream:
                        np.copyto(out.values, cast)
                        event = out.stream.record(self.gpu.event())
                    self.stream.wait_event(event)  # `cast` may be the store's memory

    def _make_caller_wait(self, array: CallersGpuArray) -> Any:
        """Make the array's stream wait for all work that the store has begun. Returns an event after that work."""
        done = self.stream.record(self.gpu.event())
        with self.gpu.current(number=array.number):
            array.stream.wait_event(done)
        return done

    def in_place(self, array: Any, what: str) -> Any:
        """See `Space`: work on it runs after the caller's work at the time of `callers_arrays`."""
        if not isinstance(array, CallersGpuArray) or not array.values.flags.c_contiguous or array.number != self.device:
            return None
        self._note_write(array.values, array.event, array.stream)
        with self.gpu.current():
            return array.values.reshape(-1)

    def is_view_of(self, held: Any, array: Any) -> bool:
        if self.in_place(array, "") is None or array.values.data.ptr != held.data.ptr:
            return False
        self._note_write(held, array.event, array.stream)
        return True

    def make_callers_wait(self, arrays: Sequence[Any]) -> None:
        """See `Space`: the streams of these arrays wait for all work that the store has begun."""
        on_gpus = [array for array in arrays if isinstance(array, CallersGpuArray)]
        with self.in_stream():
            for array in {(one.stream.ptr, one.number): one for one in on_gpus}.values():
                self._make_caller_wait(array)

    # --- between the host and this space

    def to_host(self, array: Any) -> HostArray:
        """See `Space`. Blocks until all work of the store on the array is done."""
        with self.in_stream():
            self.wait_for_callers(array)
            self.synchronize()
            self._count("down", array.nbytes)
            values: HostArray = array.get()
            return values

    def from_host(self, values: HostArray) -> Any:
        """See `Space`. Blocks until the values are there."""
        with self.in_stream():
            array = self.cupy.empty(values.shape, values.dtype)
            array.set(np.ascontiguousarray(values).reshape(values.shape))
            self._count("up", array.nbytes)
            self.synchronize()
            return array

    def page_locked(self, n_bytes: int) -> HostArray:
        """Return (n_bytes,) of uint8 of page-locked host memory, uninitialised: only with such are copies asynchronous.

        It returns to CuPy's pool with the last reference to it. Locking takes far longer than most copies, so the pool
        keeps as much as was in use at one time.
        """
        if not n_bytes:
            return np.empty(0, np.uint8)
        with self.gpu.current(f"makes {n_bytes} bytes of page-locked host memory"):
            memory = self.cupy.cuda.alloc_pinned_memory(n_bytes)
        array: HostArray = np.frombuffer(memory, np.uint8, n_bytes)
        return array

    def download(self, out: HostArray, array: Any) -> None:
        """Begin to copy an array to page-locked host memory of its length and dtype."""
        if array.size:
            with self.in_stream():
                self.wait_for_callers(array)
                array.data.copy_to_host_async(out.ctypes.data, array.nbytes, self.stream)
                self._count("down", array.nbytes)

    def upload(self, array: Any, values: HostArray) -> None:
        """Begin to copy page-locked host memory to an array. It is kept, and must not change, until that is done."""
        if array.size:
            with self.in_stream():
                self.wait_for_callers(array)
                array.data.copy_from_host_async(values.ctypes.data, array.nbytes, self.stream)
                self._count("up", array.nbytes)
                self._uploading.append((self.stream.record(self.gpu.event()), values))
                while self._uploading and self._uploading[0][0].done:
                    self._uploading.popleft()

    # --- order

    def stream_event(self) -> Operation:
        """Return a request that is done when all work that the store has put into its stream until now is done."""
        part = self.recorder.begin("the store's stream") if self.recorder.on else None
        with self.in_stream():
            return EventRequest(self.gpu, self.stream.record(self.gpu.event()), self.stream.ptr, self._watcher, part)

    def written(self, array: Any) -> Operation:
        """Return a request for the writes that callers had begun: who waits for it lets the store's stream go on."""
        writes = self._callers_writes.get(id(array.data.mem), {})
        if len(writes) > 1:
            self.wait_for_callers(array)
            return self.stream_event()
        stream, event = next(iter(writes.items()), (0, None))
        return EventRequest(self.gpu, event, stream, self._callers_watcher)

    def synchronize(self) -> None:
        """Block until all work that the store has begun is done. Raises StallError if the GPU does not end it."""
        done = self.stream_event()
        wait_until(done.test, lambda: False, SLOW_S, lambda: StallError(f"GPU {self.device} has not ended its work"))

    def wait_for_callers(self, *arrays: Any) -> None:
        """Make the store's stream wait for all writes into these arrays that callers have begun."""
        for array in arrays:
            for event in self._callers_writes.pop(id(array.data.mem), {}).values():
                self.stream.wait_event(event)

    # --- within the space

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        with self.in_stream():
            return self.cupy.empty(n_elems, dtype)

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> Any:
        with self.in_stream():
            return self.cupy.zeros(n_elems, dtype)

    def copy(self, out: Any, values: Any) -> None:
        with self.in_stream():
            if isinstance(values, np.ndarray) and values.ndim:
                values = self.from_host(values)
            if hasattr(values, "data") and isinstance(values, self.cupy.ndarray):
                self.wait_for_callers(out, values)
                if out.dtype == values.dtype:
                    self._count("device", out.nbytes)
                np.copyto(out, values, casting="unsafe")
            else:
                self.wait_for_callers(out)
                out[...] = out.dtype.type(values)

    def cast(self, values: Any, dtype: np.dtype[Any]) -> Any:
        if values.dtype == dtype:
            return values
        with self.in_stream():
            self.wait_for_callers(values)
            return values.astype(dtype)

    def scale(self, values: Any, factor: float, out: Any) -> None:
        with self.in_stream():
            self.wait_for_callers(values, out)
            np.multiply(values, values.dtype.type(factor), out=out)
