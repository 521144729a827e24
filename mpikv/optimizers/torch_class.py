"""Any class of `torch.optim` as an optimizer.

The torch optimizer works on the weight's own memory (a float32 copy for dtypes other than float32 and float64). Between
updates its state is kept as NumPy arrays and numbers, so that it can be saved and moved; each update makes a new torch
object. `learning_rate` and `wd` are its `lr` and `weight_decay`, and follow schedules and factors; `rescale_grad` and
`clip_gradient` are applied to the gradient before. All other arguments of the class are in `kwargs`, and are
attributes, too. Keys are not cut, since the class's formula is unknown. PyTorch is imported at the first update.

Cost: that of the torch optimizer, and some 50 us per key and update to set it up. Restrictions: no optimizer that calls
the model again (LBFGS) or wants sparse gradients (SparseAdam).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.checks import meant, options, shown
from mpikv.errors import UnsupportedError
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.declared import check_by, field
from mpikv.optimizers.function import count_of
from mpikv.optimizers.schedules import Scheduler
from mpikv.optimizers.step import Arrays, State, Step

_COMMON = ("rescale_grad", "clip_gradient", "lr_scheduler", "multi_precision")
_OURS = {"lr": "learning_rate", "weight_decay": "wd"}
_REFUSED = {"LBFGS": "it evaluates the model several times in a step", "SparseAdam": "gradients here are dense"}


def is_torch_class(value: object) -> TypeGuard[type[Any]]:
    """Whether `value` is an optimizer class of torch; does not import torch."""
    return isinstance(value, type) and any(
        base.__name__ == "Optimizer" and base.__module__ == "torch.optim.optimizer" for base in value.__mro__
    )


def _json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_json(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else {"value": repr(value)}


def _from_json(owner: str, name: str, sent: Any, current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of another rank; values that cannot be sent must be equal to this rank's."""
    found = {}
    for one, value in options(f"{owner}: {name}", sent).items():
        if one in current and _json(current[one]) == value:
            found[one] = current[one]
        elif isinstance(value, Mapping):
            raise UnsupportedError(f"{owner}: {one}={value.get('value')}, which only the whole optimizer carries")
        else:
            found[one] = tuple(value) if isinstance(value, list) else value
    return found


