"""Direct calls and what comes between them: where the newest value is, updates, pulls, several threads and stores."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest
from direct_stores import F32, LARGE, TIMEOUT_S, alike, numbers, refused, run
from on_workers import on, uniform
from store_modes import Mode

from mpikv import kv, optimizers
from mpikv.errors import MpikvError, StallError

# --- optimizers


def gradient(worker, round_, n):
    return ((np.arange(n) * 5 + 3 * worker + round_) % 7 - 3).astype(F32)


OPTIMIZERS = (
    ("test", {}),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    ("adam", {"learning_rate": 0.01}),
    ("lamb", {"learning_rate": 0.01}),
    ("lars", {"learning_rate": 0.1, "momentum": 0.9}),
)


@pytest.mark.parametrize("n", [1, 37, LARGE])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=[name for name, _ in OPTIMIZERS])
@pytest.mark.usefixtures("patient")
@on(Mode("dist_sync", 3))
def test_updates_are_those_of_one_process(store, W, name, options, n):
    """Of ordinary and shared arrays, queues between; sums of whole numbers are exact, so the bits must be the same."""
    store.init("w", np.linspace(-1, 1, n).astype(F32))
    store.set_optimizer(optimizers.create(name, **options))
    own, shared = np.empty(n, F32), store.zeros(n)
    alone = kv.create("local")
    alone.init("w", np.linspace(-1, 1, n).astype(F32))
    alone.set_optimizer(optimizers.create(name, **options))
    for round_ in range(8):
        alone.push("w", sum(gradient(worker, round_, n) for worker in range(W)))
        array = shared if round_ in (1, 4, 5) else own
        array[:] = gradient(store.rank, round_, n)
        if round_ in (3, 6):
            store.push("w", array)
            array = store.pull("w")
        else:
            store.pushpull("w", array)
        assert array.tobytes() == alone.pull("w").tobytes(), round_
    assert store.stats()["direct_calls"] == 6


@alike(3)
def test_set_optimizer_between_direct_calls(store):
    """The values carry over exactly, from arrays added in place, from shared values, from messages."""
    sizes = (5, 700, LARGE)
    keys = [str(n) for n in sizes]
    store.init(keys, [np.full(n, 0.5, F32) for n in sizes])
    shared, own = store.zeros([(n,) for n in sizes]), [np.zeros(n, F32) for n in sizes]
    momentum, plain = {"learning_rate": 0.1, "momentum": 0.9}, {"learning_rate": 0.1}
    for name, options, kinds in (
        ("", {}, [shared]),
        ("sgd", momentum, [shared, own]),
        ("adam", plain, [own, [], shared]),  # []: pushed and not waited for
        ("test", {}, [own]),
    ):
        if name:
            store.set_optimizer(optimizers.create(name, **options))
            yield store.pull(keys)
        for arrays in kinds:
            for step in range(2 if arrays else 0):
                for array in arrays:
                    array[:] = numbers(store, array.size, len(name) + step)
                store.pushpull(keys, arrays)
                yield arrays
            if not arrays:
                store.push(keys, own)
    yield store.pull(keys)


@alike(2, timeout_s=3.0)
def test_an_attribute_that_cannot_be_sent(store, patient):
    """It raises before anything is pushed; the worker can go on, and nobody has waited for it in vain."""
    store.init(["v", "w"], [np.zeros(10, F32)] * 2)
    optimizer = optimizers.create("sgd", learning_rate=1.0)
    store.set_optimizer(optimizer)
    value = np.empty(10, F32)
    for step in range(5):
        value[:] = 1
        if step == 2 and store.rank == 1:
            optimizer.lr_mult["w"] = F32(1)  # JSON has no such number
            assert refused(store.pushpull, "w", value)[0] is TypeError
            del optimizer.lr_mult["w"]
            store.push("w", value)
            store.pull("w", value)
        else:
            store.pushpull("w", value)
        assert uniform(value) == -2.0 * (step + 1)


# --- where the value is


@on(Mode("dist_sync", 2))
def test_the_array_is_the_value_until_the_next_push(store, patient):
    x = store.zeros(8)
    store.init("w", x)
    x[:] = store.rank + 1
    for _ in range(2):
        store.pushpull("w", x)
    assert uniform(store.pull("w")) == 6
    x += 1
    assert uniform(store.pull("w")) == 7
    store.pushpull("w", np.full(8, 1, F32))
    x += 1
    assert uniform(store.pull("w")) == 2


@pytest.mark.parametrize("times", [1, 2, 3])
@alike(2)
def test_an_array_that_is_let_go(store, times):
    """`pull` gives the last sum also when the array is the program's no more, and when all others are pushed anew."""
    x, keep = store.zeros(2000), store.zeros(2000)
    store.init(["v", "w"], [np.zeros(2000, F32)] * 2)
    for step in range(times):
        x[:] = numbers(store, 2000, step)
        store.pushpull("w", x)
    del x
    gc.collect()
    yield store.pull("w")
    for step in range(6):
        value = keep if step < 3 else np.empty(2000, F32)
        value[:] = numbers(store, 2000, 100 + step)
        store.pushpull("v" if step < 3 else "w", value)
        yield store.pull("w")


