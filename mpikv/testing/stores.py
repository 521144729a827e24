"""Stores over thread ranks: the same strategies and servers as under mpirun, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from mpikv import spec as store_spec
from mpikv.config import Config
from mpikv.hostmemory.segment import HostMemory, private_memory
from mpikv.kv import members_of, server_core, server_links, worker_strategy
from mpikv.kvstore import KVStore
from mpikv.server.loop import run_server
from mpikv.server.roles import assign
from mpikv.testing.ranks import spawn
from mpikv.transports.base import Transport
from mpikv.transports.threads import Fabric

T = TypeVar("T")

TEST_TIMEOUT_S = 20.0  # far above what a healthy wait takes, far below a test runner's patience


def spawn_stores(
    name: str,
    num_workers: int,
    body: Callable[[KVStore], T],
    *,
    num_servers: int = 0,
    config: Config | None = None,
    hosts: Sequence[str] | None = None,
    fabric: Fabric | None = None,
) -> list[T]:
    """Run `body(store)` on thread ranks that are workers of one store, and return its results in worker order.

    fabric: what they talk over, such as a `FaultyFabric`, in place of a new one on these hosts.
    The store is closed after `body` unless `body` raised. Raises RankError (see `spawn`) with ranks of the transport.
    """
    spec = store_spec.parse(name)
    config = Config(timeout_s=TEST_TIMEOUT_S) if config is None else config
    size = num_workers + num_servers
    roles = assign(hosts or ["localhost"] * size, num_servers, config.server_placement)

    places = hosts or ["localhost"] * size
    memories: dict[str, Iterator[HostMemory]] = {}
    members = members_of(places, roles, spec, config)
    mine: list[HostMemory | None] = [None] * size
    if members.shares_memory:
        memories = {host: iter(private_memory(list(places).count(host))) for host in dict.fromkeys(places)}
        mine = [next(memories[host]) for host in places]

    def rank_body(transport: Transport) -> T | None:
        memory = mine[transport.rank]
        links = None if memory is None or members.path != "servers" else server_links(transport, memory, roles, config)
        if transport.rank in roles.servers:
            core = server_core(transport.hosts, roles, spec, links)
            run_server(transport if links is None else links, roles.workers, core, config.timeout_s)
            return None
        fatal: list[BaseException] = []
        threaded = config.progress == "thread"
        strategy = worker_strategy(
            transport, roles, spec, config, threaded=threaded, on_fatal=fatal.append, memory=memory, links=links
        )
        store = KVStore(name.lower(), strategy, on_device=spec.on_device, stop_file=config.stop_file)
        try:
            result = body(store)
            store.close()
        finally:
            strategy.abandon()
        if fatal:
            raise fatal[0]
        return result

    results = spawn(size, rank_body, hosts=hosts, fabric=fabric, timeout_s=3 * config.timeout_s + 10)
    return [results[rank] for rank in roles.workers]  # type: ignore[misc]