class TorchOptimizer(Optimizer):
    """An optimizer made of a torch.optim class and its keyword arguments; see the module. `create` makes one.

    kwargs: the class's own, and those that every optimizer here has. `learning_rate` and `lr` mean the same, as do `wd`
    and `weight_decay`. Each is an attribute, under either name, and may be changed as those of other optimizers. Raises
    TypeError for others (lists the valid ones), UnsupportedError for a class that cannot be used here. The example
    needs PyTorch.

    >>> import torch
    >>> weight, optimizer = np.ones(2), optimizers.create(torch.optim.SGD, lr=0.5)
    >>> state = optimizer.update('w', weight, np.ones(2), optimizer.init(weight))
    >>> weight
    array([0.5, 0.5])
    >>> optimizer.lr, optimizer.momentum = 0.1, 0.9
    >>> optimizer.learning_rate, optimizer.nesterov
    (0.1, False)
    """

    kwargs: dict[str, Any] = field(
        default={},
        check=check_by(options),
        doc="the class's own arguments",
        init=False,
        to_json=lambda kwargs: {name: _json(kwargs[name]) for name in sorted(kwargs)},
        from_json=_from_json,
    )
    name: ClassVar[str] = "torch"
    elementwise = False

    def __init__(self, torch_class: type[Any], **kwargs: Any) -> None:
        if not is_torch_class(torch_class):
            raise TypeError(f"torch: a class of torch.optim is wanted, not {shown(torch_class)}")
        reason = _REFUSED.get(torch_class.__name__)
        if reason is not None:
            raise UnsupportedError(f"torch.optim.{torch_class.__name__} cannot serve here: {reason}")
        parameters = dict(list(inspect.signature(torch_class).parameters.items())[1:])  # the first is `params`
        common: dict[str, Any] = {name: kwargs.pop(name) for name in _COMMON if name in kwargs}
        rate = _either(kwargs, "lr", "learning_rate")
        decay = _either(kwargs, "weight_decay", "wd")
        unknown = sorted(set(kwargs) - set(parameters))
        if unknown:
            valid = ", ".join([*parameters, *_COMMON])
            near = meant(unknown[0], [*parameters, *_COMMON])
            raise TypeError(f"torch.optim.{torch_class.__name__} has no {', '.join(unknown)}; it has {valid}.{near}")
        self._ours = {name: ours for name, ours in _OURS.items() if name in parameters}
        self._own = {name: one.default for name, one in parameters.items() if name not in {*_OURS, *self.fields}}
        if rate is None and not isinstance(common.get("lr_scheduler"), Scheduler):
            rate = _default(parameters, "lr")
        decay = _default(parameters, "weight_decay") if decay is None else decay
        super().__init__(learning_rate=rate, wd=0.0 if decay is None else decay, **common)
        self.torch_class = torch_class
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"TorchOptimizer({self.torch_class.__name__}, {super().__repr__()})"

    def __getattr__(self, name: str) -> Any:
        """Return an argument of the class."""
        values = self.__dict__
        if name in values.get("_ours", ()):
            return getattr(self, self._ours[name])
        if name in values.get("_own", ()):
            return self.kwargs.get(name, self._own[name])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_own", ()):
            name, value = "kwargs", {**self.kwargs, name: value}
        super().__setattr__(self.__dict__.get("_ours", {}).get(name, name), value)

    def _settable(self) -> list[str]:
        return [*self._ours, *self._own, *_COMMON]

    def config(self) -> dict[str, Any]:
        """See `Optimizer`. It has the class's name, too."""
        return {**super().config(), "class": f"{self.torch_class.__module__}.{self.torch_class.__name__}"}

    def complete_arrays(self, flat: HostArray, state: State, names: Sequence[str]) -> None:
        """Do nothing: torch's optimizers make their arrays themselves."""

    def init(self, weight: HostArray) -> State:
        """See `Optimizer`. Raises UnsupportedError for a weight that is not in host memory."""
        if not isinstance(weight, np.ndarray):
            raise UnsupportedError(
                f"torch.optim.{self.torch_class.__name__} updates keys in host memory alone: initialise the key with a "
                "NumPy array, or use an optimizer of mpikv.optimizers"
            )
        return super().init(weight)

    def check_state(self, weight: HostArray, state: State) -> None:
        """See `Optimizer`. Only the count of updates is checked, since the class decides on the rest."""
        count_of(state)

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        """Make one step of a torch optimizer with the weight's memory and the state of the last step."""
        del arrays
        torch = importlib.import_module("torch")
        grad = self.prepared(step, w, g, tmp)
        if grad is not tmp[0]:  # torch may write into a gradient, and refuses read-only memory
            np.copyto(tmp[0], grad)
        parameter = torch.from_numpy(w.reshape(step.shape)).requires_grad_()
        parameter.grad = torch.from_numpy(tmp[0].reshape(step.shape))
        current = {"lr": step.learning_rate, "weight_decay": step.wd}
        optimizer = self.torch_class([parameter], **self.kwargs, **{name: current[name] for name in self._ours})
        kept = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in step.state.items()
            if name not in ("t", "master")
        }
        if kept:
            optimizer.state[parameter] = kept
        optimizer.step()
        for name in kept:
            del step.state[name]
        for name, value in optimizer.state[parameter].items():
            if value is not None:
                step.state[name] = _from_torch(torch, name, value, self.torch_class)


def _either(kwargs: dict[str, Any], theirs: str, ours: str) -> Any:
    """Pop the value that is given under one of two names; None if there is none."""
    if theirs in kwargs and ours in kwargs:
        raise TypeError(f"torch: {theirs} and {ours} mean the same; give one of them")
    return kwargs.pop(theirs, kwargs.pop(ours, None))


def _default(parameters: Mapping[str, inspect.Parameter], name: str) -> float | None:
    """Return the class's default; None if it has none, or one that is no number."""
    default = parameters[name].default if name in parameters else None
    return default if isinstance(default, (int, float)) else None


def _from_torch(torch: Any, name: str, value: Any, torch_class: type[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, (bool, int, float)):
        return value
    raise UnsupportedError(
        f"{torch_class.__name__} keeps {name!r} as {type(value).__name__}, which cannot be kept here"
    )
