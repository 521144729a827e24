"""A step of `dist_sync` without servers: its time from counted messages and the algorithms' published costs.

As a `Trainer` does it: keys that share a bucket travel together, and all buckets are under way at the same time. So a
step takes as long as what has most to do: the busiest host's link, out or in, or the busiest core, of which the sums
over all buckets are counted (`counting.py`). But it takes no less than one bucket does by itself, whose steps follow
each other: `costs.allreduce_s`, or, of values that travel encoded, the time of the busiest link or core, once
(`gather`) or out and back (`owners`), and of one piece that is encoded and decoded. To that comes what cannot go on
beside anything: copying into the first bucket, and out of the last one. A link takes longer where several hosts send to
one at the same time, in `naive`, `owners` and `gather`.

Not in it: naps of waiting ranks, up to half a millisecond for each step of a short exchange; the optimizer's own
arithmetic beyond one addition for each owned byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpikv.codecs import compression as compressions
from mpikv.codecs.compression import wire_of
from mpikv.collectives.select import ALGORITHMS
from mpikv.commands.plan.counting import Counting
from mpikv.commands.plan.step import DEFAULTS, DTYPE, ITEM_BYTES, PlannedStep, Speeds, StepSettings, Workload
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement import buckets
from mpikv.placement.algorithms import LINK_SEGMENT_BYTES
from mpikv.placement.costs import Costs, Link, allreduce_s
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.place import place
from mpikv.placement.placement import Placement
from mpikv.spaces.named import Spaces
from mpikv.strategies.bucketed import kind_of
from mpikv.strategies.encoded_path import EncodedPath
from mpikv.strategies.key_path import PathResources
from mpikv.strategies.pieces import Pieces, piece_elems
from mpikv.transports.base import Group

EVERY_RANK = 16  # up to so many are all counted; of more, those of the first host
TO_ALL = ("naive", "owners", "gather")  # each worker sends to all others at the same time, not to one after the other


class PlannedBucket(NamedTuple):
    """Keys that travel together: which, what they are together, where that lives."""

    keys: tuple[int, ...]
    info: KeyInfo
    placement: Placement

    @property
    def encoded(self) -> bool:
        return self.placement.path == "encoded"


class BucketCost(NamedTuple):
    """What one bucket takes.

    link_s: of the busiest host's link, out and in. core_s: of the busiest core. copy_s: into it, and as much out of it.
    alone_s: from its first message to its last, when nothing else is under way. sent: messages and bytes of each rank.
    """

    link_s: tuple[float, float]
    core_s: float
    copy_s: float
    alone_s: float
    sent: Sequence[tuple[int, int]]


Halves = tuple[Counting, Counting]
"""What one rank does until its part of the sum is there, and what it does to bring the result to all."""


def hosts_of(workers: int, per_host: int) -> tuple[str, ...]:
    """Return the host of each worker, in blocks of neighbours."""
    return tuple(f"h{rank // per_host}" for rank in range(workers))


def buckets_of(workload: Workload, hosts: Sequence[str], settings: StepSettings = DEFAULTS) -> list[PlannedBucket]:
    """Return the buckets of a trainer's keys, in the order in which a backward pass completes them."""
    infos = [info for info in reversed(list(workload.infos(settings.compression))) if info.n_elems]
    members = Members(tuple(hosts), tuple(range(len(hosts))), config=Config())
    found = []
    for group in buckets.plan([info.n_bytes for info in infos], [kind_of(info) for info in infos]):
        of_group = [infos[i] for i in group]
        info = of_group[0]._replace(shape=(sum(one.n_elems for one in of_group),))
        wire = None if settings.compression.uncompressed else wire_of(info)
        placement = place(members, info, wire=wire, updated=True)
        found.append(PlannedBucket(tuple(one.id for one in of_group), info, placement))
    return found


def predict(
    workload: Workload, workers: int, link: Link, costs: Costs, settings: StepSettings = DEFAULTS
) -> PlannedStep:
    """Predict one step. Raises ConfigError where it crosses no link."""
    hosts, compute_s = hosts_of(workers, settings.per_host), settings.compute_s
    if len(set(hosts)) < 2:
        raise ConfigError(f"{workers} workers on one host share memory and cross no link: plan for more, or --per-host")
    found, speeds = buckets_of(workload, hosts, settings), settings.speeds_of(workload)
    taken = [_cost_of(bucket, hosts, link, costs, speeds) for bucket in found]
    out_s, in_s = (sum(one.link_s[i] for one in taken) for i in (0, 1))
    core_s = sum(one.core_s for one in taken)
    # In one call the buckets are filled in the order of the forward pass: the last one of the backward pass first.
    ends_s = taken[-1].copy_s + taken[0].copy_s if taken else 0.0
    alone_s = max((one.alone_s for one in taken), default=0.0)
    sent = [np.sum(rank, axis=0) for rank in zip(*(one.sent for one in taken), strict=True)]
    moved = Counter[str]()
    for bucket in found:
        moved[bucket.placement.algorithm] += bucket.info.n_elems
    return PlannedStep(
        "allreduce " + "+".join(name for name, _ in moved.most_common()),
        max(max(out_s, in_s, alone_s) + ends_s, core_s),
        _overlapped_s(workload.ready_s(compute_s), found, taken) if compute_s else None,
        max((int(messages) for messages, _ in sent), default=0),
        max((int(n_bytes) for _, n_bytes in sent), default=0),
        {"link out": out_s, "link in": in_s, "core": core_s},
    )


