"""What a hyperparameter may be: one small checker per kind.

An optimizer names its hyperparameters once, each with its checker, and the base class uses the table for everything:
checking a value whenever the attribute is set, listing the valid names, and carrying all values to other ranks as JSON.
A checker is called with the optimizer's and the attribute's name and the value; it returns the value in its one plain
type, so that numbers of NumPy become numbers of Python, or raises TypeError or ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mpikv import checks
from mpikv.checks import shown
from mpikv.keys import Key, check_key

Field = Callable[[str, str, Any], Any]


def number(low: float | None = None, *, below: float | None = None, optional: bool = False) -> Field:
    """A finite float of at least `low` and less than `below`; also None when `optional`."""

    def check(owner: str, name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if type(value) is float and (low is None or value >= low) and below is None and math.isfinite(value):
            return value  # as in every step of a Trainer, which sets rescale_grad
        wanted = "a number or None" if optional else "a number"
        return checks.number(f"{owner}: {name}", value, low, below=below, wanted=wanted)

    return check


def flag(owner: str, name: str, value: Any) -> bool:
    """True or False."""
    return checks.flag(f"{owner}: {name}", value)


def texts(owner: str, name: str, value: Any) -> tuple[str, ...]:
    """A tuple of strings."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise checks.wrong(f"{owner}: {name}", "a list or tuple of strings", value)
    return tuple(value)


_FACTOR = number(0.0)


def factors(owner: str, name: str, value: Any) -> dict[Key, float]:
    """A dict from key to a factor of at least 0; also the list of pairs that JSON can hold."""
    if isinstance(value, (Mapping, list, tuple)):
        pairs = list(value.items()) if isinstance(value, Mapping) else list(value)
        if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            return {check_key(key): _FACTOR(owner, f"{name}[{shown(key)}]", factor) for key, factor in pairs}
    raise checks.wrong(f"{owner}: {name}", "a dict from key to factor", value)


def factor_pairs(value: Mapping[Key, float]) -> list[list[Key | float]]:
    """The inverse of `factors` for JSON, whose objects would turn int keys into strings; in one order."""
    return [[key, value[key]] for key in sorted(value, key=lambda key: (isinstance(key, str), key))]
