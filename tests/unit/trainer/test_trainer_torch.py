"""Trainer with PyTorch: the same weights as torch.optim on the joined batch, in every mode, and what is an error."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import frameworks
import numpy as np
import pytest

from mpikv import KVStore, Trainer
from mpikv.create import notices
from mpikv.errors import MpikvError, StatesFileError, UnsupportedError
from mpikv.testing.ranks import RankError
from mpikv.trainer import torch_parameter

torch = frameworks.need("torch")
from torch import nn  # noqa: E402
from torch_training import (  # noqa: E402
    BATCH,
    MODES,
    NET,
    SENDING,
    STEPS,
    Mode,
    assert_close,
    batch,
    even,
    joined,
    loss,
    network,
    reference,
    run,
    sgd,
    weights,
)

# ---- equal to torch.optim


@pytest.mark.grid
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("on_store", [True, False], ids=["store", "worker"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_twenty_steps_are_those_of_torch_optim(mode: Mode, on_store: bool, overlap: bool) -> None:
    """Means and `step()` in the first half of the steps, sums and `step(batch_size)` in the other."""

    def body(store: KVStore) -> list[np.ndarray]:
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

    assert_close(run(mode, body), reference(even(mode.workers)))


def test_without_a_store() -> None:
    net = network(0)
    trainer = sgd(net, None)
    for step in range(STEPS):
        trainer.zero_grad()
        loss(net, batch(step, 0)).backward()
        trainer.step()
    assert_close([weights(net)], reference(even(1)))


@pytest.mark.parametrize("mode", [MODES["one host"], MODES["servers"]], ids=["one host", "servers"])
def test_a_class_of_torch_optim(mode: Mode) -> None:
    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = Trainer(net, torch.optim.Adam, {"lr": 0.01}, kvstore=store)
        for step in range(STEPS):
            trainer.zero_grad()
            loss(net, batch(step, store.rank)).backward()
            trainer.step()
        return weights(net)

    right = reference(even(mode.workers), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    assert_close(run(mode, body), right)


@pytest.mark.parametrize("mode", [MODES["one host"], MODES["two hosts"], MODES["servers"]], ids=str)
@pytest.mark.parametrize("on_store", [True, False], ids=["store", "worker"])
def test_arguments_of_a_torch_class_are_attributes(mode: Mode, on_store: bool) -> None:
    def changed(step: int) -> dict[str, Any]:
        return {"lr": 0.01 + step / 1000, "betas": (0.9 - step / 100, 0.99), "weight_decay": 0.1 * step}

    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = Trainer(net, torch.optim.AdamW, kvstore=store, update_on_kvstore=on_store)
        for step in range(STEPS):
            trainer.zero_grad()
            loss(net, batch(step, store.rank)).backward()
            for name, value in changed(step).items():
                setattr(trainer.optimizer, name, value)
            trainer.step()
        return weights(net)

    def made(parameters: Any) -> Any:
        optimizer = torch.optim.AdamW(parameters)
        plain, steps = optimizer.step, iter(range(STEPS))

        def step() -> None:
            optimizer.param_groups[0].update(changed(next(steps)))
            plain()

        optimizer.step = step
        return optimizer

    assert_close(run(mode, body), reference(even(mode.workers), optimizer=made))


@pytest.mark.parametrize("mode", [MODES["one host"], MODES["servers"]], ids=["one host", "servers"])
@pytest.mark.parametrize("on_store", [True, False], ids=["store", "worker"])
def test_arguments_of_a_torch_class_that_differ(mode: Mode, on_store: bool) -> None:
    def body(store: KVStore) -> None:
        net = network(store.rank)
        trainer = Trainer(net, torch.optim.AdamW, kvstore=store, update_on_kvstore=on_store)
        trainer.optimizer.betas = (0.5 + store.rank / 4, 0.99)
        loss(net, batch(0, store.rank)).backward()
        trainer.step()

    with pytest.raises(RankError) as caught:
        run(mode, body)
    said = [str(error) for error in caught.value.errors.values()]
    assert len(said) == mode.workers
    assert all("'betas': [0.5, 0.99]" in one and "'betas': [0.75, 0.99]" in one for one in said)


@pytest.mark.parametrize("mode", [MODES["one host"], MODES["two hosts"]], ids=["one host", "two hosts"])
@pytest.mark.parametrize("on_store", [True, False], ids=["store", "worker"])
def test_tensors_that_the_host_cannot_see(mode: Mode, on_store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's tensors go through, here with the host's: every array is a copy, and is copied back."""
    monkeypatch.setattr(torch_parameter, "_on_host", lambda tensor: False)

    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = sgd(net, store, update_on_kvstore=on_store, overlap=True)
        for step in range(STEPS):
            trainer.zero_grad()
            loss(net, batch(step, store.rank)).backward()
            trainer.step()
        if not on_store:  # the sums are in `.grad`, as they are on the host
            assert net[2].bias.grad.tolist() == trainer._params["2.bias"].list_grad()[0].tolist()
        return weights(net)

    assert_close(run(mode, body), reference(even(mode.workers)))


