"""The work of fake GPUs: streams in which it waits, and the search for races among it.

Work is put into a stream and done later, one piece at a time, in an order drawn from a seeded generator among what
streams and events allow. Whether two pieces race does not depend on the order that was drawn: it is decided when the
second is put in, by vector clocks. Every stream counts what is put into it, and has a clock: how much of each stream
comes before what is put in next. An event is a copy of its stream's clock; `wait` joins it to another stream's, and the
host joins it to what it has seen when it finds the event done.

Pieces that touch the same bytes, one of them writing, race if neither clock nor host says that the first comes before.
What is remembered of an allocation: for each stream the accesses that the host has not seen done; of those to the same
bytes the last write and the last read, now and then, since who is ordered behind a later one is behind the earlier one.

Cost: a piece of work is compared with those that other streams have put in and that it is not ordered behind.
Source of the method: Flanagan and Freund, FastTrack, PLDI 2009.
"""

from __future__ import annotations

import bisect
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpikv.errors import MpikvError
from mpikv.testing.gpu_memory import AccessError, Memory, Span

Action = Callable[[], None]

_FRAMES = 3  # of the callers that errors name
_FEW = 64  # accesses of a stream to an allocation, which are kept as they are


class RaceError(AssertionError):
    """Two accesses to the same bytes, at least one of them a write, are in no order.

    >>> from mpikv.testing.fake_gpu import FakeGpu
    >>> gpu = FakeGpu()
    >>> ours, theirs, memory, host = gpu.stream(), gpu.stream(), gpu.allocate(8), gpu.pinned(8)
    >>> gpu.copy(memory, host.ctypes.data, 8, ours)
    >>> gpu.copy(gpu.allocate(8), memory, 8, theirs)
    Traceback (most recent call last):
    mpikv.testing.gpu_work.RaceError: copy of 8 bytes, ... reads bytes 0 to 8 of ... which copy ... writes: ...
    """


@dataclass(eq=False)
class Stream:
    """Work in its order. put, ran: how many items have come in and are done. process: who may use it."""

    number: int
    gpu: int
    process: object
    put: int = 0
    ran: int = 0
    clock: dict[Stream, int] = field(default_factory=dict)
    items: deque[Action | FakeEvent] = field(default_factory=deque)  # an event: that is waited for

    def __str__(self) -> str:
        return f"stream {self.number} of GPU {self.gpu}"


class FakeEvent(NamedTuple):
    """A point in a stream's work."""

    stream: Stream
    number: int
    clock: dict[Stream, int]

    @property
    def ran(self) -> bool:
        """Whether all work before it is done, seen or not."""
        return self.stream.ran >= self.number


class Piece(NamedTuple):
    """Work that was put in: what it is called in errors, and its place in its stream."""

    label: str
    stream: Stream
    number: int
    where: str

    def __str__(self) -> str:
        if self.stream.process is None:
            return f"{self.label} (from {self.where})"
        return f"{self.label} (number {self.number} in {self.stream}; from {self.where})"


class Use(NamedTuple):
    """Bytes of a memory that a piece of work reads or writes. span: from the memory's beginning."""

    memory: Memory
    span: Span
    writes: bool


Access = tuple[Use, Piece]


