"""Optimizers of torch.optim that differ between workers: an error on all, by what travels with the gradients."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import frameworks
import numpy as np
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402
from store_modes import modes  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import Trainer  # noqa: E402
from mpikv.create import notices  # noqa: E402
from mpikv.errors import ConfigError  # noqa: E402


def linear() -> Any:
    return nets.seeded(lambda: torch.nn.Linear(2, 1))


def step(model: Any, optimizer: Any, n: int = 1) -> None:
    optimizer.zero_grad()
    model(torch.ones(n, 2)).mean().backward()
    optimizer.step()


def two_rates(rank: int, net: Any) -> Any:
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5 + rank * 1e-9}]
    return torch.optim.Adam(groups, lr=0.25)


@on(*nets.TWO)
@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (two_rates, r"worker 0: Adam, parameter group 1: lr=0.5; worker 1: Adam, parameter group 1: lr=0.500000001"),
        (lambda rank, net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5 * rank), "group 0: momentum=0.5"),
        (lambda rank, net: torch.optim.Adam(net.parameters(), betas=(0.9, 0.99 + rank / 500)), r"betas=\(0.9, 0.992\)"),
        (lambda rank, net: (torch.optim.Adam, torch.optim.AdamW)[rank](net.parameters()), "AdamW, parameter group 0"),
    ],
)
def test_whatever_differs_is_named_on_all_workers(store: Any, mine: Any, said: str) -> None:
    """And they go on, with what is equal again."""
    model = mt.DistributedModel(linear(), store)
    step(model, mine(0, model))
    step(model, mine(0, model))
    step(model, mine(store.rank, model))
    with pytest.raises(ConfigError, match=said):
        step(model, mine(0, model))
    step(model, mine(0, model))
    step(model, mine(0, model))


@on(nets.HERE)
def test_equal_settings_in_any_form_are_equal(store: Any) -> None:
    model, rank = mt.DistributedModel(linear(), store), store.rank
    betas = ((0.9, 0.99), [0.9, 0.99])[rank]
    several = [{"params": [model.weight], "lr": (0.5, np.float64(0.5))[rank]}, {"params": [model.bias]}]
    optimizer = torch.optim.Adam(several, lr=0.25, betas=betas, weight_decay=(0, 0.0)[rank])
    optimizer.param_groups[1].update(lr=(0.25, torch.tensor(0.25))[rank], mine=object())  # which is no setting
    other = torch.nn.Parameter(torch.ones(1))  # of this worker alone
    own = torch.optim.SGD([other], lr=0.1 + rank)
    for _ in range(3):
        other.grad = torch.ones(1)
        own.step()
        step(model, optimizer)
    optimizer.param_groups[1]["name"] = f"a{rank}"
    step(model, optimizer)
    with pytest.raises(ConfigError, match="worker 1: Adam, parameter group 1: name='a1'"):
        step(model, optimizer)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are compared in one of 10 rounds, not of 100."""
    monkeypatch.setattr("mpikv.torch.steps._EVERY", 10)


@on(*nets.TWO)
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("way", "which"), [("model", "0.weight"), ("optimizer", "1.bias")])
def test_weights_that_become_different_are_named(store: Any, way: str, which: str) -> None:
    """On all workers, when they are compared next; rounding, and what is frozen, is no difference."""
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1).requires_grad_(False)]
    net = nets.seeded(lambda: torch.nn.Sequential(*layers))
    mt.broadcast_parameters(net.state_dict(), store=store)
    model, optimizer = nets.wrapped(way, net, store)
    bias = net[1].bias

    def steps(n: int) -> None:
        for _ in range(n):
            step(model, optimizer)

    steps(2)
    with torch.no_grad():
        net[0].weight.mul_(1 + 1e-6 * store.rank)
        net[2].weight.add_(store.rank)
    steps(10)
    with torch.no_grad():
        net.get_parameter(which)[0].add_(0.1 * store.rank)
    with pytest.raises(ConfigError, match=f"weights.*'{which}' has sums from"):
        steps(10)
    with torch.no_grad():
        net.get_parameter(which)[0].sub_(0.1 * store.rank)
        bias.fill_(float("nan"))  # alike on all
    steps(10)
    with torch.no_grad():
        bias.fill_(0.0 if store.rank else float("nan"))
    with pytest.raises(ConfigError, match=r"'1\.bias' has sums from"):
        steps(10)


@on(nets.HERE)
@pytest.mark.parametrize("way", ["model", "optimizer"])
def test_to_compare_weights_costs_one_call_in_100_rounds(store: Any, way: str) -> None:
    net, optimizer = nets.wrapped(way, linear(), store)
    gradients = net._gradients if way == "model" else optimizer._mpikv_gradients
    step(net, optimizer)
    with mock.patch.object(gradients.steps, "_calls", wraps=gradients.steps._calls) as calls:
        for _ in range(116):
            step(net, optimizer)
    assert calls.allreduce.call_count == 2


@modes(*nets.TWO)
def test_a_scheduler_inside_join(mode: Any) -> None:
    """Stepped per batch, it has made fewer steps on the worker that leaves early."""

    def train(store: Any, *, given: bool) -> Any:
        model = mt.DistributedModel(linear(), store)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
        for _ in range(2):
            with model.join(optimizer, scheduler if given else None):
                for _ in range(3 + store.rank):
                    step(model, optimizer)
                    scheduler.step()
        return nets.snapshot(model), optimizer.param_groups[0]["lr"], scheduler.last_epoch

    def body(store: Any) -> Any:
        with pytest.raises(ConfigError, match=r"lr=.*join\(optimizer, scheduler\)"):
            train(store, given=False)
        return train(store, given=True)

    results = mode.run(body)
    nets.same_on_all([weights for weights, *_ in results])
    assert [rest for _, *rest in results] == [[pytest.approx(0.1 / 9), 8]] * 2


@on(*nets.TWO)
def test_a_distributed_optimizer_is_compared_before_its_first_step(store: Any) -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 + store.rank)
    optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store=store)
    net(torch.ones(1, 2)).mean().backward()
    before = nets.snapshot(net)
    with pytest.raises(ConfigError, match=r"worker 0: SGD, parameter group 0: lr=0.1; worker 1: .*lr=1.1"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in nets.snapshot(net).items())


ADAM, SGD = torch.optim.AdamW, torch.optim.SGD


@pytest.mark.parametrize(
    ("codec", "kind", "way"),
    [
        *(("2bit", ADAM, way) for way in ("model", "optimizer", "trainer")),
        *(("topk", SGD, "model"), ("int8", ADAM, "optimizer")),
    ],
)
def test_codecs_that_spoil_adam_are_warned_of(codec: str, way: str, kind: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(notices, "__warningregistry__", {}, raising=False)

    def body(store: Any) -> None:
        net: Any = linear()
        compression = {"type": codec, "force": True}
        if way == "trainer":
            for one in (kind, kind.__name__.lower()):
                Trainer(net, one, {"learning_rate": 0.1}, store, compression)
            return
        net, optimizer = nets.wrapped(way, net, store, kind, compression=compression)
        for _ in range(4):
            step(net, optimizer)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        nets.HERE.run(body)
    found = [str(one.message) for one in seen if "Adam divides" in str(one.message)]
    assert len(found) == (codec != "int8" and kind is ADAM)
    assert all(repr(codec) in text and "'int8'" in text for text in found)
