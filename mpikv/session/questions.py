"""Where everybody is: a worker asks the others, which answer at once, also while their programs compute.

Kinds of messages: `where` and `here`, question and answer. Who asks names what others must come to (`Need.item`), and
each answers how far it has come; what it does, where its program is, and which wait it is in.

Cost: a message to each other worker, and its answer, only when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpikv.observe.activity import Activity
from mpikv.observe.looks import look
from mpikv.observe.program import UNASKED, Process, state_of
from mpikv.session.messages import ControlMessages, Message

StoreItem = tuple[str, Any]  # what workers of a store must come to


class Question(NamedTuple):
    """One question. items: what was asked of. size: how many workers. answers: by worker, this one's own among them."""

    number: int
    items: Sequence[StoreItem]
    asked_s: float
    size: int
    answers: dict[int, Message]

    @property
    def complete(self) -> bool:
        return len(self.answers) == self.size


class Questions:
    """One worker's end. processes: of all ranks. servers: the rank of each, by its name in errors."""

    def __init__(
        self,
        messages: ControlMessages,
        activity: Activity,
        processes: Sequence[Process],
        servers: Mapping[str, int],
    ) -> None:
        self._messages, self.activity, self._processes, self._servers = messages, activity, processes, servers
        self.looks = activity.looks
        self._open: dict[int, Question] = {}
        self._numbers = 0
        self.asked_by: dict[int, float] = {}  # when each worker has asked last
        self.seen_s: dict[int, float] = {}  # when each has answered last
        messages.acts |= {"where": self._where, "here": self._here}

    def ask(self, items: Sequence[StoreItem], look_at: Sequence[int] = ()) -> Question:
        """Ask every other worker. look_at: workers that are silent, of which others of their hosts may know more."""
        messages, me = self._messages, self._messages.workers.rank
        now_s = messages.engine.clock.now_s()
        with messages.engine.lock:
            self._numbers += 1
            question = Question(self._numbers, items, now_s, messages.workers.size, {me: self._answer(items, look_at)})
            self._open = {n: one for n, one in self._open.items() if now_s - one.asked_s < 60.0}
            self._open[question.number] = question
            asked = {"question": question.number, "items": [list(item) for item in items], "look_at": list(look_at)}
            for worker in range(messages.workers.size):
                if worker != me:
                    messages.send_to(worker, {"kind": "where", **asked})
        return question

    def _answer(self, items: Iterable[Sequence[Any]], look_at: Iterable[int]) -> Message:
        activity = self.activity
        blocked = activity.blocked()
        reached = [activity.reached_of(store, item) for store, item in items]
        again = activity.blocked()
        if blocked is None or again is None or again.id != blocked.id:
            blocked = None  # only what it had reached while it waited holds for as long as it waits
        facts = [list(fact) for one in activity.others() for fact in one.facts]
        states = {str(worker): self.state(worker) for worker in look_at}
        answer = {"doing": activity.text(), "where": activity.where(), "reached": reached, "facts": facts}
        return {**answer, "blocked": blocked, "states": {worker: text for worker, text in states.items() if text}}

    @look(None)
    def _where(self, source: int, message: Message) -> None:
        self.asked_by[message["worker"]] = self._messages.engine.clock.now_s()
        here = {"kind": "here", "worker": self._messages.workers.rank, "question": message["question"]}
        self._messages.send(source, {**here, **self._answer(message["items"], message["look_at"])})

    @look(None)
    def _here(self, _source: int, message: Message) -> None:
        worker = message["worker"]
        self.seen_s[worker] = self._messages.engine.clock.now_s()
        question = self._open.get(message["question"])
        if question is not None:
            question.answers[worker] = message
            if question.complete:
                del self._open[question.number]

    def servers(self, names: Iterable[str]) -> list[str]:
        """What this host's system sees of servers, a line each; nothing of those that are on other hosts."""
        found = ((name, self._processes[self._servers[name]]) for name in names if name in self._servers)
        return [f"{name} ({process}): {state}" for name, process in found if (state := state_of(process, UNASKED))]

    def states(self, question: Question, silent: Iterable[int]) -> dict[int, str]:
        """What is known of workers that have not answered: what their hosts see, as this one or others have said."""
        found: dict[int, str] = {}
        for worker in silent:
            seen = (answer["states"].get(str(worker)) for answer in question.answers.values())
            found[worker] = next(filter(None, seen), "") or self.state(worker)
        return found

    def state(self, worker: int) -> str:
        """What the system of this host tells of a worker that does not answer; "" where it is on another host."""
        return state_of(self.process(worker))

    def process(self, worker: int) -> Process:
        return self._processes[self._messages.workers.ranks[worker]]


def describe(answer: Message) -> str:
    """An answer as text: what the worker does, and where its program is."""
    doing, where = answer["doing"], answer["where"]
    return f"{doing}; {where}" if where else str(doing)
