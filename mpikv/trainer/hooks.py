"""Hooks on PyTorch's parameters, called whenever a backward pass has added to a parameter's `grad`.

They refer weakly to what they call, since Python's collector does not see through a parameter's table of hooks. They
come off when what they call is freed or detached, or when a newer one of its kind takes hooks on all its parameters.

PyTorch is not imported here: a program that has parameters has imported it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

Hooks = list[Any]  # the handle of each parameter; None: it never has a gradient


class _Hook:
    """A hook of parameter i, which calls `on_gradient(i)` of its owner. ids: of all the owner's parameters."""

    def __init__(self, owner: Any, kind: type, i: int, ids: frozenset[int]) -> None:
        self.owner, self.kind, self.ids, self._i = weakref.ref(owner), kind, ids, i

    def __call__(self, _parameter: Any) -> None:
        owner = self.owner()
        if owner is not None:
            owner.on_gradient(self._i)


def add_hooks(owner: Any, kind: type, parameters: Sequence[Any]) -> Hooks:
    """Register hooks that call `owner.on_gradient(i)`, also on frozen parameters. kind: a class of the owner.

    Older owners of this kind, all of whose parameters are among these, are told by `detach()`.
    """
    ids = frozenset(map(id, parameters))
    for parameter in parameters:
        found = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - PyTorch has no other way to find hooks
        for one in list((found or {}).values()):
            older = one.owner() if isinstance(one, _Hook) and one.kind is kind and one.ids <= ids else None
            if older is not None:
                older.detach()
    handles = [_add_hook(one, _Hook(owner, kind, i, ids)) for i, one in enumerate(parameters)]
    weakref.finalize(owner, remove_hooks, handles).atexit = False
    return handles


def _add_hook(parameter: Any, hook: _Hook) -> Any:
    if not parameter.is_floating_point():
        return None
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # PyTorch refuses hooks otherwise, and keeps them afterwards
    handle = parameter.register_post_accumulate_grad_hook(hook)
    if frozen:
        parameter.requires_grad_(False)
    return handle


def remove_hooks(handles: Hooks) -> None:
    """Take hooks off their parameters, and forget them."""
    for handle in handles:
        if handle is not None:
            handle.remove()
    handles.clear()
