"""Any callable `(weight, grad, state) -> state` as an optimizer.

The callable changes `weight` in place and returns the `state` that it gets at the next update; the first one is None.
It gets the weight itself, in its shape and dtype, and the gradient multiplied by `rescale_grad` (float32 if the weight
is float16 or bfloat16), which it must not change; for a key on a GPU arrays of CuPy. Its keys are not cut, since its
formula is unknown, unless it has an attribute `elementwise = True`; then it gets flat slices.

The state may be any object. It can be saved, and moved to another rank, if it is None, a number, an array, or a flat
dict (with string keys), list or tuple of numbers and arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from mpikv.arrays.as_numpy import HostArray, is_elsewhere
from mpikv.common.checks import shown
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.identity import identity
from mpikv.optimizers.step import State
from mpikv.placement.keys import Key

UserFunction = Callable[[HostArray, HostArray, Any], Any]


class Function(Optimizer):
    """An optimizer made of a callable; see the module. `create(callable)` makes one.

    >>> def plain(weight, grad, state):
    ...     weight -= 0.5 * grad
    >>> weight, optimizer = np.ones(2), optimizers.create(plain)
    >>> optimizer.update('w', weight, np.ones(2), optimizer.init(weight)), weight
    ({'t': 1}, array([0.5, 0.5]))
    """

    name: ClassVar[str] = "function"

    def __init__(self, function: UserFunction, *, rescale_grad: float = 1.0) -> None:
        if not callable(function):
            raise TypeError(f"function: a callable (weight, grad, state) -> state is wanted, not {shown(function)}")
        super().__init__(rescale_grad=rescale_grad)
        self.function = function
        self.elementwise = getattr(function, "elementwise", False) is True

    def __repr__(self) -> str:
        return f"Function({self.function!r}, rescale_grad={self.rescale_grad!r})"

    def config(self) -> dict[str, Any]:
        """See `Optimizer`. It has the callable's identity, by which ranks compare it, not the callable itself."""
        return {**super().config(), "function": identity(self.function)}

    def check_state(self, weight: HostArray, state: State) -> None:
        """See `Optimizer`. Only the count of updates is checked, since the callable decides on the rest."""
        count_of(state)

    def update(self, key: Key, weight: HostArray, grad: HostArray, state: State) -> State:
        """See `Optimizer`. Raises what the callable raises."""
        self.check_update(key, weight, grad)
        count = count_of(state)
        if self.rescale_grad != 1.0:
            factor = grad.dtype.type(self.rescale_grad) if grad.dtype.kind == "f" else self.rescale_grad
            scaled = grad * factor
            grad = np.asarray(scaled) if isinstance(grad, np.ndarray) else scaled
        return {"t": count + 1, **pack(self.function(weight, grad, unpack(state)))}


def count_of(state: Any) -> int:
    """Return the number of updates of a state. Raises ValueError if it is no state."""
    if type(state) is not dict or type(state.get("t")) is not int:
        raise ValueError(f"a state is a dict with a count of updates 't', not {shown(state)}")
    count: int = state["t"]
    return count


_NUMBERS = (bool, int, float, np.generic)


def pack(value: Any) -> State:
    """Return a callable's state as entries of a state here, which `unpack` understands; "other" cannot be saved."""
    if value is None:
        return {}
    if _is_item(value):
        return {"value": value}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        items, mark = list(value.items()), "dict"
    elif type(value) in (list, tuple):
        items, mark = [(str(i), item) for i, item in enumerate(value)], type(value).__name__
    else:
        return {"other": value}
    if not all(_is_item(item) for _, item in items):
        return {"other": value}
    # The number of items records the container itself, which may be empty.
    return {mark: len(items), **{f"{mark}:{name}": item for name, item in items}}


def _is_item(value: Any) -> bool:
    return isinstance(value, (*_NUMBERS, np.ndarray)) or is_elsewhere(value)


def unpack(state: State) -> Any:
    """The inverse of `pack`."""
    for name in ("value", "other"):
        if name in state:
            return state[name]
    for mark, make in (("dict", dict), ("list", list), ("tuple", tuple)):
        if mark in state:
            start = f"{mark}:"
            items = {name[len(start) :]: item for name, item in state.items() if name.startswith(start)}
            return items if make is dict else make(items[str(i)] for i in range(len(items)))
    return None