def test_alone_in_an_asynchronous_store() -> None:
    """One worker has its own gradients only, and so the same weights."""

    def body(store: KVStore) -> list[np.ndarray]:
        net = network(0)
        trainer = sgd(net, store, overlap=True)
        for step in range(STEPS):
            trainer.zero_grad()
            loss(net, batch(step, 0)).backward()
            trainer.step()
        return weights(net)

    for servers in (0, 1):
        assert_close(run(Mode(1, servers, name="dist_async"), body), reference(even(1)))


# ---- what is a parameter


def test_names_are_the_modules() -> None:
    for params in (NET, NET.named_parameters(), dict(NET.named_parameters())):
        trainer = Trainer(params, "sgd")
        assert sorted(trainer._params) == ["0.bias", "0.weight", "2.bias", "2.weight"]
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
        assert list(trainer._params) == ["0.weight"]
        net[0].weight.grad = torch.ones(3, 3)
        trainer.step()
        torch.testing.assert_close(net[1].weight, before - 1)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        (NET.state_dict, ValueError, r"nothing to train: all 4.*give the torch.nn.Module itself"),
        (lambda: [p.detach() for p in NET.parameters()], ValueError, "nothing to train"),
        (nn.Tanh, ValueError, "there are no parameters"),
        (lambda: [NET], TypeError, "'0' is Sequential.*pass a torch.nn.Module itself"),
        (
            lambda: [{"params": list(NET.parameters())}],
            TypeError,
            "no groups of parameters.*lr_mult = 0.1.*wd_mult = 0",
        ),
        (lambda: [NET[0].weight * 2], ValueError, "result of a computation"),
        (lambda: NET[0].weight, TypeError, "a torch.nn.Module, a dict or a list of parameters, not Parameter"),
        (lambda: nn.Linear(2, 2, device="meta"), UnsupportedError, "meta"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), UnsupportedError, "complex64"),
    ],
)
def test_what_is_no_parameter(params: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Trainer(params(), "sgd")


def test_an_iterator_that_has_been_read() -> None:
    read = NET.named_parameters()
    list(read)
    with pytest.raises(ValueError, match="an iterator gives its elements only once"):
        Trainer(read, "sgd")


def test_sparse_gradients_are_refused() -> None:
    net = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(UnsupportedError, match="'weight' is row-sparse: needs a store"):
        Trainer(net, "sgd")
    trainer = Trainer(net.parameters(), "sgd")  # of which nobody says that they are sparse
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="is sparse; the layer takes sparse=False, or give the Trainer"):
        trainer.step()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_frozen_layers(mode: Mode) -> None:
    """Worker 0's values at the start, untouched afterwards; thawed ones need another trainer."""

    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        net[0].requires_grad_(False)
        trainer = sgd(net, store, overlap=True)
        for step in range(3):
            trainer.zero_grad()
            loss(net, batch(step, store.rank)).backward()
            trainer.step()
        assert all(np.array_equal(a, b) for a, b in zip(weights(net)[:2], weights(NET)[:2], strict=True))
        net[0].requires_grad_(True)
        with trainer.no_sync():
            loss(net, batch(0, store.rank)).backward()
        trainer.push_grad(net[0].weight)
        with pytest.raises(ValueError, match=r"'0.weight' was frozen when the Trainer was made.*make a new Trainer"):
            trainer.step()
        return weights(net)

    def alone(parameters: Any) -> Any:
        return torch.optim.SGD(list(parameters)[2:], lr=0.1, momentum=0.9)

    assert_close(run(mode, body), reference(even(mode.workers, 3), optimizer=alone))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_layers_that_come_later_need_another_trainer(mode: Mode) -> None:
    def body(store: KVStore) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        trainer = Trainer(net, "sgd", kvstore=store)
        x = torch.ones(1, 2)
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

    run(mode, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: Any) -> None:
    def body(store: KVStore) -> list[float]:
        net = nn.Linear(3, 1, bias=False, dtype=dtype)
        nn.init.ones_(net.weight)
        trainer = Trainer(net, "test", kvstore=store)
        for _ in range(2):
            trainer.zero_grad()
            (net.weight.sum() * (store.rank + 1)).backward()
            trainer.step(1)
        assert net.weight.dtype == dtype
        return net.weight.flatten().tolist()

    for mode in (MODES["one host"], Mode(2, shared="off")):
        assert run(mode, body) == [[7.0] * 3] * 2


