"""Watches for calls of a group that wait too long, and asks the other ranks how far they are.

When a call has waited MPIKV_STALL_WARN_S, at most ASK_AFTER_S, its rank asks all others, and again after 2, 4, 8 times
as long. The call fails at once where another rank has made a different call under the same number, or has left the job
before this call, and at its time limit with the names of the ranks that have not made it. Time during which the machine
was stopped, or calls before it were under way, does not count. Who waits for whom is told as in a store
(session/stalls.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpikv.engine.engine import Engine
from mpikv.engine.operation import Predicate, Steps
from mpikv.errors import PeerError, StallError
from mpikv.groups.call import GroupCall
from mpikv.groups.group import RankGroup
from mpikv.groups.shared import MismatchError
from mpikv.session.questions import Questions

STATUS = "status"  # what a rank is asked of a call (session/questions.py)
UNKNOWN = -1  # the answer of a rank that could not find it out
TICK_S = 0.25
ASK_AFTER_S = 3.0  # few ranks are late by more, and asking costs little
ANSWER_S = 2.0  # a rank that is alive answers at once


class CallWatch:
    """Watches the calls of all groups of one rank. labels: the names of the transport's ranks in error messages."""

    def __init__(
        self,
        engine: Engine,
        questions: Questions,
        groups: Mapping[int, RankGroup],
        rank: int,
        labels: list[str],
        *,
        warn_s: float,
    ) -> None:
        self._engine, self._questions, self._groups = engine, questions, groups
        self._rank, self._labels, self._warn_s = rank, labels, warn_s

    def status(self, number: int, call: int, left: Mapping[int, Mapping[int, int]]) -> dict[str, Any]:
        """Return this rank's answer to a rank that waits in a call of a group. left: as `Service` has it.

        calls: how many this rank has made in the group; -1: it has left the group. text: of its call of that number.
        now: what it does. left: the ranks that have left the job, with how many calls of the group each had made.
        """
        group = self._groups.get(number)
        gone = [(rank, calls.get(number, 0)) for rank, calls in left.items()]
        if group is None:
            return {"calls": -1, "text": None, "now": "it has left this process group", "left": gone}
        text = group.texts.get(call)
        now = f"it is in {group.under_way[0].text}" if group.under_way else "it is in no call of this group"
        return {"calls": group.calls, "text": text, "now": now, "left": gone}

    def serve(self) -> Steps[None]:
        clock = self._engine.clock
        last_s = clock.now_s()
        while True:
            yield Predicate(lambda: clock.now_s() >= last_s + TICK_S)  # noqa: B023
            now_s = clock.now_s()
            elapsed_s, last_s = min(now_s - last_s, 2 * TICK_S), now_s
            for group in tuple(self._groups.values()):
                for call in [one for one in group.under_way if not one.queued]:
                    call.waited_s += min(elapsed_s, now_s - call.started_s)
                    if not call.asked and call.waited_s >= min(self._warn_s, ASK_AFTER_S, call.timeout_s):
                        call.asked = True
                        self._engine.start(self._inquire(call), "status")

    def _inquire(self, call: GroupCall) -> Steps[None]:
        """Ask all other ranks, again whenever the call has waited twice as long, and at its time limit."""
        group, now_s, ranks = call.group, self._engine.clock.now_s, {*call.group.group.ranks}
        while True:
            over = call.waited_s >= call.timeout_s
            question = self._questions.ask([(self._questions.activity.store, [STATUS, [group.number, call.number]])])
            yield Predicate(lambda: ranks <= {*question.answers} or now_s() > question.asked_s + ANSWER_S)  # noqa: B023
            if call.done:
                return
            told = {rank: answer["reached"][0] for rank, answer in question.answers.items()}
            told = {rank: status for rank, status in told.items() if status != UNKNOWN}
            answers = {rank: told.get(rank) for rank in group.group.ranks if rank != self._rank}
            others = {rank: answer["text"] for rank, answer in answers.items() if answer and answer["text"]}
            different = {rank: text for rank, text in others.items() if text != call.text}
            if different and call.number >= 0:
                group.fail(call, MismatchError(self._differ(call, different)))
                return
            left = [one for status in told.values() for one in status["left"]]
            gone = [(rank, n) for rank, n in left if rank in ranks and n < call.number]
            if gone:
                group.fail(call, PeerError(self._gone(call, gone)))
                return
            if over:
                group.fail(call, self.stall(call, call.timeout_s, answers))
                return
            again_s = min(2 * call.waited_s, call.timeout_s)
            yield Predicate(lambda: call.done or call.waited_s >= again_s)  # noqa: B023
            if call.done:
                return

    def _differ(self, call: GroupCall, different: dict[int, str]) -> str:
        theirs = "; ".join(f"{self._labels[rank]} made {text}" for rank, text in different.items())
        return (
            f"{self._labels[self._rank]} made {call.text} as call {call.number} of its process group, but {theirs}: "
            "every rank of a group makes the same calls in the same order"
        )

    def _gone(self, call: GroupCall, gone: list[tuple[int, int]]) -> str:
        who = "; ".join(f"{self._labels[rank]} has left the job after {n} calls" for rank, n in gone)
        return f"{self._labels[self._rank]} waits in {call.text}, call {call.number} of its process group, but {who}"

    def stall(
        self, call: GroupCall, limit_s: float, answers: Mapping[int, dict[str, Any] | None] | None = None
    ) -> StallError:
        parts = [
            self._labels[rank]
            + (f" has made {max(0, answer['calls'])} calls, {answer['now']}" if answer else " does not answer")
            for rank, answer in (answers or {}).items()
            if answer is None or call.number < 0 or answer["calls"] < call.number
        ]
        if call.number >= 0 and answers:
            parts = [f"missing: {'; '.join(parts)}"] if parts else ["all ranks are in this call, but it does not end"]
        ranks = ", ".join(map(str, call.group.group.ranks))
        which = f" (call {call.number})" if call.number >= 0 else ""
        return StallError(
            f"{self._labels[self._rank]} waited {limit_s:g} s, its timeout in {call.text}{which} of the process group "
            f"of ranks {ranks}{'; ' if parts else ''}{'; '.join(parts)}"
        )
