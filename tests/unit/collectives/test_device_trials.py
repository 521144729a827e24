"""NCCL's communicators, which all workers make or none, and stores whose keys NCCL adds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import gpus_of

from mpikv import optimizers
from mpikv.collectives import nccl_setup
from mpikv.collectives.nccl import Nccl, padded
from mpikv.collectives.nccl_setup import make_communicator, why_not
from mpikv.config import Config
from mpikv.errors import MpikvError, StallError
from mpikv.session import waits
from mpikv.testing.ranks import Gathering, RankError, spawn
from mpikv.testing.stores import spawn_stores

F4 = np.dtype(np.float32)


def on_ranks(n: int, body: Callable[[int, Any], Any]) -> list[Any]:
    gathering = Gathering(n)
    return spawn(n, lambda transport: body(transport.rank, gathering.of(transport.rank)))


def make_on_all(gpus: list[Any], cache: Any = None, timeout_s: float = 20.0) -> list[Any]:
    names = [f"worker {rank}" for rank in range(len(gpus))]
    own = [{} for _ in gpus] if cache is None else cache

    def body(rank: int, gather: Any) -> Any:
        gpu = gpus[rank]
        return make_communicator(
            lambda: Nccl(gpu), names, rank, gather, timeout_s, gpus=names, take=gpu.take, cache=own[rank]
        )

    return on_ranks(len(gpus), body)


def test_a_process_has_one_communicator_for_a_set_of_gpus() -> None:
    machine = Machine(3)
    gpus, cache = gpus_of(machine, 3), [{}, {}, {}]
    first = [one.comm for one in make_on_all(gpus, cache)]
    second = [one.comm for one in make_on_all(gpus, cache)]
    assert all(one is other for one, other in zip(first, second, strict=True))
    for comm in first:
        comm.close()
        assert comm.failure is None
        comm.close()
        assert "given back" in str(comm.failure)
    third = [one.comm for one in make_on_all(gpus, cache)]
    assert not any(one is other for one, other in zip(first, third, strict=True))
    cache[1].clear()  # one that does not know it any more: all make another one
    fourth = [one.comm for one in make_on_all(gpus, cache)]
    assert not any(one is other for one, other in zip(third, fourth, strict=True))
    assert make_on_all(gpus[:1]) == [(None, "")]


def broken(gpus: list[Any], how: str, over: threading.Event) -> str:
    cuda = gpus[1].cupy.cuda
    if how == "missing":
        cuda.nccl.available = False
        return "worker 1: this CuPy finds no NCCL: its wheels need the package nvidia-nccl-cu12"
    if how == "version":
        cuda.nccl.get_version = lambda: 21805
        return "worker 0 has NCCL 22707, and worker 1 has NCCL 21805: install the same on all"
    if how == "fails":
        cuda.nccl.NcclCommunicator = mock.Mock(side_effect=cuda.nccl.NcclError(2))
        return "worker 1: NCCL has failed"
    if how == "raises":
        cuda.nccl.get_version = mock.Mock(side_effect=RuntimeError("libnccl.so\ncannot be loaded"))
        return "worker 1: libnccl.so cannot be loaded"
    cuda.nccl.NcclCommunicator = lambda *_: (over.wait(60), mock.Mock())[1]
    return "worker 1: NCCL has made no communicator of the workers within 0.2 s"


@pytest.mark.parametrize("how", ["missing", "version", "fails", "raises", "slow"])
def test_all_have_a_communicator_or_none_has_and_why(how: str) -> None:
    """Also where one raises what nobody has thought of: the others do not wait for it."""
    gpus, over = gpus_of(Machine(2), 2), threading.Event()
    why = broken(gpus, how, over)
    with mock.patch("fake_nccl.WAIT_S", 0.1):
        found = make_on_all(gpus, timeout_s=20.0 if how != "slow" else 0.4)
    over.set()
    assert [one.comm for one in found] == [None, None]
    assert all(one.problem == found[0].problem for one in found)
    assert why in found[0].problem or "worker 0: NCCL has " in found[0].problem  # it waits for the other one
    if how in ("missing", "version", "raises"):
        names = ["worker 0", "worker 1"]
        answers = on_ranks(2, lambda rank, gather: why_not(lambda: Nccl(gpus[rank]), names, rank, gather))
        assert answers == [found[0].problem] * 2
    assert nccl_setup.COMMUNICATORS == {}


def test_lengths_are_padded_to_whole_cache_lines() -> None:
    assert [padded(n, 3, F4) for n in (0, 1, 96, 97)] == [0, 96, 96, 192]
    assert padded(5, 2, np.dtype(np.float64)) == 32


def nccl_stores(body: Callable[[Any, Any], Any], n: int = 2, timeout_s: float = 20.0) -> tuple[list[Any], Any]:
    machine = Machine(n)
    gpus, hosts = gpus_of(machine, n), [str(rank) for rank in range(n)]
    config = Config(timeout_s=timeout_s, device_path="nccl")

    def on_worker(store: Any) -> Any:
        return body(store, gpus[store.rank].cupy)

    return spawn_stores("dist_sync_device", n, on_worker, config=config, gpus=gpus, hosts=hosts), machine


def test_a_key_that_nothing_updates_is_one_allreduce() -> None:
    """One with an optimizer two calls; and one whose optimizer needs all of it a reduction and a broadcast."""

    def body(store: Any, cupy: Any) -> Any:
        calls = []
        store.init("w", cupy.zeros(1000, F4))
        for optimizer in ("", "sgd", "lamb"):
            if optimizer:
                store.set_optimizer(optimizers.create(optimizer, learning_rate=1.0, wd=0.0))
            store.barrier()
            before = cupy.machine.counts["nccl"]
            store.push("w", cupy.asarray(np.full(1000, store.rank + 1.0, F4)))
            store.pull("w", out := cupy.zeros(1000, F4))
            store.barrier()
            calls.append(cupy.machine.counts["nccl"] - before)
        return calls, store.stats()["device_path"], out.get().tobytes()

    found, _ = nccl_stores(body)
    assert found[0] == found[1]
    assert found[0][:2] == ([2, 4, 4], "nccl")  # by both workers


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_added_in_float32_and_sent_back_as_halves(dtype: Any) -> None:
    n, eps = 9600, float(ml_dtypes.finfo(dtype).eps)  # elements; no chunk is padded

    def body(store: Any, cupy: Any) -> Any:
        store.init("w", cupy.zeros(n, dtype))
        store.pushpull("w", array := cupy.asarray(np.full(n, [1, eps / 2, eps / 2][store.rank], dtype)))
        return array.get().tolist()

    found, machine = nccl_stores(body, n=3)
    assert found == [[1 + eps] * n] * 3
    assert machine.counts["nccl_bytes"] == 3 * n * (4 + 2)


def test_the_end_of_a_round_wakes_the_engine() -> None:
    """Which has to ask NCCL for errors, and naps in between."""

    def body(store: Any, cupy: Any) -> None:
        store.init("w", cupy.zeros(4, F4))
        woken = threading.Event()
        store.session.spaces.device._watcher.callback = woken.set  # of the store's stream
        store.pushpull("w", cupy.zeros(4, F4))
        assert woken.wait(60)

    nccl_stores(body)


def test_keys_in_any_order_are_in_one_order_for_nccl() -> None:
    """Each worker pushes in an order of its own; NCCL's calls come alike, or the fake finds it."""

    def body(store: Any, cupy: Any) -> Any:
        keys = list(range(6))
        store.init(keys, [cupy.zeros(1000 + key, F4) for key in keys])
        mine = keys if store.rank == 0 else keys[::-1]
        out = {key: cupy.zeros(1000 + key, F4) for key in keys}
        for _ in range(3):
            for key in mine:
                store.push(key, cupy.asarray(np.full(1000 + key, key + store.rank, F4)))
            for key in mine:
                store.pull(key, out[key])
        return [out[key].get()[0] for key in keys]

    found, machine = nccl_stores(body, n=3)
    assert found == [[3.0 * key + 3 for key in range(6)]] * 3
    assert machine.counts["nccl"] == 3 * 3 * 6