def _cost_of(bucket: PlannedBucket, hosts: Sequence[str], link: Link, costs: Costs, speeds: Speeds) -> BucketCost:
    """Return what one bucket takes. All ranks of a host use one link; values are copied into a bucket and out of it."""
    p, n_hosts, algorithm, n_bytes = len(hosts), len(set(hosts)), bucket.placement.algorithm, bucket.info.n_bytes
    if algorithm in TO_ALL and n_hosts > 2:
        link = link.to_all()
    counts = [counted(bucket, rank, hosts, speeds) for rank in range(p if p <= EVERY_RANK else hosts.count(hosts[0]))]
    of_hosts = {host: np.zeros(2) for host in hosts[: len(counts)]}
    for half in (half for one in counts for half in one):
        of_hosts[half.hosts[half.rank]] += half.link_s(link)
    out_s, in_s = np.max(list(of_hosts.values()), axis=0)
    copy_s = n_bytes * costs.copy_byte_s
    if bucket.encoded:
        alone_s = _alone_encoded_s(bucket, counts, link, costs, speeds)
    else:
        alone_s = allreduce_s(algorithm, n_bytes, p, link, costs, hosts=n_hosts, segment_bytes=LINK_SEGMENT_BYTES)
    return BucketCost(
        (float(out_s), float(in_s)),
        max(sum(half.core_s(costs) for half in one) for one in counts) + 2 * copy_s,
        copy_s,
        alone_s,
        [(sum(len(half.sent) for half in one), sum(half.sent_bytes for half in one)) for one in counts],
    )


def counted(bucket: PlannedBucket, rank: int, hosts: Sequence[str], speeds: Speeds) -> Halves:
    """Count what one rank sends, receives, encodes, decodes and adds of a bucket in one step."""
    adding, sharing = Counting(rank, hosts), Counting(rank, hosts)
    bounds, buf = bucket.placement.bounds, np.empty(bucket.info.n_elems, DTYPE)
    if bucket.encoded:
        adds, shares = (_encoded(bucket, one, speeds) for one in (adding, sharing))
        adding.run(adds.reduce_scatter(buf, np.add, None, changeable=False))
        sharing.run(shares.allgather((), None))
    else:
        module, everybody = ALGORITHMS[bucket.placement.algorithm], range(len(hosts))
        adding.run(module.reduce_scatter(Group(adding, everybody), buf, bounds, 1, adding.combine))
        sharing.run(module.allgather(Group(sharing, everybody), buf, bounds, 2))
    adding.added_bytes += ITEM_BYTES * (bounds[rank + 1] - bounds[rank])  # the optimizer's
    return adding, sharing


def _encoded(bucket: PlannedBucket, transport: Counting, speeds: Speeds) -> EncodedPath:
    """Make the path of a bucket whose values travel encoded, with codecs that encode nothing."""
    resources = PathResources(Group(transport, range(transport.size)), Spaces())
    path = EncodedPath(resources, bucket.info, bucket.placement, None)
    travels = compressions.of_text(bucket.info.codec)
    path.codec.pushed, path.codec.returned = (
        Pieces(bucket.info, transport.priced(codec, speeds)) for codec in (travels.push, travels.pull)
    )
    return path


def _alone_encoded_s(
    bucket: PlannedBucket, counts: Sequence[Halves], link: Link, costs: Costs, speeds: Speeds
) -> float:
    """Return the time of a bucket by itself whose values travel encoded: of each half the busiest link or core."""
    travels, total_s = compressions.of_text(bucket.info.codec), 0.0
    for i, codec in enumerate((travels.push, travels.pull)):
        halves = [one[i] for one in counts]
        if not any(half.sent for half in halves):
            continue  # all have added all
        elems, speed = min(piece_elems(codec, DTYPE), bucket.info.n_elems), speeds[codec]
        busiest_s = max(max(*half.link_s(link), half.core_s(costs)) for half in halves)
        total_s += link.latency_s + busiest_s + elems * (speed.encode_s + speed.add_s)
    return total_s


def _overlapped_s(ready_s: Sequence[float], found: Sequence[PlannedBucket], taken: Sequence[BucketCost]) -> float:
    """Return the time of a step in which each bucket leaves, in order, when its last gradient is there."""
    link_s, core_s, end_s = 0.0, 0.0, max(ready_s)
    for bucket, one in zip(found, taken, strict=True):
        begin_s = max(ready_s[key] for key in bucket.keys)
        link_s = max(begin_s + one.copy_s, link_s) + max(one.link_s)
        core_s = max(begin_s, core_s) + one.core_s
        end_s = max(end_s, core_s, link_s + one.copy_s, begin_s + one.alone_s + 2 * one.copy_s)
    return end_s
