"""Optimizers where the owner is: against a local store that is pushed the summed gradient, exactly."""

from __future__ import annotations

import os
import tempfile
import threading

import numpy as np
import pytest
from store_modes import BOUND, FEW, FEW_ASYNC, FEW_DIST_SYNC, Mode, mode_id

from mpikv import ConfigError, MpikvError, UnsupportedError, kv, optimizers

SHAPES = {"s": (), "a": (BOUND - 1,), "b": (5, 7), "c": (64, 3), "empty": (0, 2)}
ROUNDS = 4
MODES = (
    Mode("dist_sync", 2, 0, "naive"),
    Mode("dist_sync", 3, 0, "ring"),
    Mode("dist_sync", 5, 0, "halving_doubling"),
    Mode("dist_sync", 1, 1),
    Mode("dist_sync", 3, 2),
    Mode("dist_sync", 2, 3),
    Mode("dist_async", 1, 0),
    Mode("dist_async", 1, 2),
)


def own_rule(weight, grad, state):
    """A user's function, with a state of its own."""
    total = grad if state is None else state + grad
    weight -= 0.25 * total
    return total


OPTIMIZERS = {
    "sgd": lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": lambda: optimizers.create("adam", learning_rate=0.05),
    "rmsprop": lambda: optimizers.create("rmsprop", learning_rate=0.05, centered=True),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.05),
    "lars": lambda: optimizers.create("lars", learning_rate=0.05, momentum=0.9),
    "callable": lambda: own_rule,
    "multi_precision": lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.5, multi_precision=True),
    "schedule": lambda: optimizers.create("sgd", lr_scheduler=optimizers.FactorScheduler(step=1, factor=0.5)),
}


def gradient(key, worker, round_):
    n = int(np.prod(SHAPES[key], dtype=int))
    return ((np.arange(n) * 5 + 3 * worker + round_) % 7 - 3).reshape(SHAPES[key])


def local_values(optimizer, workers, dtype, *, set_first):
    with kv.create("local") as store:
        if set_first:
            store.set_optimizer(optimizer())
        for key, shape in SHAPES.items():
            store.init(key, np.full(shape, 2, dtype))
        if not set_first:
            store.set_optimizer(optimizer())
        for round_ in range(ROUNDS):
            for key in SHAPES:
                store.push(key, sum(gradient(key, worker, round_) for worker in range(workers)).astype(dtype))
        return [store.pull(key).tobytes() for key in SHAPES]


