"""Joins adjacent arrays of a direct call, also those of several keys, so that they are added in one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import Reduction
from mpikv.collectives.shared import Plan
from mpikv.collectives.shared_plans import Interval, Region, in_place_plan
from mpikv.hostmemory.segment import ALIGN_BYTES
from mpikv.strategies.arguments import Flat
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.queues import RoundQueue


def in_place(host_keys: HostKeys, replicas: Sequence[list[HostArray] | None], op: Reduction) -> Plan:
    """Make the plan to add arrays in place in shared memory. replicas: of each array, in rank order; None: skip it."""
    found = [one for one in replicas if one is not None and one[0].size]
    joined: list[list[HostArray]] = []
    for one in sorted(found, key=lambda one: host_keys.memory.offset_of(one[0]) or 0):
        both = host_keys.join(joined[-1], one) if joined else None  # adjacent arrays are added as one
        if both is None:
            joined.append(one)
        else:
            joined[-1] = both
    return in_place_plan(host_keys.rank, joined, op)


def regions(host_keys: HostKeys, queues: Sequence[RoundQueue], flat: Sequence[Flat]) -> list[Region]:
    """Join keys, in the order of their places, into regions. Gaps shorter than a cache line are part of a region."""
    begins = [host_keys.memory.offset_of(queue.stored) or 0 for queue in queues]
    order = sorted(range(len(queues)), key=begins.__getitem__)
    found: list[tuple[int, np.dtype[Any], list[Interval]]] = []
    end = -1
    for i in order:
        begin, (value, outs) = begins[i], flat[i]
        if value.size == 0:
            continue
        gap = begin - end
        if found and found[-1][1] == value.dtype and 0 <= gap < ALIGN_BYTES:
            if gap:
                found[-1][2].append(Interval(gap // value.itemsize, None, ()))
        else:
            found.append((begin, value.dtype, []))
        found[-1][2].append(Interval(value.size, value, outs))
        end = begin + value.nbytes
    return [
        Region(host_keys.memory.array(begin, sum(piece.n_elems for piece in pieces), dtype), pieces)
        for begin, dtype, pieces in found
    ]
