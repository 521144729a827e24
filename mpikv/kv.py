"""`kv.create`: the module that users know from MXNet.

It brings the ranks together once: each tells its settings and its role, all check that they fit, and every rank builds
the same picture of workers and servers, from which the store is assembled (assembly.py).
"""

from __future__ import annotations

import os
import sys
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpikv.common.checks import shown, wrong
from mpikv.config import VARIABLES, Config, log_level
from mpikv.create import decisions, device_trials, link_trial, metrics, notices, offered, worker_device
from mpikv.create import spec as store_spec
from mpikv.create.assembly import assemble, local_store
from mpikv.create.spec import StoreSpec
from mpikv.errors import ConfigError, MpikvError
from mpikv.hostmemory import segment, waker
from mpikv.kvstore import KVStore
from mpikv.observe import log
from mpikv.observe.metrics import check as check_folder
from mpikv.observe.program import Process, this_process
from mpikv.placement import device_paths, links
from mpikv.placement.device_paths import DeviceReport
from mpikv.placement.members import Members
from mpikv.placement.topology import labels, topology
from mpikv.runtime import abort, launcher, library, signals
from mpikv.server.kept import Kept
from mpikv.server.roles import Roles, assign
from mpikv.session.agreement import grouped
from mpikv.session.workers import Workers
from mpikv.transports.memory import LocalTransport

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpikv.transports.mpi import MpiTransport


__all__ = ["KVStore", "create"]

# The settings that all ranks of a store must have alike, beside MPIKV_LINK and the number of servers.
EQUAL = {"server_placement", "servers_take", "bigarray_bound_elems", "algorithm", "test_hosts", "shared_memory"}
EQUAL |= {"spares", "stop_signals", "stop_file", "snapshot_dir", "snapshot_s", "device_path"}

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

    name: `local`, `device`, `dist_sync`, `dist_async` or one of their aliases. comm: an mpi4py communicator, by default
    COMM_WORLD. num_servers: how many of its ranks are servers, by default `MPIKV_NUM_SERVERS`. config: the settings, by
    default those of the environment.

    A `dist` store is made by all ranks of `comm` together: the call is collective and blocks until all have made it. On
    a server rank it serves until every worker has closed its store, and then ends the process with status 0
    (SystemExit). Raises ValueError for an unknown name, ConfigError where ranks or settings do not fit, where a
    launcher says that there are other processes and MPI does not, in a process that a rank has started (a DataLoader's
    worker, say), or where some of the ranks are servers of another store that is open, StallError where ranks do not
    come.

    >>> with kv.create('local') as store:
    ...     store.init('w', np.zeros(2))
    ...     store.pull('w')
    array([0., 0.])
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
            library.prepare(config.interface, config.timeout_s, config.stall_warn_s)
    except BaseException:  # Ctrl-C, too: the others wait
        abort.install_early(others_wait=isinstance(name, str) and name.lower().startswith("dist"))
        raise
    if not spec.distributed:
        notices.warn_of_separate_ranks(f"kv.create({name!r}) is of one process")
        if launcher.find() is None:
            abort.install_alone()
        found = worker_device.find(spec, config, launcher.said_local_rank(os.environ))
        if found.told.error:
            raise ConfigError(f"kv.create({name!r}): {found.told.error}")
        _warn_of_devices(found.warning)
        store = local_store(name.lower(), spec, config, found.spaces)
        store.session.log.rank(lambda: f"store {name.lower()!r} of one process: it sends nothing to others")
        metrics.start(store, config.metrics, f"mpikv-worker-{launcher.said_rank(os.environ)}")
        return _begun(store, config)
    return _create_distributed(name.lower(), spec, config, comm)


def serve_only(comm: MPI.Intracomm | None = None, config: Config | None = None) -> None:
    """Be a server in a job whose workers run another program: this is what `python -m mpikv.server` does.

    It ends as `create` does on a server rank.
    """
    try:
        config = _config(config)
        _check_comm(comm)
        library.prepare(config.interface, config.timeout_s, config.stall_warn_s)
    except BaseException:  # Ctrl-C, too: the others wait
        abort.install_early(others_wait=True)
        raise
    _create_distributed("", None, config, comm)


def _config(config: Any) -> Config:
    if config is None:
        notices.warn_of_unread()
    elif not isinstance(config, Config):
        raise wrong("config", "an mpikv.Config or None", config)
    found = Config.from_environ() if config is None else config
    log.print_from(log_level())
    links.given(found.link)  # ConfigError for a file that is none
    if found.metrics:
        check_folder(found.metrics)
    return found


