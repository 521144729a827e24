"""Horovod's collective calls on tensors, a class for each kind: what is exchanged, and how a gradient flows back.

Values are given to the collective calls of a store as NumPy arrays, or exchanged on the store's GPU (gpu_calls.py).
Gradients are those of Horovod: where a result is the same on all workers, the mean of all workers' gradients of it, so
that a loss that every worker computes from it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpikv.arrays.as_numpy import HostArray
from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import PeerError, UnsupportedError
from mpikv.torch import gpu_calls
from mpikv.torch.arrays import array_of, in_host_memory, on_store, tensor_of

Tensors = Sequence[torch.Tensor]


@dataclass
class TensorCall:
    """A call. calls: of the workers among which it is made. name: compared between them.

    make: returns the results, as new tensors. back: returns the gradients of the inputs from those of the results. Both
    are collective and block.
    """

    calls: CollectiveCalls
    name: str | None

    def make(self, tensors: Tensors) -> list[torch.Tensor]:
        raise NotImplementedError

    def back(self, gradients: Tensors) -> list[torch.Tensor]:
        raise NotImplementedError

    def make_recorded(self, tensors: Tensors) -> list[torch.Tensor]:
        """Do what `make` does, and note what `back` needs."""
        return self.make(tensors)


class CallOfRows(TensorCall):
    """A call whose results have rows that belong to workers, as have their gradients."""

    def make_recorded(self, tensors: Tensors) -> list[torch.Tensor]:
        def make() -> list[torch.Tensor]:
            self._made_by = [*self.calls.store.session.numbers]
            return self.make(tensors)

        return self.calls.whole(make)

    def _among_the_same(self, back: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Make a call for a gradient whose rows belong to workers. Raises PeerError where one of these has died."""

        def call() -> list[torch.Tensor]:
            if self._made_by != [*self.calls.store.session.numbers]:
                raise PeerError(
                    f"a worker has died between a call of {type(self).__name__} and its backward pass, which has "
                    "gradients of its rows: drop the step, and make it again from its forward pass"
                )
            return back()

        return self.calls.whole(call)


@dataclass
class Allreduce(TensorCall):
    """Combine tensors by `op`; they are multiplied by `before` first, and the results by `after`."""

    op: str
    before: float = 1.0
    after: float = 1.0

    def make(self, tensors: Tensors) -> list[torch.Tensor]:
        found = self._combine([_scaled(tensor.detach(), self.before) for tensor in tensors])
        return [_scaled(one, self.after) for one in found]

    def _combine(self, tensors: Tensors) -> list[torch.Tensor]:
        if tensors and all(on_store(tensor, self.calls.store) for tensor in tensors):
            return gpu_calls.allreduce(self.calls, tensors, self.op, self.name)
        return _beside(tensors, self.calls.allreduce([array_of(one) for one in tensors], self.op, self.name))

    def back(self, gradients: Tensors) -> list[torch.Tensor]:
        if self.op not in ("mean", "sum"):
            raise UnsupportedError(f"no gradient flows through a call with op={self.op!r}")
        return self._back(gradients)

    def _back(self, gradients: Tensors) -> list[torch.Tensor]:
        return self.make(gradients)


class ReduceScatter(Allreduce, CallOfRows):
    """Do what `Allreduce` does, and return this worker's rows."""

    def _combine(self, tensors: Tensors) -> list[torch.Tensor]:
        return _beside(tensors, self.calls.reduce_scatter([array_of(one) for one in tensors], self.op, self.name))

    def _back(self, gradients: Tensors) -> list[torch.Tensor]:
        factor = self.before * self.after * (self.calls.store.num_workers if self.op == "sum" else 1)
        return self._among_the_same(
            lambda: [_scaled(gathered(self.calls, gradient, self.name), factor) for gradient in gradients]
        )


class Allgather(TensorCall):
    """Concatenate the workers' tensors, whose first dimensions may differ."""

    def make(self, tensors: Tensors) -> list[torch.Tensor]:
        return [gathered(self.calls, tensor, self.name) for tensor in tensors]

    def make_recorded(self, tensors: Tensors) -> list[torch.Tensor]:
        def make() -> list[torch.Tensor]:
            rows = self.calls.allgather(np.array([[len(tensor) for tensor in tensors]], np.int64), self.name)
            rank = self.calls.store.rank
            self._mine = [*zip(rows[:rank].sum(axis=0).tolist(), rows[rank].tolist(), strict=True)]
            return self.make(tensors)

        return self.calls.whole(make)

    def back(self, gradients: Tensors) -> list[torch.Tensor]:
        means = Allreduce(self.calls, self.name, "mean").make(gradients)
        return [one.narrow(0, begin, n) for one, (begin, n) in zip(means, self._mine, strict=True)]


