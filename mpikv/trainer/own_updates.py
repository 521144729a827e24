"""Updates that no store makes: a worker applies the optimizer to its own weights, which clipping by the norm needs.

The first device's replica is updated in its memory (host or GPU), in place if it is contiguous, and copied to the other
devices. So replicas stay equal, and each worker holds the optimizer's states once, not once per device. The norm is
that of the mean over all examples, and of all parameters together: of the sums, which have the same bits on all
workers, added in an order that does not depend on the processor.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.common.checks import shown
from mpikv.optimizers import Optimizer
from mpikv.placement.keys import Key
from mpikv.session.base import NewKey, Session
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import Spaces
from mpikv.strategies.local import LocalStrategy


class OwnUpdates:
    """An optimizer with the states of some keys, in this process: a store of one process. Its calls are local."""

    def __init__(self, optimizer: Optimizer, spaces: Spaces) -> None:
        self._spaces = spaces
        self.session = Session("local", spaces=spaces)
        self.strategy = LocalStrategy(self.session)
        self.strategy.set_optimizer(optimizer, None)
        self._held: dict[Key, SpaceArray] = {}

    def add(self, key: Key, weight: Any) -> None:
        """Add a key with this weight (an array of any library)."""
        spaces, what = self._spaces, f"the weight of {shown(key)}"
        (caller,) = spaces.callers_arrays([weight])
        space = spaces.space_of(caller)
        held = spaces.in_place(space, caller, what)  # so that updates are made in the model's memory
        if held is None or (isinstance(held, np.ndarray) and not held.flags.writeable):
            held = spaces.total(space, [caller], what, on_device=True)
        self._held[key] = held
        self.strategy.init([NewKey(key, tuple(weight.shape), held, space)])

    def apply(self, weights: Mapping[Key, Sequence[Any]], grads: Mapping[Key, Any]) -> None:
        """Make one update of each key; each of its weights, on every device, gets the new value.

        grads: the sums over devices and workers.
        """
        spaces = self._spaces
        callers = {key: spaces.callers_arrays([grads[key], *replicas]) for key, replicas in weights.items()}
        in_place = [self._apply(key, weight, grad) for key, (grad, weight, *_) in callers.items()]
        for (key, (_, *replicas)), done in zip(callers.items(), in_place, strict=True):
            space = self.session.infos[key].space
            for replica in replicas[done:]:
                spaces.write(space, replica, self._held[key], f"the weight of {shown(key)}")
        spaces.make_callers_wait([array for arrays in callers.values() for array in arrays])

    def _apply(self, key: Key, weight: Any, grad: Any) -> bool:
        """Update the key's first weight. Returns whether it was updated in its own memory."""
        spaces, info = self._spaces, self.session.infos[key]
        space, held, what = info.space, self._held[key], f"the weight of {shown(key)}"
        in_place = spaces.is_view_of(space, held, weight)
        if not in_place:
            # The model may have changed the weight, or moved it to other memory.
            spaces.by_name(space).copy(held, spaces.total(space, [weight], what, on_device=True))
        of_grad = f"the gradient of {shown(key)}"
        total = spaces.in_place(space, grad, of_grad)
        if total is None:
            total = spaces.total(space, [grad], of_grad, on_device=True)
        self.strategy.push(info, total)
        return in_place


def norm_of(optimizer: Optimizer, grads: Mapping[str, Sequence[Any]], spaces: Spaces) -> float:
    """Return the norm of the gradients that `optimizer` will apply. Raises FloatingPointError if it is not finite."""
    whats = [f"the gradient of {name!r}" for name in grads]
    sums = spaces.sums_of_squares([replicas[0] for replicas in grads.values()], whats)
    norm = abs(optimizer.rescale_grad) * math.sqrt(functools.reduce(operator.add, sums, 0.0))
    if not math.isfinite(norm):
        raise FloatingPointError(f"clip_global_norm: the norm of the gradients is {norm}; no weight was changed")
    return norm
