"""NCCL's collectives on a GPU's memory, by CuPy's binding.

A communicator has one rank on each GPU. Its calls are put into a stream; they must come in the same order on all ranks,
and each of them waits on the GPU for those of the others. Parts have equal lengths: whoever calls pads the last ones.

NCCL asks that the calls of two communicators on a GPU never wait for each other in a circle. So a process has one
communicator for a set of GPUs, whichever of its stores asks (nccl_introduction.py), and all put their calls in one
order (strategies/nccl_path.py).

Cost per rank of n bytes over p ranks: about n(p-1)/p for a reduce-scatter or an allgather, twice that for an allreduce.
The order of addition is NCCL's, so bits differ from those of other algorithms, and may differ with NCCL's version, the
number of ranks and how GPUs are connected.
Source: NVIDIA, NCCL User Guide ("Collective Operations", "Using multiple NCCL communicators concurrently", "Fault
Tolerance"); CuPy 14, `cupy.cuda.nccl`.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np

from mpikv.errors import MpikvError, UnsupportedError
from mpikv.placement.place import CACHE_LINE_BYTES
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.gpu import Gpu

DTYPES = {"int8": "INT8", "uint8": "UINT8", "int32": "INT32", "int64": "INT64", "float32": "FLOAT32"}
DTYPES["float64"] = "FLOAT64"
OPS: dict[np.ufunc, str] = {np.add: "SUM", np.multiply: "PROD", np.maximum: "MAX", np.minimum: "MIN"}


class Nccl:
    """NCCL for one GPU. Raises UnsupportedError where CuPy's NCCL is missing."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        cuda = gpu.cupy.cuda
        try:  # a module that `import cupy` leaves out
            self.module: Any = cuda.nccl if hasattr(cuda, "nccl") else importlib.import_module("cupy.cuda.nccl")
            available = bool(self.module.available)
        except ImportError:
            available = False
        if not available:
            raise UnsupportedError(
                "this CuPy finds no NCCL: its wheels need the package nvidia-nccl-cu12, or nvidia-nccl-cu13"
            )

    def version(self) -> str:
        """Which NCCL it is: a number, 21805 for 2.18.5. Ranks of a communicator have the same."""
        return str(self.call(self.module.get_version))

    def unique_id(self) -> bytes:
        """What makes the ranks of a new communicator find each other: bytes, from one of them to all."""
        return bytes(self.call(self.module.get_unique_id))

    def init(self, size: int, unique_id: bytes, rank: int) -> NcclComm:
        """Make a communicator. Collective; blocks until all ranks have called it, each with a GPU of its own.

        In a thread that has made the GPU its own.
        """
        return NcclComm(self, self.call(self.module.NcclCommunicator, size, unique_id, rank), size, rank)

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call NCCL. MpikvError where it fails."""
        try:
            return function(*arguments)
        except self.module.NcclError as error:
            raise MpikvError(
                f"NCCL has failed: {error}. Each worker needs a GPU of its own; NCCL_DEBUG=WARN in the environment "
                "makes NCCL say more"
            ) from error


class NcclComm:
    """One rank of a communicator. Calls put work into a stream and return; they raise MpikvError where NCCL fails.

    array: (size * m,), contiguous; part i, of m elements, belongs to rank i.
    """

    def __init__(self, nccl: Nccl, comm: Any, size: int, rank: int) -> None:
        self._nccl, self._comm = nccl, comm
        self.size, self.rank = size, rank
        self.failure: MpikvError | None = None
        self.users = 0  # stores of this process
        # The order of rounds, of all stores: how many worker 0 has given a number, and how many are in their streams.
        self.numbers, self.begun = itertools.count(), 0

    def all_reduce(self, array: SpaceArray, how: np.ufunc, stream: Any) -> None:
        """Combine all ranks' arrays; all have the result."""
        kind, op = self._kind(array), self._constant(OPS[how])
        self._call(self._comm.allReduce, array.data.ptr, array.data.ptr, array.size, kind, op, stream.ptr)

    def reduce_scatter(self, array: SpaceArray, how: np.ufunc, stream: Any) -> None:
        """Combine all ranks' arrays; each rank's own part holds the result, the others anything."""
        kind, op, length = self._kind(array), self._constant(OPS[how]), array.size // self.size
        own = array.data.ptr + self.rank * length * array.itemsize
        self._call(self._comm.reduceScatter, array.data.ptr, own, length, kind, op, stream.ptr)

    def all_gather(self, array: SpaceArray, stream: Any) -> None:
        """Give every rank every part, of which each rank has its own. As bytes, whatever their dtype."""
        n_bytes = array.nbytes // self.size
        own = array.data.ptr + self.rank * n_bytes
        self._call(self._comm.allGather, own, array.data.ptr, n_bytes, self._constant("INT8"), stream.ptr)

    def reduce(self, array: SpaceArray, root: int, how: np.ufunc, stream: Any) -> None:
        """Combine all ranks' arrays into that of the root; the others may hold anything."""
        kind, op = self._kind(array), self._constant(OPS[how])
        self._call(self._comm.reduce, array.data.ptr, array.data.ptr, array.size, kind, op, root, stream.ptr)

    def broadcast(self, array: SpaceArray, root: int, stream: Any) -> None:
        """Give every rank the root's array. As bytes."""
        kind = self._constant("INT8")
        self._call(self._comm.broadcast, array.data.ptr, array.data.ptr, array.nbytes, kind, root, stream.ptr)

    def check(self) -> None:
        """Raise MpikvError where NCCL has noticed that a call under way has failed."""
        self._call(self._comm.check_async_error)

    def give_up(self) -> None:
        """Nobody uses it, now or later."""
        self.fail(MpikvError("this communicator of NCCL was given up"))

    def fail(self, error: MpikvError) -> MpikvError:
        """End all that is under way, since it will not end by itself. All calls from now on raise this error."""
        if self.failure is None:
            self.failure = error
            self._comm.abort()
        return self.failure

    def close(self, *, alone: bool = False) -> None:
        """One store needs it no more; with the last one it is given back. Nothing may be under way.

        Collective; alone: not, since some of the others may be gone.
        """
        self.users -= 1
        if self.users == 0 and self.failure is None:
            self.failure = MpikvError("this communicator of NCCL was given back")
            (self._comm.abort if alone else self._comm.destroy)()

    def _kind(self, array: SpaceArray) -> int:
        return self._constant(DTYPES[array.dtype.name])

    def _constant(self, name: str) -> int:
        return int(getattr(self._nccl.module, f"NCCL_{name}"))

    def _call(self, function: Any, *arguments: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self._nccl.call(function, *arguments)


def padded(n_elems: int, size: int, dtype: np.dtype[Any]) -> int:
    """How many elements an array has whose parts for `size` ranks are equal, and begin at whole cache lines."""
    step = size * max(1, CACHE_LINE_BYTES // dtype.itemsize)
    return -(-n_elems // step) * step