def test_weights_in_another_order_of_memory() -> None:
    def body(store: KVStore) -> list[np.ndarray]:
        torch_net = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            torch_net.weight.copy_(torch.arange(54.0).reshape(3, 2, 3, 3) * (1 + store.rank))
        trainer = Trainer(torch_net, "test", kvstore=store)
        (torch_net.weight * torch.arange(54.0).reshape(3, 2, 3, 3)).sum().backward()
        torch_net.bias.grad = torch.zeros(3)
        trainer.step(1)
        return [torch_net.weight.detach().numpy().copy()]

    for mode in (MODES["one host"], MODES["two hosts"]):
        for (found,) in run(mode, body):
            np.testing.assert_array_equal(found, np.arange(54.0).reshape(3, 2, 3, 3) * (1 + mode.workers))


@pytest.mark.parametrize("mode", [MODES["one host"], MODES["two hosts"], MODES["servers"]], ids=str)
def test_weights_that_are_changed_between_the_steps_are_warned_of(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "__warningregistry__", {}, raising=False)

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
                assert not seen
                with torch.no_grad():
                    frozen.add_(1)  # stays as it is written
            if step == 3:
                store.barrier()
                assert not seen
                store.barrier()
                net.load_state_dict(net.state_dict())

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(mode, body)
    (found,) = [str(one.message) for one in seen]
    assert "'0.weight', '2.weight', '2.bias' changed outside of the Trainer" in found


# ---- buffers


