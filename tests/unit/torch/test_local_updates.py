"""Local training on thread ranks, against the same training of all workers one after another by PyTorch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import frameworks
import numpy as np
import pytest
from on_workers import on
from store_modes import MESSAGES, ONE_HOST, SERVED, TWO_HOSTS, Mode
from torch_training import batch, loss, network, weights

from mpikv import kv, optimizers
from mpikv.errors import MpikvError

torch = frameworks.need("torch")
import mpikv.torch as mt  # noqa: E402

STEPS = 12
NESTEROV = {"type": "nesterov", "learning_rate": 0.6, "momentum": 0.8}
SLOWMO = {"type": "slowmo", "learning_rate": 0.9, "momentum": 0.4}
OUTER = {  # what PyTorch calls them
    "mean": ("mean", {"lr": 1.0}),
    "nesterov": (NESTEROV, {"lr": 0.6, "momentum": 0.8, "nesterov": True}),
    "slowmo": (SLOWMO, {"lr": 0.9, "momentum": 0.4}),
    "an optimizer": (optimizers.SGD(learning_rate=0.5), {"lr": 0.5}),
}


def own_optimizer(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def own_step(net: Any, optimizer: Any, worker: int, step: int) -> None:
    optimizer.zero_grad()
    loss(net, batch(step, worker)).backward()
    optimizer.step()


class Reference:
    """All workers in turn. ends(step): whether a round ends after that many steps. share: of each worker's part."""

    def __init__(self, workers: int, outer: dict[str, Any], ends: Callable[[int], bool]) -> None:
        self.nets = [network(0) for _ in range(workers)]
        self.optimizers = [own_optimizer(net) for net in self.nets]
        self.common = [torch.nn.Parameter(one.detach().clone()) for one in self.nets[0].parameters()]
        self.outer, self.ends = torch.optim.SGD(self.common, **outer), ends

    def run(self, steps: int = STEPS) -> list[list[np.ndarray]]:
        for step in range(steps):
            for worker, (net, optimizer) in enumerate(zip(self.nets, self.optimizers, strict=True)):
                own_step(net, optimizer, worker, step)
            if self.ends(step + 1):
                self.exchange([1 / len(self.nets)] * len(self.nets))
        return [weights(net) for net in self.nets]

    def exchange(self, shares: Sequence[float]) -> None:
        with torch.no_grad():
            for i, common in enumerate(self.common):
                moved = [common - list(net.parameters())[i] for net in self.nets]
                common.grad = sum(share * one for share, one in zip(shares, moved, strict=True))
            self.outer.step()
            for net in self.nets:
                for own, common in zip(net.parameters(), self.common, strict=True):
                    own.copy_(common)


def train(store: Any, steps: int = STEPS, **options: Any) -> tuple[list[np.ndarray], Any]:
    net = network(store.rank)
    optimizer = own_optimizer(net)
    local = mt.LocalUpdates(net, store, **options)
    ended = []
    for step in range(steps):
        own_step(net, optimizer, store.rank, step)
        ended.append(local.step())
    assert local.steps == steps
    assert local.rounds == sum(ended) + (options.get("delay", 0) > 0)  # the last one has begun
    return weights(net), ended


