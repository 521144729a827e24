"""A step of `dist_sync` without servers, simulated: the real buckets, choice of algorithms and collectives.

As a `Trainer` does it: keys that share a bucket travel together, each bucket goes through reduce-scatter and allgather
in a lane of its own. With one way of the ring taking as long for every rank, all ranks do the same at the same time:
above `EVERY_RANK` ranks only the first host is simulated (`simulation.py`), each lane rounded up to an equal number of
elements for every rank. Where halving and doubling would fold ranks that is not so, and all ranks are simulated.

Not in it: the optimizer's own arithmetic beyond one addition for each owned byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpikv import buckets, wire
from mpikv.collectives.select import ALGORITHMS
from mpikv.config import Config
from mpikv.engine.request import Steps
from mpikv.errors import ConfigError
from mpikv.keys import KeyInfo
from mpikv.placement import Members, Placement, place
from mpikv.plan.costs import Costs, Link
from mpikv.plan.outcome import Outcome
from mpikv.plan.ranks import Rank
from mpikv.plan.simulation import Simulation
from mpikv.plan.workload import DTYPE, ITEM_BYTES, Workload
from mpikv.transports.base import Group

EVERY_RANK = 8  # up to so many are all simulated
MOST_MESSAGES = 3_000_000  # some minutes


class Lane(NamedTuple):
    """Keys that travel together: their number and elements, which keys they are, and their placement."""

    key_id: int
    n_elems: int
    keys: tuple[int, ...]
    placement: Placement

    @property
    def algorithm(self) -> str:
        """How its values are added."""
        return self.placement.algorithm


def hosts_of(workers: int, per_host: int) -> tuple[str, ...]:
    """The host of each worker, in blocks of neighbours."""
    return tuple(f"h{rank // per_host}" for rank in range(workers))


def lanes_of(workload: Workload, hosts: Sequence[str], algorithm: str = "auto") -> list[Lane]:
    """The lanes of a trainer's keys, in the order in which a backward pass completes them."""
    order = [key for key in reversed(range(len(workload.sizes))) if workload.sizes[key]]
    sizes = [workload.sizes[key] for key in order]
    groups = buckets.plan([ITEM_BYTES * n for n in sizes], [DTYPE] * len(sizes))
    lanes = []
    for group in groups:
        keys, n_elems = tuple(order[i] for i in group), sum(sizes[i] for i in group)
        lanes.append(_lane(keys, n_elems, hosts, algorithm))
    return lanes


def _lane(keys: tuple[int, ...], n_elems: int, hosts: Sequence[str], algorithm: str) -> Lane:
    info = KeyInfo(keys[0], keys[0], (n_elems,), np.dtype(DTYPE))
    members = Members(tuple(hosts), tuple(range(len(hosts))), config=Config(algorithm=algorithm))
    return Lane(keys[0], n_elems, keys, place(members, info))