class Counted(nn.Module):
    """Buffers of dtypes that no store has, too."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([True, rank > 0]))
        self.register_buffer("short", torch.tensor(300 + rank, dtype=torch.int16))
        self.norm.running_mean += rank


@pytest.mark.parametrize("mode", [*MODES.values(), Mode(2, name="dist_async")], ids=[*MODES.keys(), "async"])
def test_buffers_are_worker_0s_at_the_start_and_when_asked(mode: Mode) -> None:
    def body(store: KVStore) -> None:
        net = Counted(store.rank)
        trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore=store)
        assert (net.norm.running_mean.tolist(), net.mask.tolist(), net.short.item()) == ([0, 0], [True, False], 300)
        net.norm.running_mean = torch.full((2,), float(store.rank + 5))  # another tensor
        net.norm.num_batches_tracked += store.rank + 5
        net.short -= 2 * store.rank + 600
        trainer.sync_buffers()
        assert (net.norm.running_mean.tolist(), net.norm.num_batches_tracked.item()) == ([5, 5], 5)
        assert (net.mask.tolist(), net.short.item()) == ([True, False], -300)

    run(mode, body)


def test_buffers_are_in_a_checkpoint(tmp_path: Any) -> None:
    def save(store: KVStore) -> None:
        net = Counted(0)
        trainer = sgd(net, store)
        net.norm.running_mean += 7 + store.rank
        trainer.save(tmp_path / "run")

    def resume(store: KVStore) -> tuple[list[float], list[bool]]:
        net = Counted(0)
        trainer = sgd(net, store)
        trainer.resume(tmp_path / "run")
        return net.norm.running_mean.tolist(), net.mask.tolist()

    run(MODES["one host"], save)
    for mode in (MODES["one host"], MODES["servers"], MODES["alone"]):
        assert run(mode, resume) == [([7, 7], [True, False])] * mode.workers
    with pytest.raises(StatesFileError, match="another model"):
        sgd(NET, None).resume(tmp_path / "run")


# ---- where gradients lie


def test_gradients_stay_in_shared_memory_whatever_zero_grad_does() -> None:
    def body(store: KVStore) -> None:
        net = network(store.rank)
        trainer = sgd(net, store)
        places = None
        for step in range(6):
            if step % 2:
                trainer.zero_grad()
            else:
                net.zero_grad(set_to_none=False)
            loss(net, batch(step, store.rank)).backward()
            places = places or [parameter.grad.data_ptr() for parameter in net.parameters()]
            assert places == [parameter.grad.data_ptr() for parameter in net.parameters()]
            trainer.step()
        stats = store.stats()
        assert stats["direct_calls"] + stats["declined_calls"] == 6

    run(MODES["one host"], body)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("on_store", [True, False], ids=["store", "worker"])
@pytest.mark.parametrize("how", [lambda grad: grad, lambda grad: grad.detach().view(-1)], ids=["itself", "view"])
def test_a_gradient_that_is_kept_stays_as_it_is(mode: Mode, on_store: bool, how: Any) -> None:
    def body(store: KVStore) -> list[np.ndarray]:
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
        for one, value in kept:
            torch.testing.assert_close(one, value.view(one.shape), rtol=0, atol=0)
        return weights(net)

    assert_close(run(mode, body), reference(even(mode.workers)))


def test_a_trainer_that_is_gone_takes_its_hooks_with_it() -> None:
    """Its parameters can have another one; the gradients of the first went elsewhere."""

    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        for _ in range(2):
            trainer = sgd(net, store, overlap=True)
            for step in range(3):
                trainer.zero_grad()
                loss(net, batch(step, store.rank)).backward()
                trainer.step()
            del trainer
            with torch.no_grad():
                for parameter, value in zip(net.parameters(), NET.parameters(), strict=True):
                    kept, _ = parameter.detach().clone(), parameter.copy_(value)
        return [*weights(net)[:-1], kept.numpy()]

    right = [*weights(NET)[:-1], reference(even(2, 3))[-1]]
    assert_close(run(MODES["one host"], body), right)
    assert_close(run(Mode(2, servers=1), body), right)


def test_gradients_that_are_differentiated_stay_what_they_are() -> None:
    def body(store: KVStore) -> list[float]:
        weight = nn.Parameter(torch.tensor([2.0]))
        trainer = Trainer([weight], "test", kvstore=store)
        (weight**3).backward(create_graph=True)
        (weight.grad**2).backward()  # the gradient of (3 w^2)^2 is 36 w^3, and 3 w^2 is there already
        trainer.step()
        return weight.tolist()

    assert run(MODES["one host"], body) == [[2.0 + 12 + 288]] * 2


def test_backward_through_changed_weights_is_pytorchs_error() -> None:
    def body(store: KVStore | None) -> None:
        net = network(0)
        trainer = sgd(net, store)
        value = loss(net, batch(0, 0))
        value.backward(retain_graph=True)
        trainer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()

    body(None)
    run(MODES["one host"], body)
    run(MODES["two hosts"], body)


# ---- several backward passes


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_passes_that_are_added_up(mode: Mode, overlap: bool) -> None:
    """Two of half a batch each; without overlap `no_sync` is not needed."""

    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = sgd(net, store, overlap=overlap)
        for step in range(5):
            trainer.zero_grad()
            x, y = batch(step, store.rank)
            if overlap:
                with trainer.no_sync():
                    (loss(net, (x[:2], y[:2])) / 2).backward()
            else:
                (loss(net, (x[:2], y[:2])) / 2).backward()
            (loss(net, (x[2:], y[2:])) / 2).backward()
            trainer.step()
        return weights(net)

    assert_close(run(mode, body), reference(even(mode.workers, 5)))


def misuse(mode: Mode, body: Any, error: type[Exception], words: str) -> None:
    """`body(net, trainer, data)` is an error on every worker, with the second step's gradients pushed."""

    def worker(store: KVStore) -> None:
        net = network(store.rank)
        trainer = sgd(net, store, overlap=True)
        loss(net, batch(0, store.rank)).backward()
        trainer.step()
        trainer.zero_grad()
        loss(net, batch(1, store.rank)).backward()
        with pytest.raises(error, match=words):
            body(net, trainer, batch(1, store.rank))
        if error is ValueError and "batch" in words:
            trainer.step()

    run(mode, worker)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_a_second_pass_after_the_gradients_have_left(mode: Mode) -> None:
    """In every mode, so that it shows on one machine. Who goes on all the same gets no wrong weights."""

    def again(net: Any, trainer: Trainer, data: Any) -> None:
        before = weights(net)
        with pytest.raises(MpikvError, match=r"a second backward pass before the step: .* trainer.no_sync"):
            loss(net, data).backward()
        try:
            trainer.step()
        finally:
            assert all(np.array_equal(a, b) for a, b in zip(before, weights(net), strict=True))

    misuse(mode, again, MpikvError, "was changed after the backward pass")


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_gradients_that_are_changed_after_they_have_left(mode: Mode) -> None:
    def clip(net: Any, trainer: Trainer, data: Any) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        trainer.step()

    def forget(net: Any, trainer: Trainer, data: Any) -> None:
        trainer.zero_grad()
        trainer.step()

    for change in (clip, forget):
        misuse(mode, change, MpikvError, "was changed after the backward pass, when it had been pushed")


