"""What MXNet's two codecs have in common: a threshold, and a residual, from which what was sent is taken."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays import compiled
from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import State
from mpikv.codecs.blocks import InBlocks, empty, positive, residual_of


@dataclass(frozen=True)
class Threshold(InBlocks):
    """A few bits for each value. threshold: t, more than 0."""

    threshold: float = 0.5

    has_residual = on_device = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", positive(f"{self.name}: threshold", self.threshold))

    def init(self, n_elems: int) -> State:
        """Nothing is owed."""
        return residual_of(n_elems)

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Send what the residual has come to."""
        n, t = values.size, np.float32(self.threshold)
        data = empty(values, self.wire_bytes(n, values.dtype), np.uint8)
        if not compiled.run(self.name, values, state["residual"], t, data):
            with np.errstate(over="ignore", invalid="ignore"):
                self._encode(values, state["residual"], t, data)
        return data

    @abstractmethod
    def _encode(self, values: HostArray, residual: HostArray, t: Any, data: HostArray) -> None:
        """Add the values to `residual`, write what is sent into `data`, and take it from `residual`."""