@pytest.mark.grid(1)
@pytest.mark.parametrize("set_first", [True, False], ids=["before_init", "after_init"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_as_local_on_the_summed_gradient(name, set_first):
    dtype = np.dtype(np.float16 if name == "multi_precision" else np.float32)
    for mode in MODES:

        def body(store):
            if set_first:
                store.set_optimizer(OPTIMIZERS[name]())
            for key, shape in SHAPES.items():
                store.init(key, np.full(shape, 2, dtype))
            if not set_first:
                store.set_optimizer(OPTIMIZERS[name]())
            for round_ in range(ROUNDS):
                for key in SHAPES:
                    store.push(key, gradient(key, store.rank, round_).astype(dtype))
            return [store.pull(key).tobytes() for key in SHAPES]

        expected = local_values(OPTIMIZERS[name], mode.workers, dtype, set_first=set_first)
        assert mode.run(body) == [expected] * mode.workers, mode


@pytest.mark.parametrize("mode", [Mode("local", 1), *FEW_DIST_SYNC], ids=mode_id)
def test_values_stay_and_states_start_anew_with_another_optimizer(mode):
    """Rounds before it are done without, and with the old one; keys that were cut are gathered for LAMB."""

    def body(store):
        store.init("w", np.zeros(4 * BOUND, np.float32))
        g = np.ones(4 * BOUND, np.float32)
        found = []
        store.push("w", g)
        for optimizer in (
            optimizers.create("test"),
            optimizers.create("sgd", learning_rate=1.0, momentum=0.5),
            optimizers.create("sgd", learning_rate=1.0, momentum=0.5),
            optimizers.create("lamb", learning_rate=0.1),
            optimizers.create("sgd", learning_rate=1.0),
        ):
            store.set_optimizer(optimizer)
            before = store.pull("w")
            for _ in range(2):
                store.push("w", g)
            found.append(np.unique(store.pull("w") - before))
        return found

    W = mode.workers
    results = mode.run(body, late=True)
    for found in results:
        assert [steps.tolist() for steps in found[:3]] == [[2 * W], [-2.5 * W], [-2.5 * W]]
        assert len(found[3]) == 1
        assert found[3][0] < 0
        assert found[4].tolist() == pytest.approx([-2.0 * W], abs=1e-5)
        assert found[3].tobytes() == results[0][3].tobytes()


@pytest.mark.parametrize("mode", FEW, ids=mode_id)
def test_optimizers_of_some_keys(mode):
    def body(store):
        store.init(["a", "b", "c"], [np.zeros(3 * BOUND, np.float32)] * 3)
        store.set_optimizer(optimizers.create("test"))
        store.strategy.set_optimizer(optimizers.create("test", rescale_grad=10), ["b"])
        store.strategy.set_optimizer(optimizers.create("test", rescale_grad=100), ["c"])
        for key in "abc":
            store.push(key, np.ones(3 * BOUND, np.float32))
        store.barrier()
        first = [np.unique(store.pull(key)).tolist() for key in "abc"]
        store.barrier()
        store.strategy.set_optimizer(optimizers.create("test", rescale_grad=1000), ["c"])
        store.set_optimizer(optimizers.create("test", rescale_grad=5))
        for key in "abc":
            store.push(key, np.ones(3 * BOUND, np.float32))
        store.barrier()
        return first, [np.unique(store.pull(key)).tolist() for key in "abc"]

    W = mode.workers
    expected = ([[W], [10 * W], [100 * W]], [[6 * W], [20 * W], [1100 * W]])
    assert mode.run(body) == [expected] * W


@pytest.mark.parametrize("mode", [*FEW_DIST_SYNC, *FEW_ASYNC], ids=mode_id)
def test_different_optimizers_are_an_error_on_every_worker(mode):
    makers = [
        lambda rank: optimizers.create("sgd", learning_rate=0.1 * (1 + rank)),
        lambda rank: optimizers.create("sgd" if rank else "adam"),
        lambda rank: optimizers.create("sgd", momentum=0.5 if rank == 1 else 0.0),
        lambda rank: (lambda weight, grad, state: state) if rank else own_rule,
    ]

    def body(store):
        store.init("w", np.zeros(3, np.float32))
        texts = []
        for maker in makers:
            with pytest.raises(ConfigError) as caught:
                store.set_optimizer(maker(store.rank))
            texts.append(str(caught.value))
        with pytest.raises(ConfigError):
            store.strategy.set_optimizer(optimizers.create("sgd", learning_rate=1.0 + store.rank), ["w"])
        store.set_optimizer(optimizers.create("test"))
        store.push("w", np.ones(3, np.float32))
        store.barrier()
        return texts, store.pull("w").tolist()

    for texts, value in mode.run(body):
        assert value == [mode.workers] * 3
        for text in texts:
            assert "worker 0 on localhost" in text
            assert "worker 1 on localhost" in text
        assert "0.1" in texts[0]
        assert "0.2" in texts[0]
        assert "adam" in texts[1]


@pytest.mark.parametrize("mode", [Mode("local", 1), *FEW_DIST_SYNC], ids=mode_id)
def test_what_is_no_optimizer(mode):
    def body(store):
        for wrong in (3, None, "sdg", dict, ("a", "b")):
            with pytest.raises((TypeError, ValueError)):
                store.set_optimizer(wrong)
        store.init("w", np.zeros(2, np.float32))
        store.push("w", np.ones(2, np.float32))
        return store.pull("w").tolist()

    assert mode.run(body) == [[float(mode.workers)] * 2] * mode.workers


@pytest.mark.parametrize("mode", FEW_ASYNC, ids=mode_id)
def test_asynchronous_push_needs_an_optimizer(mode):
    def body(store):
        store.init("w", np.zeros(2, np.float32))
        for call in (store.push, store.pushpull):
            with pytest.raises(MpikvError, match=r"'w'.*set_optimizer"):
                call("w", np.ones(2, np.float32))
        return store.pull("w").tolist()

    assert mode.run(body) == [[0.0] * 2] * mode.workers


def test_keys_are_spread_over_the_servers_by_bytes():
    """Seen by an optimizer: each owner is a thread of its own."""
    with tempfile.TemporaryDirectory() as directory:

        def noting(weight, grad, state):
            with open(os.path.join(directory, str(threading.get_ident())), "a") as file:
                file.write(f"{weight.nbytes}\n")
            return state

        def body(store):
            store.init(list("abcdef"), [np.zeros(n, np.float32) for n in (6, 1, 1, 4, 3, 3)])
            store.set_optimizer(noting)
            store.push(list("abcdef"), [np.zeros(n, np.float32) for n in (6, 1, 1, 4, 3, 3)])
            store.barrier()
            store.pull(list("abcdef"))

        Mode("dist_sync", 2, 3).run(body)
        sizes = []
        for name in os.listdir(directory):
            with open(os.path.join(directory, name)) as file:
                sizes.append(sorted(int(line) for line in file))
    assert sorted(sizes) == [[4, 12, 12], [4, 16], [24]]


def test_updater_of_a_local_store():
    for name in ("local", "device"):
        store = kv.create(name)
        seen = []

        def updater(key, pushed, stored, seen=seen):
            seen.append((key, pushed.shape, stored.dtype))
            stored += 2 * pushed

        store.init([7, 9], [np.ones((2, 3), np.float16), np.ones((), np.float32)])
        store.set_optimizer(optimizers.create("test"))
        store.set_updater(updater)
        store.push([7, 9], [[np.ones((2, 3), np.float16)] * 3, np.float32(4)])
        assert seen == [(7, (2, 3), np.float16), (9, (), np.float32)]
        assert store.pull(7).tolist() == [[7.0] * 3] * 2
        assert store.pull(9) == 9
        with pytest.raises(TypeError, match="updater is a function"):
            store.set_updater(3)

        def fails(key, pushed, stored):
            raise ZeroDivisionError(key)

        store.set_updater(fails)
        for call in (store.push, store.pushpull):
            with pytest.raises(ZeroDivisionError, match="7"):
                call(7, np.ones((2, 3), np.float16))
        store.set_optimizer(optimizers.create("test"))
        store.push(9, np.float32(1))
        assert store.pull(9) == 10


def test_updater_elsewhere():
    def body(store):
        with pytest.raises(UnsupportedError, match="set_optimizer"):
            store.set_updater(lambda key, pushed, stored: None)

    for mode in (*FEW_DIST_SYNC, *FEW_ASYNC):
        mode.run(body)
