"""Calls through the memory of a host: what they cost, where values are, what goes wrong; arrays of `store.zeros`.

tests/property/test_direct_property.py has the bits, of any series of calls.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from functools import partial

import numpy as np
import pytest
from direct_stores import alike, numbers
from on_workers import counted, full, limit, on, uniform
from store_modes import DTYPES, Mode

from mpikv import MpikvError, ShapeMismatch, StallError, UnsupportedError, optimizers
from mpikv.collectives import shared as sums
from mpikv.hostmemory.common_calls import CommonCalls

F32 = np.float32
LARGE = 200_000  # float32: several chunks
TWO = Mode("dist_sync", 2)
EITHER = (TWO, Mode("dist_sync", 2, memory="off"))  # with and without shared memory


def refused(call, *arguments):
    """The kind of error of a call, and its text."""
    try:
        call(*arguments)
    except Exception as error:
        return type(error), str(error)
    return None, ""


# --- arguments


@pytest.mark.parametrize("odd", [None, 0, 1])
@alike(2, direct=None)
def test_arrays_that_cannot_go_the_direct_way(store, odd):
    """On all workers, or on one."""
    store.init(["v", "w"], [np.zeros((4, 6), F32)] * 2)
    mine = odd in (None, store.rank)
    for _ in range(3):
        value = np.arange(24, dtype=F32).reshape(4, 6) + store.rank
        outs = [np.zeros((4, 6), np.float64), np.zeros((4, 6), np.int32), np.zeros((6, 4), F32).T]
        outs.append(np.zeros((8, 6), F32)[::2])
        for out in outs if mine else [np.zeros((4, 6), F32) for _ in outs]:
            store.pushpull(["v", "w"], [value, value], [np.zeros((4, 6), F32), out])
            yield out.astype(F32)
        for strided in (np.asfortranarray(value), np.repeat(value, 2, 0)[::2]) if mine else (value, value.copy()):
            store.pushpull("w", strided)
            yield np.array(strided)
        store.pushpull("w", [value, value] if mine else value, out := np.zeros((4, 6), F32))
        yield out
        store.pushpull("v", value)


@alike(2)
def test_wrong_arguments_are_refused_after_the_right_ones_were_prepared(store):
    """Which calls are taken for prepared ones: tests/unit/calls/test_prepared.py."""
    xs = [np.ones((2, 3), F32) for _ in range(2)]
    store.init([1, 2], xs)
    for _ in range(3):
        store.pushpull([1, 2], xs)
        store.pushpull(1, xs[0])
        store.pushpull([1], [xs[0]], [xs[1]])
    sent = store.stats()["messages_sent"]
    for key in (True, 1.0, "1", None, np.zeros(2)):
        assert refused(store.pushpull, [key, 2], xs)[0] is TypeError
        assert refused(store.pushpull, key, xs[0])[0] is TypeError
    for wrong in (([1], xs), ([1, 2], xs, xs[:1]), ([2, 1, 2], xs), (1, 3.0), (1, np.ones((2, 3), np.float64))):
        assert refused(store.pushpull, *wrong)[0] in (ValueError, TypeError, ShapeMismatch), wrong
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


# --- what they cost

NAMES = ("messages_sent", "direct_calls", "bytes_copied", "bytes_added")


@pytest.mark.usefixtures("patient")
@on(TWO, Mode("dist_sync", 4))
def test_the_steady_state_sends_nothing(store, W):
    """n(p-1)/p bytes copied in and added and n copied out; in place n(p-1)/p of both; see collectives/shared."""
    n = 1 << 17
    n_bytes, part = 4 * n, 4 * n * (W - 1) // W
    own, shared, tiny = np.zeros(n, F32), store.zeros(n), np.zeros(100, F32)
    store.init(["own", "shared", "tiny"], [own, own, tiny])
    for key, array, copied, added in (
        ("own", own, part + n_bytes, part),
        ("shared", shared, part, part),
        ("tiny", tiny, 800, 400 * (W - 1)),  # each for itself: in, to the result, and all others' values added
    ):
        for _ in range(3):
            store.pushpull(key, array)
        found = counted(store, lambda: [store.pushpull(key, array) for _ in range(5)], *NAMES)  # noqa: B023 - at once
        assert found == [0, 5, 5 * copied, 5 * added], key
    store.set_optimizer(optimizer := optimizers.create("sgd", learning_rate=0.1))

    def steps(n):
        for step in range(n):
            optimizer.learning_rate = 0.1 * step
            store.pushpull(["own", "shared"], [own, shared])

    steps(3)
    assert counted(store, lambda: steps(5), *NAMES[:2]) == [0, 5]


@on(*EITHER)
def test_a_call_that_did_not_meet_is_counted_and_sends(store, mode):
    value = np.ones(10, F32)
    store.init("w", value)

    def call():
        if store.rank == 0:
            store.push("w", value)
            store.pull("w")
        else:
            store.pushpull("w", value)

    met = counted(store, call, "direct_calls", "declined_calls", "messages_sent")
    assert met[:2] == [0, store.rank if mode.memory == "auto" else 0]
    assert met[2] > 0 or mode.memory == "auto"
    assert ("direct_calls" in store.stats()) == (mode.memory == "auto")


# --- updates, and where the value is


@on(TWO)
def test_the_array_is_the_value_until_the_next_push(store, patient):
    x = store.zeros(8)
    store.init("w", x)
    x[:] = store.rank + 1
    for _ in range(2):
        store.pushpull("w", x)
    assert uniform(store.pull("w")) == 6
    x += 1
    assert uniform(store.pull("w")) == 7
    once = full(1, 8)  # kept: an array at its place in memory would be known by it
    store.pushpull("w", once)
    x += 1
    assert uniform(store.pull("w")) == 2
    alive = [numbers(store, 8, step) for step in range(6)]
    for value in alive:  # new ones in every step are given back
        store.pushpull("w", value)
    references = [weakref.ref(one) for one in alive]
    del alive, value
    gc.collect()
    assert [one() for one in references] == [None] * 6


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


def test_a_store_does_not_see_the_other_ones_memory():
    """Two stores with the same keys, one inside the other's body."""
    together, firsts = threading.Barrier(2), [None, None]

    def inner(second):
        first = firsts[second.rank]
        x, y = first.zeros(50), second.zeros(50)
        for store in (first, second):
            store.init("w", x)
        for step in range(5):
            x[:], y[:] = 1 + step, 10 * first.rank
            first.pushpull("w", x)
            second.pushpull("w", y)
            second.pushpull("w", x)  # in the other one's memory: an ordinary array here
            first.pushpull("w", foreign := full(1, 50))
            assert [uniform(one) for one in (x, y, foreign)] == [4 * (1 + step), 10, 2]

    def outer(first):
        firsts[first.rank] = first
        if together.wait(60) == 0:
            TWO.run(inner)
        together.wait(60)

    TWO.run(outer)


