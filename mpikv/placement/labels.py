"""Labels: with which settings a worker pushes, and how a round is refused whose workers' settings differ.

Each push has a *label*: the attributes of the key's optimizer that the owner is to apply, and how the workers' values
are combined (`op`). In a synchronous round the labels of all workers must be equal. Where they differ, no owner updates
anything, and all workers raise an error with each worker's settings (session/rules.py). How they are compared says
docs/adr/0013: workers compare digests of 64 bits, servers the labels themselves.

One attribute may differ, the *factor* (`rescale_grad`): owners always apply the one that all have agreed on, and a
worker with another one multiplies its own values by the ratio of the two when it copies them (docs/adr/0031). Values
that cannot be scaled so (integers; pushes of asynchronous stores, or of one worker, which are not added; any where the
agreed factor is 0) have the worker's own factor in their label instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.common.digests import digest

FACTOR = "rescale_grad"  # the one attribute that workers may have different values of
DIFFERENT = 1  # sent in place of a digest, once a rank knows that the digests of a round differ; no digest is 0 or 1


class Label(NamedTuple):
    """text: the attributes that the owner applies, as JSON. op: how workers' values are combined."""

    text: str
    op: str = "sum"


NO_ATTRIBUTES = Label("{}")


class PushLabel(NamedTuple):
    """number: by which the owner knows these attributes. ratio: what this worker's values are multiplied by."""

    number: int
    label: Label
    ratio: float = 1.0


NO_OPTIMIZER = PushLabel(0, NO_ATTRIBUTES)  # of a key that no optimizer serves


def label_of(attributes: Mapping[str, Any]) -> Label:
    return Label(json.dumps(attributes, sort_keys=True))


@lru_cache(maxsize=64)  # a store of many keys has few labels
def digest_of(label: Label) -> int:
    return max(digest(label), DIFFERENT + 1)


def scaled(space: Any, values: Any, ratio: float, dtype: np.dtype[Any] | None = None) -> Any:
    """A worker's values times `ratio`, in a copy; the values themselves where that is 1.

    dtype: of the copy, by default that of the values; it is calculated in the dtype of their sum, and rounded once.
    """
    if ratio == 1.0:
        return values
    wide = sum_dtype(values.dtype)
    result = space.empty(values.size, wide)
    space.scale(space.cast(values, wide), ratio, result)
    return space.cast(result, values.dtype if dtype is None else dtype)


# --- the labels of this worker's pushes


class Attributed(Protocol):
    """An optimizer, as far as labels need it."""

    @property
    def fields(self) -> Mapping[str, Any]: ...

    def attributes(self) -> dict[str, Any]: ...


class _Pushed:
    """An optimizer as it was when something was pushed."""

    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._attributes = attributes

    def attributes(self) -> dict[str, Any]:
        return dict(self._attributes)


class _Slot:
    """An optimizer, and the last pushes of its keys.

    agreed: the factor that owners apply. as_set: the label with the attributes that the optimizer was set with. update:
    the attributes of the last update that this worker made itself. sent: whether a push since then has sent them. last,
    comparable: of the last push of keys whose values can (False) and cannot (True) be scaled, with `_comparable` then.
    """

    def __init__(self, optimizer: Attributed, *, exact: bool, scales: bool) -> None:
        attributes = optimizer.attributes()
        self.optimizer, self.exact, self.scales = optimizer, exact, scales
        self.agreed = float(attributes[FACTOR])
        self.as_set = label_of(attributes)
        self.update: dict[str, Any] = {}
        self.sent = True
        self.last = dict.fromkeys((False, True), PushLabel(0, self.as_set))
        self.forget()

    def is_exact(self, exact: bool) -> bool:
        """Whether values cannot be scaled. exact: because of the key itself."""
        return exact or self.exact or not self.agreed

    def of(self, found: PushLabel) -> PushLabel:
        return found if self.scales or found.ratio == 1.0 else found._replace(ratio=1.0)

    def forget(self) -> None:
        self.comparable: dict[bool, list[Any] | None] = {False: None, True: None}


