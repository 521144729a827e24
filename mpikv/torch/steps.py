"""Records the settings with which optimizers of `torch.optim` step: learning rates and all else in their groups.

Every worker steps with an optimizer of its own. If their settings differ, weights become different though all gradients
are equal. So a digest of the settings is sent with the gradients of the next round (tail.py).

A model does not know its optimizers. PyTorch calls `_before_step` before each step of any optimizer of the process, and
the models with parameters of that optimizer note its settings.

Cost: some 10 us for each group and step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpikv.torch.arrays import in_host_memory

_NOT_SETTINGS = ("params", "param_names")


class Steps:
    """The settings of steps on some parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._lines: dict[str, None] = {}  # each line once, in order
        with _lock:
            _all.add(self)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the settings of an optimizer that is about to step, if it has any of the parameters."""
        groups = [group for group in optimizer.param_groups if any(id(one) in self._ids for one in group["params"])]
        self._lines |= dict.fromkeys(lines_of(optimizer, groups))

    def take(self) -> list[str]:
        """Return the settings of all steps since the last call, one line for each."""
        lines, self._lines = list(self._lines), {}
        return lines


_lock = threading.Lock()  # ranks may be threads
_all: weakref.WeakSet[Steps] = weakref.WeakSet()  # of the process, as PyTorch's hooks are


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    with _lock:
        found = list(_all)
    for steps in found:
        steps.note(optimizer)


# Registered once and never removed: the garbage collector may run while PyTorch iterates over its hooks.
register_optimizer_step_pre_hook(_before_step)


def lines_of(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe the settings of these groups, one line for each; equal settings have equal lines.

    Tensors on a device are omitted, since reading them would wait for the device.
    """
    kind = type(optimizer).__name__
    return [
        f"{kind}, parameter group {i}: {name}={text}"
        for i, group in enumerate(groups)
        for name, text in sorted(_settings(group))
    ]


def _settings(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in group.items():
        if name not in _NOT_SETTINGS and (text := _text(value)) is not None:
            yield name, text


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
