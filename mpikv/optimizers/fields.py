"""How an optimizer declares its hyperparameters: one line each, for everything that has to know of them.

    momentum: float = number(default=0.9, low=0.0, below=1.0, doc="how much of the last step is made again")

The line gives the constructor an argument with its default, checks every value that the attribute is ever set to,
describes it in `help()` and in docs/optimizers.md, and carries it as JSON to other ranks and into files. declared.py
is the class that reads it.

`number`, `flag`, `texts` and `factors` are the kinds that are there; `field` makes one of any other kind. Everything is
given by name, so that type checkers understand it (PEP 681).
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
"""Gets the optimizer's and the attribute's name and a value. Returns the value in its one plain type, so that numbers
of NumPy become numbers of Python, or raises TypeError or ValueError."""


def _same(value: Any) -> Any:
    return value


def _as_sent(owner: str, name: str, value: Any, current: Any) -> Any:
    del owner, name, current
    return value


@dataclass(frozen=True)
class Field:
    """What is declared of a hyperparameter.

    default: checked, too, whenever an optimizer is made. type: for signatures. wanted: in words, which values there may
    be. init: whether it is an argument of the constructor; kw_only: by its name alone. factor: whether it multiplies
    the gradient before all else; workers may then have different ones in a round (labels.py).
    to_json: what is sent of a value. from_json: the inverse; it gets the optimizer's and the attribute's name, what was
    sent, and the value that the receiver has now.
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
    from_json: Callable[[str, str, Any, Any], Any] = _as_sent


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
    """Declare a finite float of at least `low` and less than `below`; None is allowed where it is the default.

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
            return value  # as in every step of a Trainer, which sets rescale_grad
        kind = "a number or None" if optional else "a number"
        return checks.number(f"{owner}: {name}", value, low, below=below, wanted=kind)

    kind = float | None if optional else float
    return Field(default, check, kind, wanted, doc, kw_only=kw_only, factor=factor)


def flag(*, default: bool, doc: str) -> Any:
    """Declare a hyperparameter that is True or False.

    >>> class Strange(optimizers.Optimizer):
    ...     centered: bool = optimizers.flag(default=False, doc='whether the mean is taken off')
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
    """Declare a dict from key to a factor of at least 0; the list of pairs that JSON can hold is taken, too.

    Empty at first.
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
    """A dict for JSON, whose objects would turn int keys into strings; in one order."""
    return [[key, value[key]] for key in sorted(value, key=lambda key: (isinstance(key, str), key))]
