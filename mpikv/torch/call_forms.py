"""The forms in which PyTorch and programs make a process group's calls: with lists and options, or in short.

`collective` brings a call to lists and options, checks what all calls have in common, and reports wrong arguments to
the other ranks, which would wait for this rank in the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ReduceOp

from mpikv.arrays.reductions import OF_GROUPS, Reduction
from mpikv.errors import UnsupportedError
from mpikv.torch.works import CallWork

_OPERATORS = [(ReduceOp.SUM, "sum"), (ReduceOp.AVG, "mean"), (ReduceOp.PRODUCT, "prod"), (ReduceOp.MIN, "min")]
_OPERATORS += [(ReduceOp.MAX, "max"), (ReduceOp.BAND, "band"), (ReduceOp.BOR, "bor"), (ReduceOp.BXOR, "bxor")]


def reduction_of(opts: Any) -> Reduction:
    """Return the reduction that a call's options name; without options the sum."""
    if opts is None:
        return OF_GROUPS["sum"]
    for known, name in _OPERATORS:
        if opts.reduceOp == known:
            return OF_GROUPS[name]
    raise UnsupportedError(f"{opts.reduceOp}: the backend mpikv reduces by {', '.join(OF_GROUPS)}")


def collective(method: Callable[..., CallWork]) -> Callable[..., CallWork]:
    """Let a method get lists and options, also for a call such as `broadcast(tensor, root=0)`."""
    name = method.__name__

    @functools.wraps(method)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> CallWork:
        calls, given = self._group.calls, [*args, *kwargs.values()]
        try:
            if "single" not in name and name != "alltoall":  # which have a form of their own
                if not all(isinstance(one, (list, tuple)) or _are_options(one) for one in given):
                    args, kwargs = _in_lists(name, given), {}
                    given = list(args)
                if [] in given and name not in ("gather", "scatter"):  # which have one on all ranks but the root
                    raise ValueError(f"{name}: a list of tensors is expected, not an empty one")
            for opts in filter(_are_options, given):
                self._check_rank(f"{name}: the root", getattr(opts, "rootRank", 0))
            return method(self, *args, **kwargs)
        except Exception as error:
            if self._group.calls == calls and self._group.failure is None:
                self._group.refuse(error)
            raise

    return refusing


def _are_options(value: object) -> bool:
    return value is None or hasattr(value, "timeout")


def _in_lists(name: str, given: Sequence[Any]) -> tuple[Any, ...]:
    """Return a call's arguments in the form of lists and options: what an option is, its type says."""
    opts = getattr(_distributed_c10d, "".join(word.capitalize() for word in name.split("_")) + "Options")()
    tensors = [one for one in given if isinstance(one, (list, tuple, torch.Tensor))]
    for one in given:
        if isinstance(one, int):
            opts.rootRank = one
        elif isinstance(one, timedelta):
            opts.timeout = one
        elif one is not None and not any(one is tensor for tensor in tensors):
            opts.reduceOp = one
    if any(isinstance(one, torch.Tensor) for one in tensors):
        tensors = [[one] for one in tensors]
    return (*tensors, opts)
