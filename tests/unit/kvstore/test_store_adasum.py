"""`pushpull(op="adasum")`: beside other rounds, on every path that a key without servers has, against the formula."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from adasum_reference import adasum, close, random_vectors
from on_workers import full, on, uniform
from store_modes import DTYPES, FEW_ON_DEVICE, HYBRID, LOCAL, SERVERS, Mode

from mpikv import UnsupportedError, optimizers
from mpikv.codecs.compression import make
from mpikv.testing.ranks import RankError

F32 = np.dtype(np.float32)
DIRECT = tuple(Mode("dist_sync", workers) for workers in (1, 2, 3, 5))
MESSAGES = (
    *(Mode("dist_sync", workers, memory="off") for workers in (1, 2, 4, 7, 8)),
    *(Mode("dist_sync", 3, 0, algorithm) for algorithm in ("naive", "ring", "halving_doubling")),
)
HOSTS = tuple(
    Mode("dist_sync", len(h), hosts=h, memory=memory) for h in ("aab", "abab", "aabbc") for memory in ("auto", "off")
)
ON_DEVICE = tuple(mode for mode in FEW_ON_DEVICE if not mode.servers)
WORKERS_OWN = (*DIRECT, *MESSAGES, *HOSTS)
SHAPES = ((), (1,), (2,), (7,), (0,), (3, 5), (60_001,))


def pushed(W: int, shape: tuple[int, ...], dtype: str, round_: int) -> list[np.ndarray]:
    n = int(np.prod(shape))
    return [one.reshape(shape) for one in random_vectors(W, n, dtype, round_)]


@pytest.mark.grid(1)
@on(*LOCAL, *WORKERS_OWN, *ON_DEVICE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form(store, W, shape, dtype):
    """In place and not, of lent arrays and others, asynchronous, pulled, in several rounds and after sums."""
    me = store.rank
    store.init("w", np.zeros(shape, dtype))
    out, wide = np.empty(shape, dtype), np.empty(shape, "float64")
    for round_ in range(3):
        every = pushed(W, shape, dtype, round_)
        value = every[me].copy()
        assert store.pushpull("w", value, op="adasum") is None
        close(value, every)
        close(store.pull("w"), every)
        value[...] = every[me]
        store.pushpull("w", value, out, op="adasum")
        close(out, every)
        assert value.tobytes() == every[me].tobytes()
        store.pushpull("w", value, wide, op="adasum")
        close(wide.astype(dtype), every)
        store.pushpull_async("w", every[me].copy(), out, op="adasum").wait()
        close(out, every)
        store.pushpull_async("w", value, op="adasum").wait()
        close(value, every)
        for op, ones in (("sum", W), ("max", 1), ("sum", W)):
            store.pushpull("w", value := np.ones(shape, dtype), op=op)
            assert (value == ones).all()
        store.push("w", every[me])
        store.pushpull("w", every[me], out, op="adasum")
        close(out, every)


@on(*WORKERS_OWN)
def test_the_bits_are_the_same_on_every_worker_and_path(mode):
    """Those of a store that sends messages alone, with any number of workers."""

    def body(store):
        found = []
        store.init(["a", "b"], [np.zeros(n, F32) for n in (1001, 5)])
        shared = store.zeros(1001)
        for round_ in range(3):
            values = [pushed(store.num_workers, (n,), "float32", round_)[store.rank] for n in (1001, 5)]
            shared[:] = values[0]
            store.pushpull(["a", "b"], values, op="adasum")
            store.pushpull("a", shared, op="adasum")
            found += [*(value.tobytes() for value in values), shared.tobytes(), store.pull("a").tobytes()]
        return found

    results = [*mode.run(body), *Mode("dist_sync", mode.workers, 0, "ring").run(body)]
    assert results == [results[0]] * len(results)


@on(DIRECT[2], MESSAGES[3], *HOSTS, *ON_DEVICE)
def test_keys_in_another_order_on_each_worker(store, W):
    """Each key is combined by itself; workers push and wait in orders of their own, one of them ahead."""
    sizes = dict(zip("abcdefg", (1, 2, 3, 64, 65, 1000, 3001), strict=True))
    store.init(list(sizes), [np.zeros(n, F32) for n in sizes.values()])
    random = np.random.default_rng(store.rank)
    pending = []
    for round_ in range(3):
        for key in random.permutation(list(sizes)).tolist():
            every = pushed(W, (sizes[key],), "float32", round_)
            out = np.empty(sizes[key], F32)
            call = store.pushpull_async(key, every[store.rank], out, priority=store.rank, op="adasum")
            pending.append((call, out, every))
    for i in random.permutation(len(pending)).tolist():
        call, out, every = pending[i]
        call.wait()
        close(out, every)


@on(DIRECT[2], HOSTS[0], MESSAGES[-1], *ON_DEVICE)
def test_messages_that_come_late(mode):
    def body(store):
        store.init(["a", "b"], [np.zeros(n, F32) for n in (3000, 7)])
        for round_ in range(5):
            for key, n in (("a", 3000), ("b", 7)):
                every = pushed(store.num_workers, (n,), "float32", round_)
                store.pushpull(key, value := every[store.rank].copy(), op="adasum")
                close(value, every)
                store.pushpull(key, value := np.ones(n, F32))
                assert uniform(value) == store.num_workers

    mode.run(body, late=True)


@on(DIRECT[2], *LOCAL)
def test_a_workers_devices_are_added_first(store, W):
    every = pushed(2 * W, (9,), "float64", 0)
    mine = [every[2 * store.rank].copy(), every[2 * store.rank + 1].copy()]
    store.init("w", np.zeros(9))
    store.pushpull("w", mine, op="adasum")
    for value in mine:
        close(value, [every[2 * i] + every[2 * i + 1] for i in range(W)])


@on(*LOCAL)
def test_one_worker_has_its_own_value(store):
    store.init("w", np.zeros(3, F32))
    store.pushpull("w", value := np.array([1, np.nan, np.inf], F32), op="adasum")
    assert value.tobytes() == np.array([1, np.nan, np.inf], F32).tobytes()


@on(DIRECT[2], MESSAGES[2])
def test_a_nan_of_one_worker_is_all_of_the_key_on_all(store):
    store.init(["a", "b"], [np.zeros(5, F32)] * 2)
    values = [np.ones(5, F32), np.ones(5, F32)]
    values[0][store.rank] = np.nan if store.rank == 1 else 1
    store.pushpull(["a", "b"], values, op="adasum")
    assert np.isnan(values[0]).all()
    assert values[1].tolist() == [1] * 5


@pytest.mark.parametrize("kind", ["fp16", "2bit", "topk"])
@pytest.mark.parametrize("force", [False, True])
@on(DIRECT[2], HOSTS[0], MESSAGES[-1], Mode("dist_sync", 3, hosts="abc"))
def test_compressed_keys_travel_as_they_are(mode, kind, force):
    """As other reductions than sums do; sums before and after are compressed as ever."""
    compression = make({"type": kind, "pull": "fp16", "force": force})

    def sums(store):
        store.pushpull("w", value := full(0.5, 500))
        return value.tobytes()

    def body(store):
        store.init("w", full(0, 500))
        found = [sums(store) for _ in range(2)]
        for round_ in range(2):
            every = pushed(store.num_workers, (500,), "float32", round_)
            store.pushpull("w", value := every[store.rank].copy(), op="adasum")
            close(value, every)
        close(store.pull("w"), every)
        return [*found, *(sums(store) for _ in range(2))]

    def without(store):
        store.init("w", full(0, 500))
        return [sums(store) for _ in range(4)]

    if force:
        assert mode.run(body, compression=compression) == mode.run(without, compression=compression)
    else:
        mode.run(body, compression=compression)


# --- what is refused


@on(*LOCAL, *DIRECT, MESSAGES[-1])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in (F32, np.float64)], ids=str)
def test_other_dtypes(store, dtype):
    store.init(["a", "b"], [np.zeros(3, F32), np.zeros(3, dtype)])
    for call in (store.pushpull, store.pushpull_async):
        with pytest.raises(UnsupportedError, match=f"op='adasum' of key 'b': .*float32 and float64.* is {dtype}"):
            call(["a", "b"], [np.ones(3, F32), np.ones(3, dtype)], op="adasum")
    store.pushpull("a", value := np.ones(3, F32))
    assert uniform(value) == store.num_workers


@on(*SERVERS, *HYBRID)
def test_keys_on_servers(store, W):
    """Those that servers have a part of, too; nothing was pushed."""
    store.init(["a", "b"], [full(0, 30)] * 2)
    value, out = full(1, 30), full(7, 30)
    for call in (store.pushpull, store.pushpull_async):
        with pytest.raises(UnsupportedError, match=r"key 'a' with op='adasum': servers have .*MPIKV_SERVERS_TAKE=0"):
            call(["a", "b"], [value, value], [out, full(7, 30)], op="adasum")
    assert uniform(out) == 7
    store.pushpull(["a", "b"], [value, value], [out, full(0, 30)])
    assert uniform(out) == W


@on(Mode("dist_sync", 3, 2, hosts="abcde", take="0"))
def test_servers_that_have_nothing_of_a_key(store, W):
    every = pushed(W, (30,), "float32", 0)
    store.init("a", full(0, 30))
    store.pushpull("a", value := every[store.rank].copy(), op="adasum")
    close(value, every)


@on(DIRECT[2])
def test_an_optimizer_takes_sums(store):
    store.init("a", full(0))
    store.pushpull("a", full(1), op="adasum")
    store.set_optimizer(optimizers.create("test"))
    with pytest.raises(UnsupportedError, match="op='adasum' of key 'a': it is updated by an optimizer"):
        store.pushpull("a", full(1), op="adasum")


@on(Mode("dist_async", 2, 1))
def test_an_asynchronous_store_takes_sums(store):
    store.init("a", full(0))
    with pytest.raises(UnsupportedError, match="an asynchronous store applies every push by itself"):
        store.pushpull("a", full(1), op="adasum")


@on(Mode("dist_sync", 3, hosts="abc"))
def test_keys_that_travel_together(store, W):
    store.init(["a", "b", "c"], [full(0), full(0), full(0)])
    store.strategy.bucket(["a", "b"])
    with pytest.raises(UnsupportedError, match="key 'b' with op='adasum': the key travels with others"):
        store.pushpull(["c", "b"], [full(1), full(1)], op="adasum")
    store.pushpull("c", value := full(1), op="adasum")
    assert uniform(value) == 1
    store.pushpull(["a", "b"], [value := full(1), full(1)])
    assert uniform(value) == W


@pytest.mark.parametrize("mode", [DIRECT[2], MESSAGES[-1], HOSTS[0]], ids=["memory", "messages", "hosts"])
def test_another_op_on_another_worker_names_both(mode):
    """Nothing arrives that another op expects: all wait, and the report of each wait names the op of its worker."""
    told, lock = [], threading.Lock()

    def body(store):
        store.init("w", full(0))
        try:
            store.pushpull("w", full(1), op="adasum" if store.rank == 1 else "sum")
        except Exception as error:
            with lock:
                told.append(str(error))
            raise

    with pytest.raises(RankError) as failed:
        mode.run(body, timeout_s=1.0)
    assert all("waited 1 s in pushpull" in text for text in told)
    assert "StallError" in str(failed.value)
    assert any("pushpull(op='adasum') of key 'w', round 1" in text for text in told)


def test_the_reference() -> None:
    """What the paper shows: orthogonal vectors are added, parallel ones averaged."""
    x, y = np.array([2.0, 0.0]), np.array([0.0, 3.0])
    assert adasum([x, y]).tolist() == [2, 3]
    assert adasum([x, 2 * x]).tolist() == [3, 0]
    assert adasum([x, 0 * x]).tolist() == [2, 0]
    assert adasum([x, x, x]).tolist() == [2, 0]
