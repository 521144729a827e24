"""What goes round the ring of the workers in a step of `dist_sync`: its time from counted messages and published costs.

All keys are under way at the same time. So they take as long as what has most to do: a host's link, out or in, or a
core, of which the sums over all keys are counted (`counting.py`). But they take no less than one key does by itself,
whose steps follow each other: `costs.ring_s`. To that comes what cannot go on beside anything: copying the first key
in, and the last one out. Workers of one host add in its memory, and each of them leads a ring with its share of a key.

Not in it: naps of waiting ranks, up to half a millisecond for each step of a short exchange; the optimizer's own
arithmetic beyond one addition for each owned byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.collectives import ring
from mpikv.commands.plan.counting import Counting
from mpikv.commands.plan.step import DEFAULTS, DTYPE, ITEM_BYTES, PlannedStep, StepSettings, Workload
from mpikv.errors import ConfigError
from mpikv.placement.costs import Costs, Link, ring_s
from mpikv.placement.keys import even_bounds
from mpikv.placement.links import LINK_SEGMENT_BYTES
from mpikv.transports.base import Group


class RingCost(NamedTuple):
    """What one key takes.

    link_s: of a host's link, out and in. core_s: of a worker's core. copy_s: in, and as much out. alone_s: from its
    first message to its last, when nothing else is under way. messages, sent_bytes: of each worker.
    """

    link_s: tuple[float, float]
    core_s: float
    copy_s: float
    alone_s: float
    messages: int
    sent_bytes: int


def hosts_of(workers: int, per_host: int) -> tuple[str, ...]:
    """Return the host of each worker, in blocks of neighbours."""
    return tuple(f"h{rank // per_host}" for rank in range(workers))


def predict(
    workload: Workload, workers: int, link: Link, costs: Costs, settings: StepSettings = DEFAULTS
) -> PlannedStep:
    """Predict the exchange of these keys. Raises ConfigError where it crosses no link."""
    n_hosts, compute_s = len(set(hosts_of(workers, settings.per_host))), settings.compute_s
    if n_hosts < 2:
        raise ConfigError(f"{workers} workers on one host share memory and cross no link: plan for more, or --per-host")
    taken = [_cost_of(n, workers, n_hosts, link, costs) for n in workload.sizes if n]
    out_s, in_s = (sum(one.link_s[i] for one in taken) for i in (0, 1))
    core_s = sum(one.core_s for one in taken)
    ends_s = taken[0].copy_s + taken[-1].copy_s if taken else 0.0
    alone_s = max((one.alone_s for one in taken), default=0.0)
    return PlannedStep(
        "allreduce ring",
        max(max(out_s, in_s, alone_s) + ends_s, core_s),
        _overlapped_s(workload, compute_s, taken) if compute_s else None,
        sum(one.messages for one in taken),
        sum(one.sent_bytes for one in taken),
        {"link out": out_s, "link in": in_s, "core": core_s},
    )


def _cost_of(n_elems: int, workers: int, n_hosts: int, link: Link, costs: Costs) -> RingCost:
    per_host, n_bytes = workers // n_hosts, n_elems * ITEM_BYTES
    share, rank = -(-n_elems // per_host), max(0, n_hosts - 2)  # it sends most: all but its own chunk and the next one
    counting = Counting(rank, [f"h{i}" for i in range(n_hosts)])
    group, chunks, buf = Group(counting, range(n_hosts)), even_bounds(share, n_hosts), np.empty(share, DTYPE)
    combine: Any = counting.combine
    counting.run(ring.reduce_scatter(group, buf, chunks, 1, combine))
    counting.run(ring.allgather(group, buf, chunks, 2))
    of_optimizer, of_host = chunks[rank + 1] - chunks[rank], (per_host - 1) * share
    counting.added_bytes += ITEM_BYTES * (of_optimizer + of_host)
    out_s, in_s = counting.link_s(link)
    copy_s = n_bytes * costs.copy_byte_s
    return RingCost(
        (per_host * out_s, per_host * in_s),
        counting.core_s(costs) + 2 * copy_s,
        copy_s,
        ring_s(n_bytes, workers, link, costs, hosts=n_hosts, segment_bytes=LINK_SEGMENT_BYTES),
        len(counting.sent),
        counting.sent_bytes,
    )


def _overlapped_s(workload: Workload, compute_s: float, taken: Sequence[RingCost]) -> float:
    """Return the time of a step in which each key leaves when its gradient is there, the last layer's first."""
    link_s, core_s, end_s = 0.0, 0.0, compute_s
    ready_s = [ready for ready, n in zip(workload.ready_s(compute_s), workload.sizes, strict=True) if n]
    for begin_s, one in reversed(list(zip(ready_s, taken, strict=True))):
        link_s = max(begin_s + one.copy_s, link_s) + max(one.link_s)
        core_s = max(begin_s, core_s) + one.core_s
        end_s = max(end_s, core_s, link_s + one.copy_s, begin_s + one.alone_s + 2 * one.copy_s)
    return end_s
