"""What direct calls cost, counted exactly, and what they do when something goes wrong."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from direct_stores import F32, LARGE, numbers, refused, run
from on_workers import counted, on, uniform
from store_modes import Mode

from mpikv import MpikvError, StallError, optimizers
from mpikv.hostmemory.common_calls import CommonCalls

# --- counts

NAMES = ("messages_sent", "direct_calls", "bytes_copied", "bytes_added")


@pytest.mark.usefixtures("patient")
@on(Mode("dist_sync", 2), Mode("dist_sync", 4))
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


@pytest.mark.usefixtures("patient")
@on(Mode("dist_sync", 3))
def test_updates_in_the_steady_state_send_nothing(store):
    own, shared = np.zeros(5000, F32), store.zeros(5000)
    store.init(["own", "shared"], [own, own])
    optimizer = optimizers.create("sgd", learning_rate=0.1)
    store.set_optimizer(optimizer)

    def steps(n):
        for step in range(n):
            optimizer.learning_rate = 0.1 * step
            store.pushpull(["own", "shared"], [own, shared])

    steps(3)
    assert counted(store, lambda: steps(5), *NAMES[:2]) == [0, 5]


@on(Mode("dist_sync", 2))
def test_a_call_that_did_not_meet_is_counted_and_sends(store):
    value = np.ones(10, F32)
    store.init("w", value)

    def call():
        if store.rank == 0:
            store.push("w", value)
            store.pull("w")
        else:
            store.pushpull("w", value)

    assert counted(store, call, "direct_calls", "declined_calls") == [0, store.rank]


@on(Mode("dist_sync", 2, memory="off"), Mode("dist_sync", 1))
def test_no_counts_of_shared_memory_where_there_is_none(store):
    store.init("w", np.ones(10, F32))
    store.pushpull("w", np.ones(10, F32))
    assert "messages_sent" in store.stats()
    assert "direct_calls" not in store.stats()


# --- what goes wrong


@on(Mode("dist_sync", 2), timeout_s=0.6)
def test_the_report_of_a_stall_says_where_the_other_is(store, told):
    value = np.ones(4, F32)
    store.init("w", value)
    for _ in range(3):
        store.pushpull("w", value)
    if store.rank == 1:
        assert told.wait(20)
        store.pushpull("w", value)
    else:
        kind, text = refused(store.pushpull, "w", value)
        told.set()
        assert kind is StallError
        assert "pushpull of key 'w', round 4" in text
        assert "Not arrived: worker 1 on localhost (pushed it 3 times; outside the store" in text
        assert "its last call was pushpull of key 'w'" in text
        value = store.pull("w")
    assert uniform(value) == 16  # the stall did no harm to the round


def failing(weight, grad, state):
    """An optimizer of the user's that raises in its third round."""
    state = 1 if state is None else state + 1
    if state == 3:
        raise ZeroDivisionError("in the user's optimizer")
    weight += grad
    return state


@pytest.mark.parametrize("owner", [0, 1])
@on(Mode("dist_sync", 2), timeout_s=1.0)
def test_an_optimizer_that_raises(store, owner, patient):
    """It raises at the owner; the others do not get a wrong sum, then or later."""
    for key in ("other", "w") if owner else ("w", "other"):  # a function's key has one owner, by its number
        store.init(key, np.zeros(1000, F32))
    store.set_optimizer(failing)
    for expected in (2, 4):
        store.pushpull("w", value := np.ones(1000, F32))
        assert uniform(value) == expected
    kinds = [refused(store.pushpull, "w", np.ones(1000, F32))[0] for _ in range(2)]
    assert None not in kinds
    assert store.rank != owner or kinds[0] is ZeroDivisionError
    with contextlib.suppress(Exception):
        store.close()


@pytest.mark.parametrize("where", ["adding", "deciding"])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupted_call_does_not_lead_to_wrong_sums(request, monkeypatch, where, victim):
    """Ctrl-C in the middle of a call, which the program survives: later calls raise, or are right."""
    from mpikv.collectives import shared as sums

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

    def body(store):
        found = {}
        store.init("w", np.zeros(LARGE, F32))
        for step in range(6):
            if step == 2 and store.rank == victim:
                armed.set()
            elif step == 2 and where == "deciding":
                time.sleep(0.1)  # so that the other one waits for it
            try:
                store.pushpull("w", value := numbers(store, LARGE, step))
                found[step] = value.tobytes()
            except KeyboardInterrupt:
                assert store.rank == victim
            except MpikvError:
                if store.rank != victim:
                    break  # it has waited its time
        with contextlib.suppress(Exception):
            store.close()
        return found

    expected = run(2, body, algorithm="naive")[0]
    for result in run(2, body, timeout_s=0.8):
        assert result.items() <= expected.items()  # no wrong sum
    assert hit.is_set()
