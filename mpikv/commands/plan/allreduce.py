"""A step of `dist_sync` without servers: its time from counted messages and the algorithms' published costs.

As a `Trainer` does it: keys that share a bucket travel together, and all buckets are under way at the same time. So a
step takes as long as what has most to do: the busiest host's link, out or in, or the busiest core, of which the sums
over all buckets are counted (`counting.py`). But it takes no less than one bucket does by itself, whose steps follow
each other. With the cost model of Hockney, a message of m bytes takes a + m b and m bytes are added in m c; p ranks, h
hosts, n bytes:

    algorithm           steps, one after another          each of them
    naive               2                                 a + (p-1) n/p b
    ring                2 (p-1)                           a + s b + s/2 c      s: n/p, or a segment of it
    halving_doubling    2 floor(log2 p), 2 more with      a + m b + m/2 c      m: n/2, n/4, ... n/p; n with folded ranks
                        folded ranks
    hierarchical        2 (h-1), and 2 within the host    as ring
    owners, gather      2, or 1                           a + (p-1) w b, or a core's work where that is longer; and one
                                                          piece encoded and decoded; w: of n/p, or n, encoded

Here a is the latency (three times that of a message which is announced first) and the work of two cores for a message,
b the link's and two cores' time for a byte; the link's is longer where several hosts send to one at the same time, in
naive, owners and gather (`costs.py`). To that comes what cannot go on beside anything: copying into the first
bucket, and out of the last one.

Sources: ring: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), section 3; the other terms: Thakur,
Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005), sections 3 and 4 (MPICH's choice rests on it, and
Gloo's halving and doubling has the same); level by level: Cho, Finkler, Kung and Hunter, BlueConnect, SysML (2019);
what is under way together: the longest of the sums, as in Bailey's and Williams' roofline, CACM 52 (2009).

Not in it: naps of waiting ranks, up to half a millisecond for each step of a short exchange; the optimizer's own
arithmetic beyond one addition for each owned byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mpikv.codecs import compression as compressions
from mpikv.codecs.compression import Compression, wire_of
from mpikv.collectives.select import ALGORITHMS
from mpikv.collectives.stages import LINK_SEGMENT_BYTES
from mpikv.commands.plan.costs import EAGER_BYTES, Costs, Link
from mpikv.commands.plan.counting import Counting
from mpikv.commands.plan.outcome import Outcome
from mpikv.commands.plan.priced import Priced, Speeds, of_shapes
from mpikv.commands.plan.workload import DTYPE, ITEM_BYTES, Workload
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement import buckets
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.place import place
from mpikv.placement.placement import Placement
from mpikv.spaces.named import Spaces
from mpikv.strategies.bucketed import kind_of
from mpikv.strategies.encoded_path import EncodedPath
from mpikv.strategies.key_path import Means
from mpikv.strategies.pieces import Pieces, piece_elems
from mpikv.transports.base import Group

EVERY_RANK = 16  # up to so many are all counted; of more, those of the first host


class Bucket(NamedTuple):
    """Keys that travel together: which, what they are together, where that lives. updated: an optimizer serves them."""

    keys: tuple[int, ...]
    info: KeyInfo
    placement: Placement
    updated: bool = True

    @property
    def n_elems(self) -> int:
        """How many values they have."""
        return self.info.n_elems

    @property
    def n_bytes(self) -> int:
        """How many bytes the bucket's values have."""
        return ITEM_BYTES * self.n_elems

    @property
    def encoded(self) -> bool:
        """Whether they travel encoded."""
        return self.placement.path == "encoded"

    @property
    def to_all(self) -> bool:
        """Whether each worker sends to all others at the same time, and not to one after the other."""
        return self.placement.algorithm in ("naive", "owners", "gather")


class Busy(NamedTuple):
    """For how many seconds the busiest host or rank works."""

    out_s: float = 0.0
    in_s: float = 0.0
    core_s: float = 0.0

    def with_more(self, other: Busy) -> Busy:
        """Return the seconds of both together."""
        return Busy(*(one + another for one, another in zip(self, other, strict=True)))


def hosts_of(workers: int, per_host: int) -> tuple[str, ...]:
    """Return the host of each worker, in blocks of neighbours."""
    return tuple(f"h{rank // per_host}" for rank in range(workers))


class Step(NamedTuple):
    """How keys travel in a step. bucketed: several together, as a `Trainer` lets them. updated: by an optimizer.

    speeds: of the codecs.
    """

    compression: Compression = compressions.NONE
    bucketed: bool = True
    updated: bool = True
    speeds: Speeds = MappingProxyType({})


AS_IT_IS = Step()


