"""Makes the plans that `shared` runs: which copies and sums a rank makes in a call, and in which chunks.

Arrays of any kind go through *slots*, scratch memory of each rank, chunk by chunk. Arrays that lie in shared memory are
added where they are. Where the keys have an optimizer, it applies the sums to the stored value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.collectives.shared import Chunk, Copy, Plan, copy_of, summed
from mpikv.hostmemory.segment import ALIGN_BYTES, HostMemory, aligned

# Measured: for shorter chunks ranks wait too often, and longer ones leave the cache before the drain.
CHUNK_BYTES = 512 << 10
SLOTS = 3  # a chunk is filled while the one before is summed and the one before that is drained
TINY_BYTES = 16 << 10  # up to so many bytes every rank adds all elements: that costs less than waiting for sums


class Slots:
    """The scratch memory of every rank, from `begin_bytes` on."""

    per_rank_bytes = SLOTS * CHUNK_BYTES + 2 * TINY_BYTES

    def __init__(self, memory: HostMemory, begin_bytes: int) -> None:
        self.memory = memory
        self._begin = begin_bytes
        self.end = begin_bytes + memory.size * self.per_rank_bytes

    def view(self, rank: int, slot: int, offset_bytes: int, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        return self.memory.array(self._offset(rank) + slot * CHUNK_BYTES + offset_bytes, n_elems, dtype)

    def tiny(self, rank: int, slot: int, offset_bytes: int, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """Return some elements of one of a rank's two slots for tiny calls."""
        begin = self._offset(rank) + SLOTS * CHUNK_BYTES + slot * TINY_BYTES
        return self.memory.array(begin + offset_bytes, n_elems, dtype)

    def _offset(self, rank: int) -> int:
        return self._begin + rank * self.per_rank_bytes


class Interval(NamedTuple):
    """Consecutive elements of a region. value: this rank's values; None: a gap between keys. outs: get the result."""

    n_elems: int
    value: HostArray | None
    outs: tuple[HostArray, ...]

    def part(self, n: slice) -> Interval:
        """Return some of its elements."""
        begin, end, _ = n.indices(self.n_elems)
        value = None if self.value is None else self.value[n]
        return Interval(end - begin, value, tuple(out[n] for out in self.outs))


class Region(NamedTuple):
    """Consecutive elements of shared memory, which get the `result`, divided into intervals."""

    result: HostArray
    intervals: Sequence[Interval]


