"""DistributedModel: the training of one process with a replica per worker, in every mode."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from typing import Any

import frameworks
import numpy as np
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from store_modes import Mode, mode_id  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import optimizers  # noqa: E402
from mpikv.errors import ConfigError, MpikvError, PeerError, ShapeMismatch, UnsupportedError  # noqa: E402

EVERY = pytest.mark.parametrize("mode", nets.MODES, ids=mode_id)


def _checkpoint(layer: Any, x: Any, reentrant: bool) -> Any:
    # Thread ranks share the random state that it would set back.
    return checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)


def _sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("mode", [Mode("local", 1), Mode("dist_sync", 1), *nets.MODES], ids=mode_id)
def test_trains_as_one_process_with_replicas(mode: Mode) -> None:
    replicas = [nets.seeded(nets.Net) for _ in range(mode.workers)]
    optimizers_ = [_sgd(model) for model in replicas]
    for step in range(6):
        for rank, model in enumerate(replicas):
            nets.loss_of(model(nets.batch(step, rank), odd=bool(rank % 2))).backward()
        nets.mean_gradients(replicas)
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2) for model in replicas]
        for optimizer in optimizers_:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        nets.equal_buffers(replicas)

    def body(store: Any) -> dict[str, Any]:
        net = nets.seeded(nets.Net, seed=store.rank)  # worker 0's are what counts
        model = mt.DistributedModel(net, store, bucket_bytes=600)
        optimizer = _sgd(model)
        for step in range(6):
            loss = nets.loss_of(model(nets.batch(step, store.rank), odd=bool(store.rank % 2)))
            loss.backward()
            assert (model.unused.weight.grad is None) == (net.frozen.weight.grad is None) is True
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.testing.assert_close(norm, norms[store.rank])
        nets.assert_same_state(model, replicas[0])
        return nets.snapshot(model)

    nets.same_on_all(mode.run(body))


@nets.TWO
def test_gradients_are_the_sum_without_average(mode: Mode) -> None:
    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(3, 1)), store, average=False)
        for _ in range(2):
            model(torch.full((1, 3), store.rank + 1.0)).sum().backward()
            assert model.weight.grad.tolist() == [[3.0] * 3]
            model.zero_grad()

    mode.run(body)


@nets.TWO
def test_unused_parameters(mode: Mode) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))

        def forward(self, x: Any, use: str) -> Any:
            return sum((getattr(self, name) * x).sum() for name in use)

    def body(store: Any) -> None:
        model = mt.DistributedModel(Two(), store)
        one = torch.ones(2)

        def grads() -> list[Any]:
            return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]

        model(one, "ab" if store.rank else "a").backward()  # c by nobody, b by worker 1
        assert grads() == [[1, 1], [0.5, 0.5], None]
        model(one, "a" if store.rank else "c").backward()  # adds up; b is as it was
        assert grads() == [[1.5, 1.5], [0.5, 0.5], [0.5, 0.5]]
        model.zero_grad(set_to_none=False)
        model(one, "b").backward()
        assert grads() == [[0, 0], [1, 1], [0, 0]]
        model.zero_grad(set_to_none=True)
        model(one, "c").backward()
        assert grads() == [None, None, [1, 1]]
        model.a.grad = torch.full((2,), 7.0)  # set by hand: as it was, where nobody uses it
        model(one, "b").backward()
        assert grads() == [[7, 7], [1, 1], [1, 1]]

    mode.run(body)


@nets.TWO
def test_freezing_and_unfreezing(mode: Mode) -> None:
    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(nets.Net), store, bucket_bytes=300)
        twins = [nets.seeded(nets.Net) for _ in range(2)]
        changes = [(), ("frozen",), (), ("head", "conv"), ("frozen", "conv"), ("twice", "norm"), ("twice",)]
        keys = 0
        for step, names in enumerate([*changes, *changes]):
            for module in (model, *twins):
                for name in names:
                    for parameter in getattr(module, name).parameters():
                        parameter.requires_grad_(not parameter.requires_grad)
                module.zero_grad()
            nets.loss_of(model(nets.batch(step, store.rank))).backward()
            for rank, twin in enumerate(twins):
                nets.loss_of(twin(nets.batch(step, rank))).backward()
            nets.mean_gradients(twins)
            for (name, parameter), wanted in zip(model.named_parameters(), twins[0].parameters(), strict=True):
                assert (parameter.grad is None) == (wanted.grad is None), name
                if wanted.grad is not None:
                    torch.testing.assert_close(parameter.grad, wanted.grad)
            if step == len(changes):
                keys = len(store.session.infos)
        assert keys == len(store.session.infos)  # no new ones for what was seen before

    mode.run(body)


@nets.TWO
def test_freezing_on_one_worker_is_an_error_on_all(mode: Mode) -> None:
    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(nets.Net), store)
        nets.loss_of(model(nets.batch(0, 0))).backward()
        model.head.weight.requires_grad_(store.rank == 0)
        with pytest.raises(ConfigError, match=r"requires_grad of 'head\.weight' differs between workers"):
            nets.loss_of(model(nets.batch(0, 0))).backward()
        model.head.weight.requires_grad_(True)
        model.zero_grad()
        nets.loss_of(model(nets.batch(0, 0))).backward()
        assert model.head.weight.grad is not None

    mode.run(body)


@nets.TWO
@pytest.mark.parametrize("sync", [True, False])
def test_buffers(mode: Mode, sync: bool) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.full((3,), float("nan"), dtype=torch.bfloat16))
            self.register_buffer("late", torch.zeros(5, dtype=torch.bool), persistent=False)
            self.register_buffer("never", torch.zeros(5, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            self.steps += int(x[0])
            self.mean.copy_(x)
            if self.steps > 20:
                self.late[int(x[0]) % 5] = True
            return (self.weight * x).sum()

    def body(store: Any) -> list[Any]:
        net = Counting()
        net.never += store.rank
        model = mt.DistributedModel(net, store, sync_buffers=sync)
        for step in range(8):
            model(torch.full((3,), 3.0 + store.rank + step)).backward()
        return [buffer.tolist() for buffer in model.buffers()]

    first, second = mode.run(body)
    net = Counting()
    for step in range(8):
        net(torch.full((3,), 3.0 + step))
    alone = [buffer.tolist() for buffer in net.buffers()]
    assert any(alone[2])
    assert first == alone
    assert (second == alone) is sync
    assert second[3] == alone[3]  # at the start they are worker 0's in any case


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@nets.TWO
def test_dtypes(mode: Mode, dtype: str) -> None:
    def body(store: Any) -> None:
        net = nets.seeded(lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)))
        net[0].to(getattr(torch, dtype))
        model = mt.DistributedModel(net, store)
        for _ in range(3):
            x = torch.full((1, 3), store.rank + 1.0).to(getattr(torch, dtype))
            net[1](net[0](x).float()).sum().backward()  # past the model's own forward
            assert net[0].weight.grad.dtype == getattr(torch, dtype)
            expected = 1.5 * net[1].weight.detach().t().expand(2, 3)
            torch.testing.assert_close(net[0].weight.grad.float(), expected.float(), rtol=1e-2, atol=1e-3)
            model.zero_grad()

    mode.run(body)


@nets.TWO
def test_sparse_gradients_are_refused(mode: Mode) -> None:
    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(4, 2))

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.embedding(x, self.table, sparse=True).sum()

    def body(store: Any) -> None:
        with pytest.raises(UnsupportedError, match="sparse=False"):
            mt.DistributedModel(torch.nn.Embedding(4, 2, sparse=True), store)
        model = mt.DistributedModel(Lookup(), store)
        with pytest.raises(UnsupportedError, match="sparse"):
            model(torch.tensor([1, 2])).backward()

    mode.run(body)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, fails: bool) -> Any:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.fails:
            raise ArithmeticError("no gradient")
        return grads[0], None


@nets.TWO
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_a_backward_pass_that_ends_early(mode: Mode, who: tuple[int, ...]) -> None:
    """On the others it is an error, too; afterwards all go on."""

    class Failing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

        def forward(self, x: Any, fails: bool) -> Any:
            return self.last(_Fails.apply(self.first(x), fails))

    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(Failing), store, bucket_bytes=1)
        for step in range(4):
            fails = store.rank in who and step in (0, 2)
            output = model(torch.full((1, 2), store.rank + 1.0), fails).sum()
            if step in (0, 2):
                with pytest.raises(ArithmeticError if fails else PeerError, match=r"no gradient|ended early"):
                    output.backward()
            else:
                output.backward()
                torch.testing.assert_close(model.first.weight.grad, 1.5 * model.last.weight.t().expand(2, 2).detach())
            model.zero_grad()

    mode.run(body)


@nets.TWO
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(mode: Mode, reentrant: bool) -> None:
    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))

        def forward(self, x: Any, how: bool | None = None) -> Any:
            for layer in self.layers[:3]:
                x = layer(x) if how is None else _checkpoint(layer, x, how)
            return self.layers[3](x)

    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(Deep), store, bucket_bytes=1)
        twins = [nets.seeded(Deep) for _ in range(2)]
        for step in range(3):
            for rank, twin in enumerate(twins):
                twin.zero_grad()
                twin(torch.full((2, 3), rank + step + 1.0)).square().sum().backward()
            nets.mean_gradients(twins)
            model.zero_grad()
            x = torch.full((2, 3), store.rank + step + 1.0, requires_grad=True)
            model(x, reentrant).square().sum().backward()
            for parameter, wanted in zip(model.parameters(), twins[0].parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, wanted.grad)

    mode.run(body)


@nets.TWO
def test_a_gradient_that_comes_twice_in_one_pass(mode: Mode) -> None:
    """A shared layer in two reentrant checkpoints: right on one host, an error where its bucket has left."""

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)

        def forward(self, x: Any) -> Any:
            for _ in range(2):
                x = _checkpoint(self.layer, x, True)
            return self.last(x)

    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(Shared), store, bucket_bytes=1)
        twin = nets.seeded(Shared)
        x = torch.ones(1, 2, requires_grad=True)
        twin(x).sum().backward()
        for step in range(3):
            if store.session.shares_memory or not step:
                model(x).sum().backward()
                torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)
                model.zero_grad(set_to_none=step == 0)
            else:
                with pytest.raises(UnsupportedError, match=r"'layer\.weight' got a gradient twice"):
                    model(x).sum().backward()
                model.zero_grad()
        with torch.no_grad():
            model(x)

    mode.run(body)


@pytest.mark.parametrize("since", [0, 2])
def test_a_parameter_that_is_used_outside_and_inside_a_checkpoint(since: int) -> None:
    """On one host. since: the first pass with a checkpoint; where others came before, it is an error on all workers."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3)

        def forward(self, x: Any, how: bool) -> Any:
            inner = _checkpoint(self.layer, x, True) if how else self.layer(x)
            return self.layer(self.other(inner).tanh())

    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(Tied), store)
        twins = [nets.seeded(Tied) for _ in range(2)]
        for step in range(6):
            for rank, twin in enumerate(twins):
                twin.zero_grad()
                twin(torch.full((2, 3), rank + step + 1.0), False).square().sum().backward()
            nets.mean_gradients(twins)
            model.zero_grad(set_to_none=step % 2 == 0)
            loss = model(torch.full((2, 3), store.rank + step + 1.0, requires_grad=True), step >= since).square().sum()
            if 0 < since == step:
                with pytest.raises(UnsupportedError, match=r"'layer\.weight' got a gradient twice"):
                    loss.backward()
                continue
            loss.backward()
            for parameter, wanted in zip(model.parameters(), twins[0].parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, wanted.grad)

    nets.HERE.run(body)


