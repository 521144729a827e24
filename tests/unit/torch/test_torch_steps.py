"""Workers whose steps differ: by their optimizers, which is an error on all, or by their number, in `join`."""

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
from store_modes import Mode, modes  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import Trainer  # noqa: E402
from mpikv.create import notices  # noqa: E402
from mpikv.errors import ConfigError, UnsupportedError  # noqa: E402


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


# --- unequally many batches


MODES = (nets.MODES[1], nets.MODES[2], Mode("dist_sync", 3, 1), *nets.DEVICE_MODES)
SIZES = ([4, 2], [4, 4, 1, 3], [2, 3, 3])  # of the batches of three workers in two epochs


def plain(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@modes(*MODES)
@pytest.mark.parametrize("make", [lambda model: torch.optim.Adam(model.parameters(), lr=0.01), plain])
def test_the_update_is_the_mean_over_the_examples_that_were_there(mode: Mode, make: Any) -> None:
    def given(step: int, worker: int) -> list[Any]:
        sizes = SIZES[worker]
        return [nets.batch(step, worker, sizes[step % 4]).flatten(1)] if step % 4 < len(sizes) else []

    def train(model: Any, optimizer: Any, steps: Any, *workers: int) -> None:
        for step in steps:
            if there := [one for worker in workers for one in given(step, worker)]:
                nets.loss_of(model(torch.cat(there))).backward()
                optimizer.step()
                optimizer.zero_grad()

    model = nets.seeded(lambda: torch.nn.Linear(16, 3))
    train(model, make(model), range(8), 0, 1, 2)

    def body(store: Any) -> dict[str, Any]:
        mine = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(16, 3)), store)
        own = make(mine)
        for epoch in (range(4), range(4, 8)):
            with mine.join(own):
                train(mine, own, epoch, store.rank)
        nets.assert_same_state(mine, model)
        mine(torch.ones(1, 16)).sum().backward()  # outside everything is as before
        return nets.snapshot(mine)

    nets.same_on_all(mode.run(body))


@modes(*MODES)
def test_buffers_and_a_worker_without_any_data(mode: Mode) -> None:
    """Worker 0 has none; then the buffers are those of the first worker that has some."""

    def body(store: Any) -> dict[str, Any]:
        model = mt.DistributedModel(nets.seeded(nets.Net), store)
        optimizer = plain(model)
        for rounds in ((0, 2, 3), (2, 0, 1), (0, 0, 0), (1, 1, 1)):
            with model.join():
                for step in range(9):
                    if step == rounds[store.rank]:
                        break
                    nets.loss_of(model(nets.batch(step, store.rank), odd=store.rank == 1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return nets.snapshot(model)

    with pytest.warns(UserWarning, match="ran out of data before others"):
        results = mode.run(body)
    nets.same_on_all(results)
    assert int(results[0]["norm.num_batches_tracked"]) == 3 + 2 + 0 + 1


@on(Mode("local", 1), Mode("dist_sync", 1), *MODES)
def test_accumulated_batches_count_together(store: Any) -> None:
    model = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(1, 1, bias=False)), store)
    mine, sizes = store.rank + 1, range(1, store.num_workers + 1)
    for _ in range(2):
        with model.join(plain(model)):
            x = torch.full((mine, 1), float(mine))
            with model.no_sync():
                model(x).mean().backward()
            model(x).mean().backward()
            assert model.weight.grad.item() == pytest.approx(sum(2 * n * n for n in sizes) / sum(sizes))
            model.zero_grad()


@on(*MODES[:2])
@pytest.mark.parametrize(("way", "who", "first"), [("module", (0,), 0), ("method", (1,), 1), ("weights", (0, 1), 1)])
def test_a_pass_whose_examples_are_not_counted_is_an_error_on_all(store: Any, way: str, who: Any, first: int) -> None:
    class Net(torch.nn.Linear):
        def training_step(self, x: Any) -> Any:
            return self(x).sum()

    model = mt.DistributedModel(nets.seeded(lambda: Net(1, 1)), store)
    losses = {
        "module": lambda x: model.module(x).sum(),
        "method": model.training_step,
        "weights": lambda x: model.weight.square().sum(),
    }

    def train() -> None:
        with model.join():
            for step in range(3):
                x = torch.ones(2, 1)
                (losses[way](x) if store.rank in who and step == first else model(x).sum()).backward()

    with pytest.raises(UnsupportedError, match=rf"worker {who[0]} made a backward pass without.*model\(x\)"):
        train()


@on(nets.HERE)
def test_an_empty_batch_and_sums_are_no_error(store: Any) -> None:
    for average in (True, False):
        model = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(1, 1)), store, average=average)
        with model.join():
            net = model if average else model.module
            net(torch.ones(2 * store.rank, 1)).sum().backward()
            assert model.bias.grad.item() == 2.0


@on(nets.HERE)
def test_join_twice_and_errors_inside(store: Any) -> None:
    model = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(1, 1)), store)
    with model.join(), pytest.raises(RuntimeError, match="inside join"), model.join():
        pass
    with pytest.raises(ArithmeticError), model.join():
        raise ArithmeticError
    with model.join():
        model(torch.ones(1, 1)).sum().backward()
    with model.join(), pytest.raises(Exception, match="no tensor argument"):
        model()