def simulate(
    workload: Workload,
    workers: int,
    link: Link,
    costs: Costs,
    *,
    per_host: int = 1,
    algorithm: str = "auto",
    compute_s: float = 0.0,
    every_rank: bool | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Outcome:
    """One step. every_rank: simulate all of them, or the first host's alone (default: by their number).

    Raises ConfigError where this cannot be simulated.
    """
    hosts = hosts_of(workers, per_host)
    if len(set(hosts)) < 2:
        raise ConfigError(f"{workers} workers on one host share memory and cross no link: plan for more, or --per-host")
    lanes = lanes_of(workload, hosts, algorithm)
    alike = _alike(lanes, workers, per_host)
    if every_rank is False and not alike:
        raise ConfigError("ranks that do not do the same: all must be simulated")
    symmetric = alike and (workers > EVERY_RANK if every_rank is None else not every_rank)
    if symmetric:
        lanes = [_lane(lane.keys, -(-lane.n_elems // workers) * workers, hosts, lane.algorithm) for lane in lanes]
    elif _messages(lanes, workers) > MOST_MESSAGES:
        raise ConfigError(
            f"{workers} workers: too many messages to simulate every rank; with a power of two workers, as many on "
            "every host, and no algorithm forced, one host stands for all"
        )

    def run(ready_s: Sequence[float] | None) -> Simulation:
        simulation = Simulation(hosts, link, costs, symmetric=symmetric, alive=alive)
        simulation.xor_keys.update(lane.key_id for lane in lanes if _by_xor(lane, hosts, per_host))
        for rank in simulation.ranks:
            _start(simulation, rank, lanes, ready_s, compute_s)
        simulation.run()
        return simulation

    simulation = run(None)
    exchange_s = max(rank.finished_s for rank in simulation.ranks)
    overlapped_s = None
    if compute_s:
        ready_s = workload.ready_s(compute_s)
        overlapped_s = max(compute_s, *(rank.finished_s for rank in run(ready_s).ranks))
    uses = [simulation.use(rank.rank) for rank in simulation.ranks]
    busy_s = {
        "link out": max(use.out_s for use in uses),
        "link in": max(use.in_s for use in uses),
        "core": max(use.core_s for use in uses),
    }
    return Outcome(
        _mode(lanes),
        exchange_s,
        overlapped_s,
        max(rank.sent_messages for rank in simulation.ranks),
        max(rank.sent_bytes for rank in simulation.ranks),
        busy_s,
        f"{per_host} of {workers} ranks, all alike" if symmetric else "",
    )


def _start(
    simulation: Simulation, rank: Rank, lanes: Sequence[Lane], ready_s: Sequence[float] | None, compute_s: float
) -> None:
    """Let a rank push all lanes at once, or each when its last gradient is there."""
    group = Group(rank, range(rank.size))

    def push(lane: Lane) -> None:
        # Into the lane's buffer.
        simulation.copied(ITEM_BYTES * lane.n_elems)
        rank.start(_round(simulation, group, lane))

    if ready_s is None:
        # `pushpull` has the keys in the order of the forward pass, so the last bucket is complete first.
        def push_all() -> None:
            for lane in reversed(lanes):
                push(lane)

        simulation.at(0.0, lambda time_s: rank.work(time_s, push_all))
        return
    rank.computing_until_s = compute_s
    for lane in lanes:
        begin_s = max(ready_s[key] for key in lane.keys)
        simulation.at(begin_s, lambda time_s, lane=lane: rank.work(time_s, lambda: push(lane)))  # type: ignore[misc]


def _round(simulation: Simulation, group: Group, lane: Lane) -> Steps[None]:
    """What `AllreduceStrategy` does with a lane."""
    bounds = lane.placement.bounds
    module = ALGORITHMS[lane.algorithm]
    buf = simulation.blank(lane.n_elems, DTYPE)
    yield from module.reduce_scatter(group, buf, bounds, wire.key_tag(lane.key_id, 1))
    simulation.added(ITEM_BYTES * (bounds[group.rank + 1] - bounds[group.rank]))
    yield from module.allgather(group, buf, bounds, wire.key_tag(lane.key_id, 2))
    simulation.copied(ITEM_BYTES * lane.n_elems)  # to where it was asked for


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _by_xor(lane: Lane, hosts: Sequence[str], per_host: int) -> bool:
    """Whether partners across hosts are told by xor."""
    if lane.algorithm == "hierarchical":
        # Its short buffers go through halving and doubling where no host is folded.
        from mpikv.collectives.hierarchical import DIRECT_HOSTS, SHORT_BYTES  # noqa: PLC0415

        n_hosts = len(hosts) // per_host
        short = ITEM_BYTES * lane.n_elems <= SHORT_BYTES * per_host
        return short and n_hosts > DIRECT_HOSTS and _power_of_two(n_hosts)
    return lane.algorithm == "halving_doubling"


def _alike(lanes: Sequence[Lane], workers: int, per_host: int) -> bool:
    """Whether all hosts do the same at the same time.

    Not where some ranks are folded, and not in long exchanges of all with all at once, where the order counts in which
    a rank looks after the others.
    """
    used = {lane.algorithm for lane in lanes}
    folds = not _power_of_two(workers) and "halving_doubling" in used
    return workers % per_host == 0 and not folds and "naive" not in used


def _messages(lanes: Sequence[Lane], workers: int) -> float:
    steps = {"halving_doubling": math.ceil(math.log2(workers)) + 1}
    return sum(2 * workers * steps.get(lane.algorithm, workers - 1) for lane in lanes)


def mode_of(workload: Workload, workers: int, *, per_host: int = 1, algorithm: str = "auto") -> str:
    """What `simulate` will call it: `allreduce` and its algorithms."""
    return _mode(lanes_of(workload, hosts_of(workers, per_host), algorithm))


def _mode(lanes: Sequence[Lane]) -> str:
    """The algorithms by the bytes that they move."""
    moved: dict[str, int] = {}
    for lane in lanes:
        moved[lane.algorithm] = moved.get(lane.algorithm, 0) + lane.n_elems
    names = sorted(moved, key=lambda name: -moved[name])
    return "allreduce " + "+".join(names)
