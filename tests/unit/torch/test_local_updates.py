"""Local training of a PyTorch module; of what it computes see unit/trainer/test_local_training.py."""

from __future__ import annotations

from typing import Any

import frameworks
import pytest
from on_workers import on
from store_modes import MESSAGES, ONE_HOST, SERVED, TWO_HOSTS, Mode
from torch_training import batch, loss, network

from mpikv import kv

torch = frameworks.need("torch")
import mpikv.torch as mt  # noqa: E402

STEPS = 12


@on(ONE_HOST, TWO_HOSTS, SERVED, Mode("local", 1))
def test_workers_meet_in_the_mean_of_their_weights(store, W):
    net = network(store.rank)
    local = mt.LocalUpdates(net, store, every=1)
    for round_ in range(2):
        for parameter in net.parameters():
            parameter.data += 1.0 + store.rank
        assert local.step()
        for name, first in network(0).named_parameters():
            torch.testing.assert_close(net.get_parameter(name), first + (round_ + 1) * (W + 1) / 2)
            assert torch.equal(net.get_parameter(name), local.common.get_parameter(name))


@on(SERVED, Mode("local", 1))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_of_any_dtype_is_resumed_with_its_optimizer(mode, dtype, tmp_path):
    """With an exchange under way."""

    def train(store: Any, first: int, last: int) -> list[list[float]]:
        net = network(store.rank).to(dtype)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        local = mt.LocalUpdates(net, store, every=4, delay=2, outer="nesterov", optimizer=optimizer)
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
