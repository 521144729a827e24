"""Parts of a model that are exchanged in turn: which parameters they have, and a Trainer that makes a step with one.

The parameters are dealt out by size: the largest first, each to the part that has the fewest bytes so far. So no
exchange is much longer than the others, and of layers of equal size each part gets every so many-th, as the "strided"
parts of Streaming DiLoCo do (Douillard et al. 2025, arXiv:2501.18512).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpikv.kvstore import KVStore
from mpikv.strategies.base import BucketedKeys
from mpikv.trainer.trainer import Trainer


def divide(n_bytes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Return the names of each part, in their order. n_bytes: of each parameter. ValueError if they are too few."""
    if parts > len(n_bytes):
        raise ValueError(f"parts={parts}, and there are {len(n_bytes)} parameters: a parameter is not divided")
    sizes, numbers = [(0, 0)] * parts, {}  # of each part its bytes and its parameters, some of which may have 0 bytes
    for name in sorted(n_bytes, key=lambda name: -n_bytes[name]):  # stable: equal ones in their order
        numbers[name] = part = min(range(parts), key=sizes.__getitem__)
        sizes[part] = sizes[part][0] + n_bytes[name], sizes[part][1] + 1
    return [[name for name in n_bytes if numbers[name] == part] for part in range(parts)]


class PartsTrainer(Trainer):
    """A `Trainer` whose steps may leave out some parts of the parameters. parts: the names of each."""

    _left_out: frozenset[str] = frozenset()

    def __init__(self, params: Any, optimizer: Any, parts: Sequence[Sequence[str]], **options: Any) -> None:
        self._parts = [frozenset(part) for part in parts]
        super().__init__(params, optimizer, **options)

    @contextmanager
    def only(self, part: int) -> Iterator[None]:
        """Return a context for `pull_weights`, and for one step after it, with the parameters of this part."""
        self._left_out = frozenset().union(*self._parts) - self._parts[part]
        try:
            yield
        finally:
            self._left_out = frozenset()

    def _is_frozen(self, name: str) -> bool:
        return name in self._left_out or super()._is_frozen(name)

    def _bucket(self, store: KVStore, names: Sequence[str]) -> BucketedKeys | None:
        """Put only keys of one part together, which are pushed together; so nothing is ever skipped."""
        for part in self._parts:
            super()._bucket(store, [name for name in names if name in part])
        return None

    def _count_step(self, batch_size: float) -> None:
        self._left_out = frozenset()  # a checkpoint that this may write is of all parts
        super()._count_step(batch_size)
