"""Optimizers by name, and the registry in which users add their own.

`create('sgd', learning_rate=0.1)` accepts MXNet's names, in upper or lower case. It also accepts an existing optimizer,
an optimizer class, any callable `(weight, grad, state) -> state`, and a class of `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mpikv.common.checks import meant, shown
from mpikv.optimizers.adagrad import AdaDelta, AdaGrad, RMSProp
from mpikv.optimizers.adam import Adam, AdamW
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.declared import flag, number
from mpikv.optimizers.ftrl import Ftrl
from mpikv.optimizers.function import Function
from mpikv.optimizers.norms import LAMB, LARS
from mpikv.optimizers.schedules import CosineScheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler, Scheduler
from mpikv.optimizers.sgd import DCASGD, NAG, SGD, Signum, Test
from mpikv.optimizers.step import Array, Scalar, Step
from mpikv.optimizers.torch_class import TorchOptimizer, is_torch_class
from mpikv.runtime.abort import tells

__all__ = ["DCASGD", "LAMB", "LARS", "NAG", "SGD", "Signum", "Test"]
__all__ += ["AdaDelta", "AdaGrad", "Adam", "AdamW", "Ftrl", "RMSProp"]
__all__ += ["CosineScheduler", "FactorScheduler", "MultiFactorScheduler", "PolyScheduler", "Scheduler"]
__all__ += ["Array", "Optimizer", "Scalar", "Step", "create", "flag", "names", "number", "register"]

_registry: dict[str, type[Optimizer]] = {}
_WRAPPERS: Mapping[str, type[Optimizer]] = {cls.name: cls for cls in (Function, TorchOptimizer)}

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])


def register(cls: OptimizerClass) -> OptimizerClass:
    """Register an optimizer class by its `name` (by default the class's name in lower case); a decorator. Local.

    Ranks that make an optimizer again from a saved file need the registration, too. Raises TypeError for anything but
    an Optimizer class, ValueError if another class has the name.

    >>> @optimizers.register
    ... class Sign(optimizers.Optimizer):
    ...     def formula(self, step, w, g, arrays, tmp):
    ...         w -= step.real(step.learning_rate) * np.sign(g)
    >>> optimizers.create('sign').learning_rate
    0.01
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise TypeError(f"register takes a class derived from Optimizer, not {shown(cls)}")
    name = cls.name.lower()
    other = _WRAPPERS.get(name) or _registry.setdefault(name, cls)
    if other is not cls:
        raise ValueError(
            f"the optimizer name {name!r} belongs to {other.__module__}.{other.__qualname__}; "
            f"give {cls.__module__}.{cls.__qualname__} another `name`"
        )
    return cls


for _cls in (SGD, NAG, Signum, DCASGD, Adam, AdamW, AdaGrad, RMSProp, AdaDelta, Ftrl, LAMB, LARS, Test):
    register(_cls)


def names() -> tuple[str, ...]:
    """Return the registered names, sorted.

    >>> 'adam' in optimizers.names()
    True
    """
    return tuple(sorted(_registry))


@tells
def create(optimizer: str | Optimizer | type[Any] | Callable[..., Any] | tuple[Any, Any], **kwargs: Any) -> Optimizer:
    """Make an optimizer from a name, an Optimizer class, a callable, or a torch.optim class or (class, kwargs). Local.

    kwargs: its parameters. An instance is returned unchanged, and takes no kwargs. Raises ValueError for an unknown
    name (lists the names), TypeError for anything else and for unknown kwargs (lists the valid ones).

    >>> optimizers.create('sgd', learning_rate=0.5).learning_rate
    0.5
    """
    if isinstance(optimizer, Optimizer):
        if kwargs:
            raise TypeError(f"{optimizer.name} exists already; set its attributes instead of giving {_listed(kwargs)}")
        _complete(type(optimizer))
        return optimizer
    if isinstance(optimizer, str):
        cls = _registry.get(optimizer.lower())
        if cls is None:
            near = meant(optimizer, names())
            raise ValueError(f"unknown optimizer {shown(optimizer)}; known: {', '.join(names())}.{near}")
        return _complete(cls)(**kwargs)
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return _complete(optimizer)(**kwargs)
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and isinstance(optimizer[1], Mapping):
        return TorchOptimizer(optimizer[0], **{**optimizer[1], **kwargs})
    if is_torch_class(optimizer):
        return TorchOptimizer(optimizer, **kwargs)
    if is_torch_class(type(optimizer)):
        raise TypeError(
            f"give the class and its arguments, (torch.optim.{type(optimizer).__name__}, {{...}}), no object"
        )
    if callable(optimizer) and not isinstance(optimizer, type):
        if kwargs.keys() - {"rescale_grad"}:
            raise TypeError(f"an optimizer that is a callable takes rescale_grad alone, not {_listed(kwargs)}")
        return Function(optimizer, **kwargs)
    raise TypeError(
        "an optimizer is a name, an Optimizer, a callable (weight, grad, state) -> state, or a torch.optim class, "
        f"not {type(optimizer).__name__} ({shown(optimizer)})"
    )


def _complete(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the class. Raises TypeError if it defines no update."""
    if all(getattr(cls, name) is getattr(Optimizer, name) for name in ("formula", "update", "update_sum")):
        raise TypeError(f"{cls.__name__} defines no formula: it is a base for optimizers, and none itself")
    return cls


def _listed(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(sorted(kwargs))
