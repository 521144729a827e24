"""A pipeline of copies between a GPU and page-locked host memory, while a collective runs in that memory.

Values are copied *down* to the host in the order in which the collective reads them (pipeline.py), up to `AHEAD` copies
ahead, with an event behind each; complete spans of the result are copied *up*. One copy takes up to `SEGMENT_BYTES` of
consecutive memory: a copy down includes spans next to the first one that the collective reads later, and a complete
span waits until its neighbours are complete. So a value of up to `SEGMENT_BYTES` takes one copy in each direction, as
does a span that a collective reads all at once.

Order. Copies down are in the store's stream, behind all that was done with the values. Copies up of a value of several
segments are in a second stream, so that both directions are in use at the same time. They wait for nothing on the
device. That is safe for the sums, which overwrite this worker's own values on the device, because the host has seen the
copies of those values end. It is safe for the new value because the host has seen all copies down of the round's first
half end, and these are behind whatever the store did with the last value. At the end of each half the store's stream
waits for what has been begun in the second one, also where the round was given up.

Cost: a copy and an event for each segment down, a copy for each segment up; an event and a wait for it for each half of
a round.
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

SEGMENT_BYTES = 1 << 20  # some 50 us of a bus, several times what it takes to begin a copy and to test its event
AHEAD = 16  # copies down under way: more than end while the thread that moves transfers on sleeps


class _Half(NamedTuple):
    """The copies of one half of a round: down from `values` to `on_host`, and up to `up`.

    lock: page-locks the memory that copies up read.
    """

    values: SpaceArray
    on_host: HostArray
    up: SpaceArray
    lock: Callable[[HostArray], object]


class CopyPipeline:
    """The pipeline of one key; see `Pipeline`. n_bytes: of the key's sum."""

    def __init__(self, space: DeviceSpace, n_bytes: int) -> None:
        self._space, self._several = space, n_bytes > SEGMENT_BYTES
        self._half: _Half | None = None
        self._source: HostArray | None = None
        # Spans that are complete and not copied up yet: where each begins, by where it ends.
        self._held_back: dict[int, int] = {}

    @contextmanager
    def copying(
        self, values: SpaceArray, on_host: HostArray, up: SpaceArray, lock: Callable[[HostArray], object]
    ) -> Iterator[HostArray]:
        """Copy `values` down to `on_host`, and complete spans up to `up`, while the block runs one half of a round.

        All are (n,). The block gets `on_host`. lock: called with the array that holds the result before it is read.
        """
        self._half = _Half(values, on_host, up, lock)
        try:
            yield on_host
            self._copy_up_held_back()
        finally:
            self._half = self._source = None
            self._held_back.clear()
            if self._several:
                self._space.join_second_stream()

    def load(self, spans: Iterable[Span]) -> DownCopies:
        """Begin to copy these spans down."""
        assert self._half is not None
        return DownCopies(self._space, self._half.values, self._half.on_host, list(spans))

    def on_complete(self, array: HostArray, span: Span) -> None:
        """Copy a span up: now, or once its neighbours make it long enough."""
        assert self._half is not None
        if self._source is None:
            self._half.lock(array)
            self._source = array
        begin, end = self._held_back.pop(span[0], span[0]), span[1]
        if (end - begin) * array.itemsize < SEGMENT_BYTES:
            self._held_back[end] = begin
        else:
            self._copy_up(begin, end)

    def _copy_up_held_back(self) -> None:
        runs: list[list[int]] = []
        for end, begin in sorted(self._held_back.items()):
            if runs and runs[-1][1] == begin:
                runs[-1][1] = end
            else:
                runs.append([begin, end])
        for begin, end in runs:
            self._copy_up(begin, end)

    def _copy_up(self, begin: int, end: int) -> None:
        assert self._half is not None
        assert self._source is not None
        self._space.upload(self._half.up[begin:end], self._source[begin:end], second_stream=self._several)


class DownCopies:
    """A loader that copies spans of an array to the host."""

    def __init__(self, space: DeviceSpace, values: SpaceArray, on_host: HostArray, spans: Sequence[Span]) -> None:
        self._space, self._values, self._on_host = space, values, on_host
        self._copies, self._copy_of = merged(spans, SEGMENT_BYTES // values.itemsize)
        self._under_way: deque[Operation] = deque()
        self._begun = self._ended = 0
        self.count = 0
        self.done = not spans

    def move(self) -> bool:
        """Begin the next copies, and count the spans whose copies have ended."""
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
        """Return False while copies are under way: a GPU wakes nobody."""
        return self.done


def merged(spans: Sequence[Span], most: int) -> tuple[list[Span], list[int]]:
    """Merge spans into copies of up to `most` elements. Returns the copies, and for each span the number of its copy.

    A copy is made for the first span that no earlier copy includes. Spans that follow it in memory are added to the
    copy, or else spans in front of it.
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
