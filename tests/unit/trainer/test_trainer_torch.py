"""Trainer with PyTorch: the same weights as torch.optim on the joined batch, in every mode, and what is an error."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import frameworks
import numpy as np
import pytest
from on_workers import on
from store_modes import HYBRID, ONE_HOST, SENDING, SERVED, TWO_HOSTS, Mode, modes

from mpikv import KVStore, Parameter, Trainer
from mpikv.create import notices
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.trainer import torch_parameter

torch = frameworks.need("torch")
import torch_training as of  # noqa: E402
from torch import nn  # noqa: E402
from torch_training import BATCH, NET, STEPS, assert_close, batch, even, loss, network, reference, sgd, weights  # noqa: E402

FEW = (ONE_HOST, TWO_HOSTS, SERVED)
ON_STORE = pytest.mark.parametrize("on_store", [True, False], ids=["store", "worker"])
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])


def unchanged(before: list[np.ndarray], net: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(before, weights(net), strict=True))


# ---- equal to torch.optim


@OVERLAP
@ON_STORE
@of.as_alone(ONE_HOST, *SENDING, HYBRID[2])
def test_steps_are_those_of_torch_optim(store: KVStore, on_store: bool, overlap: bool) -> list[np.ndarray]:
    """Means and `step()` in the first half of the steps, sums and `step(batch_size)` in the other."""
    net = network(store.rank)
    trainer = sgd(net, store, update_on_kvstore=on_store, overlap=overlap)
    for step in range(STEPS):
        trainer.zero_grad(set_to_none=step % 3 > 0)
        data = batch(step, store.rank)
        if step < STEPS // 2:
            loss(net, data).backward()
            trainer.step()
        elif step == STEPS // 2:
            with trainer.no_sync():  # another batch_size than before
                loss(net, data, "sum").backward()
            trainer.step(BATCH * store.num_workers)
        else:
            loss(net, data, "sum").backward()
            trainer.step(BATCH * store.num_workers, wait=step % 2 > 0)
            for parameter in net.parameters():
                trainer.wait(parameter)
    return weights(net)


def changed(step: int) -> dict[str, Any]:
    return {"lr": 0.01 + step / 1000, "betas": (0.9 - step / 100, 0.99), "weight_decay": 0.1 * step}


@ON_STORE
@of.as_alone(*FEW, optimizer=partial(torch.optim.AdamW, eps=1e-3), options=changed)
def test_arguments_of_a_torch_class_are_attributes(store: KVStore, on_store: bool) -> list[np.ndarray]:
    net = network(store.rank)
    trainer = Trainer(net, torch.optim.AdamW, {"eps": 1e-3}, kvstore=store, update_on_kvstore=on_store)
    for step in range(STEPS):
        for name, value in changed(step).items():
            setattr(trainer.optimizer, name, value)
        of.train(net, trainer, store.rank, [step])
    return weights(net)


@ON_STORE
@of.as_alone(ONE_HOST, TWO_HOSTS)
def test_tensors_that_the_host_cannot_see(store: KVStore, on_store: bool, monkeypatch: Any) -> list[np.ndarray]:
    """What a GPU's tensors go through, here with the host's: every array is a copy, and is copied back."""
    monkeypatch.setattr(torch_parameter, "_on_host", lambda tensor: False)
    net = network(store.rank)
    trainer = sgd(net, store, update_on_kvstore=on_store, overlap=True)
    found = of.train(net, trainer, store.rank)
    if not on_store:  # the sums are in `.grad`, as they are on the host
        assert net[2].bias.grad.tolist() == trainer._params["2.bias"].list_grad()[0].tolist()
    return found


# ---- what is a parameter


def test_names_are_the_modules() -> None:
    for params in (NET, NET.named_parameters(), dict(NET.named_parameters())):
        assert sorted(Trainer(params, "sgd")._params) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert list(Trainer(NET, "sgd")._params) == [name for name, _ in NET.named_parameters()]
    assert list(Trainer(NET.parameters(), "sgd")._params) == ["0", "1", "2", "3"]


def test_tied_weights_are_one_parameter() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    twice = list(net.named_parameters(remove_duplicate=False))
    assert len(twice) == 2
    for params in (net, twice, dict(twice)):
        before = net[0].weight.detach().clone()
        trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
        net[0].weight.grad = torch.ones(3, 3)
        trainer.step()
        torch.testing.assert_close(net[1].weight, before - 1)


def read_already() -> Any:
    read = NET.named_parameters()
    list(read)
    return read


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        (NET.state_dict, ValueError, r"nothing to train: all 4.*give the torch.nn.Module itself"),
        (lambda: [p.detach() for p in NET.parameters()], ValueError, "nothing to train"),
        (nn.Tanh, ValueError, "there are no parameters"),
        (lambda: [NET], TypeError, "'0' is Sequential.*pass a torch.nn.Module itself"),
        (lambda: [{"params": [NET[0].bias]}], TypeError, "no groups of parameters.*lr_mult = 0.1.*wd_mult = 0"),
        (lambda: [NET[0].weight * 2], ValueError, "result of a computation"),
        (lambda: NET[0].weight, TypeError, "a torch.nn.Module, a dict or a list of parameters, not Parameter"),
        (read_already, ValueError, "an iterator gives its elements only once"),
        (lambda: nn.Linear(2, 2, device="meta"), UnsupportedError, "meta"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), UnsupportedError, "complex64"),
        (lambda: nn.Embedding(5, 2, sparse=True), ValueError, "'weight' is row-sparse: needs a store"),
    ],
)
def test_what_is_no_parameter(params: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Trainer(params(), "sgd")


def test_sparse_gradients_that_nobody_announced_are_refused() -> None:
    net = nn.Embedding(5, 2, sparse=True)
    trainer = Trainer(net.parameters(), "sgd")
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="is sparse; the layer takes sparse=False, or give the Trainer"):
        trainer.step()


@of.as_alone(
    *FEW,
    sizes=lambda n: even(n, 3),
    optimizer=lambda parameters: torch.optim.SGD(list(parameters)[2:], lr=0.1, momentum=0.9),
)
def test_frozen_layers(store: KVStore) -> list[np.ndarray]:
    """Worker 0's values at the start, untouched afterwards; thawed ones need another trainer."""
    net = network(store.rank)
    net[0].requires_grad_(False)
    trainer = sgd(net, store, overlap=True)
    found = of.train(net, trainer, store.rank, range(3))
    net[0].requires_grad_(True)
    with trainer.no_sync():
        loss(net, batch(0, store.rank)).backward()
    trainer.push_grad(net[0].weight)
    with pytest.raises(ValueError, match=r"'0.weight' was frozen when the Trainer was made.*make a new Trainer"):
        trainer.step()
    return found


