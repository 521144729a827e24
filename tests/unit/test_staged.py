"""Keys in device memory over the ways of the host: values, exact counts of copies, page-locked memory, the end."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from store_modes import TEST_TIMEOUT_S

from mpikv import optimizers
from mpikv.arrays import sum_dtype
from mpikv.config import Config
from mpikv.errors import ConfigError, ShapeMismatch
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.pinned import KEPT_BYTES, LEAST_BYTES, Pinned
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores

F32 = np.dtype(np.float32)
PAGE = 4096
# Hosts of the workers, settings: the way on the host that a key goes through.
LAYOUTS: list[tuple[str, dict[str, Any], str]] = [
    ("a", {}, "messages"),
    ("aa", {}, "direct"),
    ("aaa", {}, "direct"),
    ("ab", {}, "messages"),
    ("aab", {}, "hosted"),
    ("aabb", {}, "hosted"),
    ("aaa", {"algorithm": "ring"}, "messages"),
    ("aaa", {"algorithm": "halving_doubling"}, "messages"),
    ("aab", {"shared_memory": "off"}, "messages"),
]
LAYOUT = pytest.mark.parametrize(("hosts", "settings", "path"), LAYOUTS)


def run(hosts: str, body: Callable[[Any, FakeGpu], Any], *, seed: int = 0, **settings: Any) -> list[Any]:
    """`body(store, gpu)` on workers that share a GPU, each with its own view of it."""
    gpu = FakeGpu(seed=seed)
    gpus = [gpu, *(gpu.view() for _ in hosts[1:])]
    config = Config(timeout_s=TEST_TIMEOUT_S, device_path="staged", **settings)
    found = spawn_stores(
        "dist_sync", len(hosts), lambda store: body(store, gpus[store.rank]), hosts=hosts, drivers=gpus, config=config
    )
    for one in gpus:  # every store has given back what it had
        assert one.counts["frees"] == one.counts["allocations"]
    return found


def values_of(rank: int, step: int, n: int, dtype: Any) -> np.ndarray:
    return np.random.default_rng([rank, step]).integers(-8, 8, n).astype(dtype)


def placement_of(store: Any, key: str) -> Any:
    return store.strategy.keys.queues[store.session.infos[key].id].way.placement


@LAYOUT
@pytest.mark.parametrize("n", [0, 1, 1000, 70_001])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.grid(1)
def test_values_in_every_kind_of_call(hosts: str, settings: dict[str, Any], path: str, n: int, seed: int) -> None:
    """As the workers of the host get them, to the bit: pushes one behind the other, pulls late, calls in place."""

    def calls(store: Any, put: Any, get: Any) -> list[bytes]:
        store.init("w", put(np.arange(n, dtype=F32)))
        out, found = put(np.empty(n, F32)), []
        for step in range(3):
            grads = [put(values_of(store.rank, 2 * step + i, n, F32) / 3) for i in range(2)]
            for grad in grads:
                store.push("w", grad)
            store.pull("w", out)
            found.append(get(out).tobytes())
            requests = [store.pushpull_async("w", grad) for grad in grads]
            for request in requests:
                request.wait()
            store.pushpull("w", grads[0], out)
            found += [get(one).tobytes() for one in (*grads, out)]
        return found

    def on_device(store: Any, gpu: FakeGpu) -> Any:
        found = calls(store, gpu.array, lambda array: array.get())
        assert placement_of(store, "w")[0] == "staged"
        assert placement_of(store, "w").host == path
        return found

    config = Config(timeout_s=TEST_TIMEOUT_S, **settings)
    expected = spawn_stores(
        "dist_sync", len(hosts), lambda store: calls(store, np.array, np.array), hosts=hosts, config=config
    )
    assert run(hosts, on_device, seed=seed, **settings) == expected


@LAYOUT
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int64], ids=["float32", "float16", "int64"])
@pytest.mark.grid(1)
def test_the_copies_of_a_round(hosts: str, settings: dict[str, Any], path: str, dtype: Any) -> None:
    """All of this worker's values and its updated part down; the sum of its part, and the others' parts, up."""
    n, dtype = 1003, np.dtype(dtype)

    def body(store: Any, gpu: FakeGpu) -> None:
        def taken() -> dict[str, int]:
            now = store.stats()
            store.barrier()
            names = [f"{kind}{unit}" for kind in ("down", "up") for unit in ("", "_bytes")]
            return {name: now[f"copies_{name}"] for name in names}

        store.init("w", gpu.array(np.zeros(n, dtype)))
        store.barrier()
        first = store.rank == 0
        expected = {"down": 1 * first, "down_bytes": n * dtype.itemsize * first}
        expected |= {"up": 1 * (not first), "up_bytes": n * dtype.itemsize * (not first)}
        assert taken() == expected
        if path != "messages" or dtype != np.int64:
            store.set_optimizer(optimizers.create("test"))
        bounds = placement_of(store, "w").bounds
        begin, end = bounds[store.rank : store.rank + 2]
        others = [size for size in (begin, n - end) if size]
        before = taken()
        for round_ in range(1, 4):
            store.push("w", gpu.array(np.ones(n, dtype)))
            store.pull("w", gpu.array(np.empty(n, dtype)))
            now, wide = taken(), sum_dtype(dtype).itemsize
            assert {name: now[name] - before[name] for name in now} == {
                "down": round_ * (1 + (begin < end)),
                "down_bytes": round_ * (n * wide + (end - begin) * dtype.itemsize),
                "up": round_ * ((begin < end) + len(others)),
                "up_bytes": round_ * ((end - begin) * wide + sum(others) * dtype.itemsize),
            }
        assert (gpu.counts["device_to_host"], gpu.counts["device_to_host_bytes"]) == (now["down"], now["down_bytes"])
        assert (gpu.counts["host_to_device"], gpu.counts["host_to_device_bytes"]) == (now["up"], now["up_bytes"])

    run(hosts, body, **settings)


@LAYOUT
def test_page_locked_memory_is_made_once(hosts: str, settings: dict[str, Any], path: str) -> None:
    def body(store: Any, gpu: FakeGpu) -> None:
        store.init("w", gpu.array(np.zeros(3000, F32)))
        grad = gpu.array(np.ones(3000, F32))
        store.pushpull("w", grad)
        store.barrier()
        made = gpu.counts["pinned"], gpu.counts["registered"]
        for _ in range(3):
            store.pushpull("w", grad)
        assert made == (gpu.counts["pinned"], gpu.counts["registered"])
        # The value and what this worker adds; where ranks share memory, what another one has added up.
        assert made == (2, 0) if path == "messages" else made in ((0, 2), (0, 3))

    run(hosts, body, **settings)


@pytest.mark.parametrize("hosts", ["aa", "aab", "ab"])
def test_many_keys_and_other_owners(hosts: str) -> None:
    """Keys lie side by side in shared memory; an optimizer that needs whole keys changes what each worker owns."""
    sizes = {"a": 1, "b": 5, "c": 2048, "d": 1025, "e": 40_000}

    def body(store: Any, gpu: FakeGpu) -> Any:
        found = []
        store.init([*sizes], [gpu.array(np.ones(n, F32)) for n in sizes.values()])
        for name in ("sgd", "lamb", "sgd"):
            store.set_optimizer(optimizers.create(name, learning_rate=0.5))
            for step in range(2):
                grads = [gpu.array(values_of(store.rank, step, n, F32)) for n in sizes.values()]
                store.pushpull([*sizes], grads)
                found += [grad.get().tobytes() for grad in grads]
        return found

    def on_host(store: Any) -> Any:
        found = []
        store.init([*sizes], [np.ones(n, F32) for n in sizes.values()])
        for name in ("sgd", "lamb", "sgd"):
            store.set_optimizer(optimizers.create(name, learning_rate=0.5))
            for step in range(2):
                grads = [values_of(store.rank, step, n, F32) for n in sizes.values()]
                store.pushpull([*sizes], grads)
                found += [grad.tobytes() for grad in grads]
        return found

    config = Config(timeout_s=TEST_TIMEOUT_S)
    assert run(hosts, body) == spawn_stores("dist_sync", len(hosts), on_host, hosts=hosts, config=config)


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_a_bucket(hosts: str) -> None:
    def body(store: Any, gpu: FakeGpu) -> Any:
        sizes = (30, 31, 50)
        store.init([0, 1, 2], [gpu.array(np.zeros(n, F32)) for n in sizes])
        store.strategy.bucket([0, 1, 2])
        for step in range(3):
            store.push([0, 1, 2], [gpu.array(values_of(store.rank, step, n, F32)) for n in sizes])
        outs = [gpu.array(np.empty(n, F32)) for n in sizes]
        store.pull([0, 1, 2], outs)
        return [out.get().tobytes() for out in outs]

    sums = [sum(values_of(rank, 2, n, F32) for rank in range(len(hosts))).tobytes() for n in (30, 31, 50)]
    assert run(hosts, body) == [sums] * len(hosts)


def test_keys_of_both_kinds_in_one_store() -> None:
    """Each takes arrays of either kind."""

    def body(store: Any, gpu: FakeGpu) -> Any:
        store.init("h", np.zeros(5, F32))
        store.init("d", gpu.array(np.zeros(5, F32)))
        assert [store.session.infos[key].space for key in "hd"] == ["host", "device"]
        for key in "hd":
            store.push(key, np.ones(5, F32))
            store.push(key, gpu.array(np.full(5, 2, F32)))
        there, here = gpu.array(np.zeros(5, F32)), np.zeros(5, F32)
        store.pull("h", there)
        store.pull("d", here)
        store.pushpull("d", np.ones(5, F32), here)
        return there.get().tolist(), here.tolist()

    assert run("aa", body) == [([4.0] * 5, [2.0] * 5)] * 2


def test_labels_are_compared() -> None:
    """Of the learning rate: ConfigError at all workers. And of what gradients are multiplied by: they are brought to
    one unit.
    """

    def body(store: Any, gpu: FakeGpu) -> Any:
        sgd = optimizers.create("sgd", learning_rate=1.0)
        store.init("w", gpu.array(np.zeros(4, F32)))
        store.set_optimizer(sgd)
        sgd.rescale_grad = 0.5 if store.rank else 1.0
        grad = gpu.array(np.full(4, 2.0, F32))
        store.pushpull("w", grad)
        assert grad.get().tolist() == [-3.0] * 4
        store.barrier()
        sgd.learning_rate = 1.0 + store.rank
        store.push("w", gpu.array(np.ones(4, F32)))
        with pytest.raises(ConfigError, match="learning_rate"):
            store.pull("w", grad)
        store.close()
        return store.session.closed

    for hosts in ("aa", "ab"):
        assert run(hosts, body) == [True, True]


def test_a_worker_that_brings_another_kind_than_the_others() -> None:
    def body(store: Any, gpu: FakeGpu) -> None:
        value = np.zeros(2, F32)
        store.init("w", value if store.rank else gpu.array(value))

    with pytest.raises(RankError, match=r"ShapeMismatch: init of key 'w' in different kinds of memory") as caught:
        run("aa", body)
    assert all(isinstance(error, ShapeMismatch) for error in caught.value.errors.values())


def test_the_end_gives_device_memory_back_and_comes_once() -> None:
    held = []

    def body(store: Any, gpu: FakeGpu) -> None:
        store.init("w", gpu.array(np.zeros(1000, F32)))
        store.push("w", gpu.array(np.ones(1000, F32)))
        held.append(store.stats()["device_bytes"])
        store.close()
        store.close()
        assert gpu.counts["frees"] == gpu.counts["allocations"] == 1

    run("aa", body)
    assert all(n_bytes > 0 for n_bytes in held)


def test_what_stats_say_of_the_path() -> None:
    def body(store: Any, gpu: FakeGpu) -> Any:
        stats = store.stats()
        return stats["device_path"], stats["device_path_reasons"]["ipc"]

    assert run("aa", body) == [("staged", "MPIKV_DEVICE_PATH=staged asks for another")] * 2


# --- page-locked memory


def test_copies_between_host_and_device_use_the_same_memory_again() -> None:
    gpu = FakeGpu()
    space = DeviceSpace(gpu)
    for dtype in (F32, np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8)):
        for shape in ((), (0,), (5,), (3, 7)):
            values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            array = space.from_host(values)
            assert array.shape == shape
            assert space.to_host(array).tobytes() == values.tobytes()
            assert space.to_host(array).shape == shape
    assert gpu.counts["pinned"] == 1
    assert space.stats()["copies_up"] == 9
    assert space.stats()["copies_down"] == 18


def test_long_copies_go_in_pieces() -> None:
    gpu = FakeGpu()
    space = DeviceSpace(gpu)
    values = np.arange(KEPT_BYTES // 4 * 2 + 3, dtype=np.int32)
    array = space.from_host(values)
    assert np.array_equal(space.to_host(array), values)
    stats = space.stats()
    assert (stats["copies_up"], stats["copies_down"], stats["copies_up_bytes"]) == (3, 3, values.nbytes)
    assert gpu.counts["pinned"] == 2  # of a whole piece, and of the rest
    space.close()
    space.close()
    assert gpu.left_bytes == FakeGpu().left_bytes


def test_what_is_taken_at_once_is_not_the_same() -> None:
    pinned = Pinned(FakeGpu())
    first, second = pinned.take(10), pinned.take(20)
    assert first.size == second.size == LEAST_BYTES
    assert not np.may_share_memory(first, second)
    pinned.give(first)
    assert pinned.take(30) is first
    assert pinned.take(LEAST_BYTES + 1).size == 2 * LEAST_BYTES
    assert pinned.take(KEPT_BYTES + 1).size == KEPT_BYTES + 1


def test_pages_are_locked_once_and_joined_where_they_touch() -> None:
    gpu = FakeGpu()
    pinned = Pinned(gpu)
    raw = np.zeros(8 * PAGE, np.uint8)
    begin = -raw.__array_interface__["data"][0] % PAGE
    memory = raw[begin : begin + 6 * PAGE]

    def copies(array: np.ndarray) -> None:
        gpu.copy(gpu.allocate(array.nbytes), array.__array_interface__["data"][0], array.nbytes, gpu.stream())
        gpu.synchronize()

    for first, last, registered in ((10, 20, 1), (0, PAGE, 1), (PAGE - 1, PAGE + 1, 2), (3 * PAGE, 4 * PAGE, 3)):
        copies(pinned.lock(memory[first:last]))
        assert gpu.counts["registered"] == registered
    copies(pinned.lock(memory[PAGE : 3 * PAGE + 5]))  # one range of what were two
    copies(memory[: 4 * PAGE])
    assert gpu.counts["registered"] == 4
    assert pinned.lock(memory[:0]).size == 0
    pinned.close()
    with pytest.raises(AssertionError, match="unregistered"):
        copies(memory[:10])
    gpu.register(memory)  # nothing of it is locked any more


def test_an_error_names_what_cannot_be_done() -> None:
    with pytest.raises(ConfigError, match=re.escape("MPIKV_DEVICE_PATH=staged: worker 1 on b uses no GPU")):
        spawn_stores(
            "dist_sync",
            2,
            lambda store: None,
            hosts="ab",
            drivers=[FakeGpu(), None],
            config=Config(device_path="staged"),
        )
