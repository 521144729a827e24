"""One worker's end of the control messages about the labels of rounds (contests.py says what is compared, and why).

Kinds of messages: `labels` (to worker 0), `whose` (worker 0 asks for those that are missing), `units` (what it
decided). All of it under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpikv.common.clock import Clock
from mpikv.common.labels import Label
from mpikv.session.contests import Brought, Dispute, Judge, Labels, Series, Verdict
from mpikv.transports.base import Group

KINDS = ("labels", "whose", "units")


class LabelMessages:
    """send(rank, message): sends a control message to a rank of the transport."""

    def __init__(self, send: Callable[[int, dict[str, Any]], None], clock: Clock) -> None:
        self._send, self._clock = send, clock
        self._workers: Group
        self._judge: Judge | None
        self._series: dict[int, Series] = {}
        self._disputes: dict[int, Dispute] = {}
        self._asked_for: dict[int, int] = {}  # rounds of series that are not there yet
        self._brought: list[Brought] = []  # labels that wait to be sent, those of several series in one message
        self._late: Series | None = None  # what was decided on after its round had ended here, to be raised once

    def regroup(self, workers: Group, judge: Judge | None) -> None:
        """Compare those of these workers from now on. judge: at worker 0 the state machine, elsewhere None."""
        self._workers, self._judge = workers, judge

    def series(self, number: int, base: Label, what: str, *, exact: bool = False) -> Series:
        """Compare the labels of rounds from now on (`Series`). number: below 0, the same on all workers."""
        series = self._series[number] = Series(number, base, self._brought.append, what=what, exact=exact)
        if number in self._asked_for:
            series.ask(self._asked_for.pop(number))
        return series

    def dispute(self, key_id: int, round_: int, labels: Labels) -> Dispute:
        """Ask who has brought what to a round of a key or bucket, as all workers do."""
        dispute = self._disputes[key_id] = Dispute()
        self._brought.append(Brought(key_id, round_, False, labels))
        return dispute

    def raise_late(self) -> None:
        """Raise, once, what was decided on a step of a trainer after it had ended here."""
        if self._late is not None:
            late, self._late = self._late, None
            late.end()

    def pass_on(self) -> None:
        """Send the labels that wait; at worker 0 also ask for those that are missing."""
        if self._brought:
            brought = self._brought[:]
            self._brought.clear()
            if self._judge is not None:
                self._decide(self._judge.bring(self._workers.rank, brought, self._clock.now_s()))
            else:
                texts = list(dict.fromkeys(one for entry in brought for one in entry.labels))
                items = [[*entry[:3], [texts.index(one) for one in entry.labels]] for entry in brought]
                message = {"kind": "labels", "worker": self._workers.rank, "labels": texts, "items": items}
                self._send(self._workers.ranks[0], message)
        if self._judge is not None:
            for worker, rounds in self._judge.due(self._clock.now_s()).items():
                if worker == self._workers.rank:
                    self._ask(rounds)
                else:
                    self._send(self._workers.ranks[worker], {"kind": "whose", "rounds": rounds})

    def act(self, message: dict[str, Any]) -> None:
        """Act on a message of one of the `KINDS`."""
        if message["kind"] == "whose":
            self._ask(message["rounds"])
        elif message["kind"] == "units":
            self._know([Verdict(*verdict) for verdict in message["verdicts"]])
        elif self._judge is not None:
            labels = [None if one is None else Label(*one) for one in message["labels"]]
            brought = [Brought(i, n, held, tuple(labels[k] for k in of)) for i, n, held, of in message["items"]]
            self._decide(self._judge.bring(message["worker"], brought, self._clock.now_s()))

    def _ask(self, rounds: Sequence[Sequence[int]]) -> None:
        for number, round_ in rounds:
            if number in self._series:
                self._series[number].ask(round_)
            else:
                self._asked_for[number] = round_

    def _decide(self, verdicts: Sequence[Verdict]) -> None:
        """At worker 0: tell all."""
        if verdicts:
            for rank in self._workers.ranks[1:]:
                self._send(rank, {"kind": "units", "verdicts": verdicts})
            self._know(verdicts)

    def _know(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.series in self._disputes:
                self._disputes.pop(verdict.series).decide(verdict)
                continue
            series = self._series[verdict.series]
            series.decide(verdict)
            if series.late:
                self._late = series
