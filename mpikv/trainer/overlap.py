"""Gradients that leave during the backward pass: the rules that keep them right.

A hook on each PyTorch parameter is called when a backward pass has added to its gradient. The trainer then sends it,
and `step` sends the rest. What was sent cannot be called back. So until the step no other pass may add to it, and
nobody may change it (to clip it, say): both are errors, found by the version that PyTorch counts for every tensor.
Passes that are only to be added up are made in `no_sync`.

The rules hold in every mode, also on one host, where nothing is sent before the step: a program that works there works
on a cluster.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from mpikv.errors import MpikvError
from mpikv.trainer.torch_parameter import Tensor, TorchParameter


class _Sent(NamedTuple):
    """A gradient as it was when it was handed over."""

    grad: Tensor
    version: int


class Overlap:
    """Calls `ready(name)`, a method, for each parameter whose gradient a backward pass has completed."""

    def __init__(self, parameters: Mapping[str, TorchParameter], ready: Callable[[str], None]) -> None:
        self._parameters = parameters
        self._ready = weakref.WeakMethod(ready)  # in no cycle, so that a trainer is gone with its last reference
        self._sent: dict[str, _Sent] = {}
        self._paused = 0
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.tensor.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))

    def accumulated(self, name: str) -> None:
        """Take note that a backward pass has added to this gradient."""
        if self._paused:
            return
        if name in self._sent:
            raise MpikvError(
                f"a second backward pass before the step: the gradient of {name!r} was handed over after the first one "
                "(overlap=True). Make all passes but the last one in `with trainer.no_sync():`"
            )
        ready = self._ready()
        if ready is None:
            return
        ready(name)
        grad = self._parameters[name].tensor.grad
        self._sent[name] = _Sent(grad, grad._version)

    def check(self) -> None:
        """Raise MpikvError, before the step, where a gradient is not any more what was handed over."""
        for name, sent in self._sent.items():
            grad = self._parameters[name].tensor.grad
            if grad is not sent.grad or grad._version != sent.version:
                raise MpikvError(
                    f"the gradient of {name!r} was changed after the backward pass, when it had been handed over "
                    "(overlap=True). Clip with clip_global_norm=, call zero_grad after the step, or leave overlap out"
                )

    def clear(self) -> None:
        """Forget what was handed over, after the step."""
        self._sent.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backward passes only add up."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


def _hook(overlap: weakref.ref[Overlap], name: str) -> Callable[[Tensor], None]:
    def accumulated(_: Any) -> None:
        found = overlap()  # a trainer that is gone takes its hooks with it
        if found is not None:
            found.accumulated(name)

    return accumulated