# --- what goes wrong


@pytest.mark.parametrize("owner", [0, 1])
@on(TWO)
@pytest.mark.usefixtures("patient", "silent")
def test_an_optimizer_that_raises(store, owner):
    """It raises at the owner; the others do not get a wrong sum, then or later; every later call says what ended it."""

    def failing(weight, grad, state):
        state = 1 if state is None else state + 1
        if state == 3:
            raise ZeroDivisionError("in the user's optimizer")
        weight += grad
        return state

    for key in ("other", "w") if owner else ("w", "other"):  # a function's key has one owner, by its number
        store.init(key, np.zeros(LARGE, F32))
    store.set_optimizer(failing)
    for expected in (2, 4):
        store.pushpull("w", value := np.ones(LARGE, F32))
        assert uniform(value) == expected
    with limit(store):
        first, second = (refused(store.pushpull, "w", np.ones(LARGE, F32)) for _ in range(2))
    assert first[0] is (ZeroDivisionError if store.rank == owner else StallError)
    assert second[0] is MpikvError
    text = f"pushpull: an earlier call ended half-way on this worker ({first[0].__name__}: {first[1]})"
    assert second[1].startswith(text)
    with contextlib.suppress(Exception):
        store.close()


@pytest.mark.parametrize("where", ["adding", "deciding"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.usefixtures("silent")
def test_an_interrupted_call_does_not_lead_to_wrong_sums(request, monkeypatch, where, victim):
    """Ctrl-C in the middle of a call, which the program survives: later calls raise, or are right."""
    if where == "adding":
        request.getfixturevalue("patient")  # else nobody may come to it
    owner, name = (sums, "add_all") if where == "adding" else (CommonCalls, "_await")
    original, hit = getattr(owner, name), threading.Event()

    def interrupted(*arguments):
        if threading.current_thread().name == f"rank {victim}" and armed.is_set() and not hit.is_set():
            hit.set()
            raise KeyboardInterrupt
        return original(*arguments)

    armed = threading.Event()
    monkeypatch.setattr(owner, name, interrupted)

    def body(store, *, interrupts=True):
        found = {}
        store.init("w", np.zeros(LARGE, F32))
        for step in range(6):
            later = interrupts and step >= 2
            if later and store.rank == victim:
                armed.set()
            elif later and where == "deciding":
                assert hit.wait(60)  # the other one waits for it
            try:
                with limit(store, 0.2 if later else 60):
                    store.pushpull("w", value := numbers(store, LARGE, step))
                found[step] = value.tobytes()
            except KeyboardInterrupt:
                assert store.rank == victim
            except MpikvError:
                if store.rank != victim:
                    break  # it has waited its time
        with limit(store), contextlib.suppress(Exception):
            store.close()
        return found

    expected = Mode("dist_sync", 2, 0, "owners").run(partial(body, interrupts=False))[0]
    for result in TWO.run(body):
        assert result.items() <= expected.items()  # no wrong sum
    assert hit.is_set()


# --- `store.empty` and `store.zeros`


@on(*EITHER)
def test_wrong_arguments_of_empty(store):
    """Wrong shapes: tests/unit/arrays/test_shapes.py."""
    for dtype in ("complex64", object, ">f4", "nonsense", "U3"):
        assert refused(store.zeros, 3, dtype)[0] is UnsupportedError
    for shape in ((2**40, 2**40), (2**62,), (2**70,), 2**50, [(2**50,), (3,)]):  # more than there is
        kind, text = refused(store.zeros, shape)
        assert issubclass(kind, (MpikvError, ValueError, MemoryError))
        assert text
        store.barrier()
    for first, *second in (((3,), (4,)), ((2, 3), (3, 2)), ([(3,), (4,)], [(4,), (3,)]), (3, 3, "int32")):
        kind, text = refused(store.empty, *second) if store.rank == 1 else refused(store.zeros, first)
        assert kind is ShapeMismatch, (kind, text)
        assert "worker 0 on localhost" in text
        assert "worker 1 on localhost" in text
        store.barrier()
    store.init("w", x := store.zeros(3))
    x[:] = 1
    store.pushpull("w", x)
    assert x.tolist() == [2.0] * 3


@on(*EITHER)
def test_shapes_and_dtypes_of_empty(store):
    for shape in (3, (2, 3), (), (0, 3)):
        for make in (store.empty, store.zeros):
            array = make(shape)
            assert (array.dtype, array.shape) == (F32, np.zeros(shape).shape)
            assert array.flags.c_contiguous
            assert array.flags.writeable
    for dtype in DTYPES:
        assert store.zeros(5, dtype).dtype == store.zeros(5, str(dtype)).dtype == dtype
    several = store.zeros([(2, 3), (0,), (), (7,)], dtype="int64")
    assert type(several) is list
    assert not any(array.any() for array in several)
    assert [array.shape for array in several] == [(2, 3), (0,), (), (7,)]


def test_memory_stays_valid_after_close():
    def body(store):
        arrays = store.zeros([(1000,), (7,)])
        store.init(["a", "b"], arrays)
        for array in arrays:
            array[:] = store.rank + 1
        for _ in range(2):
            store.pushpull(["a", "b"], arrays)
        store.close()
        for call, *arguments in ((store.pushpull, ["a", "b"], arrays), (store.empty, 3), (store.zeros, 3)):
            assert refused(call, *arguments)[0] is MpikvError
        return arrays

    results = TWO.run(body)
    gc.collect()
    for arrays in results:
        assert [uniform(array) for array in arrays] == [6, 6]
        arrays[0][:] = 5
        assert arrays[0].sum() == 5000
