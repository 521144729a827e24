"""A process group of `torch.distributed` over the ranks of MPI, with the names of several versions of PyTorch.

Each method checks its tensors, converts them to arrays, makes one call of a `RankGroup` (groups/group.py), and returns
a `CallWork`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from mpikv.arrays.as_numpy import HostArray
from mpikv.errors import ShapeMismatch
from mpikv.groups import collective as collectives
from mpikv.groups.call import GroupCall, Options
from mpikv.groups.collective import Collective
from mpikv.groups.group import RankGroup
from mpikv.groups.world import World
from mpikv.torch import sparse
from mpikv.torch.arrays import Views, same_kind
from mpikv.torch.call_forms import collective, reduction_of
from mpikv.torch.works import CallWork

CPU = torch.device("cpu")
Tensors = list[torch.Tensor]
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
# Before 2.7 PyTorch's C++ code does not keep a work's Python object alive (pytorch/pytorch#146376), so the last ones
# are kept here: DDP asks a work for its future at once, and waits for two broadcasts at a time.
HELD_WORKS = 0 if VERSION >= (2, 7) else 8


class NamedBackend(Backend):
    """A group's backend for PyTorch's C++ code, with a name and without any function: no call reaches it.

    PyTorch asks a group's backend what it supports from 2.14 on, and keeps the group's flight recorder in it from 2.15
    on; before, a backend could not be made in Python.
    """

    supports_coalescing = supports_splitting = supports_shrinking = supports_reconfigure = supports_window = False

    def name(self) -> str:
        return "mpikv"

    getBackendName = name  # noqa: N815 - PyTorch's name


class MpiProcessGroup(dist.ProcessGroup):
    """One rank's side of a process group."""

    def __init__(self, world: World, group: RankGroup) -> None:
        super().__init__(group.rank, group.size)
        self._world, self._group = world, group
        # Starts a thread only for a future. The functions chained to as many futures may wait for others at a time.
        self._completer = ThreadPoolExecutor(64, "futures")
        self._names = {"name": "", "description": ""}
        self._held: deque[CallWork] = deque(maxlen=HELD_WORKS)
        self._coalesced: list[CallWork] | None = None  # the works of a coalescing context
        if VERSION >= (2, 14):
            custom = dist.ProcessGroup.BackendType.CUSTOM
            self._register_backend(CPU, custom, NamedBackend(group.rank, group.size))
            self._set_default_backend(custom)

    # --- names; rank and size are the base class's

    def name(self) -> str:
        return "mpikv"

    getBackendName = name  # noqa: N815 - PyTorch's name

    # The base class keeps names in its C++ backend, which this class does not have.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._names["name"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._names["description"] = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names["description"]

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def __repr__(self) -> str:
        return f"<MpiProcessGroup rank {self.rank()} of {self.size()}>"

    # --- reductions

    @collective
    def allreduce(self, tensors: Tensors, opts: Any = None) -> CallWork:
        if any(tensor.layout != torch.strided for tensor in tensors):
            for tensor in tensors:
                sparse.allreduce(self._group, tensor, reduction_of(opts))
            return CallWork([], tensors, self._completer.submit)
        views = Views()
        arrays = views.write(tensors)
        return self._made(views, tensors, opts, collectives.allreduce(arrays, reduction_of(opts)))

    allreduce_coalesced = allreduce

    @collective
    def reduce(self, tensors: Tensors, opts: Any) -> CallWork:
        views, (tensor,) = Views(), tensors
        (array,) = (views.write if opts.rootRank == self.rank() else views.read)([tensor])
        return self._made(views, tensors, opts, collectives.reduce(array, array, reduction_of(opts), opts.rootRank))

    @collective
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> CallWork:
        """Combine the inputs of all ranks; rank i's output becomes the combination of all inputs i."""
        views, pairs = Views(), []
        for output, ins in zip(outputs, inputs, strict=True):
            self._fits("reduce_scatter", output, ins)
            pairs.append((views.read(ins), views.write([output])[0]))
        return self._made(views, outputs, opts, collectives.reduce_scatter(pairs, reduction_of(opts)))

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> CallWork:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    @collective
    def reduce_scatter_single_coalesced(self, outputs: Tensors, wholes: Tensors, opts: Any = None) -> CallWork:
        views, pairs = Views(), []
        for output, whole in zip(outputs, wholes, strict=True):
            same_kind("reduce_scatter", [output, whole])
            pairs.append((self._slices(views.read([whole])[0], output.numel()), views.write([output])[0]))
        return self._made(views, outputs, opts, collectives.reduce_scatter(pairs, reduction_of(opts)))

    # --- collectives without a reduction

    @collective
    def broadcast(self, tensors: Tensors, opts: Any) -> CallWork:
        views = Views()
        arrays = (views.read if opts.rootRank == self.rank() else views.write)(tensors)
        return self._made(views, tensors, opts, collectives.broadcast(arrays, opts.rootRank))

    @collective
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> CallWork:
        """Copy every rank's input to every rank, one output for each rank."""
        views, pairs = Views(), []
        for outs, tensor in zip(outputs, inputs, strict=True):
            self._fits("all_gather", tensor, outs)
            pairs.append((views.read([tensor])[0], views.write(outs)))
        flat = [out for outs in outputs for out in outs]
        return self._made(views, flat, opts, collectives.allgather(pairs))

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> CallWork:
        """Do what `allgather` does, but `outputs` has one list for each rank, with an output for each input."""
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> CallWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    @collective
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CallWork:
        views, pairs = Views(), []
        for output, tensor in zip(outputs, inputs, strict=True):
            same_kind("all_gather", [output, tensor])
            pairs.append((views.read([tensor])[0], self._slices(views.write([output])[0], tensor.numel())))
        return self._made(views, outputs, opts, collectives.allgather(pairs))

    @collective
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> CallWork:
        views, (tensor,), root = Views(), inputs, opts.rootRank
        incoming: dict[int, HostArray] = {}
        if self.rank() == root:
            self._one_each("gather", tensor, outputs[0])
            incoming = dict(enumerate(views.write(outputs[0])))
        outgoing = {root: views.read([tensor])[0]}
        same = f"to {root} of {tensor.dtype}"  # a wrong length is detected by the rank that receives
        flat = [out for outs in outputs for out in outs]
        return self._made(views, flat, opts, collectives.exchange("gather", outgoing, incoming, same))

    @collective
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> CallWork:
        """Give each rank one of the root's inputs."""
        views, (tensor,), root = Views(), outputs, opts.rootRank
        outgoing: dict[int, HostArray] = {}
        if self.rank() == root:
            self._one_each("scatter", tensor, inputs[0])
            outgoing = dict(enumerate(views.read(inputs[0])))
        incoming = {root: views.write([tensor])[0]}
        same = f"from {root} of {tensor.dtype}"
        return self._made(views, outputs, opts, collectives.exchange("scatter", outgoing, incoming, same))

    @collective
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CallWork:
        for what in (outputs, inputs):
            same_kind("all_to_all", what)
            if len(what) != self.size():
                raise ValueError(f"all_to_all: {len(what)} tensors for {self.size()} ranks")
        views = Views()
        outgoing, incoming = dict(enumerate(views.read(inputs))), dict(enumerate(views.write(outputs)))
        same = f"of {inputs[0].dtype}"
        return self._made(views, outputs, opts, collectives.exchange("all_to_all", outgoing, incoming, same))

    @collective
    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> CallWork:
        """Do what `alltoall` does, with one tensor each, cut along its first dimension; no splits: equal lengths."""
        same_kind("all_to_all", [output, tensor])
        views = Views()
        outgoing = dict(enumerate(self._split(views.read([tensor])[0], tensor, input_splits)))
        incoming = dict(enumerate(self._split(views.write([output])[0], output, output_splits)))
        same = f"of {tensor.dtype}"
        return self._made(views, [output], opts, collectives.exchange("all_to_all", outgoing, incoming, same))

    @collective
    def barrier(self, opts: Any = None) -> CallWork:
        return self._made(Views(), [], opts, collectives.barrier())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. The error names all missing ranks, whatever `wait_all_ranks` is."""
        limit_s = None if timeout is None else timeout.total_seconds()
        self._group.start(collectives.barrier(), Options(limit_s)).wait()

    # --- point to point

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> CallWork:
        self._check_rank("send: the destination", dest)
        views, (tensor,) = Views(), tensors
        (array,) = views.read([tensor])
        return self._work_of(views, tensors, None, lambda o: self._group.send(array, dest, tag, o))

    def recv(self, tensors: Tensors, source: int | None, tag: int = 0) -> CallWork:
        if source is not None:
            self._check_rank("recv: the source", source)
        views, (tensor,) = Views(), tensors
        (array,) = views.write([tensor])
        return self._work_of(views, tensors, None, lambda o: self._group.receive(array, source, tag, o))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> CallWork:
        return self.recv(tensors, None, tag)

    # --- names of other versions of PyTorch

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- several calls that are waited for as one

    def _start_coalescing(self, _device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: Any = None) -> CallWork:
        works, self._coalesced = self._coalesced or [], None
        calls = [call for work in works for call in work.calls]
        return CallWork(calls, [tensor for work in works for tensor in work.result()], self._completer.submit)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # --- shutdown

    def shutdown(self) -> None:
        self._world.drop(self._group)
        self._completer.shutdown(wait=False)

    abort = shutdown

    # --- helpers

    def _made(self, views: Views, result: Tensors, opts: Any, described: Collective) -> CallWork:
        return self._work_of(views, result, opts, partial(self._group.start, described))

    def _work_of(self, views: Views, result: Tensors, opts: Any, make: Callable[[Options], GroupCall]) -> CallWork:
        timeout = getattr(opts, "timeout", None)
        timeout_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        finish = views.write_back if views.copies and not views.in_caller else None
        call = make(Options(timeout_s, finish))
        if views.in_caller:
            call.wait()
            views.write_back()
        work = CallWork([call], result, self._completer.submit)
        self._held.append(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.size():
            raise ValueError(f"{what} is one of the group's ranks, 0 to {self.size() - 1}, not {rank}")

    def _slices(self, array: HostArray, n_elems: int) -> list[HostArray]:
        if array.size != n_elems * self.size():
            raise ValueError(
                f"a tensor of {n_elems} elements for each of {self.size()} ranks is not one of {array.size}"
            )
        return [array[i * n_elems : (i + 1) * n_elems] for i in range(self.size())]

    def _fits(self, name: str, tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Raise where there is not one tensor for each rank, this rank's as long as its other one."""
        same_kind(name, [tensor, *tensors])
        if len(tensors) != self.size():
            raise ShapeMismatch(f"{name}: {len(tensors)} tensors for {self.size()} ranks")
        if (own := tensors[self.rank()]).numel() != tensor.numel():
            raise ShapeMismatch(f"{name}: {tensor.numel()} elements do not fit {own.numel()}")

    def _one_each(self, name: str, tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        same_kind(name, [tensor, *tensors])
        if len(tensors) != self.size() or any(one.numel() != tensor.numel() for one in tensors):
            raise ValueError(f"{name}: {self.size()} tensors of {tensor.numel()} elements are expected at the root")

    def _split(self, array: HostArray, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[HostArray]:
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % self.size():
                raise ValueError(f"all_to_all: {rows} rows cannot be split evenly over {self.size()} ranks")
            splits = [rows // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != rows or min(splits) < 0:
            raise ValueError(f"all_to_all: the splits {list(splits)} do not make {rows} rows for {self.size()} ranks")
        row_elems = array.size // rows if rows else 0
        slices, begin = [], 0
        for split in splits:
            slices.append(array[begin : begin + split * row_elems])
            begin += split * row_elems
        return slices
