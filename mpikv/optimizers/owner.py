"""The owner of shards: applies what the optimizer says to the values it owns, and keeps their state.

One object serves every mode: the only process of a local store, a worker that owns a part of each key, a server rank.
An optimizer sits in a numbered slot; slot 0 serves every key that has none of its own, so that two trainers can share a
store. The values of an optimizer's attributes (the learning rate above all) are numbered too: a worker that changes one
sends the new values once, under the next number, and each push says which number it was made under. So an update uses
the attributes of its own round, whatever arrives first.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.reductions import Reduction
from mpikv.common.checks import shown
from mpikv.errors import MpikvError
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import in_space
from mpikv.optimizers.step import State
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import PLAIN, Label, label_of
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import Spaces

DEFAULT_SLOT = 0
KEPT_ATTRIBUTES = (
    4096  # more changes than any program has rounds under way; keeps a learning rate per step from piling up
)


AttributesId = tuple[int, int]
"""A worker and its number for attributes that it changed; number 0: as the optimizer was when it was set."""

AS_SET: AttributesId = (0, 0)


class Joined(NamedTuple):
    """A key's part of an array of several keys, elements [begin, end). number: of the attributes of its push."""

    info: KeyInfo
    begin: int
    end: int
    number: int


def _numbers(state: State) -> State:
    """What of a state is no array."""
    return {name: value for name, value in state.items() if not hasattr(value, "dtype")}