def _check_comm(comm: Any) -> None:
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

    world = MPI.COMM_WORLD
    if world.Get_size() > 1:
        abort.install(world.Get_rank(), world.Get_size())
    else:
        abort.install_alone()
    library.check_launcher(world.Get_size())
    if world.Get_size() == 1:
        notices.warn_of_one_worker(f"kv.create({name!r})")
    if comm is None:
        comm = world
    elif comm == MPI.COMM_NULL:
        raise ValueError("comm is COMM_NULL: this rank belongs to no group of the split, and makes no store")
    elif not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is an mpi4py.MPI.Intracomm, not {type(comm).__name__}")
    advice = _check_servers(name, comm)
    if config.on_failure == "continue":
        from mpikv.create import continued  # noqa: PLC0415 - importing it initialises MPI

        store = continued.create(name, spec, config, comm, _made)
        metrics.start(store, config.metrics, _metrics_name(comm))
        return _begun(_registered(store), config)
    if config.spares:
        raise ConfigError("MPIKV_SPARES is for workers that go on after a death: set MPIKV_ON_FAILURE=continue, too")
    store = _made(name, spec, config, comm, advice)
    assert isinstance(store.session, Workers)
    if servers := store.session.members.servers:
        _served.append((weakref.ref(store), comm.Get_group().Incl(servers)))
    return _begun(_registered(store), config)


def _made(
    name: str,
    spec: StoreSpec | None,
    config: Config,
    comm: MPI.Intracomm,
    advice: str = "",
    *,
    own: Callable[[MpiTransport], None] | None = None,
    on_fatal: Callable[[BaseException], None] = abort.fatal,
    has_role: Callable[[Sequence[Process], Roles], None] = lambda *_: None,
    named: MPI.Intracomm | None = None,
    kept: Kept | None = None,
) -> KVStore:
    """The store of a worker. At a server: SystemExit when all workers have closed theirs.

    own: see `open_transport`. has_role(processes, roles): called when this rank knows those of all.
    named: whose ranks name the files of metrics, default those of `comm`. kept: see `assemble`.
    """
    from mpikv.session.processes import Processes  # noqa: PLC0415

    processes = Processes(comm, config, f"kv.create({name!r})", advice, own)
    transport = processes.transport
    found = worker_device.find(spec, config, topology(transport.hosts).local_rank[transport.rank])
    try:
        if config.on_failure == "continue":
            from mpikv.create.survivors import check_hosts  # noqa: PLC0415

            check_hosts(transport.hosts, os.environ)
        announced = processes.compare(_introduction(spec, config, found.told))
        spec, roles = _settle(announced, transport.hosts, config)
    except MpikvError:
        transport.close()
        raise
    ranks = [Process(*entry["process"]) for entry in announced]
    has_role(ranks, roles)

    def connect(local: LocalTransport | None) -> None:
        (waker.stand_by if local is None else local.waker.connect)(processes.gather_here)

    members = Members(transport.hosts, roles.workers, roles.servers, spec.synchronous, config)
    members = link_trial.settled(members, processes)
    memory = None
    if members.shares_memory:
        memory = processes.memory()
        if members.workers_own or members.ring_has_memory:
            memory = segment.on_all_hosts(memory, processes.gather)
    try:
        devices = [DeviceReport(**announced[rank]["device"]) for rank in members.workers]
        members, nccl = device_trials.settled(members, devices, memory, processes, found.gpu)
    except MpikvError:
        transport.close()
        raise
    _warn_of_devices(found.warning)
    _warn_of_devices(device_paths.advice(members))
    decisions.of_process(decisions.log_of(members, transport.rank), members, transport.rank, found.told)
    listener = _stop_signals(config)
    store_id = announced[0]["store_id"]
    if transport.rank in roles.servers:
        listener.install()
    store = assemble(
        name,
        spec,
        transport,
        members,
        threaded=processes.threaded,
        on_fatal=on_fatal,
        memory=memory,
        connect=connect,
        asked_to_stop=listener.why,
        spaces=found.spaces,
        nccl=nccl,
        store_id=store_id,
        processes=ranks,
        why_no_memory=processes.why_no_memory,
        metrics_name=_metrics_name(named or comm),
        kept=kept,
    )
    if store is None:
        listener.end()
        raise SystemExit(0)
    return _watched(store)


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
        if earlier is not None and not earlier.session.closed:
            raise ConfigError(
                f"kv.create({name!r}): another store is open and has its servers at rank {ranks}; {advice}"
            )
        return f"; an earlier store had its servers at rank {ranks}, where the process ended with it: {advice}"
    return ""


