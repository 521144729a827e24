"""The arguments of a formula: the state of a key, as an optimizer declares it, and the values of one update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.placement.keys import Key

State = dict[str, Any]
"""The state of one key or slice, by name: "t", the number of updates so far (int), other numbers, and flat arrays with
one element for each of the weight. The state of a user's own function may hold any object (function.py)."""

Arrays = Mapping[str, HostArray]
"""The arrays of a state by their names."""


@dataclass(frozen=True)
class Array:
    """An array of a state: one number for each element of the weight, in the arithmetic's dtype.

    where: a field; if that is 0 or False, states have no such array. from_weight: it begins as the weight, not as 0.

    >>> optimizers.Adam.states[0]
    Array(name='mean', doc='m, the running mean of gradients', where='', from_weight=False)
    """

    name: str
    doc: str
    where: str = ""
    from_weight: bool = False


@dataclass(frozen=True)
class Scalar:
    """A number of a state, one for the whole weight. begin: its first value.

    >>> optimizers.LARS.states[-1].begin
    0.0
    """

    name: str
    doc: str
    begin: float


class Step(NamedTuple):
    """The values of one update that a formula uses.

    t: the update's number, 1 for the first. learning_rate, wd: those of the key, factors included. global_rate: the
    learning rate without the key's factor. real: converts a number to the arithmetic's dtype. shape: the weight's.
    state: the state, for its numbers; the formula gets the arrays as blocks.

    >>> optimizers.Step('w', 1, 0.5, wd=0.0, global_rate=0.5, real=np.float32, shape=(2,), state={}).real(0.25).dtype
    dtype('float32')
    """

    key: Key
    t: int
    learning_rate: float
    wd: float
    global_rate: float
    real: Callable[[float], Any]
    shape: tuple[int, ...]
    state: State


def update_mean(
    step: Step, mean: HostArray, values: HostArray, keep: float, tmp: HostArray, *, squared: bool = False
) -> None:
    """Set mean = keep * mean + (1 - keep) * values, or with their squares. tmp: scratch that is not `values`."""
    mean *= step.real(keep)
    if squared:
        values = np.multiply(values, values, out=tmp)
    mean += np.multiply(values, step.real(1.0 - keep), out=tmp)


def limit(values: HostArray, bound: float | None, real: Callable[[float], Any]) -> None:
    """Limit the values to +- bound, in place; None or <= 0: no limit."""
    if bound is not None and bound > 0.0:
        np.maximum(values, real(-bound), out=values)
        np.minimum(values, real(bound), out=values)
