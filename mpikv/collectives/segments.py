"""Copies of one key between a GPU and page-locked host memory, a segment at a time, while a collective runs there.

What the collective reads is copied down in the order in which it needs that (collectives/parts.py), several segments
ahead, each with an event behind it; what is complete comes up. A segment is what follows one another in memory, up to
`SEGMENT_BYTES`: what the collective needs later goes along with what it needs first, and what is complete waits for its
neighbours. So a value of one segment goes in one copy, each way, as does what a collective reads all at once.

Order. Copies down are in the store's stream, behind all that was done with the values. Copies up of a value of several
segments are in a second stream, so that both directions are in use at the same time. They wait for nothing on the
device. A part of the sums comes up to where this worker's own values of that part were, once the host has seen those
go down. A part of the new value comes up after the host has seen all copies down of the round's first half done, which
are behind whatever the store did with the last value. At the end of each half the store's stream waits for what has
been begun in the second one, also where the round was given up.

Cost: for a segment down a copy and an event, up a copy; an event and a wait for it for each half of a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Operation, Waiter
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace

SEGMENT_BYTES = 1 << 20  # some 50 us of a bus, several times what it takes to begin a copy and to see its event done
AHEAD = 16  # segments under way: more than goes down while a thread that moves transfers on naps


class _Half(NamedTuple):
    """Of a round: copies go down from `values` to `on_host`, and up to `up`; lock: readies what they come up from."""

    values: SpaceArray
    on_host: HostArray
    up: SpaceArray
    lock: Callable[[HostArray], object]


class Segments:
    """Of one key. See `Parts`."""

    def __init__(self, space: DeviceSpace, n_bytes: int) -> None:
        self._space, self._several = space, n_bytes > SEGMENT_BYTES
        self._half: _Half | None = None
        self._source: HostArray | None = None
        self._open: dict[int, int] = {}  # where parts begin that are complete and still on the host, by where they end

    @contextmanager
    def between(
        self, values: SpaceArray, on_host: HostArray, up: SpaceArray, lock: Callable[[HostArray], object]
    ) -> Iterator[HostArray]:
        """Copy `values` down to `on_host`, and to `up` what is complete: arrays of (n,). For one half of a round.

        Gives `on_host`.
        lock: called with what the result is in before any of it comes up.
        """
        self._half = _Half(values, on_host, up, lock)
        try:
            yield on_host
            self._bring_all()
        finally:
            self._half = self._source = None
            self._open.clear()
            if self._several:
                self._space.join_second_stream()

    def coming(self, spans: Iterable[Span]) -> Copying:
        """Begin to copy these parts down."""
        assert self._half is not None
        return Copying(self._space, self._half.values, self._half.on_host, list(spans))

    def landed(self, array: HostArray, span: Span) -> None:
        """Copy a part up, now or with its neighbours."""
        assert self._half is not None
        if self._source is None:
            self._half.lock(array)
            self._source = array
        begin, end = self._open.pop(span[0], span[0]), span[1]
        if (end - begin) * array.itemsize < SEGMENT_BYTES:
            self._open[end] = begin
        else:
            self._bring(begin, end)

    def _bring_all(self) -> None:
        runs: list[list[int]] = []
        for end, begin in sorted(self._open.items()):
            if runs and runs[-1][1] == begin:
                runs[-1][1] = end
            else:
                runs.append([begin, end])
        for begin, end in runs:
            self._bring(begin, end)

    def _bring(self, begin: int, end: int) -> None:
        assert self._half is not None
        assert self._source is not None
        self._space.upload(self._half.up[begin:end], self._source[begin:end], second_stream=self._several)


class Copying:
    """A stage that copies parts of an array to the host. count: how many of the spans, from the first on, are there."""

    def __init__(self, space: DeviceSpace, values: SpaceArray, on_host: HostArray, spans: Sequence[Span]) -> None:
        self._space, self._values, self._on_host = space, values, on_host
        self._copies, self._copy_of = gathered(spans, SEGMENT_BYTES // values.itemsize)
        self._under_way: deque[Operation] = deque()
        self._begun = self._ended = 0
        self.count = 0
        self.done = not spans

    def move(self) -> bool:
        """Begin the next copies, and count what those that have ended brought."""
        while self._begun < len(self._copies) and len(self._under_way) < AHEAD:
            begin, end = self._copies[self._begun]
            self._space.download(self._on_host[begin:end], self._values[begin:end])
            self._under_way.append(self._space.stream_event())
            self._begun += 1
        before = self._ended
        while self._under_way and self._under_way[0].test():
            self._under_way.popleft()
            self._ended += 1
        while self.count < len(self._copy_of) and self._copy_of[self.count] < self._ended:
            self.count += 1
        self.done = self.count == len(self._copy_of)
        return self._ended > before

    def wakes(self, waiter: Waiter) -> bool:
        """A GPU wakes nobody."""
        return self.done


def gathered(spans: Sequence[Span], most: int) -> tuple[list[Span], list[int]]:
    """Which copies of up to `most` elements bring these spans, in their order, and for each span which of the copies.

    A copy begins with the first span that none before it brings, and takes along what follows that in memory; then what
    is in front of it.
    """
    at_begin = {begin: i for i, (begin, _) in enumerate(spans)}
    at_end = {end: i for i, (_, end) in enumerate(spans)}
    copies: list[Span] = []
    copy_of = [-1] * len(spans)
    for first in range(len(spans)):
        if copy_of[first] >= 0:
            continue
        begin, end = spans[first]
        near: int | None = first
        while near is not None:
            copy_of[near] = len(copies)
            begin, end = min(begin, spans[near][0]), max(end, spans[near][1])
            around = [i for i in (at_begin.get(end), at_end.get(begin)) if i is not None and copy_of[i] < 0]
            near = next((i for i in around if end - begin + spans[i][1] - spans[i][0] <= most), None)
        copies.append((begin, end))
    return copies, copy_of
