"""Control messages between the workers of one store: proposals and verdicts, who has left, where everybody is.

A listener, one generator in the progress engine, receives every control message and acts on it at once, also while this
rank's program computes. So a rank that waits too long can ask the others what they are doing, and tells its user.

Kinds of messages: `propose` (to worker 0), `verdicts` (from worker 0), `left` (to worker 0: a worker has closed, with
its number of pushes per key) and `gone` (from worker 0 to those still at work: how few pushes others left with; see
leaving.py), `where` and `here` (question and answer of a stall report), `ping` (from a server that has heard nothing
for long; answered by `pong`). To stop together (stop.py): `wish` (to worker 0, also from a server), `stop` (worker 0's
orders), `reads` (the answers). `refused`: from a server, which has updated nothing in a round.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv.engine.engine import Engine
from mpikv.engine.request import Predicate, Request, Steps
from mpikv.errors import ConfigError, MpikvError, PeerError, StallError
from mpikv.observe.activity import Activity
from mpikv.observe.stall import Waiting, stall_text
from mpikv.placement.keys import Key
from mpikv.session import cross_waits
from mpikv.session.agreement import Agreement, Item, Name, Verdict
from mpikv.session.epochs import Epochs
from mpikv.session.given import GivenErrors
from mpikv.session.leaving import Departures, Fewest
from mpikv.session.proposals import Proposal, Reply
from mpikv.session.stop import Answer, Leader, Order, Reader
from mpikv.transports import wire
from mpikv.transports.base import Arrival, Group, Transport

SAME_ORDER = "all workers must close their stores, and make the other calls of several stores, in the same order"
BLOCK = 100  # verdicts in one message: a worker acts on as many in some milliseconds
ANSWER_S = 2.0  # how long a stall report waits for answers; a listening rank answers within some milliseconds


class _Listening:
    """A request that is done when a message has come; besides it looks after what is due at a time."""

    def __init__(self, arrival: Arrival, look_after: Callable[[], None]) -> None:
        self._arrival = arrival
        self._look_after = look_after

    def test(self) -> bool:
        """Whether it has."""
        self._look_after()
        return self._arrival.test()


class Held:
    """A request: the read of `stop_requested` that waits for the workers' decision."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.said: bool | None = None

    def test(self) -> bool:
        """Whether it may return."""
        if self.said is None:
            self.said, _ = self._reader.read()
        return self.said is not None


