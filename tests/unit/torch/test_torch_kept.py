"""Gradients that a program keeps or changes, and modules that it changes: right, or an error that names what it is.

And what is put on a program's parameters comes off again, and keeps nothing alive.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

import frameworks
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402
from torch_nets import Parts  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import Trainer, kv  # noqa: E402
from mpikv.errors import UnsupportedError  # noqa: E402

KEEP = {
    "itself": lambda grad: grad,
    "detach": lambda grad: grad.detach(),
    "view": lambda grad: grad.view(-1),
    "numpy": lambda grad: grad.numpy(),
}


# --- what programs do with gradients: the same as in PyTorch alone. An action has the module, the input, what holds


def use(names: str, times: float = 1.0, *, alone: bool = False) -> Any:
    """A pass that uses these. alone: without an exchange."""

    def act(net: Any, x: float, _hold: Any) -> None:
        skips = alone and isinstance(net, mt.DistributedModel)
        with net.no_sync() if skips else contextlib.nullcontext():
            net(times * x, names).backward()

    return act


def hold(name: str) -> Any:
    return lambda net, _, hold: hold(getattr(net, name).grad)


def clear(net: Any, *_: Any) -> None:
    net.zero_grad()


def zero(net: Any, *_: Any) -> None:
    net.zero_grad(set_to_none=False)


def clip(net: Any, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def replace(net: Any, *_: Any) -> None:
    """The next pass adds to it."""
    for parameter in net.parameters():
        parameter.grad = parameter.grad * 0.5


def set_c(net: Any, *_: Any) -> None:
    """One in the same bucket as others that are kept."""
    net.c.grad = torch.full_like(net.c, 8.0)


def swap(net: Any, *_: Any) -> None:
    """Two parameters have each other's gradients, of which PyTorch then uses the memory."""
    net.c.grad = torch.cat([net.a.grad, net.a.grad])
    net.a.grad = net.b.grad[:2]
    net.b.grad = None


def retain(net: Any, x: float, _hold: Any) -> None:
    loss = net(x)
    loss.backward(retain_graph=True)
    loss.backward()


def forward_twice(net: Any, x: float, _hold: Any) -> None:
    (net(x, "ab") + net(x, "bc")).backward()


def scale(net: Any, x: float, hold: Any) -> None:
    """With an optimizer of its own, whose step comes before the other's."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(net(x)).backward()
    scaler.unscale_(optimizer)
    clip(net)
    hold(net.b.grad)
    scaler.step(optimizer)
    scaler.update()


PROGRAMS = {
    "cleared": [clear, use("abc"), hold("a")],
    "set by hand": [clear, set_c, use("abc"), hold("a")],
    "zeroed": [zero, use("abc")],
    "accumulated": [use("abc"), use("ab", 2)],
    "retained": [clear, retain, hold("a")],
    "twice forward": [clear, forward_twice, hold("a")],
    "synchronized late": [clear, use("abc", alone=True), use("a", alone=True), use("bc"), hold("b")],
    "synchronized late, in place": [zero, use("ab", alone=True), use("bc", 2)],
    "replaced": [use("abc"), hold("a"), replace],
    "clipped": [clear, use("abc"), clip, hold("b")],
    "swapped": [clear, use("ab"), swap, use("abc")],
}
if hasattr(torch.amp, "GradScaler"):  # since PyTorch 2.3 on processors, too
    PROGRAMS["scaled"] = [clear, scale]


def results_of(program: str, net: Any, factor: float, keep: str = "itself") -> list[Any]:
    """Weights, gradients and what the program held, after some steps; nothing that it held has changed."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    held: list[tuple[Any, Any]] = []

    def hold(grad: Any) -> None:
        if step % 3:  # every third time nobody keeps anything
            held.append((KEEP[keep](grad), grad.tolist()))

    for step in range(1, 7):
        for action in PROGRAMS[program]:
            action(net, step * factor, hold)
        optimizer.step()
    assert all(one.reshape(-1).tolist() == value for one, value in held)
    tensors = [*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None)]
    return [[tensor.tolist() for tensor in tensors], [value for _, value in held]]


@on(*nets.TWO)
@pytest.mark.parametrize(
    ("program", "keep", "dtype"),
    [
        *((program, "itself", torch.float32) for program in PROGRAMS),
        *(("set by hand", keep, torch.float32) for keep in KEEP),
        ("cleared", "itself", torch.bfloat16),
    ],
)
def test_programs_have_the_gradients_of_one_process(store: Any, program: str, keep: str, dtype: Any) -> None:
    """Bitwise: the mean of the workers' gradients is that of 1.5 times the input."""
    expected = results_of(program, Parts(dtype=dtype), 1.5)
    model = mt.DistributedModel(Parts(dtype=dtype), store, sync_buffers=False)
    assert results_of(program, model, store.rank + 1.0, keep) == expected


