"""What direct calls cost, counted exactly, and what they do when something goes wrong."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from direct_stores import F32, LARGE, numbers, refused, run

from mpikv import MpikvError, StallError, optimizers
from mpikv.hostmemory.common_calls import CommonCalls

# --- counts


def counts(store):
    stats = store.stats()
    return np.array([stats[name] for name in ("messages_sent", "direct_calls", "bytes_copied", "bytes_added")])


@pytest.mark.parametrize("workers", [2, 4])
def test_the_steady_state_sends_nothing(patient, workers):
    """n(p-1)/p bytes copied in and added and n copied out; in place n(p-1)/p of both; see collectives/shared."""
    n, p = 1 << 17, workers
    n_bytes, part = 4 * n, 4 * n * (workers - 1) // workers

    def body(store):
        own, shared, tiny = np.zeros(n, F32), store.zeros(n), np.zeros(100, F32)
        store.init(["own", "shared", "tiny"], [own, own, tiny])
        calls = {"own": own, "shared": shared, "tiny": tiny}
        found = {}
        for key, array in calls.items():
            for _ in range(3):
                store.pushpull(key, array)
            store.barrier()
            before = counts(store)
            for _ in range(5):
                store.pushpull(key, array)
            found[key] = (counts(store) - before).tolist()
            store.barrier()
        return found

    results = run(workers, body)
    for found in results:
        assert found["own"] == [0, 5, 5 * (part + n_bytes), 5 * part]
        assert found["shared"] == [0, 5, 5 * part, 5 * part]
        # Each for itself: in, to the result, and all others' values added.
        assert found["tiny"] == [0, 5, 5 * 800, 5 * 400 * (p - 1)]


def test_updates_in_the_steady_state_send_nothing(patient):
    def body(store):
        own, shared = np.zeros(5000, F32), store.zeros(5000)
        store.init(["own", "shared"], [own, own])
        optimizer = optimizers.create("sgd", learning_rate=0.1)
        store.set_optimizer(optimizer)
        for _ in range(3):
            store.pushpull(["own", "shared"], [own, shared])
        store.barrier()
        before = counts(store)
        for step in range(5):
            optimizer.learning_rate = 0.1 * step
            store.pushpull(["own", "shared"], [own, shared])
        found = (counts(store) - before).tolist()
        store.barrier()
        return found[:2]

    assert run(3, body) == [[0, 5]] * 3


def test_a_call_that_did_not_meet_is_counted_and_sends():
    def body(store):
        value = np.ones(10, F32)
        store.init("w", value)
        store.barrier()
        before = store.stats()
        if store.rank == 0:
            store.push("w", value)
            store.pull("w")
        else:
            store.pushpull("w", value)
        after = store.stats()
        return [after[name] - before[name] for name in ("direct_calls", "declined_calls")]

    assert run(2, body) == [[0, 0], [0, 1]]


def test_no_counts_of_shared_memory_where_there_is_none():
    def body(store):
        value = np.ones(10, F32)
        store.init("w", value)
        store.pushpull("w", value)
        return "messages_sent" in store.stats(), "direct_calls" in store.stats()

    assert run(2, body, shared_memory="off") == [(True, False)] * 2
    assert run(1, body) == [(True, False)]


# --- what goes wrong


def test_the_report_of_a_stall_says_where_the_other_is():
    told = threading.Event()

    def body(store):
        value = np.ones(4, F32)
        store.init("w", value)
        for _ in range(3):
            store.pushpull("w", value)
        if store.rank == 1:
            assert told.wait(20)
            store.pushpull("w", value)
            return value.tolist()
        kind, text = refused(store.pushpull, "w", value)
        told.set()
        return kind, text, store.pull("w").tolist()

    (kind, text, after), value = run(2, body, timeout_s=0.6)
    assert kind is StallError
    assert "pushpull of key 'w', round 4" in text
    assert "Not arrived: worker 1 on localhost (pushed it 3 times; outside the store" in text
    assert "its last call was pushpull of key 'w'" in text
    assert after == value == [16.0] * 4  # the stall did no harm to the round


def failing(weight, grad, state):
    """An optimizer of the user's that raises in its third round."""
    state = 1 if state is None else state + 1
    if state == 3:
        raise ZeroDivisionError("in the user's optimizer")
    weight += grad
    return state


@pytest.mark.parametrize("owner", [0, 1])
def test_an_optimizer_that_raises(patient, owner):
    """It raises at the owner; the others do not get a wrong sum, then or later."""

    def body(store):
        value = np.empty(1000, F32)
        # A function's key has one owner, which follows from its number.
        for key in ("other", "w") if owner else ("w", "other"):
            store.init(key, np.zeros(1000, F32))
        store.set_optimizer(failing)
        found = []
        for _ in range(4):
            value[:] = 1
            kind, _ = refused(store.pushpull, "w", value)
            found.append(np.unique(value).tolist() if kind is None else kind)
        with contextlib.suppress(Exception):
            store.close()
        return found

    results = run(2, body, timeout_s=1.0)
    assert [result[:2] for result in results] == [[[2.0], [4.0]]] * 2
    assert results[owner][2] is ZeroDivisionError
    for result in results:
        assert all(isinstance(one, type) and issubclass(one, Exception) for one in result[2:]), result


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
        value, found = np.empty(LARGE, F32), []
        store.init("w", np.zeros(LARGE, F32))
        for step in range(6):
            value[:] = numbers(store, LARGE, step)
            if step == 2 and store.rank == victim:
                armed.set()
            elif step == 2 and where == "deciding":
                time.sleep(0.1)  # so that the other one waits for it
            try:
                store.pushpull("w", value)
                found.append((step, value.tobytes()))
            except KeyboardInterrupt:
                found.append((step, "interrupted"))
            except MpikvError as error:
                found.append((step, type(error).__name__))
                if store.rank != victim:
                    break  # it has waited its time
        with contextlib.suppress(Exception):
            store.close()
        return found

    expected = run(2, body, algorithm="naive")[0]
    for result in run(2, body, timeout_s=0.8):
        for step, entry in result:
            if isinstance(entry, bytes):
                assert entry == expected[step][1], f"a wrong sum in step {step}"
    assert hit.is_set()
