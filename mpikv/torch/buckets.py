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

import numpy as np
import torch

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import HostArray, dtype_of
from mpikv.calls.request import Request
from mpikv.codecs.compression import NONE, KeyCompression
from mpikv.codecs.identity import IDENTITY
from mpikv.errors import UnsupportedError
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


def gradient_of(form: Form, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's `grad`. UnsupportedError where it cannot be exchanged."""
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
    """One key, its memory, and which parameters lie there. flat: NumPy's, or a tensor on the store's GPU.

    views: of the parameters, by their numbers.
    """

    def __init__(self, key: str, flat: Any, tail_elems: int = 0) -> None:
        self.key = key
        self.on_gpu = isinstance(flat, torch.Tensor)
        self._streams: dict[int, Any] = {}
        self.flat = flat
        self.views: dict[int, GradientView] = {}
        self.has_tail = tail_elems > 0
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

    def end_round(self, trained: HostArray) -> None:
        """Get ready for the next round. trained: whether a gradient is waited for, by the parameters' numbers."""
        self.left, self.request = False, None
        self.waits_for = sum(bool(trained[i]) for i in self.views)
        for view in self.views.values():
            view.scaled = view.unscaled = False


class GradientView:
    """Where a parameter's gradient lies: the elements of a bucket from `begin` on. tensor: made of them.

    scaled: it holds the gradient of this round, times the factor. unscaled: PyTorch has added the gradient to it, and
    may add more before the round ends; the factor comes then.
    """

    tensor: torch.Tensor

    def __init__(self, bucket: GradientBucket, form: Form, parameter: torch.nn.Parameter, begin: int) -> None:
        self.bucket = bucket
        self._form, self._parameter, self._begin = form, parameter, begin
        self._memory: weakref.ref[Any] | None = None
        self.scaled = self.unscaled = False
        self._make()

    def _make(self) -> None:
        """Make the tensor, where the bucket's memory is now."""
        form, flat, begin = self._form, self.bucket.flat, self._begin
        self._given = False  # as a `grad`, so that the program may hold it
        if not self.bucket.on_gpu:
            flat, self._memory = tensors.in_memory_of(flat[begin : begin + form.n_elems])
            begin = 0
        self.tensor = flat.as_strided(form.size, form.stride, begin)

    @property
    def is_grad(self) -> bool:
        """Whether the tensor is the parameter's `grad`."""
        return self._parameter.grad is self.tensor

    def take(self, scale: float, *, at_once: bool = False) -> None:
        """Bring the parameter's `grad` here, times a factor. at_once: it is final now, and may be this tensor."""
        grad = gradient_of(self._form, self._parameter)
        if grad is self.tensor:
            self.scaled, self.unscaled = at_once, not at_once
            if at_once:
                grad.mul_(scale)
            return
        self._keep_what_is_held(scale)
        same_device = tensors.device_of(grad) == tensors.device_of(self.tensor)
        if same_device:
            torch.mul(grad, scale, out=self.tensor)
        else:
            self.tensor.copy_(grad).mul_(scale)
        self.scaled = True
        if at_once and same_device and not self.bucket.on_gpu:
            self._give()

    def complete(self, scale: float, *, fired: bool) -> None:
        """Let this be what the worker adds to the sum. fired: whether the parameter got a gradient in this round."""
        parameter = self._parameter
        if fired:
            if self.unscaled:
                self.tensor.mul_(scale)
            return
        if self.is_grad:
            parameter.grad = self.tensor.clone()  # it stays as it is if no worker has used it
        if parameter.grad is None or not parameter.requires_grad:
            self._keep_what_is_held(scale)
            self.tensor.zero_()
        else:
            self.take(scale)

    def deliver(self, copies: dict[GradientBucket, torch.Tensor]) -> None:
        """Let the sum be the parameter's `grad`. copies: of buckets on a GPU, in this round."""
        parameter, total, bucket = self._parameter, self.tensor, self.bucket
        if parameter.grad is total:
            return
        if tensors.device_of(parameter) != tensors.device_of(total):
            if parameter.grad is None:
                parameter.grad = total.to(parameter.device)
            else:
                parameter.grad.detach().copy_(total)
        elif bucket.on_gpu:  # a copy there takes less time than to find out whether anybody holds the memory
            if bucket not in copies:
                copies[bucket] = bucket.flat.clone()
            parameter.grad = copies[bucket].as_strided(total.size(), total.stride(), self._begin)
        else:
            self._give()

    def _give(self) -> None:
        self._parameter.grad = self.tensor
        self._given = True

    def _keep_what_is_held(self, scale: float) -> None:
        """Make sure that what is written here changes no gradient that the program holds.

        Where it holds one, the bucket goes on in memory of this worker's own.
        """
        if not self._given:
            return
        del self.tensor
        if self._memory is None or self._memory() is None:  # nobody has it, nor a view of it
            self._make()
            return
        bucket = self.bucket
        views = bucket.views.values()
        added_to = [view for view in views if view is not self and view.unscaled and view.is_grad]
        bucket.flat = np.array(bucket.flat)
        for view in views:
            view._make()
        for view in added_to:  # PyTorch goes on adding where it was
            view.unscaled = False
            view.take(scale)


def make_buckets(
    store: KVStore,
    name: str,
    members: Sequence[int],
    forms: Sequence[Form],
    parameters: Sequence[torch.nn.Parameter],
    *,
    limit_bytes: int,
    tail_elems: int,
    compression: KeyCompression,
) -> list[GradientBucket]:
    """Buckets for parameters in the order in which their gradients appear. Collective, blocks.

    name: begin of the keys. members: numbers of the parameters, the same on every worker. tail_elems: float32 values
    behind the last of them; 0 for none. compression: of all but the tail, whatever the store's own is.
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
    for g, group in enumerate(groups):
        bucket = GradientBucket(f"{name} {g}", flats[g], tail_elems if TAIL in [numbers[i] for i in group] else 0)
        for i, begin in zip(group, buckets.offsets([sizes[i] for i in group]), strict=False):
            if (number := numbers[i]) != TAIL:
                bucket.views[number] = GradientView(bucket, forms[number], parameters[number], begin)
        store.session.compressions.of_keys[bucket.key] = NONE if bucket.has_tail else shaped[group[0]]
        found.append(bucket)
    for bucket in found:
        store.init(bucket.key, bucket.flat)  # one after another: the store makes a copy of what it is given
        bucket.compressed = store.session.infos[bucket.key].codec != IDENTITY.name
    return found


def zeros_on_gpu(store: KVStore, shapes: Sequence[tuple[int, ...]], dtype: str) -> list[torch.Tensor]:
    """Tensors of zeros in the store's memory on its GPU. Collective, blocks."""
    # Not every version of CuPy has a name for bfloat16, but all have 16 bits.
    made = store.zeros(list(shapes), "float16" if dtype == "bfloat16" else dtype, device=store.device)
    return [tensors.on_gpu(array).view(getattr(torch, dtype)) for array in made]


def _for_form(compression: KeyCompression, form: Form) -> KeyCompression:
    """That of a parameter's gradient, which has a bucket of its own if its shape makes a difference."""
    in_order = form.stride == tuple(torch.empty(form.size, device="meta").stride())
    return compression.for_shape(form.size) if in_order else compression
