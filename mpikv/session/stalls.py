"""Waits that last: who waits for whom is printed, and a circle of waits is an error, long before the time limit.

A worker whose wait lasts longer than usual reports it to worker 0, or to the next worker if that one does not react
(`waits`, `moved`). The worker that gets reports asks all workers where they are (questions.py), repeatedly while
somebody waits. It prints a table, again when the table has changed, and a line when all go on. And it looks for workers
that wait for each other, to which it sends an error (`circle`).

Cost: nothing before a wait has lasted for a quarter of MPIKV_STALL_WARN_S, or as long as this call has ever lasted;
then a message to worker 0, and two to and from each worker every INTERVAL_S, later every LAST_INTERVAL_S.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mpikv.observe.activity import Activity
from mpikv.observe.deadlock import Blocked, WaitFact, circle_text, compare, deadlocks
from mpikv.observe.looks import look
from mpikv.observe.stall import Row, Waiting, say, several, table, without_seconds
from mpikv.session.messages import ControlMessages, Message
from mpikv.session.questions import Question, Questions, StoreItem, describe

EARLY = 0.25  # of the time until a table is printed, after which the others are asked
USUAL = 2.0  # a wait is printed when it has lasted so many times longer than the longest one of its kind before
INTERVAL_S, LAST_INTERVAL_S = 0.25, 2.0  # between questions to all
SILENT_S = 1.0  # a worker that has not answered by then is printed as silent; if worker 0 is, the next one asks
MOST_ITEMS = 100  # that are asked of in one question
CLOSE = ["close", 1]  # what `close` needs of every worker (`Need.item`)
SAME_ORDER = "all workers must close their stores, and make the other calls of several stores, in the same order"


class _Lasting(NamedTuple):
    """A wait that was reported. owners: see `Waiting`. print_s: when it is to be printed, by this worker's clock."""

    owners: Sequence[str]
    print_s: float