@pytest.mark.parametrize("mode", SENDING.values(), ids=SENDING.keys())
def test_an_update_that_is_changed_after_gradients_have_left(mode: Mode) -> None:
    def other_batch(net: Any, trainer: Trainer, data: Any) -> None:
        trainer.step(BATCH)

    def other_rate(net: Any, trainer: Trainer, data: Any) -> None:
        trainer.set_learning_rate(0.01)
        trainer.step()

    misuse(mode, other_batch, ValueError, r"batch of [23], not 4.*no_sync")
    misuse(mode, other_rate, ValueError, "set the learning rate before the backward pass")


@pytest.mark.parametrize("mode", SENDING.values(), ids=SENDING.keys())
def test_gradients_leave_during_the_backward_pass(mode: Mode) -> None:
    """Seen from inside it: what the layers above have sent when the first layer is reached."""

    def body(store: KVStore) -> tuple[int, int]:
        torch_net = nn.Sequential(nn.Linear(100, 700), nn.Linear(700, 700), nn.Linear(700, 700))  # fills buckets
        trainer = Trainer(torch_net, "sgd", kvstore=store, overlap=True)
        seen = []

        def reached(*_: Any) -> None:
            seen.append(len(trainer._pushed))

        for _ in range(2):
            trainer.zero_grad()
            output = torch_net[0](torch.ones(1, 100))
            output.register_hook(reached)
            torch_net[2](torch_net[1](output)).sum().backward()
            trainer.step()
        assert not trainer._pushed
        return seen[0], seen[1]

    assert run(mode, body) == [(0, 4)] * mode.workers  # before the first step no batch size is known


# ---- clipping


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_clipping_by_the_global_norm(mode: Mode, overlap: bool) -> None:
    limit = 1.0

    def body(store: KVStore) -> tuple[list[np.ndarray], list[float]]:
        net = network(store.rank)
        trainer = sgd(net, store, clip_global_norm=limit, overlap=overlap)
        assert trainer.last_global_norm is None
        norms = []
        for step in range(STEPS):
            trainer.zero_grad()
            loss(net, batch(step, store.rank)).backward()
            if step % 2:
                trainer.step()
            else:
                trainer.allreduce_grads()
                trainer.update()
            norms.append(trainer.last_global_norm)
        return weights(net), norms

    found = run(mode, body)
    assert_close([one for one, _ in found], reference(even(mode.workers), clip=limit))
    norms = found[0][1]
    assert all(other == norms for _, other in found)  # bit for bit
    assert min(norms) < limit < max(norms)
    net = copy.deepcopy(NET)
    loss(net, joined(0, even(mode.workers)[0])).backward()
    assert norms[0] == pytest.approx(float(nn.utils.clip_grad_norm_(net.parameters(), limit)), rel=1e-5)


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    def body(store: KVStore) -> list[np.ndarray]:
        net = network(store.rank)
        trainer = sgd(net, store, clip_global_norm=1.0)
        for step in range(3):
            trainer.zero_grad()
            loss(net, batch(step if step == 0 else 1, store.rank)).backward()
            if step == 1 and store.rank == 1:
                net[0].bias.grad[0] = float("nan")
            if step != 1:
                trainer.step()
                continue
            before = weights(net)
            with pytest.raises(FloatingPointError, match="norm of the gradients is nan; no weight was changed"):
                trainer.step()
            assert all(np.array_equal(a, b) for a, b in zip(before, weights(net), strict=True))
        return weights(net)

    for mode in (MODES["one host"], MODES["two hosts"]):
        assert_close(run(mode, body), reference(even(mode.workers, 2), clip=1.0))


def test_where_clipping_is_refused() -> None:
    def asynchronous(store: KVStore) -> None:
        with pytest.raises(ValueError, match="dist_async store applies each gradient alone"):
            sgd(network(0), store, clip_global_norm=1.0)

    run(Mode(1, name="dist_async"), asynchronous)
    with pytest.raises(ValueError, match="leave update_on_kvstore=True out"):
        sgd(NET, None, clip_global_norm=1.0, update_on_kvstore=True)
    for wrong in (0, -1, "1", True, float("nan")):
        with pytest.raises(ValueError, match="clip_global_norm is a number above 0"):
            sgd(NET, None, clip_global_norm=wrong)