@dataclass
class Broadcast(TensorCall):
    """Copy worker `root`'s tensors to all workers."""

    root: int

    def __post_init__(self) -> None:
        self._numbers = self.calls.store.session.numbers

    def make(self, tensors: Tensors) -> list[torch.Tensor]:
        arrays = [array_of(one) for one in tensors]
        return _beside(tensors, self.calls.broadcast(arrays, self.root, self.name, self._numbers))

    def back(self, gradients: Tensors) -> list[torch.Tensor]:
        means = Allreduce(self.calls, self.name, "mean").make(gradients)
        is_root = self.calls.store.session.number == self._numbers[self.root]
        return means if is_root else [torch.zeros_like(one) for one in means]


@dataclass
class AllToAll(CallOfRows):
    """Give worker i the rows that `splits[i]` counts of a tensor. Results: all workers' rows, and the count of each."""

    splits: Sequence[int]

    def __post_init__(self) -> None:
        # By the numbers that workers had at the start: some may be gone when it is made.
        session = self.calls.store.session
        self._numbers = [*session.numbers]
        self._counts = np.zeros((1, session.at_start), np.int64)
        self._counts[0, self._numbers] = self.splits

    def make(self, tensors: Tensors) -> list[torch.Tensor]:
        (tensor,), me = tensors, self.calls.store.session.number

        def exchange() -> tuple[HostArray, torch.Tensor]:
            return self.calls.allgather(self._counts, self.name), gathered(self.calls, tensor, self.name)

        lengths, everything = self.calls.whole(exchange)
        starts = np.cumsum([0, *lengths.sum(axis=1)])[:-1] + lengths[:, :me].sum(axis=1)
        self.received = [int(one) for one in lengths[:, me]]
        rows = [everything[begin : begin + k] for begin, k in zip(starts.tolist(), self.received, strict=True)]
        return [torch.cat(rows), torch.tensor(self.received, dtype=torch.int32)]

    def back(self, gradients: Tensors) -> list[torch.Tensor]:
        def call() -> list[torch.Tensor]:
            found, _ = AllToAll(self.calls, self.name, self.received).make(gradients[:1])
            sent = np.repeat(np.isin(self._numbers, self._made_by), self.splits)  # the rest was for the dead
            whole = found.new_zeros((sent.size, *found.shape[1:]))
            whole[torch.from_numpy(sent)] = found
            return [whole]

        return self._among_the_same(call)


@dataclass
class SparseAllreduce(TensorCall):
    """Add sparse tensors: every worker gets the entries of all."""

    op: str

    def make(self, tensors: Tensors) -> list[torch.Tensor]:
        mine = tensors[0].detach().coalesce()
        name = f"{self.name}, sparse {tuple(mine.shape)}"  # compared

        def exchange() -> tuple[torch.Tensor, torch.Tensor]:
            indices = gathered(self.calls, mine.indices().t().contiguous(), name)
            values = gathered(self.calls, mine.values(), name)
            return indices, values / self.calls.store.num_workers if self.op == "mean" else values

        indices, values = self.calls.whole(exchange)
        return [torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=False).coalesce()]


def gathered(calls: CollectiveCalls, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    return _beside([tensor], [calls.allgather(array_of(tensor), name)])[0]


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TensorCall, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        return tuple(call.make_recorded(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *ctx.call.back(gradients)


def blocking(call: TensorCall, tensors: Tensors) -> list[torch.Tensor]:
    """Make a call. Collective, blocks. The results require gradients where the tensors do."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Recorded.apply(call, *tensors))
    return call.make(tensors)


class Handle:
    """A call that was begun. Calling it does what `synchronize` does."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __call__(self) -> Any:
        return self.future.result()


def begun(
    call: TensorCall,
    tensors: Tensors,
    into: Tensors | None = None,
    result: Callable[[list[torch.Tensor]], Any] = lambda found: found[0],
) -> Handle:
    """Let a thread of the store make a call. Local; collective where a tensor is on a device, or without threads.

    into: tensors that get the results, and take their place. result: of the handle. Raises ValueError while a call of
    the same name is under way.
    """

    def make() -> Any:
        found = call.make(tensors)
        return result(found if into is None else [set_(out, one) for out, one in zip(into, found, strict=True)])

    group = call.calls.store.workers_group
    if group is not None and all(in_host_memory(tensor) for tensor in tensors):
        return Handle(group.in_turn.begin(make, call.name))
    future: Future[Any] = Future()
    future.set_result(make())  # in the stream of this thread, if on a device
    return Handle(future)


def set_(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write a value into a tensor, also one that requires gradients."""
    with torch.no_grad():
        return tensor.copy_(value)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in a dtype that holds the product, and return the tensor's own: whole numbers are cut towards zero."""
    if factor == 1:
        return tensor
    wide = tensor.dtype
    if tensor.dtype in (torch.float16, torch.bfloat16):
        wide = torch.float32
    elif not (tensor.is_floating_point() or tensor.is_complex()):
        wide = torch.float64
    return (tensor.to(wide) * factor).to(tensor.dtype)


def _beside(tensors: Tensors, results: Sequence[HostArray]) -> list[torch.Tensor]:
    """Make tensors of arrays, on the devices of `tensors`."""
    return [tensor_of(result).to(tensor.device) for tensor, result in zip(tensors, results, strict=True)]
