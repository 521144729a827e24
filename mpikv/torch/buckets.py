"""Buckets: flat arrays in which gradients of several parameters lie side by side.

A bucket is one key of the store. Its memory comes from `store.zeros`, so that workers of one host add it where it is:
in host memory, or on the store's GPU for parameters that are there. Each parameter has a view into one bucket, a tensor
with the parameter's own strides, which becomes its `grad`; on a GPU a copy does. Where buckets are compressed, the tail
has a key of its own, which is not.

A program may keep a gradient, clear `grad`, and run another backward pass. Before that is written, a view finds out
whether anybody holds its memory; then the bucket goes on in other memory, and what was kept stays as it is.

Gradients of one bucket may be produced in several streams of a GPU. A bucket knows in which ones its memory was written
to, and a stream that uses all of it waits for these. The host waits for nothing of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import HostArray, dtype_of
from mpikv.calls.request import Request
from mpikv.codecs.compression import NONE, Compression
from mpikv.codecs.identity import IDENTITY
from mpikv.kvstore import KVStore
from mpikv.placement import buckets
from mpikv.torch.arrays import dtype_name, is_dense, on_store

TAIL = -1  # in place of a parameter's number: the tail (tail.py)


class Form(NamedTuple):
    """What workers have agreed on of one parameter."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    on_gpu: bool = False  # the store's

    @property
    def n_elems(self) -> int:
        """Elements of the parameter."""
        return int(torch.Size(self.size).numel())


def form_of(name: str, parameter: torch.Tensor, store: KVStore) -> Form:
    """The form of a parameter. Where its memory has gaps, the gradient lies in C order."""
    size, stride = tuple(parameter.shape), tuple(parameter.stride())
    if not is_dense(size, stride):
        stride = tuple(torch.empty(size, device="meta").stride())
    return Form(name, size, stride, dtype_name(parameter), on_store(parameter, store))


class GradientBucket:
    """One key, its memory, and which parameters lie there. flat: NumPy's, or a tensor on the store's GPU."""

    def __init__(self, key: str, flat: Any, members: Sequence[int], tail_elems: int) -> None:
        self.key = key
        self.on_gpu = isinstance(flat, torch.Tensor)
        self._streams: dict[int, Any] = {}
        self.flat = flat
        self.members = [i for i in members if i != TAIL]
        self.has_tail = TAIL in members
        self._tail_elems = tail_elems
        self.waits_for = 0  # gradients, before it can leave
        self.left = False  # in this round
        self.compressed = False
        self.request: Request | None = None

    @property
    def tail(self) -> HostArray:
        """The memory of the tail, at the end."""
        tail: HostArray = self.flat[self.flat.size - self._tail_elems :]
        return tail

    def written(self) -> None:
        """Note that the memory was written to in the stream that is current in this thread."""
        if self.on_gpu:
            stream = torch.cuda.current_stream(tensors.device_of(self.flat))
            self._streams[stream.cuda_stream] = stream

    def follow(self) -> None:
        """Let the current stream wait for all in which the memory was written to."""
        if self.on_gpu:
            current = torch.cuda.current_stream(tensors.device_of(self.flat))
            for number, stream in self._streams.items():
                if number != current.cuda_stream:
                    current.wait_stream(stream)
            self._streams = {current.cuda_stream: current}


class GradientView:
    """Where a parameter's gradient lies: the elements of a bucket from `begin` on. tensor: made of them.

    given: whether the tensor was made a `grad`, so that the program may hold it.
    """

    tensor: torch.Tensor

    def __init__(self, bucket: GradientBucket, form: Form, begin: int) -> None:
        self.bucket = bucket
        self._form = form
        self.begin = begin
        self._memory: weakref.ref[Any] | None = None
        self.make()

    def make(self) -> None:
        """Make the tensor, where the bucket's memory is now."""
        form, flat, begin = self._form, self.bucket.flat, self.begin
        self.given = False
        if not self.bucket.on_gpu:
            flat, self._memory = tensors.in_memory_of(flat[begin : begin + form.n_elems])
            begin = 0
        self.tensor = flat.as_strided(form.size, form.stride, begin)

    def take_back(self) -> bool:
        """Make the tensor anew, if nobody else has the old one or a view of it. Returns whether that is so."""
        del self.tensor
        if self._memory is not None and self._memory() is not None:
            return False
        self.make()
        return True


