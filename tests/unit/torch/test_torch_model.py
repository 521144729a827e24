"""DistributedModel, and in training DistributedOptimizer: as one process with a replica per worker, in every mode."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import frameworks
import numpy as np
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402
from store_modes import Mode, modes  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import optimizers  # noqa: E402
from mpikv.errors import ConfigError, PeerError, ShapeMismatch, UnsupportedError  # noqa: E402


def _checkpoint(layer: Any, x: Any, reentrant: bool) -> Any:
    # Thread ranks share the random state that it would set back.
    return checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)


def _sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _stepped(step: int, model: Any, optimizer: Any) -> Any:
    """After a backward pass: clip, update and forget the gradients. Returns their norm."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    with optimizer.skip_synchronize() if step % 2 and hasattr(optimizer, "synchronize") else torch.enable_grad():
        optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    return norm


@modes(Mode("local", 1), *nets.MODES)
@pytest.mark.parametrize(
    ("way", "passes", "op"), [("model", 1, mt.Average), ("optimizer", 1, mt.Average), ("optimizer", 3, mt.Sum)]
)
def test_trains_as_one_process_with_replicas(mode: Mode, way: str, passes: int, op: str) -> None:
    """Horovod's DistributedOptimizer, too, by several passes for a step, or called between them and the step."""
    replicas = [nets.seeded(nets.Net) for _ in range(mode.workers)]
    optimizers_, norms = [_sgd(model) for model in replicas], []

    def backward(model: Any, step: int, rank: int) -> None:
        for i in range(passes):
            odd = bool(rank % 2) and i == 0
            nets.loss_of(model(nets.batch(10 * step + i, rank), odd=odd)).backward()

    for step in range(3):
        for rank, model in enumerate(replicas):
            backward(model, step, rank)
        nets.mean_gradients(replicas, None if op == mt.Average else [1.0] * mode.workers)
        norms = [_stepped(step, model, one) for model, one in zip(replicas, optimizers_, strict=True)]
        if way == "model":
            nets.equal_buffers(replicas)

    def body(store: Any) -> dict[str, Any]:
        net = nets.seeded(nets.Net, seed=store.rank)  # worker 0's are what counts
        optimizer, model = _sgd(net), net
        if way == "model":
            model = mt.DistributedModel(net, store, bucket_bytes=600)
        else:
            mt.broadcast_parameters(net.state_dict(), store=store)
            options = {"backward_passes_per_step": passes, "op": op, "bucket_bytes": 500}
            optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store=store, **options)
        for step in range(3):
            backward(model, step, store.rank)
            if way == "optimizer":
                optimizer.synchronize()
            assert (net.unused.weight.grad is None) == (net.frozen.weight.grad is None) is True
            norm = _stepped(step, model, optimizer)
        torch.testing.assert_close(norm, norms[store.rank])
        for buffer, other in zip(net.buffers(), replicas[0].buffers(), strict=True):
            if way == "optimizer":  # each worker has its own
                buffer.copy_(other)
        nets.assert_same_state(model, replicas[0])
        return nets.snapshot(model)

    nets.same_on_all(mode.run(body))


# --- the gradients of replicas in one process: what `run(model, worker, step)` makes in each step


def deep() -> Any:
    """Layers, the first ones in checkpoints."""

    def run(model: Any, x: Any, how: bool) -> Any:
        for layer in model.layers[:3]:
            x = _checkpoint(layer, x, how)
        return model.layers[3](x)

    return nets.Of(run, layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(4)))


def tied() -> Any:
    """A layer that is used outside and inside a checkpoint."""

    def run(model: Any, x: Any, how: bool) -> Any:
        inner = _checkpoint(model.layer, x, True) if how else model.layer(x)
        return model.layer(model.other(inner).tanh())

    return nets.Of(run, layer=nn.Linear(3, 3, bias=False), other=nn.Linear(3, 3))


def plainly(model: Any, worker: int, step: int) -> None:
    nets.loss_of(model(nets.batch(step, worker))).backward()


def in_another_thread(model: Any, worker: int, step: int) -> None:
    backward = nets.loss_of(model(nets.batch(step, worker))).backward
    thread = threading.Thread(target=contextvars.copy_context().run, args=(backward,))
    thread.start()
    thread.join()


