"""Ring reduce-scatter and ring allgather, the two halves of a ring allreduce.

The buffer is cut into one chunk per rank. In each of p-1 steps every rank sends one chunk to the next rank, and adds
the chunk that it receives from the rank before it to its own. After these steps each rank holds one fully reduced
chunk, and p-1 more steps pass every chunk on to all ranks. Chunks are sent in segments: a segment is sent on as soon as
it has been received and added, without waiting for the other segments of its chunk, so neither direction of a link is
idle at the end of a step. Works for any p and any n, n < p included (empty chunks are skipped). The ranks' values of
chunk c are added in the order c+1, c+2, ..., c.

Cost per rank: p-1 steps of n/p elements in each half, bandwidth-optimal for any p; scratch: one window of segments
(`stages.py`). Restrictions: none.
Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.stages import (
    DEVICE_SEGMENT_BYTES,
    DEVICE_WINDOW,
    HOST_SEGMENT_BYTES,
    HOST_WINDOW,
    LINK_WINDOW,
    Receiver,
    Sender,
    Span,
    cut,
    drive,
    scratch,
)
from mpikv.engine.operation import Steps
from mpikv.placement.links import LINK_SEGMENT_BYTES
from mpikv.transports.base import Group


def segments_by_step(
    chunks: Sequence[Sequence[Span]], me: int, itemsize_bytes: int, segment_bytes: int, *, reducing: bool
) -> list[list[Span]]:
    """Return the segments that pass rank `me`, one list per step: first its own. chunks: the spans of each rank's."""
    p = len(chunks)
    # The reduce-scatter starts one rank further on, so that it ends with each rank's own chunk.
    steps = [chunks[(me - step - reducing) % p] for step in range(p)]
    return [[segment for span in spans for segment in cut(span, itemsize_bytes, segment_bytes)] for spans in steps]


class RingStages:
    """One rank's two stages of a ring: the receiver from the rank before it, and the sender to the rank after it.

    steps: what `segments_by_step` returns. reducing: combine received segments with `buf`, else write them to it.
    ready: returns how many segments of `steps`, from the first on, hold this rank's own values by now (None: all).
    count: returns how many of them this rank may send on by now.

    The stages refer to each other in one direction, so that a round's arrays go with its last reference.
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
        n_first, n_all = len(steps[0]), len(views)
        own = ready or (lambda: n_all)
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        incoming, outgoing = views[n_first:], views[: len(views) - len(steps[-1])]
        if reducing:
            targets = scratch(group, incoming, window)

            def add(i: int) -> None:
                combine(targets[i][: incoming[i].size], incoming[i], out=incoming[i])

            def contributed() -> int:
                return own() - n_first

            sources = [(before, target) for target in targets]
            receiver = Receiver(group, sources, tag, window, take=add, may_take=contributed)
        else:
            receiver = Receiver(group, [(before, view) for view in incoming], tag, window)

        def count() -> int:
            ready = own()
            return ready if ready < n_first else n_first + receiver.count

        self.receiver, self.count = receiver, count
        self.sender = Sender(group, [(after, view) for view in outgoing], tag, window, count)


def _steps(group: Group, buf: HostArray, chunks: Sequence[int], *, reducing: bool) -> tuple[list[list[Span]], int]:
    """Return the segments that pass this rank, step by step, and how many may be under way."""
    across = len(set(group.hosts)) > 1
    segment_bytes, window = (LINK_SEGMENT_BYTES, LINK_WINDOW) if across else (HOST_SEGMENT_BYTES, HOST_WINDOW)
    if group.on_device:
        segment_bytes, window = DEVICE_SEGMENT_BYTES, DEVICE_WINDOW
    spans = [[(chunks[i], chunks[i + 1])] for i in range(group.size)]
    return segments_by_step(spans, group.rank, buf.itemsize, segment_bytes, reducing=reducing), window


def reduce_scatter(
    group: Group, buf: HostArray, chunks: Sequence[int], tag: int, combine: np.ufunc = np.add
) -> Steps[None]:
    steps, window = _steps(group, buf, chunks, reducing=True)
    stages = RingStages(group, buf, steps, tag, window, reducing=True, combine=combine)
    yield from drive(stages.receiver, stages.sender)


def allgather(group: Group, buf: HostArray, chunks: Sequence[int], tag: int) -> Steps[None]:
    steps, window = _steps(group, buf, chunks, reducing=False)
    stages = RingStages(group, buf, steps, tag, window, reducing=False)
    yield from drive(stages.receiver, stages.sender)
