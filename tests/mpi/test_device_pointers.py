"""The way by CUDA-aware MPI, with a fake GPU's memory: its addresses go through MPI as those of a GPU do."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from device_rounds import FIRST, Case, Side, run_rounds
from mpi4py import MPI
from mpi_stores import TIMEOUT_S, on_workers

from mpikv import Config, optimizers, spec
from mpikv.assembly import assemble
from mpikv.collectives.select import ALGORITHMS
from mpikv.placement import Members
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.device_array import DeviceArray
from mpikv.spaces.named import Spaces
from mpikv.testing.device_transport import DeviceTransport
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.transports import mpi

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)


SIZES = {"long": 40_001, "empty": 0, "short": 3, "one": 1}


def nobody() -> BaseException:
    return AssertionError("a message did not arrive within 20 s")


@pytest.fixture
def transport(comm):
    transport = mpi.open_transport(comm, 20, nobody)
    yield transport
    transport.close()


def check(transport, cases: Sequence[Case], seed: int) -> None:
    """The bits of host memory, and no copy of the store's between host and device."""
    gpu = FakeGpu(seed=seed)
    side = Side(gpu)
    checked = DeviceTransport(transport, gpu, view=lambda array: array)
    found = run_rounds("mpi", checked, side, cases)
    assert side.crossings == {"host_to_device": 0, "device_to_host": 0}
    assert found == run_rounds("messages", transport, Side(), cases)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_bits_of_host_memory(transport, algorithm: str) -> None:
    cases = [Case(algorithm, n) for n in (0, 1, 5, 1001, 100_003)] + [Case(algorithm, 37, dtype) for dtype in DTYPES]
    check(transport, cases, transport.rank)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hosts(transport, algorithm: str) -> None:
    """As if every other rank were on another host."""
    transport.hosts = tuple("ab"[rank % 2] for rank in range(transport.size))
    check(transport, [Case(algorithm, n) for n in (0, 1, 41, 100_003)], transport.rank)


def test_factors(transport) -> None:
    p = transport.size
    different = tuple(FIRST._replace(factor=1 / (rank + 3)) for rank in range(p))
    wrong = tuple(FIRST._replace(text=f"{rank}") for rank in range(p))
    labels = [(FIRST,) * p, different, wrong, (FIRST,) * p]
    check(transport, [Case(algorithm, 1001, labels=labels) for algorithm in ALGORITHMS], transport.rank)


def every_call(store, made=np.array, read=np.asarray) -> list[bytes]:
    """Calls of all kinds, in orders that differ, with an optimizer and workers' own factors.

    made: puts values where the arrays of the calls are. read: brings them from there.
    """
    for key, n in SIZES.items():
        store.init(key, made(np.full(n, store.rank + 1, np.float32)))
    found: list[bytes] = []
    for step in range(3):
        random = np.random.default_rng([store.rank, step])
        arrays = {key: made(random.standard_normal(n, np.float32)) for key, n in SIZES.items()}
        for key in random.permutation(list(SIZES)).tolist():
            store.push(key, arrays[key])
        outs = [made(np.empty(n, np.float32)) for n in SIZES.values()]
        store.pull(list(SIZES), outs)
        store.pushpull(list(SIZES), list(arrays.values()))
        found += [read(array).tobytes() for array in (*outs, *arrays.values())]
        if step == 0:
            optimizer = optimizers.create("adam")
            store.set_optimizer(optimizer)
        if step == 1:
            optimizer.rescale_grad = 1 / (store.rank + 3)
    return found


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_a_store(comm, transport, algorithm: str) -> None:
    """All of it: the bits of a store in host memory."""
    gpu = FakeGpu(seed=transport.rank)
    config = Config(timeout_s=TIMEOUT_S, algorithm=algorithm, shared_memory="off")
    members = Members(transport.hosts, tuple(range(transport.size)), config=config, device_path="mpi")
    fatal: list[BaseException] = []
    store = assemble(
        "dist_sync",
        spec.parse("dist_sync"),
        DeviceTransport(transport, gpu, view=lambda array: array),
        members,
        threaded=True,
        on_fatal=fatal.append,
        spaces=Spaces(device=DeviceSpace(gpu)),
    )
    found = every_call(store, gpu.array, lambda array: array.get())
    store.close()
    assert not fatal
    assert (gpu.counts["host_to_device"], gpu.counts["device_to_host"]) == (0, 0)  # `array` and `get` count apart
    assert gpu.counts["device_to_device"] > 0  # keys are there
    expected = on_workers(comm, "dist_sync", every_call, algorithm=algorithm, shared_memory="off")
    assert found == expected[transport.rank]


@pytest.mark.mpi(min_size=2)
def test_a_store_with_a_server(comm, transport) -> None:
    """The server receives into host memory what MPI takes from a GPU's; only short values are copied first."""
    gpu, server = FakeGpu(seed=transport.rank), transport.size - 1
    config = Config(timeout_s=TIMEOUT_S, shared_memory="off")
    members = Members(transport.hosts, tuple(range(server)), (server,), config=config, device_path="mpi")
    fatal: list[BaseException] = []
    store = assemble(
        "dist_sync",
        spec.parse("dist_sync"),
        DeviceTransport(transport, gpu, view=lambda array: array),
        members,
        threaded=True,
        on_fatal=fatal.append,
        spaces=Spaces(device=DeviceSpace(gpu)),
    )
    found = None
    if store is not None:
        found = every_call(store, gpu.array, lambda array: array.get())
        store.close()
        first = (SIZES["long"] + SIZES["short"] + SIZES["one"]) * 4 * (store.rank == 0)  # worker 0 sends first values
        short = 2 * 3 * (SIZES["short"] + SIZES["one"]) * 4  # two pushes and two pulls in each of three steps
        assert (gpu.counts["device_to_host_bytes"], gpu.counts["host_to_device_bytes"]) == (first + short, short)
    assert not fatal
    expected = on_workers(comm, "dist_sync", every_call, num_servers=1, shared_memory="off")
    assert found is None or found == expected[transport.rank]


@pytest.mark.parametrize("n_bytes", [(1 << 31) - 1, 1 << 31, (5 << 30) + 7])
def test_more_bytes_than_an_int_counts(transport, n_bytes: int) -> None:
    """MPI takes the address and the length; nothing is sent, so nothing has to be there."""
    array = DeviceSpace(FakeGpu()).empty(1, np.dtype(np.uint8))
    long = DeviceArray(array.space, array.memory, 0, (n_bytes,), array.dtype)
    for call in (transport.comm.Isend, transport.comm.Irecv):
        mpi.start(call, long, MPI.PROC_NULL, 1).request.Wait()