@on(ONE_HOST)
def test_layers_that_come_later_need_another_trainer(store: KVStore) -> None:
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    trainer = Trainer(net, "sgd", kvstore=store)
    net(x).sum().backward()
    trainer.step()
    net.append(nn.Linear(2, 1))
    net(x).sum().backward()
    with pytest.raises(ValueError, match=r"parameter '2.weight', '2.bias' came to the module after the Trainer"):
        trainer.step()
    net[2].requires_grad_(False)  # who does not train them may have them
    trainer.step()
    net[1] = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"parameter '1.weight', '1.bias' came to"):
        trainer.step(ignore_stale_grad=True)


@on(ONE_HOST, Mode("dist_sync", 2, memory="off"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(store: KVStore, dtype: Any) -> None:
    net = nn.Linear(3, 1, bias=False, dtype=dtype)
    nn.init.ones_(net.weight)
    trainer = Trainer(net, "test", kvstore=store)
    for _ in range(2):
        trainer.zero_grad()
        (net.weight.sum() * (store.rank + 1)).backward()
        trainer.step(1)
    assert (net.weight.dtype, net.weight.tolist()) == (dtype, [[7.0] * 3])


@on(ONE_HOST, TWO_HOSTS)
def test_weights_in_another_order_of_memory(store: KVStore) -> None:
    net, numbers = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), torch.arange(54.0).reshape(3, 2, 3, 3)
    with torch.no_grad():
        net.weight.copy_(numbers * (1 + store.rank))
    trainer = Trainer(net, "test", kvstore=store)
    (net.weight * numbers).sum().backward()
    net.bias.grad = torch.zeros(3)
    trainer.step(1)
    assert torch.equal(net.weight, numbers * (1 + store.num_workers))


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> list[Any]:
    """The warnings of the test, none of which has been given before."""
    monkeypatch.setattr(notices, "__warningregistry__", {}, raising=False)
    return recwarn.list


@modes(*FEW)
def test_weights_that_are_changed_between_the_steps_are_warned_of(mode: Mode, warned: list[Any]) -> None:
    def body(store: KVStore) -> None:
        net = network(store.rank)
        frozen = net[0].bias.requires_grad_(False)
        trainer = sgd(net, store)
        for step in range(5):
            trainer.zero_grad()
            loss(net, batch(step, store.rank)).backward()
            trainer.step(wait=step != 1)
            if step == 1:
                for parameter in net.parameters():
                    trainer.wait(parameter)
            if step == 2:
                assert not warned
                with torch.no_grad():
                    frozen.add_(1)  # stays as it is written
            if step == 3:
                store.barrier()
                assert not warned
                store.barrier()
                net.load_state_dict(net.state_dict())

    mode.run(body)
    (found,) = warned
    assert "'0.weight', '2.weight', '2.bias' changed outside of the Trainer" in str(found.message)


def test_a_number_for_means_is_warned_of_once_and_not_where_it_is_named(warned: list[Any]) -> None:
    """PyTorch's losses are means, and gluon's `step(n)` is for sums; `step(batch_size=n)` says that they are sums."""
    net = nn.Linear(2, 3)
    net(torch.ones(4, 2)).sum().backward()
    trainer = Trainer(net, "sgd")
    Trainer([Parameter(np.ones(2))], "sgd").step(8)
    for arguments in ({}, {"n": 1}, {"batch_size": 8}, {"examples": 4}):
        trainer.step(**arguments)
    assert not warned
    for _ in range(2):
        trainer.step(8)
    (found,) = warned
    assert "Trainer.step(8) divides the gradients by 8" in str(found.message)
    assert "step(batch_size=8), without this warning" in str(found.message)
    with pytest.raises(ValueError, match="give it once"):
        trainer.step(8, batch_size=8)


# ---- buffers


def counted(rank: int) -> Any:
    """A module with buffers of dtypes that no store has, too."""
    net = nn.Module()
    net.norm = nn.BatchNorm1d(2)
    net.norm.running_mean += rank
    net.register_buffer("mask", torch.tensor([True, rank > 0]))
    net.register_buffer("short", torch.tensor(300 + rank, dtype=torch.int16))
    return net


@on(*FEW, Mode("dist_async", 2))
def test_buffers_are_worker_0s_at_the_start_and_when_asked(store: KVStore) -> None:
    net = counted(store.rank)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore=store)
    assert (net.norm.running_mean.tolist(), net.mask.tolist(), net.short.item()) == ([0, 0], [True, False], 300)
    net.norm.running_mean = torch.full((2,), float(store.rank + 5))  # another tensor
    net.norm.num_batches_tracked += store.rank + 5
    net.short -= 2 * store.rank + 600
    trainer.sync_buffers()
    assert (net.norm.running_mean.tolist(), net.norm.num_batches_tracked.item()) == ([5, 5], 5)
    assert (net.mask.tolist(), net.short.item()) == ([True, False], -300)


