"""A step with parameter servers, simulated: the real client, server loop, state machine, shards and partitions.

Synchronous (`dist_sync` with servers) and asynchronous (`dist_async`, with servers or with one inside every worker).
All workers begin at the same time; the step ends with the last one's last value.

All servers are simulated. Of more than `EVERY_WORKER` workers `STANDING` stand for all of them: workers do the same at
the same time, so a message of one of them counts at the server, on its link and for its core, as often as there are
workers that it stands for; on the worker's own side it counts once. With synchronous servers nothing is lost thereby
but the order of equal messages, since a server waits for all of them anyway.

Not in it: the optimizer's own arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv import wire
from mpikv.arrays import HostArray
from mpikv.config import Config
from mpikv.engine.request import Done, Predicate, Request, Steps
from mpikv.keys import KeyInfo
from mpikv.placement import Members, add_load, place
from mpikv.plan.blank import Blank, blank
from mpikv.plan.costs import Costs, Link
from mpikv.plan.outcome import Outcome
from mpikv.plan.ranks import Rank
from mpikv.plan.simulation import Simulation
from mpikv.plan.workload import DTYPE, ITEM_BYTES, Workload
from mpikv.server.core import ServerCore
from mpikv.server.loop import serve
from mpikv.server.memory import Pool
from mpikv.server.policy import Asynchronous, Synchronous
from mpikv.strategies.base import Sink
from mpikv.strategies.exchange import Client, ClientKey, Item

EVERY_WORKER = 16  # up to so many workers are all simulated
STANDING = 8  # of more, so many stand for all


def members_of(
    workers: int, servers: int, per_host: int, *, shared: bool = False, simulated: int | None = None
) -> Members:
    """Workers in blocks on their hosts; servers on hosts of their own, as many on each, or on the workers' in turn.

    servers: 0: one inside every worker. simulated: only so many of the workers, the first ones; default all.
    """
    simulated = workers if simulated is None else simulated
    if not servers:
        hosts = tuple(f"h{rank // per_host}" for rank in range(workers))
        return Members(hosts, tuple(range(simulated)), tuple(range(workers)))
    n_hosts = -(-workers // per_host)
    of_workers = [f"h{rank // per_host}" for rank in range(simulated)]
    of_servers = [f"h{i % n_hosts}" if shared else f"s{i // per_host}" for i in range(servers)]
    ranks = range(simulated + servers)
    return Members((*of_workers, *of_servers), tuple(ranks[:simulated]), tuple(ranks[simulated:]))


class _BlankPool(Pool):
    """Memory of a server that holds nothing."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        return self._simulation.blank(n_elems, dtype)

    def give(self, array: HostArray) -> None:
        """Nothing to give back."""


class _BlankSink(Sink):
    """Where a pulled value goes: nowhere."""

    def __init__(self, info: KeyInfo, value: Blank) -> None:
        super().__init__(info, [])
        self._value = value

    def buffer(self) -> HostArray:
        return self._value


def keys_of(workload: Workload, servers: int, config: Config) -> list[ClientKey]:
    """Where the keys live and how they travel."""
    members = Members(("",) * servers, (), tuple(range(servers)), config=config)
    loads, keys = [0] * servers, []
    for number, n_elems in enumerate(workload.sizes):
        info = KeyInfo(number, number, (n_elems,), np.dtype(DTYPE))
        placement = place(members, info, load_bytes=loads)
        add_load(loads, placement, ITEM_BYTES)
        key = ClientKey(info, placement)
        key.pushed = 1
        keys.append(key)
    return keys


def _items(keys: Sequence[ClientKey], make: Callable[[int, Any], Blank], *, push: bool, pull: bool) -> list[Item]:
    items = []
    for key in keys:
        total = make(key.info.n_elems, DTYPE) if push else None
        sink = _BlankSink(key.info, make(key.info.n_elems, DTYPE)) if pull else None
        items.append(Item(key, total, sink))
    return items


