"""Who has pushed a round under which label (labels.py): what workers tell each other where labels differ.

Where the store updates, messages compare labels on their way (collectives/labelled), and every worker knows in the same
round that they differ in what must be equal. Then each brings its labels to worker 0, who tells all who has brought
what: a *dispute*.

The steps of a trainer that updates by itself have no owner who compares; they are a *series*. Every worker compares its
label with that of the series' last round. Where it is the same on all workers nothing happens. A worker whose label has
changed holds its contribution back and brings its label to worker 0, who asks those for theirs that have not come by
themselves, and tells all what the round is added in: its units, the factor that every contribution is brought to.
Nobody can end the round meanwhile, since the worker that started this has contributed nothing, and it contributes only
after everybody else has answered; so everybody who updates something knows that there is a verdict to wait for.

Who has not changed may have contributed already, in the factor that was common so far, and then that is the unit. After
a round with different factors none is common, so every worker brings its label to the next one by itself. When labels
differ in anything else the round is added up all the same, so that no message is left over, but nobody updates
anything, and all of them raise.

Cost: nothing while labels stay as they are. A dispute: two messages per worker. A series: two per worker and step in
which they change (those asked for theirs: one more). The judge is pure: no clock, no MPI.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpikv.common.labels import Label
from mpikv.errors import ConfigError
from mpikv.session.agreement import grouped

ASK_AFTER_S = 1e-3  # workers that change their labels together do so within less, and need not be asked

Labels = tuple[Label | None, ...]  # of a round, one for each of its keys; None: not pushed in this round, by no worker


class Verdict(NamedTuple):
    """What worker 0 decided about how a round is added."""

    series: int
    round: int
    units: float
    text: str
    mixed: bool
    wrong: bool


class Brought(NamedTuple):
    """A worker's labels of a round. held: it has contributed nothing yet."""

    series: int
    round: int
    held: bool
    labels: Labels


def disagreement(labels: Sequence[Label], names: Sequence[str]) -> str:
    """Say who brought what, by the first attribute but the factor in which the labels differ; '' if none does."""
    if all(label.rest == labels[0].rest for label in labels):
        return ""
    facts: list[dict[str, Any]] = [{"op": label.op, **json.loads(label.text)} for label in labels]
    for name in {name: None for fact in facts for name in fact}:
        values = [fact.get(name) for fact in facts]
        if any(value != values[0] for value in values):
            return grouped([f"{name}={value!r}" for value in values], names)
    return grouped([label.text for label in labels], names)


def factors_text(labels: Sequence[Label], names: Sequence[str]) -> str:
    """Say which worker brought which factor."""
    return grouped([f"rescale_grad={label.factor!r}" for label in labels], names)


def refused(labels: Sequence[Label], names: Sequence[str], *, scales: bool) -> str:
    """Say why an update under different labels must not be made; '' where they differ only in a factor to scale by.

    scales: whether the values can be scaled.
    """
    if different := disagreement(labels, names):
        return f": {different}"
    if labels[0].factor == 0.0 or not scales:
        return f", which integers cannot be scaled by: {factors_text(labels, names)}"
    return ""


def refusal(what: str, round_: int, why: str, *, late: bool = False) -> str:
    """Make the text of the error. why: of `refused`. late: this worker has updated already."""
    then = "those with the former ones have updated" if late else "nothing was updated"
    kind = "another op of pushpull" if ": op=" in why else "different attributes of the optimizer"
    return f"{what}, round {round_}: {kind} on different workers{why}; {then}"


def judged(found: Sequence[Brought], names: Sequence[str]) -> Verdict:
    """Return the verdict on what all workers brought for one round. found: in the order of the workers."""
    series, round_ = found[0][:2]
    # Those who hold nothing back have contributed in the factor that was common in the round before.
    reference = next((one for one in found if not one.held), found[0])
    units = next((label.factor for label in reference.labels if label is not None), 1.0)
    text, wrong = "", False
    for of_key in zip(*(one.labels for one in found), strict=True):
        labels = [label for label in of_key if label is not None]
        if different := disagreement(labels, names) if len(labels) == len(found) else "":
            return Verdict(series, round_, units, different, mixed=True, wrong=True)
        if len({label.factor for label in labels}) > 1:
            text, wrong = factors_text(labels, names), wrong or units == 0.0
    return Verdict(series, round_, units, text, bool(text), wrong)


@dataclass
class _Open:
    since_s: float
    found: dict[int, Brought] = field(default_factory=dict)
    asked: bool = False


