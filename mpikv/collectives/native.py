"""MPI's own collectives: Ireduce_scatter and Iallgatherv.

MPI matches its collectives by their order on a communicator, and ranks may push keys in any order. So each key has a
duplicated communicator of its own, made when the key is initialised. That is the cost of this algorithm beyond MPI's
own; MPICH allows about 2000 communicators. Before each round an MPI_Iallgather of 8 bytes compares the workers' labels.
The order of addition is MPI's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.labelled import TRAILER
from mpikv.engine.operation import Steps
from mpikv.errors import UnsupportedError
from mpikv.placement.labels import Comparison
from mpikv.transports.mpi import MpiRequest

# Dtypes that every MPI reduces; float16 and bfloat16 arrive here widened to float32.
REDUCIBLE = {
    np.dtype(np.float32): MPI.FLOAT,
    np.dtype(np.float64): MPI.DOUBLE,
    np.dtype(np.int8): MPI.INT8_T,
    np.dtype(np.uint8): MPI.UINT8_T,
    np.dtype(np.int32): MPI.INT32_T,
    np.dtype(np.int64): MPI.INT64_T,
}

MPI_OPS: dict[np.ufunc, MPI.Op] = {np.add: MPI.SUM, np.minimum: MPI.MIN, np.maximum: MPI.MAX, np.multiply: MPI.PROD}


def of_ranks(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Make a communicator of some ranks of `comm`, numbered in this order. Collective over these, blocks inside MPI."""
    own = comm.Create_group(comm.Get_group().Incl(ranks))
    own.Set_errhandler(MPI.ERRORS_RETURN)
    return own


def duplicate(comm: MPI.Intracomm) -> Steps[MPI.Intracomm]:
    """Make a communicator for one key. Collective, and ranks must call it for their keys in the same order."""
    try:
        own, request = comm.Idup()
        yield MpiRequest(request, own)
    except MPI.Exception as error:
        raise UnsupportedError(
            f"no communicator left for another key ({error}): MPIKV_ALGORITHM=native needs one for each"
        ) from error
    return own


def compare(comm: MPI.Intracomm, comparison: Comparison) -> Steps[None]:
    """Compare the labels of all ranks, in an MPI_Iallgather: MPI's reductions cannot carry digests. Collective."""
    own, digests = np.array([comparison.own], TRAILER), np.empty(comm.Get_size(), TRAILER)
    yield MpiRequest(comm.Iallgather([own, MPI.BYTE], [digests, MPI.BYTE]), (own, digests))
    for digest in digests.tolist():
        comparison.compare(digest)


def reduce_scatter(
    comm: MPI.Intracomm, buf: HostArray, chunks: Sequence[int], combine: np.ufunc = np.add
) -> Steps[None]:
    """MPI_Ireduce_scatter of `buf` (n,); afterwards each rank's own chunk holds the result. Collective."""
    me, datatype = comm.Get_rank(), REDUCIBLE[buf.dtype]
    counts = [chunks[i + 1] - chunks[i] for i in range(comm.Get_size())]
    own = np.empty(counts[me], buf.dtype)
    request: Any = comm.Ireduce_scatter([buf, datatype], [own, datatype], counts, MPI_OPS[combine])
    yield MpiRequest(request, (buf, own))
    buf[chunks[me] : chunks[me + 1]] = own


def allgather(comm: MPI.Intracomm, buf: HostArray, chunks: Sequence[int]) -> Steps[None]:
    """MPI_Iallgatherv in place: chunk i of `buf` is rank i's at the start, on all ranks at the end. Collective."""
    size_bytes = buf.itemsize
    counts = [(chunks[i + 1] - chunks[i]) * size_bytes for i in range(comm.Get_size())]
    offsets = [chunks[i] * size_bytes for i in range(comm.Get_size())]
    target = [buf.view(np.uint8), counts, offsets, MPI.BYTE]
    yield MpiRequest(comm.Iallgatherv(MPI.IN_PLACE, target), buf)