def test_buffers_are_in_a_checkpoint(tmp_path: Any) -> None:
    def save(store: KVStore) -> None:
        net = counted(0)
        trainer = sgd(net, store)
        net.norm.running_mean += 7 + store.rank
        trainer.save(tmp_path / "run")

    def resume(store: KVStore) -> None:
        net = counted(0)
        sgd(net, store).resume(tmp_path / "run")
        assert (net.norm.running_mean.tolist(), net.mask.tolist()) == ([7, 7], [True, False])

    ONE_HOST.run(save)
    for mode in (ONE_HOST, SERVED, HYBRID[2]):
        mode.run(resume)


# ---- where gradients lie


@on(ONE_HOST)
def test_gradients_stay_in_shared_memory_whatever_zero_grad_does(store: KVStore) -> None:
    net = network(store.rank)
    trainer, places = sgd(net, store), set()
    for step in range(6):
        trainer.zero_grad() if step % 2 else net.zero_grad(set_to_none=False)
        loss(net, batch(step, store.rank)).backward()
        places.add(tuple(parameter.grad.data_ptr() for parameter in net.parameters()))
        trainer.step()
    assert len(places) == 1
    stats = store.stats()
    assert stats["direct_calls"] + stats["declined_calls"] == 6


@of.as_alone(*FEW)
@ON_STORE
@pytest.mark.parametrize("how", [lambda grad: grad, lambda grad: grad.detach().view(-1)], ids=["itself", "view"])
def test_a_gradient_that_is_kept_stays_as_it_is(store: KVStore, on_store: bool, how: Any) -> list[np.ndarray]:
    net = network(store.rank)
    trainer = sgd(net, store, update_on_kvstore=on_store)
    kept = []
    for step in range(STEPS):
        trainer.zero_grad(set_to_none=True)
        if step % 4 == 2:
            trainer.zero_grad(set_to_none=False)  # there is none yet
        loss(net, batch(step, store.rank)).backward()
        trainer.step()
        if step % 3:  # sums of the workers, where these update by themselves
            kept += [(how(p.grad), p.grad.clone()) for p in net.parameters()]
    assert all(torch.equal(one, value.view(one.shape)) for one, value in kept)
    return weights(net)