def _metrics_name(comm: MPI.Intracomm) -> str:
    """The name of this rank's file of metrics: "" for the one by its role, which only a store of all ranks may have."""
    from mpi4py import MPI  # noqa: PLC0415

    of_all = MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
    return "" if of_all else f"mpikv-rank-{MPI.COMM_WORLD.Get_rank()}"


def _warn_of_devices(text: str) -> None:
    if text:
        notices.warn(text, text, os.environ)


def _introduction(spec: StoreSpec | None, config: Config, device: DeviceReport) -> dict[str, Any]:
    """What must fit between ranks. A program that is only a server brings no type."""
    settings = {one.name: getattr(config, one.field) for one in VARIABLES if one.field in EQUAL}
    settings["MPIKV_LINK"] = links.announced(config.link)
    type_ = None if spec is None else [spec.distributed, spec.synchronous, spec.on_device]
    mine = {"process": this_process(), "store_id": uuid.uuid4().hex}  # that of rank 0 is the store's
    return {"type": type_, "num_servers": config.num_servers, "settings": settings, "device": device._asdict(), **mine}


def _settle(announced: list[dict[str, Any]], hosts: tuple[str, ...], config: Config) -> tuple[StoreSpec, Roles]:
    """The roles that follow from what all ranks announced. The same on every rank, and so is a ConfigError."""
    called = labels(hosts)
    by_program = tuple(rank for rank, entry in enumerate(announced) if entry["type"] is None)
    others = [rank for rank in range(len(announced)) if rank not in by_program]
    if not others:
        raise ConfigError(
            "all ranks run `python -m mpikv.server`: there is no worker (mpirun -n 4 python train.py : -n 2 ...)"
        )
    called_by = {spec: name for name, spec in reversed(store_spec.NAMES.items()) if len(name) > 4}
    types = [called_by[StoreSpec(*announced[rank]["type"])] for rank in others]
    numbers = [announced[rank]["num_servers"] for rank in others]
    names = [called[rank] for rank in others]
    if len(set(types)) > 1:
        raise ConfigError(f"kv.create: the type of the store differs between ranks: {grouped(types, names)}")
    if len(set(numbers)) > 1:
        raise ConfigError(f"kv.create: the number of servers differs between ranks: {grouped(numbers, names)}")
    spec = StoreSpec(*announced[others[0]]["type"])
    if by_program:
        if numbers[0] not in (0, len(by_program)):
            raise ConfigError(
                f"{len(by_program)} ranks run `python -m mpikv.server`, but {numbers[0]} servers are asked for "
                "(MPIKV_NUM_SERVERS or num_servers=); give one of the two"
            )
        return spec, Roles(tuple(others), by_program)
    return spec, assign(hosts, numbers[0], config.server_placement)


def _stop_signals(config: Config, asked: str = "") -> signals.StopSignals:
    return signals.StopSignals([name for name in config.stop_signals.split(",") if name], asked)


def _begun(store: KVStore, config: Config) -> KVStore:
    """Let signals ask all workers to stop, until the store is closed, and write a timeline if one is wanted."""
    if config.stop_signals:
        listener = _stop_signals(config, config.stop_asked if store.rank == 0 else "")
        listener.install()
        session = store.session

        def restore() -> None:
            if not session.stopped:  # else a signal may come late to this rank, which must not end by it
                listener.restore()

        session.listen_for(listener.why)
        session.after_close.append(restore)
    if config.timeline:
        try:
            store.timeline(config.timeline)
        except OSError as error:
            raise ConfigError(f"MPIKV_TIMELINE={shown(config.timeline)}: {error.strerror or error}") from error
    return store


def _watched(store: KVStore) -> KVStore:
    """Let the process's other stores know what this rank does in this one, until its session has ended."""
    activity, guard = store.session.activity, abort.guard()
    if guard is not None and activity is not None:
        guard.watch(activity)
        store.session.after_close.append(lambda: guard.unwatch(activity))
    return store


def _registered(store: KVStore) -> KVStore:
    """Close the store at the end of MPI or the interpreter, and end the job instead when the program failed.

    Until then other processes of this user may ask what its workers do.
    """
    store.session.after_close.append(abort.at_end(store.close, lambda: f"{store!r} was open"))
    offered.offer(store)
    return store
