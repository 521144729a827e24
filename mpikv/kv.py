"""`kv.create`: the module that users know from MXNet.

The only place that sees strategies and servers. It brings the ranks together once: each tells its settings and its
role, all check that they fit, and every rank builds the same picture of workers and servers.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpikv import notices
from mpikv import spec as store_spec
from mpikv.checks import wrong
from mpikv.config import Config
from mpikv.control.agreement import grouped
from mpikv.errors import ConfigError, MpikvError, StallError
from mpikv.hostmemory import segment, waker
from mpikv.hostmemory.segment import HostMemory
from mpikv.kvstore import KVStore
from mpikv.placement import Members
from mpikv.runtime import abort, launcher, library, signals
from mpikv.server.core import ServerCore
from mpikv.server.loop import run_server, serve
from mpikv.server.policy import Asynchronous, Synchronous
from mpikv.server.roles import Roles, assign
from mpikv.spec import StoreSpec
from mpikv.strategies.allreduce import AllreduceStrategy
from mpikv.strategies.base import Strategy
from mpikv.strategies.local import LocalStrategy
from mpikv.strategies.ps import PsStrategy
from mpikv.topology import pretended
from mpikv.transports.base import Transport
from mpikv.transports.memory import LocalTransport, local_transport, ranks_here

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["KVStore", "create"]

_served: list[tuple[weakref.ref[KVStore], MPI.Group]] = []  # stores that server ranks serve or served, and these ranks


@abort.tells
def create(
    name: str = "local",
    *,
    comm: MPI.Intracomm | None = None,
    num_servers: int | None = None,
    config: Config | None = None,
) -> KVStore:
    """Make a store.

    name: `local`, `device`, `dist_sync`, `dist_async` and their aliases. comm: an mpi4py communicator, default
    COMM_WORLD. num_servers: server ranks among its ranks, default `MPIKV_NUM_SERVERS`. config: default what the
    environment says.

    The `dist` stores are collective over `comm` and block until all its ranks have called this. On a server rank the
    call serves until every worker has closed its store and then ends the process with status 0 (SystemExit). Raises
    ValueError for an unknown name, ConfigError where ranks or settings do not fit, or where some of the ranks are
    servers of another store that is open, StallError where ranks do not come.
    """
    try:
        spec = store_spec.parse(name)
        config = _config(config)
        _check_comm(comm)
        if num_servers is not None:
            config = config.with_(num_servers=num_servers)
            if config.num_servers and not spec.distributed:
                raise ValueError(f"a {name.lower()!r} store is of one process and has no servers; give num_servers=0")
        if spec.distributed:
            _check_process(name)
            library.prepare(config.mpi, config.interface, config.timeout_s)
    except Exception:
        abort.install_early(others_wait=isinstance(name, str) and name.lower().startswith("dist"))
        raise
    if not spec.distributed:
        notices.warn_of_separate_ranks(f"kv.create({name!r}) is of one process")
        if launcher.find() is None:
            abort.install_alone()
        store = KVStore(name.lower(), LocalStrategy(), on_device=spec.on_device, stop_file=config.stop_file)
        return _listening(store, config)
    return _create_distributed(name.lower(), spec, config, comm)


def serve_only(comm: MPI.Intracomm | None = None, config: Config | None = None) -> None:
    """Be a server in somebody else's job: what `python -m mpikv.server` runs. Ends as a server rank's `create` does."""
    try:
        config = _config(config)
        _check_comm(comm)
        library.prepare(config.mpi, config.interface, config.timeout_s)
    except Exception:
        abort.install_early(others_wait=True)
        raise
    _create_distributed("", None, config, comm)


def _config(config: Any) -> Config:
    if config is None:
        notices.warn_of_unread()
        return Config.from_environ()
    if not isinstance(config, Config):
        raise wrong("config", "an mpikv.Config or None", config)
    return config


def _check_comm(comm: Any) -> None:
    """TypeError for what is no communicator. Whoever has one has imported MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    if comm is not None and not (mpi and isinstance(comm, (mpi.Intracomm, type(mpi.COMM_NULL)))):
        raise wrong("comm", "an mpi4py.MPI.Intracomm or None", comm)


def _check_process(name: str) -> None:
    guard = abort.guard()
    if guard is not None and guard.is_child():
        raise MpikvError(
            f"kv.create({name!r}) in a process that was forked from {guard.label}: MPI serves the process that has "
            "initialised it. Make the store there, or a 'local' one here"
        )


