"""Ring reduce-scatter and allgather: together, ring allreduce.

The buffer is cut into one chunk per rank. In each of p-1 steps every rank sends one chunk to the next rank and adds the
one that comes from the rank before it to its own; then each rank holds one finished chunk, which travels round once
more. Chunks travel in segments, each sent on as soon as it has come and been added, whatever its chunk's other segments
do; so neither direction of a link ever waits for the end of a step. Works for any p and any n, n < p included (empty
chunks are skipped). Chunk c is added in the order c+1, c+2, ..., c of the ranks.

Cost per rank: p-1 steps of n/p elements in each half, bandwidth-optimal for any p; scratch: one window of segments
(`stages.py`). Restrictions: none.
Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.parts import HERE, Landing, Parts
from mpikv.collectives.stages import (
    DEVICE_SEGMENT_BYTES,
    DEVICE_WINDOW,
    HOST_SEGMENT_BYTES,
    HOST_WINDOW,
    LINK_SEGMENT_BYTES,
    LINK_WINDOW,
    Receiver,
    Sender,
    Span,
    cut,
    drive,
    scratch,
)
from mpikv.engine.operation import Steps
from mpikv.transports.base import Group

SEGMENT_BYTES = HOST_SEGMENT_BYTES  # the longest segment


def passing(
    chunks: Sequence[Sequence[Span]], me: int, itemsize_bytes: int, segment_bytes: int, *, reducing: bool
) -> list[list[Span]]:
    """Return the segments that pass rank `me`, step by step: those it has from the start, then those that come.

    chunks: the spans of each rank's chunk.
    """
    p = len(chunks)
    # The reduce-scatter starts one rank further on, so that it ends with each rank's own chunk.
    steps = [chunks[(me - step - reducing) % p] for step in range(p)]
    return [[segment for span in spans for segment in cut(span, itemsize_bytes, segment_bytes)] for spans in steps]


class Circle:
    """One rank's stages, which pass segments on around the ring.

    steps: what `passing` says. reducing: combine what comes with `buf`; else it replaces what is there. ready: how many
    segments, from the first on, hold this rank's contribution by now (None: all).
    """

    def __init__(
        self,
        group: Group,
        buf: HostArray,
        steps: Sequence[Sequence[Span]],
        tag: int,
        window: int,
        *,
        reducing: bool,
        ready: Callable[[], int] | None = None,
        combine: np.ufunc = np.add,
    ) -> None:
        views = [buf[a:b] for step in steps for a, b in step]
        self._n_first = len(steps[0])
        self._ready = ready or (lambda: len(views))
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        incoming, outgoing = views[self._n_first :], views[: len(views) - len(steps[-1])]
        if reducing:
            targets = scratch(group, incoming, window)

            def add(i: int) -> None:
                combine(targets[i][: incoming[i].size], incoming[i], out=incoming[i])

            def contributed() -> int:
                return self._ready() - self._n_first

            sources = [(before, target) for target in targets]
            self.receiver = Receiver(group, sources, tag, window, take=add, may_take=contributed)
        else:
            self.receiver = Receiver(group, [(before, view) for view in incoming], tag, window)
        self.sender = Sender(group, [(after, view) for view in outgoing], tag, window, self.count)

    def count(self) -> int:
        """Return how many segments, from the first on, are finished at this rank."""
        ready = self._ready()
        return ready if ready < self._n_first else self._n_first + self.receiver.count


def _steps(group: Group, buf: HostArray, chunks: Sequence[int], *, reducing: bool) -> tuple[list[list[Span]], int]:
    """What passes this rank, and how many segments may be under way."""
    across = len(set(group.hosts)) > 1
    segment_bytes, window = (LINK_SEGMENT_BYTES, LINK_WINDOW) if across else (HOST_SEGMENT_BYTES, HOST_WINDOW)
    if group.on_device:
        segment_bytes, window = DEVICE_SEGMENT_BYTES, DEVICE_WINDOW
    spans = [[(chunks[i], chunks[i + 1])] for i in range(group.size)]
    return passing(spans, group.rank, buf.itemsize, segment_bytes, reducing=reducing), window


def reduce_scatter(
    group: Group, buf: HostArray, chunks: Sequence[int], tag: int, combine: np.ufunc = np.add, *, parts: Parts = HERE
) -> Steps[None]:
    """Add `buf` over all ranks, or `combine` it; then each rank's own chunk of its `buf` holds the result.

    buf: (n,), contiguous, same n and dtype on every rank; its other chunks hold partial sums afterwards. parts: how its
    values come, and what becomes of the result. Collective. Yields each request it must wait for.
    """
    steps, window = _steps(group, buf, chunks, reducing=True)
    coming = parts.coming(span for step in steps for span in step)
    circle = Circle(group, buf, steps, tag, window, reducing=True, ready=lambda: coming.count, combine=combine)
    before = sum(map(len, steps[:-1]))
    landing = Landing(parts, buf, steps[-1], lambda: circle.count() - before)
    yield from drive(coming, circle.receiver, circle.sender, landing)


def allgather(group: Group, buf: HostArray, chunks: Sequence[int], tag: int, *, parts: Parts = HERE) -> Steps[None]:
    """Give every rank every chunk: chunk i of `buf` is rank i's at the start, on all ranks at the end.

    buf: (n,), contiguous, same n and dtype on every rank. parts: how this rank's chunk comes, and what becomes of the
    others. Collective. Yields each request it must wait for.
    """
    steps, window = _steps(group, buf, chunks, reducing=False)
    coming = parts.coming(steps[0])
    circle = Circle(group, buf, steps, tag, window, reducing=False, ready=lambda: coming.count)
    others = [span for step in steps[1:] for span in step] if parts.landed is not None else []
    landing = Landing(parts, buf, others, lambda: circle.receiver.count)
    yield from drive(coming, circle.receiver, circle.sender, landing)
