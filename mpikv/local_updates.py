"""Updates where no store makes them: a worker applies the optimizer to its own weights.

The first device's replica is updated in host memory, in place where it is contiguous there, and copied to the
others. So replicas cannot drift apart, and an optimizer's state is held once per worker, not once per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays import HostArray, host_view, is_device, sum_dtype, write
from mpikv.checks import shown
from mpikv.keys import Key
from mpikv.optimizers import Optimizer
from mpikv.session.base import NewKey, Session
from mpikv.spaces.named import HOST
from mpikv.strategies.local import LocalStrategy
from mpikv.strategies.states import load_file, save_file


class LocalUpdates:
    """An optimizer with the states of some keys, in this process. Local calls, nothing is sent."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._session = Session("local")
        self._strategy = LocalStrategy(self._session)
        self._strategy.set_optimizer(optimizer, None)
        self._held: dict[Key, HostArray] = {}

    def add(self, key: Key, weight: Any) -> None:
        """Begin to update the key with this weight (an array of any library)."""
        view = host_view(weight, f"the weight of {shown(key)}")
        flat = view.reshape(-1)  # a view where contiguous, and the updates are then made in the model's memory
        if is_device(weight) or not flat.flags.writeable:
            flat = flat.copy()
        self._held[key] = flat
        self._strategy.init([NewKey(key, view.shape, flat, HOST)])

    def apply(self, key: Key, weights: Sequence[Any], grad: Any) -> None:
        """Make one update with `grad`, the sum over devices and workers; each of `weights` gets the new value."""
        info, held = self._session.infos[key], self._held[key]
        view = host_view(weights[0], f"the weight of {shown(key)}")
        # `held` is either a weight's own contiguous memory or memory of its own, so comparing bounds is exact.
        if not np.may_share_memory(held, view):
            np.copyto(held, view.reshape(-1))  # the model may have changed it, or moved it to other memory
        total = host_view(grad, f"the gradient of {shown(key)}").reshape(-1)
        self._strategy.push(info, total.astype(sum_dtype(info.dtype), copy=False))
        for weight in weights:
            if is_device(weight) or not np.may_share_memory(held, host_view(weight, "a weight")):
                write(weight, held, f"the weight of {shown(key)}")

    def save_states(self, path: str) -> None:
        """Write the states into one file, whole or not at all, in the format of a store's file."""
        save_file(self._session, self._strategy, path, dump_optimizer=True)

    def load_states(self, path: str) -> None:
        """Read such a file, or one of a store with the same keys. Nothing is changed if it raises StatesFileError."""
        load_file(self._session, self._strategy, path)
