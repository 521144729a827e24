"""Detects when a backward pass begins, when each gradient is complete, and when the pass ends.

A pass is one run of PyTorch's autograd engine. It begins when the first hook is called, of the forward pass's result or
of a parameter, and ends with a callback of the engine. If the program has added a hook of its own to a parameter, which
runs after ours, the gradient is taken at the end of the pass. A pass inside another one (checkpointing with
use_reentrant=True) counts as a section of the outer one; a parameter may then get several gradients before that ends. A
pass that ends by an error calls no callback: the next forward pass completes its round, so that the workers stay in
step.

Hooks run in the thread in which the gradient is computed; on a CPU that is the one that called `backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mpikv.torch.arrays import tensors_in
from mpikv.torch.gradients import Gradients
from mpikv.trainer.hooks import add_hooks, remove_hooks


class Passes:
    """The backward passes of a model. before_round: called at the first gradient of a round; may block."""

    def __init__(self, gradients: Gradients, before_round: Callable[[], None]) -> None:
        self._gradients = gradients
        self._before_round = before_round
        self.synchronize = True  # whether passes that begin now are exchanged
        self._task: int | None = None  # PyTorch's number of the pass that is under way
        self._exchanged = False
        self._begun = False  # whether this pass has completed a gradient
        self._late: dict[int, None] = {}  # parameters of this pass whose gradients are taken at its end
        self.hooks = add_hooks(self, Passes, gradients.parameters)

    def detach(self) -> None:
        remove_hooks(self.hooks)
        self._gradients.steps.stop()

    def after_forward(self, result: Any) -> None:
        """Add hooks that detect the backward pass which begins at the result of this forward pass."""
        for tensor in tensors_in(result):
            if tensor.requires_grad and not tensor.is_leaf:  # a parameter has a hook already
                tensor.register_hook(lambda _gradient: self._begin())

    def before_forward(self) -> None:
        """Complete the round of a pass that ended by an error, if there is one. Blocks then."""
        if self._task is not None and torch._C._current_graph_task_id() == -1:
            self._task = None
            self._late.clear()
            if self._exchanged:
                self._start_round()
                self._gradients.finish(failed=True)

    def _begin(self) -> None:
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            self._exchanged, self._begun = self.synchronize, False
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def on_gradient(self, i: int) -> None:
        """Exchange the gradient of parameter i, to which PyTorch has added, or note it."""
        if self._task is None:
            self._begin()
        elif self._task != torch._C._current_graph_task_id():
            self._gradients.views_as_grads = False
        if not self._exchanged:
            self._gradients.note(i)
            return
        self._start_round()
        if is_last(self.hooks[i]):
            self._gradients.ready(i)
        else:
            self._late[i] = None

    def _start_round(self) -> None:
        if not self._begun:
            self._begun = True
            self._before_round()

    def _end(self) -> None:
        self._task = None
        if self._exchanged and self._begun:
            self._begun = False
            late, self._late = self._late, {}
            try:
                for i in late:
                    self._gradients.ready(i)
            except Exception:
                self._gradients.finish(failed=True)  # the other workers wait for this one
                raise
            self._gradients.finish()


def is_last(handle: RemovableHandle | None) -> bool:
    """Return whether no hook of the program runs after this one, which could change the gradient."""
    hooks = None if handle is None else handle.hooks_dict_ref()
    return not hooks or handle is None or next(reversed(hooks)) == handle.id