@nets.TWO
def test_gradients_of_inputs_exchange_nothing(mode: Mode) -> None:
    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(nets.Net), store)
        nets.loss_of(model(nets.batch(0, 0))).backward()
        store.barrier()
        before = store.stats()
        x = nets.batch(0, 0).requires_grad_()
        if store.rank:
            torch.autograd.grad(model(x).sum(), x)
            with torch.no_grad():
                model(x)
        assert store.stats()["messages_sent"] == before["messages_sent"]
        store.barrier()
        x.grad = None
        nets.loss_of(model(x)).backward()
        assert x.grad is not None

    mode.run(body)


@nets.TWO
def test_backward_in_other_threads(mode: Mode) -> None:
    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(2, 1)), store)
        for _ in range(3):
            loss = model(torch.full((1, 2), store.rank + 1.0)).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            assert model.weight.grad.tolist() == [[1.5, 1.5]]
            model.zero_grad()

    mode.run(body)


def test_it_is_the_module() -> None:
    def body(store: Any) -> None:
        net = nets.seeded(nets.Net)
        names = [name for name, _ in net.named_parameters()]
        model = mt.DistributedModel(net, store)
        assert isinstance(model, torch.nn.Module)
        assert [name for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == list(net.state_dict())
        assert [name for name, _ in model.named_modules()][1:] == [name for name, _ in net.named_modules()][1:]
        assert all(one is other for one, other in zip(model.parameters(), net.parameters(), strict=True))
        assert model.module is net
        assert model.head is net.head
        model.eval()
        assert not net.training
        assert not net.norm.training
        assert not model.training
        assert model.train() is model
        assert net.norm.training
        model.temperature = 2
        assert net.temperature == 2
        model.head = torch.nn.Linear(16, 3)
        assert net.head is model.head
        with pytest.raises(AttributeError):
            _ = model.nothing
        outer = torch.nn.Sequential(model)
        assert list(outer.state_dict()) == [f"0.{name}" for name in net.state_dict()]
        outer.load_state_dict(outer.state_dict())
        model.load_state_dict(net.state_dict())
        assert "worker" in repr(model)
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.deepcopy(model)
        counted = []
        model.apply(counted.append)
        assert counted[-1] is net
        assert model.double() is model
        assert net.conv.weight.dtype == torch.float64

    nets.HERE.run(body)


@nets.TWO
def test_what_differs_between_workers_is_an_error_on_all(mode: Mode) -> None:
    def body(store: Any) -> None:
        one = store.rank == 1
        for make, error, text in (
            (
                lambda: torch.nn.Linear(2 + one, 1),
                ShapeMismatch,
                r"worker 0: parameter 'weight'.*\(1, 2\).*worker 1.*\(1, 3\)",
            ),
            (lambda: torch.nn.Linear(2, 1, bias=not one), ShapeMismatch, "'bias'.*nothing more"),
            (lambda: torch.nn.Linear(2, 1).to(torch.float64 if one else torch.float32), ShapeMismatch, "float64"),
            (lambda: torch.nn.Linear(2, 1).requires_grad_(one), ShapeMismatch, "frozen"),
            (lambda: torch.nn.BatchNorm1d(2, track_running_stats=one), ShapeMismatch, "buffer"),
            (
                lambda: torch.nn.Sequential(*[torch.nn.Linear(2, 2), torch.nn.PReLU()][:: -1 if one else 1]),
                ShapeMismatch,
                "parameter",
            ),
        ):
            with pytest.raises(error, match=text):
                mt.DistributedModel(make(), store)
        with pytest.raises(ConfigError, match="average=False"):
            mt.DistributedModel(torch.nn.Linear(2, 1), store, average=not one)

    mode.run(body)


def test_memory_formats() -> None:
    def body(store: Any) -> None:
        def make() -> Any:
            return torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

        model, twin = mt.DistributedModel(nets.seeded(make), store), nets.seeded(make)
        x = torch.arange(48.0).reshape(1, 3, 4, 4)
        for module in (model, twin):
            module(x).sum().backward()
        torch.testing.assert_close(model.weight.grad, twin.weight.grad)
        assert model.weight.grad.stride() == model.weight.stride()
        with pytest.raises(ShapeMismatch, match="strides"):
            mt.DistributedModel(make() if store.rank else torch.nn.Conv2d(3, 4, 2), store)

    nets.HERE.run(body)


def test_bad_arguments() -> None:
    def body(store: Any) -> None:
        net = torch.nn.Linear(2, 1)
        for call, error in (
            (lambda: mt.DistributedModel(1, store), TypeError),
            (lambda: mt.DistributedModel(net, "dist_sync"), TypeError),
            (lambda: mt.DistributedModel(net, store, bucket_bytes=0), ValueError),
            (lambda: mt.DistributedModel(net, store, bucket_bytes=1.5), TypeError),
            (lambda: mt.DistributedModel(mt.DistributedModel(net, store), store), TypeError),
            (lambda: mt.DistributedModel(torch.nn.Linear(2, 1, dtype=torch.complex64), store), UnsupportedError),
            (lambda: mt.DistributedModel(torch.nn.LazyLinear(2), store), UnsupportedError),
        ):
            with pytest.raises(error):
                call()
        model = mt.DistributedModel(net, store)
        store.set_optimizer(optimizers.create("sgd"))
        with pytest.raises(UnsupportedError, match="optimizer"):
            model(torch.ones(1, 2)).sum().backward()

    nets.HERE.run(body)

    def refused(store: Any) -> None:
        with pytest.raises(UnsupportedError, match="dist_sync"):
            mt.DistributedModel(torch.nn.Linear(2, 1), store)

    Mode("dist_async", 2).run(refused)


def test_unequally_many_backward_passes_are_an_error() -> None:
    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(2, 1)), store)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        if store.rank == 0:
            with pytest.raises(MpikvError, match="model0/gradients"):
                model(torch.ones(1, 2)).sum().backward()

    nets.HERE.run(body)


