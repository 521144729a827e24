"""Where a store is put together, over ranks that are processes and over ranks that are threads.

What differs between the two is brought along: the transport, the memory that a host's ranks share, and how they connect
what wakes them. All else follows from the members: who is a server, which strategy a worker has, whether it runs a
server too, and whether workers and servers of one host talk through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mpikv.codecs.compression import Compressions
from mpikv.collectives.nccl import NcclComm
from mpikv.config import Config
from mpikv.create import decisions, metrics
from mpikv.create.offered import ServerOffer
from mpikv.create.spec import StoreSpec
from mpikv.errors import MpikvError
from mpikv.hostmemory.segment import HostMemory
from mpikv.kvstore import KVStore
from mpikv.observe import endpoint
from mpikv.observe.program import Process
from mpikv.placement.members import Members
from mpikv.placement.owners import partition_bytes
from mpikv.server.core import ServerCore
from mpikv.server.kept import Kept
from mpikv.server.loop import run_server, serve
from mpikv.server.policy import Asynchronous, Synchronous
from mpikv.server.timeline import ServerTimeline
from mpikv.session.base import Session
from mpikv.session.workers import Workers
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import DEVICE, HOST, Spaces
from mpikv.strategies.asked_owners import AskedOwners
from mpikv.strategies.distributed import DistributedStrategy
from mpikv.strategies.local import LocalStrategy
from mpikv.strategies.owned_keys import OwnService
from mpikv.strategies.ring_keys import RingKeys
from mpikv.transports.base import Transport
from mpikv.transports.loopback import Loopback, OwnRank
from mpikv.transports.memory import LocalTransport, local_transport


def _spaces(spaces: Spaces | None, spec: StoreSpec, *, on_host: bool = False) -> Spaces:
    """With what follows from the store's type. on_host: whether all keys are in host memory, wherever arrays are."""
    found = Spaces() if spaces is None else spaces
    return replace(found, of_new_keys=HOST if on_host else DEVICE if spec.on_device else None)


def local_store(name: str, spec: StoreSpec, config: Config | None = None, spaces: Spaces | None = None) -> KVStore:
    """A store of this process alone. spaces: where its values are, default host memory."""
    session = Session(name, config, _spaces(spaces, spec))
    return KVStore(session, LocalStrategy(session), on_device=spec.on_device)


def assemble(
    name: str,
    spec: StoreSpec,
    transport: Transport,
    members: Members,
    *,
    threaded: bool,
    on_fatal: Callable[[BaseException], None],
    memory: HostMemory | None = None,
    connect: Callable[[LocalTransport | None], None] = lambda _links: None,
    asked_to_stop: Callable[[], str | None] = lambda: None,
    compressions: Compressions | None = None,
    spaces: Spaces | None = None,
    nccl: NcclComm | None = None,
    store_id: str = "",
    processes: Sequence[Process] = (),
    why_no_memory: str = "",
    metrics_name: str = "",
    kept: Kept | None = None,
) -> KVStore | None:
    """The store of a worker; None at a server, which has served until all workers had closed their stores.

    memory: of this rank's host, where its ranks share some. connect: lets the ranks of a host wake each other, through
    the transport that it is given (None: this rank has none); called on all ranks or on none. asked_to_stop: why a
    server asks all workers to stop, once it does. compressions: how the values of keys travel.
    spaces: where this rank's shard of each value is, default host memory. nccl: this worker's rank of the communicator,
    where keys go by NCCL and there are several workers. store_id, processes: see `Workers`. why_no_memory: why ranks of
    a host share none, for the log. metrics_name: of the file of metrics, by default by the rank's role and number.
    kept: gets the owner of this rank in an asynchronous store, for those that go on after a death.
    Raises MpikvError where an optimizer ended a server.
    """
    links = None
    spaces = _spaces(spaces, spec, on_host=members.device_path == "none")
    if members.path == "owners" and members.shares_memory and not members.ring_has_memory:
        if memory is not None:
            links = local_transport(transport, memory, members.workers, members.owners, partition_bytes(members))
        connect(links)
    reached: Transport = transport if links is None else links
    log = decisions.log_of(members, transport.rank)
    decisions.of_members(log, name, members, memory=memory is not None, why_no_memory=why_no_memory)

    def core(**of_own_rank: Any) -> ServerCore:
        labels = [f"worker {i} on {host}" for i, host in enumerate(members.worker_hosts)]
        # A server of its own has no GPU.
        device = spaces.device if not members.servers and isinstance(spaces.device, DeviceSpace) else None
        policy = Synchronous if members.synchronous else Asynchronous
        # What survivors go on with must not end with the memory of this generation.
        keeper = kept if members.keeps else None
        in_memory = None if links is None or keeper is not None else links.segment
        made = ServerCore(
            labels,
            policy,
            in_memory,
            space=spaces.host,
            device=device,
            recorder=transport.recorder,
            **({} if keeper is None else {"kept": keeper.answer}),
            **of_own_rank,
        )
        if keeper is not None:
            keeper.begin(made)
        return made

    if transport.rank in members.servers:
        number = members.servers.index(transport.rank)
        timeline = ServerTimeline(transport.recorder, number, len(members.workers))
        made = core(timeline=timeline.answer)
        read = partial(metrics.of_server, made, transport, links)
        seen = metrics.written(members.config.metrics, metrics_name, number, read)
        try:
            with seen, endpoint.OWN.offered(ServerOffer(members, number, store_id)):
                run_server(reached, members.workers, made, members.config.timeout_s, asked_to_stop)
        except SystemExit as error:
            raise MpikvError(f"an optimizer has called sys.exit({error.code}) at this server") from error
        finally:
            timeline.end()
            if links is not None:
                links.close()
        transport.close()
        return None
    if members.workers_own:
        members = replace(members, memory=memory is not None)
    session = Workers(
        transport,
        members,
        name,
        threaded=threaded,
        on_fatal=on_fatal,
        links=links,
        compressions=compressions,
        spaces=spaces,
        store_id=store_id,
        processes=processes,
    )

    own = None
    if transport.rank in members.owners:
        made, loopback = core(), Loopback()
        if links is None:
            reached = OwnRank(transport, loopback)
        steps = serve(reached, members.workers, made, loopback)
        own = OwnService(made.owner, steps, reached, loopback, lambda: (made.pool.held_bytes, made.rows.held_bytes))
    owners, of_workers, of_memory = AskedOwners(session, own), members, memory if members.workers_own else None
    if members.divides:
        of_memory = memory if members.ring_has_memory else None
        of_workers = replace(members.ring, memory=of_memory is not None)
    ring = RingKeys(session, of_workers, of_memory, nccl=nccl, speaker=owners.speaker)
    strategy = DistributedStrategy(session, ring, owners)
    session.start(strategy.events())
    store = KVStore(session, strategy, on_device=spec.on_device)
    # Where workers go on after deaths, the program's store writes them, which stands before this one.
    return metrics.start(store, "" if members.config.on_failure == "continue" else members.config.metrics, metrics_name)
