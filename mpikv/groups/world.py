"""What the ranks of a job set up once for all their process groups, until the interpreter's end.

The first call of `opened` makes the world of this process, and all ranks take part in it: a duplicated communicator,
the memory that the ranks of each host share, a progress engine, and a service by which ranks agree on further groups.
`World` itself knows no MPI: thread ranks make theirs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpikv.config import Config
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Predicate
from mpikv.errors import MpikvError, PeerError, StallError
from mpikv.groups.group import RankGroup
from mpikv.groups.service import STORE_RANK, Service
from mpikv.groups.shared import SharedCalls, region_bytes
from mpikv.groups.watch import STATUS, CallWatch
from mpikv.hostmemory.segment import HostMemory, aligned
from mpikv.observe.activity import Activity
from mpikv.observe.program import Process, this_process
from mpikv.placement.members import Members
from mpikv.runtime import abort, library
from mpikv.session.messages import ControlMessages
from mpikv.session.questions import Questions
from mpikv.session.stalls import Stalls
from mpikv.transports.base import Group, Transport

# Settings that must be equal on all ranks of a job.
SETTINGS = ("test_hosts", "shared_memory")

# The world of this process, or none. A process is one rank of COMM_WORLD, and MPI is initialised once in it. PyTorch
# passes nothing to a backend by which a second init_process_group could find the world that the first one has made.
_opened: list[World] = []
_lock = threading.Lock()


class World:
    """One rank's side of a job. memory: what the ranks of its host share. on_fatal: called when the engine fails."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        *,
        threaded: bool,
        memory: HostMemory | None,
        on_fatal: Callable[[BaseException], None],
        processes: Sequence[Process] = (),
    ) -> None:
        self.transport, self.config = transport, config
        self.rank, self.size = transport.rank, transport.size
        self.labels = [f"rank {rank} of {self.size} on {host}" for rank, host in enumerate(transport.hosts)]
        self.groups: dict[int, RankGroup] = {}
        self._calls: dict[int, int] = {}  # how many calls were made in each closed group
        # Failures on other ranks, by group, that were reported before this rank has made the group.
        self._early: dict[int, list[tuple[int, PeerError]]] = {}
        self.engine = Engine(threaded=threaded, on_fatal=on_fatal, poll=transport.poll, clock=transport.clock)
        self._memory = memory
        messages = ControlMessages(transport, Group(transport, range(self.size)), self.engine)
        self.service = Service(messages, self._failed)
        self.activity = Activity(self.engine.clock, "process groups", self.labels[self.rank])
        self.activity.reached, self.activity.elsewhere = self._reached, ""
        questions = Questions(messages, self.activity, processes or [this_process()] * self.size, {})
        self.stalls = Stalls(messages, questions, self.activity, config.stall_warn_s, what="rank")
        self._watch = CallWatch(self.engine, questions, self.groups, self.rank, self.labels, warn_s=config.stall_warn_s)
        self.engine.serve(messages.listen(), "control messages")
        self.engine.serve(self._watch.serve(), "watch")
        self.sessions: list[object] = []  # what each init_process_group has made; their number keeps their keys apart

    def group(self, ranks: Sequence[int], number: int, timeout_s: float) -> RankGroup:
        """Make a group of these ranks. Local. number: from 1 on, the same on all of them, never used before."""
        group = Group(self.transport, ranks)
        made = RankGroup(
            group,
            number,
            self.engine,
            timeout_s=timeout_s,
            shared=self._shared(group, number),
            label=self.labels[self.rank],
            stalls=self.stalls,
            stalled=self._watch.stall,
            report=self._report,
        )
        with self.engine.lock:
            self.groups[number] = made
            for call, error in self._early.pop(number, ()):
                made.failed_elsewhere(call, error)
        return made

    def drop(self, group: RankGroup) -> None:
        """Close a group, if it is open."""
        group.close()
        with self.engine.lock:
            self._calls[group.number] = group.calls
            self.groups.pop(group.number, None)

    def _report(self, group: RankGroup, call: int, error: BaseException) -> None:
        others = [rank for rank in group.group.ranks if rank != self.rank]
        self.service.report_failure(others, group.number, call, f"{type(error).__name__}: {error}")

    def _failed(self, rank: int, number: int, call: int, text: str) -> None:
        error = PeerError(f"a call of this process group has failed on {self.labels[rank]}: {text}")
        if number in self.groups:
            self.groups[number].failed_elsewhere(call, error)
        else:
            self._early.setdefault(number, []).append((call, error))

    def _reached(self, item: Any) -> Any:
        """Whether this rank has come to what others wait for (`GroupCall.need`); -1 where it does not take part. What
        it knows of a call, where it is asked for its `STATUS`.
        """
        what, (number, *which) = item
        if what == STATUS:
            return self._watch.status(number, which[0], self.service.left)
        group = self.groups.get(number)
        if what == "made":
            calls = self._calls.get(number) if group is None else group.calls
            return -1 if calls is None else int(calls >= which[0])
        source, dest, tag, n = which
        return -1 if source != self.rank or group is None else int(group.has_sent(dest, tag, n))

    def _shared(self, group: Group, number: int) -> SharedCalls | None:
        memory = self._memory
        if memory is None or group.size == 1 or len(set(group.hosts)) > 1:
            return None
        # Each group number has its own region of the memory, large enough for all ranks of the host, so that all ranks
        # know where it is without asking.
        stride = region_bytes(memory.size)
        begin = aligned(number * stride)
        if begin + stride > memory.n_bytes:
            return None
        return SharedCalls(memory, begin, group.rank, group.size)

    def ask(
        self, verb: str, keys: Sequence[str], values: Sequence[bytes] = (), timeout_s: float | None = None
    ) -> list[bytes]:
        """Send a request to the rendezvous store, and return its answer. Blocks; StallError, ValueError."""
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        running = self.engine.start(self.service.ask(verb, keys, values), f"{verb} of {', '.join(keys)}")
        try:
            self.engine.wait(running, limit_s, lambda: self._unanswered(verb, keys, limit_s))
        finally:
            with self.engine.lock:
                running.cancel()
        assert running.result is not None
        return running.result

    def _unanswered(self, verb: str, keys: Sequence[str], limit_s: float) -> StallError:
        what = "another rank to set" if verb == "get" else f"{self.labels[STORE_RANK]} to answer for"
        return StallError(f"{self.labels[self.rank]} waited {limit_s:g} s for {what} the keys {', '.join(keys)}")

    def close(self) -> None:
        """Leave the job's groups. STORE_RANK waits until the others have left, at most MPIKV_TIMEOUT_S."""
        service, engine = self.service, self.engine
        for group in tuple(self.groups.values()):
            self.drop(group)
        limit_s = self.config.timeout_s
        late = StallError("the others have not left")
        with contextlib.suppress(MpikvError):
            engine.wait(engine.start(service.leave(self._calls), "leave"), limit_s, lambda: late)
            if self.rank == STORE_RANK:
                engine.wait(Predicate(lambda: len(service.left) == self.size), limit_s, lambda: late)
        engine.stop()


