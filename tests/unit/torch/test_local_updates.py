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


@pytest.mark.parametrize(
    ("name", "every", "ends"),
    [*((name, 3, (3, 6, 9, 12)) for name in OUTER), ("mean", lambda step: 1 if step <= 3 else 4, (1, 2, 3, 7, 11))],
)
@on(ONE_HOST, TWO_HOSTS, SERVED, Mode("local", 1))
def test_workers_train_alone_and_meet_in_the_outer_optimizers_weights(mode, name, every, ends):
    """After as many steps as a number says, or a schedule."""
    outer, theirs = OUTER[name]
    results = mode.run(lambda store: train(store, every=every, outer=copy.deepcopy(outer)))
    reference = Reference(mode.workers, theirs, ends.__contains__).run()
    for (found, ended), expected in zip(results, reference, strict=True):
        assert [step for step, one in enumerate(ended, 1) if one] == list(ends)
        close(found, expected)
        assert ends[-1] < STEPS or all(map(np.array_equal, found, results[0][0]))


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


@on(Mode("dist_async", 2))
def test_elastic_averaging_of_workers_that_come_one_after_the_other(store):
    """By the paper's formulas, with a rate of 0.8 over two workers."""
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(net.weight, 1.0)
    local = mt.LocalUpdates(net, store, every=1, outer={"type": "easgd", "moving_rate": 0.8})
    with torch.no_grad():
        net.weight.add_(1.0 + store.rank)
    for turn in range(2):
        if store.rank == turn:
            local.step()
        store.barrier()
    moved, before = 2.0 + store.rank, 1.0 + 0.4 * 1.0 * store.rank
    assert net.weight.flatten().tolist() == pytest.approx([moved - 0.4 * (moved - before)] * 2)
    assert local.common.weight.flatten().tolist() == pytest.approx([before + 0.4 * (moved - before)] * 2)


@on(SERVED, Mode("local", 1))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_of_any_dtype_is_resumed_with_its_optimizer(mode, dtype, tmp_path):
    """With an exchange under way."""

    def train(store: Any, first: int, last: int) -> list[list[float]]:
        net = network(store.rank).to(dtype)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        local = mt.LocalUpdates(net, store, every=4, delay=2, outer=NESTEROV, optimizer=optimizer)
        assert local.resume(tmp_path / "saved") == first // 4
        assert local.steps == first
        for step in range(first, last):
            x, y = batch(step, store.rank)
            optimizer.zero_grad()
            loss(net, (x.to(dtype), y)).backward()
            optimizer.step()
            local.step()
        if last < STEPS:
            local.save(tmp_path / "saved")
        return [parameter.tolist() for parameter in net.parameters()]

    whole = mode.run(lambda store: train(store, 0, STEPS))
    mode.run(lambda store: train(store, 0, 5))
    assert mode.run(lambda store: train(store, 5, STEPS)) == whole


def test_what_is_no_module_is_named():
    with kv.create("local") as store, pytest.raises(TypeError, match=r"model is a torch\.nn\.Module"):
        mt.LocalUpdates([torch.nn.Parameter(torch.ones(1))], store, every=1)


@on(MESSAGES, Mode("dist_async", 2))
def test_buffers_are_each_workers_own_until_they_are_asked_for(store):
    net = torch.nn.BatchNorm1d(4)
    local = mt.LocalUpdates(net, store, every=1)
    net.running_mean.fill_(1.0 + store.rank)
    local.step()
    assert net.running_mean.tolist() == [1.0 + store.rank] * 4
    local.sync_buffers()
    assert net.running_mean.tolist() == [1.0] * 4