@on(ONE_HOST)
def test_gradients_that_are_differentiated_stay_what_they_are(store: KVStore) -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    trainer = Trainer([weight], "test", kvstore=store)
    (weight**3).backward(create_graph=True)
    (weight.grad**2).backward()  # the gradient of (3 w^2)^2 is 36 w^3, and 3 w^2 is there already
    trainer.step()
    assert weight.tolist() == [2.0 + 12 + 288]


@on(ONE_HOST, TWO_HOSTS)
def test_backward_through_changed_weights_is_pytorchs_error(store: KVStore) -> None:
    for given in (store, None):
        net = network(0)
        trainer = sgd(net, given)
        value = loss(net, batch(0, 0))
        value.backward(retain_graph=True)
        trainer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


# ---- several backward passes


@OVERLAP
@of.as_alone(*FEW, sizes=lambda n: even(n, 5))
def test_passes_that_are_added_up(store: KVStore, overlap: bool) -> list[np.ndarray]:
    """Two of half a batch each; without overlap `no_sync` is not needed."""
    net = network(store.rank)
    trainer = sgd(net, store, overlap=overlap)
    for step in range(5):
        trainer.zero_grad()
        x, y = batch(step, store.rank)
        with trainer.no_sync() if overlap else torch.enable_grad():
            (loss(net, (x[:2], y[:2])) / 2).backward()
        (loss(net, (x[2:], y[2:])) / 2).backward()
        trainer.step()
    return weights(net)


def pushed(store: KVStore) -> tuple[Any, Trainer, Any]:
    """A network, its trainer, to which the second step's gradients have gone, and the data of that step."""
    net, data = network(store.rank), batch(1, store.rank)
    trainer = sgd(net, store, overlap=True)
    of.train(net, trainer, store.rank, [0])
    trainer.zero_grad()
    loss(net, data).backward()
    return net, trainer, data


@on(*FEW)
@pytest.mark.parametrize("mistake", ["second pass", "clipped", "forgotten"])
def test_gradients_that_are_changed_after_they_have_left(store: KVStore, mistake: str) -> None:
    """In every mode, so that it shows on one machine; who goes on all the same gets no wrong weights."""
    net, trainer, data = pushed(store)
    before = weights(net)
    if mistake == "clipped":
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    elif mistake == "forgotten":
        trainer.zero_grad()
    else:
        with pytest.raises(MpikvError, match=r"a second backward pass before the step: .* trainer.no_sync"):
            loss(net, data).backward()
    with pytest.raises(MpikvError, match="was changed after the backward pass, when it had been pushed"):
        trainer.step()
    assert unchanged(before, net)