def test_a_worker_that_dies_stalls_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "ANSWER_S", 0.1)

    def body(store: Any, cupy: Any) -> Any:
        store.init("k", cupy.zeros(1000, F4))
        store.pushpull("k", cupy.zeros(1000, F4))
        if store.rank == 1:  # its calls are lost
            comm = store.strategy.ring.nccl
            comm._call = lambda *_: None
        with pytest.raises(StallError, match=r"key 'k'"):
            store.pushpull("k", cupy.zeros(1000, F4))
        with pytest.raises(MpikvError):
            store.pushpull("k", cupy.zeros(1000, F4))
        raise MpikvError("over")  # so that nobody closes

    with pytest.raises(RankError, match="over"):
        nccl_stores(body, timeout_s=1.5)


def test_what_nccl_notices_ends_the_round() -> None:
    def body(store: Any, cupy: Any) -> Any:
        store.init("k", cupy.zeros(1000, F4))
        store.barrier()
        cupy.machine.hold(store.session.spaces.device.stream)
        cupy.machine.nccl_failed = 6
        with pytest.raises(MpikvError, match=r"NCCL has failed: .*NCCL_DEBUG=WARN"):
            store.pushpull("k", cupy.zeros(1000, F4))
        cupy.machine.hold(store.session.spaces.device.stream, held=False)
        raise MpikvError("over")

    with pytest.raises(RankError, match="over"):
        nccl_stores(body)
