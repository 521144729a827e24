"""Buckets: flat arrays in which gradients of several parameters lie side by side.

A bucket is one key of the store. Its memory comes from `store.zeros`, so that workers of one host add it where it is.
Each parameter has a place in one bucket, a tensor with the parameter's own strides, which becomes its `grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpikv import buckets
from mpikv.arrays import HostArray, dtype_of
from mpikv.kvstore import KVStore, Request
from mpikv.torch.arrays import dtype_name, is_dense, tensor_of

TAIL = -1  # in place of a parameter's number: the tail (tail.py)


class Form(NamedTuple):
    """What workers have agreed on of one parameter."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def n_elems(self) -> int:
        """Elements of the parameter."""
        return int(torch.Size(self.size).numel())


def form_of(name: str, parameter: torch.Tensor) -> Form:
    """The form of a parameter. Where its memory has gaps, the gradient lies in C order."""
    size, stride = tuple(parameter.shape), tuple(parameter.stride())
    if not is_dense(size, stride):
        stride = tuple(torch.empty(size, device="meta").stride())
    return Form(name, size, stride, dtype_name(parameter))


class Bucket:
    """One key, its memory, and which parameters lie there."""

    def __init__(self, key: str, flat: HostArray, members: Sequence[int]) -> None:
        self.key = key
        self.flat = flat
        self.members = [i for i in members if i != TAIL]
        self.has_tail = TAIL in members
        self.waits_for = 0  # gradients, before it can leave
        self.left = False  # in this round
        self.request: Request | None = None


class Place(NamedTuple):
    """Where a parameter's gradient lies."""

    bucket: Bucket
    view: torch.Tensor


def make_buckets(
    store: KVStore, name: str, members: Sequence[int], forms: Sequence[Form], *, limit_bytes: int, tail_elems: int
) -> tuple[list[Bucket], dict[int, Place], HostArray | None]:
    """Buckets for parameters in the order in which their gradients appear. Collective, blocks.

    name: begin of the keys. members: numbers of the parameters, the same on every worker. tail_elems: float32 values
    behind the last of them; 0 for none. Returns the buckets, each parameter's place, and the tail.
    """
    numbers = [*members, TAIL] if tail_elems else list(members)
    sizes = [tail_elems if i == TAIL else forms[i].n_elems for i in numbers]
    dtypes = ["float32" if i == TAIL else forms[i].dtype for i in numbers]
    n_bytes = [n * dtype_of(dtype).itemsize for n, dtype in zip(sizes, dtypes, strict=True)]
    first_bytes = min(buckets.FIRST_BYTES, limit_bytes)
    groups = buckets.plan(n_bytes, dtypes, first_bytes=first_bytes, limit_bytes=limit_bytes)
    flats: dict[int, HostArray] = {}
    for dtype in sorted(set(dtypes)):
        chosen = [g for g, group in enumerate(groups) if dtypes[group[0]] == dtype]
        shapes = [(sum(sizes[i] for i in groups[g]),) for g in chosen]
        flats.update(zip(chosen, store.zeros(shapes, dtype), strict=True))
    found = []
    places: dict[int, Place] = {}
    tail = None
    for g, group in enumerate(groups):
        bucket = Bucket(f"{name} {g}", flats[g], [numbers[i] for i in group])
        memory = tensor_of(bucket.flat)
        begins = buckets.offsets([sizes[i] for i in group])
        for i, begin in zip(group, begins, strict=False):
            if numbers[i] == TAIL:
                tail = bucket.flat[begin : begin + tail_elems]
                continue
            form = forms[numbers[i]]
            places[numbers[i]] = Place(bucket, memory.as_strided(form.size, form.stride, begin))
        found.append(bucket)
    store.init([bucket.key for bucket in found], [bucket.flat for bucket in found])
    return found, places, tail
