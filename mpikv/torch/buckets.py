"""Buckets: flat arrays with the gradients of several parameters, one after another.

A bucket is one key of the store, in memory of `store.zeros`, which workers of one host add in place, or on the store's
GPU. Each parameter has a view of one bucket, a tensor with the parameter's own strides, which becomes its `grad`; on a
GPU a copy of it does. If buckets are compressed, the tail has a key of its own, which is not.

A program may keep a gradient, clear `grad`, and run another backward pass. Before a view is written again, it checks
whether its memory is still referred to; if so, the bucket continues in new memory.

Gradients of one bucket may be computed in several streams of a GPU. A bucket notes the streams in which its memory was
written, and a stream that uses all of it waits for these. The host does not wait.

A store forgets no key. So a model that is wrapped later takes the keys of one that all workers have dropped (`Spares`),
if no tensor refers to the memory any more; one small exchange says so, if there were others before. Keys with a codec,
whose states belong to what was sent, are not taken again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import HostArray, dtype_of
from mpikv.calls.keyless import CollectiveCalls
from mpikv.calls.request import Request
from mpikv.codecs.compression import NONE, KeyCompression
from mpikv.codecs.identity import IDENTITY
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.placement import buckets
from mpikv.torch.arrays import dtype_name, is_dense, on_store

TAIL = -1  # in place of a parameter's number: the tail (tail.py)


class Form(NamedTuple):
    """The properties of one parameter that are the same on all workers."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    on_gpu: bool = False  # whether it is on the store's GPU

    @property
    def n_elems(self) -> int:
        return int(torch.Size(self.size).numel())


def form_of(name: str, parameter: torch.Tensor, store: KVStore) -> Form:
    """Return the form of a parameter. If its memory has gaps, the gradient is in C order."""
    size, stride = tuple(parameter.shape), tuple(parameter.stride())
    if not is_dense(size, stride):
        stride = tuple(torch.empty(size, device="meta").stride())
    try:
        return Form(name, size, stride, dtype_name(parameter), on_store(parameter, store))
    except UnsupportedError as error:
        raise UnsupportedError(f"parameter {name!r}: {error}") from None


