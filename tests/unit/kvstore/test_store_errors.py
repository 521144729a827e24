"""Mistakes in calls: what is raised, on which workers, and that nothing was sent or changed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from on_workers import on
from store_modes import FEW, FEW_ASYNC, FEW_DIST_SYNC, Mode

from mpikv import KeyExists, KeyNotInitialized, MpikvError, ShapeMismatch, kv, optimizers
from mpikv.testing.ranks import RankError

EVERY_KIND = on(*FEW)
DIST = on(*FEW_DIST_SYNC, *FEW_ASYNC)


def full(value, *shape, dtype=np.float32):
    return np.full(shape, value, dtype)


@EVERY_KIND
def test_second_init(store):
    first = full(1, 3)
    store.init("a", first)
    first[:] = 9  # it is the caller's again
    for key, value in (("a", full(2, 3)), (["b", "a"], [full(2, 3)] * 2), ("a", full(2, 4))):
        with pytest.raises(KeyError, match=r"init: key 'a' is there already") as caught:
            store.init(key, value)
        assert isinstance(caught.value, KeyExists)
    with pytest.raises(KeyError):
        store.broadcast("a", full(5, 3), full(6, 3))
    with pytest.raises(KeyNotInitialized):
        store.pull("b")
    assert store.pull("a").tolist() == [1.0] * 3


@EVERY_KIND
def test_no_copy_and_no_pickle(store):
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy({"model": [one]})):
        with pytest.raises(TypeError, match=rf"worker {store.rank} .* belongs to its process"):
            attempt(store)
    store.init("w", full(1, 3))
    assert store.pull("w").tolist() == [1.0] * 3


@EVERY_KIND
def test_unknown_keys(store):
    store.set_optimizer(optimizers.create("test"))
    with pytest.raises(KeyNotInitialized, match="holds no key"):
        store.pull("a")
    store.init("known", full(0, 2))
    out = full(7, 2)
    for call, values in ((store.push, full(1, 2)), (store.pull, out), (store.pushpull, full(1, 2))):
        with pytest.raises(KeyNotInitialized, match=r"'a'.*worker \d of \d.*'known'") as caught:
            call("a", values)
        assert isinstance(caught.value, KeyError)
        with pytest.raises(KeyNotInitialized, match="'a'"):
            call(["known", "a"], [values, values])
    with pytest.raises(KeyNotInitialized):
        store.pull(["known", "a"])
    store.barrier()
    assert (out.tolist(), store.pull("known").tolist()) == ([7.0] * 2, [0.0] * 2)


@EVERY_KIND
def test_wrong_shapes_and_dtypes(store):
    store.set_optimizer(optimizers.create("test"))
    store.init(["a", "b", "s"], [full(0, 2, 3), full(0, 4), full(0)])
    for wrong in (full(1, 3, 2), full(1, 6), full(1), full(1, 2, 3, 1), full(1, 2, 3, dtype=np.float64)):
        for call in (store.push, store.pushpull):
            with pytest.raises(ShapeMismatch, match=r"'a' is float32 \(2, 3\).*worker \d of \d") as caught:
                call("a", wrong)
            assert isinstance(caught.value, ValueError)
            with pytest.raises(ShapeMismatch):
                call(["b", "a"], [full(1, 4), wrong])
            with pytest.raises(ShapeMismatch):
                call("a", [full(1, 2, 3), wrong])
    for wrong in (full(1, 3, 2), full(1, 6), full(1), [full(1, 2, 3), full(1, 3)]):
        with pytest.raises(ShapeMismatch, match="'a'"):
            store.pull("a", wrong)
        with pytest.raises(ShapeMismatch, match="'a'"):
            store.pushpull("a", full(1, 2, 3), wrong)
    with pytest.raises(ShapeMismatch, match="'s'"):
        store.push("s", full(1, 1))
    store.barrier()
    assert [float(store.pull(key).sum()) for key in "abs"] == [0.0, 0.0, 0.0]


@pytest.mark.grid
@DIST
@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (full(0, 2, 4), "float32 (2, 4)"),
        (full(0, 2, 3, dtype=np.float64), "float64 (2, 3)"),
        (full(0, 6), "float32 (6,)"),
    ],
    ids=["shape", "dtype", "dimensions"],
)
def test_init_with_different_values(mode, odd, text):
    def body(store):
        with pytest.raises(ShapeMismatch) as caught:
            store.init("key", odd if store.rank == 1 else full(0, 2, 3))
        assert isinstance(caught.value, ValueError)
        return str(caught.value)

    (told,) = set(mode.run(body))
    for part in ("'key'", "worker 0 on localhost", "worker 1 on localhost", "float32 (2, 3)", text):
        assert part in told


@EVERY_KIND
def test_calls_on_a_closed_store(store, mode, W):
    two = full(0, 2)
    store.init("a", two)
    store.close()
    store.close()
    for name, *arguments in (
        ("init", "b", two),
        *(("push", "a", two), ("push_async", "a", two), ("pull", "a"), ("pull_async", "a")),
        *(("pushpull", "a", two), ("pushpull_async", "a", two), ("broadcast", "b", two, two), ("row_sparse_pull", "a")),
        *(("barrier",), ("_barrier",), ("wait_all",), ("__enter__",)),
        *(("set_optimizer", "sgd"), ("set_updater", print), ("set_gradient_compression", {"type": "fp16"})),
        *(("save_optimizer_states", "never"), ("load_optimizer_states", "never")),
    ):
        with pytest.raises(MpikvError, match="closed") as caught:
            getattr(store, name)(*arguments)
        assert type(caught.value) is MpikvError, name
    assert (store.num_workers, store.type) == (W, mode.name)
    assert store.rank in range(W)


def test_with_block_closes_and_lets_exceptions_through():
    with kv.create("local") as store:
        store.init("a", full(0, 2))
    with pytest.raises(MpikvError, match="closed"):
        store.pull("a")
    with pytest.raises(ZeroDivisionError), kv.create("local"):
        raise ZeroDivisionError


def pull_with_failing_optimizer(store):
    def fails(weight, grad, state):
        raise ZeroDivisionError("of the user's")

    store.init("a", full(0, 2))
    store.set_optimizer(fails)
    store.push("a", full(1, 2))
    store.pull("a")


@on(Mode("local", 1), Mode("dist_sync", 1), Mode("dist_async", 1))
def test_an_exception_in_the_optimizer_reaches_the_only_worker_at_once(mode):
    with pytest.raises((ZeroDivisionError, RankError), match="of the user's"):
        mode.run(pull_with_failing_optimizer, timeout_s=5)


def test_an_exception_in_a_servers_optimizer_ends_the_server():
    with pytest.raises(RankError) as caught:
        Mode("dist_sync", 1, 1).run(pull_with_failing_optimizer, timeout_s=0.5)
    (error,) = (error for error in caught.value.errors.values() if isinstance(error, ZeroDivisionError))
    assert "'a'" in "".join([*map(str, error.args), *getattr(error, "__notes__", [])])
