"""Uneven data in a Trainer: the mean over the examples that were there, and equal weights on all workers at the end."""

from __future__ import annotations

import contextlib

import frameworks
import numpy as np
import pytest
from on_workers import on
from store_modes import ONE_HOST, SERVED, TRAINING, TWO_HOSTS, Mode, modes

from mpikv import KVStore, Parameter, Trainer
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.testing.ranks import RankError

torch = frameworks.need("torch")
from torch_training import assert_close, batch, loss, network, reference, sgd, train, weights  # noqa: E402

LENGTHS = (3, 5, 2)  # steps of worker 0, 1, 2


def size(step: int, worker: int, how: str = "examples") -> int:
    """How many examples a worker has in a step: fewer in its last one, but where only equal batches make the mean."""
    if how == "outside":
        return 1 + (step + worker) % 3
    last = 4 if how == "means" else 3
    return 0 if step >= LENGTHS[worker] else last if step == LENGTHS[worker] - 1 else 4


def uneven(workers: int, how: str = "examples") -> list[dict[int, int]]:
    counts = [{one: size(step, one, how) for one in range(workers)} for step in range(max(LENGTHS[:workers]))]
    return [{worker: n for worker, n in parts.items() if n} for parts in counts]


@pytest.mark.parametrize("how", ["examples", "sums", "means", "outside"])
@pytest.mark.parametrize("on_store", [True, False], ids=["store", "worker"])
@modes(*TRAINING)
def test_the_mean_over_the_examples_that_were_there(mode: Mode, on_store: bool, how: str) -> None:
    """Outside of `join` all workers have examples in each step."""
    longest = max(LENGTHS[: mode.workers])

    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = sgd(net, store, update_on_kvstore=on_store, overlap=how == "means")
        with contextlib.nullcontext() if how == "outside" else trainer.join():
            for step in range(longest if how == "outside" else LENGTHS[store.rank]):
                n = size(step, store.rank, how)
                trainer.zero_grad()
                loss(net, batch(step, store.rank, n), "sum" if how == "sums" else "mean").backward()
                if how in ("examples", "outside"):
                    trainer.step(examples=n)
                else:
                    trainer.step(n if how == "sums" else None, wait=False)
                    for parameter in net.parameters():
                        trainer.wait(parameter)
        assert trainer.steps == longest
        return weights(net)

    assert_close(mode.run(body), reference(uneven(mode.workers, how)))


@pytest.mark.parametrize("clip", [None, 0.9], ids=["", "clipped"])
@modes(ONE_HOST, TWO_HOSTS, SERVED)
def test_two_epochs_with_a_learning_rate_set_in_the_loop(mode: Mode, clip: float | None) -> None:
    """Those that have left take it over, as the owners of their parts."""
    longest = max(LENGTHS[: mode.workers])

    def rate(step: int) -> float:
        return 0.1 / (step % longest + 1)

    def body(store: KVStore) -> tuple[list[np.ndarray], float]:
        net = network(store.rank)
        trainer = Trainer(net, "sgd", {"learning_rate": 0.5}, kvstore=store, clip_global_norm=clip)
        for epoch in range(2):
            with trainer.join():
                for step in range(LENGTHS[store.rank]):
                    trainer.zero_grad()
                    trainer.set_learning_rate(rate(step))
                    n = size(step, store.rank)
                    loss(net, batch(epoch * longest + step, store.rank, n)).backward()
                    trainer.step(examples=n)
        return weights(net), trainer.learning_rate

    found = mode.run(body)
    right = reference(
        2 * uneven(mode.workers),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        options=lambda step: {"lr": rate(step)},
        clip=clip,
    )
    assert_close([one for one, _ in found], right)
    assert {last for _, last in found} == {rate(longest - 1)}


@on(ONE_HOST, TWO_HOSTS, SERVED)
def test_numpy_parameters_and_a_store_with_an_optimizer_of_its_own(store: KVStore) -> None:
    """Worker r has r + 1 steps with gradient 2: the update of each is 2, whoever is there."""
    store.init("other", np.zeros(1))
    store.set_optimizer("test")
    parameter = Parameter(np.zeros(3), "w")
    trainer = Trainer([parameter], "test", kvstore=store)
    with trainer.join():
        for _ in range(store.rank + 1):
            parameter.grad[...] = 2
            trainer.step()
    assert parameter.data.tolist() == [2.0 * store.num_workers] * 3


@on(ONE_HOST)
def test_on_one_host_it_costs_one_call_through_memory(store: KVStore) -> None:
    net = network(0)
    trainer = sgd(net, store)
    with trainer.join():
        train(net, trainer, steps=[0])  # after the first one, in which workers agree
        before = store.stats()
        train(net, trainer, steps=range(1, 6))
        after = store.stats()
    assert sum(after[name] - before[name] for name in ("direct_calls", "declined_calls")) == 10
    assert after["control_messages_sent"] == before["control_messages_sent"]


# ---- what is an error


@on(ONE_HOST, TWO_HOSTS)
def test_workers_that_count_in_different_ways(store: KVStore) -> None:
    net = network(0)
    trainer = sgd(net, store)
    loss(net, batch(0, store.rank)).backward()
    with trainer.join(), pytest.raises(ValueError, match=r"step\(batch_size\) on worker 0, step\(\) on worker 1"):
        trainer.step(4 if store.rank == 0 else None)


def test_an_exception_leaves_at_once_and_the_others_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpikv.session.waits.ANSWER_S", 0.2)  # nobody answers any more

    def body(store: KVStore) -> None:
        net = network(0)
        trainer = sgd(net, store)
        with trainer.join():
            train(net, trainer, steps=[0])
            if store.rank == 1:
                raise OSError("no such image")
            store.session.waits.timeout_s = 0.5  # as soon as both have made a step, for which PyTorch imports much
            train(net, trainer, steps=[1])

    with pytest.raises(RankError) as caught:
        ONE_HOST.run(body)
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


@on(Mode("dist_async", 2))
def test_asynchronous_stores_have_no_join(store: KVStore) -> None:
    trainer = Trainer([Parameter(np.zeros(2))], "test", kvstore=store)
    for call in (lambda: trainer.join().__enter__(), lambda: trainer.step(examples=3)):
        with pytest.raises(UnsupportedError, match="dist_async store do not wait for each other"):
            call()


@on(TWO_HOSTS)
def test_a_missing_gradient_is_found_before_others_count_on_this_worker(store: KVStore) -> None:
    net = network(0)
    trainer = sgd(net, store)
    with trainer.join():
        with pytest.raises(ValueError, match="grad is None"):
            trainer.step()
        train(net, trainer, store.rank, [0])
    assert trainer.steps == 1