def buckets_of(
    workload: Workload, hosts: Sequence[str], algorithm: str = "auto", step: Step = AS_IT_IS
) -> list[Bucket]:
    """Return the buckets of a trainer's keys, in the order in which a backward pass completes them."""
    order = [key for key in reversed(range(len(workload.sizes))) if workload.sizes[key]]
    infos = []
    for key in order:
        shape = workload.shapes[key]
        infos.append(KeyInfo(key, key, shape, np.dtype(DTYPE), step.compression.for_shape(shape).text))
    members = Members(tuple(hosts), tuple(range(len(hosts))), config=Config(algorithm=algorithm))
    found = []
    together = buckets.plan([info.n_bytes for info in infos], [kind_of(info) for info in infos])
    for group in together if step.bucketed else [[i] for i in range(len(infos))]:
        keys, n_elems = tuple(order[i] for i in group), sum(infos[i].n_elems for i in group)
        info = infos[group[0]]._replace(shape=(n_elems,))
        wire = None if step.compression.plain else wire_of(info)
        placement = place(members, info, wire=wire, updated=step.updated)
        found.append(Bucket(keys, info, placement, step.updated))
    return found


def predict(
    workload: Workload,
    workers: int,
    link: Link,
    costs: Costs,
    *,
    per_host: int = 1,
    algorithm: str = "auto",
    compute_s: float = 0.0,
    step: Step = AS_IT_IS,
) -> Outcome:
    """Predict one step. Raises ConfigError where it crosses no link."""
    hosts = hosts_of(workers, per_host)
    if len(set(hosts)) < 2:
        raise ConfigError(f"{workers} workers on one host share memory and cross no link: plan for more, or --per-host")
    step = step._replace(speeds=of_shapes(step.speeds, workload.shapes))
    found = buckets_of(workload, hosts, algorithm, step)
    ranks = range(workers if workers <= EVERY_RANK else per_host)
    counts = [[counted(bucket, rank, hosts, step.speeds) for rank in ranks] for bucket in found]
    links = [link.to_all() if bucket.to_all and len(set(hosts)) > 2 else link for bucket in found]
    busy = [_busy(*each, costs) for each in zip(found, counts, links, strict=True)]
    total = Busy()
    for one in busy:
        total = total.with_more(one)
    alone_s = [
        alone_encoded(bucket, one, its, costs, step.speeds) if bucket.encoded else alone(bucket, hosts, its, costs)
        for bucket, one, its in zip(found, counts, links, strict=True)
    ]
    # In one call the buckets are filled in the order of the forward pass: the last one of the backward pass first.
    ends_s = costs.copy_byte_s * (found[-1].n_bytes + found[0].n_bytes) if found else 0.0
    exchange_s = max(max(total[:2]) + ends_s, total.core_s, *(time_s + ends_s for time_s in alone_s), 0.0)
    return Outcome(
        _mode(found),
        exchange_s,
        _overlapped_s(workload.ready_s(compute_s), found, busy, alone_s, costs) if compute_s else None,
        max((sum(half.sent_messages for one in counts for half in one[i]) for i in ranks), default=0),
        max((sum(half.sent_bytes for one in counts for half in one[i]) for i in ranks), default=0),
        {"link out": total.out_s, "link in": total.in_s, "core": total.core_s},
    )


Halves = tuple[Counting, Counting]
"""What one rank does until its part of the sum is there, and what it does to bring the result to all."""


def counted(bucket: Bucket, rank: int, hosts: Sequence[str], speeds: Speeds) -> Halves:
    """Count what one rank sends, receives, encodes, decodes and adds of a bucket in one step."""
    adding, sharing = Counting(rank, hosts), Counting(rank, hosts)
    bounds, buf = bucket.placement.bounds, np.empty(bucket.n_elems, DTYPE)
    if bucket.encoded:
        adds, shares = (_encoded(bucket, one, speeds) for one in (adding, sharing))
        adding.run(adds.begin(buf, np.add, None, changeable=False))
        sharing.run(shares.end((), None))
    else:
        module, everybody = ALGORITHMS[bucket.placement.algorithm], range(len(hosts))
        adding.run(module.reduce_scatter(Group(adding, everybody), buf, bounds, 1, adding.combine))
        sharing.run(module.allgather(Group(sharing, everybody), buf, bounds, 2))
    if bucket.updated:
        adding.added_bytes += ITEM_BYTES * (bounds[rank + 1] - bounds[rank])  # the optimizer's
    return adding, sharing


def _encoded(bucket: Bucket, transport: Counting, speeds: Speeds) -> EncodedPath:
    """Make the path of a bucket whose values travel encoded, with codecs that encode nothing."""
    means = Means(Group(transport, range(transport.size)), Spaces())
    path = EncodedPath(means, bucket.info, bucket.placement, None)
    travels = compressions.of_text(bucket.info.codec)
    path.codec.pushed, path.codec.returned = (
        Pieces(bucket.info, Priced(codec, speeds[codec], transport.spend)) for codec in (travels.push, travels.pull)
    )
    return path


