"""What every distributed strategy shares: the workers of one store, their engine, the keys they agreed on.

A strategy adds where values live and how gradients travel; this object adds agreement on keys and optimizers, waiting
with a limit, barriers and the end.
"""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import cloudpickle

from mpikv.arrays import compiled
from mpikv.arrays.as_numpy import dtype_of
from mpikv.codecs import compression
from mpikv.codecs.compression import Compression, Compressions
from mpikv.codecs.error_feedback import ErrorFeedback
from mpikv.codecs.identity import IDENTITY
from mpikv.collectives import blobs
from mpikv.common.checks import shown
from mpikv.placement.labels import Labels, Under
from mpikv.engine.engine import Engine
from mpikv.engine.request import Predicate, Request, Steps
from mpikv.errors import ConfigError, MpikvError, PeerError, StallError, UnsupportedError
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import DEFAULT_SLOT
from mpikv.placement import device_paths
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.members import Members
from mpikv.session.agreement import ROUND, Agreement, Disagreement, Item, Name
from mpikv.session.base import NewKey, Pending, Session, Updater
from mpikv.session.proposals import Reply
from mpikv.session.rules import RULES
from mpikv.session.service import Control
from mpikv.spaces.named import Spaces
from mpikv.transports import wire
from mpikv.transports.base import Group, Transport
from mpikv.transports.memory import LocalTransport
from mpikv.transports.ordered import OrderedTransport

MISSING = "Not arrived"  # what a report says where workers are missing
REPORTS = 64  # each is a question to all workers, answered within milliseconds


class KeyEvents(NamedTuple):
    """What a strategy does with keys as they are agreed on, as functions. Called under the engine's lock.

    reserve: at worker 0: what all ranks must know of a new key beyond what they brought, as JSON. begin: the key exists
    from now on, with what was reserved for it: its first verdict has come, maybe a provisional one. broken: workers did
    not agree on a key that has begun. pushes: how often this worker has pushed each key, by number. agreed: all workers
    agreed on it; called in the same order on every worker.
    """

    reserve: Callable[[KeyInfo], Any]
    begin: Callable[[KeyInfo, Any], None]
    broken: Callable[[KeyInfo], None]
    pushes: Callable[[], dict[int, int]]
    agreed: Callable[[KeyInfo], None] | None = None


def _check_pull(call: str, key: Key, travels: Compression) -> None:
    """ConfigError where owners would send back an updated value by a codec that is for sums of gradients."""
    if isinstance(travels.pull, ErrorFeedback) and travels.pull.codec.rounds:
        raise ConfigError(
            f"{call}: with an optimizer the value of key {shown(key)} comes back, and 'pull': {travels.pull.name!r} "
            "with 'error_feedback' is for sums of gradients: leave 'error_feedback' away"
        )
    if not travels.pull.rounds:
        raise ConfigError(
            f"{call}: with an optimizer the value of key {shown(key)} comes back, and 'pull': {travels.pull.name!r} is "
            "for sums of gradients: leave 'pull' away, or take 'fp16', 'bf16' or another codec that rounds each value"
        )