@on(Mode("dist_sync", 2))
def test_arrays_that_are_new_in_every_step_are_given_back(store):
    store.init("w", np.zeros(2000, F32))
    alive = [numbers(store, 2000, step) for step in range(6)]
    for value in alive:
        store.pushpull("w", value)
    references = [weakref.ref(one) for one in alive]
    del alive, value
    gc.collect()
    assert [one() for one in references] == [None] * 6


@alike(2)
def test_pulls_of_every_kind_after_direct_calls(store):
    x, y = store.zeros(300), np.zeros(300, F32)
    store.init(["x", "y"], [x, y])
    for step in range(4):
        x[:], y[:] = numbers(store, 300, step), numbers(store, 300, step + 9)
        store.pushpull(["y"], [y])
        store.pushpull("x", x)
        outs = [np.zeros(300, np.float64), np.zeros(600, F32)[::2]]
        store.pull("x", outs)
        request = store.pull_async(["y", "x"])
        yield outs, request.wait()
        store.pull("y", x)  # the array that is the value of x
        yield x, store.pull("y")


@pytest.mark.parametrize("optimizer", [False, True])
@alike(2)
def test_a_direct_call_while_pushes_of_its_key_are_under_way(store, optimizer):
    """It has to wait for them, since it is a later round; one of another key has not."""
    store.init(["v", "w"], [np.zeros(9, F32), np.zeros(LARGE, F32)])
    if optimizer:
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.1, momentum=0.9))
    value, other = np.zeros(LARGE, F32), np.zeros(9, F32)
    for step in range(6):
        value[:] = numbers(store, LARGE, step)
        pulls = []
        for i in range(0 if step % 3 else 3):
            store.push_async("w", numbers(store, LARGE, 10 * step + i))
            pulls.append(store.pull_async("w"))
            other[:] = i
            store.pushpull("v", other)
        store.pushpull("w", value)  # known from its second coming on
        yield [pull.wait() for pull in pulls]
        yield value
    yield store.pull(["v", "w"])


# --- several stores


def test_a_store_does_not_see_the_other_ones_memory():
    """Two stores with the same keys, one after the other and one of them inside."""
    together = threading.Barrier(2)

    def first_body(first):
        def second_body(second):
            x, y = first.zeros(50), second.zeros(50)
            for store in (first, second):
                store.init("w", x)
            for step in range(5):
                x[:], y[:] = 1 + step, 10 * first.rank
                first.pushpull("w", x)
                second.pushpull("w", y)
                foreign = np.full(50, 1, F32)
                second.pushpull("w", x)  # in the other one's memory: an ordinary array here
                first.pushpull("w", foreign)
                assert [uniform(one) for one in (x, y, foreign)] == [4 * (1 + step), 10, 2]

        return second_body

    bodies = [None, None]

    def outer(first):
        bodies[first.rank] = first_body(first)
        if together.wait(TIMEOUT_S) == 0:
            run(2, lambda second: bodies[second.rank](second))
        together.wait(TIMEOUT_S)

    run(2, outer)


@on(Mode("dist_sync", 2), timeout_s=2.0)
def test_after_a_call_that_ended_half_way(store, patient):
    """The next one says so, and not once more what ended the first one."""

    def failing(weight, grad, state):
        raise ZeroDivisionError("in the user's optimizer")

    store.init("w", np.zeros(LARGE, F32))
    store.set_optimizer(failing)
    first, second = (refused(store.pushpull, "w", np.ones(LARGE, F32)) for _ in range(2))
    # The key has one owner, worker 0, for whom the other one waits.
    assert first[0] is (StallError if store.rank else ZeroDivisionError)
    assert second[0] is MpikvError
    assert second[1].startswith(
        f"pushpull: an earlier call ended half-way on this worker ({first[0].__name__}: {first[1]})"
    )
    with contextlib.suppress(MpikvError):
        store.close()
