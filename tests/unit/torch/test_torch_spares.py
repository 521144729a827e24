"""Spares that take the places of workers with DistributedModel and DistributedOptimizer, over thread ranks."""

from __future__ import annotations

from typing import Any

import frameworks
import numpy as np
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from store_modes import Mode, mode_id  # noqa: E402

import mpikv  # noqa: E402
import mpikv.torch as mt  # noqa: E402
from mpikv.transports.faulty import Deaths, Faults  # noqa: E402

OPTIONS: Any = {"bucket_bytes": 400, "compression": {"type": "fp16", "force": True}}
DIES_IN, END_AT, CHANGES_IN = 4, 10, 2
# Of four workers, and a spare: a quarter is exact in float16.
MODES = Mode("dist_sync", 5), Mode("dist_sync", 5, memory="off"), Mode("dist_sync", 5, 1, hosts="aabbcc")


class Net(torch.nn.Module):
    """The gradient of `one` is 1, that of `who` says who has brought one. `late` is frozen at first, `early` later. The
    mask changes after spares have come, and so is not sent with the gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(5, 40), torch.nn.BatchNorm1d(40)
        self.late, self.early = torch.nn.Linear(40, 3), torch.nn.Linear(3, 200)
        self.one, self.who = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: Any, number: int) -> Any:
        return self.early(self.mask * self.late(self.norm(self.first(x)))).mean() + self.one + 2.0**number * self.who


class Training:
    """With a second model, whose rounds are of the same store."""

    def __init__(self, store: Any, kind: str) -> None:
        self.store, self.kind = store, kind
        self.net = nets.seeded(Net, seed=store.rank)  # worker 0's are what counts
        self.net.late.requires_grad_(False)
        other = nets.seeded(lambda: torch.nn.Linear(2, 1))
        self.other = mt.DistributedModel(other, store)
        self.model, self.optimizer = self.net, torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        if kind == "model":
            self.model = mt.DistributedModel(self.net, store, **OPTIONS)
        else:
            mt.broadcast_parameters(self.net.state_dict(), store=store)
            mt.broadcast_optimizer_state(self.optimizer, store=store)
            self.optimizer = mt.DistributedOptimizer(
                self.optimizer, self.net.named_parameters(), store=store, **OPTIONS
            )
        objects = {"net": self.net, "other": other, "optimizer": self.optimizer}
        self.snapshots = mpikv.Snapshots(store, objects)
        self.snapshots.resume()

    def step(self) -> None:
        steps, number = self.snapshots.steps, self.store.session.number
        self.net.late.requires_grad_(steps >= CHANGES_IN)
        self.net.early.requires_grad_(steps < CHANGES_IN)
        if steps == END_AT - 2:
            self.net.mask[0] = number + 2.0
        self.other.zero_grad()
        self.other(torch.ones(1, 2)).sum().backward()
        self.optimizer.zero_grad()
        values = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * steps + number))
        self.model(values, number).backward()
        self.optimizer.step()
        assert self.net.one.grad == 1.0, "the mean over who is there"
        self.snapshots.step()


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize(("dead", "calls"), [(0, 1), (2, 9)])
def test_a_spare_has_what_the_others_have(kind: str, mode: Mode, dead: int, calls: int, monkeypatch: Any) -> None:
    """Weights, states and steps; and all that they have agreed on in their rounds: which gradients travel together,
    also of parameters that were frozen once, which buffers do, whose these are, and when weights are compared.
    """
    monkeypatch.setattr("mpikv.torch.steps._EVERY", 6)
    deaths = Deaths()

    def body(store: Any) -> tuple[int, int, list[Any]]:
        is_spare, training = store.session.alone, Training(store, kind)
        while True:
            steps = training.snapshots.steps
            if store.session.number == dead and not is_spare and steps == DIES_IN:
                deaths.die_in(dead, calls=calls)
            training.step()
            if steps > DIES_IN and training.snapshots.steps % END_AT == 0 and store.num_workers == 4:
                assert training.net.who.grad.item() * 4 == pytest.approx(1 + 2 + 4 + 8)
                values = [*training.net.parameters(), *(training.net.buffers() if kind == "model" else ())]
                return store.rank, steps, [one.tolist() for one in values]

    found = mode.run_continued(body, deaths, lambda _: Faults(), spares=1)
    assert found[dead] is None
    results = [one for one in found if one is not None]
    assert sorted(rank for rank, *_ in results) == [0, 1, 2, 3]
    assert all(one[1:] == results[0][1:] for one in results)


def test_join_takes_no_spares() -> None:
    def body(store: Any) -> None:
        trainer = mpikv.Trainer([mpikv.Parameter(np.zeros(2))], "sgd", kvstore=store)
        model = mt.DistributedModel(torch.nn.Linear(1, 1), store)
        for call in (trainer.join, model.join):
            with pytest.raises(mpikv.UnsupportedError, match="join takes no spares"), call():
                pass

    MODES[0].run_continued(body, Deaths(), Faults, spares=1)
