"""The owner of shards: updates their values by an optimizer, and keeps the optimizer's states.

The same class serves every mode: the only process of a local store, a worker that owns a shard of each key, a server.
Each optimizer has a numbered slot; keys without a slot of their own use slot 0. So two trainers can share a store. The
values of an optimizer's attributes, such as the learning rate, are numbered, too: a worker that changes one sends all
values once, under the next number, and each push carries the number that was current. So an update uses the attributes
of its own round, in whatever order messages arrive.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mpikv.arrays.reductions import Reduction
from mpikv.common.checks import shown
from mpikv.errors import MpikvError
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import in_space
from mpikv.optimizers.step import State
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import NO_ATTRIBUTES, Label, label_of
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import Spaces

DEFAULT_SLOT = 0
KEPT_ATTRIBUTES = 4096  # more than a program has rounds under way; bounds memory if the rate changes in every step

AttributesId = tuple[int, int]
"""A worker, and its number for attributes that it changed; number 0: those that the optimizer had when it was set."""

AS_SET: AttributesId = (0, 0)


class KeptAttributes:
    """An optimizer's attributes (`Optimizer.attributes`), and the label of pushes that are made with them."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.attributes = attributes

    @functools.cached_property  # made when it is first compared, which only servers do
    def label(self) -> Label:
        return label_of(self.attributes)


class Owner:
    """Applies pushed sums to owned values. Uses no MPI; not thread-safe. spaces: of the keys' values.

    own: whether the optimizers are its copies, whose attributes it sets by the numbers; else the user's objects.
    """

    def __init__(self, spaces: Spaces, *, own: bool = True) -> None:
        self._spaces, self._own = spaces, own
        self.states: dict[int, State] = {}  # key id -> state of the shard owned here
        self._optimizers: dict[int, Optimizer | None] = {}
        self._slots: dict[int, int] = {}
        self._as_set: dict[int, KeptAttributes] = {}
        self._attributes: dict[tuple[int, int], OrderedDict[int, KeptAttributes]] = {}
        self._current: dict[int, AttributesId] = {}

    def in_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which work on the states goes into the stream of their updates."""
        return self._spaces.in_stream()

    def slot_of(self, key_id: int) -> int:
        """The slot of this key."""
        return self._slots.get(key_id, DEFAULT_SLOT)

    def optimizer_of(self, key_id: int) -> Optimizer | None:
        """Return the optimizer of this key. None: the sum replaces the stored value."""
        return self._optimizers.get(self._slots.get(key_id, DEFAULT_SLOT))

    def set_optimizer(self, slot: int, optimizer: Optimizer | dict[str, Any], key_ids: list[int]) -> None:
        """Put `optimizer`, which the owner then keeps, into a slot and give the slot these keys. States begin anew.

        A dict: the attributes of an optimizer that the workers apply themselves. Sums then replace the keys' values.
        """
        self._optimizers[slot] = None if isinstance(optimizer, dict) else optimizer
        self._as_set[slot] = KeptAttributes(optimizer if isinstance(optimizer, dict) else optimizer.attributes())
        self._current[slot] = AS_SET
        for key_id in key_ids:
            self._slots[key_id] = slot
        for key_id in [key_id for key_id in self.states if self.slot_of(key_id) == slot]:
            del self.states[key_id]

    def set_state(self, info: KeyInfo, state: State) -> None:
        """Set the state of a key, from a file or another rank; its arrays, in host memory, go to the key's space."""
        self.states[info.id] = in_space(state, self._spaces.of(info))

    def add_attributes(self, slot: int, worker: int, number: int, attributes: Mapping[str, Any]) -> None:
        """Keep the attributes that a worker set for a slot, for pushes with this number."""
        kept = self._attributes.setdefault((slot, worker), OrderedDict())
        kept[number] = KeptAttributes(attributes)
        if len(kept) > KEPT_ATTRIBUTES:
            kept.popitem(last=False)

    def label(self, key_id: int, attributes: AttributesId) -> Label:
        """Return the label of a push of this key; if its optimizer was replaced, of the new one's first attributes."""
        slot = self._slots.get(key_id, DEFAULT_SLOT)
        if slot not in self._optimizers:
            return NO_ATTRIBUTES
        known = not attributes[1] or attributes[1] in self._attributes.get((slot, attributes[0]), {})
        return self._attributes_of(slot, attributes if known else AS_SET).label

    def different(self, key_id: int, pushed: Sequence[tuple[AttributesId, Reduction]]) -> Sequence[Label]:
        """Return the labels of all workers' pushes of this key in a round if they differ, else none."""
        if all(one == pushed[0] for one in pushed):
            return ()
        labels = [self.label(key_id, attributes)._replace(op=op.name) for attributes, op in pushed]
        return labels if any(label != labels[0] for label in labels) else ()

    def _attributes_of(self, slot: int, attributes: AttributesId) -> KeptAttributes:
        worker, number = attributes
        return self._attributes[slot, worker][number] if number else self._as_set[slot]

    def apply(self, info: KeyInfo, weight: SpaceArray, total: SpaceArray, attributes: AttributesId) -> None:
        """Update `weight`, the owned shard (1-D, in place), with the sum of one round, in the dtype it is added in.

        attributes: to be used in this update. Raises what the optimizer raises, with a note about the key.
        """
        state = self.update(info, weight, (total,), attributes, self.states.get(info.id))
        if state is not None:
            self.states[info.id] = state

    def update(
        self,
        info: KeyInfo,
        weight: SpaceArray,
        terms: Sequence[SpaceArray],
        attributes: AttributesId,
        state: State | None,
    ) -> State | None:
        """Do what `apply` does, with a state that the caller keeps: None before the first update. Returns the new one.

        terms: arrays whose sum is applied; several only if the optimizer can add them (`Optimizer.sums`).
        """
        optimizer = self.optimizer_of(info.id)
        if optimizer is None:
            (total,) = terms
            self._spaces.of(info).copy(weight, total)
            return state
        slot = self.slot_of(info.id)
        if self._own and self._current[slot] != attributes:
            optimizer.set_attributes(self._attributes_of(slot, attributes).attributes)
            self._current[slot] = attributes
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
    """Add a note to an exception; PEP 678, which defines notes, came with Python 3.11."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error} ({note})",)