@on(TWO_HOSTS)
def test_an_update_that_is_changed_after_gradients_have_left(store: KVStore) -> None:
    net, trainer, data = pushed(store)
    with pytest.raises(ValueError, match=r"batch of 3, not 4.*no_sync"):
        trainer.step(BATCH)
    trainer.step()
    trainer.zero_grad()
    loss(net, data).backward()
    trainer.set_learning_rate(0.01)
    with pytest.raises(ValueError, match="set the learning rate before the backward pass"):
        trainer.step()


@on(*SENDING)
def test_gradients_leave_during_the_backward_pass(store: KVStore) -> None:
    """Seen from inside it: what the layers above have sent when the first layer is reached."""
    net = nn.Sequential(nn.Linear(100, 700), nn.Linear(700, 700), nn.Linear(700, 700))  # fills buckets
    trainer, seen = Trainer(net, "sgd", kvstore=store, overlap=True), []
    for _ in range(2):
        trainer.zero_grad()
        output = net[0](torch.ones(1, 100))
        output.register_hook(lambda _: seen.append(len(trainer._pushed)))
        net[2](net[1](output)).sum().backward()
        trainer.step()
    assert [*seen, len(trainer._pushed)] == [0, 4, 0]  # before the first step no batch size is known


# ---- clipping


@OVERLAP
@modes(*FEW, HYBRID[2])
def test_clipping_by_the_global_norm(mode: Mode, overlap: bool) -> None:
    limit, steps = 1.0, 10  # of which some have a norm above the limit

    def body(store: KVStore) -> tuple[list[np.ndarray], list[float]]:
        net = network(store.rank)
        trainer = sgd(net, store, clip_global_norm=limit, overlap=overlap)
        assert trainer.last_global_norm is None
        norms = []
        for step in range(steps):
            trainer.zero_grad()
            loss(net, batch(step, store.rank)).backward()
            if step % 2:
                trainer.step()
            else:
                trainer.allreduce_grads()
                trainer.update()
            norms.append(trainer.last_global_norm)
        return weights(net), norms

    found = mode.run(body)
    assert_close([one for one, _ in found], reference(even(mode.workers, steps), clip=limit))
    norms = found[0][1]
    assert all(other == norms for _, other in found)  # bit for bit
    assert min(norms) < limit < max(norms)
    net = copy.deepcopy(NET)
    loss(net, of.joined(0, even(mode.workers)[0])).backward()
    assert norms[0] == pytest.approx(float(nn.utils.clip_grad_norm_(net.parameters(), limit)), rel=1e-5)


@of.as_alone(ONE_HOST, TWO_HOSTS, sizes=lambda n: even(n, 2), clip=1.0)
def test_a_norm_that_is_not_finite_changes_nothing(store: KVStore) -> list[np.ndarray]:
    net = network(store.rank)
    trainer = sgd(net, store, clip_global_norm=1.0)
    before = of.train(net, trainer, store.rank, [0])
    loss(net, batch(1, store.rank)).backward()
    if store.rank == 1:
        net[0].bias.grad[0] = float("nan")
    with pytest.raises(FloatingPointError, match="norm of the gradients is nan; no weight was changed"):
        trainer.step()
    assert unchanged(before, net)
    return of.train(net, trainer, store.rank, [1])


@on(Mode("dist_async", 1))
def test_where_clipping_is_refused(store: KVStore) -> None:
    with pytest.raises(ValueError, match="dist_async store applies each gradient alone"):
        sgd(network(0), store, clip_global_norm=1.0)
    with pytest.raises(ValueError, match="leave update_on_kvstore=True out"):
        sgd(NET, None, clip_global_norm=1.0, update_on_kvstore=True)
    for wrong in (0, -1, "1", True, float("nan")):
        with pytest.raises(ValueError, match="clip_global_norm is a number above 0"):
            sgd(NET, None, clip_global_norm=wrong)
