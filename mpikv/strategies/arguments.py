"""Checks which arrays of a call can be read and written in place, so that no copy is needed first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import is_space_array
from mpikv.placement.keys import KeyInfo
from mpikv.spaces.base import SpaceArray

Flat = tuple[SpaceArray, tuple[SpaceArray, ...]]  # a key's value and its outs, flat


def flattened(infos: Sequence[KeyInfo], values: Sequence[Any], outs: Sequence[Sequence[Any]]) -> list[Flat] | None:
    """The arrays of a call as flat views; None where one of them cannot be used in place, or where they overlap."""
    flat: list[Flat] = []
    for info, value, targets in zip(infos, values, outs, strict=True):
        if not usable_in_place(value, info):
            return None
        own = _flat(value)
        if len(targets) == 1 and targets[0] is value:  # as in most calls
            flat.append((own, (own,)))
            continue
        if not all(usable_in_place(target, info) for target in targets):
            return None
        flat.append((own, tuple(map(_flat, targets))))
    return None if overlap(flat) else flat


def _flat(array: Any) -> SpaceArray:
    """A flat view. np.asarray first, because a reshaped np.matrix still has two axes."""
    return np.asarray(array).reshape(-1) if isinstance(array, np.ndarray) else array.reshape(-1)


def address_of(array: SpaceArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def usable_in_place(array: Any, info: KeyInfo) -> bool:
    return (
        is_space_array(array)
        and array.dtype == info.dtype
        and array.flags.c_contiguous
        and array.flags.aligned
        and array.shape == info.shape
    )


def overlap(flat: Sequence[Flat]) -> bool:
    """Whether writing one result could change another key's result, or a value that has not been read yet."""
    spans = []
    for value, outs in flat:
        if not value.nbytes:
            continue
        begins = {address_of(array) for array in {id(one): one for one in (value, *outs)}.values()}
        spans += [(begin, begin + value.nbytes) for begin in begins]
    spans.sort()
    return any(second[0] < first[1] for first, second in pairwise(spans))
