"""`pushpull(op="adasum")`: beside other rounds, on every path that a key without servers has, against the formula.

Every form of a call in every mode: tests/store_checks.py.
"""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
from adasum_reference import close, random_vectors
from on_workers import full, limit, on, uniform
from store_modes import FEW_ON_DEVICE, HYBRID, SERVERS, Mode

from mpikv import UnsupportedError, optimizers
from mpikv.codecs.compression import make
from mpikv.testing.ranks import RankError

F32 = np.dtype(np.float32)
# How workers are combined is tested with any number of them in tests/unit/collectives/test_collectives.py.
DIRECT = tuple(Mode("dist_sync", workers) for workers in (1, 2, 3))
MESSAGES = (Mode("dist_sync", 4, memory="off"), *(Mode("dist_sync", 3, 0, one) for one in ("ring", "owners")))
HOSTS = (Mode("dist_sync", 3, hosts="aab"), Mode("dist_sync", 5, hosts="aabbc", memory="off"))
ON_DEVICE = tuple(mode for mode in FEW_ON_DEVICE if not mode.servers)
WORKERS_OWN = (*DIRECT, *MESSAGES, *HOSTS)
SHAPES = {"a": (1001,), "b": (3, 5), "c": (5001,), "d": (), "e": (0,)}


@functools.lru_cache
def pushed(W: int, shape: tuple[int, ...], dtype: str, round_: int) -> list[np.ndarray]:
    return [one.reshape(shape) for one in random_vectors(W, int(np.prod(shape)), dtype, round_)]


def bits(store):
    """Of keys whose sums and adasums are made in turn, and which each worker waits for in an order of its own."""
    keys, found = [*SHAPES], []
    dtypes = {key: ("float32", "float64")[i % 2] for i, key in enumerate(keys)}
    store.init(keys, [np.zeros(shape, dtypes[key]) for key, shape in SHAPES.items()])
    arrays = {key: store.zeros(shape, dtypes[key]) for key, shape in SHAPES.items()}
    for round_ in range(2):
        every = {key: pushed(store.num_workers, shape, dtypes[key], round_) for key, shape in SHAPES.items()}
        for asynchronous in (True, False):
            for key, array in arrays.items():
                array[...] = every[key][store.rank]
            order = keys[:: 1 if (store.rank + round_) % 2 else -1]
            if asynchronous:
                calls = [store.pushpull_async(key, arrays[key], priority=store.rank, op="adasum") for key in order]
                for call in reversed(calls):
                    call.wait()
            else:
                store.pushpull(order, [arrays[key] for key in order], op="adasum")
            found += [array.tobytes() for array in (*arrays.values(), store.pull("a"))]
        for key in keys:
            close(arrays[key], every[key])
        store.pushpull(keys, ones := [np.ones_like(array) for array in arrays.values()])
        assert all((one == store.num_workers).all() for one in ones)
    return found


@on(*WORKERS_OWN, *ON_DEVICE)
def test_the_bits_are_the_same_on_every_worker_and_path(mode):
    """Those of a store that sends messages alone; whenever messages come."""
    results = [*mode.run(bits, late=True), *Mode("dist_sync", mode.workers, 0, "ring").run(bits)]
    assert results == [results[0]] * len(results)


@on(DIRECT[2], MESSAGES[2])
def test_a_nan_of_one_worker_is_all_of_the_key_on_all(store):
    store.init(["a", "b"], [np.zeros(5, F32)] * 2)
    values = [np.ones(5, F32), np.ones(5, F32)]
    values[0][store.rank] = np.nan if store.rank == 1 else 1
    store.pushpull(["a", "b"], values, op="adasum")
    assert np.isnan(values[0]).all()
    assert values[1].tolist() == [1] * 5


@pytest.mark.parametrize("kind", ["fp16", "2bit", "topk"])
@on(DIRECT[2], HOSTS[0], Mode("dist_sync", 3, hosts="abc"))
def test_compressed_keys_travel_as_they_are(mode, kind):
    """As other reductions than sums do; sums before and after are compressed as ever."""
    compression = make({"type": kind, "pull": "fp16", "force": True})

    def sums(store):
        store.pushpull("w", value := full(0.5, 500))
        return value.tobytes()

    def body(store):
        store.init("w", full(0, 500))
        found = [sums(store) for _ in range(2)]
        every = pushed(store.num_workers, (500,), "float32", 0)
        for _ in range(2):
            store.pushpull("w", value := every[store.rank].copy(), op="adasum")
            close(value, every)
        close(store.pull("w"), every)
        return [*found, *(sums(store) for _ in range(2))]

    def without(store):
        store.init("w", full(0, 500))
        return [sums(store) for _ in range(4)]

    assert mode.run(body, compression=compression) == mode.run(without, compression=compression)


# --- what is refused


@on(DIRECT[2], MESSAGES[-1], Mode("dist_sync", 3, hosts="abc"), SERVERS[1], HYBRID[0], Mode("dist_async", 2, 1))
def test_what_cannot_be(store, mode, W):
    """Nothing is pushed, and no array is written to."""
    store.init(["f", "h", "b"], [full(0), np.zeros(4, np.float16), full(0)])
    out = full(7)

    def refuses(text, key="f", dtype=np.float32):
        for call in (store.pushpull, store.pushpull_async):
            with pytest.raises(UnsupportedError, match=text):
                call(["b", key], [full(1), full(1, dtype=dtype)], [full(7), out], op="adasum")
        assert uniform(out) == 7

    if not mode.synchronous:
        refuses("an asynchronous store applies every push by itself")
        return
    if mode.servers:
        refuses(r"key 'b' with op='adasum': servers have .*MPIKV_SERVERS_TAKE=0")
    else:
        refuses("op='adasum' of key 'h': .*float32 and float64.* is float16", "h", np.float16)
    store.pushpull(["b", "f"], [full(1), full(1)], [full(7), out])
    assert uniform(out) == W
    out[:] = 7
    store.set_optimizer(optimizers.create("test"))
    refuses("op='adasum' of key 'b': it is updated by an optimizer")


@on(Mode("dist_sync", 3, 2, hosts="abcde", take="0"))
def test_servers_that_have_nothing_of_a_key(store, W):
    every = pushed(W, (30,), "float32", 0)
    store.init("a", full(0, 30))
    store.pushpull("a", value := every[store.rank].copy(), op="adasum")
    close(value, every)


@pytest.mark.parametrize("mode", [DIRECT[2], MESSAGES[-1], HOSTS[0]], ids=["memory", "messages", "hosts"])
@pytest.mark.usefixtures("silent")
def test_another_op_on_another_worker_names_both(mode):
    """Nothing arrives that another op expects: all wait, and the report of each wait names the op of its worker."""
    told, lock = [], threading.Lock()

    def body(store):
        store.init("w", full(0))
        try:
            with limit(store):
                store.pushpull("w", full(1), op="adasum" if store.rank == 1 else "sum")
        except Exception as error:
            with lock:
                told.append(str(error))
            raise

    with pytest.raises(RankError) as failed:
        mode.run(body)
    assert all("waited 0.2 s in pushpull" in text for text in told)
    assert "StallError" in str(failed.value)
    assert any("pushpull(op='adasum') of key 'w', round 1" in text for text in told)