def test_gradients_on_a_device_go_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With host memory that is taken for a device's."""
    monkeypatch.setattr(mt.arrays, "in_host_memory", lambda tensor: False)
    replicas = [nets.seeded(nets.Net) for _ in range(2)]
    for step in range(3):
        for rank, replica in enumerate(replicas):
            nets.loss_of(replica(nets.batch(step, rank))).backward()
        nets.mean_gradients(replicas)

    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(nets.Net), store)
        for step in range(3):
            nets.loss_of(model(nets.batch(step, store.rank))).backward()
        for parameter, wanted in zip(model.parameters(), replicas[0].parameters(), strict=True):
            assert (parameter.grad is None) == (wanted.grad is None)
            if wanted.grad is not None:
                torch.testing.assert_close(parameter.grad, wanted.grad)

    with pytest.warns(UserWarning, match="slow"):
        nets.LINKS.run(body)


def test_on_one_host_a_step_is_one_call_and_no_message() -> None:
    def body(store: Any) -> None:
        model = mt.DistributedModel(nets.seeded(nets.Net), store, bucket_bytes=300)
        nets.loss_of(model(nets.batch(0, store.rank))).backward()
        before = store.stats()
        for step in range(4):
            nets.loss_of(model(nets.batch(step, store.rank))).backward()
        grads = [p.grad.numpy() for p in model.parameters() if p.grad is not None]
        buckets = model._gradients._buckets
        assert all(any(np.shares_memory(grad, bucket.flat) for bucket in buckets) for grad in grads)
        after = store.stats()
        calls = after["direct_calls"] + after["declined_calls"] - before["direct_calls"] - before["declined_calls"]
        assert calls == 4
        if after["declined_calls"] == before["declined_calls"]:
            assert after["messages_sent"] == before["messages_sent"]
            queues = [store.strategy.keys.queues[store.session.infos[bucket.key].id] for bucket in buckets]
            assert not any(queue.stored.any() for queue in queues)  # no second copy in the keys' own memory

    nets.HERE.run(body)