def _create_distributed(name: str, spec: StoreSpec | None, config: Config, comm: MPI.Intracomm | None) -> KVStore:
    from mpi4py import MPI  # noqa: PLC0415 - importing it initialises MPI

    from mpikv.transports.mpi import allgather_bytes, open_transport  # noqa: PLC0415

    world = MPI.COMM_WORLD
    if world.Get_size() > 1:
        abort.install(world.Get_rank(), world.Get_size())
    else:
        abort.install_alone()
    library.check_launcher(world.Get_size())
    if comm is None:
        comm = world
    elif comm == MPI.COMM_NULL:
        raise ValueError("comm is COMM_NULL: this rank belongs to no group of the split, and makes no store")
    elif not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is an mpi4py.MPI.Intracomm, not {type(comm).__name__}")
    me = f"rank {comm.Get_rank()} of {comm.Get_size()}"
    ended = _check_servers(name, comm)

    def nobody() -> BaseException:
        return StallError(
            f"{me} waited {config.timeout_s:g} s in kv.create({name!r}) for the other ranks of its communicator: "
            f"every one of them must call it{ended}"
        )

    transport = open_transport(comm, config.timeout_s, nobody)
    mine = json.dumps(_introduction(spec, config)).encode()
    told = [json.loads(text) for text in allgather_bytes(transport, mine, config.timeout_s, nobody)]
    try:
        _compare_settings(told, transport.hosts)
        transport.hosts = pretended(transport.hosts, config.fake_hosts)
        spec, roles = _settle(told, transport.hosts, config)
    except MpikvError:
        transport.close()
        raise

    def gather_all(data: bytes) -> list[bytes]:
        return allgather_bytes(transport, data, config.timeout_s, nobody)

    def gather(data: bytes) -> list[bytes]:
        everybodys = gather_all(data)
        return [everybodys[rank] for rank in ranks_here(transport)]

    # What is missing is no error: messages do the same, `mpikv info` says why.
    memory, links = None, None
    members = members_of(transport.hosts, roles, spec, config)
    for_servers = members.path == "servers"
    if members.shares_memory:
        here = ranks_here(transport)
        memory, _ = segment.open_host_memory(here.index(transport.rank), len(here), gather)
        if not for_servers:
            memory = segment.on_all_hosts(memory, gather_all)
    if for_servers and members.shares_memory:
        links = None if memory is None else server_links(transport, memory, roles, config)
        (waker.stand_by if links is None else links.bell.connect)(gather)
    if transport.rank in roles.servers:
        _be_server(transport, roles, spec, config, links)
    threaded = config.progress == "thread" and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    strategy = worker_strategy(
        transport, roles, spec, config, threaded=threaded, on_fatal=abort.fatal, memory=memory, links=links
    )
    store = KVStore(name, strategy, on_device=spec.on_device, stop_file=config.stop_file)
    if roles.servers:
        _served.append((weakref.ref(store), comm.Get_group().Incl(roles.servers)))
    return _registered(_listening(store, config), strategy)


def _check_servers(name: str, comm: MPI.Intracomm) -> str:
    """ConfigError where ranks of `comm` serve a store that is open. What to say of those that have served one."""
    from mpi4py import MPI  # noqa: PLC0415

    for store, servers in reversed(_served):  # an open one is the last that has these servers
        common = MPI.Group.Intersection(comm.Get_group(), servers)
        ranks = ", ".join(str(rank) for rank in common.Translate_ranks(None, comm.Get_group()))
        advice = "make one store for all, or the next one over a communicator without these ranks"
        if not ranks:
            continue
        earlier = store()
        if earlier is not None and not earlier._closed:
            raise ConfigError(
                f"kv.create({name!r}): another store is open and has its servers at rank {ranks}; {advice}"
            )
        return f"; an earlier store had its servers at rank {ranks}, where the process ended with it: {advice}"
    return ""


def _introduction(spec: StoreSpec | None, config: Config) -> dict[str, Any]:
    """What must fit between ranks. A program that is only a server brings no type."""
    settings = {
        "MPIKV_SERVER_PLACEMENT": config.server_placement,
        "MPIKV_BIGARRAY_BOUND": config.bigarray_bound_elems,
        "MPIKV_ALGORITHM": config.algorithm,
        "MPIKV_FAKE_HOSTS": config.fake_hosts,
        "MPIKV_SHARED_MEMORY": config.shared_memory,
        "MPIKV_STOP_SIGNALS": config.stop_signals,
        "MPIKV_STOP_FILE": config.stop_file,
    }
    type_ = None if spec is None else [spec.distributed, spec.synchronous, spec.on_device]
    return {"type": type_, "num_servers": config.num_servers, "settings": settings}


def _labels(hosts: Sequence[str]) -> list[str]:
    return [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]


def _compare_settings(told: list[dict[str, Any]], hosts: Sequence[str]) -> None:
    """ConfigError, the same on every rank, where a setting differs between ranks."""
    for setting in told[0]["settings"]:
        values = [entry["settings"][setting] for entry in told]
        if len(set(values)) > 1:
            raise ConfigError(f"kv.create: {setting} differs between ranks: {grouped(values, _labels(hosts))}")