class Kept:
    """An optimizer's attributes (`Optimizer.attributes`), and what they say of a push that is made under them."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.attributes = attributes

    @functools.cached_property
    def label(self) -> Label:
        """Made only where somebody compares it: at servers."""
        return label_of(self.attributes)


class Owner:
    """Applies pushed sums to owned values. Knows no MPI; not thread-safe.

    spaces: where the values are, by their keys. own: whether the optimizers are this owner's copies, which follow the
    numbers; else they are the user's own objects, which he changes himself.
    """

    def __init__(self, spaces: Spaces, *, own: bool = True) -> None:
        self._spaces, self._own = spaces, own
        self.states: dict[int, State] = {}  # key id -> state of the part owned here
        self._optimizers: dict[int, Optimizer | None] = {}
        self._slots: dict[int, int] = {}
        self._as_set: dict[int, Kept] = {}
        self._attributes: dict[tuple[int, int], OrderedDict[int, Kept]] = {}
        self._in_force: dict[int, AttributesId] = {}
        # Of keys that were updated as one: by the first one's number their state, and what each key has of it.
        self._joined: dict[int, tuple[State, list[State]]] = {}

    def in_stream(self) -> AbstractContextManager[Any]:
        """A context in which work on the states goes where their updates go."""
        return self._spaces.in_stream()

    def slot_of(self, key_id: int) -> int:
        """The slot whose optimizer serves this key."""
        return self._slots.get(key_id, DEFAULT_SLOT)

    def optimizer_of(self, key_id: int) -> Optimizer | None:
        """The optimizer that serves this key, None where the stored value becomes the sum."""
        return self._optimizers.get(self._slots.get(key_id, DEFAULT_SLOT))

    def set_optimizer(self, slot: int, optimizer: Optimizer | dict[str, Any], key_ids: list[int]) -> None:
        """Put `optimizer`, which becomes the owner's own, into a slot and give it these keys. States start anew.

        A dict: the attributes of one that the workers apply by themselves. Sums become the values of its keys.
        """
        self._optimizers[slot] = None if isinstance(optimizer, dict) else optimizer
        self._as_set[slot] = Kept(optimizer if isinstance(optimizer, dict) else optimizer.attributes())
        self._in_force[slot] = AS_SET
        self._joined.clear()
        for key_id in key_ids:
            self._slots[key_id] = slot
        for key_id in [key_id for key_id in self.states if self.slot_of(key_id) == slot]:
            del self.states[key_id]

    def take_state(self, info: KeyInfo, state: State) -> None:
        """Go on with a state that comes from a file or another rank, whose arrays are in host memory."""
        self.states[info.id] = in_space(state, self._spaces.of(info))

    def add_attributes(self, slot: int, worker: int, number: int, attributes: Mapping[str, Any]) -> None:
        """Keep what a worker changed a slot's attributes to, for the pushes that name the number."""
        kept = self._attributes.setdefault((slot, worker), OrderedDict())
        kept[number] = Kept(attributes)
        if len(kept) > KEPT_ATTRIBUTES:
            kept.popitem(last=False)

    def label(self, key_id: int, attributes: AttributesId) -> Label:
        """What a push of this key under these attributes says of its update.

        Attributes of an optimizer that another one has replaced since count as those that this one was set with.
        """
        slot = self._slots.get(key_id, DEFAULT_SLOT)
        if slot not in self._optimizers:
            return PLAIN
        known = not attributes[1] or attributes[1] in self._attributes.get((slot, attributes[0]), {})
        return self._kept(slot, attributes if known else AS_SET).label

    def different(self, key_id: int, pushed: Sequence[tuple[AttributesId, Reduction]]) -> Sequence[Label]:
        """The labels of what all workers have pushed of this key to a round, where they differ; else none."""
        if all(one == pushed[0] for one in pushed):
            return ()
        labels = [self.label(key_id, attributes)._replace(op=op.name) for attributes, op in pushed]
        return labels if any(label != labels[0] for label in labels) else ()

    def _kept(self, slot: int, attributes: AttributesId) -> Kept:
        worker, number = attributes
        return self._attributes[slot, worker][number] if number else self._as_set[slot]

    def apply(
        self,
        info: KeyInfo,
        weight: SpaceArray,
        total: SpaceArray,
        attributes: AttributesId,
    ) -> None:
        """One round: update `weight`, the owned part of the value (1-D, in place), with the pushed sum.

        total: same length, in the dtype that the key is added in. attributes: those to apply it with. Raises what the
        optimizer raises, with the key noted.
        """
        state = self.update(info, weight, (total,), attributes, self.states.get(info.id))
        if state is not None:
            self.states[info.id] = state

    def apply_together(self, parts: Sequence[Joined], weight: SpaceArray, total: SpaceArray) -> None:
        """`apply` for keys whose values lie in one array: those side by side are updated as one where they are alike.

        That is: one optimizer, by an elementwise formula that looks at no key, with the same numbers. So many small
        keys cost as many calls of NumPy or CuPy as one. Their states lie side by side, too, from then on.

        weight, total: (n,), see `apply`. parts: in their order, of what is updated.
        """
        marks, at = [self._mark(part) for part in parts], 0
        while at < len(parts):
            end = at + 1
            while end < len(parts) and marks[at] == marks[end] is not None and parts[end - 1].end == parts[end].begin:
                end += 1
            some = parts[at:end]
            span = slice(some[0].begin, some[-1].end)
            attributes = (0, some[0].number)
            if len(some) == 1:
                self.apply(some[0].info, weight[span], total[span], attributes)
            else:
                joined = self._joined_state(some)
                state = self.update(some[0].info, weight[span], (total[span],), attributes, joined)
                if state is not None:
                    self._keep(some, state)
            at = end

    def _mark(self, part: Joined) -> tuple[Any, ...] | None:
        """What parts have alike that are updated as one; None: this one is updated alone."""
        info, optimizer = part.info, self.optimizer_of(part.info.id)
        if optimizer is None:
            return (part.number,)
        joins = vars(type(optimizer)).get("joins", False)  # of a class derived from ours nobody knows
        if not (optimizer.sums and joins):
            return None
        state = self.states.get(info.id)
        factors = optimizer.lr_mult.get(info.key, 1.0), optimizer.wd_mult.get(info.key, 1.0)
        return part.number, id(optimizer), factors, None if state is None else _numbers(state)

    def _joined_state(self, parts: Sequence[Joined]) -> State | None:
        """The states of these keys as one, side by side; None: there are none yet."""
        states = [self.states.get(part.info.id) for part in parts]
        first = states[0]
        if first is None:
            return None
        kept = self._joined.get(parts[0].info.id)
        if kept is not None and [id(one) for one in kept[1]] == [id(one) for one in states]:
            return kept[0]
        return {
            name: np.concatenate([state[name] for state in states if state is not None])
            if hasattr(value, "dtype")
            else value
            for name, value in first.items()
        }

    def _keep(self, parts: Sequence[Joined], state: State) -> None:
        """Let each key have its part of a state."""
        known = self._joined.get(parts[0].info.id)
        if (
            known is not None
            and known[0] is state
            and all(self.states.get(part.info.id) is one for part, one in zip(parts, known[1], strict=True))
        ):
            for one in known[1]:
                one.update(_numbers(state))
            return
        cut, at = [], 0
        for part in parts:
            here = slice(at, at + part.end - part.begin)
            at = here.stop
            cut.append({name: value[here] if hasattr(value, "dtype") else value for name, value in state.items()})
            self.states[part.info.id] = cut[-1]
        self._joined[parts[0].info.id] = state, cut

    def update(
        self,
        info: KeyInfo,
        weight: SpaceArray,
        terms: Sequence[SpaceArray],
        attributes: AttributesId,
        state: State | None,
    ) -> State | None:
        """`apply` for an owner that keeps states elsewhere: takes a state (None at first) and returns the new one.

        terms: arrays whose sum is applied; several only for an optimizer that adds them itself (`Optimizer.sums`).
        """
        optimizer = self.optimizer_of(info.id)
        if optimizer is None:
            (total,) = terms
            self._spaces.of(info).copy(weight, total)
            return state
        slot = self.slot_of(info.id)
        if self._own and self._in_force[slot] != attributes:
            optimizer.set_attributes(self._kept(slot, attributes).attributes)
            self._in_force[slot] = attributes
        if not optimizer.elementwise:
            if weight.size != info.n_elems:
                raise MpikvError(f"{optimizer.name} needs the whole of key {shown(info.key)}, which is cut into shards")
            weight, terms = weight.reshape(info.shape), [term.reshape(info.shape) for term in terms]
        try:
            if state is None:
                state = optimizer.init(weight)
            if len(terms) > 1:
                return optimizer.update_sum(info.key, weight, terms, state)
            return optimizer.update(info.key, weight, terms[0], state)
        except Exception as error:
            add_note(error, f"in the update of key {shown(info.key)} by {type(optimizer).__name__}")
            raise


def add_note(error: Exception, note: str) -> None:
    """Say in an exception of somebody else's code what it was about; PEP 678 came with Python 3.11."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error} ({note})",)