class Stalls:
    """One worker's end. warn_s: after how long a wait is printed. say: prints a text. what: how it calls a worker."""

    def __init__(
        self,
        messages: ControlMessages,
        questions: Questions,
        activity: Activity,
        warn_s: float,
        *,
        say: Callable[[str], None] = say,
        what: str = "worker",
    ) -> None:
        self._messages, self._questions, self._activity = messages, questions, activity
        self._warn_s, self._say, self.looks = warn_s, say, activity.looks
        self._what = what
        self.early_s = EARLY * warn_s  # before that no wait is looked at
        self._longest_s: dict[str, float] = {}  # by kind of call, of waits that were longer than most
        messages.acts |= {"waits": self._waits, "moved": self._moved, "circle": self._circle}
        messages.due.append(self._inquire)
        self._asker = 0  # the worker to which waits are reported, and which asks the others
        self._reported_s: float | None = None  # when this worker reported the wait that it is in
        # Of the worker that asks:
        self._lasting: dict[int, _Lasting] = {}  # by worker
        self._question: Question | None = None
        self._next_s, self._interval_s = 0.0, INTERVAL_S
        self._begun_s = 0.0
        self._printed: list[tuple[int, str]] | None = None
        self._items: dict[str, StoreItem] = {}  # what is asked of, by its text
        self._silent: dict[int, str] = {}
        self._seen: set[str] = set()  # waits, in the last answers
        self._well = True  # whether the waits that have ended since the first one began have ended without an error

    # --- who waits

    @contextmanager
    def watched(
        self, waiting: Waiting, others: Sequence[Waiting] = (), free: Callable[[], bool] | None = None
    ) -> Iterator[Callable[[], str | None]]:
        """A block in which this worker waits. others: what it waits for besides. free(): see `Blocked`.

        Gives a function, to be called often meanwhile: why this wait can never end, None where it may.
        """
        now_s = self._messages.engine.clock.now_s
        begun_s, well = now_s(), False

        def hopeless() -> str | None:
            waited_s = now_s() - begun_s
            lasts = waited_s >= self.early_s and self.lasts(waiting, waited_s)
            return self._activity.why_hopeless() if lasts else None

        try:
            with self._activity.during(waiting, (waiting, *others), free):
                yield hopeless
            well = True
        finally:
            if (waited_s := now_s() - begun_s) >= self.early_s:
                self.ended(waiting, waited_s, well=well)

    @look(False)
    def lasts(self, waiting: Waiting, waited_s: float) -> bool:
        """Report a wait, once it has lasted as long as any of its kind before. Returns whether it has. Called often."""
        longest_s = self._longest_s.get(kind_of(waiting.call), 0.0)
        if waited_s < longest_s:
            return False
        self._report(waiting, waited_s, max(self._warn_s, USUAL * longest_s))
        return True

    def _report(self, waiting: Waiting, waited_s: float, warn_after_s: float) -> None:
        """Report that this worker waits: once, and to the next worker if the first one does not ask."""
        messages, now_s = self._messages, self._messages.engine.clock.now_s()
        if self._reported_s is not None:
            asked_s = self._questions.asked_by.get(self._asker, -math.inf)
            asks = self._asker == messages.workers.rank or now_s - self._reported_s < SILENT_S
            if asks or now_s - asked_s < 2 * (SILENT_S + LAST_INTERVAL_S):
                return
            self._asker += 1
        blocked = self._activity.blocked() or Blocked("", str(waiting), [])
        lasting = {"blocked": blocked, "owners": waiting.owners, "waited_s": waited_s, "warn_after_s": warn_after_s}
        self._reported_s = now_s
        messages.send_to(self._asker, {"kind": "waits", **lasting})

    @look(None)
    def ended(self, waiting: Waiting, waited_s: float, *, well: bool) -> None:
        """The wait has ended, at last. well: without an error."""
        if well:
            kind = kind_of(waiting.call)
            self._longest_s[kind] = max(waited_s, self._longest_s.get(kind, 0.0))
        if self._reported_s is None:
            return
        self._reported_s = None
        messages = self._messages
        with messages.engine.lock:
            for worker in range(self._asker + 1):
                messages.send_to(worker, {"kind": "moved", "well": well})
        self._asker = 0

    @look(None)
    def _circle(self, _source: int, message: Message) -> None:
        self._activity.give_up(message["wait"], message["text"])

    # --- who asks

    @look(None)
    def _waits(self, _source: int, message: Message) -> None:
        now_s = self._messages.engine.clock.now_s()
        begun_s = now_s - message["waited_s"]
        self._begun_s = min(begun_s, self._begun_s) if self._lasting else begun_s
        self._next_s, self._interval_s = now_s, INTERVAL_S
        lasting = _Lasting(message["owners"], begun_s + message["warn_after_s"])
        self._lasting[message["worker"]] = lasting
        self._add_items([Blocked(*message["blocked"])])

    @look(None)
    def _moved(self, _source: int, message: Message) -> None:
        self._lasting.pop(message["worker"], None)
        self._well &= message["well"]

    @look(None)
    def _inquire(self) -> None:
        """Called in each step of the engine: asks, and looks at the answers."""
        if not self._lasting:
            if self._question is not None or self._items or self._printed is not None:
                self._end()
            return
        now_s, question = self._messages.engine.clock.now_s(), self._question
        if question is None:
            if now_s >= self._next_s:
                self._question = self._questions.ask([*self._items.values()], [*self._silent])
        elif question.complete or now_s - question.asked_s > SILENT_S:
            self._question = None
            self._next_s = now_s + self._interval_s
            self._interval_s = min(2 * self._interval_s, LAST_INTERVAL_S)
            self._look_at(question, now_s)

    def _end(self) -> None:
        if self._printed is not None and self._well:
            waited_s = self._messages.engine.clock.now_s() - self._begun_s
            self._say(f"mpikv: going on, after a stall of {waited_s:.1f} s")
        self._question, self._printed, self._items, self._silent, self._well = None, None, {}, {}, True
        self._activity.facts = []

    def _add_items(self, waits: Sequence[Blocked]) -> None:
        """Ask, next time, of what these waits need."""
        for blocked in waits:
            for store, (item, _) in blocked.needs:
                if len(self._items) < MOST_ITEMS:
                    self._items.setdefault(json.dumps((store, item)), (store, item))

    def _look_at(self, question: Question, now_s: float) -> None:
        answers = question.answers
        waits = {worker: Blocked(*answer["blocked"]) for worker, answer in answers.items() if answer["blocked"]}
        places = {json.dumps(item): i for i, item in enumerate(question.items)}

        def reached(worker: int, store: str, item: Any) -> int:
            i = places.get(json.dumps((store, item)))
            # Who closes a store has left it: whoever waits for it there is given another error, and goes on.
            left = worker in waits and any(its == store and need[0] == CLOSE for its, need in waits[worker].needs)
            return -1 if i is None or left else answers[worker]["reached"][i]

        facts, missing = compare(waits, answers, reached, self._seen)
        self._seen = {blocked.id for blocked in waits.values()}
        self._add_items([*waits.values()])
        self._activity.facts = facts
        known = [WaitFact(*fact) for answer in answers.values() for fact in answer["facts"]]
        for found, hopeless in deadlocks([*facts, *known]):
            self._break(circle_text(found), hopeless, waits)
        silent = [worker for worker in range(self._messages.workers.size) if worker not in answers]
        self._silent = self._questions.states(question, silent)
        if any(lasting.print_s <= now_s for lasting in self._lasting.values()):
            self._tell(answers, missing, now_s)

    def _break(self, text: str, hopeless: set[str], waits: dict[int, Blocked]) -> None:
        if len({wait.partition("/")[0] for wait in hopeless}) > 1:
            text += f" They wait in different stores: {SAME_ORDER}."
        for worker, blocked in waits.items():
            if blocked.id in hopeless:
                self._messages.send_to(worker, {"kind": "circle", "wait": blocked.id, "text": text})

    def _tell(self, answers: dict[int, Message], missing: list[int], now_s: float) -> None:
        doing = {worker: describe(answer) for worker, answer in answers.items()}
        for worker, seen in self._silent.items():
            doing[worker] = f"no answer for {SILENT_S:.1f} s{'; ' if seen else ''}{seen}"
        # Where a program that computes is differs each time.
        state = [(worker, without_seconds(text).partition(";")[0]) for worker, text in sorted(doing.items())]
        if state == self._printed:
            return
        self._printed = state
        hosts = self._messages.workers.hosts
        owners = sorted({owner for lasting in self._lasting.values() for owner in lasting.owners})
        others = [worker for worker in (*missing, *self._silent) if worker not in self._lasting]
        if not (others or owners):  # of what has no number nobody says that it is missing
            others = [worker for worker, answer in answers.items() if not answer["blocked"]]
        for_whom = several(others, hosts, self._what) if others else ", ".join(owners) or "each other"
        wait = "waits" if len(self._lasting) == 1 else "wait"
        title = f"{now_s - self._begun_s:.1f} s: {several([*self._lasting], hosts, self._what)} {wait} for {for_whom}"
        rows = [Row(worker, self._questions.process(worker).pid, doing[worker]) for worker in sorted(doing)]
        self._say(table(title, rows, hosts, self._questions.servers(owners), self._what))


def kind_of(call: str) -> str:
    return call.partition("(")[0]