def gradient_of(form: Form, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's `grad`. Raises UnsupportedError if it cannot be exchanged."""
    name = repr(form.name)
    size, dtype = tensors.shape_and_dtype(parameter)
    if (size, dtype) != (form.size, form.dtype):
        raise UnsupportedError(
            f"parameter {name} was {form.dtype} {form.size} when the model was wrapped, and is {dtype} {size} now; "
            "wrap the model when its shapes and dtypes are what they are to be"
        )
    grad: torch.Tensor | None = parameter.grad
    if grad is None:
        raise UnsupportedError(
            f"a hook took away the gradient of parameter {name} before it was exchanged; clear gradients after the "
            "backward pass"
        )
    if grad.is_sparse:
        raise UnsupportedError(
            f"parameter {name} has a sparse gradient, which a store cannot add; make the embedding with sparse=False"
        )
    if grad.requires_grad:
        raise UnsupportedError(
            f"the gradient of parameter {name} has a graph (create_graph=True), which does not travel: take "
            "torch.autograd.grad for derivatives that are differentiated again, and backward without create_graph for "
            "what is exchanged"
        )
    return grad


class GradientBucket:
    """One key, its memory and the views of its parameters. flat: a NumPy array, or a tensor on the store's GPU.

    views: of the parameters, by their numbers. missing: number of gradients without which it is not sent. sent: whether
    it was sent in this round.
    """

    def __init__(self, key: str, flat: Any, tail_elems: int = 0) -> None:
        self.key = key
        self.on_gpu = isinstance(flat, torch.Tensor)
        self._streams: dict[int, Any] = {}
        self.flat = flat
        self.views: dict[int, GradientView] = {}
        self.has_tail = tail_elems > 0
        self._tail_elems = tail_elems
        self.missing = 0
        self.sent = False
        self.compressed = False
        self.request: Request | None = None

    @property
    def tail(self) -> HostArray:
        tail: HostArray = self.flat[self.flat.size - self._tail_elems :]
        return tail

    def written(self) -> None:
        """Note that the memory was written in the stream that is current in this thread."""
        if self.on_gpu:
            stream = torch.cuda.current_stream(tensors.device_of(self.flat))
            self._streams[stream.cuda_stream] = stream

    def wait_for_streams(self) -> None:
        """Make the current stream wait for all streams in which the memory was written."""
        if self.on_gpu:
            current = torch.cuda.current_stream(tensors.device_of(self.flat))
            for number, stream in self._streams.items():
                if number != current.cuda_stream:
                    current.wait_stream(stream)
            self._streams = {current.cuda_stream: current}

    def end_round(self, trained: HostArray) -> None:
        self.sent, self.request = False, None
        self.missing = sum(bool(trained[i]) for i in self.views)
        for view in self.views.values():
            view.scaled = False


class GradientView:
    """A bucket's elements for a gradient, as `tensor`. scaled: it holds this round's gradient, times the factor."""

    tensor: torch.Tensor

    def __init__(self, bucket: GradientBucket, form: Form, parameter: torch.nn.Parameter, begin: int) -> None:
        self.bucket = bucket
        self._form, self._parameter, self._begin = form, parameter, begin
        self.in_use: weakref.ref[Any] | None = None
        self.scaled = False
        self.make_tensor()

    def make_tensor(self) -> None:
        form, flat, begin = self._form, self.bucket.flat, self._begin
        self._was_grad = False  # whether the tensor was a `grad`, which the program may have kept
        if not self.bucket.on_gpu:
            flat, self.in_use = tensors.in_memory_of(flat[begin : begin + form.n_elems])
            begin = 0
        self.tensor = flat.as_strided(form.size, form.stride, begin)

    @property
    def is_grad(self) -> bool:
        return self._parameter.grad is self.tensor

    def copy_grad(self, scale: float, *, as_grad: bool = False) -> None:
        """Copy the parameter's `grad` into the view, times a factor. as_grad: the view may replace a final `grad`."""
        grad = gradient_of(self._form, self._parameter)
        if grad is self.tensor:
            if not as_grad:  # PyTorch may add more, and the program must not change what is sent
                self._parameter.grad = grad.clone()
            grad.mul_(scale)
            self.scaled = True
            return
        self._protect_kept_gradient()
        same_device = tensors.device_of(grad) == tensors.device_of(self.tensor)
        if same_device:
            torch.mul(grad, scale, out=self.tensor)
        else:
            self.tensor.copy_(grad).mul_(scale)
        self.scaled = True
        if as_grad and same_device and not self.bucket.on_gpu:
            self._assign_grad()

    def complete(self, scale: float, *, fired: bool) -> None:
        """Complete this worker's gradient in the view. fired: whether the parameter got a gradient in this round."""
        parameter = self._parameter
        if fired:
            return
        if self.is_grad:
            parameter.grad = self.tensor.clone()  # since it must not change if no worker has used the parameter
        if parameter.grad is None or not parameter.requires_grad:
            self._protect_kept_gradient()
            self.tensor.zero_()
        else:
            self.copy_grad(scale)

    def deliver(self, copies: dict[GradientBucket, torch.Tensor]) -> None:
        """Make the sum the parameter's `grad`. copies: of this round's buckets on a GPU."""
        parameter, total, bucket = self._parameter, self.tensor, self.bucket
        if parameter.grad is total:
            return
        if tensors.device_of(parameter) != tensors.device_of(total):
            parameter.grad = total.to(parameter.device)
        elif bucket.on_gpu:  # a copy takes less time there than to find out whether the memory is referred to
            if bucket not in copies:
                copies[bucket] = bucket.flat.clone()
            # With a version of its own, unlike other views of the same memory.
            parameter.grad = copies[bucket].as_strided(total.size(), total.stride(), self._begin).data
        else:
            self._assign_grad()

    def _assign_grad(self) -> None:
        self._parameter.grad = self.tensor
        self._was_grad = True

    def _protect_kept_gradient(self) -> None:
        """Let the bucket continue in memory of its own if the program has kept a gradient that is a view of it."""
        if not self._was_grad:
            return
        del self.tensor
        if self.in_use is None or self.in_use() is None:  # no tensor of this memory is referred to
            self.make_tensor()
            return
        bucket = self.bucket
        bucket.flat = np.array(bucket.flat)
        for view in bucket.views.values():
            view.make_tensor()


class Spare(NamedTuple):
    """Some keys and their memory. in_use: dead where no tensor refers to it."""

    sizes: str
    keys: list[str]
    flats: list[Any]
    in_use: list[weakref.ref[Any] | None]


class Spares:
    """Those of one store, in the order in which keys were made, which is the same on all workers."""

    def __init__(self) -> None:
        self._all: list[Spare | None] = []

    @classmethod
    def of(cls, store: KVStore) -> Spares:
        found: Spares = vars(store).setdefault("_torch_spares", cls())
        return found

    def take(self, calls: CollectiveCalls, sizes: str) -> tuple[int, Spare | None]:
        """Return spare keys of these sizes, None if there are none, and a number for `give`. Collective, blocks.

        None where a worker may come that knows none of them.
        """
        free = [
            one is not None and one.sizes == sizes and all(ref is None or ref() is None for ref in one.in_use)
            for one in self._all
        ]
        if free and not calls.store.session.has_spares:
            (agreed,) = calls.allreduce([np.array(free, np.uint8)], "min", "spare keys")
            for i in np.flatnonzero(agreed).tolist():
                spare, self._all[i] = self._all[i], None
                return i, spare
        self._all.append(None)
        return len(self._all) - 1, None

    def give(self, i: int, spare: Spare) -> None:
        """Give keys back. Any thread may do so, at any time, as the garbage collector does."""
        self._all[i] = spare


def make_buckets(
    calls: CollectiveCalls,
    name: str,
    members: Sequence[int],
    forms: Sequence[Form],
    parameters: Sequence[torch.nn.Parameter],
    *,
    limit_bytes: int | None,
    tail_elems: int,
    compression: KeyCompression,
) -> tuple[int, str, list[GradientBucket]]:
    """Make buckets for parameters in the order in which their gradients are computed. Collective, blocks.

    name: prefix of the keys. members: numbers of the parameters, the same on every worker. tail_elems: number of
    float32 values after the last gradient; 0: no tail. compression: of all but the tail; the store's own is not used.

    Returns the buckets, and before them what `Spares.give` needs.
    """
    store = calls.store
    numbers = [*members, TAIL] if tail_elems else list(members)
    chosen = [Form("tail", (tail_elems,), (1,), "float32") if i == TAIL else forms[i] for i in numbers]
    sizes = [one.n_elems for one in chosen]
    kinds = [(one.dtype, one.on_gpu) for one in chosen]
    shaped = [_for_form(compression, one) for one in chosen]
    apart = [
        str(kind) if one == compression else str(at) for at, (kind, one) in enumerate(zip(kinds, shaped, strict=True))
    ]
    if tail_elems and not compression.uncompressed:
        apart[-1] = "tail"
    n_bytes = [one.n_elems * dtype_of(one.dtype).itemsize for one in chosen]
    groups = buckets.plan(n_bytes, apart, on_gpu=[on_gpu for _, on_gpu in kinds], limit_bytes=limit_bytes)
    lengths = [sum(sizes[i] for i in group) for group in groups]
    form = str([(kinds[group[0]], lengths[g], len(numbers) - 1 in group) for g, group in enumerate(groups)])
    form += f", tail {tail_elems}, {compression.text}"
    number, spare = Spares.of(store).take(calls, form)
    flats: dict[int, Any] = {} if spare is None else dict(enumerate(spare.flats))
    for dtype, on_gpu in sorted(set(kinds)) if spare is None else ():
        alike = [g for g, group in enumerate(groups) if kinds[group[0]] == (dtype, on_gpu)]
        shapes = [(lengths[g],) for g in alike]
        made = zeros_on_gpu(store, shapes, dtype) if on_gpu else store.zeros(shapes, dtype)
        flats.update(zip(alike, made, strict=True))
    found = []
    for g, group in enumerate(groups):
        key = f"{name} {g}" if spare is None else spare.keys[g]
        bucket = GradientBucket(key, flats[g], tail_elems if TAIL in [numbers[i] for i in group] else 0)
        for i, begin in zip(group, accumulate((sizes[i] for i in group), initial=0), strict=False):
            if (member := numbers[i]) != TAIL:
                bucket.views[member] = GradientView(bucket, forms[member], parameters[member], begin)
        store.session.own_keys.add(bucket.key)
        store.session.compressions.of_keys[bucket.key] = NONE if bucket.has_tail else shaped[group[0]]
        found.append(bucket)
    for bucket in found:
        if spare is None:
            store.init(bucket.key, bucket.flat)  # one after another, since each call copies its arrays
        bucket.compressed = store.session.infos[bucket.key].codec != IDENTITY.name
    return number, form, found


def zeros_on_gpu(store: KVStore, shapes: Sequence[tuple[int, ...]], dtype: str) -> list[torch.Tensor]:
    """Return tensors of zeros in the store's memory on its GPU. Collective, blocks."""
    # Not every version of CuPy has a name for bfloat16, but all have 16 bits.
    made = store.zeros(list(shapes), "float16" if dtype == "bfloat16" else dtype, device=store.device)
    return [tensors.on_gpu(array).view(getattr(torch, dtype)) for array in made]


def _for_form(compression: KeyCompression, form: Form) -> KeyCompression:
    """Return the compression of a parameter's gradient, which has a bucket of its own if the shape matters to it."""
    in_order = form.stride == tuple(torch.empty(form.size, device="meta").stride())
    return compression.for_shape(form.size) if in_order else compression
