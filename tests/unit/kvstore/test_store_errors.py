"""Mistakes in calls: what is raised, on which workers, and that nothing was sent or changed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from store_modes import FEW, FEW_ASYNC, FEW_DIST_SYNC, Mode, mode_id

from mpikv import KeyExists, KeyNotInitialized, MpikvError, ShapeMismatch, kv, optimizers
from mpikv.testing.ranks import RankError

EVERY_KIND = pytest.mark.parametrize("mode", FEW, ids=mode_id)
DIST = pytest.mark.parametrize("mode", [*FEW_DIST_SYNC, *FEW_ASYNC], ids=mode_id)


def full(value, *shape, dtype=np.float32):
    return np.full(shape, value, dtype)


@EVERY_KIND
def test_second_init(mode):
    def body(store):
        store.init("a", full(1, 3))
        for key, value in (("a", full(2, 3)), (["b", "a"], [full(2, 3)] * 2), ("a", full(2, 4))):
            with pytest.raises(KeyError, match=r"init: key 'a' is there already") as caught:
                store.init(key, value)
            assert isinstance(caught.value, KeyExists)
        with pytest.raises(KeyError):
            store.broadcast("a", full(5, 3), full(6, 3))
        with pytest.raises(KeyNotInitialized):
            store.pull("b")
        return store.pull("a").tolist()

    assert mode.run(body) == [[1.0] * 3] * mode.workers


@EVERY_KIND
def test_no_copy_and_no_pickle(mode):
    def body(store):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy({"model": [one]})):
            with pytest.raises(TypeError, match=rf"worker {store.rank} .* belongs to its process"):
                attempt(store)
        store.init("w", full(1, 3))
        return store.pull("w").tolist()

    assert mode.run(body) == [[1.0] * 3] * mode.workers


@EVERY_KIND
def test_unknown_keys(mode):
    def body(store):
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
        return out.tolist(), store.pull("known").tolist()

    assert mode.run(body) == [([7.0] * 2, [0.0] * 2)] * mode.workers


@EVERY_KIND
def test_wrong_shapes_and_dtypes(mode):
    def body(store):
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
        return [float(store.pull(key).sum()) for key in "abs"]

    assert mode.run(body) == [[0.0, 0.0, 0.0]] * mode.workers


@pytest.mark.grid
@DIST
@pytest.mark.parametrize("what", ["shape", "dtype", "dimensions"])
def test_init_with_different_values(mode, what):
    def body(store):
        values = {
            "shape": full(0, 2, 3 + (store.rank == 1)),
            "dtype": full(0, 2, 3, dtype=np.float64 if store.rank == 1 else np.float32),
            "dimensions": full(0, 6) if store.rank == 1 else full(0, 2, 3),
        }
        with pytest.raises(ShapeMismatch) as caught:
            store.init("key", values[what])
        assert isinstance(caught.value, ValueError)
        return str(caught.value)

    texts = set(mode.run(body))
    assert len(texts) == 1
    text = texts.pop()
    for part in ("'key'", "worker 0 on localhost", "worker 1 on localhost", "float32 (2, 3)"):
        assert part in text
    assert {"shape": "float32 (2, 4)", "dtype": "float64 (2, 3)", "dimensions": "float32 (6,)"}[what] in text


@EVERY_KIND
def test_calls_on_a_closed_store(mode):
    def body(store):
        store.init("a", full(0, 2))
        store.close()
        store.close()
        calls = {
            "init": lambda: store.init("b", full(0, 2)),
            "push": lambda: store.push("a", full(0, 2)),
            "pull": lambda: store.pull("a"),
            "pushpull": lambda: store.pushpull("a", full(0, 2)),
            "push_async": lambda: store.push_async("a", full(0, 2)),
            "pull_async": lambda: store.pull_async("a"),
            "pushpull_async": lambda: store.pushpull_async("a", full(0, 2)),
            "broadcast": lambda: store.broadcast("b", full(0, 2), full(0, 2)),
            "barrier": store.barrier,
            "_barrier": store._barrier,
            "wait_all": store.wait_all,
            "set_optimizer": lambda: store.set_optimizer("sgd"),
            "set_updater": lambda: store.set_updater(lambda key, pushed, stored: None),
            "save_optimizer_states": lambda: store.save_optimizer_states("never"),
            "load_optimizer_states": lambda: store.load_optimizer_states("never"),
            "set_gradient_compression": lambda: store.set_gradient_compression({"type": "fp16"}),
            "row_sparse_pull": lambda: store.row_sparse_pull("a"),
            "with": store.__enter__,
        }
        for name, call in calls.items():
            with pytest.raises(MpikvError, match="closed") as caught:
                call()
            assert type(caught.value) is MpikvError, name
        return store.rank, store.num_workers, store.type

    assert mode.run(body) == [(rank, mode.workers, mode.name) for rank in range(mode.workers)]


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


@pytest.mark.parametrize("mode", [Mode("local", 1), Mode("dist_sync", 1), Mode("dist_async", 1)], ids=mode_id)
def test_an_exception_in_the_optimizer_reaches_the_only_worker_at_once(mode):
    with pytest.raises((ZeroDivisionError, RankError), match="of the user's"):
        mode.run(pull_with_failing_optimizer, timeout_s=5)


def test_an_exception_in_a_servers_optimizer_ends_the_server():
    with pytest.raises(RankError) as caught:
        Mode("dist_sync", 1, 1).run(pull_with_failing_optimizer, timeout_s=0.5)
    (error,) = (error for error in caught.value.errors.values() if isinstance(error, ZeroDivisionError))
    assert "'a'" in "".join([*map(str, error.args), *getattr(error, "__notes__", [])])
