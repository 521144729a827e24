"""NCCL's collectives on arrays in a GPU's memory, through CuPy's binding.

A communicator has one rank on each GPU. Its calls are put into a stream; they must come in the same order on all ranks,
and each of them waits on the GPU for those of the others. The chunks of all ranks have equal lengths: the caller pads
the last ones. A process has one communicator for a set of GPUs, which all its stores use (docs/adr/0021).

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
        """Return NCCL's version: a number, 21805 for 2.18.5. All ranks of a communicator need the same."""
        return str(self.call(self.module.get_version))

    def unique_id(self) -> bytes:
        """Return the bytes by which the ranks of a new communicator find each other: one rank sends them to all."""
        return bytes(self.call(self.module.get_unique_id))

    def init(self, size: int, unique_id: bytes, rank: int) -> NcclComm:
        """Make a communicator. Blocks until all ranks have called it, each with its GPU the thread's current one."""
        return NcclComm(self, self.call(self.module.NcclCommunicator, size, unique_id, rank), size, rank)

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function of NCCL. Raises MpikvError where it fails."""
        try:
            return function(*arguments)
        except self.module.NcclError as error:
            raise MpikvError(
                f"NCCL has failed: {error}. Each worker needs a GPU of its own; NCCL_DEBUG=WARN in the environment "
                "makes NCCL report more"
            ) from error


class NcclComm:
    """One rank of a communicator. Calls put work into a stream and return; they raise MpikvError where NCCL fails.

    array: (size * m,), contiguous; chunk i, of m elements, belongs to rank i.
    """

    def __init__(self, nccl: Nccl, comm: Any, size: int, rank: int) -> None:
        self._nccl, self._comm = nccl, comm
        self.size, self.rank = size, rank
        self.failure: MpikvError | None = None
        self.users = 0  # stores of this process
        # The order of rounds over all stores: worker 0 numbers them, and `begun` counts those put into their streams.
        self.numbers, self.begun = itertools.count(), 0

    def all_reduce(self, array: SpaceArray, how: np.ufunc, stream: Any) -> None:
        """Combine all ranks' arrays; all have the result."""
        kind, op = self._kind(array), self._constant(OPS[how])
        self._call(self._comm.allReduce, array.data.ptr, array.data.ptr, array.size, kind, op, stream.ptr)

    def reduce_scatter(self, array: SpaceArray, how: np.ufunc, stream: Any) -> None:
        """Combine all ranks' arrays; each rank's own chunk holds the result, its other chunks may hold anything."""
        kind, op, length = self._kind(array), self._constant(OPS[how]), array.size // self.size
        own = array.data.ptr + self.rank * length * array.itemsize
        self._call(self._comm.reduceScatter, array.data.ptr, own, length, kind, op, stream.ptr)

    def all_gather(self, array: SpaceArray, stream: Any) -> None:
        """Copy every rank's own chunk to every rank. As bytes, whatever the dtype."""
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
        """Raise MpikvError where NCCL reports that a call under way has failed."""
        self._call(self._comm.check_async_error)

    def give_up(self) -> None:
        """Abort a communicator that no store will use."""
        self.fail(MpikvError("this communicator of NCCL was given up"))

    def fail(self, error: MpikvError) -> MpikvError:
        """Abort all calls under way, which would not end by themselves. All calls from now on raise this error."""
        if self.failure is None:
            self.failure = error
            self._comm.abort()
        return self.failure

    def close(self) -> None:
        """End one store's use; the last one destroys the communicator. No call may be under way. Collective."""
        self.users -= 1
        if self.users == 0 and self.failure is None:
            self.failure = MpikvError("this communicator of NCCL was given back")
            self._comm.destroy()

    def _kind(self, array: SpaceArray) -> int:
        return self._constant(DTYPES[array.dtype.name])

    def _constant(self, name: str) -> int:
        return int(getattr(self._nccl.module, f"NCCL_{name}"))

    def _call(self, function: Any, *arguments: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self._nccl.call(function, *arguments)


def padded(n_elems: int, size: int, dtype: np.dtype[Any]) -> int:
    """Return `n_elems` padded so that the chunks of `size` ranks are equal and each begins at a cache line."""
    step = size * max(1, CACHE_LINE_BYTES // dtype.itemsize)
    return -(-n_elems // step) * step
