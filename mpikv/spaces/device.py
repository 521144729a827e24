"""Device memory: arrays on one GPU, and what is done with them there. Calls put work into streams and return.

Order. Each store has one stream of its own, in which all that it does with its arrays follows one after another; but
for long copies from the host while others go there: they are in a second one, and the first waits for them (`join`).
What a call reads of the caller's is copied in the caller's own stream, behind what he has begun to write and
before whatever he puts there next; so neither waits for the other, and the store's stream never waits for a gradient
that is still being computed unless somebody asks for that very array. What a call writes is written in the store's
stream, behind the caller's work as it was when the call was made; and the caller's stream waits for it.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.arrays import write as write_host
from mpikv.engine.backoff import wait_until
from mpikv.engine.request import Predicate, Request
from mpikv.errors import StallError
from mpikv.spaces import arithmetic, callers, folded
from mpikv.spaces.base import Formula
from mpikv.spaces.callers import Caller
from mpikv.spaces.device_array import DeviceArray
from mpikv.spaces.driver import Driver, Event
from mpikv.spaces.host import HostSpace
from mpikv.spaces.pinned import KEPT_BYTES, Copies, Pinned
from mpikv.spaces.pool import Chunk, Memory, Pool
from mpikv.spaces.program import Program
from mpikv.spaces.routine import Routine
from mpikv.spaces.tracing import NotAProgram, Stage
from mpikv.spaces.update_programs import Kind, UpdatePrograms

SLOW_S = 300.0  # copies between host and device end long before, or the GPU has failed


_Place = tuple[int, "tuple[int, ...] | None"]
"""An address, and strides in bytes; None: in C order."""


class _Keep:
    """Keeps a caller's array for as long as memory of it is in use."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __call__(self, _memory: Memory) -> None:
        """The memory stays the caller's."""


class _Gathered(threading.local):
    """The updates that this thread makes together, by their programs; None: it makes each at once."""

    runs: dict[Program, list[tuple[list[DeviceArray], Sequence[Any]]]] | None = None