def opened() -> World:
    """Return the world of this process. The first call initialises MPI, and is collective over COMM_WORLD. Raises
    ConfigError where there is no MPI or settings differ, StallError where ranks do not call it.
    """
    with _lock:
        guard = abort.guard()
        if guard is not None and guard.is_child():
            raise MpikvError("a process group in a process that was forked from a rank: MPI serves the one that has it")
        if not _opened:
            _opened.append(_open(Config.from_environ()))
        return _opened[0]


def _open(config: Config) -> World:
    try:
        library.prepare(config.interface, config.timeout_s, config.stall_warn_s)
    except BaseException:  # Ctrl-C, too: the others wait
        abort.install_early(others_wait=True)
        raise
    from mpi4py import MPI  # noqa: PLC0415 - importing it initialises MPI

    from mpikv.session.processes import Processes  # noqa: PLC0415

    comm = MPI.COMM_WORLD
    if comm.Get_size() > 1:
        abort.install(comm.Get_rank(), comm.Get_size())
    library.check_launcher(comm.Get_size())

    processes = Processes(comm, config, "init_process_group")
    transport = processes.transport
    settings = {f"MPIKV_{name.upper()}": getattr(config, name) for name in SETTINGS}
    try:
        announced = processes.compare({"settings": settings, "process": this_process()})
    except MpikvError:
        transport.close()
        raise
    shared = Members(transport.hosts, tuple(range(transport.size)), config=config).shares_memory
    memory = processes.memory() if shared else None
    world = World(
        transport,
        config,
        threaded=processes.threaded,
        memory=memory,
        on_fatal=abort.fatal,
        processes=[Process(*entry["process"]) for entry in announced],
    )
    guard = abort.guard()
    if guard is not None:
        guard.watch(world.activity)
    abort.at_end(world.close, lambda: "there was a process group" if world.groups else "")
    return world
