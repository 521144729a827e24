"""Labels: what a worker says of a push, and what becomes of a round whose workers say different things.

A push is made under a *label*: the attributes of the key's optimizer as the owner is to apply them, and how the
workers' values are put together (`op`). In a synchronous round the labels of all workers must be equal. Where they are
not, nobody updates anything, and all workers raise an error that says who brought what (session/rules.py).

One attribute may differ, the *factor*: `rescale_grad`, which `Trainer.step(batch_size)` sets, and which differs in the
last, short batch of an epoch. Owners always apply the factor that all workers have agreed on: the one that the
optimizer was set with, for a trainer that of its first step. A worker that has another factor multiplies its own
values by the ratio of the two, as it copies them, and asks nobody. Who has the agreed factor multiplies nothing.
What cannot be scaled like this (integers; the pushes of asynchronous stores, or of one worker, which are not added; a
factor of 0 that was agreed on) has the worker's own factor in its label instead, like any other attribute.

Workers compare digests of 64 bits, which travel with what travels anyway: behind messages of a reduce-scatter
(collectives/labelled.py), beside the counters in a host's memory (collectives/host_key.py), in the mark by which
workers find that they make the same call (strategies/direct.py). Servers know all attributes, by their numbers, and
compare the labels themselves (server/policy.py).

Cost: per push a look at the optimizer's attributes. In a round whose worker has another factor: one pass over its
values. No message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.common.digests import digest

FACTOR = "rescale_grad"  # the one attribute that workers may have different values of
DIFFERENT = 1  # sent in place of a digest, once a rank knows that those of a round differ; no digest is 0 or 1


class Label(NamedTuple):
    """text: the attributes that the owner applies, as JSON. op: how workers' values are put together."""

    text: str
    op: str = "sum"


Labels = tuple[Label | None, ...]  # of a round, one for each of its keys; None: not pushed in this round, by no worker
PLAIN = Label("{}")


class Under(NamedTuple):
    """What a push is made under.

    number: of the optimizer's attributes, at the owner. ratio: what this worker's values are multiplied by.
    """

    number: int
    label: Label
    ratio: float = 1.0


NOTHING = Under(0, PLAIN)  # of a key that no optimizer serves


def label_of(attributes: Mapping[str, Any]) -> Label:
    """The label of a push whose owner is to apply these."""
    return Label(json.dumps(attributes, sort_keys=True))


@lru_cache(maxsize=64)  # a store of many keys has few labels
def digest_of(label: Label) -> int:
    """64 bits that differ for different labels."""
    return max(digest(label), DIFFERENT + 1)


def scaled(space: Any, values: Any, ratio: float, dtype: np.dtype[Any] | None = None) -> Any:
    """A worker's values as they are added: times `ratio`, in a copy, unless that is 1.

    space: the `Space` that they are in. dtype: of the copy, by default that of the values; it is calculated in the
    dtype of their sum, and rounded once.
    """
    if ratio == 1.0:
        return values
    wide = sum_dtype(values.dtype)
    result = space.empty(values.size, wide)
    space.scale(space.cast(values, wide), ratio, result)
    return space.cast(result, values.dtype if dtype is None else dtype)


# --- what a push of this worker is made under


class Attributed(Protocol):
    """What an optimizer shows here."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Its attributes, by name."""
        ...

    def attributes(self) -> dict[str, Any]:
        """Their values, which JSON can write."""
        ...


class _Known:
    """The last push of a slot. plain: the attributes then, where they are easy to compare; text: of its label."""

    def __init__(self, label: Label) -> None:
        self.plain: list[Any] | None = None
        self.under = Under(0, label)


class _Slot:
    """An optimizer, and what is known of it."""

    def __init__(self, optimizer: Attributed, *, exact: bool, scales: bool) -> None:
        attributes = optimizer.attributes()
        self.optimizer, self.exact, self.scales = optimizer, exact, scales
        self.agreed = float(attributes[FACTOR])
        self.as_set = label_of(attributes)
        self.update: dict[str, Any] = {}  # what the last `update` was made with
        self.sent = True  # whether a push since then has said so
        self.known = {exact: _Known(self.as_set) for exact in (False, True)}

    def is_exact(self, exact: bool) -> bool:
        """Whether values that are (not) `exact` by themselves cannot be scaled."""
        return exact or self.exact or not self.agreed

    def of(self, under: Under) -> Under:
        """What a push is made under, as far as it is scaled."""
        return under if self.scales or under.ratio == 1.0 else under._replace(ratio=1.0)

    def forget(self) -> None:
        """The next push looks at the attributes anew."""
        for known in self.known.values():
            known.plain = None


