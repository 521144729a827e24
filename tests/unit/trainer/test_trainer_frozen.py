"""Parameters frozen while a trainer runs: on all workers alike, or it is an error."""

from __future__ import annotations

import contextlib
import re
import threading

import numpy as np
import pytest
from store_modes import MESSAGES, THREE_HOSTS, TWO_HOSTS, Mode, modes

from mpikv import ConfigError, MpikvError, Parameter, StallError, Trainer
from mpikv.kvstore import KVStore

WORKERS = 3
MODES = (MESSAGES, TWO_HOSTS, THREE_HOSTS)


def trained(store: KVStore) -> tuple[list[Parameter], Trainer]:
    params = [Parameter(np.zeros(5, np.float32), f"p{i}") for i in range(3)]
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=store)
    step(params, trainer)
    return params, trainer


def step(params: list[Parameter], trainer: Trainer) -> None:
    for parameter in params:
        parameter.grad[...] = 1
    trainer.step(WORKERS)


@modes(*MODES)
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


@modes(*MODES)
def test_other_parameters_on_other_workers(mode: Mode) -> None:
    def body(store: KVStore) -> str:
        params, trainer = trained(store)
        params[1 if store.rank == 1 else 2].grad_req = "null"
        with pytest.raises(ConfigError) as caught:
            step(params, trainer)
        assert [parameter.data.tolist() for parameter in params] == [[-1] * 5] * 3
        return str(caught.value)

    wanted = "different parameters frozen on different workers: worker 0 on .*worker 1 on .*: trainer0/p1"
    assert all(re.search(wanted, text, re.DOTALL) for text in mode.run(body))


@modes(*MODES)
def test_on_one_worker_alone(mode: Mode) -> None:
    """The others wait for its gradients, and are told what it is doing; no weight is updated without them."""
    told = threading.Barrier(WORKERS)

    def body(store: KVStore) -> tuple[str, str]:
        params, trainer = trained(store)
        if store.rank == 1:
            params[1].grad_req = "null"
        with pytest.raises(MpikvError) as caught:
            step(params, trainer)
        assert [parameter.data.tolist() for parameter in params] == [[-1] * 5] * 3
        told.wait(60)  # who leaves first is the error of those that still wait
        with contextlib.suppress(MpikvError):
            store.close()
        return type(caught.value).__name__, str(caught.value)

    found = mode.run(body, timeout_s=1.0)
    assert [kind for kind, _ in found] == [StallError.__name__] * WORKERS
    said = [text for rank, (_, text) in enumerate(found) if rank != 1]
    assert any("worker 1 on " in text and "with other parameters frozen" in text for text in said)
