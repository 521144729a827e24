"""Uneven data in a Trainer: the mean over the examples that were there, and equal weights on all workers at the end."""

from __future__ import annotations

from typing import Any

import frameworks
import numpy as np
import pytest

from mpikv import KVStore, Parameter, Trainer
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.testing.ranks import RankError

torch = frameworks.need("torch")
from torch_training import MODES, Mode, assert_close, batch, loss, network, reference, run, sgd, weights  # noqa: E402

LENGTHS = (5, 9, 2)  # steps of worker 0, 1, 2
CONDITIONS = [*MODES.values()]


def size(step: int, worker: int, *, last: int = 3) -> int:
    """How many examples a worker has in a step: fewer in its last one."""
    return 0 if step >= LENGTHS[worker] else last if step == LENGTHS[worker] - 1 else 4


def uneven(workers: int, last: int = 3) -> list[dict[int, int]]:
    steps = max(LENGTHS[:workers])
    counts = [{worker: size(step, worker, last=last) for worker in range(workers)} for step in range(steps)]
    return [{worker: n for worker, n in parts.items() if n} for parts in counts]


@pytest.mark.grid
@pytest.mark.parametrize("call", ["examples", "sums", "means"])
@pytest.mark.parametrize("on_store", [True, False], ids=["store", "worker"])
@pytest.mark.parametrize("mode", CONDITIONS, ids=MODES.keys())
def test_the_mean_over_the_examples_that_were_there(mode: Mode, on_store: bool, call: str) -> None:
    last = 4 if call == "means" else 3  # without counting, only equal batches make that mean

    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = sgd(net, store, update_on_kvstore=on_store, overlap=call == "means")
        with trainer.join():
            for step in range(100):
                n = size(step, store.rank, last=last)
                if not n:
                    break
                trainer.zero_grad()
                loss(net, batch(step, store.rank, n), "sum" if call == "sums" else "mean").backward()
                if call == "examples":
                    trainer.step(examples=n)
                else:
                    trainer.step(n if call == "sums" else None, wait=False)
                    for parameter in net.parameters():
                        trainer.wait(parameter)
        assert trainer.steps == max(LENGTHS[: mode.workers])
        return weights(net)

    assert_close(run(mode, body), reference(uneven(mode.workers, last)))


@pytest.mark.parametrize("mode", CONDITIONS, ids=MODES.keys())
def test_two_epochs_with_other_lengths_and_clipping(mode: Mode) -> None:
    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = sgd(net, store, clip_global_norm=0.9)
        longest = max(LENGTHS[: mode.workers])
        for epoch in range(2):
            with trainer.join():
                for step in range(LENGTHS[store.rank]):
                    trainer.zero_grad()
                    n = size(step, store.rank)
                    loss(net, batch(epoch * longest + step, store.rank, n)).backward()
                    trainer.step(examples=n)
        return weights(net)

    assert_close(run(mode, body), reference(2 * uneven(mode.workers), clip=0.9))


@pytest.mark.parametrize("mode", CONDITIONS, ids=MODES.keys())
def test_a_learning_rate_set_in_the_loop(mode: Mode) -> None:
    """Those that have left take it over, as the owners of their parts."""

    def body(store: KVStore) -> tuple[list[np.ndarray], float]:
        net = network(store.rank)
        trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore=store)
        with trainer.join():
            for step in range(LENGTHS[store.rank]):
                trainer.zero_grad()
                trainer.set_learning_rate(0.1 / (step + 1))
                n = size(step, store.rank)
                loss(net, batch(step, store.rank, n)).backward()
                trainer.step(examples=n)
        return weights(net), trainer.learning_rate

    found = run(mode, body)
    right = reference(
        uneven(mode.workers),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        rates=lambda step: 0.1 / (step + 1),
    )
    assert_close([one for one, _ in found], right)
    assert {rate for _, rate in found} == {0.1 / max(LENGTHS[: mode.workers])}


@pytest.mark.parametrize("mode", CONDITIONS, ids=MODES.keys())
def test_examples_are_counted_outside_join_too(mode: Mode) -> None:
    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = sgd(net, store)
        for step in range(5):
            trainer.zero_grad()
            n = 1 + (step + store.rank) % 3
            loss(net, batch(step, store.rank, n)).backward()
            trainer.step(examples=n)
        return weights(net)

    sizes = [{worker: 1 + (step + worker) % 3 for worker in range(mode.workers)} for step in range(5)]
    assert_close(run(mode, body), reference(sizes))