@pytest.mark.parametrize("mode", [nets.LINKS, nets.SERVERS], ids=mode_id)
def test_between_hosts_buckets_leave_during_the_backward_pass(mode: Mode) -> None:
    def body(store: Any) -> None:
        layers = [torch.nn.Linear(8, 8) for _ in range(6)]
        model = mt.DistributedModel(torch.nn.Sequential(*layers), store, bucket_bytes=300)
        sent: list[str] = []
        before: list[int] = []
        prepare = store.strategy.prepare

        def noted(entries: Any, *rest: Any, **named: Any) -> Any:
            sent.append(entries[0].info.key)
            return prepare(entries, *rest, **named)

        store.strategy.prepare = noted
        layers[0].register_full_backward_pre_hook(lambda *_: before.append(len(sent)))
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        keys = len(set(sent))
        assert keys >= 5
        assert len(sent) == 3 * keys
        assert before[0] == 0  # the first pass finds the order
        assert before[1] - keys >= 3  # the later layers' gradients have left when the first layer's are computed
        assert sent[keys : 2 * keys] == sent[2 * keys :]

    mode.run(body)


def test_the_order_of_buckets_is_worker_0s() -> None:
    class Swapping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Any, order: Any) -> Any:
            for i in order:
                x = self.layers[i](x)
            return x

    def body(store: Any) -> list[Any]:
        model = mt.DistributedModel(nets.seeded(Swapping), store, bucket_bytes=1)
        for _ in range(3):
            order = (0, 1, 2) if store.rank else (1, 0, 2)
            model(torch.ones(1, 4), order).sum().backward()
        return [p.grad.tolist() for p in model.parameters()]

    first, second = nets.LINKS.run(body)
    assert first == second


def test_importing_brings_no_mpi() -> None:
    program = (
        "import sys, threading, mpikv.torch\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
