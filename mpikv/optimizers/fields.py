"""What a hyperparameter may be: one small checker per kind.

An optimizer names its hyperparameters once, each with its checker, and the base class uses the table for everything:
checking a value whenever the attribute is set, listing the valid names, and carrying all values to other ranks as JSON.
A checker is called with the optimizer's and the attribute's name and the value; it returns the value in its one plain
type, so that numbers of NumPy become numbers of Python, or raises TypeError or ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from mpikv.keys import Key, check_key

Field = Callable[[str, str, Any], Any]


def number(low: float | None = None, *, below: float | None = None, optional: bool = False) -> Field:
    """A finite float of at least `low` and less than `below`; also None when `optional`."""

    def check(owner: str, name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            wanted = "a number or None" if optional else "a number"
            raise TypeError(f"{owner}: {name} is {wanted}, not {type(value).__name__} ({value!r})")
        result = float(value)
        if not math.isfinite(result):
            raise ValueError(f"{owner}: {name} must be finite, not {result}")
        if low is not None and result < low:
            raise ValueError(f"{owner}: {name} must be at least {low:g}, not {result:g}")
        if below is not None and result >= below:
            raise ValueError(f"{owner}: {name} must be less than {below:g}, not {result:g}")
        return result

    return check


def flag(owner: str, name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} is True or False, not {type(value).__name__} ({value!r})")
    return value


def texts(owner: str, name: str, value: Any) -> tuple[str, ...]:
    """A tuple of strings."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{owner}: {name} is a list or tuple of strings, not {type(value).__name__} ({value!r})")
    result = tuple(value)
    for item in result:
        if not isinstance(item, str):
            raise TypeError(f"{owner}: {name} holds strings, not {type(item).__name__} ({item!r})")
    return result


_FACTOR = number(0.0)


def factors(owner: str, name: str, value: Any) -> dict[Key, float]:
    """A dict from key to a factor of at least 0; also the list of pairs that JSON can hold."""
    if not isinstance(value, (Mapping, list, tuple)):
        raise TypeError(f"{owner}: {name} is a dict from key to factor, not {type(value).__name__} ({value!r})")
    try:
        pairs = list(value.items()) if isinstance(value, Mapping) else [(key, factor) for key, factor in value]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{owner}: {name} is a dict from key to factor, not {value!r}") from error
    return {check_key(key): _FACTOR(owner, f"{name}[{key!r}]", factor) for key, factor in pairs}


def factor_pairs(value: Mapping[Key, float]) -> list[list[Key | float]]:
    """The inverse of `factors` for JSON, whose objects would turn int keys into strings; in one order."""
    return [[key, value[key]] for key in sorted(value, key=lambda key: (isinstance(key, str), key))]