def make_buckets(
    store: KVStore,
    name: str,
    members: Sequence[int],
    forms: Sequence[Form],
    *,
    limit_bytes: int,
    tail_elems: int,
    compression: Compression,
) -> tuple[list[GradientBucket], dict[int, GradientView]]:
    """Buckets for parameters in the order in which their gradients appear. Collective, blocks.

    name: begin of the keys. members: numbers of the parameters, the same on every worker. tail_elems: float32 values
    behind the last of them; 0 for none. compression: of all but the tail, whatever the store's own is. Returns the
    buckets and each parameter's view.
    """
    numbers = [*members, TAIL] if tail_elems else list(members)
    sizes = [tail_elems if i == TAIL else forms[i].n_elems for i in numbers]
    dtypes = ["float32" if i == TAIL else forms[i].dtype for i in numbers]
    kinds = [(dtype, i != TAIL and forms[i].on_gpu) for i, dtype in zip(numbers, dtypes, strict=True)]
    n_bytes = [n * dtype_of(dtype).itemsize for n, dtype in zip(sizes, dtypes, strict=True)]
    first_bytes = min(buckets.FIRST_BYTES, limit_bytes)
    named = [f"{dtype} on a GPU" if on_gpu else dtype for dtype, on_gpu in kinds]
    shaped = [compression if i == TAIL else _for_form(compression, forms[i]) for i in numbers]
    named = [
        name if one == compression else f"{name} {at}" for at, (name, one) in enumerate(zip(named, shaped, strict=True))
    ]
    if tail_elems and not compression.plain:
        named[-1] = "tail"
    groups = buckets.plan(n_bytes, named, first_bytes=first_bytes, limit_bytes=limit_bytes)
    flats: dict[int, Any] = {}
    for dtype, on_gpu in sorted(set(kinds)):
        chosen = [g for g, group in enumerate(groups) if kinds[group[0]] == (dtype, on_gpu)]
        shapes = [(sum(sizes[i] for i in groups[g]),) for g in chosen]
        made = zeros_on_gpu(store, shapes, dtype) if on_gpu else store.zeros(shapes, dtype)
        flats.update(zip(chosen, made, strict=True))
    found = []
    views: dict[int, GradientView] = {}
    for g, group in enumerate(groups):
        bucket = GradientBucket(f"{name} {g}", flats[g], [numbers[i] for i in group], tail_elems)
        begins = buckets.offsets([sizes[i] for i in group])
        for i, begin in zip(group, begins, strict=False):
            if numbers[i] != TAIL:
                views[numbers[i]] = GradientView(bucket, forms[numbers[i]], begin)
        found.append(bucket)
    for bucket, group in zip(found, groups, strict=True):
        store.session.compressions.of_keys[bucket.key] = NONE if bucket.has_tail else shaped[group[0]]
    for bucket in found:
        store.init(bucket.key, bucket.flat)  # one after another: the store makes a copy of what it is given
        bucket.compressed = store.session.infos[bucket.key].codec != IDENTITY.name
    return found, views


def zeros_on_gpu(store: KVStore, shapes: Sequence[tuple[int, ...]], dtype: str) -> list[torch.Tensor]:
    """Tensors of zeros in the store's memory on its GPU. Collective, blocks."""
    # Not every version of CuPy has a name for bfloat16, but all have 16 bits.
    made = store.zeros(list(shapes), "float16" if dtype == "bfloat16" else dtype, device=store.device)
    return [tensors.on_gpu(array).view(getattr(torch, dtype)) for array in made]


def _for_form(compression: Compression, form: Form) -> Compression:
    """That of a parameter's gradient, which has a bucket of its own if its shape makes a difference."""
    in_order = form.stride == tuple(torch.empty(form.size, device="meta").stride())
    return compression.for_shape(form.size) if in_order else compression
