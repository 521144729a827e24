"""DistributedOptimizer: Horovod's way, against one process with a replica per worker."""

from __future__ import annotations

from typing import Any

import frameworks
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402
from store_modes import Mode, modes  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import kv  # noqa: E402
from mpikv.errors import ConfigError, ShapeMismatch, UnsupportedError  # noqa: E402


@on(*nets.TWO)
def test_step_synchronizes_and_schedules(store: Any) -> None:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), store=store)
    assert isinstance(optimizer, torch.optim.SGD)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def backward() -> Any:
        loss = net(torch.full((1, 1), store.rank + 1.0)).sum()
        loss.backward()
        return loss

    for step in range(3):
        backward()
        with pytest.raises(RuntimeError, match="before step"):
            optimizer.zero_grad()
        optimizer.step()
        assert net.weight.item() == pytest.approx(-1.5 * (2 - 0.5**step))
        optimizer.zero_grad()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    before = net.weight.item()
    optimizer.step(lambda: (optimizer.zero_grad(), backward())[1])
    assert net.weight.item() == pytest.approx(before - 1.5 * 0.125)


@on(*nets.TWO)
def test_too_many_passes_and_several_losses(store: Any) -> None:
    net = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), store)
    for _ in range(2):
        for layer in net:
            layer(torch.full((1, 2), store.rank + 1.0)).sum().backward()  # a loss for each part
        optimizer.step()
        assert net[1].weight.grad.tolist() == [[1.5, 1.5]]
        optimizer.zero_grad()
    net[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"backward_passes_per_step=1"):
        net[0](torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()


@on(nets.HERE)
def test_arguments(store: Any) -> None:
    net = torch.nn.Linear(2, 1)

    def make(**options: Any) -> Any:
        options = {"named_parameters": net.named_parameters(), "store": store, **options}
        return mt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)

    for options, error in (
        ({"compression": "zip"}, ValueError),
        ({"op": "min"}, UnsupportedError),
        ({"backward_passes_per_step": 0}, ValueError),
        ({"backward_passes_per_step": 1.0}, TypeError),
        ({"gradient_predivide_factor": 0}, ValueError),
        ({"gradient_predivide_factor": 2.0, "op": mt.Sum}, ValueError),
        ({"named_parameters": [("a", net.weight)]}, ValueError),
        ({"named_parameters": [("a", net.weight), ("a", net.bias)]}, ValueError),
        ({"named_parameters": [net.weight]}, TypeError),
        ({"op": mt.Sum if store.rank else mt.Average}, ConfigError),
        ({"named_parameters": [("a", net.weight), ("bc"[store.rank], net.bias)]}, ShapeMismatch),
    ):
        with pytest.raises(error):
            make(**options)
    optimizer = make(compression=mt.Compression.none, gradient_predivide_factor=2.0)
    with pytest.raises(UnsupportedError):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(TypeError):
        mt.DistributedOptimizer(optimizer, store=store)
    with pytest.raises(TypeError):
        mt.DistributedOptimizer(net, store=store)


@modes(nets.HERE)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "LBFGS"])
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_of_an_optimizer(mode: Mode, kind: str, root: int) -> None:
    options = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "LBFGS": {"max_iter": 3}}[kind]

    def body(store: Any) -> Any:
        net = nets.seeded(lambda: torch.nn.Linear(2, 2, dtype=torch.bfloat16 if kind == "SGD" else torch.float32))
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1 * (1 + store.rank), **options)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = net(torch.full((1, 2), 1.0 + root, dtype=net.weight.dtype)).square().sum()
            loss.backward()
            return loss

        for _ in range(3 * (store.rank == root)):  # the others have no state yet
            optimizer.step(closure)
        mt.broadcast_parameters(net.named_parameters(), root, store=store)
        mt.broadcast_optimizer_state(optimizer, root, store=store)
        assert optimizer.param_groups[0]["lr"] == 0.1 * (1 + root)
        for _ in range(2):  # and go on alike
            optimizer.step(closure)
        return nets.snapshot(net)

    nets.same_on_all(mode.run(body))


@on(nets.HERE)
def test_broadcast_of_what_differs(store: Any) -> None:
    one = store.rank == 1
    net = torch.nn.Linear(2, 1 + one)
    with pytest.raises(ShapeMismatch, match=r"'bias': torch.float32 \(2,\)"):
        mt.broadcast_parameters(net.state_dict(), store=store)
    with pytest.raises(ShapeMismatch, match="other"):
        mt.broadcast_parameters({"other" if one else "this": torch.ones(1)}, store=store)
    make = torch.optim.Adam if one else torch.optim.SGD
    with pytest.raises(ShapeMismatch, match="Adam"):
        mt.broadcast_optimizer_state(make(net.parameters(), lr=0.1), store=store)
    with pytest.raises(TypeError):
        mt.broadcast_parameters(net, store=store)
    assert mt.broadcast_object({"epoch": 3 + store.rank, "f": len}, 1, store=store) == {"epoch": 4, "f": len}


def test_local_store_has_nothing_to_broadcast() -> None:
    with kv.create("local") as store:
        net = torch.nn.Linear(2, 1)
        mt.broadcast_parameters(net.state_dict(), store=store)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        mt.broadcast_optimizer_state(optimizer, store=store)
        assert mt.broadcast_object([1], store=store) == [1]
