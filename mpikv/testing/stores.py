"""Stores over thread ranks: the same strategies and servers as under mpirun, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mpikv.codecs.compression import Compressions, KeyCompression
from mpikv.collectives.nccl import Nccl
from mpikv.collectives.nccl_setup import make_communicator
from mpikv.config import Config
from mpikv.create import spec as store_spec
from mpikv.create.assembly import assemble
from mpikv.kvstore import KVStore
from mpikv.placement import links
from mpikv.placement.device_paths import DeviceReport, choose
from mpikv.placement.members import Members
from mpikv.server.roles import assign
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.named import Spaces
from mpikv.testing.ranks import Gathering, memories_of, spawn
from mpikv.transports.base import Transport
from mpikv.transports.threads import Fabric

T = TypeVar("T")

NOT_TRIED = {"mpi": "not tried", "nccl": "not tried"}
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
    compression: KeyCompression | None = None,
    spaces: Sequence[Spaces] | None = None,
    gpus: Sequence[Gpu | None] | None = None,
) -> list[T]:
    """Run `body(store)` on thread ranks that are workers of one store, and return its results in worker order. Blocks.

    hosts: of each rank, by default all on one. fabric: what they talk over, such as a `FaultyFabric`, in place of a new
    one on these hosts. compression: how their values travel, by default as they are. spaces: where the values of each
    rank are. gpus: of each rank, as its own process's CuPy sees it; keys in device memory go the path that `config`
    names, by default the first one that needs no trial. Waits that last are told only where `config` has another
    `stall_warn_s` than the default, since their messages would count with the others. The store is closed after `body`
    unless `body` raised. Raises RankError (see `spawn`) with ranks of the transport.

    >>> from mpikv.testing.stores import spawn_stores
    >>> def body(store):
    ...     store.init('g', np.zeros(2))
    ...     store.pushpull('g', grad := np.full(2, store.rank + 1.0))
    ...     return grad.tolist()
    >>> spawn_stores('dist_sync', 2, body, num_servers=1)
    [[3.0, 3.0], [3.0, 3.0]]
    """
    spec = store_spec.parse(name)
    config = Config(timeout_s=TEST_TIMEOUT_S) if config is None else config
    if config.stall_warn_s == Config.stall_warn_s:
        config = config.with_(stall_warn_s="off")
    size = num_workers + num_servers
    places = tuple(hosts or ["localhost"] * size)
    roles = assign(places, num_servers, config.server_placement)
    members = Members(places, roles.workers, roles.servers, spec.synchronous, config, link=links.expected(config.link))
    memories = memories_of(places) if members.shares_memory else [None] * size
    if gpus is not None:
        told = [DeviceReport() if one is None else DeviceReport(one.number, one.uuid, one.name) for one in gpus]
        open_ = config.device_path == "auto" and config.algorithm != "nccl"
        outcomes = NOT_TRIED if open_ else {}
        members = choose([told[rank] for rank in roles.workers], members, outcomes).of(members)
    gathering = Gathering(num_workers)

    def rank_body(transport: Transport) -> T | None:
        fatal: list[BaseException] = []
        threaded, memory = config.progress == "thread", memories[transport.rank]
        gpu = None if gpus is None else gpus[transport.rank]
        rank_spaces = None if spaces is None else spaces[transport.rank]
        if gpu is not None:
            rank_spaces = Spaces(device=DeviceSpace(gpu))
        comm = None
        if gpu is not None and members.device_path == "nccl":
            names = [f"worker {rank}" for rank in range(num_workers)]
            gather = gathering.of(transport.rank)
            comm, _ = make_communicator(lambda: Nccl(gpu), names, transport.rank, gather, config.timeout_s, cache={})
        store = assemble(
            name.lower(),
            spec,
            transport,
            members,
            threaded=threaded,
            on_fatal=fatal.append,
            memory=memory,
            compressions=None if compression is None else Compressions(compression),
            spaces=rank_spaces,
            nccl=comm,
        )
        if store is None:
            return None
        try:
            result = body(store)
            store.close()
        finally:
            store.session.abandon()
        if fatal:
            raise fatal[0]
        return result

    results = spawn(size, rank_body, hosts=hosts, fabric=fabric, timeout_s=3 * config.timeout_s + 10)
    return [results[rank] for rank in roles.workers]  # type: ignore[misc]
