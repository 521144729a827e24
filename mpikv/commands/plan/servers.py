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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import compression as compressions
from mpikv.codecs.compression import Codecs, Compression
from mpikv.commands.plan.costs import Costs, Link
from mpikv.commands.plan.counting import Counting
from mpikv.commands.plan.outcome import Outcome
from mpikv.commands.plan.priced import Speeds, of_shapes, priced
from mpikv.commands.plan.ranks import Rank
from mpikv.commands.plan.simulation import Simulation
from mpikv.commands.plan.workload import DTYPE, ITEM_BYTES, Workload
from mpikv.config import Config
from mpikv.engine.request import Predicate, Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.on_servers import add_load
from mpikv.placement.place import place
from mpikv.server.core import ServerCore
from mpikv.server.loop import serve
from mpikv.server.memory import Pool
from mpikv.server.policy import Asynchronous, Synchronous
from mpikv.spaces.host import HostSpace
from mpikv.spaces.named import Spaces
from mpikv.strategies.base import Sink
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.exchange import Client, Item
from mpikv.transports import wire

EVERY_WORKER = 16  # up to so many workers are all simulated
STANDING = 8  # of more, so many stand for all


def members_of(
    workers: int, servers: int, per_host: int, *, shared: bool = False, simulated: int | None = None
) -> Members:
    """Place workers in blocks on their hosts, and servers on hosts of their own or, in turn, on the workers' hosts.

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


class _Memory(Pool):
    """The memory of servers whose values nobody looks at: all arrays lie in `array`, and adding only costs time."""

    def __init__(self, simulation: Simulation, array: HostArray) -> None:
        super().__init__(None, HostSpace())
        self._simulation = simulation
        self._array = array

    def take(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        return self._array[:n_elems] if dtype == self._array.dtype else np.empty(n_elems, dtype)

    def give(self, array: HostArray) -> None:
        """Do nothing: there is nothing to give back."""

    def copy(self, values: HostArray) -> HostArray:
        return self._array[: values.size]

    def combine(self, total: HostArray, other: HostArray, how: np.ufunc) -> HostArray:
        self._simulation.added(total.nbytes)
        return total


class _Arrays:
    """What workers push, and what they pull into: two arrays for all keys, since nobody looks at the values."""

    def __init__(self, keys: Sequence[ClientKey]) -> None:
        longest = max((key.info.n_elems for key in keys), default=0)
        self._totals: HostArray = np.empty(longest, DTYPE)
        self._values: HostArray = np.empty(longest, DTYPE)

    def items(self, keys: Sequence[ClientKey], *, push: bool, pull: bool) -> list[Item]:
        """Return the items of one call."""
        return [
            Item(
                key,
                self._totals[: key.info.n_elems] if push else None,
                _IgnoringSink(key.info, self._values[: key.info.n_elems]) if pull else None,
                key.routes,
                key.pushed,
                plain=wire.PLAIN_ANSWER if key.plain else 0,
            )
            for key in keys
        ]


class _IgnoringSink(Sink):
    """Takes a pulled value and drops it."""

    def __init__(self, info: KeyInfo, value: HostArray) -> None:
        super().__init__(info, [], Spaces())
        self._value = value

    def buffer(self) -> HostArray:
        return self._value


def keys_of(
    workload: Workload,
    servers: int,
    config: Config,
    compression: Compression = compressions.NONE,
    codecs: Codecs = compressions.of_text,
) -> list[ClientKey]:
    """Return where the keys live and how they travel. codecs: makes their codecs, of a text."""
    members = Members(("",) * servers, (), tuple(range(servers)), config=config)
    loads, keys = [0] * servers, []
    for number, shape in enumerate(workload.shapes):
        info = KeyInfo(number, number, shape, np.dtype(DTYPE), compression.for_shape(shape).text)
        placement = place(members, info, load_bytes=loads, wire=compressions.wire_of(info))
        add_load(loads, placement, ITEM_BYTES)
        keys.append(ClientKey(info, placement, codecs))
    return keys


def counted(keys: Sequence[ClientKey], servers: int) -> tuple[int, int]:
    """Count the messages and bytes that one worker sends in one step."""
    transport = Counting()
    for key in keys:
        key.pushed = 1
    items = _Arrays(keys).items(keys, push=True, pull=True)
    transport.run(Client(transport, range(servers)).exchange(wire.PUSHPULL, items, 0))
    return transport.sent_messages, transport.sent_bytes


def mode_of(servers: int, *, synchronous: bool) -> str:
    """Return what `simulate` calls it."""
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
    compression: Compression = compressions.NONE,
    speeds: Speeds | None = None,
    standing: int | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Outcome:
    """Simulate one step.

    servers: 0: one inside every worker. shared: servers are on the workers' hosts. compression: of all keys, by codecs
    of these speeds. standing: so many workers stand for all of them; by default their number decides.
    """
    config = Config() if config is None else config
    if standing is None:
        # Whole hosts, so that a host's link has as many workers as in truth.
        standing = workers if workers <= max(EVERY_WORKER, per_host) else -(-STANDING // per_host) * per_host
    weight = workers / standing
    of_codecs = of_shapes({} if speeds is None else speeds, workload.shapes)

    def codecs(spend: Callable[[float], None]) -> Codecs:
        return lambda text: priced(compressions.of_text(text), of_codecs, spend)

    def keys(spend: Callable[[float], None]) -> list[ClientKey]:
        return keys_of(workload, servers or workers, config, compression, codecs(spend))

    messages, sent_bytes = counted(keys(lambda _: None), servers or workers)
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
        of_workers = keys(simulation.worked)
        _serve(simulation, members, of_workers, codecs(simulation.worked), synchronous=synchronous)
        for worker in members.workers:
            rank = simulation.ranks[worker]
            _start(
                simulation,
                rank,
                Client(rank, members.servers),
                of_workers,
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
    simulation: Simulation, members: Members, keys: Sequence[ClientKey], codecs: Codecs, *, synchronous: bool
) -> None:
    """Start all servers, with their keys."""
    labels = [f"worker {i}" for i in range(len(members.workers))]
    longest = max((key.info.n_elems for key in keys), default=0)
    values: HostArray = np.zeros(longest, DTYPE)
    policy = Synchronous if synchronous else Asynchronous
    cores = [ServerCore(labels, policy, codecs=codecs) for _ in members.servers]
    for core in cores:
        core.pool = _Memory(simulation, values)
    for key in keys:
        for owner, header, payload in key.first_values(values):
            cores[owner].handle(0, [(header, np.frombuffer(payload, np.uint8))])
        key.pushed = 1
    for rank, core in zip(members.servers, cores, strict=True):
        simulation.ranks[rank].serve(serve(simulation.ranks[rank], members.workers, core))


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

    arrays = _Arrays(keys)

    def begin(kind: int, some: Sequence[ClientKey], *, push: bool, pull: bool) -> Callable[[float], None]:
        def start() -> Steps[None]:
            return client.exchange(kind, arrays.items(some, push=push, pull=pull), 0)

        return lambda time_s: rank.work(time_s, lambda: _ignore(rank.start(start())))

    if computing is None:
        simulation.at(0.0, begin(wire.PUSHPULL, keys, push=True, pull=True))
        return
    ready_s, compute_s = computing
    rank.computing_until_s = compute_s
    for key in reversed(keys):
        simulation.at(ready_s[key.info.id], begin(wire.PUSH, [key], push=True, pull=False))
    pulls = _pulls(rank, client, keys, arrays)
    simulation.at(compute_s, lambda time_s: rank.work(time_s, lambda: rank.serve(pulls)))


def _pulls(rank: Rank, client: Client, keys: Sequence[ClientKey], arrays: _Arrays) -> Steps[None]:
    """Pull key after key, each as soon as there are free tags for its answers."""
    for key in keys:
        items = arrays.items([key], push=False, pull=True)
        yield Predicate(partial(client.allows, *client.tags_needed(items)))
        rank.start(client.exchange(wire.PULL, items, 0))


def _ignore(_running: object) -> None:
    pass
