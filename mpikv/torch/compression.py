"""Compression of the gradients of mpikv.torch: Horovod's names, and the sums that nobody has taken.

What a codec sends of a parameter in one round is not what was pushed in it: it may be part of earlier pushes, of which
the codec owes the rest. A bucket has parameters, too, whose sum no worker takes in a round, because none has used them.
`Untaken` brings these sums back in the next round, so that nothing that was pushed is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch


class Compression:
    """Horovod's compressions. Any other: the name of a codec, or a dict as `set_gradient_compression` takes it.

    none: what `set_gradient_compression` of the store says, which without such a call is none. fp16: gradients and
    their sums travel as float16; they are added in float32.

    >>> print(mt.Compression.none, dict(mt.Compression.fp16))
    None {'type': 'fp16', 'pull': 'fp16'}
    """

    none: ClassVar[None] = None
    fp16: ClassVar[Mapping[str, Any]] = MappingProxyType({"type": "fp16", "pull": "fp16"})


class Untaken:
    """What was pushed and what came in a round, of parameters whose sum nobody has taken; by the parameter's number.

    Each worker takes its push back, and worker 0 pushes the sum again. What the codecs owe is then as it should be.
    Memory: twice the gradients of parameters that are in a bucket but not used.
    """

    def __init__(self) -> None:
        self._pushed: dict[int, torch.Tensor] = {}  # in this round, of parameters that this worker has not used
        self._rest: dict[int, torch.Tensor] = {}  # for the next one

    def fill(self, i: int, view: torch.Tensor, *, used: bool) -> None:
        """Add to a push, which is in `view`, what is left of the round before. used: whether this worker used it.

        What is left stays pushed: what was pushed before is taken back alone.
        """
        if not used:
            self._pushed[i] = view.clone()
        if i in self._rest:
            view.add_(self._rest.pop(i))

    def keep(self, i: int, total: torch.Tensor, *, first: bool) -> None:
        """Note that nobody takes this sum. first: whether this is worker 0. Numbers that are not finite are dropped."""
        rest = self._pushed.pop(i, None)
        if rest is None:
            return  # it was frozen between its backward pass and the exchange
        rest.neg_()
        if first:
            rest.add_(total)
        self._rest[i] = rest.nan_to_num_(0.0, 0.0, 0.0)

    def end_round(self) -> None:
        """Forget what was pushed."""
        self._pushed.clear()
