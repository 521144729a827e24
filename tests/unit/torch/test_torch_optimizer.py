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
from mpikv.errors import ConfigError, ShapeMismatch, UnsupportedError  # noqa: E402
from mpikv.testing.continued import spawn_continued  # noqa: E402
from mpikv.transports.faulty import Deaths  # noqa: E402


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
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), store=store)
    for _ in range(2):
        for layer in net:
            layer(torch.full((1, 2), store.rank + 1.0)).sum().backward()  # a loss for each part
        optimizer.step()
        assert net[1].weight.grad.tolist() == [[1.5, 1.5]]
        optimizer.zero_grad()
    net[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"backward_passes_per_step=1"):
        net[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0\.bias' was changed"):  # to which the second pass has added
        optimizer.synchronize()


def _unscale(net: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


def _noise(net: Any, optimizer: Any) -> None:
    net.weight.grad = net.weight.grad + 1.0


def _some_rows(net: Any, optimizer: Any) -> None:
    net.weight.grad.data[700:1400] *= 2.0


CHANGES = {
    "clip norm": lambda net, optimizer: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    "clip value": lambda net, optimizer: torch.nn.utils.clip_grad_value_(net.parameters(), 0.1),
    "noise": _noise,
    "data": lambda net, optimizer: net.weight.grad.data.clamp_(max=0.1),
    "some rows": _some_rows,
    "freeze": lambda net, optimizer: setattr(net.weight, "grad", None),
    "requires_grad": lambda net, optimizer: net.weight.requires_grad_(False),
    "zero_grad": lambda net, optimizer: net.zero_grad(),
}
if hasattr(torch.amp, "GradScaler"):  # since PyTorch 2.3 on processors, too
    CHANGES["unscale"] = _unscale


@on(*nets.TWO)
@pytest.mark.parametrize(("first", "to_none"), [(0, True), (2, False)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_is_changed_before_the_step(store: Any, change: str, first: int, to_none: bool) -> None:
    """In any step: an error that names it, or right after `synchronize`."""
    net = nets.seeded(lambda: torch.nn.Linear(1, 3000, bias=False))
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), store)

    def backward() -> None:
        optimizer.zero_grad(set_to_none=to_none)
        net(torch.full((1, 1), store.rank + 1.0)).sum().backward()

    for _ in range(first):
        backward()
        optimizer.step()
    backward()
    optimizer.synchronize()
    net.weight.grad.mul_(2.0)
    before = net.weight.detach().clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    torch.testing.assert_close(before - net.weight, torch.full((3000, 1), 3.0))
    backward()
    CHANGES[change](net, optimizer)
    with pytest.raises(RuntimeError, match=r"'weight' was changed.*synchronize\(\)"):
        optimizer.step()
    net.weight.requires_grad_(True)
    backward()  # and they go on
    optimizer.step()
    assert net.weight.grad.unique().tolist() == [1.5]


@on(*nets.TWO)
@pytest.mark.parametrize("way", ["model", "optimizer"])
@pytest.mark.parametrize("op", [mt.Average, mt.Sum])
def test_a_line_search_decides_alike_on_all_workers(store: Any, way: str, op: str) -> None:
    """As one process does that has all data; each worker's own loss would lead elsewhere."""
    data = [torch.linspace(-1.0, 1.0, 8).reshape(4, 2) * (1 + 3 * rank) for rank in range(2)]
    targets = [x.square().sum(1, keepdim=True) * (1 - 2 * rank) for rank, x in enumerate(data)]

    def trained(net: Any, optimizer: Any, model: Any, ranks: Any, factor: float) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = factor * sum((model(data[rank]).tanh() - targets[rank]).square().mean() for rank in ranks)
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(2)]
        return [float(one.detach()) for one in losses], nets.snapshot(net)

    def make(net: Any) -> Any:
        return torch.optim.LBFGS(net.parameters(), lr=1.0, line_search_fn="strong_wolfe", max_iter=6)

    alone = nets.seeded(lambda: torch.nn.Linear(2, 1).double())
    data, targets = [x.double() for x in data], [y.double() for y in targets]
    expected = trained(alone, make(alone), alone, range(2), 1.0 if op == mt.Sum else 0.5)
    net = nets.seeded(lambda: torch.nn.Linear(2, 1).double())
    if way == "model":
        model, optimizer = mt.DistributedModel(net, store, average=op == mt.Average), make(net)
    else:
        model, optimizer = net, mt.DistributedOptimizer(make(net), net.named_parameters(), store, op=op)
    losses, weights = trained(net, optimizer, model, [store.rank], 1.0)
    torch.testing.assert_close((losses, weights), expected)


def test_the_loss_of_a_closure_is_the_mean_of_who_is_there() -> None:
    deaths = Deaths()

    def body(store: Any) -> list[float]:
        model = mt.DistributedModel(torch.nn.Linear(2, 1), store)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [optimizer.step(lambda: float(store.session.number))]
        if store.session.number == 0:
            deaths.die_in(0, calls=1)
        return [*losses, optimizer.step(lambda: float(store.session.number))]

    assert spawn_continued("dist_sync", 3, body, deaths=deaths) == [None, [1.0, 1.5], [1.0, 1.5]]


@on(nets.HERE)
def test_a_closure_of_an_optimizer_that_first_uses_the_gradients_of_before(store: Any) -> None:
    """As some that sharpen a loss do: `zero_grad` and the closure come after a first use. Any loss is given back."""

    class First(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert net.weight.grad.item() == 1.5
            self.zero_grad()
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    net = nets.seeded(lambda: torch.nn.Linear(1, 1, bias=False))
    optimizer = mt.DistributedOptimizer(First(net.parameters(), lr=1.0), store=store)

    def backward(given: Any) -> Any:
        net(torch.full((1, 1), store.rank + 1.0)).sum().backward()
        return given

    for given, taken in ((None, None), (3, 3.0), (2.0 + store.rank, 2.5), (torch.ones(2), None)):
        backward(None)
        found = optimizer.step(lambda given=given: backward(given))
        assert found is given if taken is None else found == taken
        optimizer.zero_grad()


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
