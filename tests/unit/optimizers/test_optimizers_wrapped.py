"""Callables and torch.optim classes as optimizers."""

from __future__ import annotations

import functools
import json
import pickle

import frameworks
import ml_dtypes
import numpy as np
import pytest

from mpikv import optimizers
from mpikv.errors import UnsupportedError
from mpikv.optimizers import function
from mpikv.optimizers.identity import identity
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import records_from_bytes, records_to_bytes

# --- callables


def momentum(weight, grad, state):
    """The state is an array."""
    state = grad.copy() if state is None else 0.5 * state + grad
    weight -= 0.1 * state
    return state


def test_a_callable_sees_the_weight_itself_the_rescaled_gradient_and_its_state() -> None:
    """And slices of them, if it says that it is elementwise."""
    assert optimizers.create(momentum).elementwise is False
    momentum.elementwise = True
    assert optimizers.create(momentum).elementwise is True
    del momentum.elementwise
    seen = []

    def kept(weight, grad, state):
        seen.append((weight, grad, state))
        return momentum(weight, grad, state)

    optimizer = optimizers.create(kept, rescale_grad=0.5)
    weight, grad = np.ones((2, 3), np.float16), np.full((2, 3), 4, np.float32)
    state = optimizer.init(weight)
    assert state == {"t": 0}
    state = optimizer.update(0, weight, grad, state)
    optimizer.rescale_grad = 1.0
    state = optimizer.update(0, weight, grad, state)
    assert (state["t"], state["value"].tolist()) == (2, [[5.0] * 3] * 2)
    assert [one.tolist() for _, one, _ in seen] == [[[2.0] * 3] * 2, [[4.0] * 3] * 2]
    assert all(one[0] is weight and one[1].dtype == np.float32 for one in seen)
    assert seen[1][1] is grad
    assert seen[0][2] is None
    np.testing.assert_allclose(weight, np.full((2, 3), 1 - 0.1 * (2 + 5)), rtol=1e-3)


SAVED = [None, 3, 2.5, True, np.float32(0.25), np.arange(3.0), np.array(7), np.ones((2, 2), ml_dtypes.bfloat16)]
SAVED += [{}, [], (), {"a": 1, "b:c": np.arange(2), "": 0.5}, [1, np.arange(3), 2.0], (np.zeros(0), False)]
SAVED += [[np.float64(i) for i in range(12)]]


def through_bytes(state, shape=(3,), dtype=np.float32):
    record = StateRecord("k", shape, np.dtype(dtype), 0, int(np.prod(shape)), state)
    return records_from_bytes(records_to_bytes([record]))[0].state


@pytest.mark.parametrize("value", SAVED, ids=repr)
def test_states_of_callables_that_can_be_saved(value) -> None:
    state = {"t": 1, **function.pack(value)}
    assert repr(function.unpack(state)) == repr(function.unpack(through_bytes(state))) == repr(value)


@pytest.mark.parametrize("value", [object, "text", {"a": [1]}, {1: 2}, [None], 1j, {"a": {"b": 1}}, {1, 2}], ids=repr)
def test_states_of_callables_that_cannot(value) -> None:
    optimizer = optimizers.create(lambda weight, grad, state: value)
    state = optimizer.update("k", np.ones(1), np.ones(1), {"t": 0})
    assert function.unpack(state) is value  # they serve while the program runs
    with pytest.raises(UnsupportedError, match=r"state of key 'k' cannot be saved or moved.* flat dict, list or tuple"):
        through_bytes(state)


def test_identity_tells_functions_apart() -> None:
    def make(rate):
        return lambda weight, grad, state: weight.__isub__(rate * grad)

    assert identity(make(0.1)) == identity(make(0.1))
    assert identity(make(0.1)) != identity(make(0.2))
    assert identity(lambda w: w + 1) != identity(lambda w: w + 2)
    assert identity(lambda w: w + 1) != identity(lambda w: w - 1)
    assert identity(lambda w, rate=1: w) != identity(lambda w, rate=2: w)
    assert identity(lambda w, *, rate=1: w) != identity(lambda w, *, rate=2: w)
    assert identity(functools.partial(momentum, state=1)) != identity(functools.partial(momentum, state=2))
    assert identity(momentum).startswith(f"{__name__}:momentum#")
    assert "list" in identity([].append)
    first, second = optimizers.create(make(0.1)), optimizers.create(make(0.2))
    assert json.dumps(first.config()) != json.dumps(second.config())
    assert "0x" not in json.dumps(optimizers.create(functools.partial(momentum, object())).config())


# --- torch


@pytest.fixture(scope="module")
def torch():
    return frameworks.need("torch")


def torch_run(torch, make, weight: np.ndarray, grads: list[np.ndarray], dtype=None) -> np.ndarray:
    """What torch itself does with these gradients."""
    parameter = torch.nn.Parameter(torch.tensor(weight, dtype=dtype))
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = torch.tensor(grad, dtype=dtype)
        optimizer.step()
    return parameter.detach().numpy()


def draw(shape=(3, 4), dtype=np.float64, n=5):
    rng = np.random.default_rng(3)
    return rng.standard_normal(shape).astype(dtype), [rng.standard_normal(shape).astype(dtype) for _ in range(n)]


