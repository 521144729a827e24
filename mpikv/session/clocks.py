"""How far the clocks of hosts are apart: a worker asks worker 0 what time it is, and records question and answer.

Worker 0's clock was read somewhere between the question and its answer, so the quickest of many answers bounds the
difference best (NTP's rule; RFC 5905, section 10). Whoever reads the timelines works it out (commands/trace/clocks.py).
One worker of each other host asks. Kinds of messages: `time` (to worker 0) and `time is`.

Cost: nothing but while a timeline is written; then PROBES questions, one after another, every EVERY_S. The first ones
are asked while neither side does anything else, for MEET_S at most.
"""

from __future__ import annotations

import math
import os

from mpikv.observe.recorder import Recorder
from mpikv.session.messages import ControlMessages, Message

PROBES = 40
MEET_S = 0.05
EVERY_S = 10.0
PATIENCE_S = 1.0  # a question without an answer for so long is asked anew


class ClockProbes:
    """One worker's end. label: worker 0's; it is recorded as the one whose clock was read."""

    def __init__(self, messages: ControlMessages, recorder: Recorder) -> None:
        self._messages, self._recorder = messages, recorder
        self._asked_s: float | None = None  # when the question was asked that is not answered
        self._number = self._left = self._answered = 0
        self._next_s = -math.inf
        messages.acts |= {"time": self._time, "time is": self._time_is}

    def begin(self) -> None:
        """Ask from now on, until recording ends. Local; only the first worker of each host but worker 0's asks."""
        workers = self._messages.workers
        self._next_s = -math.inf
        first = workers.hosts.index(workers.hosts[workers.rank]) == workers.rank != 0
        if first and self._ask_when_due not in self._messages.due:
            with self._messages.engine.lock:
                self._messages.due.append(self._ask_when_due)

    def meet(self) -> None:
        """Let the first questions be asked and answered while nothing else is done. Blocks for MEET_S at most."""
        self._answered, before = 0, self._number
        deadline_s = self._recorder.now_s() + MEET_S
        while self._recorder.now_s() < deadline_s and not self._have_met(before):
            if not self._messages.engine.step():
                os.sched_yield()

    def _have_met(self, before: int) -> bool:
        """Whether the first questions have been answered. before: how many this worker had asked already."""
        workers = self._messages.workers
        if workers.rank == 0:
            return self._answered >= PROBES * (len({*workers.hosts}) - 1)
        asks = self._ask_when_due in self._messages.due
        return not asks or (self._number >= before + PROBES and self._asked_s is None)

    def again(self) -> None:
        """Ask again soon: the timeline is about to end. Local."""
        self._next_s = -math.inf

    def _ask_when_due(self) -> None:
        now_s = self._recorder.now_s()
        if not self._recorder.on:
            self._messages.due.remove(self._ask_when_due)
        elif self._asked_s is not None:
            if now_s - self._asked_s > PATIENCE_S:
                self._asked_s = None
        elif self._left or now_s >= self._next_s:
            if not self._left:
                self._left, self._next_s = PROBES, now_s + EVERY_S
            self._left -= 1
            self._number += 1
            self._asked_s = self._recorder.now_s()
            self._messages.send_to(0, {"kind": "time", "number": self._number})

    def _time(self, source: int, message: Message) -> None:
        answer = {"kind": "time is", "number": message["number"], "time_s": self._recorder.now_s()}
        self._messages.send(source, answer)
        self._answered += 1

    def _time_is(self, _source: int, message: Message) -> None:
        if message["number"] == self._number and self._asked_s is not None:
            asked_s, self._asked_s = self._asked_s, None
            self._recorder.add("clock", asked_s, ["worker", 0, round(message["time_s"] * 1e9)])
