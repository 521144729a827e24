"""Stages: parts of a collective that run concurrently, each as far as its messages allow.

`Stage.move` does what the stage can do without waiting, and returns whether that was anything; `drive` makes one
generator of several stages. Each stage counts the segments that it has finished, and other stages read the count. The
segments are in the same order in all of them, so that one rank can receive the tenth segment, add the ninth and send
the eighth at the same time.

Cost: one `move` of each stage for each test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Steps, Waiter, Waking, wakes
from mpikv.transports.base import Group

# Segments of one key under way in each direction: 1 MB, 40 ms at 200 Mbit/s, longer than a thread's sleep or switch.
LINK_WINDOW = 16
# Between processes of one host longer segments cost fewer calls; four of them still stay in a core's own cache.
HOST_SEGMENT_BYTES = 1 << 18
HOST_WINDOW = 2
# A message in device memory waits for an event of the GPU and for what MPI sets up for it: few and long ones cost less.
DEVICE_SEGMENT_BYTES = 4 << 20
DEVICE_WINDOW = 2

Span = tuple[int, int]  # elements [begin, end) of a buffer


class Ends(Protocol):
    """What sends and receives messages: a group, or an object that numbers the ranks in its own way."""

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation: ...

    def irecv(self, buf: HostArray, source: int, tag: int) -> Operation: ...


class Stage(Protocol):
    """A part of a collective. `done`: it has nothing left to do."""

    done: bool

    def move(self) -> bool:
        """Do what can be done without waiting, and return whether that was anything. Raises the error of a request."""
        ...

    def wakes(self, waiter: Waiter) -> bool:
        """Do what `Waking.wakes` does, where this stage waits for something else than another stage."""
        ...


class _Moves(Waking):
    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def test(self) -> bool:
        moved = False
        for stage in self._stages:
            if not stage.done:
                moved |= stage.move()
        return moved or all(stage.done for stage in self._stages)

    def wakes(self, waiter: Waiter) -> bool:
        promised = [stage.wakes(waiter) for stage in self._stages if not stage.done]  # ask all: any of them may move
        return all(promised)


def drive(*stages: Stage) -> Steps[None]:
    stages = tuple(stage for stage in stages if not stage.done)
    moves = _Moves(stages)
    while not all(stage.done for stage in stages):
        yield moves


def cut(span: Span, itemsize_bytes: int, segment_bytes: int) -> Iterator[Span]:
    step = max(1, segment_bytes // itemsize_bytes)
    for first in range(*span, step):
        yield first, min(first + step, span[1])


def scratch(group: Group, views: Sequence[HostArray], window: int) -> list[HostArray]:
    """Make arrays to receive values that are combined with `views`: one for each view, `window` different ones."""
    longest = max((view.size for view in views), default=0)
    dtype = views[0].dtype if views else np.dtype(np.uint8)
    room = group.room(dtype)
    rows = [group.empty(longest + room, dtype) for _ in range(min(window, len(views)))]
    return [rows[i % window][: view.size + room] for i, view in enumerate(views)]


class Sender:
    """A stage that sends segments to given ranks, in order, at most `window` at a time.

    segments: (rank of the group, array). ready: returns how many of them, from the first on, may be sent by now.
    """

    def __init__(
        self, group: Ends, segments: Sequence[tuple[int, HostArray]], tag: int, window: int, ready: Callable[[], int]
    ) -> None:
        self._group, self._segments, self._tag, self._window, self._ready = group, segments, tag, window, ready
        self._under_way: deque[Operation] = deque()
        self._sent = 0
        self.done = not segments

    @property
    def left(self) -> int:
        """Return how many segments, from the first on, are sent: their arrays may be changed."""
        return self._sent - len(self._under_way)

    def move(self) -> bool:
        moved = False
        while self._under_way and self._under_way[0].test():
            self._under_way.popleft()
            moved = True
        ready = min(self._ready(), len(self._segments))
        while self._sent < ready and len(self._under_way) < self._window:
            dest, segment = self._segments[self._sent]
            self._under_way.append(self._group.isend(segment, dest, self._tag))
            self._sent += 1
            moved = True
        self.done = self._sent == len(self._segments) and not self._under_way
        return moved

    def wakes(self, waiter: Waiter) -> bool:
        """Wake the waiter when the oldest segment under way is sent."""
        return not self._under_way or wakes(self._under_way[0], waiter)


class Receiver:
    """A stage that receives segments from given ranks, in order, at most `window` at a time.

    targets: for each segment, (rank of the group, array to receive into). take(i): called when segment i is received;
    afterwards its array may receive another segment. count: how many segments have been received and taken.
    may_take: returns how many, from the first on, may be taken by now. may_post: how many may be received by now.
    """

    def __init__(
        self,
        group: Ends,
        targets: Sequence[tuple[int, HostArray]],
        tag: int,
        window: int,
        *,
        take: Callable[[int], None] | None = None,
        may_take: Callable[[], int] | None = None,
        may_post: Callable[[], int] | None = None,
    ) -> None:
        self._group, self._targets, self._tag, self._window = group, targets, tag, window
        self._take, self._may_take, self._may_post = take, may_take, may_post
        self._under_way: deque[Operation] = deque()
        self._posted = 0
        self.count = 0
        self.done = not targets

    def move(self) -> bool:
        moved = False
        limit = len(self._targets) if self._may_take is None else self._may_take()
        wanted = len(self._targets) if self._may_post is None else self._may_post()
        while True:
            while self._posted < wanted and len(self._under_way) < self._window:
                source, target = self._targets[self._posted]
                self._under_way.append(self._group.irecv(target, source, self._tag))
                self._posted += 1
            if not (self._under_way and self.count < limit and self._under_way[0].test()):
                break
            self._under_way.popleft()
            if self._take is not None:
                self._take(self.count)
            self.count += 1
            moved = True
        self.done = self.count == len(self._targets)
        return moved

    def wakes(self, waiter: Waiter) -> bool:
        """Wake the waiter when the oldest segment under way is received, if it may be taken then."""
        if not self._under_way or (self._may_take is not None and self.count >= self._may_take()):
            return True  # only another stage's move can give this one something to do
        return wakes(self._under_way[0], waiter)
