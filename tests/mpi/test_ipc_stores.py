"""Stores of an MPI job whose ranks read each other's memory on fake GPUs: the trial, the bits, and the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpikv import Config, kv, optimizers, spec
from mpikv.assembly import assemble
from mpikv.hostmemory import segment, waker
from mpikv.placement import Members
from mpikv.processes import Processes
from mpikv.spaces import pool
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import Spaces
from mpikv.spaces.peers import why_not_shared
from mpikv.testing.fake_gpu import FakeGpu

CONFIG = Config(timeout_s=30.0, device_path="ipc")
N = 50_001
F32 = np.float32


def device_store(comm: Any, gpu: FakeGpu, tried: list[str]) -> Any:
    """As `kv.create` makes one, with this GPU. tried: what the trial says."""
    processes = Processes(comm, CONFIG, "the test")
    transport = processes.transport
    tried.append(why_not_shared(gpu, comm.rank, processes.gather_here))
    members = Members(transport.hosts, tuple(range(comm.size)), config=CONFIG, device_path="ipc")
    memory = segment.on_all_hosts(processes.memory(), processes.gather) if members.shares_memory else None

    def failed(error: BaseException) -> None:
        raise error

    return assemble(
        "dist_sync",
        spec.parse("dist_sync"),
        transport,
        members,
        threaded=processes.threaded,
        on_fatal=failed,
        memory=memory,
        connect=lambda _links: waker.stand_by(processes.gather_here),
        spaces=Spaces(device=DeviceSpace(gpu)),
    )


def values(rank: int, step: int) -> Any:
    return (np.random.default_rng([rank, step]).standard_normal(N) * 50).astype(F32)


def exchange(store: Any, gpu: FakeGpu | None) -> list[bytes]:
    """Pushes, pulls and blocking calls, without and with an optimizer. gpu: None: with arrays in host memory."""

    def array(value: Any) -> Any:
        return value.copy() if gpu is None else gpu.array(value)

    own = store.zeros(N, device=None if gpu is None else "gpu")
    store.init(["a", "b"], [array(np.full(N, store.rank, F32)) for _ in range(2)])
    found = []
    for step in range(6):
        if step == 3:
            store.set_optimizer(optimizers.create("adam"))
        for key in ("a", "b") if store.rank % 2 else ("b", "a"):
            store.push(key, array(values(store.rank, step)))
        out = array(np.zeros(N, F32))
        store.pull("b", out)
        own[:] = array(values(store.rank, 10 + step))
        store.pushpull("a", own)
        found += [out, own.copy()]
    return [one.tobytes() if gpu is None else one.get().tobytes() for one in found]


@pytest.mark.mpi(min_size=2)
def test_ranks_read_each_others_memory(comm, monkeypatch) -> None:
    monkeypatch.setattr(pool, "CHUNK_BYTES", 1 << 20)
    gpu, tried = FakeGpu(seed=comm.rank, eager=0.1), []
    with device_store(comm, gpu, tried) as store:
        found = exchange(store, gpu)
        stats = store.stats()
    assert tried == [""]
    assert stats["copies_down"] == stats["copies_up"] == 0
    assert (stats["device_path"], stats["device_path_reasons"]) == ("ipc", {})
    assert gpu.counts["opens"] > comm.size - 1  # those of the trial, and chunks of all others
    assert gpu.counts["allocations"] == gpu.counts["frees"]
    with kv.create("dist_sync", comm=comm, config=Config(timeout_s=30.0)) as store:
        assert found == exchange(store, None)
    assert all(bits == found for bits in comm.allgather(found))
