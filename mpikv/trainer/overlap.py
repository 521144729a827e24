"""Pushes gradients during the backward pass (`overlap=True`), and checks that they do not change afterwards.

A hook on each PyTorch parameter is called when a backward pass has added to its gradient. The trainer then pushes it,
and `step` pushes the others. A pushed gradient cannot be taken back. So until the step no other pass may add to it, and
the program must not change it, for example to clip it. Both are errors, which are detected by PyTorch's version counter
of each tensor. The rules apply in every mode, so that a program that works on one host works on a cluster, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mpikv.errors import MpikvError
from mpikv.trainer.hooks import add_hooks, remove_hooks
from mpikv.trainer.torch_parameter import Tensor, TorchParameter


class Overlap:
    """Calls `ready(name)`, a method, for each parameter whose gradient a backward pass has completed."""

    def __init__(self, parameters: Mapping[str, TorchParameter], ready: Callable[[str], None]) -> None:
        self._parameters = parameters
        self._ready = weakref.WeakMethod(ready)  # no cycle, so that a trainer is freed with its last reference
        self._pushed: dict[str, tuple[Tensor, int]] = {}  # a gradient, and its version when it was pushed
        self._paused = 0
        self._names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self._hooks = add_hooks(self, Overlap, [parameters[name].tensor for name in self._names])

    def detach(self) -> None:
        """Push nothing before the step from now on."""
        remove_hooks(self._hooks)

    def on_gradient(self, i: int) -> None:
        """Push a gradient to which a backward pass has added."""
        name = self._names[i]
        if self._paused:
            return
        if name in self._pushed:
            raise MpikvError(
                f"a second backward pass before the step: the gradient of {name!r} was pushed after the first one "
                "(overlap=True). Make all passes but the last one in `with trainer.no_sync():`"
            )
        ready = self._ready()
        if ready is None:
            return
        ready(name)
        grad = self._parameters[name].tensor.grad
        self._pushed[name] = grad, grad._version

    def check(self) -> None:
        """Raise MpikvError, before the step, if a gradient has changed since it was pushed."""
        for name, (pushed, version) in self._pushed.items():
            grad = self._parameters[name].tensor.grad
            if grad is not pushed or grad._version != version:
                raise MpikvError(
                    f"the gradient of {name!r} was changed after the backward pass, when it had been pushed "
                    "(overlap=True). Clip with clip_global_norm=, call zero_grad after the step, or leave overlap out"
                )

    def clear(self) -> None:
        """Forget the pushed gradients, after the step."""
        self._pushed.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backward passes push nothing, so that gradients accumulate."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
