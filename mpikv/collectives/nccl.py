"""NCCL's collectives on a GPU's memory, as far as a store needs them, and how they are called through CuPy.

A communicator has one rank on each GPU. Its calls are put into a stream; they must come in the same order on all ranks,
and each of them waits on the GPU for those of the others. Parts may differ in length: then a reduce-scatter is one
reduction for each part's owner, and an allgather one broadcast from each, which NCCL runs as one operation.

Cost per rank of n bytes over p ranks: about n(p-1)/p in each half. The order of addition is NCCL's, so bits differ from
those of other algorithms, and may differ with NCCL's version, the number of ranks and how GPUs are connected.
Source: NVIDIA, NCCL User Guide ("Collective Operations", "Group Calls", "Fault Tolerance").
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from mpikv.errors import MpikvError, UnsupportedError

ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
DTYPES = {"int8": "INT8", "uint8": "UINT8", "int32": "INT32", "int64": "INT64", "float32": "FLOAT32"}
DTYPES["float64"] = "FLOAT64"
OPS: dict[np.ufunc, str] = {np.add: "SUM", np.multiply: "PROD", np.maximum: "MAX", np.minimum: "MIN"}


class NcclComm(Protocol):
    """One rank of a communicator. Calls put work into a stream and return; they raise MpikvError where NCCL fails.

    address: of n elements on this rank's GPU. bounds: part i, elements [bounds[i], bounds[i+1]), belongs to rank i.
    """

    def reduce_scatter(
        self, address: int, bounds: Sequence[int], dtype: np.dtype[Any], how: np.ufunc, stream: int
    ) -> None:
        """Combine all ranks' arrays; each rank's own part holds the result, the others anything."""
        ...

    def all_gather(self, address: int, bounds: Sequence[int], itemsize: int, stream: int) -> None:
        """Give every rank every part, of which each rank has its own."""
        ...

    def check(self) -> None:
        """Raise MpikvError where NCCL has noticed that a call under way has failed."""
        ...

    def abort(self) -> None:
        """End all calls under way, whatever the other ranks do. The communicator is of no use afterwards."""
        ...

    def destroy(self) -> None:
        """Give it back. Nothing may be under way."""
        ...


class Nccl(Protocol):
    """What makes communicators. Raises MpikvError where NCCL fails."""

    def version(self) -> str:
        """Which NCCL it is. Ranks of a communicator have the same."""
        ...

    def unique_id(self) -> bytes:
        """What makes the ranks of a new communicator find each other: ID_BYTES bytes, from one of them to all."""
        ...

    def init(self, size: int, unique_id: bytes, rank: int) -> NcclComm:
        """Make a communicator. Collective; blocks until all ranks have called it, each with a GPU of its own."""
        ...


class CupyNccl:
    """NCCL through CuPy, for one GPU. device: which one of those that this process sees.

    Raises UnsupportedError where CuPy or its NCCL is missing.
    """

    def __init__(self, device: int) -> None:
        try:
            self._cupy: Any = importlib.import_module("cupy")
            self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        except ImportError as error:
            raise UnsupportedError(f"NCCL is used through CuPy, which cannot be imported: {error}") from error
        if not getattr(self._nccl, "available", False):
            raise UnsupportedError("this CuPy is built without NCCL; its wheels need the package nvidia-nccl as well")
        self._device = device

    def version(self) -> str:
        """See `Nccl`. CuPy gives a number, 21805 for 2.18.5."""
        return str(self._called(self._nccl.get_version))

    def unique_id(self) -> bytes:
        """See `Nccl`."""
        return np.array(self._called(self._nccl.get_unique_id), np.int8).tobytes()

    def init(self, size: int, unique_id: bytes, rank: int) -> CupyComm:
        """See `Nccl`."""
        self._cupy.cuda.Device(self._device).use()  # of this thread
        numbers = tuple(np.frombuffer(unique_id, np.int8).tolist())
        return CupyComm(self._nccl, self._called(self._nccl.NcclCommunicator, size, numbers, rank), rank)

    def _called(self, call: Any, *arguments: Any) -> Any:
        return _call(self._nccl, call, *arguments)


class CupyComm:
    """See `NcclComm`. nccl: CuPy's module. comm: its NcclCommunicator."""

    def __init__(self, nccl: Any, comm: Any, rank: int) -> None:
        self._nccl, self._comm, self._rank = nccl, comm, rank

    def reduce_scatter(
        self, address: int, bounds: Sequence[int], dtype: np.dtype[Any], how: np.ufunc, stream: int
    ) -> None:
        """See `NcclComm`."""
        kind, op = self._constant(DTYPES[dtype.name]), self._constant(OPS[how])
        lengths = [end - begin for begin, end in pairwise(bounds)]
        at = [address + begin * dtype.itemsize for begin in bounds]
        if len(set(lengths)) == 1:
            self._call(self._comm.reduceScatter, address, at[self._rank], lengths[0], kind, op, stream)
            return
        self._call(self._nccl.groupStart)
        for root, length in enumerate(lengths):
            if length:
                self._call(self._comm.reduce, at[root], at[root], length, kind, op, root, stream)
        self._call(self._nccl.groupEnd)

    def all_gather(self, address: int, bounds: Sequence[int], itemsize: int, stream: int) -> None:
        """See `NcclComm`. As bytes, whatever their dtype."""
        kind = self._constant("INT8")
        lengths = [(end - begin) * itemsize for begin, end in pairwise(bounds)]
        at = [address + begin * itemsize for begin in bounds]
        if len(set(lengths)) == 1:
            self._call(self._comm.allGather, at[self._rank], address, lengths[0], kind, stream)
            return
        self._call(self._nccl.groupStart)
        for root, length in enumerate(lengths):
            if length:
                self._call(self._comm.broadcast, at[root], at[root], length, kind, root, stream)
        self._call(self._nccl.groupEnd)

    def check(self) -> None:
        """See `NcclComm`."""
        self._call(self._comm.check_async_error)

    def abort(self) -> None:
        """See `NcclComm`."""
        self._comm.abort()

    def destroy(self) -> None:
        """See `NcclComm`."""
        self._comm.destroy()

    def _constant(self, name: str) -> int:
        return int(getattr(self._nccl, f"NCCL_{name}"))

    def _call(self, call: Any, *arguments: Any) -> None:
        _call(self._nccl, call, *arguments)


def _call(nccl: Any, call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except nccl.NcclError as error:
        raise MpikvError(
            f"NCCL has failed: {error}. Each worker needs a GPU of its own; NCCL_DEBUG=WARN in the environment makes "
            "NCCL say more"
        ) from error
