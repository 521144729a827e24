"""`pushpull(op=)`: every reduction, in every mode, form and dtype, against NumPy over all workers' arrays."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from foreign_arrays import ForeignDevice
from on_workers import on
from store_modes import DTYPES, FEW_ON_DEVICE, LOCAL, Mode, every_way

from mpikv import KVStore, UnsupportedError, kv, optimizers
from mpikv.errors import MpikvError

F32 = np.dtype(np.float32)
OPS = ("sum", "mean", "min", "max", "prod")
ALLREDUCE = [Mode("dist_sync", 3, 0, a, "off") for a in ("naive", "ring", "halving_doubling")]
DIRECT = [Mode("dist_sync", workers) for workers in (1, 2, 3)]
SERVERS = every_way(Mode("dist_sync", 2, 1), Mode("dist_sync", 3, 2))
MODES = on(*LOCAL, *ALLREDUCE, *DIRECT, *SERVERS, *FEW_ON_DEVICE)
FUNCTIONS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def numbers(worker: int, n: int, dtype) -> np.ndarray:
    """Small whole numbers of either sign, so that every order gives the same bits; of four the sums are even."""
    return np.tile(pattern(worker, np.dtype(dtype)), n // 12 + 1)[:n].copy()


@functools.cache
def pattern(worker: int, dtype: np.dtype) -> np.ndarray:
    n = 12
    found = (np.arange(n) * 5 + worker * 7) % 4 + 1
    return (found if dtype == np.uint8 else found * (-1) ** (np.arange(n) % 3 + worker)).astype(dtype)


def expected(op: str, arrays: list[np.ndarray], workers: int) -> np.ndarray:
    """In float64 or int64, which hold all of this exactly, and then in the dtype."""
    dtype = arrays[0].dtype
    wide = np.int64 if dtype.kind in "iu" else np.float64
    total = functools.reduce(FUNCTIONS[op], [array.astype(wide) for array in arrays])
    if op == "mean":
        sums = np.float32 if dtype.itemsize <= 4 else np.float64
        total = total.astype(sums) / sums(workers)
    return total.astype(dtype)


def same(found, wanted) -> None:
    found = np.asarray(found)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes(), (found, wanted)


def reduced(dtype) -> list[str]:
    return [op for op in OPS if op != "mean" or np.dtype(dtype).kind not in "iu"]


def every_form(store: KVStore, n: int, dtype) -> None:
    """Each reduction of one key, of several, with devices, async, in place and not, again and again."""
    W, me = store.num_workers, store.rank
    mine = [numbers(worker, n, dtype) for worker in range(W)]
    more = [numbers(worker + 50, n, dtype) for worker in range(W)]
    store.init([f"{n}a", f"{n}b"], [np.zeros(n, dtype)] * 2)
    keys = [f"{n}a", f"{n}b"]
    buffers = [np.empty(n, dtype), np.empty(n, dtype)]
    out = np.empty(n, dtype)
    for op in reduced(dtype):
        one, other = expected(op, mine, W), expected(op, more, W)
        for _ in range(3):
            buffers[0][:], buffers[1][:] = mine[me], more[me]
            assert store.pushpull(keys[0], buffers[0], op=op) is None
            same(buffers[0], one)
            same(store.pull(keys[0]), one)
            buffers[0][:] = mine[me]
            store.pushpull(keys[0], buffers[0], out, op=op)
            same(out, one)
            same(buffers[0], mine[me])
            store.pushpull(keys, buffers, op=op)
            same(buffers[0], one)
            same(buffers[1], other)
        store.pushpull_async(keys[0], mine[me].copy(), out, op=op).wait()
        same(out, one)
        store.pushpull(keys[0], [mine[me], more[me]], out, op=op)
        buffers[0][:] = mine[me]
        pairs = [array for worker in range(W) for array in (mine[worker], more[worker])]
        same(out, expected(op, pairs, W))
    store.pushpull(keys[0], buffers[0], out)  # known by its arrays, and the op is another one
    same(out, expected("sum", mine, W))


SIZES = {F32: (1, 7, 40), np.dtype(np.float64): (5, 60_001)}
HOSTS = [
    Mode("dist_sync", len(h), hosts=h, memory=memory) for h in ("aab", "abab", "aabbc") for memory in ("auto", "off")
]


@pytest.mark.grid(1)  # test_store_paths.py has each dtype in each mode, for sums
@on(*LOCAL, *ALLREDUCE, *DIRECT, *SERVERS, *FEW_ON_DEVICE, *HOSTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_reduction(store, dtype):
    for n in SIZES.get(dtype, (40,)):
        every_form(store, n, dtype)


@on(DIRECT[2], ALLREDUCE[1], SERVERS[1])
@pytest.mark.parametrize("op", OPS)
def test_large_values(store, mode, W, op):
    n = 300_001
    wanted = expected(op, [numbers(worker, n, F32) for worker in range(W)], W)
    store.init("w", np.zeros(n, F32))
    shared = store.zeros(n)
    for _ in range(3):
        for array in (shared, np.empty(n, F32)):
            array[:] = numbers(store.rank, n, F32)
            store.pushpull("w", array, op=op)
            same(array, wanted)
    # Through shared memory, unless a worker came so late that the others did not wait.
    assert (store.stats().get("direct_calls", 0) > 0) == (mode is DIRECT[2])


def test_bits_that_depend_on_the_order_are_the_same_everywhere():
    """float16 is reduced in float32 and rounded once; a NaN of any worker is one on all."""

    def body(store):
        random = np.random.default_rng(store.rank)
        values = random.standard_normal(64).astype(np.float16)
        values[store.rank] = np.nan
        store.init("a", np.zeros(64, np.float16))
        found = []
        for op in OPS:
            value = values.copy()
            store.pushpull("a", value, op=op)
            found.append(value.tobytes())
            assert np.isnan(value[: store.num_workers]).all()
            assert not np.isnan(value[store.num_workers :]).any()
        return found

    for mode in (*ALLREDUCE, *DIRECT[1:], *SERVERS):
        results = mode.run(body)
        assert results == [results[0]] * mode.workers


@on(*LOCAL)
def test_arrays_of_devices(store):
    store.init("a", np.zeros(3, F32))
    device = ForeignDevice()
    for op, wanted in (("sum", 4), ("mean", 4), ("min", 1), ("max", 3), ("prod", 3)):
        value = [device.asarray(np.full(3, factor, F32)) for factor in (3, 1)]
        store.pushpull("a", value, op=op)
        assert [one.get().tolist() for one in value] == [[wanted] * 3] * 2


@MODES
def test_what_cannot_be_reduced(store, W):
    store.init(["a", "n", "o"], [np.zeros(3, F32), np.zeros(3, np.int32), np.zeros(3, F32)])
    for call in (store.pushpull, store.pushpull_async):
        for wrong in ("average", "SUM", None, 5, np.add, ["sum"]):
            with pytest.raises(ValueError, match="is no reduction; there are 'sum', 'mean', 'min', 'max', 'prod'"):
                call("a", np.ones(3, F32), op=wrong)
        with pytest.raises(UnsupportedError, match="op='mean' of key 'n': int32 holds whole numbers"):
            call(["a", "n"], [np.ones(3, F32), np.ones(3, np.int32)], op="mean")
    out = np.zeros(3, F32)
    value = np.ones(3, F32)
    for _ in range(3):
        store.pushpull("a", value, out, op="max")
    store.set_optimizer(optimizers.create("test"))
    for call in (store.pushpull, store.pushpull_async):
        for op in OPS[1:]:
            with pytest.raises(UnsupportedError, match=f"op='{op}' of key 'a': it is updated by an optimizer"):
                call("a", value, out, op=op)
    store.pushpull("a", value, out, op="sum")
    assert store.pull("a").tolist() == [1.0 + W] * 3


def test_an_updater_takes_sums():
    with kv.create("local") as store:
        store.init("a", np.zeros(2))
        store.set_updater(lambda key, pushed, stored: None)
        with pytest.raises(UnsupportedError, match="an optimizer or an updater"):
            store.pushpull("a", np.ones(2), op="min")


@on(Mode("dist_async", 2, 0), Mode("dist_async", 2, 1))
def test_an_asynchronous_store_takes_sums(store):
    store.init("a", np.zeros(2))
    for optimizer in ("test", "sgd"):
        with pytest.raises(UnsupportedError, match="an asynchronous store applies every push by itself"):
            store.pushpull("a", np.ones(2), op="mean")
        store.set_optimizer(optimizer)
    store.pushpull("a", np.ones(2), op="sum")


@on(Mode("dist_sync", 3, hosts="abc"), Mode("dist_sync", 3, hosts="aab"))
def test_buckets(store, W):
    """Keys that travel together are reduced in one way."""
    keys, sizes, me = ["a", "b", "c"], (3, 5, 2), store.rank
    store.init(keys, [np.zeros(n, F32) for n in sizes])
    store.strategy.bucket(keys)
    mine = [[numbers(worker + i, n, F32) for i, n in enumerate(sizes)] for worker in range(W)]
    for op in (*OPS, *OPS):
        values = [array.copy() for array in mine[me]]
        store.pushpull(keys, values, op=op)
        for i, value in enumerate(values):
            same(value, expected(op, [arrays[i] for arrays in mine], W))
    store.pushpull_async("a", mine[me][0], np.zeros(3, F32), op="min")
    with pytest.raises(MpikvError, match="other keys of its bucket were pushed with 'min', and all keys of a bucket"):
        store.pushpull("b", mine[me][1], np.zeros(5, F32), op="max")
    for i in (1, 2):
        store.pushpull_async(keys[i], mine[me][i], np.zeros(sizes[i], F32), op="min")
    store.wait_all()
    same(store.pull("b"), expected("min", [arrays[1] for arrays in mine], W))