def _settle(told: list[dict[str, Any]], hosts: tuple[str, ...], config: Config) -> tuple[StoreSpec, Roles]:
    """The roles that follow from what all ranks told. The same on every rank, and so is a ConfigError."""
    labels = _labels(hosts)
    by_program = tuple(rank for rank, entry in enumerate(told) if entry["type"] is None)
    others = [rank for rank in range(len(told)) if rank not in by_program]
    if not others:
        raise ConfigError(
            "all ranks run `python -m mpikv.server`: there is no worker (mpirun -n 4 python train.py : -n 2 ...)"
        )
    types = [_type_name(told[rank]["type"]) for rank in others]
    numbers = [told[rank]["num_servers"] for rank in others]
    names = [labels[rank] for rank in others]
    if len(set(types)) > 1:
        raise ConfigError(f"kv.create: the type of the store differs between ranks: {grouped(types, names)}")
    if len(set(numbers)) > 1:
        raise ConfigError(f"kv.create: the number of servers differs between ranks: {grouped(numbers, names)}")
    spec = StoreSpec(*told[others[0]]["type"])
    if by_program:
        if numbers[0] not in (0, len(by_program)):
            raise ConfigError(
                f"{len(by_program)} ranks run `python -m mpikv.server`, but {numbers[0]} servers are asked for "
                "(MPIKV_NUM_SERVERS or num_servers=); give one of the two"
            )
        return spec, Roles(tuple(others), by_program)
    return spec, assign(hosts, numbers[0], config.server_placement)


def _type_name(fields: list[bool]) -> str:
    return next(name for name, spec in store_spec.NAMES.items() if spec == StoreSpec(*fields) and len(name) > 4)


def server_core(
    hosts: tuple[str, ...], roles: Roles, spec: StoreSpec, links: LocalTransport | None = None
) -> ServerCore:
    """The state machine of one server."""
    labels = [f"worker {i} on {hosts[rank]}" for i, rank in enumerate(roles.workers)]
    memory = None if links is None else links.segment
    return ServerCore(labels, Synchronous if spec.synchronous else Asynchronous, memory)


def members_of(hosts: Sequence[str], roles: Roles, spec: StoreSpec, config: Config) -> Members:
    """What the placement of all keys of a store follows from."""
    return Members(tuple(hosts), roles.workers, roles.servers, spec.synchronous, config)


def server_links(transport: Transport, memory: HostMemory, roles: Roles, config: Config) -> LocalTransport | None:
    """The transport between workers and servers of this rank's host; None where it is not one or the other's."""
    servers = roles.servers or roles.workers
    return local_transport(transport, memory, roles.workers, servers, config.partition_bytes)


def worker_strategy(
    transport: Transport,
    roles: Roles,
    spec: StoreSpec,
    config: Config,
    *,
    threaded: bool,
    on_fatal: Callable[[BaseException], None],
    memory: HostMemory | None = None,
    links: LocalTransport | None = None,
) -> Strategy:
    """The strategy of a worker: who owns the keys follows from the type and the number of servers."""
    members = members_of(transport.hosts, roles, spec, config)
    if members.path != "servers":
        if memory is None:
            members = replace(members, memory=False)
        return AllreduceStrategy(transport, members, threaded=threaded, on_fatal=on_fatal, memory=memory)
    service = None
    if not roles.servers:
        core = server_core(transport.hosts, roles, spec, links)
        service = serve(transport if links is None else links, roles.workers, core)
    return PsStrategy(transport, members, threaded=threaded, on_fatal=on_fatal, service=service, local=links)


def _be_server(
    transport: Transport, roles: Roles, spec: StoreSpec, config: Config, links: LocalTransport | None
) -> None:
    """Serve, then end the process."""
    listener = _stop_signals(config)
    listener.install()
    core = server_core(transport.hosts, roles, spec, links)
    try:
        run_server(transport if links is None else links, roles.workers, core, config.timeout_s, listener.why)
    except SystemExit as error:
        raise MpikvError(f"an optimizer has called sys.exit({error.code}) at this server") from error
    listener.end()
    if links is not None:
        links.close()
    transport.close()
    raise SystemExit(0)


def _stop_signals(config: Config) -> signals.StopSignals:
    return signals.StopSignals([name for name in config.stop_signals.split(",") if name])


def _listening(store: KVStore, config: Config) -> KVStore:
    """Let signals ask all workers to stop, until the store is closed."""
    if config.stop_signals:
        listener = _stop_signals(config)
        listener.install()
        store._listen_for(listener.why, listener.restore)
    return store


def _registered(store: KVStore, strategy: Strategy) -> KVStore:
    """Close the store at the interpreter's exit, and end the job instead when the program failed."""

    pid = os.getpid()

    def at_exit() -> None:
        if os.getpid() != pid:
            return  # a child that was forked; the store is its parent's
        guard = abort.guard()
        if guard is not None and guard.exit_status:
            guard.fail(f"sys.exit({guard.exit_status}) while {store!r} was open", guard.exit_status)
        try:
            store.close()
        except BaseException as error:  # also Ctrl-C: the others wait in close
            if guard is None:
                raise
            guard.excepthook(type(error), error, error.__traceback__)

    def closed() -> None:
        atexit.unregister(at_exit)
        guard = abort.guard()
        if guard is not None and strategy.activity is not None:
            guard.unwatch(strategy.activity)

    atexit.register(at_exit)
    store._on_close = closed
    guard = abort.guard()
    if guard is not None and strategy.activity is not None:
        guard.watch(strategy.activity)
    return store
