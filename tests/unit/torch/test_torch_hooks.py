"""What is put on a program's parameters comes off again, and keeps nothing alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import frameworks
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import Trainer  # noqa: E402

# PyTorch imports a part of itself for the first optimizer: if several threads do so at once, their frames stay alive.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def linear() -> Any:
    return nets.seeded(lambda: torch.nn.Linear(2, 1))


def n_hooks(net: Any) -> set[int]:
    """On each parameter."""
    return {len(parameter._post_accumulate_grad_hooks or {}) for parameter in net.parameters()}


def backward(net: Any, store: Any) -> None:
    net.zero_grad()
    net(torch.full((1, 2), store.rank + 1.0)).sum().backward()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is freed is so with its last reference, alike on all workers."""
    gc.disable()
    yield
    gc.enable()


@on(*nets.TWO)
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("way", ["model", "optimizer", "trainer", "overlap"])
def test_what_is_dropped_is_freed_and_its_hooks_are_gone(store: Any, way: str) -> None:
    net = linear()

    def train(net: Any) -> list[Any]:
        if way in ("model", "optimizer"):
            model, optimizer = nets.wrapped(way, net, store)
            held = [model._gradients if way == "model" else optimizer._mpikv_gradients]
        else:
            model, optimizer = net, Trainer(net, "sgd", kvstore=store, overlap=way == "overlap")
            held = []
        for _ in range(2):
            backward(model, store)
            optimizer.step()
        held += [optimizer] if model is net else [model, model._passes]
        return [weakref.ref(one) for one in held]

    for _ in range(3):
        freed = train(net)
        assert [one() for one in freed] == [None] * len(freed)
        assert n_hooks(net) == {0}
    own = linear()
    freed = [*train(own), weakref.ref(own), weakref.ref(own.weight)]
    del own
    assert [one() for one in freed] == [None] * len(freed)


@on(*nets.TWO)
@pytest.mark.parametrize("way", ["model", "optimizer"])
@pytest.mark.parametrize("again", [False, True])
def test_keys_of_what_was_dropped_are_taken_again(store: Any, way: str, again: bool) -> None:
    """By others of the same sizes, with nothing left in them. again: over one module, whose gradients stay."""
    one, kept, counts = nets.seeded(nets.Net), [], []
    for k in range(6):
        net = one if again else nets.seeded(nets.Net)
        twins = [nets.seeded(nets.Net) for _ in range(store.num_workers)]
        for twin in twins:
            twin.load_state_dict(net.state_dict())
        model, optimizer = nets.wrapped(way, net, store, bucket_bytes=600)
        for step in range(2):
            for rank, twin in [*enumerate(twins), (store.rank, model)]:
                twin.zero_grad()
                nets.loss_of(twin(nets.batch(10 * k + step, rank), odd=k % 2 == rank == 1)).backward()
            if way == "optimizer":
                optimizer.step()
            nets.mean_gradients(twins)
            nets.assert_same_grads(net, twins[0])
        if k == 2:  # which must not change when the memory is taken again
            kept = [(p.grad, p.grad.clone()) for p in net.parameters() if p.grad is not None]
        counts.append(len(store.session.infos))
        del net, model, twin, optimizer
    assert all(torch.equal(grad, value) for grad, value in kept)
    assert counts[-1] == counts[-3] <= 3 * counts[0]


@on(*nets.TWO)
@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_that_is_made_anew(store: Any, passes: int) -> None:
    """While a scheduler keeps the older ones, which exchange nothing any more, and say so."""
    net, kept = linear(), []
    for epoch in range(3):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store, backward_passes_per_step=passes)
        kept.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        assert n_hooks(net) == {1}
        for _ in range(3):
            before = net.weight.detach().clone()
            net.zero_grad()
            for _ in range(passes):
                net(torch.full((1, 2), store.rank + 1.0)).sum().backward()
            optimizer.step()
            torch.testing.assert_close(before - net.weight, torch.full((1, 2), 1.5 * passes))
        kept[-1].step()
        if epoch:
            with pytest.raises(RuntimeError, match="a newer one has all of its parameters"):
                kept[0].optimizer.step()


@on(*nets.TWO)
def test_a_module_that_is_wrapped_again_or_detached(store: Any) -> None:
    net = linear()
    first = mt.DistributedModel(net, store)
    backward(first, store)
    second = mt.DistributedModel(net, store)
    assert n_hooks(net) == {1}
    for model in (first, second, net):  # whoever makes the forward pass
        backward(model, store)
        assert net.weight.grad.tolist() == [[1.5, 1.5]]
    whole = mt.DistributedModel(torch.nn.Sequential(net, torch.nn.Linear(1, 1)), store)
    assert n_hooks(net) == {1}  # `whole` exchanges all that `second` did
    backward(net, store)
    assert net.weight.grad.tolist() == [[1.5, 1.5]]
    assert whole.detach() is whole.module
    assert n_hooks(whole) == {0}
    for model in (net, second):
        backward(model, store)
        assert net.weight.grad.tolist() == [[store.rank + 1.0] * 2]


@on(*nets.TWO)
def test_models_that_share_a_part_both_stay(store: Any) -> None:
    trunk, heads = linear(), [nets.seeded(lambda: torch.nn.Linear(1, 1)) for _ in range(2)]
    models = [mt.DistributedModel(torch.nn.Sequential(trunk, head), store) for head in heads]
    for model, head in zip([*models, *models], [*heads, *heads], strict=True):
        backward(model, store)
        mean = mt.allreduce(head.weight.grad, store=store)
        torch.testing.assert_close(head.weight.grad, mean)
        torch.testing.assert_close(trunk.weight.grad, head.weight.detach() * torch.full((1, 2), 1.5))
