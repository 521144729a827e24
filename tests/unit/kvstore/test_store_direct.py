"""Blocking `pushpull` through shared memory in every form of the call: the bits are those of messages.

Each body runs twice, with shared memory and without, and must give the same; the run with it must also have gone the
direct way where the test says so.
"""

from __future__ import annotations

import numpy as np
import pytest
from direct_stores import CALLS, F32, alike, bits, both_ways, exchange, numbers, refused

from mpikv import ShapeMismatch, UnsupportedError, optimizers


@pytest.mark.parametrize("first", [0.0, -0.0, 1.0, np.nan])
@alike(2, direct=False)
def test_first_values_have_their_bits(store, first):
    """Zeros are not written to memory that begins as zeros."""
    values = [np.full(5, value, F32) for value in (first, 2.0)]
    store.init(["a", "b"], values)
    yield (found := store.pull(["a", "b"]))
    assert bits(found) == bits(values)


SHAPES = {"a": (3,), "b": (5, 7), "c": (), "d": (2, 0), "e": (1000,), "f": (90_000,)}


def mixed_forms(forms_of, optimizer=None):
    """Every other key has an array of the store."""

    def body(store):
        keys = list(SHAPES)
        store.init(keys, [np.full(shape, 0.5, F32) for shape in SHAPES.values()])
        if optimizer is not None:
            store.set_optimizer(optimizers.create(optimizer[0], **optimizer[1]))
        values = store.zeros(list(SHAPES.values()))
        outs = [np.zeros(shape, F32) for shape in SHAPES.values()]
        values[::2] = [np.zeros_like(out) for out in outs[::2]]
        for step, form in enumerate(forms_of(store)):
            for i, value in enumerate(values):
                value[...] = numbers(store, value.size, step * 10 + i).reshape(value.shape)
            exchange(store, form, keys, values, outs)
            yield [values, store.pull(keys)]

    return body


@pytest.mark.parametrize("form", CALLS)
def test_every_form_on_all_workers(form):
    direct = form not in ("push and pull", "async")
    both_ways(2, mixed_forms(lambda store: [form] * 4), direct=direct)


@pytest.mark.parametrize("other", [form for form in CALLS if form != "list"])
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
            together, form = common.random() < 0.5, common.choice(CALLS)
            yield str(form if together else mine.choice([one for one in CALLS if one != "singles"]))

    # Without a progress thread other transfers move on in calls only, those that wait for the others among them.
    progress = "calls" if seed == 2 else "thread"
    both_ways(3, mixed_forms(forms, optimizer), direct=None, progress=progress)


# --- arguments


@pytest.mark.parametrize("shared", [False, True])
@alike(2)
def test_arrays_that_change_between_calls(store, shared):
    """Replaced in the list, new ones at the same address, other list objects, one and the same list refilled."""
    make = (lambda: store.zeros(6)) if shared else (lambda: np.zeros(6, F32))
    store.init(["a", "b"], [np.zeros(6, F32)] * 2)
    values, spare = [make(), make()], [make(), make()]
    for step in range(12):
        if step % 4 == 2:
            values[step % 3 % 2], spare[0] = spare[0], values[step % 3 % 2]
        if step % 4 == 3:
            values = list(values)
        for i, value in enumerate(values):
            value[:] = numbers(store, 6, step * 2 + i)
        store.pushpull(["a", "b"], values)
        yield values
    for step in range(6):
        value = np.full(6, step + store.rank, F32)  # likely at the address of the one before
        store.pushpull("a", value)
        yield value
        del value
    one, out = [make()], [make()]
    for step in range(8):
        if step == 4:
            one[0] = make()
        if step == 6:
            out[0] = make()
        one[0][:] = numbers(store, 6, step)
        store.pushpull("b", one, out)
        yield out[0]