def cut(regions: Sequence[Region], limit_bytes: int) -> list[list[Region]]:
    """Cut regions, and divide them into groups of at most `limit_bytes`, where each region begins at a cache line."""
    groups: list[list[Region]] = [[]]
    left_bytes = limit_bytes
    for region in regions:
        itemsize = region.result.itemsize
        intervals, begin, left = deque(region.intervals), 0, region.result.size
        while left:
            take = min(left, left_bytes // itemsize)
            if take == 0 or (take < left and take * itemsize < limit_bytes and left * itemsize <= limit_bytes):
                groups.append([])
                left_bytes = limit_bytes
                continue
            head: list[Interval] = []
            missing = take
            while missing:
                interval = intervals.popleft()
                if interval.n_elems > missing:
                    intervals.appendleft(interval.part(slice(missing, None)))
                    interval = interval.part(slice(missing))
                head.append(interval)
                missing -= interval.n_elems
            groups[-1].append(Region(region.result[begin : begin + take], head))
            begin, left = begin + take, left - take
            left_bytes -= aligned(take * itemsize)
    return [group for group in groups if group]


def range_of(rank: int, size: int, n_elems: int, itemsize: int) -> tuple[int, int]:
    line = max(1, ALIGN_BYTES // itemsize)
    lines = -(-n_elems // line)
    base, extra = divmod(lines, size)
    begin = rank * base + min(rank, extra)
    return min(n_elems, begin * line), min(n_elems, (begin + base + (rank < extra)) * line)


def same_plan(plan: Plan) -> Callable[[int], Plan]:
    return lambda turn: plan


def staged_plan(slots: Slots, regions: Sequence[Region], op: Reduction = SUM) -> Callable[[int], Plan]:
    """Plan sums of arrays of any kind: values are copied to the slots, sums to each result, and out from there.

    Returns a function of the tiny slot to use, 0 or 1; all plans of one call are the same otherwise.
    """
    groups = cut(regions, CHUNK_BYTES)
    if not groups:
        return same_plan(Plan([Chunk()], alone=True))
    sizes = [sum(aligned(region.result.nbytes) for region in group) for group in groups]
    if len(groups) == 1 and sizes[0] <= TINY_BYTES:
        plans = [_tiny(slots, groups[0], turn, op) for turn in range(2)]
        return lambda turn: plans[turn]
    chunks = [_staged(slots, group, i % SLOTS, op) for i, group in enumerate(groups)]
    return same_plan(_with_costs(Plan(chunks)))


def _tiny(slots: Slots, group: Sequence[Region], turn: int, op: Reduction) -> Plan:
    chunk, offset = Chunk(), 0
    ranks, me = range(slots.memory.size), slots.memory.rank
    for region in group:
        n, dtype = region.result.size, region.result.dtype
        views = [slots.tiny(rank, turn, offset, n, dtype) for rank in ranks]
        chunk.fills.add(_fills(views[me], region.intervals))
        # All ranks write the result, at the same time, so each may write nothing but the final bits there.
        if len(region.intervals) == 1 and region.intervals[0].outs:
            first, *others = region.intervals[0].outs
            chunk.sums.append(summed(first, views, [region.result, *others], op=op))
        else:
            total = np.empty(n, dtype)
            chunk.sums.append(summed(total, views, [region.result], op=op))
            chunk.drains.add(_drains(Region(total, region.intervals)))
        offset += aligned(region.result.nbytes)
    return _with_costs(Plan([chunk], alone=True))


def _staged(slots: Slots, group: Sequence[Region], slot: int, op: Reduction) -> Chunk:
    chunk, offset = Chunk(), 0
    size, me = slots.memory.size, slots.memory.rank
    for region in group:
        n, dtype = region.result.size, region.result.dtype
        begin, end = range_of(me, size, n, dtype.itemsize)
        views = [slots.view(rank, slot, offset, n, dtype) for rank in range(size)]
        value = region.intervals[0].value
        if len(region.intervals) == 1 and value is not None:
            # One array: this rank's own range need not be copied to the slot.
            own = value[begin:end]
            chunk.fills.add(copy_of(views[me][a:b], value[a:b]) for a, b in ((0, begin), (end, n)) if a < b)
        else:
            own = views[me][begin:end]
            chunk.fills.add(_fills(views[me], region.intervals))
        if begin < end:
            sources = tuple(own if rank == me else views[rank][begin:end] for rank in range(size))
            chunk.sums.append(summed(region.result[begin:end], sources, op=op))
        chunk.drains.add(_drains(region))
        offset += aligned(region.result.nbytes)
    return chunk


def _fills(view: HostArray, intervals: Sequence[Interval]) -> list[Copy]:
    zeros = np.zeros(ALIGN_BYTES, np.uint8).view(view.dtype)
    copies, begin = [], 0
    for interval in intervals:
        # A gap is filled, too: values of earlier calls there could overflow when they are added.
        value = zeros[: interval.n_elems] if interval.value is None else interval.value
        copies.append(copy_of(view[begin : begin + interval.n_elems], value))
        begin += interval.n_elems
    return copies


def _drains(region: Region) -> list[Copy]:
    copies, begin = [], 0
    for interval in region.intervals:
        copies += [copy_of(out, region.result[begin : begin + interval.n_elems]) for out in interval.outs]
        begin += interval.n_elems
    return copies


def in_place_plan(rank: int, arrays: Sequence[Sequence[HostArray]], op: Reduction = SUM) -> Plan:
    """Plan sums of arrays in shared memory: for each value those of all ranks, in rank order. Each becomes the sum."""
    chunk = Chunk()
    for replicas in arrays:
        first = replicas[0]
        begin, end = range_of(rank, len(replicas), first.size, first.itemsize)
        step = CHUNK_BYTES // first.itemsize
        for a in range(begin, end, step):
            ranges = tuple(replica[a : min(a + step, end)] for replica in replicas)
            chunk.sums.append(summed(ranges[0], ranges, ranges[1:], op=op))
    return _with_costs(Plan([chunk]))


class Update(NamedTuple):
    """A key with an optimizer.

    values: of every rank, all in shared memory; or this rank's own, and None for all others. bounds: rank i owns
    `[bounds[i], bounds[i+1])`. update(total): applies the sum of this rank's shard.
    """

    values: Sequence[HostArray | None]
    result: HostArray
    outs: tuple[HostArray, ...]
    bounds: Sequence[int]
    update: Callable[[HostArray], None]


def update_plan(slots: Slots, keys: Sequence[Update], scratch: Callable[[int, np.dtype[Any]], HostArray]) -> Plan:
    """Plan updates of keys: each owner adds its shard into scratch memory and applies it to its shard of the result.

    scratch(n_elems, dtype): returns memory that one key uses after another.
    """
    size, me = slots.memory.size, slots.memory.rank
    chunks = [Chunk()]
    left_bytes = CHUNK_BYTES
    for key in keys:
        dtype = key.result.dtype
        own_elems = key.bounds[me + 1] - key.bounds[me]
        total = scratch(own_elems, sum_dtype(dtype))
        longest = max(key.bounds[rank + 1] - key.bounds[rank] for rank in range(size))
        staged = any(value is None for rank, value in enumerate(key.values) if rank != me) or size == 1
        done = 0
        while done < longest:
            if staged:
                # A chunk holds equally many elements of every owner's shard, so that all owners have work.
                fitting = (left_bytes // size - ALIGN_BYTES) // dtype.itemsize
                whole = longest * size * dtype.itemsize <= CHUNK_BYTES // 2  # put it into the next chunk, not in two
                if fitting <= 0 or (whole and fitting < longest and left_bytes < CHUNK_BYTES):
                    chunks.append(Chunk())
                    left_bytes = CHUNK_BYTES
                    continue
                take = min(longest - done, fitting)
            else:
                take = min(longest - done, CHUNK_BYTES // dtype.itemsize)
            chunk = chunks[-1]
            offset = CHUNK_BYTES - left_bytes
            slot = (len(chunks) - 1) % SLOTS
            for owner in range(size):
                begin, end = key.bounds[owner] + done, min(key.bounds[owner] + done + take, key.bounds[owner + 1])
                if begin >= end:
                    continue
                views = [
                    value[begin:end] if value is not None else slots.view(rank, slot, offset, end - begin, dtype)
                    for rank, value in enumerate(key.values)
                ]
                if owner == me:
                    after = partial(key.update, total) if end == key.bounds[me + 1] else None
                    chunk.sums.append(summed(total[done : done + end - begin], tuple(views), (), after))
                elif staged:
                    mine = key.values[me]
                    assert mine is not None
                    chunk.fills.add([copy_of(slots.view(me, slot, offset, end - begin, dtype), mine[begin:end])])
                if staged:
                    offset += aligned((end - begin) * dtype.itemsize)
            if staged:
                left_bytes = CHUNK_BYTES - offset
            done += take
        chunks[-1].drains.add(copy_of(out, key.result) for out in key.outs)
    return _with_costs(Plan(chunks))


def _with_costs(plan: Plan) -> Plan:
    for chunk in plan.chunks:
        plan.copied_bytes += chunk.fills.n_bytes + chunk.drains.n_bytes
        for one in chunk.sums:
            plan.added_bytes += one.out.nbytes * (len(one.sources) - 1)
            plan.copied_bytes += sum(copy.nbytes for copy in one.copies)
    return plan