class Control:
    """One worker's end of the control messages.

    workers: the workers' ranks. agreement: at worker 0 the state machine, elsewhere None. common_steps: whether all
    workers make the same steps (synchronous stores). pushes: key id -> how often
    this worker has pushed that key. on_verdict(item, reply): called for every verdict when it comes; final ones come in
    the same order on every worker. check_key(key): raises what became of a key that workers did not agree on after all.
    given: notes the errors that waits raise.
    """

    def __init__(
        self,
        transport: Transport,
        workers: Group,
        engine: Engine,
        agreement: Agreement | None,
        *,
        timeout_s: float,
        common_steps: bool,
        pushes: Callable[[], dict[int, int]],
        on_verdict: Callable[[Item, Reply], None],
        check_key: Callable[[Key], None],
        given: GivenErrors,
    ) -> None:
        self.activity = Activity(engine.clock)
        # Ranks may be threads.
        self._process = f"{socket.gethostname()} {os.getpid()} {threading.get_ident()}"
        self.engine = engine
        self.timeout_s = timeout_s
        self._transport = transport
        self._pushes = pushes
        self._on_verdict = on_verdict
        self._check_key, self._given = check_key, given
        self._proposals: list[Proposal] = []
        self._waits: Waiting | None = None  # what this worker waits for now
        self._held_by: frozenset[str] = frozenset()  # at the last report: who has not come, and whom these wait for
        self._question = 0
        self._sending: list[Request] = []
        self.sent_messages = 0  # counted since the start
        self._common_steps = common_steps
        self._reader = Reader(common=common_steps)
        self._asked: Callable[[], str | None] = lambda: None
        self._wished = False
        self._ended = False  # all workers have closed the store
        self.refused: dict[int, MpikvError] = {}  # keys of which a server has refused to update a round
        self._regrouped = -1
        self.regroup(workers, agreement)

    def regroup(self, workers: Group, agreement: Agreement | None) -> None:
        """Go on among these workers, some of those before, by what `listen` receives from its next call on.

        What is known of the former ones, by their numbers, is forgotten. Nothing may be under way. Local.
        """
        self._workers, self._agreement = workers, agreement
        self._regrouped += 1
        self._tag = wire.control_tag(self._regrouped)
        self.labels = [f"worker {i} on {host}" for i, host in enumerate(workers.hosts)]
        self.me = f"{self.labels[workers.rank]} (rank {self._transport.rank} of {self._transport.size})"
        self._fewest: dict[int, Fewest] = {}  # key id -> pushes of those that have left
        self._answers: dict[int, dict[str, Any]] = {}
        leads = agreement is not None
        self._departures = Departures(workers.size) if leads else None
        self._epochs = Epochs(self.labels) if leads else None
        self._leader = Leader(workers.size, common=self._common_steps) if leads else None

    # --- sending

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        self.sent_messages += 1
        data = wire.control(message)
        self._sending = [request for request in self._sending if not request.test()]
        self._sending.append(self._transport.isend(data, rank, self._tag))

    def sent(self) -> bool:
        """Whether everything this worker sent has left, and nothing more comes in answer to it."""
        with self.engine.lock:
            self._sending = [request for request in self._sending if not request.test()]
            return not self._sending and (self._leader is None or self._leader.settled)

    # --- agreeing

    def propose(self, items: Sequence[tuple[str, Name, Any]]) -> Proposal:
        """Propose to worker 0. Local; wait for the result with `agree` or `wait`."""
        proposal = Proposal([(topic, name) for topic, name, _ in items])
        with self.engine.lock:
            self._proposals.append(proposal)
            if self._agreement is not None:
                self._deliver(self._agreement.propose(self._workers.rank, items))
            else:
                message = {"kind": "propose", "worker": self._workers.rank, "items": [list(item) for item in items]}
                self._send(self._workers.ranks[0], message)
        return proposal

    def agree(self, topic: str, name: Name, payload: Any, waiting: Waiting, *, patient: bool = False) -> Any:
        """Propose and wait. Collective over the workers. Raises what they agreed to raise.

        patient: past the time limit go on waiting as long as every other worker answers that it is alive, and does not
        wait for this one in another store.
        """
        proposal = self.propose([(topic, name, payload)])
        while True:
            try:
                self.wait(proposal, waiting)
                break
            except StallError as stall:
                if not patient or len(self._answers) < self._workers.size - 1:
                    raise
                self.activity.waits_for = self._held_by
                if self._process in self._held_by:
                    raise StallError(f"{stall} They wait for this worker in another store: {SAME_ORDER}.") from None
                print(f"mpikv: {stall} Still waiting.", file=sys.stderr, flush=True)
        self.activity.waits_for = frozenset()
        return proposal.replies[topic, name].unwrap()

    def _deliver(self, verdicts: Sequence[Verdict]) -> None:
        if self._leader is not None and self._agreement is not None:
            self._order(self._leader.blocked(self._agreement.blocked()))
        by_worker: dict[int, list[Verdict]] = {}
        for verdict in verdicts:
            by_worker.setdefault(verdict.worker, []).append(verdict)
        # In blocks, on which all act side by side. This worker first: then the first value of a key is there.
        for begin in range(0, max(map(len, by_worker.values()), default=0), BLOCK):
            for verdict in by_worker.get(self._workers.rank, ())[begin : begin + BLOCK]:
                self._decided((verdict.topic, verdict.name), Reply(verdict.result, verdict.error, verdict.final))
            for worker, some in by_worker.items():
                block = some[begin : begin + BLOCK]
                if block and worker != self._workers.rank:
                    self._send(self._workers.ranks[worker], {"kind": "verdicts", "verdicts": block})

    def _decided(self, item: Item, reply: Reply) -> None:
        self._on_verdict(item, reply)
        for proposal in self._proposals:
            if proposal.take(item, reply):
                if proposal.test():
                    self._proposals.remove(proposal)
                break
        if item[0] == "close" and reply.error is None:
            self._ended = True
            if self._leader is not None:
                self._leader.end()

    # --- stopping together

    def wish(self, why: str) -> None:
        """Ask all workers to stop. Local. why: who or what asked, for the one line that worker 0 prints."""
        with self.engine.lock:
            if not self._wished and not self._ended:
                self._wished = True
                self._wish(f"{why} at {self.labels[self._workers.rank]}")

    def _wish(self, text: str) -> None:
        if self._leader is None:
            self._send(self._workers.ranks[0], {"kind": "wish", "text": text})
        elif orders := self._leader.wish():
            print(f"mpikv: {text}: all workers stop after their step", file=sys.stderr, flush=True)
            self._order(orders)

    def wish_when(self, asked: Callable[[], str | None]) -> Steps[None]:
        """A service that wishes to stop as soon as `asked()` says why."""
        self._asked = asked
        yield Predicate(lambda: asked() is not None)
        self.wish(asked() or "")

    def _order(self, orders: Sequence[Order]) -> None:
        for worker, kind, value in orders:
            if worker == self._workers.rank:
                self._obey(kind, value)
            else:
                self._send(self._workers.ranks[worker], {"kind": "stop", "order": kind, "value": value})

    def _obey(self, kind: str, value: int) -> None:
        self._answer(self._reader.obey(kind, value))

    def _answer(self, answer: Answer | None) -> None:
        if answer is None:
            return
        if self._leader is None:
            self._send(self._workers.ranks[0], {"kind": "reads", "worker": self._workers.rank, "answer": list(answer)})
        else:
            self._order(self._leader.answer(self._workers.rank, answer))

    def stop_requested(self) -> bool:
        """One read, see stop.py. Blocks while workers agree. Raises StallError where they do not come to it."""
        why = self._asked()
        if why is not None:
            self.wish(why)
        with self.engine.lock:
            said, answer = self._reader.read()
            self._answer(answer)
            if said is None:
                said, _ = self._reader.read()  # the answer may have been the last one that was missing
        if said is None:
            held = Held(self._reader)
            self.wait(held, Waiting("stop_requested"))
            said = held.said
        return bool(said)

    def begin_epoch(self, count: int, epoch: int, batches: int) -> None:
        """Tell worker 0 how many batches the last epoch had here. count: of this worker's epochs. Local."""
        with self.engine.lock:
            if self._epochs is not None:
                self._epoch_begins(self._workers.rank, count, epoch, batches)
            else:
                message = {"kind": "epoch", "worker": self._workers.rank, "begin": [count, epoch, batches]}
                self._send(self._workers.ranks[0], message)

    def _epoch_begins(self, worker: int, count: int, epoch: int, batches: int) -> None:
        text = None if self._epochs is None else self._epochs.begin(worker, count, epoch, batches)
        if text is not None:
            print(f"mpikv: warning: {text}", file=sys.stderr, flush=True)

    # --- leaving

    def leave(self, pushes: dict[int, int]) -> None:
        """Tell worker 0, and so the others, that this one pushes nothing any more."""
        with self.engine.lock:
            if self._departures is not None:
                self._departures.add(self._workers.rank, pushes, self.engine.clock.now_s())
            else:
                message = {"kind": "left", "worker": self._workers.rank, "pushes": sorted(pushes.items())}
                self._send(self._workers.ranks[0], message)

    def _pass_on(self) -> None:
        """At worker 0 tell who has left."""
        if self._departures is not None:
            for worker, fewest in self._departures.due(self.engine.clock.now_s()):
                self._send(self._workers.ranks[worker], {"kind": "gone", "fewest": fewest})

    def _know(self, fewest: Sequence[Fewest]) -> None:
        for one in fewest:
            known = self._fewest.get(one.key_id)
            if known is None or one.pushes < known.pushes:
                self._fewest[one.key_id] = one

    # --- listening

    def listen(self) -> Steps[None]:
        """The listener: receives and acts for ever."""
        while True:
            arrival = Arrival(self._transport, self._tag)
            yield _Listening(arrival, self._pass_on)
            data = np.empty(arrival.incoming.n_bytes, np.uint8)
            yield arrival.incoming.receive(data)
            self._act(arrival.incoming.source, wire.parse_control(data))

    def _act(self, source: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "propose":
            if self._agreement is None:
                raise MpikvError(f"{self.me}: a proposal from rank {source} came here instead of to worker 0")
            items = [(topic, name, payload) for topic, name, payload in message["items"]]
            self._deliver(self._agreement.propose(message["worker"], items))
        elif kind == "verdicts":
            for verdict in (Verdict(*fields) for fields in message["verdicts"]):
                error = None if verdict.error is None else (verdict.error[0], verdict.error[1])
                self._decided((verdict.topic, verdict.name), Reply(verdict.result, error, verdict.final))
        elif kind == "left":
            if self._departures is not None:
                self._departures.add(message["worker"], dict(message["pushes"]), self.engine.clock.now_s())
                self._know(tuple(self._departures.fewest.values()))
        elif kind == "gone":
            self._know([Fewest(*one) for one in message["fewest"]])
        elif kind == "where":
            here = {"kind": "here", "worker": self._workers.rank, "question": message["question"]}
            pushes = self._pushes().get(message["key_id"], 0)
            here |= {"process": self._process, "waits_for": sorted(self.activity.held_by())}
            here["needs"] = cross_waits.need(self._waits)
            self._send(source, {**here, "pushes": pushes, "doing": self.activity.text()})
        elif kind == "here":
            if message["question"] == self._question:
                self._answers[message["worker"]] = message
        elif kind == "epoch":
            self._epoch_begins(message["worker"], *message["begin"])
        elif kind == "wish":
            self._wish(message["text"])
        elif kind == "stop":
            self._obey(message["order"], message["value"])
        elif kind == "reads":
            if self._leader is not None:
                self._order(self._leader.answer(message["worker"], Answer(*message["answer"])))
        elif kind == "refused":
            self.refused[message["key_id"]] = ConfigError(message["text"])
        elif kind == "ping":
            self._send(source, {"kind": "pong"})
        else:
            raise MpikvError(f"{self.me}: a control message of unknown kind {kind!r} from rank {source}")

    # --- waiting

    def wait(self, request: Request, waiting: Waiting, timeout_s: float | None = None) -> None:
        """Block until `request` is done.

        Raises its error; PeerError as soon as what is waited for cannot come any more; StallError after `timeout_s`
        (default: the store's).
        """
        try:
            self._wait(request, waiting, timeout_s)
        except Exception as error:
            self._given.note(error)
            raise

    def _wait(self, request: Request, waiting: Waiting, timeout_s: float | None) -> None:
        with self.engine.lock:
            if self.engine.failure is None and request.test():
                self.activity.note(waiting)
                return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        begun_s = asked_s = self.engine.clock.now_s()
        asked = False

        def look() -> None:
            nonlocal asked_s, asked
            self.check(waiting)
            now_s = self.engine.clock.now_s()
            if waiting.round is None:
                return
            if asked and any(cross_waits.for_ever(waiting, self._pushes(), one) for one in self._answers.values()):
                raise self.report(waiting, round(now_s - begun_s, 1))
            if now_s - asked_s >= cross_waits.ASK_AFTER_S:
                asked_s, asked = now_s, True
                self._ask_where(waiting)

        self._waits = waiting
        try:
            with self.activity.during(waiting):
                self.engine.wait(request, limit_s, lambda: self.report(waiting, limit_s), look)
        finally:
            self._waits = None

    def check(self, waiting: Waiting) -> None:
        """Raise PeerError, or what became of the key, when this wait can never end."""
        if waiting.key is not None:
            self._check_key(waiting.key)
        if waiting.round is None or waiting.key_id is None:
            return
        fewest = self._fewest.get(waiting.key_id)
        if fewest is not None and fewest.pushes < waiting.round:
            error = PeerError(
                f"{self.me}, {waiting}: {self.labels[fewest.worker]} closed its store after {fewest.pushes} pushes of "
                f"this key, so that round {waiting.round} can never be complete (did its program end early?)"
            )
            error.behind = self.labels[fewest.worker], waiting.round - fewest.pushes
            raise error

    def _ask_where(self, waiting: Waiting) -> list[int]:
        """Ask every other worker where it is. These workers; their answers come to `_answers`."""
        others = [worker for worker in range(self._workers.size) if worker != self._workers.rank]
        with self.engine.lock:
            self._question += 1
            self._answers = {}
            for worker in others:
                key_id = -1 if waiting.key_id is None else waiting.key_id
                self._send(self._workers.ranks[worker], {"kind": "where", "question": self._question, "key_id": key_id})
        return others

    def report(self, waiting: Waiting, waited_s: float) -> StallError:
        """Ask every other worker where it is, and say it."""
        others = self._ask_where(waiting)
        deadline = self.engine.clock.now_s() + ANSWER_S
        while len(self._answers) < len(others) and self.engine.clock.now_s() < deadline:
            if not self.engine.step():
                self.engine.clock.sleep(1e-3)
        arrived: dict[str, str] = {}
        missing: dict[str, str] = {}
        silent: list[str] = []
        held_by: set[str] = set()
        behind: tuple[str, int] | None = None
        for worker in others:
            answer = self._answers.get(worker)
            if answer is None:
                silent.append(self.labels[worker])
                continue
            doing = answer["doing"]
            if waiting.round is not None:
                here = answer["pushes"] >= waiting.round
                lacks = waiting.round - answer["pushes"]
                if lacks > (0 if behind is None else behind[1]):
                    behind = self.labels[worker], lacks
                doing = f"pushed it {answer['pushes']} times; {doing}"
            elif waiting.owners:
                continue  # an answer that depends on no other worker
            else:
                here = doing.startswith(f"in {waiting} for ")
            (arrived if here else missing)[self.labels[worker]] = doing
            if not here:
                held_by |= {answer["process"], *answer["waits_for"]}
        self._held_by = frozenset(held_by)
        error = StallError(stall_text(waiting, self.me, waited_s, arrived=arrived, missing=missing, silent=silent))
        error.behind = behind
        return error
