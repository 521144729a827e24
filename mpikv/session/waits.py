"""Waiting with a limit: for what a worker waits, who has left, and where everybody is.

A wait ends with its request, with an error as soon as what is waited for can never come, or, when its time is up, with
a StallError that says what each other worker is doing. To know that, workers are told: `gone` (by worker 0: how few
pushes those left with who have proposed to close), `refused` (by a server: nothing was updated in a round).
What happens while a wait lasts is in stalls.py.

Cost: no message, but where some leave earlier than others usually one for each of those others; at the time limit one
question to each other worker, and its answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mpikv.engine.operation import Operation
from mpikv.errors import ConfigError, MpikvError, PeerError, StallError
from mpikv.observe.program import ENDED, WorkerStatus
from mpikv.observe.stall import Waiting, stall_text
from mpikv.placement.keys import Key
from mpikv.session.given import GivenErrors
from mpikv.session.messages import ControlMessages, Message
from mpikv.session.questions import Question, Questions, StoreItem, describe
from mpikv.session.stalls import Stalls, kind_of

FIRST_S = 0.05  # all workers of a synchronous store get their last values within milliseconds of each other
LAST_S = 1.0  # how long a worker may wait in vain
UNKNOWN = "stopped, swapped out, or in a long call into C"  # of a worker of another host that does not answer
ANSWER_S = 2.0  # how long a report waits for answers; a listening rank answers within some milliseconds


class Spent:
    """How often calls have waited, and how long. by_call: of each kind of call, a number of waits and their seconds."""

    def __init__(self) -> None:
        self.by_call: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def add(self, call: str, waited_s: float) -> None:
        """Count a wait. From any thread."""
        kind = call if call in self.by_call else kind_of(call)
        with self._lock:
            n, seconds = self.by_call.get(kind, (0, 0.0))
            self.by_call[kind] = n + 1, seconds + waited_s

    @property
    def count(self) -> int:
        return sum(n for n, _ in tuple(self.by_call.values()))

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in tuple(self.by_call.values()))


class Fewest(NamedTuple):
    """How often a key was pushed by the worker that left with the fewest pushes of it."""

    key_id: int
    pushes: int
    worker: int


class Departures:
    """At worker 0: the workers that have closed the store. size: of how many. fewest: by key, of all who have left.

    Programs end together, as a rule, and a message from each to each other would be of use to nobody. So worker 0 waits
    a moment, and then sends the fewest pushes to those still at work; again, in growing intervals, if that has changed.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._left: set[int] = set()
        self.fewest: dict[int, Fewest] = {}
        self._unsent = False
        self._interval_s = FIRST_S
        self._due_s = 0.0

    def add(self, worker: int, pushes: Mapping[int, int], now_s: float) -> None:
        """Note that a worker has left. pushes: key id -> how often it pushed that key."""
        self._left.add(worker)
        changed = False
        for key_id in self.fewest.keys() | pushes.keys():
            count, known = pushes.get(key_id, 0), self.fewest.get(key_id)
            if known is None or count < known.pushes:
                self.fewest[key_id] = Fewest(key_id, count, worker)
                changed = True
        if changed and not self._unsent:
            self._unsent, self._due_s = True, now_s + self._interval_s

    def due(self, now_s: float) -> list[tuple[int, list[Fewest]]]:
        """Return what is due to which workers. Those that have left need nothing, nor does worker 0, which knows."""
        if not self._unsent or now_s < self._due_s:
            return []
        self._unsent = False
        self._interval_s = min(2 * self._interval_s, LAST_S)
        fewest = sorted(self.fewest.values())
        return [(worker, fewest) for worker in range(1, self._size) if worker not in self._left]


