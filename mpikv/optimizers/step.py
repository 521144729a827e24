"""One update of a key: what a formula knows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpikv.placement.keys import Key

State = dict[str, Any]
"""The state of one key or slice: "t", the int number of updates so far, and by name flat arrays of the weight's number
of elements and plain numbers. What a user's own function keeps may be anything (function.py)."""


class Step(NamedTuple):
    """What a formula knows of the update it makes.

    t: the update's number, 1 for the first. learning_rate, wd: those of the key, factors included. global_rate: the
    learning rate without the key's factor. real: makes a number that keeps the arithmetic's dtype. shape: the weight's.
    state: the state, for its numbers; the arrays come as blocks.

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