def _busy(bucket: Bucket, counts: Sequence[Halves], link: Link, costs: Costs) -> Busy:
    """Return the work that one bucket makes.

    All ranks of a host use one link; values are copied into a bucket and out of it.
    """
    out_s: dict[str, float] = {}
    in_s: dict[str, float] = {}
    for half in (half for one in counts for half in one):
        host, (out, into) = half.hosts[half.rank], half.link_s(link)
        out_s[host], in_s[host] = out_s.get(host, 0.0) + out, in_s.get(host, 0.0) + into
    core_s = max(sum(half.core_s(costs) for half in one) for one in counts) + 2 * bucket.n_bytes * costs.copy_byte_s
    return Busy(max(out_s.values()), max(in_s.values()), core_s)


def alone(bucket: Bucket, hosts: Sequence[str], link: Link, costs: Costs) -> float:
    """Return the time of one bucket when nothing else is under way and no link is full: the table at the top."""
    p, n_hosts, n_bytes = len(hosts), len(set(hosts)), bucket.n_bytes

    def step_s(message_bytes: float, messages: int = 1) -> float:
        latency_s = link.latency_s * (3 if message_bytes > EAGER_BYTES else 1)
        one_s = (
            link.time_s(int(message_bytes)) + 2 * message_bytes * costs.byte_s + message_bytes / 2 * costs.add_byte_s
        )
        return latency_s + messages * one_s + (1 + messages) * costs.message_s

    algorithm, segment = bucket.placement.algorithm, min(n_bytes / p, LINK_SEGMENT_BYTES)
    if algorithm == "naive":
        return 2 * step_s(n_bytes / p, p - 1)
    if algorithm == "ring":
        return 2 * (p - 1) * step_s(segment)
    if algorithm == "hierarchical":
        return 2 * (n_hosts - 1) * step_s(segment) + 2 * costs.message_s * (p // n_hosts)
    halvings = p.bit_length() - 1
    folds_s = 2 * step_s(n_bytes) if p != 1 << halvings else 0.0
    return 2 * sum(step_s(n_bytes / 2**i) for i in range(1, halvings + 1)) + folds_s


def alone_encoded(bucket: Bucket, counts: Sequence[Halves], link: Link, costs: Costs, speeds: Speeds) -> float:
    """Return the same where values travel encoded: a half takes as long as the link or the core of the busiest rank."""
    travels, total_s = compressions.of_text(bucket.info.codec), 0.0
    for i, codec in enumerate((travels.push, travels.pull)):
        halves = [one[i] for one in counts]
        if not any(half.out or half.out_here for half in halves):
            continue  # all have added all
        elems, speed = min(piece_elems(codec, bucket.info.dtype), bucket.n_elems), speeds[codec]
        busiest_s = max(max(*half.link_s(link), half.core_s(costs)) for half in halves)
        total_s += link.latency_s + busiest_s + elems * (speed.encode_s + speed.add_s)
    return total_s


def _overlapped_s(
    ready_s: Sequence[float],
    found: Sequence[Bucket],
    busy: Sequence[Busy],
    alone_s: Sequence[float],
    costs: Costs,
) -> float:
    """Return the time of a step in which each bucket leaves, in order, when its last gradient is there."""
    link_s, core_s, end_s = 0.0, 0.0, max(ready_s)
    for bucket, one, least_s in zip(found, busy, alone_s, strict=True):
        begin_s, copy_s = max(ready_s[key] for key in bucket.keys), bucket.n_bytes * costs.copy_byte_s
        link_s = max(begin_s + copy_s, link_s) + max(one[:2])
        core_s = max(begin_s, core_s) + one.core_s
        end_s = max(end_s, core_s, link_s + copy_s, begin_s + least_s + 2 * copy_s)
    return end_s


def mode_of(
    workload: Workload, workers: int, *, per_host: int = 1, algorithm: str = "auto", step: Step = AS_IT_IS
) -> str:
    """Return what `predict` will call it: `allreduce` and its algorithms."""
    return _mode(buckets_of(workload, hosts_of(workers, per_host), algorithm, step))


def _mode(found: Sequence[Bucket]) -> str:
    """Name the algorithms, those that move most bytes first."""
    moved: dict[str, int] = {}
    for bucket in found:
        name = bucket.placement.algorithm
        moved[name] = moved.get(name, 0) + bucket.n_elems
    names = sorted(moved, key=lambda name: -moved[name])
    return "allreduce " + "+".join(names)
