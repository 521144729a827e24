"""Keeps the steps of all workers' optimizers of `torch.optim` alike, so that equal gradients give equal weights.

Every worker steps with an optimizer of its own. So a digest of their settings (learning rates and all else in their
groups) is sent with the gradients of the next round (tail.py). A closure returns the mean loss over the workers, since
a line search decides by it. What else may differ, such as weights that were loaded, shows in the weights, whose sums
and norms are compared now and then.

A model does not know its optimizers: PyTorch calls `_before_step` before each step of any optimizer of the process, and
the models with parameters of that optimizer note its settings.

Cost: some 10 us for each group and step; a small exchange for each call of a closure; in one of 100 rounds another one,
and each parameter is read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpikv.arrays.as_numpy import HostArray
from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import ConfigError
from mpikv.torch.arrays import exchanges, in_host_memory

_NOT_SETTINGS = ("params", "param_names")
_MOST = 1e300
_EVERY = 100  # rounds: from one comparison of weights to the next; the first one comes in a sixth of that
_ROUNDING = 1e-4  # of the norm: hosts that round differently come less far apart, in float32 and a million steps


class Steps:
    """The steps on some parameters. op: of the workers' losses. rounds: how many there were. joined: whether workers
    may make unequally many steps at present, so that no loss is exchanged.
    """

    def __init__(self, calls: CollectiveCalls, named: Sequence[tuple[str, torch.nn.Parameter]], op: str) -> None:
        self._calls, self._named, self._op = calls, named, op
        self._ids = {id(parameter) for _, parameter in named}
        self._lines: dict[str, None] = {}  # each line once, in order
        self.begin(0)
        self.joined = False
        if exchanges(calls.store):
            with _lock:
                _all.add(self)

    def begin(self, rounds: int) -> None:
        """Go on from so many rounds. Local."""
        self.rounds, due = rounds, rounds % _EVERY == _EVERY // 6
        # (2, 2, parameters), see `compare_values`; None: the next step needs none. Of workers that make no step until
        # the next round, which are in `join` or have just come, nothing is compared.
        self._values = np.full((2, 2, len(self._named)), -_MOST) if due else None

    def stop(self) -> None:
        with _lock:
            _all.discard(self)

    def note(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note the settings of an optimizer that is about to step. Returns whether it has any of the parameters."""
        groups = [group for group in optimizer.param_groups if any(id(one) in self._ids for one in group["params"])]
        self._lines |= dict.fromkeys(lines_of(optimizer, groups))
        if groups and self._values is not None:
            found = self._sums_and_norms()
            self._values[:] = found, -found
        return bool(groups)

    def take(self) -> list[str]:
        """Return the settings of all steps since the last call, one line for each. To be called once in each round."""
        lines, self._lines = list(self._lines), {}
        return lines

    def _sums_and_norms(self) -> HostArray:
        found = np.zeros((2, len(self._named)))
        for i, (_, parameter) in enumerate(self._named):
            if parameter.requires_grad:
                values, dtype = parameter.detach(), torch.float64
                found[:, i] = float(values.sum(dtype=dtype)), float(torch.linalg.vector_norm(values, dtype=dtype))
        return np.nan_to_num(found, nan=_MOST, posinf=_MOST, neginf=-_MOST)  # differs from others, not from itself

    def compare_values(self, *, joined: bool = False) -> None:
        """Raise ConfigError if the weights of the workers differ. To be called once in each round; blocks in some.

        joined: whether this worker has no more data; `join` takes part in the exchange then.
        """
        values = self._values
        self.begin(self.rounds + 1)
        if values is None or joined:
            return
        # The sums and norms before the last step, and the same negated.
        most, least = self._calls.allreduce([values], "max", "sums and norms of parameters")[0]
        far = np.flatnonzero((most + least > _ROUNDING * most[1]).any(0)).tolist()
        if far:
            i = far[0]
            raise ConfigError(
                f"the weights of the workers have become different: parameter {self._named[i][0]!r} has sums from "
                f"{-least[0, i]:g} to {most[0, i]:g}, norms from {-least[1, i]:g} to {most[1, i]:g}. All workers start "
                "with the same weights (broadcast_parameters), and decide alike to stop, load or change them: by the "
                "mean of their losses (allreduce), not by their own"
            )

    def averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose loss is the mean over the workers (their sum, if gradients are added), if a number."""

        def mean() -> Any:
            loss = closure()
            is_number = isinstance(loss, (int, float)) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)
            if self.joined or not is_number:
                return loss
            mine = np.array(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
            total = float(self._calls.allreduce([mine], self._op, "loss of a closure")[0])
            return torch.full_like(loss, total, requires_grad=False) if isinstance(loss, torch.Tensor) else total

        return mean


_lock = threading.Lock()  # ranks may be threads
_all: weakref.WeakSet[Steps] = weakref.WeakSet()  # of the process, as PyTorch's hooks are


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    with _lock:
        found = list(_all)
    for steps in found:
        if steps.note(optimizer):
            args = (*args[:1], *(steps.averaged(one) if callable(one) else one for one in args[1:]))
            if callable(closure := kwargs.get("closure")):
                kwargs = {**kwargs, "closure": steps.averaged(closure)}
    return args, kwargs


# Registered once and never removed: the garbage collector may run while PyTorch iterates over its hooks.
register_optimizer_step_pre_hook(_before_step)


def lines_of(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe the settings of these groups, equal ones by equal lines; not tensors on a device: that would wait."""
    return [
        f"{type(optimizer).__name__}, parameter group {i}: {name}={text}"
        for i, group in enumerate(groups)
        for name, value in sorted(group.items())
        if name not in _NOT_SETTINGS and (text := _text(value)) is not None
    ]


def _text(value: Any) -> str | None:
    """Return a value as text, the same for equal numbers of any type; None if it cannot be compared."""
    if isinstance(value, torch.Tensor):
        if not in_host_memory(value):
            return None
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return f"({', '.join(str(_text(one)) for one in value)})"
    if isinstance(value, (bool, str)) or value is None:
        return repr(value)
    return repr(float(value)) if isinstance(value, (int, float, np.number)) else None
