"""The session of one worker of several: what all strategies between processes share, put together.

It has the workers and their engine, and helpers that each have a file: control messages, waits with a limit,
agreements, stopping together, the keys and the optimizers that all agreed on. A strategy adds where values live and how
gradients travel.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpikv import errors
from mpikv.codecs.compression import Compressions
from mpikv.collectives import blobs
from mpikv.common.checks import shown
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Operation, Predicate
from mpikv.errors import ConfigError, MpikvError, PeerError, StallError
from mpikv.observe.activity import Activity
from mpikv.observe.log import StoreLog
from mpikv.observe.program import Process, WorkerStatus, this_process
from mpikv.observe.stall import INIT, Waiting
from mpikv.placement import device_paths
from mpikv.placement.keys import Key
from mpikv.placement.members import Members
from mpikv.session.agreed_keys import AgreedSession, KeyEvents
from mpikv.session.agreeing import Agreeing
from mpikv.session.agreement import Agreement
from mpikv.session.base import Pending
from mpikv.session.clocks import ClockProbes
from mpikv.session.messages import ControlMessages
from mpikv.session.questions import Questions
from mpikv.session.rules import RULES
from mpikv.session.stop import Stopping
from mpikv.session.waits import Waits
from mpikv.spaces.named import Spaces
from mpikv.transports import wire
from mpikv.transports.base import Group, Transport
from mpikv.transports.memory import LocalTransport

MISSING = "Not arrived"  # in a report, before the workers that are missing
CALLS_ID, CALLS_NAME = -(1 << 31), "collective calls"  # as if they were pushes of a key, which is in no other list
REPORTS = 64  # each is a question to all workers, answered within milliseconds


class Workers(AgreedSession):
    """The session of one worker of several. links: the transport through memory to servers of this host, if any.

    compressions: default none. store_id: tells it from the other stores of a job. processes: of all ranks, default this
    one. messages: those that are no values. waits, stopping, agreeing: what is done by
    these messages.
    """

    activity: Activity

    def __init__(
        self,
        transport: Transport,
        members: Members,
        name: str,
        *,
        threaded: bool,
        on_fatal: Callable[[BaseException], None],
        links: LocalTransport | None = None,
        compressions: Compressions | None = None,
        spaces: Spaces | None = None,
        store_id: str = "",
        processes: Sequence[Process] = (),
    ) -> None:
        super().__init__(name, members.config, spaces, wire.max_keys(transport.max_tag))
        self.pid = os.getpid()
        self.transport, self.links, self.synchronous = transport, links, members.synchronous
        self.recorder = transport.recorder
        self.on_attributes = []
        if compressions is not None:
            self.compressions = compressions
        self.transport.ledger.tags_from = wire.TAG_KEYS
        self.members = members
        self.group = Group(transport, members.workers)
        self.rank, self.num_workers, self.hosts = self.group.rank, self.group.size, self.group.hosts
        self.number, self.at_start, self.numbers = self.rank, self.num_workers, range(self.num_workers)
        self.log = StoreLog("worker", self.rank, self.group.hosts[self.rank])
        self.shares_memory = members.path == "direct"
        self._different: ConfigError | None = None  # found at the end in the last updates of workers by themselves
        self.calls_made = 0  # without a key (groups/workers.py)
        self.threaded = threaded
        device = self.spaces.device
        around = None if device is None else device.in_stream
        self.engine = Engine(
            threaded=threaded, on_fatal=on_fatal, poll=transport.poll, clock=transport.clock, around=around
        )
        if device is not None:
            device.on_done(self.engine.ring)
            device.recorder = self.recorder
        if links is not None:
            self.engine.waker = links.waker
        self.messages = ControlMessages(transport, self.group, self.engine)
        activity = Activity(self.engine.clock, store_id, self.messages.names[self.rank], self.recorder)
        activity.reached = self._reached
        processes = processes or [this_process()] * transport.size
        servers = dict(zip(members.owner_labels, members.owners, strict=True))
        self.waits = Waits(
            self.messages,
            Questions(self.messages, activity, processes, servers),
            timeout_s=members.config.timeout_s,
            warn_s=members.config.stall_warn_s,
            check_key=self._check_key,
            given=self.given,
        )
        self.agreeing = Agreeing(
            self.messages,
            self.waits,
            agreement=lambda names: Agreement(names, RULES, self._reserve),
            on_verdict=self._verdict,
        )
        self.stopping = Stopping(self.messages, self.waits, self.agreeing, common_steps=members.synchronous)
        self.clock_probes = ClockProbes(self.messages, self.recorder)
        self.activity = activity

    def start(self, events: KeyEvents) -> None:
        """Begin to listen to the other workers, who may be ahead and ask at once. events: the strategy's."""
        self._events = events
        self.engine.serve(self.messages.listen(), "control messages")

    def _pushes(self) -> dict[int, int]:
        return {**super()._pushes(), CALLS_ID: self.calls_made}

    def _reached(self, item: Any) -> int:
        """How far this worker has come in what others may wait for (`Need`)."""
        if isinstance(item, int):
            return self._pushes().get(item, 0)
        topic, count = item
        if topic == INIT:
            return int(count in self._proposed)
        return int(self._counts.get(topic, 0) >= count)

    def stats(self) -> dict[str, Any]:
        members, path = self.members, {}
        compared = {str(key): one.row() for key, one in tuple(self.compared.items())}
        if self.spaces.device is not None or members.device_reasons:
            path = device_paths.stats(members)
        return {
            "messages_sent": self.transport.ledger.messages,
            "bytes_sent": self.transport.ledger.bytes,
            "control_messages_sent": self.messages.sent_messages,
            "failed_looks": self.activity.looks.failed,
            "waits": self.waits.spent.count,
            "waited_s": self.waits.spent.seconds,
            **path,
            **({"compressed_keys": compared} if compared else {}),
        }

    def by_key(self) -> dict[Key | None, int]:
        """The bytes of each key, in the order of their numbers, and under None what belongs to none of them."""
        with self.engine.lock:
            counted = self.transport.ledger.by_key()
            found: dict[Key | None, int] = {info.key: counted.get(info.id, 0) for info in self.in_order()}
        found[None] = sum(counted.values()) - sum(found.values())
        return {key: n_bytes for key, n_bytes in found.items() if n_bytes}

    def workers(self) -> list[WorkerStatus]:
        return self.waits.workers()

    @property
    def can_ask(self) -> bool:
        """Whether a thread beside the program's may call `workers`."""
        return self.threaded and not self.engine.stopped

    # --- calls that are about no key

    def decide(self, call: str, attempt: Callable[[], Any] | None) -> Any:
        """Worker 0 tries something that may fail; every worker gets its result or raises its error. Collective.

        call: the topic. attempt: at worker 0, returns JSON. Its error is raised there; on the others it is the same for
        MpikvError and OSError, and an MpikvError that names it for others.
        """
        self.check_open(call)
        payload: Any = None
        failure: Exception | None = None
        if self.group.rank == 0 and attempt is not None:
            try:
                payload = ["ok", attempt()]
            except Exception as error:  # noqa: BLE001 - raised below; the others must not wait for what does not come
                failure = error
                payload = [type(error).__name__, str(error)]
        kind, result = self.agree(call, payload, call)
        if kind == "ok":
            return result
        if failure is not None:
            raise failure
        raise _error_named(kind)(f"{call} failed at {self.messages.names[0]}: {result}")

    def gather(self, call: str, data: bytes) -> list[bytes]:
        self.agree(call, None, call)  # which says so where a worker has closed, and will not come
        gathering = self.engine.start(blobs.gather(self.group, data, 0, wire.TAG_STATES), "states")
        self.wait_for(gathering, call)
        return gathering.result or []

    def scatter(self, call: str, parts: Sequence[bytes] | None) -> bytes:
        brought = parts if self.rank == 0 else None
        scattering = self.engine.start(blobs.scatter(self.group, brought, 0, wire.TAG_STATES), "states")
        self.wait_for(scattering, call)
        return scattering.result or b""

    def swap(self, call: str, data: bytes, dests: Sequence[int]) -> dict[int, bytes]:
        swapping = self.engine.start(blobs.swap(self.group, data, dests, wire.TAG_STATES), "states")
        self.wait_for(swapping, call)
        return swapping.result or {}

    # --- waiting

    def wait_for(self, request: Operation, call: str, owners: tuple[str, ...] = ()) -> None:
        self.waits.wait(request, Waiting(call, owners=owners))

    def wait(self, pending: Pending, timeout_s: float | None = None, further: Sequence[Pending] = ()) -> None:
        try:
            self.waits.wait(pending.request, pending.waiting, timeout_s, pending.others)
        except StallError as error:
            self._explain(error, pending.others, self.waits.timeout_s if timeout_s is None else timeout_s)
            raise
        except (ConfigError, PeerError) as error:
            waitings = pending.waiting, *pending.others, *(other.waiting for other in further)
            self.given.note(error, (waiting.key_id for waiting in waitings))
            raise

    def _explain(self, error: StallError, others: Sequence[Waiting], limit_s: float) -> None:
        """Of several keys that end together, name one that somebody has not come to, not the first one."""
        if MISSING in str(error):
            return
        for waiting in others[:REPORTS]:
            found = self.waits.report(waiting, limit_s)
            if MISSING in str(found):
                raise found from None

    def progress(self) -> None:
        self.engine.step()

    def barrier(self) -> None:
        for call in self.before_barrier:
            call()
        self.agree("barrier", None, "barrier")

    # --- stopping together

    def stop_requested(self) -> bool:
        if not self.threaded:
            self.engine.step()  # where all other calls go through shared memory, nothing else may look for messages
        self.stopped = self.stopping.stop_requested()
        return self.stopped

    def request_stop(self, why: str) -> None:
        self.stopping.wish(why)

    def listen_for(self, asked: Callable[[], str | None]) -> None:
        self.engine.serve(self.stopping.wish_when(asked), "stop signals")

    @property
    def rounds(self) -> int:
        """How often this worker has pushed the key that it has pushed most."""
        return max(self._events.pushes().values(), default=0)

    # --- the end

    def leave(self, *, matched: bool) -> tuple[dict[int, int], PeerError | None]:
        """Agree that all workers close. Collective.

        matched: whether rounds need all workers. Returns for each key that workers have pushed unequally often the
        rounds that all have in common, and the error to raise where this worker pushed more.
        """
        pushes = self._pushes()
        # Workers may well have different amounts of work left, and a last evaluation takes its time.
        payload = [sorted(pushes.items()) if matched else [], self.attributes.updates()]
        unmatched, different = self.agree("close", payload, "close", patient=True)
        if different:
            self._different = ConfigError(different)
        self.wait_for(Predicate(self.messages.sent), "close")
        error = None
        names = {CALLS_ID: CALLS_NAME, **{info.id: info.key for info in self.infos.values()}}
        for key_id, _, least, short in unmatched:
            if (error is None or self.given.has(error)) and pushes.get(key_id, 0) > least:
                error = PeerError(
                    f"{self.messages.me}, close: key {shown(names[key_id])} was pushed {pushes[key_id]} times here and "
                    f"{least} times by {short}; round {least + 1} was never complete"
                )
                if self.given.has(error, (key_id,)):
                    self.given.mark(error)
        return {key_id: least for key_id, _, least, _ in unmatched}, error

    def not_given(self) -> Iterator[BaseException]:
        """Of transfers that nobody waited for, keys of which a server has refused to update a round, keys that workers
        did not agree on after `init` had returned, and last updates that differ.
        """
        for running in self.engine.failed:
            if running.error is not None and not (running.raised or self.given.has(running.error)):
                yield running.error
        for key_id, error in self.waits.refused.items():
            if not self.given.has(error, (key_id,)):
                yield error
        # A key that others have closed without does no harm to who has not used it; when it is known depends on time.
        broken = [error for error in self._broken.values() if not isinstance(error, PeerError)]
        lasting = [*broken, *([] if self._different is None else [self._different])]
        yield from (error for error in lasting if not self.given.has(error))

    def end(self) -> None:
        """End the engine and the transports; nothing is under way any more."""
        self.abandon()
        self.transport.close()
        self.spaces.close()
        self._forget()

    def _forget(self) -> None:
        """Refer no more to those who are told of things, and have the keys: so the values go with the store's last
        reference, and not when Python looks for cycles of objects, which may be much later.
        """
        pushes = self._events.pushes()
        self._events = KeyEvents(_closed, _closed, _closed, lambda: pushes)
        for told in (self.on_attributes, self.before_barrier, self.messages.acts):
            told.clear()
        self.links = self.engine.waker = None

    def give_up(self) -> None:
        """End without the others, of whom some have died; those that are left have another session."""
        self.abandon()
        for call in self.after_close:
            call()
        self.after_close.clear()
        self._forget()

    def abandon(self) -> None:
        super().abandon()
        self.engine.stop()
        if self.links is not None:
            self.links.close()


def _closed(*_: Any) -> None:
    raise MpikvError("a key was agreed on in a store that is closed")


def _error_named(name: str) -> type[Exception]:
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, (MpikvError, OSError)) else MpikvError
