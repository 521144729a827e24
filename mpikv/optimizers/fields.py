"""Declarations of an optimizer's hyperparameters, one line each.

    momentum: float = number(default=0.9, low=0.0, below=1.0, doc="factor of the last step in the new one")

From this line come an argument of the constructor with its default, the check of every value that the attribute is set
to, its description in `help()` and in docs/optimizers.md, and its form as JSON, in which it is sent to other ranks and
saved in files. declared.py reads these declarations.

`number`, `flag`, `texts` and `factors` declare common kinds of values; `field` declares any other kind. All arguments
are given by name, so that type checkers understand the declarations (PEP 681).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.placement.keys import Key, check_key

Check = Callable[[str, str, Any], Any]
"""Gets the optimizer's name, the attribute's name and a value. Returns the value in one type, so that NumPy's numbers
become Python's, or raises TypeError or ValueError."""


def _same(value: Any) -> Any:
    return value


def _unchanged(owner: str, name: str, value: Any, current: Any) -> Any:
    del owner, name, current
    return value


@dataclass(frozen=True)
class Field:
    """The declaration of a hyperparameter.

    default: checked, too, whenever an optimizer is made. type: for signatures. wanted: which values are valid, in
    words. init: whether it is an argument of the constructor. kw_only: whether that must be given by name. factor:
    whether the gradient is multiplied by it first; workers may then have different values in a round
    (placement/labels.py). to_json: returns a value's JSON. from_json: the inverse; gets the optimizer's name, the
    attribute's name, the JSON, and the present value of the rank that reads it.
    """

    default: Any
    check: Check
    type: Any
    wanted: str
    doc: str
    init: bool = True
    kw_only: bool = True
    factor: bool = False
    to_json: Callable[[Any], Any] = _same
    from_json: Callable[[str, str, Any, Any], Any] = _unchanged


def field(*, default: Any, check: Check, doc: str, type: Any = Any, wanted: str = "", **more: Any) -> Any:  # noqa: A002
    """Declare a hyperparameter of any kind; its values are JSON, or become JSON by `to_json`. See `Field`.

    >>> def odd(owner, name, value):
    ...     if value % 2 == 0:
    ...         raise ValueError(f'{owner}: {name} is an odd number, not {value}')
    ...     return value
    >>> class Strange(optimizers.Optimizer):
    ...     size: int = optimizers.field(default=3, check=odd, doc='how many')
    >>> Strange(size=4)
    Traceback (most recent call last):
    ValueError: strange: size is an odd number, not 4
    """
    return Field(default, check, type, wanted, doc, **more)


def number(
    *,
    default: float | None,
    low: float | None = None,
    below: float | None = None,
    doc: str,
    kw_only: bool = True,
    factor: bool = False,
) -> Any:
    """Declare a finite float of at least `low` and less than `below`; None is allowed if it is the default.

    >>> class Strange(optimizers.Optimizer):
    ...     decay: float = optimizers.number(default=0.5, low=0.0, below=1.0, doc='how much is lost')
    >>> Strange(decay=1.5)
    Traceback (most recent call last):
    ValueError: strange: decay must be less than 1, not 1.5
    """
    optional = default is None
    bounds = [f"at least {low:g}"] if low is not None else []
    bounds += [f"less than {below:g}"] if below is not None else []
    wanted = (" and ".join(bounds) or "any number") + (", or None" if optional else "")

    def check(owner: str, name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if type(value) is float and (low is None or value >= low) and below is None and math.isfinite(value):
            return value  # a fast path, since a Trainer sets rescale_grad in every step
        kind = "a number or None" if optional else "a number"
        return checks.number(f"{owner}: {name}", value, low, below=below, wanted=kind)

    kind = float | None if optional else float
    return Field(default, check, kind, wanted, doc, kw_only=kw_only, factor=factor)


def flag(*, default: bool, doc: str) -> Any:
    """Declare a hyperparameter that is True or False.

    >>> class Strange(optimizers.Optimizer):
    ...     centered: bool = optimizers.flag(default=False, doc='whether the mean is subtracted')
    >>> Strange(centered=True).centered
    True
    """

    def check(owner: str, name: str, value: Any) -> bool:
        return checks.flag(f"{owner}: {name}", value)

    return Field(default, check, bool, "True or False", doc)


def texts(*, default: tuple[str, ...], doc: str) -> Any:
    """Declare a hyperparameter that is a tuple of strings.

    >>> class Strange(optimizers.Optimizer):
    ...     skip: tuple = optimizers.texts(default=('bias',), doc='keys that are left alone')
    >>> Strange(skip=['bias', 'gamma']).skip
    ('bias', 'gamma')
    """

    def check(owner: str, name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise checks.wrong(f"{owner}: {name}", "a list or tuple of strings", value)
        return tuple(value)

    return Field(default, check, tuple[str, ...], "strings", doc, to_json=list)


def factors(*, init: bool, doc: str) -> Any:
    """Declare a dict from key to a factor of at least 0, empty by default; a list of pairs is accepted, too.

    JSON holds the pairs, since its objects cannot have keys that are ints.
    """
    one = number(default=1.0, low=0.0, doc="").check

    def check(owner: str, name: str, value: Any) -> dict[Key, float]:
        if isinstance(value, (Mapping, list, tuple)):
            pairs = list(value.items()) if isinstance(value, Mapping) else list(value)
            if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
                return {check_key(key): one(owner, f"{name}[{shown(key)}]", factor) for key, factor in pairs}
        raise checks.wrong(f"{owner}: {name}", "a dict from key to factor", value)

    wanted = "a dict from key to a number of at least 0"
    return Field({}, check, dict[Key, float], wanted, doc, init=init, to_json=_pairs)


def _pairs(value: Mapping[Key, float]) -> list[list[Key | float]]:
    """Return the pairs of a dict, sorted, for JSON, whose objects would turn int keys into strings."""
    return [[key, value[key]] for key in sorted(value, key=lambda key: (isinstance(key, str), key))]