class Work:
    """The streams of some GPUs, and what is remembered of their work. Calls may come from any thread.

    seed: of the order in which work is done. eager: the chance that a piece is done as soon as it is put in.
    """

    def __init__(self, seed: int, eager: float) -> None:
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._eager = eager
        self._streams: list[Stream] = []
        self._busy: dict[Stream, None] = {}  # those with work, among many that a test has used once
        self._pending = 0  # pieces of work in all of them
        self._seen: dict[Stream, int] = {}
        self._failure: str | None = None

    # --- streams and events

    def stream(self, gpu: int, process: object, number: int | None = None) -> Stream:
        """A new stream. number: its own, instead of the next one."""
        with self.lock:
            self._streams.append(Stream(len(self._streams) * 16 + 4096 if number is None else number, gpu, process))
            return self._streams[-1]

    def record(self, stream: Stream) -> FakeEvent:
        """An event behind all that is in the stream. What the host has seen done is before whatever comes next."""
        with self.lock:
            stream.clock = {one: n for one, n in stream.clock.items() if n > self._seen.get(one, 0)}
            return FakeEvent(stream, stream.put, {**stream.clock, stream: stream.put})

    def wait(self, stream: Stream, event: FakeEvent) -> None:
        """Let what comes into the stream from now on come after the event."""
        with self.lock:
            self._append(stream, event)
            _join(stream.clock, event.clock)

    def done(self, event: FakeEvent) -> bool:
        """Do some work, then say whether all before the event is done; if so, the host has seen it."""
        with self.lock:
            for _ in range(self._random.randint(1, 2 + self._pending // 2)):
                if event.ran or not self._step():
                    break
            if self._failure is not None:
                raise MpikvError(self._failure)
            if event.ran:
                _join(self._seen, event.clock)
            return event.ran

    def finish(self, event: FakeEvent) -> None:
        """Do work until the event is done, which the host has seen then."""
        with self.lock:
            while not self.done(event):
                pass

    def run_all(self) -> None:
        """Do everything that is put in. The host has not seen it."""
        with self.lock:
            while self._step():
                pass

    def see_all(self) -> None:
        """Do everything, and let the host have seen it."""
        with self.lock:
            for stream in list(self._streams):
                self.finish(self.record(stream))

    # --- work

    def put(self, stream: Stream, label: str, uses: Sequence[Use], action: Action) -> None:
        """Put a piece of work into a stream. Raises RaceError, and puts nothing in then."""
        with self.lock:
            piece = Piece(label, stream, stream.put + 1, _callers())
            for use in uses:
                self._check(use, piece, piece)
            self._append(stream, action)
            for use in uses:
                self._remember(use, piece)
            if self._random.random() < self._eager:
                while stream.ran < piece.number and self._step():
                    pass

    def host_access(self, use: Use, *, lasts: bool = False) -> Access | None:
        """Raise RaceError where the host is about to touch bytes that work is not seen to be done with.

        lasts: work races with it from now on, until `host_ends` with what is returned.
        """
        with self.lock:
            self._check(use, None, _Host())
            if not lasts:
                return None
            # A stream of its own, which no clock knows and nobody sees done.
            began = use, Piece("the host", Stream(0, 0, None), 1, _callers())
            self._remember(*began)
            return began

    def host_ends(self, began: Access) -> None:
        """End what `host_access` began."""
        with self.lock:
            began[0].memory.bytes.accesses.pop(began[1].stream, None)

    def check_unused(self, memory: Memory, what: str, process: object = None) -> None:
        """Raise AccessError if any work with a memory is not seen to be done. process: look at its work alone."""
        with self.lock:
            for use, piece in self._unordered(memory, {}):
                if process in (None, piece.stream.process) and use.span.overlap(memory.whole) is not None:
                    raise AccessError(f"{what}: {piece} is not seen to be done, which uses {memory}")

    def _check(self, use: Use, piece: Piece | None, who: object) -> None:
        begin, end = use.span.begin, use.span.end
        for other, earlier in self._unordered(use.memory, {} if piece is None else piece.stream.clock):
            span = other.span
            if span.begin >= end or span.end <= begin or not (use.writes or other.writes):
                continue
            both = use.span.overlap(span)
            if both is not None:
                does, did = ("writes" if one.writes else "reads" for one in (use, other))
                raise RaceError(
                    f"{who} {does} bytes {both[0]} to {both[1]} of {use.memory}, which {earlier} {did}: the first is "
                    "not ordered behind the second. Record an event behind the one, and let the other's stream wait "
                    "for it or the host see it done"
                )

    def _unordered(self, memory: Memory, clock: dict[Stream, int]) -> Iterator[Access]:
        """The accesses that neither a clock nor the host has before what comes now, of each stream the last first."""
        past: dict[Stream, list[Access]] = memory.bytes.accesses
        for stream, accesses in list(past.items()):
            seen, last = self._seen.get(stream, 0), accesses[-1][1].number
            if last <= seen:
                del past[stream]
            elif last > clock.get(stream, 0):
                known = max(seen, clock.get(stream, 0))
                yield from reversed(accesses[bisect.bisect_right(accesses, known, key=_number) :])

    def _remember(self, use: Use, piece: Piece) -> None:
        """Add an access, and drop those that need not be known once there are many more than the last time."""
        accesses, limits = use.memory.bytes.accesses.setdefault(piece.stream, []), use.memory.bytes.limits
        accesses.append((use, piece))
        if len(accesses) > limits.get(piece.stream, _FEW):
            seen, kept, later = self._seen.get(piece.stream, 0), [], set()
            for one in reversed(accesses):
                if one[1].number <= seen:
                    break
                span = one[0].span
                key = span.begin, span.end, None if span.runs is None else span.runs.tobytes()
                if (key, True) not in later and (key, one[0].writes) not in later:
                    kept.append(one)
                    later.add((key, one[0].writes))
            accesses[:] = reversed(kept)
            limits[piece.stream] = max(_FEW, 2 * len(kept))

    def _append(self, stream: Stream, item: Action | FakeEvent) -> None:
        stream.items.append(item)
        self._busy[stream] = None
        self._pending += 1
        stream.put += 1
        stream.clock[stream] = stream.put

    def _step(self) -> bool:
        """Do one piece of work that may come next. False where there is none."""
        ready = [one for one in self._busy if getattr(one.items[0], "ran", True)]
        if not ready or self._failure is not None:
            return False
        stream = self._random.choice(ready)
        item = stream.items.popleft()
        self._pending -= 1
        if not stream.items:
            del self._busy[stream]
        if not isinstance(item, FakeEvent):
            try:
                item()
            except Exception as error:  # noqa: BLE001 - of any work; as CUDA's, it is told by the next question
                self._failure = f"GPU {stream.gpu} has failed in {stream}: {type(error).__name__}: {error}"
        stream.ran += 1
        return True


def _join(clock: dict[Stream, int], other: dict[Stream, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(number, clock.get(stream, 0))


class _Host:
    """Who is named where the host races."""

    def __str__(self) -> str:
        return f"the host (from {_callers()})"


def _number(access: Access) -> int:
    return access[1].number


def _callers() -> str:
    """The innermost callers outside of this package."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        path = frame.f_code.co_filename
        if "/mpikv/testing/" not in path:
            found.append(f"{path.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def elements(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Span:
    """The bytes of an array, exactly: a strided one does not touch those between its elements."""
    if 0 in shape:
        return Span(address, address)
    starts, length = np.zeros(1, np.int64), itemsize
    for n, stride in sorted(zip(shape, strides, strict=True), key=lambda one: abs(one[1])):
        if n > 1 and stride == length and starts.size == 1:
            length *= n  # still one run
        elif n > 1:
            starts = np.add.outer(starts, np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return Span.of_runs(address + starts, length)
