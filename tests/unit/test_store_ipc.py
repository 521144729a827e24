"""Stores whose workers read each other's device memory: the bits of the host, counts, and no copy between the two."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from store_modes import Mode

from mpikv import optimizers
from mpikv.arrays import SUPPORTED_DTYPES
from mpikv.config import Config
from mpikv.errors import ConfigError, PeerError, StallError
from mpikv.testing.fake_gpu import FakeGpu, FakeGpus
from mpikv.testing.ranks import memories_of
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

F32 = np.dtype(np.float32)
KEYS = {"long": 1001, "empty": 0, "short": 3, "one": 1}
WORKERS = pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])


def values(rank: int, n: int, step: int, dtype: Any = F32) -> np.ndarray:
    random = np.random.default_rng([rank, n, step])
    return (random.standard_normal(n) * 50).astype(dtype)


def every_call(dtype: Any = F32) -> Callable[[Any], Any]:
    """All keys, in every kind of call, many rounds without waiting; all that the store gives."""

    def body(store: Any) -> list[bytes]:
        for key, n in KEYS.items():
            store.init(key, np.full(n, 2 + store.rank).astype(dtype))
        found = [store.pull(key, np.empty(n, dtype)) for key, n in KEYS.items()]
        for step in range(3):
            order = list(KEYS) if store.rank % 2 else list(reversed(KEYS))
            for key in order:
                store.push(key, values(store.rank, KEYS[key], step, dtype))
            outs = {key: np.empty(n, dtype) for key, n in KEYS.items()}
            for key, out in outs.items():
                store.pull(key, out)
            found += outs.values()
            for again in range(3):
                for key in order:
                    store.push(key, values(store.rank, KEYS[key], 10 * again + step, dtype))
            arrays = [values(store.rank, n, 99, dtype) for n in KEYS.values()]
            store.pushpull(list(KEYS), arrays)
            found += arrays
        return [array.tobytes() for array in found if array is not None]

    return body


def same_as_on_the_host(workers: int, body: Callable[[Any], Any]) -> None:
    expected = Mode("dist_sync", workers).run(body)
    assert Mode("dist_sync", workers, device="ipc").run(body) == expected


@WORKERS
def test_every_call(workers: int) -> None:
    same_as_on_the_host(workers, every_call())


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_dtypes(dtype: np.dtype) -> None:
    same_as_on_the_host(3, every_call(dtype))


def updated(name: str) -> Callable[[Any], Any]:
    def body(store: Any) -> list[bytes]:
        for key, n in KEYS.items():
            store.init(key, values(0, n, 7))
        optimizer = optimizers.create(name)
        store.set_optimizer(optimizer)
        found = []
        for step in range(4):
            if step == 2:
                optimizer.rescale_grad = 1.0 + store.rank  # labels differ in their factor from now on
            for key, n in KEYS.items():
                store.push(key, values(store.rank, n, step))
                store.pull(key, out := np.empty(n, F32))
                found.append(out.tobytes())
        return found

    return body


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_optimizers(name: str) -> None:
    """lamb has one owner for each key."""
    same_as_on_the_host(3, updated(name))


@pytest.mark.parametrize("op", ["mean", "min", "max", "prod"])
def test_reductions(op: str) -> None:
    def body(store: Any) -> list[bytes]:
        store.init("k", np.zeros(77, F32))
        found = []
        for step in range(3):
            array = values(store.rank, 77, step)
            store.pushpull("k", array, op=op)
            found.append(array.tobytes())
        return found

    same_as_on_the_host(3, body)


# --- without DeviceStore: arrays of the store's own


def run(gpus: list[FakeGpu], body: Callable[[Any, FakeGpu], Any], **config: Any) -> list[Any]:
    return spawn_stores(
        "dist_sync",
        len(gpus),
        lambda store: body(store, gpus[store.rank]),
        config=Config(timeout_s=TEST_TIMEOUT_S, device_path="ipc", **config),
        drivers=gpus,
    )


def views(workers: int, seed: int = 0, gpus: int = 1) -> list[FakeGpu]:
    """Each worker's own, of so many GPUs."""
    machine = FakeGpus(gpus, seed=seed, eager=(seed % 3) / 4)
    return [machine.view()[rank % gpus] for rank in range(workers)]


