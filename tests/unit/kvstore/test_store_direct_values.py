"""Direct calls and what comes between them: where the newest value is, updates, pulls, several threads and stores."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from direct_stores import F32, LARGE, TIMEOUT_S, both_ways, numbers, refused, run

from mpikv import optimizers
from mpikv.config import Config
from mpikv.errors import MpikvError, StallError
from mpikv.testing.reference import ReferenceStore

# --- optimizers


def local_reference(workers, rounds, optimizer, n):
    """The weights after each round, by the reference store and the optimizer's own update."""
    made = optimizers.create(*optimizer[:1], **optimizer[1])
    state = {}

    def update(weight, total):
        found = weight.copy()
        if "w" not in state:
            state["w"] = made.init(found)
        state["w"] = made.update("w", found, total, state["w"])
        return found

    reference = ReferenceStore(workers, update=update)
    reference.init("w", np.linspace(-1, 1, n).astype(F32))
    found = []
    for round_ in range(rounds):
        for worker in range(workers):
            reference.push(worker, "w", [gradient(worker, round_, n)])
        found.append(reference.pull(0, "w"))
    return found


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
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one[0])
def test_updates_are_those_of_the_reference(patient, optimizer, n):
    """Of ordinary and shared arrays, queues between; sums of whole numbers are exact, so the bits must be the same."""

    def body(store):
        store.init("w", np.linspace(-1, 1, n).astype(F32))
        store.set_optimizer(optimizers.create(*optimizer[:1], **optimizer[1]))
        own, shared = np.empty(n, F32), store.zeros(n)
        found = []
        for round_ in range(8):
            if round_ in (3, 6):
                store.push("w", gradient(store.rank, round_, n))
                found.append(store.pull("w").tobytes())
                continue
            array = shared if round_ in (1, 4, 5) else own
            array[:] = gradient(store.rank, round_, n)
            store.pushpull("w", array)
            found.append(array.tobytes())
        assert store.stats()["direct_calls"] == 6
        return found

    expected = [weight.tobytes() for weight in local_reference(3, 8, optimizer, n)]
    assert run(3, body) == [expected] * 3


def test_set_optimizer_between_direct_calls():
    """The values carry over exactly, from arrays added in place, from shared values, from messages."""

    def body(store):
        sizes = (5, 700, LARGE)
        keys = [str(n) for n in sizes]
        store.init(keys, [np.full(n, 0.5, F32) for n in sizes])
        shared, own = store.zeros([(n,) for n in sizes]), [np.zeros(n, F32) for n in sizes]
        found = []

        def steps(arrays, seed):
            for step in range(2):
                for array in arrays:
                    array[:] = numbers(store, array.size, seed + step)
                store.pushpull(keys, arrays)
                found.extend(array.copy() for array in arrays)

        steps(shared, 0)
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.1, momentum=0.9))
        found += store.pull(keys)
        steps(shared, 10)
        steps(own, 20)
        store.set_optimizer(optimizers.create("adam", learning_rate=0.1))
        found += store.pull(keys)
        steps(own, 30)
        store.push(keys, own)
        steps(shared, 40)
        store.set_optimizer(optimizers.create("test"))
        steps(own, 50)
        return found + store.pull(keys)

    both_ways(3, body)