def test_numpy_parameters_and_a_store_with_an_optimizer_of_its_own() -> None:
    """Worker r has r + 1 steps with gradient 2: the update of each is 2, whoever is there."""

    def body(store: KVStore) -> list[float]:
        store.init("other", np.zeros(1))
        store.set_optimizer("test")
        parameter = Parameter(np.zeros(3), "w")
        trainer = Trainer([parameter], "test", kvstore=store)
        with trainer.join():
            for _ in range(store.rank + 1):
                parameter.grad[...] = 2
                trainer.step()
        return parameter.data.tolist()

    for mode in CONDITIONS:
        assert run(mode, body) == [[2.0 * mode.workers] * 3] * mode.workers


def test_on_one_host_it_costs_one_call_through_memory() -> None:
    def body(store: KVStore) -> tuple[int, int]:
        net = network(0)
        trainer = sgd(net, store)
        with trainer.join():
            before: dict[str, int] = {}
            for step in range(6):
                trainer.zero_grad()
                loss(net, batch(step, 0)).backward()
                trainer.step()
                before = before or store.stats()  # after the first one, in which workers agree
            after = store.stats()
        calls = sum(after[name] - before[name] for name in ("direct_calls", "declined_calls"))
        return calls, after["control_messages_sent"] - before["control_messages_sent"]

    assert run(MODES["one host"], body) == [(10, 0)] * 2


# ---- what is an error


def test_workers_that_count_in_different_ways() -> None:
    def body(store: KVStore) -> None:
        net = network(0)
        trainer = sgd(net, store)
        loss(net, batch(0, store.rank)).backward()
        with trainer.join(), pytest.raises(ValueError, match=r"step\(batch_size\) on worker 0, step\(\) on worker 1"):
            trainer.step(4 if store.rank == 0 else None)

    for mode in (MODES["one host"], MODES["two hosts"]):
        run(mode, body)


def test_an_exception_leaves_at_once_and_the_others_do_not_wait_for_ever() -> None:
    def body(store: KVStore) -> None:
        net = network(0)
        trainer = sgd(net, store)
        with trainer.join():
            if store.rank == 1:
                raise OSError("no such image")
            loss(net, batch(0, store.rank)).backward()
            trainer.step()

    with pytest.raises(RankError) as caught:
        run(MODES["one host"], body, timeout_s=1.0)
    assert isinstance(caught.value.errors[1], OSError)
    assert isinstance(caught.value.errors[0], MpikvError)


def test_bad_calls() -> None:
    parameter = Parameter(np.zeros(2))
    trainer = Trainer([parameter], "test", update_on_kvstore=False)
    with trainer.join():
        with pytest.raises(MpikvError, match="join inside join"), trainer.join():
            pass
        for call in (trainer.allreduce_grads, trainer.update):
            with pytest.raises(UnsupportedError, match="in join"):
                call()
        for wrong in (0, -1, True, "4", float("nan")):
            with pytest.raises(ValueError, match="in join the number of this worker's examples, is a number above 0"):
                trainer.step(wrong)
            with pytest.raises(ValueError, match="examples, the number of this worker's examples, is a number above 0"):
                trainer.step(examples=wrong)
        trainer.step(2)
    with pytest.raises(ValueError, match="give one of them"):
        trainer.step(4, examples=4)
    with trainer.join():  # the first one has ended
        pass


def test_asynchronous_stores_have_no_join() -> None:
    def body(store: KVStore) -> None:
        trainer = Trainer([Parameter(np.zeros(2))], "test", kvstore=store)
        for call in (lambda: trainer.join().__enter__(), lambda: trainer.step(examples=3)):
            with pytest.raises(UnsupportedError, match="dist_async store do not wait for each other"):
                call()

    run(Mode(2, name="dist_async"), body)


def test_a_missing_gradient_is_found_before_others_count_on_this_worker() -> None:
    def body(store: KVStore) -> Any:
        net = network(0)
        trainer = sgd(net, store)
        with trainer.join():
            with pytest.raises(ValueError, match="grad is None"):
                trainer.step()
            loss(net, batch(0, store.rank)).backward()
            trainer.step()
        return trainer.steps

    assert run(MODES["two hosts"], body) == [1] * 3