@pytest.mark.parametrize(
    ("workers", "gpus", "dtype"),
    [(workers, gpus, "float32") for workers in (1, 2, 3, 5) for gpus in (1, 2)]
    + [(1, 1, "float16"), (3, 2, "float16"), (3, 1, "bfloat16")],
)
def test_blocking_calls_add_in_the_stores_arrays(workers: int, gpus: int, dtype: str) -> None:
    """In place, and into another array: no copy of what is pushed, none of a result but into other arrays."""
    n, kind = 60 * workers, np.dtype(dtype)

    def body(store: Any, gpu: FakeGpu) -> list[Any]:
        first, second = store.zeros([(n,), (n,)], dtype=kind, device="gpu")
        store.init("k", first)
        found, counted = [], []
        for step in range(4):
            for value, out in ((first, None), (first, second)):
                value.set(values(store.rank, n, step, kind))
                before = dict(gpu.counts)
                store.pushpull("k", value, out)
                counted.append({name: count - before.get(name, 0) for name, count in gpu.counts.items()})
                result = value if out is None else out
                found.append(result.get().tobytes())
                if out is not None:
                    assert value.get().tobytes() == values(store.rank, n, step, kind).tobytes()
        return [found, counted[2:]]

    def on_host(store: Any) -> list[bytes]:
        store.init("k", np.zeros(n, kind))
        found = []
        for step in range(4):
            for _ in range(2):
                array = values(store.rank, n, step, kind)
                store.pushpull("k", array)
                found.append(array.tobytes())
        return found

    results = run(views(workers, gpus=gpus), body)
    assert [found for found, _ in results] == Mode("dist_sync", workers).run(on_host)
    for rank, (_, counted) in enumerate(results):
        for counts in counted:
            assert not any(count for name, count in counts.items() if "host" in name), counts
        if workers > 1:
            elsewhere = sum(place % gpus != rank % gpus for place in range(workers))
            rounded = int(kind != F32)  # the sum's part goes into the value by a kernel instead of a copy
            for counts in counted:  # the sum; its part into the value, those of the others, the value into the result
                assert counts["launches"] == 1 + rounded
                assert counts.get("peer", 0) == elsewhere
                assert counts["device_to_device"] == 1 - rounded + (workers - 1 - elsewhere) + 1


@pytest.mark.parametrize("seed", range(6))
def test_users_who_wait_for_nothing(seed: int) -> None:
    """Arrays are written in the caller's streams, and written again behind calls that have returned."""
    workers, n = 2 + seed % 3, 300

    def body(store: Any, gpu: FakeGpu) -> list[bytes]:
        found = []
        with gpu.user_stream():
            own = store.zeros((n,), device="gpu")
            store.init(["a", "b"], [gpu.array(np.zeros(n, F32)) for _ in range(2)])
            for step in range(8):
                own[:] = gpu.array(values(store.rank, n, step))
                other = gpu.array(values(store.rank, n, 50 + step))
                store.push("b", other)
                other[:] = own
                store.pushpull("a", own)
                kept = own.copy()
                store.pull("b", other)
                found += [kept, other.copy()]
            return [array.get().tobytes() for array in found]

    def on_host(store: Any) -> list[bytes]:
        store.init(["a", "b"], [np.zeros(n, F32) for _ in range(2)])
        found = []
        for step in range(8):
            for key, shift in (("a", 0), ("b", 50)):
                array = values(store.rank, n, shift + step)
                store.pushpull(key, array)
                found.append(array.tobytes())
        return found

    assert run(views(workers, seed), body) == Mode("dist_sync", workers).run(on_host)


