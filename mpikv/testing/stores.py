"""Stores over thread ranks: the same strategies and servers as under mpirun, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
from mpikv.server.roles import Roles, assign
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.named import Spaces
from mpikv.testing.ranks import Gathering, memories_of, spawn
from mpikv.transports.base import Transport
from mpikv.transports.threads import Fabric

T = TypeVar("T")

NOT_TRIED = {"mpi": "not tried", "nccl": "not tried"}
TEST_TIMEOUT_S = 20.0  # far above what a healthy wait takes, far below a test runner's patience


def for_tests(config: Config | None) -> Config:
    """The settings of a test. Waits that last are told only where they have another `stall_warn_s` than the default,
    since their messages would count with the others.

    >>> from mpikv.testing.stores import for_tests
    >>> for_tests(None).timeout_s
    20.0
    """
    config = Config(timeout_s=TEST_TIMEOUT_S) if config is None else config
    return config.with_(stall_warn_s="off") if config.stall_warn_s == Config.stall_warn_s else config


class StoreRanks:
    """The thread ranks of one store, and the memory that those of a host share.

    hosts: of each rank. members: to be changed before the first rank is assembled, if at all.

    >>> from mpikv.config import Config
    >>> from mpikv.server.roles import Roles
    >>> from mpikv.testing.stores import StoreRanks
    >>> StoreRanks('dist_sync', Config(), ['a', 'a', 'b'], Roles((0, 1), (2,))).members.owners
    (2,)
    """

    def __init__(self, name: str, config: Config, hosts: Sequence[str], roles: Roles) -> None:
        self.name, self.spec = name.lower(), store_spec.parse(name)
        link = links.expected(config.link)
        self.members = Members(tuple(hosts), roles.workers, roles.servers, self.spec.synchronous, config, link=link)
        self._memories = memories_of(hosts) if self.members.shares_memory else [None] * len(hosts)

    def assemble(
        self, transport: Transport, on_fatal: Callable[[BaseException], None], **of_rank: Any
    ) -> KVStore | None:
        """One rank's store, as of `assemble`, with the rest of its arguments; None at a server, when it has served.

        >>> from mpikv.testing.ranks import spawn
        >>> from mpikv.config import Config
        >>> from mpikv.server.roles import Roles
        >>> from mpikv.testing.stores import StoreRanks
        >>> ranks = StoreRanks('dist_sync', Config(), ['a'], Roles((0,), ()))
        >>> spawn(1, lambda transport: ranks.assemble(transport, print).num_workers)
        [1]
        """
        threaded, memory = self.members.config.progress == "thread", self._memories[transport.rank]
        return assemble(
            self.name,
            self.spec,
            transport,
            self.members,
            threaded=threaded,
            on_fatal=on_fatal,
            memory=memory,
            **of_rank,
        )


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
    names, by default the first one that needs no trial. config: see `for_tests`. The store is closed after `body`
    unless `body` raised. Raises RankError (see `spawn`) with ranks of the transport.

    >>> from mpikv.testing.stores import spawn_stores
    >>> def body(store):
    ...     store.init('g', np.zeros(2))
    ...     store.pushpull('g', grad := np.full(2, store.rank + 1.0))
    ...     return grad.tolist()
    >>> spawn_stores('dist_sync', 2, body, num_servers=1)
    [[3.0, 3.0], [3.0, 3.0]]
    """
    config = for_tests(config)
    size = num_workers + num_servers
    places = hosts or ["localhost"] * size
    roles = assign(places, num_servers, config.server_placement)
    ranks = StoreRanks(name, config, places, roles)
    if gpus is not None:
        told = [DeviceReport() if one is None else DeviceReport(one.number, one.uuid, one.name) for one in gpus]
        open_ = config.device_path == "auto" and config.algorithm != "nccl"
        outcomes = NOT_TRIED if open_ else {}
        chosen = choose([told[rank] for rank in roles.workers], ranks.members, outcomes)
        ranks.members = chosen.of(ranks.members)
    gathering = Gathering(num_workers)

    def rank_body(transport: Transport) -> T | None:
        fatal: list[BaseException] = []
        gpu = None if gpus is None else gpus[transport.rank]
        rank_spaces = None if spaces is None else spaces[transport.rank]
        if gpu is not None:
            rank_spaces = Spaces(device=DeviceSpace(gpu))
        comm = None
        if gpu is not None and ranks.members.device_path == "nccl":
            names = [f"worker {rank}" for rank in range(num_workers)]
            gather = gathering.of(transport.rank)
            comm, _ = make_communicator(lambda: Nccl(gpu), names, transport.rank, gather, config.timeout_s, cache={})
        store = ranks.assemble(
            transport,
            fatal.append,
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
