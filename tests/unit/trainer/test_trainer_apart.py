"""Workers that make different numbers of steps, or freeze different parameters while a trainer runs, are told so."""

from __future__ import annotations

import contextlib
import re
import threading

import numpy as np
import pytest
from store_modes import MESSAGES, ONE_HOST, SERVED, THREE_HOSTS, TWO_HOSTS, Mode, modes

from mpikv import ConfigError, MpikvError, Parameter, PeerError, StallError, Trainer
from mpikv.kvstore import KVStore

MODES = (ONE_HOST, MESSAGES, SERVED)
WORKERS = 3
LIMIT_S = 1.0  # of a wait that nothing ends
OF_THREE = (MESSAGES, TWO_HOSTS, THREE_HOSTS)


def trained(store: KVStore, steps: int = 1, *, wait: bool = True) -> tuple[list[Parameter], Trainer]:
    params = [Parameter(np.zeros(3, np.float32), f"p{i}") for i in range(3)]
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=store)
    for _ in range(steps):
        step(params, trainer, wait=wait)
    return params, trainer


def step(params: list[Parameter], trainer: Trainer, *, wait: bool = True) -> None:
    for parameter in params:
        parameter.grad[...] = 1
    trainer.step(WORKERS, wait=wait)


@pytest.mark.parametrize("wait", [True, False], ids=["wait", "no wait"])
@modes(*MODES)
def test_a_worker_with_fewer_batches_is_named_with_its_steps(mode: Mode, wait: bool) -> None:
    def body(store: KVStore) -> str | None:
        params, trainer = trained(store, 4, wait=wait)
        if store.rank == 1:
            return None  # closes
        if not wait:
            step(params, trainer, wait=False)  # the next one finds out
        with pytest.raises(PeerError) as caught:
            step(params, trainer, wait=wait)
        with contextlib.suppress(PeerError):
            store.close()
        return str(caught.value)

    text = mode.run(body)[0]
    said = "this worker is in step 5 of its Trainer, and worker 1 on .* has left after step 4: "
    for one in (said, "trainer.join()", "closed its store after 4 pushes", "In detail: worker 0"):
        assert re.search(one, text, re.DOTALL)


@modes(*MODES)
def test_a_worker_in_the_evaluation_is_told_of_at_once(mode: Mode) -> None:
    """Not after the time limit: one waits in a step, the others in a call that needs it."""
    all_know = threading.Barrier(mode.workers, timeout=60)

    def body(store: KVStore) -> str:
        params, trainer = trained(store, 4)
        calls = [lambda: step(params, trainer), store.barrier]
        if store.rank:
            calls.reverse()
        with pytest.raises(StallError) as caught:
            calls[0]()
        all_know.wait()
        calls[1]()  # which the others' first calls have waited for
        return str(caught.value)

    text, *others = mode.run(body, stall_warn_s=0.4)
    assert re.search(r"step 5 of its Trainer, and worker [12] on \S+ has not come to the next one after step 4", text)
    assert "(pushed it 4 times; in barrier" in text
    for one in (text, *others):
        assert "Deadlock: " in one
        assert re.search(r"worker 0 on \S+ in pushpull of key .*, round 5", one)


# --- parameters frozen on the way


@modes(*OF_THREE)
def test_frozen_and_thawed_on_all(mode: Mode) -> None:
    def body(store: KVStore) -> tuple[list[float], int]:
        params, trainer = trained(store)
        params[1].grad_req = "null"
        step(params, trainer)
        before = store.stats()["control_messages_sent"]
        step(params, trainer)
        unchanged = store.stats()["control_messages_sent"] - before
        params[1].grad_req = "write"
        step(params, trainer)
        return [float(parameter.data[0]) for parameter in params], unchanged

    assert mode.run(body) == [([-4, -2, -4], 0)] * WORKERS


@modes(*OF_THREE)
def test_other_parameters_on_other_workers(mode: Mode) -> None:
    def body(store: KVStore) -> str:
        params, trainer = trained(store)
        params[1 if store.rank == 1 else 2].grad_req = "null"
        with pytest.raises(ConfigError) as caught:
            step(params, trainer)
        assert [parameter.data.tolist() for parameter in params] == [[-1] * 3] * 3
        return str(caught.value)

    wanted = "different parameters frozen on different workers: worker 0 on .*worker 1 on .*: trainer0/p1"
    assert all(re.search(wanted, text, re.DOTALL) for text in mode.run(body))


@modes(TWO_HOSTS)
def test_on_one_worker_alone(mode: Mode) -> None:
    """The others wait for its gradients, and are told what it is doing; no weight is updated without them."""
    asks, told = threading.Event(), threading.Barrier(WORKERS - 1)

    def body(store: KVStore) -> tuple[str, str]:
        params, trainer = trained(store)
        agree = store.session.agree
        if store.rank == 1:  # its own limit is later
            params[1].grad_req = "null"
            store.session.agree = lambda *what, **how: (asks.set(), agree(*what, **how))[1]
        else:
            assert asks.wait(60)
            store.session.waits.timeout_s = LIMIT_S
        with pytest.raises(MpikvError) as caught:
            step(params, trainer)
        assert [parameter.data.tolist() for parameter in params] == [[-1] * 3] * 3
        if store.rank != 1:
            told.wait(60)  # who leaves first is the error of those that still wait
        with contextlib.suppress(MpikvError):
            store.close()
        return type(caught.value).__name__, str(caught.value)

    (first, said), _, (third, other) = mode.run(body)
    assert first == third == StallError.__name__
    assert any("worker 1 on " in text and "with other parameters frozen" in text for text in (said, other))