def close(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", OUTER)
@on(ONE_HOST, MESSAGES, TWO_HOSTS, SERVED, Mode("local", 1))
def test_workers_train_alone_and_meet_in_the_outer_optimizers_weights(mode, name):
    outer, theirs = OUTER[name]
    results = mode.run(lambda store: train(store, every=3, outer=copy.deepcopy(outer)))
    reference = Reference(mode.workers, theirs, lambda step: step % 3 == 0).run()
    for (found, ended), expected in zip(results, reference, strict=True):
        assert ended == [False, False, True] * (STEPS // 3)
        close(found, expected)
        assert all(map(np.array_equal, found, results[0][0]))


@on(MESSAGES, SERVED)
def test_rounds_may_follow_a_schedule(mode):
    results = mode.run(lambda store: train(store, every=lambda step: 1 if step <= 3 else 4))
    reference = Reference(mode.workers, {"lr": 1.0}, lambda step: step in (1, 2, 3, 7, 11)).run()
    for (found, ended), expected in zip(results, reference, strict=True):  # after one more step of each by itself
        assert [i + 1 for i, one in enumerate(ended) if one] == [1, 2, 3, 7, 11]
        close(found, expected)


@on(ONE_HOST, MESSAGES, SERVED)
def test_who_makes_fewer_steps_has_less_weight(mode):
    """Rounds by time: the program ends them, on each worker after another number of steps."""

    def body(store: Any) -> list[np.ndarray]:
        net = network(store.rank)
        optimizer, local = own_optimizer(net), mt.LocalUpdates(net, store, every=None)
        for round_ in range(3):
            for step in range(1 + store.rank):
                own_step(net, optimizer, store.rank, 10 * round_ + step)
                assert local.step() is False
            local.exchange()
        with pytest.raises(MpikvError, match="this worker has made no step since the last round"):
            local.exchange()
        return weights(net)

    results = mode.run(body)
    reference = Reference(mode.workers, {"lr": 1.0}, lambda _step: False)
    steps = [1 + worker for worker in range(mode.workers)]
    for round_ in range(3):
        for worker, n in enumerate(steps):
            for step in range(n):
                own_step(reference.nets[worker], reference.optimizers[worker], worker, 10 * round_ + step)
        reference.exchange([n / sum(steps) for n in steps])
    for found in results:
        close(found, weights(reference.nets[0]))


@on(MESSAGES, SERVED, Mode("local", 1))
@pytest.mark.parametrize(
    ("at", "options"),
    [(6, {}), (7, {}), (7, {"delay": 2})],
    ids=["at a round's end", "in the middle of a round", "with an exchange under way"],
)
def test_a_run_that_is_resumed_goes_on_exactly(mode, at, options, tmp_path):
    def body(store: Any, first: int, last: int) -> list[np.ndarray]:
        net = network(store.rank)
        optimizer = own_optimizer(net)
        local = mt.LocalUpdates(net, store, every=3, outer=NESTEROV, optimizer=optimizer, **options)
        assert local.resume(tmp_path / "saved") == (first // 3)
        assert local.steps == first
        for step in range(first, last):
            own_step(net, optimizer, store.rank, step)
            local.step()
        if last < STEPS:
            local.save(tmp_path / "saved")
        return weights(net)

    whole = mode.run(lambda store: train(store, every=3, outer=NESTEROV, **options)[0])
    mode.run(lambda store: body(store, 0, at))
    for found, expected in zip(mode.run(lambda store: body(store, at, STEPS)), whole, strict=True):
        assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_of_another_dtype_is_resumed_with_its_optimizer(dtype, tmp_path):
    def train(first: int, last: int) -> list[list[float]]:
        with kv.create("local") as store:
            net = network(0).to(dtype)
            optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
            local = mt.LocalUpdates(net, store, every=4, delay=2, outer=NESTEROV, optimizer=optimizer)
            local.resume(tmp_path / "saved")
            for step in range(first, last):
                x, y = batch(step, 0)
                optimizer.zero_grad()
                loss(net, (x.to(dtype), y)).backward()
                optimizer.step()
                local.step()
            if last < STEPS:
                local.save(tmp_path / "saved")
            return [parameter.tolist() for parameter in net.parameters()]

    whole = train(0, STEPS)
    train(0, 5)
    assert train(5, STEPS) == whole


def test_another_number_of_workers_begins_with_the_common_weights(tmp_path, capsys):
    def begin(store: Any) -> list[np.ndarray]:
        net = network(store.rank)
        optimizer, local = own_optimizer(net), mt.LocalUpdates(net, store, every=3, outer=NESTEROV)
        for step in range(6):
            own_step(net, optimizer, store.rank, step)
            local.step()
        local.save(tmp_path / "saved")
        return weights(net)

    def go_on(store: Any) -> list[np.ndarray]:
        net = network(store.rank)
        assert mt.LocalUpdates(net, store, every=3, outer=NESTEROV).resume(tmp_path / "saved") == 2
        return weights(net)

    (common, *_), found = MESSAGES.run(begin), ONE_HOST.run(go_on)
    assert all(all(map(np.array_equal, one, common)) for one in found)
    assert "begin with none of it" in capsys.readouterr().err


@on(ONE_HOST, SERVED)
def test_parts_of_a_module_are_exchanged_in_turn(store):
    """Its four parameters, in two parts of about as many bytes: the large weight is one of them."""
    net = network(store.rank)
    local = mt.LocalUpdates(net, store, every=4, parts=2, delay=1)
    first = weights(net)
    for step in range(5):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0 + store.rank)
        assert local.step() == (step in {2, 4})
    found = [float((one - other).mean()) for one, other in zip(weights(net), first, strict=True)]
    large, *rest = found  # 2 steps of the mean, then 3 of one's own; 4 of the mean, then 1
    assert large == pytest.approx(2 * 1.5 + 3 * (1 + store.rank))
    assert rest == pytest.approx([4 * 1.5 + 1 + store.rank] * 3)


@on(MESSAGES)
def test_a_round_may_end_early_and_is_not_ended_twice(store):
    net = network(store.rank)
    optimizer, local = own_optimizer(net), mt.LocalUpdates(net, store, every=3)
    local.exchange()
    for step in range(4):
        own_step(net, optimizer, store.rank, step)
        assert local.step() == (step == 2)
    local.exchange()
    local.exchange()
    assert local.rounds == 2
    for i, found in enumerate(weights(net)):
        store.init(f"max {i}", found)
        store.pushpull(f"max {i}", highest := found.copy(), op="max")
        assert np.array_equal(highest, found)


@on(MESSAGES)
def test_what_is_pushed_may_be_compressed(store):
    found, _ = train(store, every=3, compression={"type": "fp16", "force": True})
    stats = store.stats()
    assert 2 * stats["encoded_bytes"] == stats["encoded_from_bytes"] > 0
    assert all(np.isfinite(one).all() for one in found)


@on(Mode("dist_async", 2), Mode("dist_async", 2, 1))
def test_workers_of_an_asynchronous_store_wait_for_nobody_and_each_moves_the_weights_by_its_part(store):
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(net.weight, 1.0)
    local = mt.LocalUpdates(net, store, every=1)

    def move() -> list[float]:
        with torch.no_grad():
            net.weight.add_(1.0)
        local.step()
        return net.weight.flatten().tolist()

    for turn in range(2):
        if store.rank == turn:  # the other one makes no call meanwhile
            assert move() == [1.5 + 0.5 * turn] * 2
        store.barrier()
    assert net.weight.flatten().tolist() == [1.5 + 0.5 * store.rank] * 2


@on(Mode("dist_async", 2), Mode("dist_sync", 2))
def test_elastic_averaging_moves_workers_and_common_weights_towards_each_other(store):
    """By the paper's formulas, with a rate of 0.8 over two workers."""
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(net.weight, 1.0)
    local = mt.LocalUpdates(net, store, every=1, outer={"type": "easgd", "moving_rate": 0.8})
    with torch.no_grad():
        net.weight.add_(1.0 + store.rank)
    moved = 2.0 + store.rank
    if store.type == "dist_sync":
        local.step()
        common, own = 1.0 + 0.4 * (1.0 + 2.0), moved - 0.4 * (moved - 1.0)
    else:
        for turn in range(2):
            if store.rank == turn:
                local.step()
            store.barrier()
        before = 1.0 + 0.4 * 1.0 * store.rank  # worker 1 comes later
        common, own = before + 0.4 * (moved - before), moved - 0.4 * (moved - before)
    assert net.weight.flatten().tolist() == pytest.approx([own] * 2)
    assert local.common.weight.flatten().tolist() == pytest.approx([common] * 2)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 1.5}, TypeError, "every is a whole number"),
        ({"every": 2, "outer": "median"}, ValueError, "median"),
        (
            {"every": 2, "outer": {"type": "adam"}},
            ValueError,
            "outer: type must be one of 'mean', 'nesterov', 'slowmo'",
        ),
        ({"every": 2, "outer": {"type": "mean", "rate": 1}}, TypeError, "rate"),
        ({"every": 2, "outer": {"type": "easgd", "moving_rate": 2}}, ValueError, "moving_rate must be above 0"),
        ({"every": 2, "optimizer": "sgd"}, TypeError, "optimizer is a torch.optim.Optimizer or None"),
        ({"every": lambda step: 0}, ValueError, "every: what it returns must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(options, error, text):
    with kv.create("local") as store, pytest.raises(error, match=text):
        mt.LocalUpdates(network(0), store, **options).step()
    with kv.create("local") as store, pytest.raises(TypeError, match=r"model is a torch\.nn\.Module"):
        mt.LocalUpdates([torch.nn.Parameter(torch.ones(1))], store, every=1)


@on(Mode("dist_async", 2))
def test_buffers_are_copied_in_an_asynchronous_store_too(store):
    net = torch.nn.BatchNorm1d(4)
    local = mt.LocalUpdates(net, store, every=1)
    net.running_mean.fill_(1.0 + store.rank)
    local.sync_buffers()
    assert net.running_mean.tolist() == [1.0] * 4


@on(MESSAGES)
def test_buffers_are_each_workers_own_until_they_are_asked_for(store):
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    local = mt.LocalUpdates(net, store, every=1)
    net(torch.full((4, 6), float(store.rank)) + torch.arange(24.0).reshape(4, 6))
    mean = net[1].running_mean.clone()
    local.step()
    assert torch.equal(mean, net[1].running_mean)
    local.sync_buffers()
    means = net[1].running_mean.numpy().copy()
    store.init("mean", means)
    store.pushpull("mean", total := means.copy(), op="max")
    assert np.array_equal(total, means)