def with_checkpoints(reentrant: bool) -> Any:
    def run(model: Any, worker: int, step: int) -> None:
        x = torch.full((2, 3), worker + step + 1.0, requires_grad=True)
        model(x, reentrant).square().sum().backward()

    return run


CHANGES = [(), ("frozen",), (), ("head", "conv"), ("frozen", "conv"), ("twice", "norm"), ("twice",)]


def freezing(model: Any, worker: int, step: int) -> None:
    for name in CHANGES[step % len(CHANGES)]:
        for parameter in getattr(model, name).parameters():
            parameter.requires_grad_(not parameter.requires_grad)
    plainly(model, worker, step)


def convolving(model: Any, worker: int, step: int) -> None:
    model(torch.arange(48.0).reshape(1, 3, 4, 4) * (worker + step)).sum().backward()


def of_dtype(dtype: Any) -> Any:
    """A linear layer of this dtype and one of float32."""
    return lambda: nn.Sequential(nn.Linear(3, 2, dtype=dtype), nn.Linear(2, 1))


def past_forward(model: Any, worker: int, step: int) -> None:
    """Not through the model's own pass."""
    first, last = getattr(model, "module", model)
    x = torch.full((1, 3), worker + step + 1.0, dtype=first.weight.dtype)
    last(first(x).float()).sum().backward()


def compare(store: Any, make: Any, run: Any, steps: int = 4, **options: Any) -> None:
    model = mt.DistributedModel(nets.seeded(make), store, **options)
    twins = [nets.seeded(make) for _ in range(store.num_workers)]
    for step in range(steps):
        for rank, twin in enumerate(twins):
            twin.zero_grad(set_to_none=step % 2 == 0)
            run(twin, rank, step)
        nets.mean_gradients(twins, [1.0] * len(twins) if options.get("average") is False else None)
        model.zero_grad(set_to_none=step % 2 == 0)
        run(model, store.rank, step)
        nets.assert_same_grads(model, twins[0])


@on(*nets.TWO)
@pytest.mark.parametrize(
    ("make", "run", "options"),
    [
        (nets.Net, plainly, {"average": False}),
        (nets.Net, in_another_thread, {}),
        *((of_dtype(dtype), past_forward, {}) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
        *((deep, with_checkpoints(reentrant), {"bucket_bytes": 1}) for reentrant in (True, False)),
        (lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), convolving, {}),
    ],
    ids=["sum", "other thread", "float16", "bfloat16", "float64", "reentrant", "checkpoint", "channels last"],
)
def test_gradients_are_those_of_replicas(store: Any, make: Any, run: Any, options: Any) -> None:
    compare(store, make, run, **options)


@on(*nets.LONG)
def test_freezing_and_unfreezing(store: Any) -> None:
    """No keys for what was seen before, nor for a second model, which takes those of the first."""
    compare(store, nets.Net, freezing, len(CHANGES) + 1, bucket_bytes=300)
    assert (keys := _keys_of("model0", store))
    compare(store, nets.Net, freezing, len(CHANGES), bucket_bytes=300)
    assert _keys_of("model", store) == keys


def _keys_of(model: str, store: Any) -> int:
    return sum(key.startswith(model) for key in store.session.infos)


@on(nets.HERE)
def test_a_parameter_that_is_used_outside_and_inside_a_checkpoint(store: Any) -> None:
    """On one host: where passes without a checkpoint came before, an error on all workers."""

    def run(model: Any, worker: int, step: int) -> None:
        with_checkpoints(isinstance(model, mt.DistributedModel) and step >= 2)(model, worker, step)

    with pytest.raises(UnsupportedError, match=r"'layer\.weight' got a gradient twice"):
        compare(store, tied, run)


# --- which parameters and buffers