class Waits:
    """Of one worker. spent: what its calls have waited.

    questions: to all workers. warn_s: after how long a wait is printed. check_key(key): raises what became of a key
    that workers did not agree on after all. given: notes the errors that waits raise.
    """

    def __init__(
        self,
        messages: ControlMessages,
        questions: Questions,
        *,
        timeout_s: float,
        warn_s: float,
        check_key: Callable[[Key], None],
        given: GivenErrors,
    ) -> None:
        self._messages, self._engine, self.questions = messages, messages.engine, questions
        self.activity = questions.activity
        self.timeout_s = timeout_s
        self._stalls = Stalls(messages, questions, self.activity, warn_s)
        self._check_key, self._given = check_key, given
        self.spent = Spent()
        self.all_answered = True  # every worker, the last report
        self.refused: dict[int, MpikvError] = {}  # keys of which a server has refused to update a round
        messages.acts |= {"gone": self._gone, "refused": self._refused}
        self._fewest: dict[int, Fewest] = {}  # key id -> pushes of those that have left
        if messages.leads:
            self._departures = Departures(messages.workers.size)
            self._fewest = self._departures.fewest
            messages.due.append(self._tell_who_has_left)

    # --- waiting

    def wait(
        self, request: Operation, waiting: Waiting, timeout_s: float | None = None, others: Sequence[Waiting] = ()
    ) -> None:
        """Block until `request` is done. others: what it waits for besides.

        Raises its error; PeerError as soon as what is waited for cannot come any more; StallError after `timeout_s`
        (default: the store's), and as soon as workers wait for each other.
        """
        try:
            self._wait(request, waiting, timeout_s, others)
        except Exception as error:
            self._given.note(error)
            raise

    def _wait(self, request: Operation, waiting: Waiting, timeout_s: float | None, others: Sequence[Waiting]) -> None:
        engine = self._engine
        with engine.lock:
            if engine.failure is None and request.test():
                self.activity.note(waiting)
                return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        begun_s = engine.clock.now_s()

        def look() -> None:
            self.check(waiting)
            if (why := hopeless()) is not None:
                raise self.report(waiting, round(engine.clock.now_s() - begun_s, 1), why)

        # An `init` may end before all have come to it.
        free = (lambda: True) if timeout_s is not None else request.test if waiting.agreed else None
        try:
            with self._stalls.watched(waiting, others, free) as hopeless:
                engine.wait(request, limit_s, lambda: self.report(waiting, limit_s), look)
        finally:
            self.spent.add(waiting.call, engine.clock.now_s() - begun_s)

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

    def left(self, worker: int, pushes: dict[int, int]) -> None:
        """At worker 0: a worker pushes nothing any more. pushes: how often it has pushed each key, by its number."""
        self._departures.add(worker, pushes, self._engine.clock.now_s())

    def _tell_who_has_left(self) -> None:
        for worker, fewest in self._departures.due(self._engine.clock.now_s()):
            self._messages.send_to(worker, {"kind": "gone", "fewest": fewest})

    def _gone(self, _source: int, message: Message) -> None:
        self._fewest = {one.key_id: one for one in (Fewest(*fields) for fields in message["fewest"])}

    # --- where everybody is

    def report(self, waiting: Waiting, waited_s: float, why: str = "") -> StallError:
        """Ask every other worker where it is, and say it. why: there is no hope for this wait."""
        messages, need = self._messages, waiting.need
        question = self._ask([] if need is None else [(self.activity.store, need.item)])
        self.all_answered = question.complete
        arrived: dict[str, str] = {}
        missing: dict[str, str] = {}
        silent: list[str] = []
        behind: tuple[str, int] | None = None
        for worker, name in enumerate(messages.names):
            answer = question.answers.get(worker)
            if worker == messages.workers.rank:
                continue
            if answer is None:
                silent.append(f"{name} ({self.questions.state(worker) or UNKNOWN})")
                continue
            doing = describe(answer)
            if waiting.round is not None:
                pushes = answer["reached"][0]
                here = pushes >= waiting.round
                lacks = waiting.round - pushes
                if lacks > (0 if behind is None else behind[1]):
                    behind = name, lacks
                doing = f"pushed it {pushes} times; {doing}"
            elif waiting.owners:
                continue  # an answer that depends on no other worker
            else:
                here = doing.startswith(f"in {waiting} for ")
            (arrived if here else missing)[name] = doing
        text = stall_text(waiting, messages.me, waited_s, arrived=arrived, missing=missing, silent=silent, why=why)
        error = StallError(text)
        error.behind, error.deadlock = behind, bool(why)
        return error

    def workers(self) -> list[WorkerStatus]:
        """Ask every worker what it does. Blocks while one does not answer, twice ANSWER_S at most."""
        messages = self._messages
        question = self._ask([])
        silent = [worker for worker in range(messages.workers.size) if worker not in question.answers]
        states = self.questions.states(self._ask([], silent) if silent else question, silent)
        now_s, found = self._engine.clock.now_s(), []
        for worker, host in enumerate(messages.workers.hosts):
            answer, state = question.answers.get(worker), states.get(worker, "")
            seen_s = now_s if worker == messages.workers.rank else self.questions.seen_s.get(worker)
            doing = f"no answer for {ANSWER_S} s; {state}".removesuffix("; ") if answer is None else describe(answer)
            alive = answer is not None or (bool(state) and state not in ENDED)
            ago_s = None if seen_s is None else now_s - seen_s
            found.append(WorkerStatus(worker, host, self.questions.process(worker).pid, alive, ago_s, doing))
        return found

    def _ask(self, items: Sequence[StoreItem], look_at: Sequence[int] = ()) -> Question:
        """Ask every worker, and wait for the answers, ANSWER_S at most."""
        clock = self._engine.clock
        question = self.questions.ask(items, look_at)
        deadline = clock.now_s() + ANSWER_S
        while not question.complete and clock.now_s() < deadline:
            if not self._engine.step():
                clock.sleep(1e-3)
        return question
