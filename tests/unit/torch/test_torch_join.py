"""Workers with unequally many batches: the mean over the examples that were there, and one model at the end."""

from __future__ import annotations

from typing import Any

import frameworks
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402
from store_modes import Mode, modes  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv.errors import UnsupportedError  # noqa: E402

MODES = (nets.MODES[1], nets.MODES[2], Mode("dist_sync", 3, 1), *nets.DEVICE_MODES)
SIZES = ([4, 2], [4, 4, 1, 3], [2, 3, 3])  # of the batches of three workers in two epochs


def _adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def _plain(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@modes(*MODES)
@pytest.mark.parametrize("make", [_adam, _plain])
def test_the_update_is_the_mean_over_the_examples_that_were_there(mode: Mode, make: Any) -> None:
    model = nets.seeded(lambda: torch.nn.Linear(16, 3))
    optimizer = make(model)
    for epoch in range(2):
        for step in range(4):
            there = [
                nets.batch(10 * epoch + step, rank, sizes[step]).flatten(1)
                for rank, sizes in enumerate(SIZES)
                if step < len(sizes)
            ]
            nets.loss_of(model(torch.cat(there))).backward()
            optimizer.step()
            optimizer.zero_grad()

    def body(store: Any) -> dict[str, Any]:
        mine = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(16, 3)), store)
        own = make(mine)
        sizes = SIZES[store.rank]
        for epoch in range(2):
            with mine.join(own):
                for step, n in enumerate(sizes):
                    nets.loss_of(mine(nets.batch(10 * epoch + step, store.rank, n).flatten(1))).backward()
                    own.step()
                    own.zero_grad()
        nets.assert_same_state(mine, model)
        mine(torch.ones(1, 16)).sum().backward()  # outside everything is as before
        return nets.snapshot(mine)

    nets.same_on_all(mode.run(body))


@modes(*MODES)
def test_buffers_and_a_worker_without_any_data(mode: Mode) -> None:
    """Worker 0 has none; then the buffers are those of the first worker that has some."""

    def body(store: Any) -> dict[str, Any]:
        model = mt.DistributedModel(nets.seeded(nets.Net), store)
        optimizer = _plain(model)
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
        with model.join(_plain(model)):
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
