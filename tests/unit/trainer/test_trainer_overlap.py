"""Gradients pushed during the backward pass: the same weights as with `step` alone, in every mode."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpikv import KVStore, Parameter, Trainer
from mpikv.config import Config
from mpikv.hostmemory.common_calls import CommonCalls
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

SIZES = (3, 1000, 70_000, 17, 5, 40_000, 2, 1, 0)  # two of them fill a first bucket, the small ones share others
STEPS = 6


class Mode(NamedTuple):
    workers: int
    servers: int = 0
    hosts: tuple[str, ...] | None = None
    shared: str = "auto"


MODES = {
    "one host": Mode(3),
    "messages": Mode(3, shared="off"),
    "two hosts": Mode(3, hosts=("a", "a", "b")),
    "three hosts": Mode(3, hosts=("a", "b", "c")),
    "servers": Mode(3, servers=2),
    "alone": Mode(1),
}


def run(mode: Mode, body: Any) -> list[Any]:
    config = Config(timeout_s=TEST_TIMEOUT_S, shared_memory=mode.shared)
    return spawn_stores("dist_sync", mode.workers, body, num_servers=mode.servers, config=config, hosts=mode.hosts)


def parameters() -> list[Parameter]:
    return [Parameter(np.arange(n, dtype=np.float32) % 7, f"p{i}") for i, n in enumerate(SIZES)]


def write_gradients(params: list[Parameter], store: KVStore, step: int) -> None:
    for i, parameter in enumerate(params):
        parameter.grad[...] = (store.rank + 1) * (step + 1) * (i + 1)


def expected(step_count: int, workers: int, frozen_from: int | None = None) -> list[np.ndarray]:
    """Plain SGD with rate 0.5 and momentum 0.5 on integer gradients; all values are exact in float32."""
    weights = [np.arange(n, dtype=np.float32) % 7 for n in SIZES]
    for i in range(len(weights)):
        momentum = 0.0
        for step in range(step_count):
            if frozen_from is not None and i == 3 and step >= frozen_from:
                continue
            momentum = 0.5 * momentum - 0.5 * (step + 1) * (i + 1) * workers * (workers + 1) / 2 / 4
            weights[i] = weights[i] + np.float32(momentum)
    return weights


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_handed_over_or_not_the_weights_are_the_same(mode: Mode, on_store: bool) -> None:
    def body(store: KVStore) -> list[np.ndarray]:
        params = parameters()
        trainer = Trainer(
            params, "sgd", {"learning_rate": 0.5, "momentum": 0.5}, kvstore=store, update_on_kvstore=on_store
        )
        for step in range(STEPS):
            write_gradients(params, store, step)
            for i, parameter in reversed(list(enumerate(params))):
                if (i + step + store.rank) % 2:  # another choice on every worker
                    trainer.push_grad(parameter, 4)
            if step == 2:
                trainer.step(4, wait=False)
                for parameter in params:
                    trainer.wait(parameter)
            else:
                trainer.step(4)
        return [parameter.data for parameter in params]

    for weights in run(mode, body):
        for weight, right in zip(weights, expected(STEPS, mode.workers), strict=True):
            np.testing.assert_array_equal(weight, right)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_a_parameter_frozen_on_the_way_does_not_hold_up_its_bucket(mode: Mode) -> None:
    def body(store: KVStore) -> list[np.ndarray]:
        params = parameters()
        trainer = Trainer(params, "sgd", {"learning_rate": 0.5, "momentum": 0.5}, kvstore=store)
        for step in range(STEPS):
            if step == 3:
                params[3].grad_req = "null"
            write_gradients(params, store, step)
            trainer.push_grad(params[2], 4)
            trainer.push_grad("p3", 4)
            trainer.step(4)
        return [parameter.data for parameter in params]

    for weights in run(mode, body):
        for weight, right in zip(weights, expected(STEPS, mode.workers, frozen_from=3), strict=True):
            np.testing.assert_array_equal(weight, right)


def test_small_keys_share_messages_between_hosts() -> None:
    def body(store: KVStore) -> int:
        params = [Parameter(np.zeros(10, np.float32), f"p{i}") for i in range(50)]
        trainer = Trainer(params, "test", kvstore=store)
        sent = []
        for _ in range(3):
            before = store.stats()["messages_sent"]
            trainer.step(1)
            sent.append(store.stats()["messages_sent"] - before)
        assert sent[1] == sent[2]
        return sent[1]

    # Two workers: each sends the other's half and then its own, once for all 50 keys.
    assert run(Mode(2, hosts=("a", "b")), body) == [2, 2]


def test_states_of_keys_in_buckets_load_anywhere(tmp_path: Any) -> None:
    path = tmp_path / "states"

    def train(first: int, last: int) -> Any:
        def body(store: KVStore) -> list[np.ndarray]:
            params = parameters()
            if first:
                for parameter, weight in zip(params, kept, strict=True):
                    parameter.data[...] = weight
            trainer = Trainer(params, "sgd", {"learning_rate": 0.5, "momentum": 0.5}, kvstore=store)
            if first:
                trainer.load_states(path)
            for step in range(first, last):
                for i, parameter in enumerate(params):  # the sum over the workers is that of three, whoever they are
                    share = 6 * (step + 1) * (i + 1)
                    parameter.grad[...] = share if store.rank == 0 else 0
                trainer.step(4)
            trainer.save_states(path)
            return [parameter.data for parameter in params]

        return body

    kept = run(MODES["two hosts"], train(0, 2))[0]
    kept = run(MODES["servers"], train(2, 3))[0]
    kept = run(Mode(2, hosts=("a", "b")), train(3, 4))[0]
    for weights in run(MODES["one host"], train(4, STEPS)):
        for weight, right in zip(weights, expected(STEPS, 3), strict=True):
            np.testing.assert_array_equal(weight, right)


def test_what_push_grad_refuses() -> None:
    def body(store: KVStore) -> None:
        params = parameters()
        trainer = Trainer(params, "test", kvstore=store)
        with pytest.raises(ValueError, match="not among this trainer's parameters"):
            trainer.push_grad(Parameter(np.zeros(3, np.float32)), 1)
        with pytest.raises(ValueError, match="not among this trainer's parameters"):
            trainer.push_grad("nobody", 1)
        with pytest.raises(ValueError, match="not among this trainer's parameters"):
            trainer.wait("nobody")
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

    run(MODES["two hosts"], body)


def test_different_trained_parameters_are_an_error_on_every_worker() -> None:
    def body(store: KVStore) -> None:
        params = parameters()
        if store.rank == 1:
            params[4].grad_req = "null"
        Trainer(params, "test", kvstore=store)

    with pytest.raises(RankError) as caught:
        run(MODES["two hosts"], body)
    assert all("different" in str(error) for error in caught.value.errors.values())


def test_gradients_lie_in_shared_memory_and_need_no_copy_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody gives up waiting for the others because another rank gets no processor for long.
    monkeypatch.setattr("mpikv.strategies.direct.CommonCalls", partial(CommonCalls, wait_s=TEST_TIMEOUT_S))

    def body(store: KVStore) -> tuple[int, int]:
        params = [Parameter(np.zeros(1000, np.float32), f"p{i}") for i in range(4)]
        trainer = Trainer(params, "test", kvstore=store, update_on_kvstore=False)
        write_gradients(params, store, 0)
        trainer.step(1)  # the first one, in which workers agree
        write_gradients(params, store, 0)
        before = store.stats()
        trainer.step(1)
        after = store.stats()
        np.testing.assert_array_equal(params[3].grad, np.full(1000, 4 * 3, np.float32))
        assert after["messages_sent"] == before["messages_sent"]
        return after["bytes_copied"] - before["bytes_copied"], after["bytes_added"] - before["bytes_added"]

    # 4 arrays of 4000 bytes side by side: each worker adds half of them, and copies its half to the other.
    assert run(Mode(2), body) == [(8000, 8000), (8000, 8000)]


def test_a_gradient_that_somebody_holds_stays_where_it_is() -> None:
    def body(store: KVStore) -> None:
        params = [Parameter(np.zeros(10, np.float32), f"p{i}") for i in range(2)]
        held = params[0].grad
        trainer = Trainer(params, "test", kvstore=store)
        held[...] = 1
        params[1].grad[...] = 2
        trainer.step(1)
        np.testing.assert_array_equal(params[0].data, np.full(10, 2, np.float32))
        np.testing.assert_array_equal(params[1].data, np.full(10, 4, np.float32))

    run(Mode(2), body)