@alike(2, direct=False)
def test_arguments_that_cannot_go_the_direct_way(store):
    store.init("w", np.zeros((4, 6), F32))
    for _ in range(3):
        value = np.arange(24, dtype=F32).reshape(4, 6) + store.rank
        outs = [np.zeros((4, 6), np.float64), np.zeros((4, 6), np.int32), np.zeros((6, 4), F32).T]
        outs.append(np.zeros((8, 6), F32)[::2])
        for out in outs:
            store.pushpull("w", value, out)
            yield out
        store.pushpull("w", value, outs)
        for strided in (np.asfortranarray(value), np.repeat(value, 2, 0)[::2]):
            store.pushpull("w", strided)
            yield strided
        store.pushpull("w", [value, value], outs[0])
        yield outs[0]


@pytest.mark.parametrize("rank", [0, 1])
@alike(2)
def test_one_worker_cannot_go_the_direct_way(store, rank):
    store.init(["v", "w"], [np.zeros((4, 6), F32)] * 2)
    values = [np.zeros((4, 6), F32) for _ in range(2)]
    outs = [np.zeros((4, 6), np.float64 if store.rank == rank else F32) for _ in range(2)]
    for step in range(3):
        for i, value in enumerate(values):
            value[...] = numbers(store, 24, step * 2 + i).reshape(4, 6)
        store.pushpull(["v", "w"], values, outs)
        yield outs
        store.pushpull("v", values[0])
        yield values[0]


@alike(2, direct=None)
def test_other_places_in_shared_memory_on_each_worker(store):
    mine, other = store.zeros([(50,), (50,)])[:: 1 if store.rank else -1]
    store.init("w", np.zeros(50, F32))
    for step in range(3):
        mine[:], other[:] = numbers(store, 50, step), 7
        store.pushpull("w", mine)
        yield mine, other


@alike(2)
def test_wrong_arguments_are_refused_after_the_right_ones_were_prepared(store):
    xs = [np.ones((2, 3), F32) for _ in range(2)]
    store.init([1, 2], xs)
    for _ in range(3):
        store.pushpull([1, 2], xs)
        store.pushpull(1, xs[0])
        store.pushpull([1], [xs[0]], [xs[1]])
    sent = store.stats()["messages_sent"]
    bad = [refused(store.pushpull, [key, 2], xs)[0] for key in (True, 1.0, None, "1", [1], np.zeros(2))]
    bad += [refused(store.pushpull, key, xs[0])[0] for key in (True, 1.0, "1", None, [1])]
    assert bad[:6] == [TypeError] * 6
    for call in (
        ([1], xs),
        ([1, 2], xs, xs[:1]),
        ([1, 2], xs[:1]),
        ([2, 1, 2], xs),
        (1, 3.0),
        (1, xs[0], np.ones(6, F32)),
    ):
        bad.append(refused(store.pushpull, *call)[0])
    for value in (np.ones((3, 2), F32), np.ones((2, 3), np.float64)):
        bad.append(refused(store.pushpull, 1, value)[0])
    assert None not in bad
    xs[0].shape = (3, 2)
    assert refused(store.pushpull, 1, xs[0])[0] is ShapeMismatch
    xs[0].shape = (2, 3)
    xs[0].flags.writeable = False
    assert refused(store.pushpull, 1, np.ones((2, 3), F32), xs[0])[0] is UnsupportedError
    assert store.stats()["messages_sent"] == sent
    xs[0].flags.writeable = True
    xs[0][:], xs[1][:] = 1, 2
    store.pushpull([1, 2], xs)
    yield xs


# --- arrays that overlap


@pytest.mark.parametrize("optimizer", [False, True])
@alike(3)
def test_what_lies_between_the_arrays_is_not_touched(store, optimizer):
    """Views of one shared array, with less than a cache line between them, and in the rest of it."""
    flat = store.zeros(100)
    parts = [flat[:10], flat[12:20], flat[25:26], flat[26:30], flat[32:48], flat[70:]]
    keys = list("abcdef")
    store.init(keys, [np.zeros_like(part) for part in parts])
    if optimizer:
        store.set_optimizer(optimizers.create("test"))
    for step in range(3):
        flat[:] = numbers(store, 100, step)
        every = 1 if step else 2
        store.pushpull(keys[::every], parts[::every])
        yield flat