class AttributeLog:
    """A worker's side: what each push is made under. Notices that an optimizer's attributes have changed.

    Optimizers are in slots. Attributes are numbered as they change; number 0 means: as the optimizer was when it was
    set. Keys are `exact` whose values cannot be scaled.
    """

    def __init__(self) -> None:
        self.slots: dict[int, _Slot] = {}  # none: nothing can differ, and nobody need ask
        self._count = 0

    def watch(self, slot: int, optimizer: Attributed, *, exact: bool = False, scales: bool = True) -> None:
        """From now on compare `optimizer` with what it is now.

        exact: all keys of the slot count as such. scales: whether pushes are scaled, else only those in `scaling`.
        """
        self.slots[slot] = _Slot(optimizer, exact=exact, scales=scales)

    def under(self, slot: int, *, exact: bool) -> tuple[Under, dict[str, Any] | None]:
        """What a push of now is made under, and its attributes where they are new under that number."""
        one = self.slots.get(slot)
        if one is None:
            return NOTHING, None
        exact = one.scales and one.is_exact(exact)
        known = one.known[exact]
        plain = _plain(one.optimizer)
        if plain is not None and plain == known.plain:
            return one.of(known.under), None
        attributes = one.optimizer.attributes()
        ratio = 1.0
        if not exact:
            ratio = float(attributes[FACTOR]) / (one.agreed or 1.0)
            attributes[FACTOR] = one.agreed
        attributes |= one.update
        label, one.sent = label_of(attributes), True
        known.plain = plain  # only now: a value that cannot be sent must not pass for what was sent
        if label == known.under.label:
            known.under = known.under._replace(ratio=ratio)
            return one.of(known.under), None
        self._count += 1
        known.under = Under(self._count, label, ratio)
        return one.of(known.under), attributes

    def as_set(self, slot: int) -> Label:
        """The label of a slot whose attributes nobody has changed, which is the same on all workers."""
        one = self.slots.get(slot)
        return PLAIN if one is None else one.as_set

    # --- the factor of a trainer's slot

    def own_factor(self, slot: int) -> float:
        """This worker's."""
        return float(self.slots[slot].optimizer.attributes()[FACTOR])

    def agree(self, slot: int, factor: float) -> None:
        """All workers have agreed that owners apply this factor."""
        self.slots[slot].agreed = factor
        self.slots[slot].forget()

    def factor(self, slot: int) -> float:
        """What the sum of a round is to be multiplied by: the agreed factor, or the one that is equal everywhere."""
        return self.own_factor(slot) if self.slots[slot].is_exact(False) else self.slots[slot].agreed

    @contextmanager
    def scaling(self, slot: int) -> Iterator[None]:
        """A block in which pushes are scaled: of gradients that an update is made with here, with the agreed factor."""
        self.slots[slot].scales = True
        try:
            yield
        finally:
            self.slots[slot].scales = False

    def updated(self, slot: int) -> None:
        """This worker has made such an update. The next push tells the others what with."""
        one = self.slots[slot]
        one.update = {f"the last update's {name}": value for name, value in one.optimizer.attributes().items()}
        one.sent = False
        one.forget()

    def updates(self) -> list[Any]:
        """What updates were made with that no push has brought, for a comparison at the end."""
        return [[slot, one.update] for slot, one in sorted(self.slots.items()) if not one.sent]


_PLAIN_TYPES = (type(None), bool, int, float, str)


def _plain(optimizer: Attributed) -> list[Any] | None:
    """Its attributes as they are now, where they are such that equal ones do the same: no functions, no objects."""
    values = [getattr(optimizer, name) for name in optimizer.fields]
    for i, value in enumerate(values):
        if type(value) is dict:
            values[i] = dict(value)  # it may be changed in place
        elif type(value) not in _PLAIN_TYPES:
            return None
    return values


# --- whether the labels of all workers are equal


class Comparison:
    """One rank's side of the rounds of a queue: what it has sent to whom, and whether digests differ in this round.

    labels: of each key of the queue, as all workers have them before the first round.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels, self.own = labels, _of_all(labels)
        self._first = self.own
        self._sent: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self.pairs_begun: set[tuple[int, int]] = set()  # receiver and sender of messages of this allgather
        self.differ = False  # once this rank knows it; then nothing may be updated

    def begin(self, labels: Labels) -> None:
        """The next round, which this worker has pushed under these labels."""
        if labels != self._labels:
            self._labels, self.own = labels, _of_all(labels)
        self.differ = False
        self.pairs_begun.clear()

    @property
    def now(self) -> int:
        """What this rank says: its digest, or that there are different ones."""
        return DIFFERENT if self.differ else self.own

    def changed(self, rank: int) -> int | None:
        """What a message to this rank has to say; None: what the last one said."""
        now = self.now
        if self._sent.get(rank, self._first) == now:
            return None
        self._sent[rank] = now
        return now

    def take(self, rank: int, digest_: int | None) -> None:
        """Compare what a message from this rank says. None: what its last one said."""
        if digest_ is None:
            digest_ = self._known.get(rank, self._first)
        else:
            self._known[rank] = digest_
        self.compare(digest_)

    def compare(self, digest_: int) -> None:
        """Compare what another rank says of this round."""
        if digest_ != self.own:
            self.differ = True


def _of_all(labels: Sequence[Label | None]) -> int:
    several = {label for label in labels if label is not None}
    return digest_of(several.pop()) if len(several) == 1 else max(digest(*labels), DIFFERENT + 1)