@on(*nets.TWO)
def test_unused_parameters(store: Any) -> None:
    model = mt.DistributedModel(nets.Parts(dict.fromkeys("abc", 2)), store)
    for fresh, use, expected in (
        (None, "ab" if store.rank else "a", [[1, 1], [0.5, 0.5], None]),  # c by nobody, b by worker 1
        (None, "a" if store.rank else "c", [[1.5, 1.5], [0.5, 0.5], [0.5, 0.5]]),  # adds up; b is as it was
        ({"set_to_none": False}, "b", [[0, 0], [1, 1], [0, 0]]),
        ({"set_to_none": True}, "c", [None, None, [1, 1]]),
        (torch.full((2,), 7.0), "b", [[7, 7], [1, 1], [1, 1]]),  # set by hand: as it was, where nobody uses it
    ):
        if isinstance(fresh, dict):
            model.zero_grad(**fresh)
        elif fresh is not None:
            model.a.grad = fresh
        model(1.0, use).backward()
        assert nets.grads_of(model) == expected


@modes(*nets.TWO)
@pytest.mark.parametrize("sync", [True, False])
def test_buffers(mode: Mode, sync: bool) -> None:
    def body(store: Any) -> list[Any]:
        def count(net: Any, x: float) -> Any:
            net.steps += int(x)
            net.mean.fill_(x)
            if net.steps > 20:
                net.late[int(x) % 5] = True
            return net.weight * x

        net = nets.Of(count, weight=nn.Parameter(torch.ones(())))
        net.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        net.register_buffer("mean", torch.full((3,), float("nan"), dtype=torch.bfloat16))
        net.register_buffer("late", torch.zeros(5, dtype=torch.bool), persistent=False)
        net.register_buffer("never", torch.full((5,), float(store.rank), dtype=torch.float64))
        model = mt.DistributedModel(net, store, sync_buffers=sync)
        for step in range(8):
            model(3.0 + store.rank + step).backward()
        return [buffer.tolist() for buffer in model.buffers()]

    first, second = mode.run(body)
    assert first == [sum(range(3, 11)), [10.0] * 3, [True, False, True, True, True], [0.0] * 5]
    assert (second == first) is sync
    assert second[3] == first[3]  # at the start they are worker 0's in any case


@on(*nets.TWO)
def test_sparse_gradients_are_refused(store: Any) -> None:
    with pytest.raises(UnsupportedError, match="sparse=False"):
        mt.DistributedModel(nn.Embedding(4, 2, sparse=True), store)
    table = nn.Parameter(torch.ones(4, 2))
    lookup = nets.Of(lambda net, x: nn.functional.embedding(x, net.table, sparse=True).sum(), table=table)
    model = mt.DistributedModel(lookup, store)
    with pytest.raises(UnsupportedError, match="sparse"):
        model(torch.tensor([1, 2])).backward()


@on(*nets.TWO)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_a_backward_pass_that_ends_early(store: Any, who: tuple[int, ...]) -> None:
    """On the others it is an error, too; afterwards all go on."""

    def fail(_: Any) -> None:
        raise ArithmeticError("no gradient")

    def failing() -> Any:
        def run(net: Any, x: Any, fails: bool) -> Any:
            middle = net.first(x)
            if fails:
                middle.register_hook(fail)
            return net.last(middle)

        return nets.Of(run, first=nn.Linear(2, 2), last=nn.Linear(2, 1))

    model = mt.DistributedModel(nets.seeded(failing), store, bucket_bytes=1)
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


@on(*nets.TWO)
def test_a_gradient_that_comes_twice_in_one_pass(store: Any) -> None:
    """A shared layer in two reentrant checkpoints: right in one host's memory, an error where its bucket has left."""

    def shared() -> Any:
        def run(net: Any, x: Any) -> Any:
            return net.last(_checkpoint(net.layer, _checkpoint(net.layer, x, True), True))

        return nets.Of(run, layer=nn.Linear(2, 2, bias=False), last=nn.Linear(2, 1, bias=False))

    model = mt.DistributedModel(nets.seeded(shared), store, bucket_bytes=1)
    twin = nets.seeded(shared)
    x = torch.ones(1, 2, requires_grad=True)
    twin(x).sum().backward()
    for step in range(3):
        if not model._gradients._overlap or not step:
            model(x).sum().backward()
            torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)
            model.zero_grad(set_to_none=step == 0)
        else:
            with pytest.raises(UnsupportedError, match=r"'layer\.weight' got a gradient twice"):
                model(x).sum().backward()
            model.zero_grad()
    with torch.no_grad():
        model(x)


@on(*nets.TWO)
def test_gradients_of_inputs_exchange_nothing(store: Any) -> None:
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