class _Counting:
    """A transport on which all is done at once."""

    def __init__(self) -> None:
        self.rank, self.size, self.max_tag = 0, 0, 2**31 - 1
        self.hosts: tuple[str, ...] = ()
        self.sent_messages = self.sent_bytes = 0

    def isend(self, buf: HostArray, dest: int, tag: int) -> Request:
        self.sent_messages += 1
        self.sent_bytes += buf.nbytes
        return Done()

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Request:
        return Done()

    def probe(self, tag: int) -> None:
        return None

    def poll(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to give back."""


def counted(keys: Sequence[ClientKey], servers: int) -> tuple[int, int]:
    """Messages and bytes that one worker sends in one step, by sending them nowhere."""
    transport = _Counting()
    steps = Client(transport, range(servers)).exchange(wire.PUSHPULL, _items(keys, blank, push=True, pull=True), 0)
    for _ in steps:
        pass
    return transport.sent_messages, transport.sent_bytes


def mode_of(servers: int, *, synchronous: bool) -> str:
    """What `simulate` calls it."""
    return ("servers, " if servers else "in workers, ") + ("sync" if synchronous else "async")


def simulate(
    workload: Workload,
    workers: int,
    servers: int,
    link: Link,
    costs: Costs,
    *,
    synchronous: bool = True,
    per_host: int = 1,
    shared: bool = False,
    config: Config | None = None,
    compute_s: float = 0.0,
    standing: int | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Outcome:
    """One step. servers: 0: one inside every worker. shared: servers are on the workers' hosts.

    standing: so many workers stand for all; default by their number.
    """
    config = Config() if config is None else config
    if standing is None:
        # Whole hosts, so that a host's link has as many workers as in truth.
        standing = workers if workers <= max(EVERY_WORKER, per_host) else -(-STANDING // per_host) * per_host
    weight = workers / standing
    keys = keys_of(workload, servers or workers, config)
    messages, sent_bytes = counted(keys, servers or workers)
    members = members_of(workers, servers, per_host, shared=shared, simulated=standing)

    def run(ready_s: Sequence[float] | None) -> Simulation:
        simulation = Simulation(
            members.hosts,
            link,
            costs,
            servers=set(members.servers[0 if servers else standing :]),
            weight=weight,
            alive=alive,
        )
        for index, server in enumerate(members.servers):
            _serve(simulation, simulation.ranks[server], members, index, keys, synchronous=synchronous)
        for worker in members.workers:
            rank = simulation.ranks[worker]
            _start(
                simulation,
                rank,
                Client(rank, members.servers),
                keys,
                None if ready_s is None else (ready_s, compute_s),
            )
        simulation.run()
        return simulation

    def end_s(simulation: Simulation) -> float:
        return max(simulation.ranks[rank].finished_s for rank in members.workers)

    simulation = run(None)
    overlapped_s = max(compute_s, end_s(run(workload.ready_s(compute_s)))) if compute_s else None
    busy_s = {}
    roles = {"worker": members.workers, "server": members.servers} if servers else {"worker": members.servers}
    for role, ranks in roles.items():
        uses = [simulation.use(rank) for rank in ranks]
        if uses:
            busy_s[f"{role} link out"] = max(use.out_s for use in uses)
            busy_s[f"{role} link in"] = max(use.in_s for use in uses)
            busy_s[f"{role} core"] = max(use.core_s for use in uses)
    how = "" if standing == workers else f"{standing} of {workers} workers stand for all"
    mode = mode_of(servers, synchronous=synchronous)
    return Outcome(mode, end_s(simulation), overlapped_s, messages, sent_bytes, busy_s, how)


def _serve(
    simulation: Simulation,
    rank: Rank,
    members: Members,
    index: int,
    keys: Sequence[ClientKey],
    *,
    synchronous: bool,
) -> None:
    """A server with its keys."""
    labels = [f"worker {i}" for i in range(len(members.workers))]
    core = ServerCore(labels, Synchronous if synchronous else Asynchronous)
    core.pool = _BlankPool(simulation)
    for key in keys:
        for shard in key.placement.shards:
            if shard.owner == index:
                info = key.info
                text = {"key": info.key, "shape": info.shape, "dtype": str(info.dtype), "begin": shard.begin}
                text |= {"part": key.placement.part_elems, "version": 0}
                value = bytes((shard.end - shard.begin) * ITEM_BYTES)
                payload = np.frombuffer(wire.with_text(json.dumps(text).encode(), value), np.uint8)
                core.handle(0, [(wire.Header(wire.INIT, info.id), payload)])
    rank.serve(serve(rank, members.workers, core))


def _start(
    simulation: Simulation,
    rank: Rank,
    client: Client,
    keys: Sequence[ClientKey],
    computing: tuple[Sequence[float], float] | None,
) -> None:
    """Let a worker push and pull all keys in one call, or push each when its gradient is there and then pull them.

    computing: when the gradients are there, and when the computing ends.
    """

    def begin(kind: int, some: Sequence[ClientKey], *, push: bool, pull: bool) -> Callable[[float], None]:
        def start() -> Steps[None]:
            return client.exchange(kind, _items(some, simulation.blank, push=push, pull=pull), 0)

        return lambda time_s: rank.work(time_s, lambda: _ignore(rank.start(start())))

    if computing is None:
        simulation.at(0.0, begin(wire.PUSHPULL, keys, push=True, pull=True))
        return
    ready_s, compute_s = computing
    rank.computing_until_s = compute_s
    for key in reversed(keys):
        simulation.at(ready_s[key.info.id], begin(wire.PUSH, [key], push=True, pull=False))
    pulls = _pulls(simulation, rank, client, keys)
    simulation.at(compute_s, lambda time_s: rank.work(time_s, lambda: rank.serve(pulls)))


def _pulls(simulation: Simulation, rank: Rank, client: Client, keys: Sequence[ClientKey]) -> Steps[None]:
    """Pull key after key, each as soon as there are tags for its answers, as in `PsStrategy`."""
    for key in keys:
        items = _items([key], simulation.blank, push=False, pull=True)
        replies = client.tags_needed(items)[0]

        def enough(replies: int = replies) -> bool:
            return client.reply_tags.allow(replies)

        yield Predicate(enough)
        rank.start(client.exchange(wire.PULL, items, 0))


def _ignore(_running: object) -> None:
    pass