class AttributeLog:
    """The labels of one worker's pushes. Optimizers are in slots; each change of attributes gets a new number.

    Number 0 stands for the attributes that the optimizer was set with. Keys are `exact` if they cannot be scaled.
    """

    def __init__(self) -> None:
        self.slots: dict[int, _Slot] = {}  # empty: labels cannot differ, so they are not compared
        self._count = 0

    def watch(self, slot: int, optimizer: Attributed, *, exact: bool = False, scales: bool = True) -> None:
        """Compare an optimizer's attributes with those that it has now. exact: all keys of the slot are.

        scales: whether all pushes are scaled, or only those within `scaling`.
        """
        self.slots[slot] = _Slot(optimizer, exact=exact, scales=scales)

    # --- of a store that goes on after a death

    def take_over(self, slot: int, optimizer: Attributed, before: AttributeLog | None) -> None:
        """Compare this optimizer from now on, whose copy as it was set has the slot. before: the log until now."""
        one, old = self.slots[slot], None if before is None else before.slots.get(slot)
        one.optimizer = optimizer
        if old is not None:
            one.agreed, one.scales, one.update, one.sent = old.agreed, old.scales, old.update, old.sent
        one.forget()

    def told(self) -> list[list[Any]]:
        """What a new worker needs of this log, for `take_up`, as JSON. Local."""
        return [[slot, one.agreed, one.update, one.sent] for slot, one in self.slots.items()]

    def take_up(self, told: Sequence[Sequence[Any]]) -> None:
        """Label pushes as another worker does. Local."""
        for slot, *of_slot in told:
            if (one := self.slots.get(slot)) is not None:
                one.agreed, one.update, one.sent = of_slot
                one.forget()

    @contextmanager
    def pushed_under(self, slot: int, attributes: Mapping[str, Any] | None) -> Iterator[None]:
        """Let the pushes of the block have the attributes that the slot's optimizer had at an earlier time."""
        one = None if attributes is None else self.slots.get(slot)
        if one is None or attributes is None:
            yield
            return
        now, one.optimizer = one.optimizer, _Pushed(attributes)
        one.forget()
        try:
            yield
        finally:
            one.optimizer = now
            one.forget()

    def push_label(self, slot: int, *, exact: bool) -> tuple[PushLabel, dict[str, Any] | None]:
        """The label of a push that is made now, and the attributes where their number is new."""
        one = self.slots.get(slot)
        if one is None:
            return NO_OPTIMIZER, None
        exact = one.scales and one.is_exact(exact)
        comparable = _comparable(one.optimizer)
        if comparable is not None and comparable == one.comparable[exact]:
            return one.of(one.last[exact]), None
        attributes = one.optimizer.attributes()
        ratio = 1.0
        if not exact:
            ratio = float(attributes[FACTOR]) / (one.agreed or 1.0)
            attributes[FACTOR] = one.agreed
        attributes |= one.update
        label, one.sent = label_of(attributes), True
        one.comparable[exact] = comparable  # only now: `label_of` raises for values that cannot be sent, each time
        if label == one.last[exact].label:
            one.last[exact] = one.last[exact]._replace(ratio=ratio)
            return one.of(one.last[exact]), None
        self._count += 1
        one.last[exact] = PushLabel(self._count, label, ratio)
        return one.of(one.last[exact]), attributes

    def as_set(self, slot: int) -> Label:
        """The label of a slot whose attributes have not been changed; it is the same on all workers."""
        one = self.slots.get(slot)
        return NO_ATTRIBUTES if one is None else one.as_set

    # --- the factor of a trainer's slot

    def own_factor(self, slot: int) -> float:
        return float(self.slots[slot].optimizer.attributes()[FACTOR])

    def agree(self, slot: int, factor: float) -> None:
        """Let owners apply this factor from now on, on which all workers have agreed."""
        self.slots[slot].agreed = factor
        self.slots[slot].forget()

    def factor(self, slot: int) -> float:
        """What a round's sum is multiplied by: the agreed factor, or this worker's where all must be equal."""
        return self.own_factor(slot) if self.slots[slot].is_exact(False) else self.slots[slot].agreed

    @contextmanager
    def scaling(self, slot: int) -> Iterator[None]:
        """Scale the pushes of the block: gradients of which this worker makes an update, by the agreed factor."""
        self.slots[slot].scales = True
        try:
            yield
        finally:
            self.slots[slot].scales = False

    def updated(self, slot: int) -> None:
        """Record that this worker has made such an update. The label of the next push has its attributes."""
        one = self.slots[slot]
        one.update = {f"the last update's {name}": value for name, value in one.optimizer.attributes().items()}
        one.sent = False
        one.forget()

    def updates(self) -> list[Any]:
        """Return the attributes of updates that no push has sent, for a comparison at the end."""
        return [[slot, one.update] for slot, one in sorted(self.slots.items()) if not one.sent]


_PLAIN_TYPES = (type(None), bool, int, float, str)


def _comparable(optimizer: Attributed) -> list[Any] | None:
    """An optimizer's attributes for a quick comparison; None where some are functions or other objects."""
    values = [getattr(optimizer, name) for name in optimizer.fields]
    for i, value in enumerate(values):
        if type(value) is dict:
            values[i] = dict(value)  # it may be changed in place
        elif type(value) not in _PLAIN_TYPES:
            return None
    return values


# --- whether the labels of all workers are equal


class Comparison:
    """One rank's comparison of digests in the rounds of a queue. label: equal on all before the first round.

    own: this rank's digest. differ: whether it has found different ones.
    """

    def __init__(self, label: Label) -> None:
        self._label, self.own = label, digest_of(label)
        self._first = self.own
        self._sent: dict[int, int] = {}  # the last digest sent to each rank
        self._received: dict[int, int] = {}  # the last digest received from each rank
        self.pairs_begun: set[tuple[int, int]] = set()  # receiver and sender of messages of this allgather
        self.differ = False  # once it is True, no owner may update

    def begin(self, label: Label) -> None:
        if label != self._label:
            self._label, self.own = label, digest_of(label)
        self.differ = False
        self.pairs_begun.clear()

    @property
    def now(self) -> int:
        """What this rank sends to others: its digest, or DIFFERENT."""
        return DIFFERENT if self.differ else self.own

    def changed(self, rank: int) -> int | None:
        """What a message to this rank must carry; None: nothing, since it is what the last one carried."""
        now = self.now
        if self._sent.get(rank, self._first) == now:
            return None
        self._sent[rank] = now
        return now

    def take(self, rank: int, digest_: int | None) -> None:
        """Compare what a message from this rank carries; None: what the last one carried."""
        if digest_ is None:
            digest_ = self._received.get(rank, self._first)
        else:
            self._received[rank] = digest_
        self.compare(digest_)

    def compare(self, digest_: int) -> None:
        if digest_ != self.own:
            self.differ = True