class Workers(Session):
    """The session of one worker of several. links: the transport through memory to servers of this host, if any.

    compressions: default none.
    """

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
    ) -> None:
        super().__init__(name, members.config.stop_file, spaces)
        self.pid = os.getpid()
        self.transport, self.links, self.synchronous = transport, links, members.synchronous
        if compressions is not None:
            self.compressions = compressions
        self.priorities: dict[int, int] = {}  # of the rounds under way, by the key's number
        # What the collectives of keys send to other hosts leaves by priority; None: there are none.
        self.ordered: OrderedTransport | None = None
        others = [rank for rank in members.workers if transport.hosts[rank] != transport.hosts[transport.rank]]
        if others and members.path != "servers" and members.config.bucket_bytes:
            self.ordered = OrderedTransport(transport, others, members.config.bucket_bytes, self.priorities)
        self._go_with(members)
        self._events: KeyEvents
        self._broken: dict[Key, MpikvError] = {}
        self._released: set[Key] = set()
        self._counts: dict[str, int] = {}
        self._different: ConfigError | None = None  # found at the end in the last updates of workers by themselves
        self._epoch_rounds = 0  # of the key that was pushed most, when the last epoch began
        self._next_id, self._most_keys = 0, wire.max_keys(transport.max_tag)
        self._threaded = threaded
        poll = transport.poll if self.ordered is None else self.ordered.poll
        device = self.spaces.device
        around = None if device is None else device.here
        self.engine = Engine(threaded=threaded, on_fatal=on_fatal, poll=poll, clock=transport.clock, around=around)
        if device is not None:
            device.rings(self.engine.ring)
        if links is not None:
            self.engine.waker = links.waker
        self.control = Control(
            transport,
            self.group,
            self.engine,
            self._new_agreement(),
            timeout_s=members.config.timeout_s,
            common_steps=members.synchronous,
            pushes=self._pushes,
            on_verdict=self._verdict,
            check_key=self._check_key,
            given=self.given,
        )
        self.activity = self.control.activity

    def start(self, events: KeyEvents) -> None:
        """Begin to listen to the other workers, who may be ahead and ask at once. events: the strategy's."""
        self._events = events
        self._listening = self.engine.serve(self.control.listen(), "control messages")

    # --- the ranks

    def _go_with(self, members: Members) -> None:
        """Who the workers are, as all else here has it."""
        self.members = members
        self.group = Group(self.transport, members.workers)
        self.key_group = self.group if self.ordered is None else Group(self.ordered, members.workers)
        self.rank, self.num_workers = self.group.rank, self.group.size
        self.shares_memory = members.path == "direct"

    def _new_agreement(self) -> Agreement | None:
        """At worker 0: what it decides with."""
        if self.rank:
            return None
        labels = [f"worker {i} on {host}" for i, host in enumerate(self.group.hosts)]
        return Agreement(labels, RULES, self._reserve)

    def regroup(self, members: Members) -> None:
        """Go on with the workers of `members` alone, some of those before; worker 0 may be another one. Local.

        Each of them must call it; what one of them sends to another waits until it has. Nothing may be under way.
        """
        with self.engine.lock:
            self._go_with(members)
            self._next_id = max((info.id + 1 for info in self.infos.values()), default=self._next_id)
            self.control.regroup(self.group, self._new_agreement())
            self._listening.cancel()
            self._listening = self.engine.serve(self.control.listen(), "control messages")

    # --- keys

    def _pushes(self) -> dict[int, int]:
        return self._events.pushes()

    def _reserve(self, name: Name, payload: Any) -> Any:
        key_id = self._next_id
        if key_id >= self._most_keys:
            raise Disagreement(
                MpikvError, f"init of key {shown(name)}: this MPI library has tags for {self._most_keys} keys only"
            )
        self._next_id += 1
        result = [key_id, *payload]
        return [*result, self._events.reserve(self._info(name, result))]

    @staticmethod
    def _info(name: Name, result: Sequence[Any]) -> KeyInfo:
        return KeyInfo(name, result[0], tuple(result[1]), dtype_of(result[2]), *result[3:6])

    def _verdict(self, item: Item, reply: Reply) -> None:
        topic, name = item
        if topic != "init":
            return
        if reply.error is None:
            info = self._info(name, reply.result)
            if name not in self.infos:
                self.infos[name] = info
                self.any_sparse |= info.sparse
                self._events.begin(info, reply.result[6])
            if reply.final:
                self._released.discard(name)
                if self._events.agreed is not None:
                    self._events.agreed(info)
            else:
                self._released.add(name)
        elif name in self._released:
            # `init` has returned already, so the next use of the key tells.
            self._released.discard(name)
            self._broken[name] = reply.exception()
            self._events.broken(self.infos.pop(name))

    def agree_on_keys(self, values: Sequence[NewKey]) -> tuple[list[KeyInfo], MpikvError | None]:
        """Propose new keys and wait; the placement begins each of them when its verdict comes. Collective.

        Returns the keys that are there, and the error to raise: ShapeMismatch on every worker when they brought
        different values.
        """
        names_of = {dtype: str(dtype) for dtype in {new.value.dtype for new in values}}
        items, links, compresses = [], self.members.links, self.compressions.any
        for new in values:
            dtype, codec = new.value.dtype, IDENTITY.name
            if dtype.itemsize == 2:  # half precision
                compiled.prepare_key(dtype, new.value.nbytes)
            if compresses and not new.sparse:  # rows travel as they are
                travels = self.compressions.of(new.key, dtype, links=links).for_shape(new.shape)
                codec = travels.text
                if DEFAULT_SLOT in self._optimizers:
                    _check_pull("init", new.key, travels)
            items.append(("init", new.key, [list(new.shape), names_of[dtype], codec, new.space, new.sparse]))
        proposal = self.control.propose(items)
        names = ", ".join(shown(new.key) for new in values[:3]) + (", ..." if len(values) > 3 else "")
        self.control.wait(proposal, Waiting(f"init({names})"))
        replies = [(item[1], proposal.replies[item]) for item in proposal.items]
        agreed = [
            self.infos.get(name) or self._info(name, reply.result) for name, reply in replies if reply.error is None
        ]
        errors = [reply.exception() for _, reply in replies if reply.error is not None]
        return agreed, errors[0] if errors else None

    def _check_key(self, key: Key) -> None:
        if key in self._broken:
            raise self._broken[key]
        info = self.infos.get(key)
        if info is not None and info.id in self.control.refused:
            raise self.control.refused[info.id]

    def is_released(self, info: KeyInfo) -> bool:
        """Whether `init` of this key has to return before all workers have come to it."""
        return info.key in self._released or info.key in self._broken

    def lookup(self, key: Key) -> KeyInfo | None:
        """What was agreed on `key`. Raises what became of an `init` that returned before all workers had come."""
        info = self.infos.get(key)
        try:
            self._check_key(key)
        except MpikvError as error:
            self.given.note(error, () if info is None else (info.id,))
            raise
        return info

    def stats(self) -> dict[str, Any]:
        """What the transport and the control messages have counted, and the path of keys in device memory."""
        members, path = self.members, {}
        if self.spaces.device is not None or members.device_reasons:
            path = device_paths.stats(members)
        return {
            "messages_sent": self.transport.sent_messages,
            "bytes_sent": self.transport.sent_bytes,
            "control_messages_sent": self.control.sent_messages,
            **path,
        }

    # --- waiting

    def wait(self, pending: Pending, timeout_s: float | None = None, further: Sequence[Pending] = ()) -> None:
        """Block until a transfer is done."""
        try:
            self.control.wait(pending.request, pending.waiting, timeout_s)
        except StallError as error:
            self._explain(error, pending.others, self.control.timeout_s if timeout_s is None else timeout_s)
            raise
        except (ConfigError, PeerError) as error:
            waitings = pending.waiting, *pending.others, *(other.waiting for other in further)
            self.given.note(error, (waiting.key_id for waiting in waitings))
            raise

    def _explain(self, error: StallError, others: Sequence[Waiting], limit_s: float) -> None:
        """Of several keys that end together, tell of one that somebody has not come to, not of the first one."""
        if MISSING in str(error):
            return
        for waiting in others[:REPORTS]:
            found = self.control.report(waiting, limit_s)
            if MISSING in str(found):
                raise found from None

    def wait_for(self, request: Request, call: str, owners: tuple[str, ...] = ()) -> None:
        """Block until a request of a whole call is done."""
        self.control.wait(request, Waiting(call, owners=owners))

    def progress(self) -> None:
        """Move transfers on without waiting."""
        self.engine.step()

    def gathering(self) -> AbstractContextManager[None]:
        """A block in which a call puts together what it sends: short messages leave at its end, or in full bundles."""
        return nullcontext() if self.ordered is None else self._gathering(self.ordered)

    @contextmanager
    def _gathering(self, ordered: OrderedTransport) -> Iterator[None]:
        with self.engine.lock:
            ordered.gathering += 1
        try:
            yield
        finally:
            with self.engine.lock:
                ordered.gathering -= 1
                ordered.flush()

    def barrier(self) -> None:
        """Wait for all workers. Collective, blocks."""
        for call in self.before_barrier:
            call()
        self.agree("barrier", None, "barrier")

    def _count(self, topic: str) -> int:
        self._counts[topic] = self._counts.get(topic, 0) + 1
        return self._counts[topic]

    def agree(self, topic: str, payload: Any, call: str, *, patient: bool = False) -> Any:
        """One agreement of all workers under a topic that has no name but its count. Collective, blocks."""
        try:
            return self.control.agree(topic, self._count(topic), payload, Waiting(call), patient=patient)
        except MpikvError as error:
            if not isinstance(error, (StallError, PeerError)):
                # Refused on every worker that made this call, and others were never in it: the count stays in step.
                self._counts[topic] -= 1
            raise

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
        raise _error_named(kind)(f"{call} failed at {self.control.labels[0]}: {result}")

    def gather(self, call: str, data: bytes) -> list[bytes]:
        """See `Session`."""
        gathering = self.engine.start(blobs.gather(self.group, data, 0, wire.TAG_STATES), "states")
        self.wait_for(gathering, call)
        return gathering.result or []

    def scatter(self, call: str, parts: Sequence[bytes] | None) -> bytes:
        """See `Session`."""
        brought = parts if self.rank == 0 else None
        scattering = self.engine.start(blobs.scatter(self.group, brought, 0, wire.TAG_STATES), "states")
        self.wait_for(scattering, call)
        return scattering.result or b""

    # --- optimizers

    def agree_on_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> tuple[int, list[int], bytes]:
        """All workers bring equal optimizers. Returns the slot, the keys' numbers and the pickled optimizer."""
        try:
            pickled = cloudpickle.dumps(optimizer)
        except Exception as error:
            name = type(optimizer).__name__
            raise ConfigError(f"set_optimizer: {name} cannot be pickled for its owners: {error}") from error
        for info in self.infos.values() if keys is None else [self.infos[key] for key in keys]:
            if keys is not None or self.slot_of(info) == DEFAULT_SLOT:
                _check_pull("set_optimizer", info.key, compression.of_text(info.codec))
        self._compare(optimizer, keys)
        slot, key_ids = self.serve(optimizer, keys)
        self.attributes.watch(slot, optimizer)
        return slot, key_ids, pickled

    def _compare(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        config = json.dumps(optimizer.config(), sort_keys=True)
        self.agree("set_optimizer", [config, None if keys is None else list(keys)], "set_optimizer")

    def agree_on_own_updates(self, optimizer: Optimizer, keys: Sequence[Key]) -> tuple[int, list[int]]:
        """All workers bring equal optimizers, to update these keys with by themselves. The slot, the keys' numbers."""
        self._compare(optimizer, keys)
        slot, key_ids = self.new_slot([self.infos[key] for key in keys])
        exact = any(self.infos[key].dtype.kind in "iu" for key in keys)
        self.attributes.watch(slot, optimizer, exact=exact, scales=False)
        return slot, key_ids

    # --- labels

    def under(self, info: KeyInfo) -> tuple[Under, dict[str, Any] | None]:
        """What a push of this key is made under now, and its attributes where they are new under that number. Local."""
        exact = not self.synchronous or self.num_workers == 1 or info.dtype.kind in "iu"
        return self.attributes.under(self.slot_of(info), exact=exact)

    def different(self, info: KeyInfo, round_: int, labels: Labels) -> Steps[ConfigError]:
        """The error of a round that workers have pushed under different labels, as all of them know. Worker 0 says what
        differs. For the engine.
        """
        proposal = self.control.propose([(ROUND, info.id, [info.key, round_, labels])])
        yield proposal
        return proposal.replies[ROUND, info.id].exception()  # type: ignore[return-value]

    def agree_on_factor(self, key: Key) -> None:
        """Owners apply worker 0's factor of now to this key, and those beside it, from now on. Collective, blocks."""
        slot, optimizer = self.slot_of(self.infos[key]), self.attributes
        waiting = Waiting("the first step")
        optimizer.agree(slot, self.control.agree("factor", slot, optimizer.own_factor(slot), waiting))

    def set_updater(self, updater: Updater) -> None:
        """Not here: the owner is another process."""
        raise UnsupportedError("set_updater works in local stores only; use set_optimizer with a callable")

    # --- stopping together

    def stop_requested(self) -> bool:
        """One read; see session/stop.py."""
        if not self._threaded:
            self.engine.step()  # where all other calls go through shared memory, nothing else may look for messages
        self.stopped = self.control.stop_requested()
        return self.stopped

    def request_stop(self, why: str) -> None:
        """Tell worker 0, who asks all."""
        self.control.wish(why)

    def listen_for(self, asked: Callable[[], str | None]) -> None:
        """Ask all workers to stop once `asked()` says why."""
        self.engine.serve(self.control.wish_when(asked), "stop signals")

    def begin_epoch(self, epoch: int) -> None:
        """Tell worker 0 how many rounds the last epoch had. Local."""
        rounds = max(self._pushes().values(), default=0)
        self.control.begin_epoch(self._count("epoch"), epoch, rounds - self._epoch_rounds)
        self._epoch_rounds = rounds

    # --- the end

    def leave(self, *, matched: bool) -> tuple[dict[int, int], PeerError | None]:
        """Agree that all workers close. Collective.

        matched: whether rounds need all workers. Returns for each key that workers have pushed unequally often the
        rounds that all have in common, and the error to raise where this worker pushed more.
        """
        pushes = self._pushes()
        if matched:
            with self.engine.lock:
                self.control.leave(pushes)
        # Workers may well have different amounts of work left, and a last evaluation takes its time.
        payload = [sorted(pushes.items()) if matched else [], self.attributes.updates()]
        unmatched, different = self.agree("close", payload, "close", patient=True)
        if different:
            self._different = ConfigError(different)
        self.wait_for(Predicate(self.control.sent), "close")
        error = None
        names = {info.id: info.key for info in self.infos.values()}
        for key_id, _, least, short in unmatched:
            if (error is None or self.given.has(error)) and pushes.get(key_id, 0) > least:
                error = PeerError(
                    f"{self.control.me}, close: key {shown(names[key_id])} was pushed {pushes[key_id]} times here and "
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
        for key_id, error in self.control.refused.items():
            if not self.given.has(error, (key_id,)):
                yield error
        # A key that others have closed without does no harm to who has not used it, and when it is known depends on time.
        broken = [error for error in self._broken.values() if not isinstance(error, PeerError)]
        lasting = [*broken, *([] if self._different is None else [self._different])]
        yield from (error for error in lasting if not self.given.has(error))

    def end(self) -> None:
        """End the engine and the transports; nothing is under way any more."""
        self.abandon()
        self.transport.close()
        self.spaces.close()

    def abandon(self) -> None:
        """Stop the engine, and close what wakes it."""
        self.engine.stop()
        if self.links is not None:
            self.links.close()


def _error_named(name: str) -> type[Exception]:
    from mpikv import errors  # noqa: PLC0415

    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, (MpikvError, OSError)) else MpikvError
