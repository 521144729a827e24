"""Uneven data in a Trainer: in `join` the mean over the examples that were there; else workers apart are told so."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import Any

import frameworks
import numpy as np
import pytest
from grids import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from on_workers import on
from store_modes import HYBRID, MESSAGES, ONE_HOST, SENDING, SERVED, THREE_HOSTS, TWO_HOSTS, Mode, modes

from mpikv import ConfigError, KVStore, MpikvError, Parameter, PeerError, StallError, Trainer
from mpikv.errors import UnsupportedError
from mpikv.testing.ranks import RankError
from mpikv.transports.faulty import Deaths, Faults

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
@pytest.mark.parametrize(("on_store", "clip"), [(True, None), (False, None), (None, 0.9)])
@modes(ONE_HOST, *SENDING, HYBRID[2])
def test_the_mean_over_the_examples_that_were_there(mode: Mode, on_store: Any, clip: Any, how: str) -> None:
    """In two epochs. Those that have left take the learning rate over that is set in the loop, as the owners of their
    parts. Outside of `join` all workers have examples in each step.
    """
    longest = max(LENGTHS[: mode.workers])

    def rate(step: int) -> float:
        return 0.1 / (step % longest + 1)

    def body(store: KVStore) -> tuple[list[np.ndarray], float]:
        net = network(store.rank)
        options = {"update_on_kvstore": on_store, "clip_global_norm": clip, "overlap": how == "means"}
        trainer = Trainer(net, "sgd", {"learning_rate": 0.5}, kvstore=store, **options)
        for epoch in range(2):
            with contextlib.nullcontext() if how == "outside" else trainer.join():
                for step in range(longest if how == "outside" else LENGTHS[store.rank]):
                    n = size(step, store.rank, how)
                    trainer.zero_grad()
                    trainer.set_learning_rate(rate(step))
                    data = batch(epoch * longest + step, store.rank, n)
                    loss(net, data, "sum" if how == "sums" else "mean").backward()
                    if how in ("examples", "outside"):
                        trainer.step(examples=n)
                    else:
                        trainer.step(n if how == "sums" else None, wait=False)
                        for parameter in net.parameters():
                            trainer.wait(parameter)
        assert trainer.steps == 2 * longest
        return weights(net), trainer.learning_rate

    found = mode.run(body)
    right = reference(
        2 * uneven(mode.workers, how),
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
def test_on_one_host_a_step_costs_one_call_more_through_memory(store: KVStore) -> None:
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

    with pytest.raises(RankError, match=r"rank 0: (Peer|Stall)Error: .*rank 1: OSError: no such image"):
        ONE_HOST.run(body)


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


# ---- without it: other numbers of steps, or other parameters frozen

WORKERS = 3
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
@modes(ONE_HOST, MESSAGES, SERVED)
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


@modes(ONE_HOST, MESSAGES, SERVED)
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


@on(*OF_THREE)
def test_frozen_and_thawed_on_all(store: KVStore) -> None:
    params, trainer = trained(store)
    params[1].grad_req = "null"
    step(params, trainer)
    before = store.stats()["control_messages_sent"]
    step(params, trainer)
    assert store.stats()["control_messages_sent"] == before
    params[1].grad_req = "write"
    step(params, trainer)
    assert [float(parameter.data[0]) for parameter in params] == [-4, -2, -4]


@on(*OF_THREE)
def test_other_parameters_on_other_workers(store: KVStore) -> None:
    params, trainer = trained(store)
    params[1 if store.rank == 1 else 2].grad_req = "null"
    wanted = r"different parameters frozen on different workers: worker 0 on (.|\n)*worker 1 on .*: trainer0/p1"
    with pytest.raises(ConfigError, match=wanted):
        step(params, trainer)
    assert [parameter.data.tolist() for parameter in params] == [[-1] * 3] * 3


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
            store.session.waits.timeout_s = 1.0  # nothing ends this wait
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


# ---- deaths


@settings(max_examples=examples(60))
@given(
    st.sampled_from([Mode("dist_sync", 4), Mode("dist_sync", 4, memory="off"), Mode("dist_sync", 3, 1, hosts="abca")]),
    st.tuples(st.integers(0, 3), st.integers(0, 4)),
    st.tuples(st.integers(1, 40), st.booleans()),
    st.sampled_from(["examples", "sums", "means"]),
    st.booleans(),
)
@example(Mode("dist_sync", 4, memory="off"), (3, 4), (7, True), "examples", True)  # the only one that has data
@example(Mode("dist_sync", 4, memory="off"), (3, 4), (7, True), "sums", False)
def test_a_worker_that_has_joined_or_not_dies(
    mode: Mode, dies: tuple[int, int], after: tuple[int, bool], how: str, on_store: bool
) -> None:
    """Worker i has i + 2 batches, of i + 2 examples each: means are over the examples of those that are there.

    dies: which one, and before which step. after: how many calls of its transport, or how many that send.
    """
    victim, deaths = dies[0] % mode.workers, Deaths()

    def body(store: Any) -> Any:
        me, weight = store.session.number, Parameter(np.zeros(2))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_store)
        changes, n = [], me + 2
        with trainer.join():
            for step in range(n):
                if me == victim and step == min(dies[1], me + 1):
                    deaths.die_in(store.session.members.workers[victim], after[0], sends=after[1])
                before = weight.data.copy()
                weight.grad[...] = np.array([1.0, 2.0**me]) * (n if how == "sums" else 1)
                trainer.step(n if how == "sums" else None, examples=n if how == "examples" else None)
                changes.append((before - weight.data).tolist())
        store.barrier()
        return changes, weight.data.tolist(), trainer.steps

    results = mode.run_continued(body, deaths, Faults)
    left = [worker for worker, one in enumerate(results) if one is not None]
    assert all(results[worker][1:] == results[left[0]][1:] for worker in left)
    for step in range(mode.workers + 1):
        have = [worker for worker in range(mode.workers) if worker + 2 > step]
        seen = [results[worker][0][step] for worker in left if worker in have]
        assert all(one == pytest.approx(seen[0]) for one in seen)
        means = [mean_of_bits(one, how) for one in (have, [worker for worker in have if worker != victim]) if one]
        assert not seen or any(seen[0] == pytest.approx([1.0, mean]) for mean in means)


def mean_of_bits(workers: list[int], how: str) -> float:
    weights = [1 if how == "means" else worker + 2 for worker in workers]
    return sum(w * 2.0**worker for w, worker in zip(weights, workers, strict=True)) / sum(weights)