def test_all_memory_is_given_back() -> None:
    gpus = views(3)

    def body(store: Any, gpu: FakeGpu) -> None:
        store.init("k", gpu.array(np.zeros(100, F32)))
        for step in range(3):
            store.push("k", gpu.array(values(store.rank, 100, step)))
        assert store.stats()["device_path"] == "ipc"

    run(gpus, body)
    assert [gpu.counts["allocations"] - gpu.counts["frees"] for gpu in gpus] == [0] * 3
    assert gpus[0].left_bytes == gpus[0].device.memory_bytes


# --- workers that do not do the same


def test_a_worker_that_is_late() -> None:
    """The others are told, and the round is done when it comes."""
    told = threading.Event()

    def body(store: Any, gpu: FakeGpu) -> list[float]:
        store.init("k", gpu.array(np.zeros(3, F32)))
        if store.rank == 1:
            assert told.wait(TEST_TIMEOUT_S)
        store.push("k", gpu.array(np.ones(3, F32)))
        if store.rank == 0:
            with pytest.raises(StallError, match=r"key 'k', round 1.*Not arrived: worker 1"):
                store.pull_async("k", gpu.array(np.zeros(3, F32))).wait(0.2)
            told.set()
        out = gpu.array(np.zeros(3, F32))
        store.pull("k", out)
        return out.get().tolist()

    assert run(views(3), body) == [[3.0] * 3] * 3


def test_unequal_pushes_at_the_end() -> None:
    """The worker that pushed more is told; the others close in peace, and nobody frees what others read."""

    def body(store: Any, gpu: FakeGpu) -> str:
        store.init("k", gpu.array(np.zeros(500, F32)))
        for _ in range(3 if store.rank == 1 else 2):
            store.push("k", gpu.array(np.ones(500, F32)))
        try:
            store.close()
        except PeerError as error:
            return str(error)
        return "closed"

    first, second, third = run(views(3), body)
    assert (first, third) == ("closed", "closed")
    assert "'k' was pushed 3 times here and 2 times by worker 0" in second


def test_different_learning_rates() -> None:
    """All workers get the same error, and the old value."""

    def body(store: Any, gpu: FakeGpu) -> list[Any]:
        store.init("k", gpu.array(np.full(30, 5, F32)))
        optimizer = optimizers.create("sgd", learning_rate=0.1)
        store.set_optimizer(optimizer)
        if store.rank == 2:
            optimizer.learning_rate = 0.2
        store.push("k", gpu.array(np.ones(30, F32)))
        out = gpu.array(np.zeros(30, F32))
        with pytest.raises(ConfigError, match="learning_rate") as error:
            store.pull("k", out)
        with contextlib.suppress(ConfigError):
            store.close()
        return [str(error.value), out.get().tolist()]

    (text, value), *others = run(views(3), body)
    assert value == [5.0] * 30
    assert others == [[text, value]] * 2


@pytest.mark.parametrize("shared", [True, False])
def test_fewer_workers(shared: bool) -> None:
    """Who stays closes the memory of who has gone; without memory that they share the others go the staged way."""
    stay = (0, 2)
    memories = memories_of(["localhost"] * 2) if shared else [None] * 2
    gpus = views(3)

    def body(store: Any, gpu: FakeGpu) -> Any:
        me = store.rank

        def rounds(steps: range) -> list[Any]:
            found = []
            for step in steps:
                array = gpu.array(np.full(100, me + step, F32))
                store.push("k", array)
                store.pull("k", array)
                found.append(array.get()[50])
            return found

        store.init("k", gpu.array(np.zeros(100, F32)))
        found = rounds(range(2))
        store.barrier()
        if me not in stay:
            store.session.closed = True  # as if it had died
            store.session.abandon()
            store.strategy.keys.hosts.close()  # CUDA would, at the process's end
            return found
        members = store.session.members.only(stay)
        store.strategy.keys.regroup(members, memories[stay.index(me)])
        return found + rounds(range(2, 4)) + [store.stats()["device_path"]]

    path = "ipc" if shared else "staged"
    assert run(gpus, body) == [[3, 6, 6, 8, path], [3, 6], [3, 6, 6, 8, path]]
    assert [gpus[rank].counts["allocations"] - gpus[rank].counts["frees"] for rank in stay] == [0, 0]