# --- hooks


def doubled(parameter: Any) -> None:
    parameter.grad.mul_(2.0)


def limited(parameter: Any) -> None:
    parameter.grad.clamp_(max=1.0)


@on(*nets.TWO)
@pytest.mark.parametrize("way", ["model", "optimizer"])
def test_hooks_that_are_added_after_wrapping_run_before_the_exchange(store: Any, way: str) -> None:
    net, optimizer = nets.wrapped(way, Parts(), store)

    def first(x: float = 1.0) -> list[float]:
        optimizer.zero_grad()
        net(x * (store.rank + 1)).backward()
        optimizer.step()
        return [p.grad[0].item() for p in net.parameters()]

    assert first() == [1.5, 1.5, 1.5]
    handle = net.a.register_post_accumulate_grad_hook(doubled)
    clamp = net.b.register_post_accumulate_grad_hook(limited)
    for _ in range(3):
        assert first() == [3.0, 1.0, 1.5]
    optimizer.zero_grad(set_to_none=False)
    assert first() == [3.0, 1.0, 1.5]
    handle.remove()
    clamp.remove()
    assert first() == [1.5, 1.5, 1.5]


@on(nets.HERE)
def test_a_hook_that_takes_the_gradient_away(store: Any) -> None:
    model = mt.DistributedModel(Parts(), store)

    def take(parameter: Any) -> None:
        parameter.grad = None

    for _ in range(2):
        handle = model.b.register_post_accumulate_grad_hook(take)
        with pytest.raises(UnsupportedError, match="'b'"):
            model(1.0).backward()
        handle.remove()
        model(1.0).backward()
        assert model.b.grad.tolist() == [1.0] * 3
        model.zero_grad()


# --- gradients that are differentiated again


@on(*nets.TWO)
def test_gradients_with_a_graph_are_refused(store: Any) -> None:
    model = mt.DistributedModel(nets.seeded(lambda: torch.nn.Linear(2, 1)), store)
    x = torch.ones(1, 2)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            model(x).square().sum().backward(create_graph=True)
        model.zero_grad()
        # a penalty on the gradient, as it is done right
        out = model(x).square().sum()
        (gradient,) = torch.autograd.grad(out, model.weight, create_graph=True)
        (out + gradient.square().sum()).backward()
        assert not model.weight.grad.requires_grad
        model.zero_grad()


# --- modules that change


@on(*nets.TWO)
def test_parameters_that_come_later_are_refused(store: Any) -> None:
    model = mt.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2)), store)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    model.module.append(torch.nn.Linear(2, 1))
    with pytest.raises(UnsupportedError, match=r"parameter '1.weight', '1.bias' came to the module after"):
        model(x)
    with torch.no_grad():
        model(x)  # where nothing is exchanged
    model.module[1] = torch.nn.Dropout(0.0)
    model(x).sum().backward()
    model.module[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match=r"parameter '0.weight' came"):
        model(x)


@on(*nets.TWO)
@pytest.mark.parametrize(("change", "now"), [("dtype", r"float64 \(2, 3\)"), ("shape", r"float32 \(1, 3\)")])
def test_parameters_that_have_another_shape_or_dtype_are_refused(store: Any, change: str, now: str) -> None:
    model = mt.DistributedModel(torch.nn.Linear(3, 2, bias=False), store)
    x = torch.ones(1, 3)
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    model.zero_grad()
    if change == "dtype":
        model.double()
    else:
        model.weight.data = model.weight.data[:1].clone()
    with pytest.raises(UnsupportedError, match=rf"'weight' was float32 \(2, 3\) when .*, and is {now} now"):
        model(x.to(model.weight.dtype)).sum().backward()


def test_copies_are_refused() -> None:
    model = mt.DistributedModel(torch.nn.Linear(2, 1), kv.create("local"))
    ways = (
        lambda: copy.deepcopy(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.optim.swa_utils.AveragedModel(model),
    )
    for way in ways:
        with pytest.raises(TypeError, match=r"^a DistributedModel cannot be copied or pickled: .* \.module or its"):
            way()
    averaged = torch.optim.swa_utils.AveragedModel(model.module)
    averaged.update_parameters(model.module)


# --- what comes off again


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


@on(*nets.LONG)
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
