"""Fake GPUs of the ranks of an MPI job: MPI sends their memory as it is, and ranks open each other's."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.spaces.program import Argument, Operation, Program
from mpikv.testing.fake_gpu import AccessError, FakeGpu, RaceError

REAL = np.dtype(np.float32)
FILL = Program((Argument(REAL, None, 0),), (REAL,), ())
ADD = Program(
    (Argument(REAL, 0, None), Argument(REAL, 1, None), Argument(REAL, None, 2)), (), (Operation("add", REAL, (0, 1)),)
)
N = 1000


def wait_for(gpu, stream) -> None:
    event = gpu.record(stream)
    while not gpu.done(event):
        pass


@pytest.mark.mpi(min_size=2)
def test_mpi_sends_and_receives_arrays(comm) -> None:
    """By DLPack and by the CUDA array interface, from and into the arrays' memory."""
    gpu = FakeGpu(seed=comm.rank)
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent, received = gpu.array(np.full(N, comm.rank, REAL)), gpu.array(np.zeros((N, 2), REAL))
    part = received.reshape(-1)[N:]
    with pytest.raises(RaceError):
        gpu.host_reads(sent.address, sent.nbytes)  # as a transport asks before it sends
    wait_for(gpu, gpu.current_stream)
    gpu.host_reads(sent.address, sent.nbytes)
    comm.Sendrecv(sent, after, recvbuf=part, source=before)
    assert received.get().reshape(-1).tolist() == [0] * N + [before] * N

    class Shown:
        __cuda_array_interface__ = part.__cuda_array_interface__

    comm.Sendrecv(sent, before, recvbuf=Shown(), source=after)
    assert part.get().tolist() == [after] * N
    assert gpu.counts == {"gets": 2, "gets_bytes": 12 * N, "records": 1}


@pytest.mark.mpi(min_size=2)
def test_ranks_add_straight_from_each_others_memory(comm) -> None:
    gpu = FakeGpu(seed=comm.rank, eager=0.2)
    stream, mine, total = gpu.stream(), gpu.allocate(4 * N), gpu.allocate(4 * N)
    gpu.launch(FILL, N, [mine], [comm.rank + 1], stream)
    gpu.launch(FILL, N, [total], [0], stream)
    wait_for(gpu, stream)
    exported = comm.allgather(gpu.export(mine))
    with pytest.raises(AccessError, match="own"):
        gpu.open(exported[comm.rank])
    parts = [mine if rank == comm.rank else gpu.open(one) for rank, one in enumerate(exported)]
    for part in parts:
        gpu.launch(ADD, N, [total, part, total], [], stream)
    host = gpu.pinned(4 * N)
    gpu.copy(host.ctypes.data, total, 4 * N, stream)
    with pytest.raises(AccessError, match="close"):
        gpu.close(parts[comm.rank - 1])
    wait_for(gpu, stream)
    assert (host.view(REAL) == comm.size * (comm.size + 1) / 2).all()
    for part in parts:
        if part != mine:
            gpu.close(part)
    comm.barrier()
    gpu.free(mine)
    gpu.free(total)
    assert gpu.left_bytes == gpu.device.memory_bytes
