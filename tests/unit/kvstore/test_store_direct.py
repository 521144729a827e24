"""Blocking `pushpull` through shared memory in every form of the call: the bits are those of messages.

Each body runs twice, with shared memory and without, and must give the same; the run with it must also have gone the
direct way where the test says so.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from direct_stores import DTYPES, F32, LARGE, both_ways, numbers, refused, run

from mpikv import ShapeMismatch, UnsupportedError, optimizers

# --- forms of the call

FORMS = ("list", "singles", "turned", "push and pull", "async", "new arrays", "lists inside", "tuples", "out", "outs")


def exchange(store, form, keys, values, outs):
    """One step of all keys in one of many ways; the results are in `outs`, or in `values` where out=None."""
    if form == "list":
        store.pushpull(keys, values)
    elif form == "tuples":
        store.pushpull(tuple(keys), tuple(values))
    elif form == "singles":
        for key, value in zip(keys, values, strict=True):
            store.pushpull(key, value)
    elif form == "turned":
        store.pushpull(keys[::-1], values[::-1])
    elif form == "push and pull":
        store.push(keys, values)
        store.pull(keys, values)
    elif form == "async":
        requests = [store.pushpull_async(key, value) for key, value in zip(keys, values, strict=True)]
        for request in requests:
            request.wait()
    elif form == "new arrays":
        copies = [value.copy() for value in values]
        store.pushpull(list(keys), copies)
        for value, copy in zip(values, copies, strict=True):
            value[...] = copy
    elif form == "lists inside":
        store.pushpull(keys, [[value] for value in values])
    elif form == "out":
        store.pushpull(keys, values, outs)
        for value, out in zip(values, outs, strict=True):
            value[...] = out
    else:
        others = [np.empty_like(out) for out in outs]
        store.pushpull(keys, values, [[out, other] for out, other in zip(outs, others, strict=True)])
        for value, out, other in zip(values, outs, others, strict=True):
            assert out.tobytes() == other.tobytes()
            value[...] = out


@pytest.mark.parametrize("first", [0.0, -0.0, 1.0, np.nan])
def test_first_values_have_their_bits(first):
    """Zeros are not written to memory that begins as zeros."""

    def body(store):
        store.init(["a", "b"], [np.full(5, value, F32) for value in (first, 2.0)])
        found = store.pull(["a", "b"])
        assert [value.tobytes() for value in found] == [np.full(5, value, F32).tobytes() for value in (first, 2.0)]
        return found

    both_ways(2, body, direct=False)


SHAPES = {"a": (3,), "b": (5, 7), "c": (), "d": (2, 0), "e": (1000,), "f": (90_000,)}


def mixed_forms(forms_of, optimizer=None):
    """Every other key has an array of the store."""

    def body(store):
        keys = list(SHAPES)
        store.init(keys, [np.full(shape, 0.5, F32) for shape in SHAPES.values()])
        if optimizer is not None:
            store.set_optimizer(optimizers.create(*optimizer[:1], **optimizer[1]))
        values = store.zeros(list(SHAPES.values()))
        values[::2] = [np.zeros(shape, F32) for shape in list(SHAPES.values())[::2]]
        outs = [np.zeros(shape, F32) for shape in SHAPES.values()]
        found = []
        for step, form in enumerate(forms_of(store)):
            for i, value in enumerate(values):
                value[...] = numbers(store, value.size, step * 10 + i).reshape(value.shape)
            exchange(store, form, keys, values, outs)
            found += [value.copy() for value in values]
            found += store.pull(keys)
        return found

    return body


@pytest.mark.parametrize("form", FORMS)
def test_every_form_on_all_workers(form):
    direct = form not in ("push and pull", "async")
    both_ways(2, mixed_forms(lambda store: [form] * 4), direct=direct)


@pytest.mark.parametrize("other", [form for form in FORMS if form != "list"])
def test_one_worker_makes_another_call_than_the_others(other):
    """In some steps, so that calls that meet and calls that do not follow each other."""

    def forms(store):
        return ["list", other if store.rank == 1 else "list", "list", other if store.rank == 0 else "list"]

    both_ways(2, mixed_forms(forms))


@pytest.mark.parametrize("optimizer", [None, ("sgd", {"learning_rate": 0.1, "momentum": 0.9}), ("lamb", {})])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_forms_on_three_workers(seed, optimizer):
    def forms(store):
        common = np.random.default_rng(seed)
        mine = np.random.default_rng([seed, store.rank])
        for _ in range(8):
            together, form = common.random() < 0.5, common.choice(FORMS)
            yield str(form if together else mine.choice([one for one in FORMS if one != "singles"]))

    # Without a progress thread other transfers move on in calls only, those that wait for the others among them.
    progress = "calls" if seed == 2 else "thread"
    both_ways(3, mixed_forms(forms, optimizer), direct=None, progress=progress)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    def body(store):
        sizes = (0, 1, 7, 333, 70_001)
        keys = [str(n) for n in sizes]
        store.init(keys, [np.zeros(n, dtype) for n in sizes])
        found = []
        for arrays in ([np.zeros(n, dtype) for n in sizes], store.zeros([(n,) for n in sizes], dtype)):
            for step in range(3):
                for array in arrays:
                    array[:] = numbers(store, array.size, step) % 40
                store.pushpull(keys, arrays)
                found += [array.copy() for array in arrays]
        return found

    both_ways(3, body)


@pytest.mark.parametrize("workers", [3, 8])
def test_against_plain_sums(workers):
    """Not only the same as messages."""

    def body(store):
        x = store.zeros((LARGE,))
        y = np.empty(LARGE, F32)
        store.init(["x", "y"], [x, y])
        found = []
        for step in range(3):
            x[:], y[:] = numbers(store, LARGE, step), numbers(store, LARGE, step + 50)
            store.pushpull("x", x)
            store.pushpull("y", y)
            found.append((x.tobytes(), y.tobytes()))
        return found

    class Of:
        def __init__(self, rank):
            self.rank = rank

    expected = []
    for step in range(3):
        parts = [[numbers(Of(rank), LARGE, seed) for rank in range(workers)] for seed in (step, step + 50)]
        expected.append(tuple(reduce(np.add, one).tobytes() for one in parts))  # ((0 + 1) + 2) + ...
    assert run(workers, body) == [expected] * workers


# --- arguments


@pytest.mark.parametrize("shared", [False, True])
def test_arrays_that_change_between_calls(shared):
    """Replaced in the list, new ones at the same address, other list objects, one and the same list refilled."""

    def body(store):
        make = (lambda: store.zeros(6)) if shared else (lambda: np.zeros(6, F32))
        store.init(["a", "b"], [np.zeros(6, F32)] * 2)
        found, values, spare = [], [make(), make()], [make(), make()]
        for step in range(12):
            if step % 4 == 2:
                values[step % 3 % 2], spare[0] = spare[0], values[step % 3 % 2]
            if step % 4 == 3:
                values = list(values)
            for i, value in enumerate(values):
                value[:] = numbers(store, 6, step * 2 + i)
            store.pushpull(["a", "b"], values)
            found += [value.copy() for value in values]
        for step in range(6):
            value = np.full(6, step + store.rank, F32)  # likely at the address of the one before
            store.pushpull("a", value)
            found.append(value)
            del value
        one, out = [make()], [make()]
        for step in range(8):
            if step == 4:
                one[0] = make()
            if step == 6:
                out[0] = make()
            one[0][:] = numbers(store, 6, step)
            store.pushpull("b", one, out)
            found.append(out[0].copy())
        return found

    both_ways(2, body)


def test_arguments_that_cannot_go_the_direct_way():
    def body(store):
        store.init("w", np.zeros((4, 6), F32))
        found = []
        for _ in range(3):
            value = np.arange(24, dtype=F32).reshape(4, 6) + store.rank
            outs = [np.zeros((4, 6), np.float64), np.zeros((4, 6), np.int32), np.zeros((6, 4), F32).T]
            outs.append(np.zeros((8, 6), F32)[::2])
            for out in outs:
                store.pushpull("w", value, out)
                found.append(np.array(out))
            store.pushpull("w", value, outs)
            for strided in (np.asfortranarray(value), np.repeat(value, 2, 0)[::2]):
                store.pushpull("w", strided)
                found.append(np.array(strided))
            store.pushpull("w", [value, value], outs[0])
            found.append(outs[0].copy())
        return found

    both_ways(2, body, direct=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_cannot_go_the_direct_way(rank):
    def body(store):
        store.init(["v", "w"], [np.zeros((4, 6), F32)] * 2)
        values = [np.zeros((4, 6), F32) for _ in range(2)]
        outs = [np.zeros((4, 6), np.float64 if store.rank == rank else F32) for _ in range(2)]
        found = []
        for step in range(3):
            for i, value in enumerate(values):
                value[...] = numbers(store, 24, step * 2 + i).reshape(4, 6)
            store.pushpull(["v", "w"], values, outs)
            found += [out.astype(np.float64) for out in outs]
            store.pushpull("v", values[0])
            found.append(values[0].copy())
        return found

    both_ways(2, body, direct=True)


def test_shared_on_one_worker_only():
    def body(store):
        shared, own = store.zeros(100), np.zeros(100, F32)
        store.init("w", own)
        found = []
        for step in range(4):
            value = own if store.rank == 1 and step % 2 else shared
            value[:] = numbers(store, 100, step)
            store.pushpull("w", value)
            found.append(value.copy())
        return found

    both_ways(3, body)


def test_other_places_in_shared_memory_on_each_worker():
    def body(store):
        first, second = store.zeros([(50,), (50,)])
        store.init("w", np.zeros(50, F32))
        mine, other = (first, second) if store.rank else (second, first)
        found = []
        for step in range(3):
            mine[:], other[:] = numbers(store, 50, step), 7
            store.pushpull("w", mine)
            found += [mine.copy(), other.copy()]
        return found

    both_ways(2, body, direct=None)


def test_wrong_arguments_are_refused_after_the_right_ones_were_prepared():
    def body(store):
        xs = [np.ones((2, 3), F32) for _ in range(2)]
        store.init([1, 2], xs)
        for _ in range(3):
            store.pushpull([1, 2], xs)
            store.pushpull(1, xs[0])
            store.pushpull([1], [xs[0]], [xs[1]])
        sent = store.stats()["messages_sent"]
        found = []
        for keys in ([True, 2], [1.0, 2], [1, None], ["1", 2], [[1], 2], [np.zeros(2), 2]):
            found.append(refused(store.pushpull, keys, xs)[0])
        for key in (True, 1.0, "1", None, [1]):
            found.append(refused(store.pushpull, key, xs[0])[0])
        found.append(refused(store.pushpull, [1], xs)[0])
        found.append(refused(store.pushpull, [1, 2], xs, xs[:1])[0])
        found.append(refused(store.pushpull, [1, 2], xs[:1])[0])
        found.append(refused(store.pushpull, [2, 1, 2], xs)[0])
        found.append(refused(store.pushpull, 1, np.ones((3, 2), F32))[0])
        found.append(refused(store.pushpull, 1, np.ones((2, 3), np.float64))[0])
        found.append(refused(store.pushpull, 1, xs[0], np.ones(6, F32))[0])
        found.append(refused(store.pushpull, 1, 3.0)[0])
        xs[0].shape = (3, 2)
        found.append(refused(store.pushpull, 1, xs[0])[0])
        xs[0].shape = (2, 3)
        xs[0].flags.writeable = False
        found.append(refused(store.pushpull, 1, np.ones((2, 3), F32), xs[0])[0])
        assert store.stats()["messages_sent"] == sent
        xs[0].flags.writeable = True
        xs[0][:], xs[1][:] = 1, 2
        store.pushpull([1, 2], xs)
        return [str(one) for one in found], xs[0].copy(), xs[1].copy()

    kinds, *_ = both_ways(2, body)[0]
    assert str(None) not in kinds, kinds
    assert kinds[-2:] == [str(ShapeMismatch), str(UnsupportedError)]
    assert kinds[:6] == [str(TypeError)] * 6


def test_read_only_values_and_results():
    def body(store):
        value, out = np.full(5, store.rank + 1, F32), np.zeros(5, F32)
        value.flags.writeable = False
        store.init("w", value)
        kinds, sums = [], []
        for _ in range(3):
            store.pushpull("w", value, out)
            sums.append(store.pushpull("w", value).tolist())  # not kept as a call that writes into `value`
            kinds.append(refused(store.pushpull, "w", out, value)[0].__name__)
        assert value.tolist() == [store.rank + 1] * 5
        return kinds, sums, out.tolist()

    kinds, sums, out = both_ways(2, body)[0]
    assert kinds == ["UnsupportedError"] * 3
    assert sums == [[3] * 5] * 3
    assert out == [3] * 5


# --- arrays that overlap


@pytest.mark.parametrize("optimizer", [False, True])
def test_what_lies_between_the_arrays_is_not_touched(optimizer):
    """Views of one shared array, with less than a cache line between them, and in the rest of it."""

    def body(store):
        flat = store.zeros(100)
        parts = [flat[:10], flat[12:20], flat[25:26], flat[26:30], flat[32:48], flat[70:]]
        keys = list("abcdef")
        store.init(keys, [np.zeros_like(part) for part in parts])
        if optimizer:
            store.set_optimizer(optimizers.create("test"))
        found = []
        for step in range(3):
            flat[:] = numbers(store, 100, step)
            chosen = (0, 1, 2, 3, 4, 5) if step else (0, 2, 4)
            store.pushpull([keys[i] for i in chosen], [parts[i] for i in chosen])
            found.append(flat.copy())
        return found

    both_ways(3, body)