class Judge:
    """Worker 0's side. names: how each worker is named in errors."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._open: dict[tuple[int, int], _Open] = {}

    def bring(self, worker: int, found: Sequence[Brought], now_s: float) -> list[Verdict]:
        """Take a worker's labels, and return the verdicts, for all workers, on the rounds that are now complete."""
        verdicts = []
        for one in found:
            item = one[:2]
            open_ = self._open.setdefault(item, _Open(now_s))
            open_.found[worker] = one
            if len(open_.found) == len(self._names):
                del self._open[item]
                verdicts.append(judged([open_.found[i] for i in range(len(self._names))], self._names))
        return verdicts

    def due(self, now_s: float) -> dict[int, list[tuple[int, int]]]:
        """Return which workers to ask for which rounds now: those who have not brought theirs by themselves."""
        asks: dict[int, list[tuple[int, int]]] = {}
        for item, open_ in self._open.items():
            # All workers come to a dispute, of a key, by themselves.
            if item[0] < 0 and not open_.asked and now_s - open_.since_s >= ASK_AFTER_S:
                open_.asked = True
                for worker in range(len(self._names)):
                    if worker not in open_.found:
                        asks.setdefault(worker, []).append(item)
        return asks


class Dispute:
    """A request that is done when worker 0 has said who has brought what."""

    def __init__(self) -> None:
        self._verdict: Verdict | None = None

    def decide(self, verdict: Verdict) -> None:
        """Take what worker 0 has said."""
        self._verdict = verdict

    def test(self) -> bool:
        """Return whether worker 0 has said it."""
        return self._verdict is not None

    def error(self, what: str, round_: int, *, exact: bool) -> ConfigError:
        """Return the error that follows, once worker 0 has said it. exact: values are integers."""
        assert self._verdict is not None
        why = ", which integers cannot be scaled by" if exact and not self._verdict.wrong else ""
        return ConfigError(refusal(what, round_, f"{why}: {self._verdict.text}"))


class Series:
    """One worker's side of one series. A request that is done unless the round under way waits for a verdict.

    base: the label of round 0, the same on all workers. bring: takes labels to worker 0. exact: values are integers,
    which cannot be scaled. what: in errors.
    """

    def __init__(
        self, number: int, base: Label, bring: Callable[[Brought], None], *, what: str, exact: bool = False
    ) -> None:
        self.number = number
        self.round = 0  # the last that has begun
        self._base = self._label = base
        self._bring = bring
        self._what, self._exact = what, exact
        self._asked = 0  # the newest round that worker 0 asked about before it began here
        self._mixed = False
        self._contested = False
        self._verdict: Verdict | None = None
        self._over = False  # whether `end` has been called for this round
        self.late = False  # the verdict came after that

    def begin(self, label: Label, *, contributed: bool = False) -> None:
        """Begin the next round; its contribution must be held back until this request is done."""
        self.round += 1
        self._contested = not self.usual(label, self.round)
        self._label, self._verdict, self._over, self.late = label, None, False, False
        if self._contested:
            self._bring(Brought(self.number, self.round, not contributed, (label,)))

    def usual(self, label: Label, round_: int) -> bool:
        """Return whether a round under this label is like the one before, as far as is known here."""
        return not self._mixed and self._asked != round_ and label == self._base

    def ask(self, round_: int) -> None:
        """Answer worker 0, which wants this worker's label of a round."""
        if round_ > self.round:
            self._asked = round_
        elif round_ == self.round and not self._contested:
            self._contested = True
            self._bring(Brought(self.number, round_, False, (self._label,)))

    def decide(self, verdict: Verdict) -> None:
        """Take worker 0's decision on a round."""
        if verdict.round == self.round:
            self._verdict, self.late = verdict, self._over

    def test(self) -> bool:
        """Return whether nothing is to be waited for."""
        return not self._contested or self._verdict is not None

    # --- once it is done

    @property
    def _wrong(self) -> bool:
        verdict = self._verdict
        return verdict is not None and (verdict.wrong or (verdict.mixed and self._exact))

    @property
    def units(self) -> float | None:
        """Return the factor to update with; None: this worker's own, as everybody's."""
        return None if self._verdict is None or self._wrong or not self._verdict.mixed else self._verdict.units

    @property
    def ratio(self) -> float:
        """Return what this worker's contribution is to be multiplied by."""
        units = self.units
        return 1.0 if units is None or self._label.factor == units else self._label.factor / units

    def end(self) -> None:
        """End the round. Raises ConfigError, on every worker, where nothing was updated."""
        self._over = True
        if not self._contested:
            return
        verdict = self._verdict
        assert verdict is not None
        if self._wrong:
            why = "" if verdict.wrong else ", which integers cannot be scaled by"
            raise ConfigError(refusal(self._what, self.round, f"{why}: {verdict.text}", late=self.late))
        self._mixed, self._base = verdict.mixed, self._label