def test_the_learning_rate_of_each_round():
    def body(store):
        store.init("w", np.zeros(50, F32))
        optimizer = optimizers.create("sgd", learning_rate=1.0)
        store.set_optimizer(optimizer)
        value, found = np.empty(50, F32), []
        for step in range(9):
            optimizer.learning_rate = float(step // 2 + 1)
            value[:] = 1
            if step % 4 == 3:
                store.push("w", value)
                value = store.pull("w")
            else:
                store.pushpull("w", value)
            found.append(float(value[0]))
        return found

    rates = np.cumsum([-2.0 * (step // 2 + 1) for step in range(9)]).tolist()
    assert both_ways(2, body) == [rates] * 2


def test_an_attribute_that_cannot_be_sent(patient):
    """It raises before anything is pushed; the worker can go on, and nobody has waited for it in vain."""

    def body(store):
        store.init(["v", "w"], [np.zeros(10, F32)] * 2)
        optimizer = optimizers.create("sgd", learning_rate=1.0)
        store.set_optimizer(optimizer)
        value, found = np.empty(10, F32), []
        for step in range(5):
            value[:] = 1
            if step == 2 and store.rank == 1:
                optimizer.lr_mult["w"] = np.float32(1)  # JSON has no such number
                found.append(refused(store.pushpull, "w", value)[0].__name__)
                del optimizer.lr_mult["w"]
                store.push("w", value)
                store.pull("w", value)
            else:
                store.pushpull("w", value)
            found.append(float(value[0]))
        return found

    sums = [-2.0 * (step + 1) for step in range(5)]
    assert both_ways(2, body, timeout_s=3.0) == [sums, [*sums[:2], "TypeError", *sums[2:]]]


# --- where the value is


def test_the_array_is_the_value_until_the_next_push(patient):
    def body(store):
        x = store.zeros(8)
        store.init("w", x)
        x[:] = store.rank + 1
        for _ in range(2):
            store.pushpull("w", x)
        sums = [store.pull("w").tolist()]
        x += 1
        sums.append(store.pull("w").tolist())
        y = np.full(8, 1, F32)
        store.pushpull("w", y)
        x += 1
        sums.append(store.pull("w").tolist())
        return sums

    assert run(2, body) == [[[6.0] * 8, [7.0] * 8, [2.0] * 8]] * 2


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_array_that_is_let_go(times):
    """`pull` gives the last sum also when the array is the program's no more, and when all others are pushed anew."""

    def body(store):
        x, keep = store.zeros(2000), store.zeros(2000)
        store.init(["v", "w"], [np.zeros(2000, F32)] * 2)
        for step in range(times):
            x[:] = numbers(store, 2000, step)
            store.pushpull("w", x)
        del x
        gc.collect()
        found = [store.pull("w")]
        for step in range(3):
            keep[:] = numbers(store, 2000, 100 + step)
            store.pushpull("v", keep)
            found.append(store.pull("w"))
        for step in range(3):
            new = numbers(store, 2000, 200 + step)
            store.pushpull("w", new)
            found.append(store.pull("w"))
        return found

    both_ways(2, body)


def test_arrays_that_are_new_in_every_step_are_given_back():
    def body(store):
        store.init("w", np.zeros(2000, F32))
        alive = []
        for step in range(6):
            value = numbers(store, 2000, step)
            store.pushpull("w", value)
            alive.append(value)
        references = [weakref.ref(one) for one in alive]
        del alive, value
        gc.collect()
        return [one() is None for one in references]

    assert run(2, body) == [[True] * 6] * 2


def test_pulls_of_every_kind_after_direct_calls():
    def body(store):
        x, y = store.zeros(300), np.zeros(300, F32)
        store.init(["x", "y"], [x, y])
        found = []
        for step in range(4):
            x[:], y[:] = numbers(store, 300, step), numbers(store, 300, step + 9)
            store.pushpull(["y"], [y])
            store.pushpull("x", x)
            outs = [np.zeros(300, np.float64), np.zeros(600, F32)[::2]]
            store.pull("x", outs)
            request = store.pull_async(["y", "x"])
            found += [*map(np.array, outs), *request.wait()]
            store.pull("y", x)  # the array that is the value of x
            found += [x.copy(), store.pull("y")]
        return found

    both_ways(2, body)


def test_pushes_without_waiting_between_direct_calls():
    def body(store):
        value, found = np.zeros(5000, F32), []
        store.init(["v", "w"], [value, value])
        for step in range(6):
            value[:] = numbers(store, 5000, step)
            store.pushpull("w", value)
            found.append(value.copy())
            for i in range(step % 3):
                store.push_async("w", numbers(store, 5000, 10 * step + i))
            pulled = store.pull_async("w")
            store.pushpull("v", value)
            found += [value.copy(), pulled.wait()]
        store.wait_all()
        return [*found, *store.pull(["v", "w"])]

    both_ways(3, body)


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_direct_call_while_pushes_of_its_key_are_under_way(optimizer):
    """It has to wait for them, since it is a later round."""

    def body(store):
        store.init("w", np.zeros(LARGE, F32))
        if optimizer:
            store.set_optimizer(optimizers.create("sgd", learning_rate=0.1, momentum=0.9))
        value, found = np.zeros(LARGE, F32), []
        for step in range(6):
            value[:] = numbers(store, LARGE, step)
            if step % 3:
                store.pushpull("w", value)  # known from its second coming on
            else:
                pulls = []
                for i in range(3):
                    store.push_async("w", numbers(store, LARGE, 10 * step + i))
                    pulls.append(store.pull_async("w"))
                store.pushpull("w", value)
                found += [pull.wait() for pull in pulls]
            found.append(value.copy())
        return found

    both_ways(2, body)


# --- several threads, several stores


def test_threads_of_one_worker_push_different_keys_at_once():
    """Which thread comes first is different on each worker."""

    def body(store):
        keys, rounds = ["a", "b", "c"], 15
        store.init(keys, [np.zeros(600, F32)] * 3)
        found, errors = {}, []

        def thread(key):
            try:
                naps = np.random.default_rng([store.rank, ord(key)])
                value = np.empty(600, F32)
                for step in range(rounds):
                    value[:] = numbers(store, 600, step * 7 + ord(key))
                    time.sleep(naps.choice([0.0, 0.0005]))
                    store.pushpull(key, value)
                    found[key, step] = value.copy()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=thread, args=(key,), daemon=True) for key in keys]
        for one in threads:
            one.start()
        for one in threads:
            one.join(TIMEOUT_S)
        if errors:
            raise errors[0]
        return [found[key, step] for key in keys for step in range(rounds)] + store.pull(keys)

    both_ways(2, body, direct=None)


def test_a_store_does_not_see_the_other_ones_memory():
    """Two stores with the same keys, one after the other and one of them inside."""
    from mpikv.create.assembly import assemble
    from mpikv.create.spec import parse
    from mpikv.hostmemory.segment import private_memory
    from mpikv.placement.members import Members
    from mpikv.testing.ranks import spawn
    from mpikv.transports.threads import Fabric

    fabrics, memories = [Fabric(2), Fabric(2)], [private_memory(2), private_memory(2)]
    members = Members(("localhost",) * 2, (0, 1), config=Config(timeout_s=TIMEOUT_S))

    def body(transport):
        stores = []
        for fabric, memory in zip(fabrics, memories, strict=True):
            rank = transport.rank
            part = fabric.rank(rank), members
            stores.append(
                assemble("dist_sync", parse("dist_sync"), *part, threaded=True, on_fatal=print, memory=memory[rank])
            )
        first, second = stores
        x, y = first.zeros(50), second.zeros(50)
        for store in stores:
            store.init("w", x)
        found = []
        for step in range(5):
            x[:], y[:] = 1 + step, 10 * transport.rank
            first.pushpull("w", x)
            second.pushpull("w", y)
            foreign = np.full(50, 1, F32)
            second.pushpull("w", x)  # in the other one's memory: an ordinary array here
            first.pushpull("w", foreign)
            found.append((float(x[7]), float(y[7]), float(foreign[7])))
        for store in stores:
            store.close()
        return found

    assert spawn(2, body) == [[(4.0 * (1 + step), 10.0, 2.0) for step in range(5)]] * 2


def test_after_a_call_that_ended_half_way(patient):
    """The next one says so, and not once more what ended the first one."""

    def failing(weight, grad, state):
        raise ZeroDivisionError("in the user's optimizer")

    def body(store):
        store.init("w", np.zeros(LARGE, F32))
        store.set_optimizer(failing)
        return [refused(store.pushpull, "w", np.ones(LARGE, F32)) for _ in range(2)]

    # The key has one owner, worker 0, for whom the other one waits.
    for (first, second), why in zip(run(2, body, timeout_s=2.0), (ZeroDivisionError, StallError), strict=True):
        assert first[0] is why
        assert second[0] is MpikvError
        text = f"pushpull: an earlier call ended half-way on this worker ({why.__name__}: {first[1]})"
        assert second[1].startswith(text)