class DeviceSpace:
    """The memory of one GPU, for one store."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream()
        self.beside = driver.stream()
        numbers = itertools.count()
        self.pool = Pool(driver, self.stream, numbers)
        self.callers_pool = Pool(driver, self.stream, numbers)  # of arrays that callers may keep beyond the end
        self.pinned = Pinned(driver)
        self.copies = Copies()
        self._host = HostSpace()
        self._written_by: dict[int, Event] = {}  # the last of each caller's stream
        self._closed = False
        self._together = _Gathered()
        self.programs = UpdatePrograms()

    @property
    def device(self) -> int:
        """See `Space`."""
        return self.driver.number

    def stats(self) -> dict[str, int]:
        """See `Space`."""
        return {**self.copies.stats(), "device_bytes": self.pool.held_bytes + self.callers_pool.held_bytes}

    def close(self) -> None:
        """See `Space`. No other process may have the memory open."""
        if not self._closed:
            self._closed = True
            for event in self._written_by.values():
                self.driver.wait(self.stream, event)
            self.settle()
            self.pinned.close()
            self.pool.close()
            self.callers_pool.leave()

    # --- a caller's arrays

    def callers(self, arrays: Sequence[Any]) -> list[Any]:
        """See `Space`."""
        return [callers.seen(array, self.driver) if callers.on_gpu(array) else array for array in arrays]

    def total(self, arrays: Sequence[Any], what: str, *, on_device: bool, combine: np.ufunc = np.add) -> DeviceArray:
        """See `Space`. Copied in the caller's streams; added in the store's."""
        taken = [self._taken(array, what) for array in arrays]
        if len(taken) == 1:
            return taken[0]
        first = taken[0]
        self.launch(arithmetic.sum_in_order(len(taken), first.dtype, first.dtype, how=combine), [*taken, first])
        return first

    def _taken(self, array: Any, what: str) -> DeviceArray:
        """A copy of the caller's array."""
        if not isinstance(array, Caller):
            return self.from_host(HostSpace().total([array], what, on_device=False))
        copied = self.empty(array.size, array.dtype)
        if not array.size:
            return copied
        here = array.number == self.driver.number
        if here and copied.memory.after is not None:
            self.driver.wait(array.stream, copied.memory.after)
        stream = array.stream if here else self.stream
        if not here:  # no stream of another GPU works on this one's memory
            self.driver.wait(stream, array.at)
        self._transfer((copied.address, None), (array.address, array.strides), array, stream)
        event = self.driver.record(stream)
        if here:
            copied.memory.written = self._written_by[stream] = event
        else:
            self.driver.wait(array.stream, event, array.number)
        return copied

    def write(self, out: Any, values: DeviceArray, what: str) -> None:
        """See `Space`."""
        if not isinstance(out, Caller):
            write_host(out, self.to_host(values), what)
            return
        if not out.size:
            return
        values = self.cast(values.reshape(-1), out.dtype)
        self._follow(values)
        self.driver.wait(self.stream, out.at)
        self._transfer((out.address, out.strides), (values.address, None), out, self.stream)
        self.driver.wait(out.stream, self.driver.record(self.stream), out.number)

    def _transfer(self, to: _Place, source: _Place, like: Caller, stream: int) -> None:
        """Copy between arrays of one shape and dtype, those of the caller's array `like`."""
        if like.strides is None:
            self.driver.copy(to[0], source[0], like.nbytes, stream)
        else:
            in_order = callers.contiguous(like.shape, like.dtype.itemsize)
            ends = [(address, strides or in_order) for address, strides in (to, source)]
            self.driver.copy_strided(ends[0], ends[1], like.shape, like.dtype.itemsize, stream)
        self.copies.count("device", like.nbytes)

    def empty_for_caller(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See `Space`: an array of the library that callers of this driver use. Raises UnsupportedError."""
        n_elems = math.prod(shape)
        array = DeviceArray(self, self.callers_pool.take(n_elems * dtype.itemsize), 0, (n_elems,), dtype)
        self.settle()  # what had the memory before is done with it: nobody knows in which stream the caller works
        return self.driver.as_caller(array.address, shape, dtype, array)

    def inside(self, array: Any) -> DeviceArray | None:
        """A caller's array as one of this space, where it lies in memory of this store; None elsewhere.

        Work on it comes behind the caller's, as it was when the array was seen. The caller has to keep the memory.
        """
        if not isinstance(array, Caller) or array.strides is not None:
            return None
        chunk = self.callers_pool.find(array.address, array.nbytes)
        if chunk is None:
            return None
        memory = self.pool.part(chunk, array.address, array.nbytes)
        memory.written = array.at
        return DeviceArray(self, memory, 0, array.shape, array.dtype)

    def in_place(self, array: Any, what: str) -> DeviceArray | None:
        """See `Space`: work on it comes behind the caller's, as it was when the array was seen."""
        if not isinstance(array, Caller) or array.strides is not None or array.number != self.driver.number:
            return None
        chunk = Chunk(-1, array.address, array.nbytes)
        memory = Memory(chunk, array.address, array.nbytes, None, _Keep(array.array))
        memory.written = array.at
        return DeviceArray(self, memory, 0, (array.size,), array.dtype)

    def lies_in(self, held: DeviceArray, array: Any) -> bool:
        """See `Space`."""
        if not isinstance(array, Caller) or array.number != self.driver.number or array.address != held.address:
            return False
        held.memory.written = array.at
        return array.strides is None

    def hand_back(self, arrays: Sequence[Any]) -> None:
        """See `Space`: the streams of these arrays wait for all that the store has begun."""
        event = self.driver.record(self.stream)
        for stream, number in dict.fromkeys((one.stream, one.number) for one in arrays if isinstance(one, Caller)):
            self.driver.wait(stream, event, number)

    @contextmanager
    def lend(self, arrays: Sequence[DeviceArray]) -> Iterator[list[Any]]:
        """See `Space`: arrays of the library that callers of this driver use, in the same memory."""
        self._follow(*arrays)
        self.settle()
        lent = [self.driver.as_caller(array.address, array.shape, array.dtype, array) for array in arrays]
        try:
            yield lent
        finally:
            for one in self.callers(lent):
                self.driver.wait(self.stream, one.at)

    # --- to the host and back

    def to_host(self, array: DeviceArray) -> HostArray:
        """See `Space`. Blocks until all that the store has begun with the array is done."""
        values: HostArray = np.empty(array.shape, array.dtype)
        flat = values.reshape(-1)
        for piece, memory in self._pieces(array):
            self.fetch(memory, array.reshape(-1)[piece])
            self.settle()
            flat[piece] = memory
        return values

    def from_host(self, values: HostArray) -> DeviceArray:
        """See `Space`. Blocks until the values are there."""
        flat = np.ascontiguousarray(values).reshape(-1)
        array = self.empty(flat.size, flat.dtype)
        for piece, memory in self._pieces(array):
            memory[...] = flat[piece]
            self.bring(array[piece], memory)
            self.settle()
        return array.reshape(values.shape)

    def _pieces(self, array: DeviceArray) -> Iterator[tuple[slice, HostArray]]:
        """Parts of the flat array, one after another, and page-locked memory for each."""
        step = KEPT_BYTES // array.itemsize
        for begin in range(0, array.size, step):
            piece = slice(begin, min(begin + step, array.size))
            n_bytes = (piece.stop - begin) * array.itemsize
            memory = self.pinned.take(n_bytes)
            yield piece, memory[:n_bytes].view(array.dtype)
            self.pinned.give(memory)  # not after an error, which may leave a copy under way

    def fetch(self, out: HostArray, array: DeviceArray) -> None:
        """Begin to copy an array to page-locked host memory of its length and dtype."""
        if array.size:
            self._follow(array)
            self.driver.copy(out.ctypes.data, array.address, array.nbytes, self.stream)
            self.copies.count("down", array.nbytes)

    def bring(self, array: DeviceArray, values: HostArray, *, beside: bool = False) -> None:
        """Begin to copy page-locked host memory, which must stay as it is until that is done, to an array.

        beside: in the second stream, which waits for nothing. The host must have seen that what the store and the
        caller have begun with this part of the array is done, and `join` has to come before the store goes on with it.
        """
        if array.size:
            if not beside:
                self._follow(array)
            stream = self.beside if beside else self.stream
            self.driver.copy(array.address, values.ctypes.data, array.nbytes, stream)
            self.copies.count("up", array.nbytes)

    def join(self) -> None:
        """Order the store's stream behind what has been begun in the second one."""
        self.driver.wait(self.stream, self.driver.record(self.beside))

    # --- order

    def begun(self) -> Request:
        """A request that is done when all is that the store has put into its stream by now."""
        driver, event = self.driver, self.driver.record(self.stream)
        return Predicate(lambda: driver.done(event))

    def arrived(self, array: DeviceArray) -> Request:
        """A request that is done when what the caller was writing when he pushed the array is there.

        Who waits for it before work on the array begins does not let the store's stream wait for it.
        """
        driver, event = self.driver, array.memory.written
        return Predicate(lambda: event is None or driver.done(event))

    def settle(self) -> None:
        """Block until all that the store has begun is done. Raises StallError where the GPU does not end it."""
        request = self.begun()
        wait_until(request.test, lambda: False, SLOW_S, lambda: StallError(f"GPU {self.driver.number} has not ended"))

    def _follow(self, *arrays: DeviceArray) -> None:
        """Order the store's stream behind what callers have begun to write into these."""
        for array in arrays:
            written, array.memory.written = array.memory.written, None
            if written is not None:
                self.driver.wait(self.stream, written)

    # --- within the space

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> DeviceArray:
        """See `Space`."""
        return DeviceArray(self, self.pool.take(n_elems * dtype.itemsize), 0, (n_elems,), dtype)

    def zeros(self, n_elems: int, dtype: np.dtype[Any]) -> DeviceArray:
        """See `Space`."""
        array = self.empty(n_elems, dtype)
        self.copy(array, 0)
        return array

    def copy(self, out: DeviceArray, values: Any) -> None:
        """See `Space`."""
        if not isinstance(values, DeviceArray):
            if isinstance(values, np.ndarray) and values.ndim:
                values = self.from_host(values)
            else:
                self.launch(arithmetic.fill(out.dtype), [out], [out.dtype.type(values)])
                return
        if not out.size:
            return
        if out.dtype == values.dtype:
            self._follow(out, values)
            self.driver.copy(out.address, values.address, out.nbytes, self.stream)
            self.copies.count("device", out.nbytes)
        else:
            self.launch(arithmetic.copy_program(values.dtype, out.dtype), [values, out])

    def cast(self, values: DeviceArray, dtype: np.dtype[Any]) -> DeviceArray:
        """See `Space`."""
        return values if values.dtype == dtype else self._cast_to_new(values, dtype)

    def _cast_to_new(self, values: DeviceArray, dtype: np.dtype[Any]) -> DeviceArray:
        out = self.empty(values.size, dtype)
        self.copy(out, values)
        return out

    def copy_strided(
        self, out: DeviceArray, values: DeviceArray, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        """Write the values, seen as an array of this shape and these strides in bytes, in C order into `out`."""
        self._follow(out, values)
        to = out.address, callers.contiguous(shape, out.itemsize)
        self.driver.copy_strided(to, (values.address, strides), shape, out.itemsize, self.stream)
        self.copies.count("device", out.nbytes)

    def combine(self, first: DeviceArray, second: DeviceArray, out: DeviceArray, how: np.ufunc) -> None:
        """See `Space`."""
        self.launch(arithmetic.combine(how, first.dtype), [first, second, out])

    def scale(self, values: DeviceArray, factor: float, out: DeviceArray) -> None:
        """See `Space`."""
        self.launch(arithmetic.scale(values.dtype), [values, out], [values.dtype.type(factor)])

    def divide(self, values: DeviceArray, divisor: float, out: DeviceArray) -> None:
        """Write the values, floating point numbers, divided by a number in their dtype, into `out`."""
        self.launch(arithmetic.divide(values.dtype), [values, out], [values.dtype.type(divisor)])

    def launch(self, what: Program | Routine, arrays: Sequence[DeviceArray], numbers: Sequence[Any] = ()) -> None:
        """Run a program or a routine in the store's stream, on as many elements as the first array has."""
        n_elems = arrays[0].size
        if n_elems:
            self._follow(*arrays)
            self.driver.launch(what, n_elems, [array.address for array in arrays], numbers, self.stream)

    def launch_many(self, what: Program | Routine, runs: Sequence[tuple[Sequence[DeviceArray], Sequence[Any]]]) -> None:
        """`launch` for several lists of arrays and their numbers, which nothing orders, in as few as can be."""
        runs = [run for run in runs if run[0][0].size]
        for arrays, _ in runs:
            self._follow(*arrays)
        entries = [(arrays[0].size, [one.address for one in arrays], numbers) for arrays, numbers in runs]
        if entries:
            self.driver.launch_many(what, entries, self.stream)

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Space`: those that are the same program, as those of one optimizer mostly are, are one launch."""
        self._together.runs = {}
        try:
            yield
        finally:
            gathered, self._together.runs = self._together.runs, None
            for what, runs in gathered.items():
                self.launch_many(what, runs)

    def update(
        self,
        formula: Formula,
        weight: DeviceArray,
        terms: Sequence[DeviceArray],
        arrays: Mapping[str, DeviceArray],
        *,
        master: DeviceArray | None,
        dtype: np.dtype[Any],
        temporaries: int,
        elementwise: bool,
    ) -> None:
        """See `Space`. An elementwise formula is one program, which reads and writes each array once.

        One that asks for norms is several, with sums in between that stay on the device. What no program can say runs
        on the host: its arrays go there and come back.
        """
        masters = [] if master is None else [master]
        kind = Kind(
            weight.dtype,
            tuple([term.dtype for term in terms]),
            tuple([(name, array.dtype) for name, array in arrays.items()]),
            master is not None,
            dtype,
            temporaries,
            elementwise,
        )
        try:
            stages = self.programs.of(formula, kind)
        except NotAProgram:
            pass
        else:
            if weight.size:
                self._run(stages, kind, [weight, *terms, *arrays.values(), *masters])
            return
        on_host = {id(array): self.to_host(array) for array in (weight, *terms, *arrays.values(), *masters)}
        self._host.update(
            formula,
            on_host[id(weight)],
            [on_host[id(term)] for term in terms],
            {name: on_host[id(array)] for name, array in arrays.items()},
            master=None if master is None else on_host[id(master)],
            dtype=dtype,
            temporaries=temporaries,
            elementwise=elementwise,
        )
        for array in (weight, *arrays.values(), *masters):
            self.copy(array, self.from_host(on_host[id(array)]))

    def _run(self, stages: Sequence[Stage], kind: Kind, arrays: list[DeviceArray]) -> None:
        gathered = self._together.runs
        if len(stages) == 1 and kind.elementwise and gathered is not None:
            gathered.setdefault(stages[0].program, []).append((arrays, stages[0].numbers))
            return
        arrays = [*arrays, *(self.empty(arrays[0].size, dtype) for dtype in kind.scratch)]
        sums: list[DeviceArray] = []
        for stage in stages:
            if any(one.last is not None for one in stage.program.arguments):
                self.launch(stage.program, [*arrays, *sums], stage.numbers)
            if stage.squares is not None:
                sums.append(folded.on_device(self, self.launch, arrays[stage.squares]))
