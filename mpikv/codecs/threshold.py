"""The base of MXNet's two codecs: a threshold, and a residual, from which the values that are sent are subtracted."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays import compiled
from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import State
from mpikv.codecs.blocks import InBlocks, empty, in_float32, residual_of


@dataclass(frozen=True)
class Threshold(InBlocks):
    """A few bits for each value. threshold: t."""

    threshold: float = 0.5

    has_residual = on_device = True
    is_positive = True  # whether the threshold must be more than 0

    def __post_init__(self) -> None:
        found = in_float32(f"{self.name}: threshold", self.threshold, positive=self.is_positive)
        object.__setattr__(self, "threshold", found)

    def init(self, n_elems: int) -> State:
        """A residual of zeros."""
        return residual_of(n_elems)

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Add the values to the residual, and encode that."""
        n, t = values.size, np.float32(self.threshold)
        data = empty(values, self.wire_bytes(n, values.dtype), np.uint8)
        if not compiled.run(self.name, values, state["residual"], t, data):
            with np.errstate(over="ignore", invalid="ignore"):
                self._encode(values, state["residual"], t, data)
        return data

    @abstractmethod
    def _encode(self, values: HostArray, residual: HostArray, t: Any, data: HostArray) -> None:
        """Add the values to `residual`, write its codes into `data`, and subtract what they decode to from it."""
