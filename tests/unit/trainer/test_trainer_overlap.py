"""Gradients pushed during the backward pass: the same weights as with `step` alone, in every mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from on_workers import counted, on
from store_modes import ONE_HOST, THREE_HOSTS, TRAINING, TWO_HOSTS, Mode

from mpikv import KVStore, Parameter, Trainer
from mpikv.hostmemory.common_calls import CommonCalls
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import TEST_TIMEOUT_S

SIZES = (3, 1000, 70_000, 17, 5, 40_000, 2, 1, 0)  # two of them fill a first bucket, the small ones share others
STEPS = 6
MODES = (*TRAINING, THREE_HOSTS, Mode("dist_sync", 3, 2))


def parameters() -> list[Parameter]:
    return [Parameter(np.arange(n, dtype=np.float32) % 7, f"p{i}") for i, n in enumerate(SIZES)]


def write_gradients(params: list[Parameter], store: KVStore, step: int) -> None:
    for i, parameter in enumerate(params):
        parameter.grad[...] = (store.rank + 1) * (step + 1) * (i + 1)


def momentum(params: list[Parameter], store: KVStore, **options: Any) -> Trainer:
    return Trainer(params, "sgd", {"learning_rate": 0.5, "momentum": 0.5}, kvstore=store, **options)


def check(params: list[Parameter], workers: int, frozen_from: int) -> None:
    """Plain SGD with rate 0.5 and momentum 0.5 on integer gradients; all values are exact in float32."""
    for i, (n, parameter) in enumerate(zip(SIZES, params, strict=True)):
        weight, change = np.arange(n, dtype=np.float32) % 7, 0.0
        for step in range(frozen_from if i == 3 else STEPS):
            change = 0.5 * change - 0.5 * (step + 1) * (i + 1) * workers * (workers + 1) / 2 / 4
            weight = weight + np.float32(change)
        np.testing.assert_array_equal(parameter.data, weight)


@on(*MODES)
@pytest.mark.parametrize(("on_store", "frozen_from"), [(True, STEPS), (False, STEPS), (True, 3)])
def test_handed_over_or_not_the_weights_are_the_same(store: KVStore, on_store: bool, frozen_from: int) -> None:
    params = parameters()
    trainer = momentum(params, store, update_on_kvstore=on_store)
    for step in range(STEPS):
        if step == frozen_from:
            params[3].grad_req = "null"  # whose bucket nothing holds up
        write_gradients(params, store, step)
        for i, parameter in reversed(list(enumerate(params))):
            if (i + step + store.rank) % 2:  # another choice on every worker
                trainer.push_grad(parameter if step % 2 else f"p{i}", 4)
        trainer.step(4, wait=step != 2)
        for parameter in params if step == 2 else ():
            trainer.wait(parameter)
    check(params, store.num_workers, frozen_from)


@on(Mode("dist_sync", 2, 0, "owners", hosts="ab"))
def test_small_keys_share_messages_between_hosts(store: KVStore) -> None:
    """Each worker sends the other one's keys, and the new values of its own, once for all 50 keys."""
    trainer = Trainer([Parameter(np.zeros(10, np.float32), f"p{i}") for i in range(50)], "test", kvstore=store)
    trainer.step(1)
    counts = "messages_sent", "control_messages_sent"
    for _ in range(2):  # a worker counts when it has answered the other one
        sent, control = counted(store, lambda: (trainer.step(1), store.barrier()), *counts)
        assert sent - control == 2


@on(TWO_HOSTS)
def test_what_push_grad_refuses(store: KVStore) -> None:
    params = parameters()
    trainer = Trainer(params, "test", kvstore=store)
    other = Parameter(np.zeros(3, np.float32))
    for call in (lambda: trainer.push_grad(other, 1), lambda: trainer.push_grad("no", 1), lambda: trainer.wait("no")):
        with pytest.raises(ValueError, match="not among this trainer's parameters"):
            call()
    trainer.push_grad(params[0])  # no batch size is known yet: it goes with the step
    trainer.push_grad(params[0], 2)
    with pytest.raises(ValueError, match="pushed already"):
        trainer.push_grad(params[0], 2)
    for call in (lambda: trainer.push_grad(params[1], 3), lambda: trainer.step(3)):
        with pytest.raises(ValueError, match="a batch of 2, not 3"):
            call()
    with pytest.raises(ValueError, match="batch_size is the number"):
        Trainer(params, "test", kvstore=store).push_grad(params[1], 0)
    trainer.step(2)
    trainer.push_grad(params[0])  # that of the last step
    trainer.step(2)


def test_different_trained_parameters_are_an_error_on_every_worker() -> None:
    def body(store: KVStore) -> None:
        params = parameters()
        if store.rank == 1:
            params[4].grad_req = "null"
        Trainer(params, "test", kvstore=store)

    with pytest.raises(RankError, match=r"(rank \d: ConfigError: .*different.*){3}"):
        TWO_HOSTS.run(body)


def test_gradients_lie_in_shared_memory_and_need_no_copy_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody gives up waiting for the others because another rank gets no processor for long.
    monkeypatch.setattr("mpikv.strategies.direct.CommonCalls", partial(CommonCalls, wait_s=TEST_TIMEOUT_S))

    def body(store: KVStore) -> list[int]:
        params = [Parameter(np.zeros(1000, np.float32), f"p{i}") for i in range(4)]
        trainer = Trainer(params, "test", kvstore=store, update_on_kvstore=False)
        for _ in range(2):  # in the first one workers agree
            write_gradients(params, store, 0)
            before = store.stats()
            trainer.step(1)
        np.testing.assert_array_equal(params[3].grad, np.full(1000, 4 * 3, np.float32))
        after = store.stats()
        return [after[name] - before[name] for name in ("messages_sent", "bytes_copied", "bytes_added")]

    # 4 arrays of 4000 bytes side by side: each worker adds half of them, and copies its half to the other.
    assert ONE_HOST.run(body) == [[0, 8000, 8000]] * 2


@on(ONE_HOST)
def test_a_gradient_that_somebody_holds_stays_where_it_is(store: KVStore) -> None:
    params = [Parameter(np.zeros(10, np.float32), f"p{i}") for i in range(2)]
    held = params[0].grad
    trainer = Trainer(params, "test", kvstore=store)
    held[...] = 1
    params[1].grad[...] = 2
    trainer.step(1)
    assert [parameter.data.tolist() for parameter in params] == [[2] * 10, [4] * 10]