def ours(optimizer, weight, grads):
    weight, state = weight.copy(), optimizer.init(weight)
    for grad in grads:
        before = grad.copy()
        # Through bytes each time: the state is all there is.
        state = optimizer.update("k", weight, grad, through_bytes(state, weight.shape, weight.dtype))
        assert np.array_equal(grad, before)
    return weight


TORCH = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.1, "betas": (0.5, 0.9)}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("Adadelta", {}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Rprop", {}),
    ("ASGD", {}),
]


@pytest.mark.parametrize(("name", "kwargs"), TORCH, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_torch_class_does_what_it_does_in_torch(torch, name, kwargs, dtype) -> None:
    weight, grads = draw(dtype=dtype)
    cls = getattr(torch.optim, name)
    wanted = torch_run(torch, lambda p: cls(p, **kwargs), weight, grads)
    assert np.array_equal(ours(optimizers.create((cls, kwargs)), weight, grads), wanted)
    assert np.array_equal(ours(optimizers.create(cls, **kwargs), weight, grads), wanted)
    assert np.array_equal(ours(optimizers.create((cls, {}), **kwargs), weight, grads), wanted)
    for shape in ((), (0,)):
        assert ours(optimizers.create(cls, **kwargs), np.ones(shape, dtype), [np.ones(shape, dtype)]).shape == shape


def test_torch_in_half_precision(torch) -> None:
    weight, grads = draw(dtype=np.float32)
    half = weight.astype(ml_dtypes.bfloat16)
    optimizer = optimizers.create((torch.optim.Adam, {"lr": 0.01}), multi_precision=True)
    wanted = torch_run(torch, lambda p: torch.optim.Adam(p, lr=0.01), half.astype(np.float32), grads)
    found = ours(optimizer, half, grads)
    assert found.dtype == half.dtype
    assert np.array_equal(found, wanted.astype(half.dtype))


def test_torch_follows_rates_factors_and_scaling(torch) -> None:
    weight, grads = draw()
    plain = torch_run(torch, lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1), weight, [g / 4 for g in grads])
    optimizer = optimizers.create(torch.optim.SGD, learning_rate=0.1, wd=0.2, rescale_grad=0.25)
    optimizer.set_lr_mult({"k": 0.5})
    optimizer.set_wd_mult({"k": 0.5})
    np.testing.assert_allclose(ours(optimizer, weight, grads), plain, rtol=1e-14)
    scheduled = optimizers.create(torch.optim.SGD, lr_scheduler=optimizers.FactorScheduler(1, 0.5, base_lr=0.4))
    value = np.zeros(1)
    state = scheduled.init(value)
    for _ in range(3):
        state = scheduled.update("k", value, np.ones(1), state)
    assert value[0] == pytest.approx(-0.7, rel=1e-15)
    scheduled = optimizers.create(torch.optim.AdamW)
    assert (scheduled.learning_rate, scheduled.wd) == (1e-3, 1e-2)
    scheduled.learning_rate = 0.5
    assert scheduled.attributes()["learning_rate"] == 0.5


def test_attributes_of_a_torch_class(torch) -> None:
    optimizer = optimizers.create(torch.optim.AdamW, lr=0.5, eps=1e-3)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.eps, optimizer.betas) == (0.5, 0.01, 1e-3, (0.9, 0.999))
    optimizer.lr, optimizer.weight_decay, optimizer.betas = 0.25, 0.125, (0.5, 0.75)
    assert (optimizer.learning_rate, optimizer.wd, optimizer.kwargs["betas"]) == (0.25, 0.125, (0.5, 0.75))
    other = optimizers.create(torch.optim.AdamW)
    other.set_attributes(json.loads(json.dumps(optimizer.attributes())))
    assert other.config() == optimizer.config()
    assert other.betas == (0.5, 0.75)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.config() == optimizer.config()
    with pytest.raises(AttributeError, match=r"no attribute 'beta'; it has lr, weight_decay, betas, .*mean 'betas'"):
        again.beta = (0.5, 0.5)
    with pytest.raises(AttributeError, match="no attribute 'momentum'"):
        again.momentum = 0.5
    with pytest.raises(AttributeError, match="momentum"):
        again.momentum  # noqa: B018 - it is read
    optimizer.foreach = object()
    with pytest.raises(UnsupportedError, match=r"foreach=<object.*only the whole optimizer"):
        other.set_attributes(optimizer.attributes())


def test_torch_mistakes(torch) -> None:
    with pytest.raises(TypeError, match=r"SGD has no speed; it has lr, momentum"):
        optimizers.create(torch.optim.SGD, speed=3)
    with pytest.raises(TypeError, match="lr and learning_rate mean the same"):
        optimizers.create(torch.optim.SGD, lr=1, learning_rate=1)
    with pytest.raises(TypeError, match=r"give the class and its arguments, \(torch.optim.SGD"):
        optimizers.create(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(UnsupportedError, match="LBFGS cannot serve"):
        optimizers.create(torch.optim.LBFGS)
    with pytest.raises(ValueError, match="learning_rate must be at least 0"):
        optimizers.create(torch.optim.SGD, lr=-1)
    optimizer = optimizers.create(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert json.dumps(optimizer.config()) != json.dumps(optimizers.create(torch.optim.SGD, lr=0.1).config())
