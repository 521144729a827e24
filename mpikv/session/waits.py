"""Waiting with a limit: for what a worker waits, who has left, and where everybody is.

A wait ends with its request, with an error as soon as what is waited for can never come, or, when its time is up, with
a StallError that says what each other worker is doing. To know that, workers tell each other: `left` (to worker 0: a
worker has closed, with its number of pushes per key), `gone` (from worker 0 to those still at work: how few pushes
others left with; leaving.py), `where` and `here` (question and answer of a report), `refused` (from a server: nothing
was updated in a round).

Cost: no message before a wait has lasted for ASK_AFTER_S (cross_waits.py); then one question to each other worker, and
its answer.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence

from mpikv.engine.operation import Operation
from mpikv.errors import ConfigError, MpikvError, PeerError, StallError
from mpikv.observe.activity import Activity
from mpikv.observe.stall import Waiting, stall_text
from mpikv.placement.keys import Key
from mpikv.session import cross_waits
from mpikv.session.given import GivenErrors
from mpikv.session.leaving import Departures, Fewest
from mpikv.session.messages import ControlMessages, Message

ANSWER_S = 2.0  # how long a report waits for answers; a listening rank answers within some milliseconds


class Waits:
    """Of one worker.

    pushes: key id -> how often this worker has pushed that key. check_key(key): raises what became of a key that
    workers did not agree on after all. given: notes the errors that waits raise.
    """

    def __init__(
        self,
        messages: ControlMessages,
        timeout_s: float,
        *,
        pushes: Callable[[], dict[int, int]],
        check_key: Callable[[Key], None],
        given: GivenErrors,
    ) -> None:
        self._messages, self._engine = messages, messages.engine
        self.activity = Activity(self._engine.clock)
        # Ranks may be threads.
        self._process = f"{socket.gethostname()} {os.getpid()} {threading.get_ident()}"
        self.timeout_s = timeout_s
        self._pushes, self._check_key, self._given = pushes, check_key, given
        self._under_way: Waiting | None = None  # what this worker waits for now
        self.held_by: frozenset[str] = frozenset()  # at the last report: who has not come, and whom these wait for
        self._question = 0
        self.refused: dict[int, MpikvError] = {}  # keys of which a server has refused to update a round
        messages.acts |= {
            "left": self._left,
            "gone": self._gone,
            "where": self._where,
            "here": self._here,
            "refused": self._refused,
        }
        messages.due.append(self._tell_who_has_left)
        self.regroup()

    def regroup(self) -> None:
        """Go on among the workers that the messages go to now. What is known of the former ones is forgotten."""
        self._fewest: dict[int, Fewest] = {}  # key id -> pushes of those that have left
        self._answers: dict[int, Message] = {}
        self._departures = Departures(self._messages.workers.size) if self._messages.leads else None

    # --- waiting

    def wait(self, request: Operation, waiting: Waiting, timeout_s: float | None = None) -> None:
        """Block until `request` is done.

        Raises its error; PeerError as soon as what is waited for cannot come any more; StallError after `timeout_s`
        (default: the store's).
        """
        try:
            self._wait(request, waiting, timeout_s)
        except Exception as error:
            self._given.note(error)
            raise

    def _wait(self, request: Operation, waiting: Waiting, timeout_s: float | None) -> None:
        engine = self._engine
        with engine.lock:
            if engine.failure is None and request.test():
                self.activity.note(waiting)
                return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        begun_s = asked_s = engine.clock.now_s()
        asked = False

        def look() -> None:
            nonlocal asked_s, asked
            self.check(waiting)
            now_s = engine.clock.now_s()
            if waiting.round is None:
                return
            if asked and any(cross_waits.for_ever(waiting, self._pushes(), one) for one in self._answers.values()):
                raise self.report(waiting, round(now_s - begun_s, 1))
            if now_s - asked_s >= cross_waits.ASK_AFTER_S:
                asked_s, asked = now_s, True
                self._ask_where(waiting)

        self._under_way = waiting
        try:
            with self.activity.during(waiting):
                engine.wait(request, limit_s, lambda: self.report(waiting, limit_s), look)
        finally:
            self._under_way = None

    def check(self, waiting: Waiting) -> None:
        """Raise PeerError, or what became of the key, when this wait can never end."""
        if waiting.key is not None:
            self._check_key(waiting.key)
        if waiting.round is None or waiting.key_id is None:
            return
        fewest = self._fewest.get(waiting.key_id)
        if fewest is not None and fewest.pushes < waiting.round:
            name = self._messages.names[fewest.worker]
            error = PeerError(
                f"{self._messages.me}, {waiting}: {name} closed its store after {fewest.pushes} pushes of this key, so "
                f"that round {waiting.round} can never be complete (did its program end early?)"
            )
            error.behind = name, waiting.round - fewest.pushes
            raise error

    def _refused(self, _source: int, message: Message) -> None:
        self.refused[message["key_id"]] = ConfigError(message["text"])

    # --- leaving

    def leave(self, pushes: dict[int, int]) -> None:
        """Tell worker 0, and so the others, that this one pushes nothing any more."""
        with self._engine.lock:
            if self._departures is not None:
                self._departures.add(self._messages.workers.rank, pushes, self._engine.clock.now_s())
            else:
                self._messages.send_to(0, {"kind": "left", "pushes": sorted(pushes.items())})

    def _left(self, _source: int, message: Message) -> None:
        if self._departures is not None:
            self._departures.add(message["worker"], dict(message["pushes"]), self._engine.clock.now_s())
            self._know(tuple(self._departures.fewest.values()))

    def _tell_who_has_left(self) -> None:
        if self._departures is not None:
            for worker, fewest in self._departures.due(self._engine.clock.now_s()):
                self._messages.send_to(worker, {"kind": "gone", "fewest": fewest})

    def _gone(self, _source: int, message: Message) -> None:
        self._know([Fewest(*one) for one in message["fewest"]])

    def _know(self, fewest: Sequence[Fewest]) -> None:
        for one in fewest:
            known = self._fewest.get(one.key_id)
            if known is None or one.pushes < known.pushes:
                self._fewest[one.key_id] = one

    # --- where everybody is

    def _ask_where(self, waiting: Waiting) -> list[int]:
        """Ask every other worker where it is. These workers; their answers come to `_answers`."""
        workers = self._messages.workers
        others = [worker for worker in range(workers.size) if worker != workers.rank]
        with self._engine.lock:
            self._question += 1
            self._answers = {}
            key_id = -1 if waiting.key_id is None else waiting.key_id
            for worker in others:
                self._messages.send_to(worker, {"kind": "where", "question": self._question, "key_id": key_id})
        return others

    def _where(self, source: int, message: Message) -> None:
        here = {"kind": "here", "worker": self._messages.workers.rank, "question": message["question"]}
        here |= {"process": self._process, "waits_for": sorted(self.activity.held_by())}
        here |= {"needs": cross_waits.need(self._under_way), "doing": self.activity.text()}
        self._messages.send(source, {**here, "pushes": self._pushes().get(message["key_id"], 0)})

    def _here(self, _source: int, message: Message) -> None:
        if message["question"] == self._question:
            self._answers[message["worker"]] = message

    @property
    def all_answered(self) -> bool:
        """Whether every other worker has answered the last question."""
        return len(self._answers) == self._messages.workers.size - 1

    def report(self, waiting: Waiting, waited_s: float) -> StallError:
        """Ask every other worker where it is, and say it."""
        others, clock = self._ask_where(waiting), self._engine.clock
        deadline = clock.now_s() + ANSWER_S
        while not self.all_answered and clock.now_s() < deadline:
            if not self._engine.step():
                clock.sleep(1e-3)
        arrived: dict[str, str] = {}
        missing: dict[str, str] = {}
        silent: list[str] = []
        held_by: set[str] = set()
        behind: tuple[str, int] | None = None
        for worker in others:
            answer, name = self._answers.get(worker), self._messages.names[worker]
            if answer is None:
                silent.append(name)
                continue
            doing = answer["doing"]
            if waiting.round is not None:
                here = answer["pushes"] >= waiting.round
                lacks = waiting.round - answer["pushes"]
                if lacks > (0 if behind is None else behind[1]):
                    behind = name, lacks
                doing = f"pushed it {answer['pushes']} times; {doing}"
            elif waiting.owners:
                continue  # an answer that depends on no other worker
            else:
                here = doing.startswith(f"in {waiting} for ")
            (arrived if here else missing)[name] = doing
            if not here:
                held_by |= {answer["process"], *answer["waits_for"]}
        self.held_by = frozenset(held_by)
        text = stall_text(waiting, self._messages.me, waited_s, arrived=arrived, missing=missing, silent=silent)
        error = StallError(text)
        error.behind = behind
        return error

    @property
    def waits_for_itself(self) -> bool:
        """Whether, by the last report, those who have not come wait for this worker in another store."""
        return self._process in self.held_by
