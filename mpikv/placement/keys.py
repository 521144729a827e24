"""Keys, their shards and the shards' owners: pure values, the same on every rank.

A key's value counts as flat. It is cut into shards `[begin, end)`, each with one owner: the rank that sums the
gradients for it and applies the optimizer to it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.common.checks import shown, wrong

Key = int | str

INT_KEY_LIMIT = 2**63


class Shard(NamedTuple):
    """Elements `[begin, end)` of a key's flat value, owned by `owner` (an index among the owners)."""

    owner: int
    begin: int
    end: int


ShardPlan = tuple[Shard, ...]


class KeyInfo(NamedTuple):
    """What all ranks agreed on when the key was initialised. `id` numbers the keys of one store from 0.

    codec: the name of the codec of its pushes. space: the memory of its arrays on every worker. sparse: row-sparse.
    """

    key: Key
    id: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    codec: str = "none"
    space: str = "host"
    sparse: bool = False

    @property
    def n_elems(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elems * self.dtype.itemsize


def check_key(key: object) -> Key:
    """The key as a Python int or str. TypeError for any other type, ValueError for an int beyond 64 bits."""
    if isinstance(key, str):
        return str.__str__(key)  # not the `__str__` of an enumeration
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        number = operator.index(key)
        if not -INT_KEY_LIMIT <= number < INT_KEY_LIMIT:
            raise ValueError(f"key {shown(number)} does not fit in 64 bits")
        return number
    raise wrong("a key", "a str or an int", key)


def even_bounds(n_elems: int, n_shards: int) -> tuple[int, ...]:
    """`n_shards + 1` bounds of shards whose lengths differ by at most one, longer ones first."""
    base, extra = divmod(n_elems, n_shards)
    return tuple(i * base + min(i, extra) for i in range(n_shards + 1))


def whole_bounds(n_elems: int, n_shards: int, owner: int) -> tuple[int, ...]:
    """Bounds that give all n elements to the shard of `owner` and none to the others."""
    return (0,) * (owner + 1) + (n_elems,) * (n_shards - owner)


def plan_of_bounds(bounds: Sequence[int]) -> ShardPlan:
    """The plan in which owner i has the shard `[bounds[i], bounds[i+1])`; empty shards are left out."""
    return tuple(Shard(i, bounds[i], bounds[i + 1]) for i in range(len(bounds) - 1) if bounds[i] < bounds[i + 1])


def partitions(begin: int, end: int, partition_elems: int) -> tuple[tuple[int, int], ...]:
    """Cut a shard `[begin, end)` into partitions of at most `partition_elems`, each sent in one message."""
    return tuple((at, min(at + partition_elems, end)) for at in range(begin, end, partition_elems))
