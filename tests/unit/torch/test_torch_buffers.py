"""Buffers and frozen parameters of unusual forms: sent, or an error on all workers that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import frameworks
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402
from torch import nn  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import Trainer  # noqa: E402
from mpikv.errors import ConfigError, PeerError, ShapeMismatch, UnsupportedError  # noqa: E402


def masked(mask: Any, change: Callable[[Any], None] = lambda net: None) -> Any:
    """A linear layer with a buffer `mask`, which `change` may change in each forward pass."""

    def run(net: Any, x: Any) -> Any:
        change(net)
        return net.layer(x)

    net = nets.Of(run, layer=nn.Linear(2, 1))
    net.register_buffer("mask", mask)
    return net


def expanded(value: float) -> Any:
    """One number in memory for each row; (3, 2)."""
    return torch.tensor([[value], [value + 1], [value + 2]]).expand(3, 2)


def step(model: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()


def counting(net: Any) -> None:
    net.mask = net.mask.clone()[:, :1].add(1.0).expand(3, 2)


@on(*nets.TWO)
@pytest.mark.parametrize("changes", [(), range(6), (3,)], ids=["never", "always", "later"])
def test_what_expand_has_made_is_sent(store: Any, changes: Any) -> None:
    """With the gradients, and by a broadcast of its own."""
    steps = iter(range(6))
    net = masked(expanded(5.0 * store.rank), lambda net: counting(net) if next(steps) in changes else None)
    net.register_parameter("frozen", nn.Parameter(expanded(7.0 * store.rank), requires_grad=False))
    model = mt.DistributedModel(net, store)
    assert torch.equal(net.frozen, expanded(0.0))
    for _ in range(6):
        step(model)
    assert torch.equal(net.mask, expanded(float(len(changes))))
    assert net.mask.stride() == (1, 0)
    given = {"a": expanded(1.0 + store.rank), "b": torch.full((3, 2), 1.0 + store.rank)[:1, 0]}
    mt.broadcast_parameters(given, 1, store=store)
    assert torch.equal(given["a"], expanded(2.0))
    assert given["b"].item() == 2.0
    net.mask = expanded(store.rank + 9.0)
    trainer = Trainer(net, "sgd", kvstore=store)
    assert torch.equal(net.mask, expanded(9.0))
    net.mask = expanded(store.rank + 4.0)
    trainer.sync_buffers()
    assert torch.equal(net.mask, expanded(4.0))


@on(*nets.TWO)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool])
def test_buffers_of_dtypes_that_no_store_adds(store: Any, dtype: Any) -> None:
    def change(net: Any) -> None:
        net.mask = torch.full((2, 2), 1 + store.rank).to(dtype).t()

    model = mt.DistributedModel(masked(torch.full((2, 2), store.rank).to(dtype), change), store)
    assert torch.equal(model.mask.to(torch.complex64), torch.zeros(2, 2, dtype=torch.complex64))
    for _ in range(3):
        step(model)
    assert torch.equal(model.mask.to(torch.complex64), torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="parameter 'weight': dtype 'complex64'"):
        mt.DistributedModel(nn.Linear(2, 1, dtype=torch.complex64), store)


SPARSE = torch.eye(2).to_sparse()


@on(*nets.TWO)
@pytest.mark.parametrize(
    ("masks", "error", "said"),
    [
        ((torch.ones(2), torch.ones(3)), ShapeMismatch, r"buffer 'mask': torch.float32 \(3,\)"),
        ((torch.ones(2), torch.ones(2, dtype=torch.int64)), ShapeMismatch, r"buffer 'mask': torch.int64 \(2,\)"),
        ((torch.ones(1).expand(2), torch.ones(2)), ShapeMismatch, r"buffer 'mask': torch.float32 \(1,\)"),
        ((torch.ones(2, 2), SPARSE), ShapeMismatch, "buffer 'mask': torch.float32 sparse"),
        ((SPARSE, SPARSE), UnsupportedError, "buffer 'mask': torch.float32 sparse"),
        ((torch.ones(2, device="meta"),) * 2, UnsupportedError, "buffer 'mask': without values"),
        ((nn.UninitializedBuffer(),) * 2, UnsupportedError, "buffer 'mask': without values"),
    ],
    ids=["shape", "dtype", "expanded", "sparse on one", "sparse", "meta", "lazy"],
)
def test_what_cannot_be_sent_is_named_on_all_workers(store: Any, masks: Any, error: Any, said: str) -> None:
    mask = masks[store.rank]
    with pytest.raises(error, match=said):
        mt.DistributedModel(masked(mask), store)
    if not isinstance(mask, nn.UninitializedBuffer):
        with pytest.raises(error, match=said.removeprefix("buffer ")):
            mt.broadcast_parameters({"mask": mask}, store=store)


@on(*nets.TWO)
@pytest.mark.parametrize(
    ("who", "first", "mask"), [((0,), 2, torch.ones(3)), ((1,), 0, None), ((0, 1), 2, torch.ones(2).double())], ids=str
)
def test_a_buffer_that_gets_another_form(store: Any, who: Any, first: int, mask: Any) -> None:
    """An error that names it and what to do; the others learn whose pass has ended."""
    steps, mine = iter(range(9)), store.rank in who

    def change(net: Any) -> None:
        if mine and next(steps) == first:
            net.mask = mask

    net = nets.seeded(lambda: masked(torch.ones(2), change))
    model = mt.DistributedModel(net, store)
    for _ in range(first):
        step(model)
    said = r"'mask' was torch.float32 \(2,\).*sync_buffers=False" if mine else "ended"
    with pytest.raises(ConfigError if mine else PeerError, match=said):
        step(model)


@on(*nets.TWO)
def test_without_sync_buffers_each_worker_has_its_own_form(store: Any) -> None:
    """Also at the end of `join`, when a model is copied; and a buffer that comes later is in nobody's way."""

    def change(net: Any) -> None:
        net.mask = torch.ones(3 + store.rank)
        net.register_buffer("later", torch.ones(1 + store.rank))

    model = mt.DistributedModel(nets.seeded(lambda: masked(torch.ones(2), change)), store, sync_buffers=False)
    with model.join(torch.optim.SGD(model.parameters(), lr=0.1)):
        for _ in range(2 + store.rank):
            step(model)
    assert len(model.mask) == 3 + store.rank