@on(nets.HERE)
def test_it_is_the_module(store: Any) -> None:
    net = nets.seeded(nets.Net)
    model = mt.DistributedModel(net, store)
    assert isinstance(model, nn.Module)
    for named in (nn.Module.named_parameters, nn.Module.named_buffers, nn.Module.named_children):
        assert {name: id(one) for name, one in named(model)} == {name: id(one) for name, one in named(net)}
    assert [name for name, _ in model.named_modules()][1:] == [name for name, _ in net.named_modules()][1:]
    assert (model.module is net, model.head is net.head) == (True, True)
    assert not any(one.training for one in (model.eval(), net, net.norm))
    assert model.train() is model
    assert net.norm.training
    model.temperature, model.head = 2, nn.Linear(16, 3)
    assert (net.temperature, net.head) == (2, model.head)
    with pytest.raises(AttributeError):
        _ = model.nothing
    outer = nn.Sequential(model)
    assert list(outer.state_dict()) == [f"0.{name}" for name in net.state_dict()]
    outer.load_state_dict(outer.state_dict())
    model.load_state_dict(net.state_dict())
    assert "worker" in repr(model)
    counted = []
    model.apply(counted.append)
    assert counted[-1] is net
    assert model.double() is model
    assert net.conv.weight.dtype == torch.float64


@on(*nets.TWO)
def test_what_differs_between_workers_is_an_error_on_all(store: Any) -> None:
    one = store.rank == 1
    for make, text in (
        (lambda: nn.Linear(2 + one, 1), r"worker 0: parameter 'weight'.*\(1, 2\).*worker 1.*\(1, 3\)"),
        (lambda: nn.Linear(2, 1, bias=not one), "'bias'.*nothing more"),
        (lambda: nn.Linear(2, 1).to(torch.float64 if one else torch.float32), "float64"),
        (lambda: nn.Linear(2, 1).requires_grad_(one), "frozen"),
        (lambda: nn.BatchNorm1d(2, track_running_stats=one), "buffer"),
        (lambda: nn.Conv2d(3, 4, 2).to(memory_format=(torch.contiguous_format, torch.channels_last)[one]), "strides"),
        (lambda: nn.Sequential(*[nn.Linear(2, 2), nn.PReLU()][:: -1 if one else 1]), "parameter"),
    ):
        with pytest.raises(ShapeMismatch, match=text):
            mt.DistributedModel(make(), store)
    with pytest.raises(ConfigError, match="average=False"):
        mt.DistributedModel(nn.Linear(2, 1), store, average=not one)


@on(nets.HERE)
def test_bad_arguments(store: Any) -> None:
    net = nn.Linear(2, 1)
    for call, error in (
        (lambda: mt.DistributedModel(1, store), TypeError),
        (lambda: mt.DistributedModel(net, "dist_sync"), TypeError),
        (lambda: mt.DistributedModel(net, store, bucket_bytes=0), ValueError),
        (lambda: mt.DistributedModel(net, store, bucket_bytes=1.5), TypeError),
        (lambda: mt.DistributedModel(mt.DistributedModel(net, store), store), TypeError),
        (lambda: mt.DistributedModel(nn.Linear(2, 1, dtype=torch.complex64), store), UnsupportedError),
        (lambda: mt.DistributedModel(nn.LazyLinear(2), store), UnsupportedError),
    ):
        with pytest.raises(error):
            call()
    model = mt.DistributedModel(net, store)
    store.set_optimizer(optimizers.create("sgd"))
    with pytest.raises(UnsupportedError, match="optimizer"):
        model(torch.ones(1, 2)).sum().backward()


@on(nets.HERE)
def test_on_one_host_a_step_is_one_call_and_no_message(store: Any) -> None:
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
        queues = [store.strategy.ring.queues[store.session.infos[bucket.key].id] for bucket in buckets]
        assert not any(queue.stored.any() for queue in queues)  # no second copy in the keys' own memory


@on(nets.LINKS, nets.SERVERS)
def test_between_hosts_buckets_leave_during_the_backward_pass(store: Any) -> None:
    layers = [nn.Linear(8, 8) for _ in range(6)]
    model = mt.DistributedModel(nn.Sequential(*layers), store, bucket_bytes=300)
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
