"""Every optimizer of this library: its defaults, and its formula written again in NumPy, from MXNet and the papers."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import math
import pickle
from collections import defaultdict
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_gpus import one_gpu

from mpikv import optimizers
from mpikv.arrays.as_numpy import sum_dtype
from mpikv.optimizers import FactorScheduler, Optimizer
from mpikv.optimizers.norms import norm
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.folded import BLOCK_ELEMS, sum_of_squares

# Each reference returns the new weight. `h` has the hyperparameters, the rate `lr` and the update's number `t`; `s` is
# the state, whose arrays begin as 0.


def clip(x: Any, bound: float | None) -> Any:
    return x if bound is None or bound <= 0 else np.clip(x, -bound, bound)


def clipped(g: Any, h: Any, decay: Any = 0.0) -> Any:
    return clip(h.rescale_grad * g + decay, h.clip_gradient)


def plain_sum(w, g, s, h):
    return w + h.rescale_grad * g


def sgd(w, g, s, h):
    s["m"] = h.momentum * s["m"] - h.lr * (clipped(g, h) + h.wd * w)
    return w + s["m"]


def nag(w, g, s, h):
    full = clipped(g, h) + h.wd * w  # with a state free of the rate, as documented: the kernel's while the rate stays
    s["m"] = h.momentum * s["m"] + full
    return w - h.lr * (full + h.momentum * s["m"])


def signum(w, g, s, h):
    if h.momentum == 0:
        return (1 - h.lr * (h.wd + h.wd_lh)) * w - h.lr * np.sign(h.rescale_grad * g)
    s["m"] = h.momentum * s["m"] + (1 - h.momentum) * (clipped(g, h) + h.wd * w)
    return (1 - h.lr * h.wd_lh) * w - h.lr * np.sign(s["m"])


def dcasgd(w, g, s, h):
    late = h.lamda * clipped(g, h) ** 2 * (w - s.setdefault("previous", w))
    s["m"] = h.momentum * s["m"] - h.lr * (clipped(g, h) + h.wd * w + late)
    s["previous"] = w
    return w + s["m"]


def means(g, s, h):
    s["m"] = h.beta1 * s["m"] + (1 - h.beta1) * g
    s["v"] = h.beta2 * s["v"] + (1 - h.beta2) * g**2
    return s["m"], s["v"], np.sqrt(1 - h.beta2**h.t) / (1 - h.beta1**h.t)


def adam(w, g, s, h):
    m, v, correction = means(clipped(g, h, h.wd * w), s, h)
    return w - h.lr * correction * m / (np.sqrt(v) + h.epsilon)


def adamw(w, g, s, h):
    m, v, correction = means(clipped(g, h), s, h)
    return w - h.lr * (correction if h.correct_bias else 1) * (m / (np.sqrt(v) + h.epsilon) + h.wd * w)


def adagrad(w, g, s, h):
    s["h"] += clipped(g, h) ** 2
    return w - h.lr * (clipped(g, h) / np.sqrt(s["h"] + h.eps) + h.wd * w)


def rmsprop(w, g, s, h):
    g = clipped(g, h, h.wd * w)
    s["n"] = (1 - h.gamma1) * g**2 + h.gamma1 * s["n"]
    if not h.centered:
        return clip(w - h.lr * g / np.sqrt(s["n"] + h.epsilon), h.clip_weights)
    s["g"] = (1 - h.gamma1) * g + h.gamma1 * s["g"]
    s["delta"] = h.gamma2 * s["delta"] - h.lr * g / np.sqrt(s["n"] - s["g"] ** 2 + h.epsilon)
    return clip(w + s["delta"], h.clip_weights)


def adadelta(w, g, s, h):
    g = clipped(g, h)
    s["g"] = h.rho * s["g"] + (1 - h.rho) * g**2
    delta = np.sqrt(s["d"] + h.epsilon) / np.sqrt(s["g"] + h.epsilon) * g
    s["d"] = h.rho * s["d"] + (1 - h.rho) * delta**2
    return w - delta - h.wd * w


def ftrl(w, g, s, h):
    g, before = clipped(g, h), s["n"]
    s["n"] = before + g**2
    s["z"] += g - (np.sqrt(s["n"]) - np.sqrt(before)) * w / h.lr
    z, below = s["z"], (h.beta + np.sqrt(s["n"])) / h.lr + h.wd
    return np.where(abs(z) > h.lamda1, (np.sign(z) * h.lamda1 - z) / below, 0.0)


def lars(w, g, s, h):
    momentum = h.momentum * (h.lr / s["last"] if h.momentum_correction and s["last"] else 1)
    s["last"] = h.lr
    w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(h.rescale_grad * g)
    ratio = h.eta * w_norm / (g_norm + h.wd * w_norm + h.eps) if w_norm > 0 and g_norm > 0 else 1
    return sgd(w, g, s, SimpleNamespace(**{**vars(h), "lr": h.lr * ratio, "momentum": momentum}))


def lamb(w, g, s, h):
    m, v, _ = means(clipped(g, h), s, h)
    if h.bias_correction:
        m, v = m / (1 - h.beta1**h.t), v / (1 - h.beta2**h.t)
    change = m / (np.sqrt(v) + h.epsilon) + h.wd * w
    r1, r2 = np.linalg.norm(w), np.linalg.norm(change)
    r1 = max(r1, h.lower_bound or 0.0)
    r1 = min(r1, h.upper_bound or np.inf)
    return w - h.lr * (r1 / r2 if r1 > 0 and r2 > 0 else 1.0) * change


REFERENCES = {
    one.__name__: one for one in (adadelta, adagrad, adam, adamw, dcasgd, ftrl, lamb, lars, nag, rmsprop, sgd, signum)
}
REFERENCES["test"] = plain_sum
OWN: dict[str, list[dict[str, Any]]] = {  # parameters to test it with
    "adadelta": [{"rho": 0.5, "epsilon": 1e-2}],
    "adagrad": [{"eps": 0.1}],
    "adam": [{"beta1": 0.5, "beta2": 0.8, "epsilon": 1e-3}],
    "adamw": [{"correct_bias": False}, {"beta1": 0.0, "epsilon": 0.01}],
    "dcasgd": [{"momentum": 0.9, "lamda": 0.3}, {"lamda": 2.0}],
    "ftrl": [{"lamda1": 0.8, "beta": 0.5}],
    "lamb": [
        {"bias_correction": False},
        {"lower_bound": 5.0},
        {"upper_bound": 0.5},
        {"beta1": 0.0, "lower_bound": 0.0},
    ],
    "lars": [{"momentum": 0.9}, {"momentum": 0.9, "eta": 0.5, "eps": 0.1}],
    "nag": [{"momentum": 0.9}, {"momentum": 0.5}],
    "rmsprop": [{"centered": True}, {"gamma1": 0.5, "clip_weights": 0.7}, {"centered": True, "gamma2": 0.2}],
    "sgd": [{"momentum": 0.9}, {"momentum": 0.9, "lazy_update": False}],
    "signum": [{"momentum": 0.0}, {"momentum": 0.5, "wd_lh": 0.1}, {"momentum": 0.0, "wd_lh": 0.1}],
    "test": [],
}
COMMON = (
    {},
    {"rescale_grad": 0.25, "learning_rate": 0.03},
    {"wd": 0.1, "learning_rate": 0.05},
    {"clip_gradient": 0.5, "rescale_grad": 1.5, "wd": 0.05},
    {"clip_gradient": -1.0, "rescale_grad": 1.0},
)
STEPS = 6
EACH = pytest.mark.parametrize("name", REFERENCES)


def data(shape: tuple[int, ...], dtype: Any = np.float64) -> tuple[np.ndarray, list[np.ndarray]]:
    """A weight and gradients, float32 values so that both sides begin with the same numbers; some are zero."""
    rng = np.random.default_rng(7)
    weight, *grads = rng.standard_normal((1 + STEPS, *shape)).astype(np.float32).astype(dtype)
    weight.flat[1] = 0.0
    for grad in grads:
        grad.flat[2] = 0.0
    return weight, grads


def expected(optimizer: Optimizer, weight: np.ndarray, grads: list[np.ndarray], rates: Any = None) -> np.ndarray:
    """The weight after the reference has seen all gradients."""
    w, state = weight.astype(np.float64), defaultdict(float)
    for t, grad in enumerate(grads, 1):
        h = SimpleNamespace(**optimizer.attributes(), t=t, lr=rates[t - 1] if rates else optimizer.learning_rate)
        w = REFERENCES[optimizer.name](w, grad.astype(np.float64), state, h)
    return w


def run(optimizer: Optimizer, weight: np.ndarray, grads: list[np.ndarray], key: Any = "w") -> dict[str, Any]:
    state = optimizer.init(weight)
    for t, grad in enumerate(grads, 1):
        before = grad.copy()
        state = optimizer.update(key, weight, grad, state)
        assert state["t"] == t
        assert np.array_equal(grad, before), "the gradient was changed"
    return state


@EACH
def test_names(name: str) -> None:
    """Every parameter of the constructor is an attribute and can travel; nothing else is."""
    cls = type(optimizers.create(name.upper()))
    assert (cls.__name__.lower(), cls.elementwise) == (name, name not in ("lamb", "lars"))
    common = {"learning_rate", "rescale_grad", "wd", "clip_gradient", "lr_scheduler", "multi_precision"}
    own = set(inspect.signature(cls).parameters) - {"common"}
    assert set(cls().attributes()) == own | common | {"lr_mult", "wd_mult"}
    assert optimizers.names() == tuple(sorted(REFERENCES))


# float64: some 20 roundings of 1e-16 per step, and up to 1e3 of cancellation in the centered variance. float32: values
# are below 4 in size, so that some 20 roundings of 6e-8 per step and 6 steps make 3e-5 at the very worst.
@EACH
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-11), (np.float32, 1e-5)])
def test_formula(name: str, dtype: Any, tolerance: float) -> None:
    for own, common in itertools.product(({}, *OWN[name]), COMMON):
        optimizer = optimizers.create(name, **common, **own)
        weight, grads = data((3, 5), dtype)
        wanted = expected(optimizer, weight, grads)
        state = run(optimizer, weight, grads)
        np.testing.assert_allclose(weight, wanted, rtol=tolerance, atol=tolerance, err_msg=repr(optimizer))
        assert all(value.dtype == dtype for value in state.values() if isinstance(value, np.ndarray))


@pytest.mark.parametrize("name", ["sgd", "adam", "lars", "lamb"])
def test_a_schedule_gives_the_rate_of_each_update(name: str) -> None:
    schedule = FactorScheduler(2, 0.5, base_lr=0.08, warmup_steps=2)
    optimizer = optimizers.create(name, lr_scheduler=schedule, **({"momentum": 0.9} if name in ("sgd", "lars") else {}))
    assert optimizer.learning_rate == 0.08
    weight, grads = data((4,))
    wanted = expected(optimizer, weight, grads, [schedule(t) for t in range(1, STEPS + 1)])
    run(optimizer, weight, grads)
    np.testing.assert_allclose(weight, wanted, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in REFERENCES if name not in ("test", "adadelta")])
def test_factors_per_key(name: str) -> None:
    weight, grads = data((4,))
    plain = optimizers.create(name, learning_rate=0.02, wd=0.02)
    factored = optimizers.create(name, learning_rate=0.04, wd=0.04)
    factored.set_lr_mult({"w": 0.5, 3: 7.0})
    factored.set_wd_mult({"w": 0.5})
    other, third = weight.copy(), weight.copy()
    run(plain, weight, grads)
    run(factored, other, grads)
    np.testing.assert_allclose(other, weight, rtol=1e-12)
    run(factored, third, grads, key="v")
    assert not np.allclose(third, weight, rtol=1e-6)


@EACH
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision(name: str, dtype: Any) -> None:
    """Without a master copy every update is the float32 one, rounded once; with one, the weight is that one rounded."""
    weight, grads = data((3, 5), dtype)
    grads = [grad.astype(np.float32) for grad in grads]
    for master in (False, True):
        optimizer = optimizers.create(name, multi_precision=master, wd=0.05, rescale_grad=0.5)
        value, state, wide = weight.copy(), optimizer.init(weight), weight.astype(np.float32)
        wide_state = optimizer.init(wide)
        if "previous" in state:
            assert np.array_equal(state["previous"], wide_state["previous"])
        for grad in grads:
            state = optimizer.update("w", value, grad, state)
            wide_state = optimizer.update("w", wide, grad, wide_state)
            if master:
                assert np.array_equal(state["master"].reshape(3, 5), wide)
            else:
                wide = wide.astype(dtype).astype(np.float32)
            assert np.array_equal(value, wide.astype(dtype))
        assert ("master" in state, "master" in wide_state) == (master, False)


@pytest.mark.parametrize("name", [name for name in REFERENCES if optimizers.create(name).sums])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sum_that_is_added_block_by_block(name: str, dtype: Any, count: int) -> None:
    """The bits of adding first and updating then, in every block, also the last and shorter one."""
    rate = {} if name in ("test", "adadelta") else {"learning_rate": 3.0}
    optimizer = optimizers.create(name, multi_precision=dtype is ml_dtypes.bfloat16, **rate)
    rng = np.random.default_rng(3)
    first = (10 * rng.standard_normal(100_003)).astype(dtype)
    one, other = first.copy(), first.copy()
    state, other_state = optimizer.init(one), optimizer.init(other)
    for _ in range(3):
        terms = [(10 * rng.standard_normal(first.size)).astype(sum_dtype(first.dtype)) for _ in range(count)]
        before = [term.copy() for term in terms]
        state = optimizer.update_sum("w", one, terms, state)
        other_state = optimizer.update("w", other, functools.reduce(np.add, terms), other_state)
        assert all(map(np.array_equal, terms, before)), "a term was changed"
    assert one.tobytes() == other.tobytes()
    assert dtype == "int32" or not np.array_equal(one, first)  # some steps round to none
    assert set(state) == set(other_state)
    assert all(np.array_equal(value, other_state[part]) for part, value in state.items())


def test_threads_share_an_optimizer() -> None:
    """Each update has its temporaries for itself; a copy begins without any."""
    optimizer = optimizers.create("adam")
    grads = np.random.default_rng(0).standard_normal((16, 50_000)).astype(np.float32)
    alone, together = np.ones_like(grads), np.ones_like(grads)

    def update(weight: np.ndarray, grad: np.ndarray) -> None:
        run(optimizer, weight, [grad] * 3)

    list(map(update, alone, grads))
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(update, together, grads))
    assert np.array_equal(alone, together)
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert len(pickle.dumps(copied)) < 1000
        run(copied, together[0], grads[:1])


@EACH
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_integers_are_updated_in_floats_rounded_and_stay_in_their_range(name: str, dtype: str) -> None:
    limits, work = np.iinfo(dtype), np.float32 if dtype in ("int8", "uint8") else np.float64
    weight, optimizer = np.array([10, 20, 100, 0, 5], dtype), optimizers.create(name, learning_rate=0.5)
    grad, wide = np.array([1, 3, 0, 2, 7], dtype), weight.astype(work)
    state, wide_state = optimizer.init(weight), optimizer.init(wide)
    for _ in range(2):
        state = optimizer.update(0, weight, grad, state)
        wide_state = optimizer.update(0, wide, grad.astype(work), wide_state)
        wide = np.clip(np.rint(wide), limits.min, limits.max)
        assert np.array_equal(weight, wide.astype(dtype))
    weight, optimizer = np.array([limits.max, limits.min, 0], dtype), optimizers.create("test", rescale_grad=1e30)
    optimizer.update(0, weight, np.array([1, 0, 1], dtype), optimizer.init(weight))
    top = limits.max if dtype != "int64" else 2**63 - 1024  # the largest float64 below 2^63
    assert weight.tolist() == [top, limits.min, top]


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("zero_grad", [False, True])
def test_norms_that_are_zero_or_small(name: str, scale: float, zero_grad: bool) -> None:
    bounds = [{}, {"lower_bound": 0.5}, {"upper_bound": 0.001}, {"lower_bound": 0.0}] if name == "lamb" else [{}]
    for more in bounds:
        optimizer = optimizers.create(name, rescale_grad=-0.5, wd=0.1, **more)
        weight, grads = data((4,))
        weight *= scale
        grads = [grad * (not zero_grad) for grad in grads]
        wanted = expected(optimizer, weight, grads)
        run(optimizer, weight, grads)
        np.testing.assert_allclose(weight, wanted, rtol=1e-12, atol=1e-15)


def test_lars_leaves_out_keys_by_their_endings() -> None:
    weight, grads = data((4,))
    left_out, wanted = optimizers.create("lars", learning_rate=0.1), weight.copy()
    run(optimizers.create("sgd", learning_rate=0.1), wanted, grads)
    for key, same in (("fc_bias", True), ("bn_gamma", True), ("bn_beta", True), ("fc_weight", False), (0, False)):
        value = weight.copy()
        run(left_out, value, grads, key)
        assert np.allclose(value, wanted) == same, key
    left_out.skip = ()
    run(left_out, weight, grads, "fc_bias")
    assert not np.allclose(weight, wanted)


@EACH
def test_shapes(name: str) -> None:
    """0-dimensional, empty, and non-contiguous weights and gradients."""
    optimizer = optimizers.create(name)
    for shape in ((), (0,), (3, 0), (1,), (2, 3)):
        weight, grad = np.ones(shape, np.float32), np.full(shape, 0.5, np.float32)
        state = run(optimizer, weight, [grad])
        assert (weight != 1.0).all()
        assert all(value.shape == (weight.size,) for value in state.values() if isinstance(value, np.ndarray))
    plain, grad = np.random.default_rng(0).standard_normal((2, 4, 6))
    around = np.zeros((8, 12))
    for view in (around[::2, ::2], np.zeros((6, 4)).T):
        view[...] = apart = plain.copy()
        run(optimizer, view, [np.asfortranarray(grad)])
        run(optimizer, apart, [grad])
        assert np.array_equal(view, apart)
        assert not np.array_equal(apart, plain)
    assert not around[1::2].any()


@EACH
def test_on_a_gpu(name: str) -> None:
    """What the host makes; nothing is waited for, also of keys that have no norm; launches hang on no length."""
    cupy, gpu = one_gpu()
    space = DeviceSpace(gpu)
    common = ({}, {"wd": 0.1, "clip_gradient": 0.3, "rescale_grad": -0.5})
    keys = ("w", "bias", "zeros") if name in ("lars", "lamb") else ("w",)
    for own, more, key in itertools.product(({}, *OWN[name]), common, keys):
        counts = []
        for n in (273, 33_001):
            optimizer = optimizers.create(name, **own, **more)
            weight = np.linspace(-1, 1, n, dtype=np.float32) * np.float32(key != "zeros")
            grad = np.linspace(2, -3, n, dtype=np.float32)
            there, on_gpu = space.from_host(weight), space.from_host(grad)
            before = [cupy.machine.counts[one] for one in ("syncs", "gets", "sets")]
            launches = cupy.machine.counts["launches"]
            with space.in_stream():
                state = optimizer.init(there)
                for _ in range(2):
                    state = optimizer.update(key, there, on_gpu, state)
            counts.append(cupy.machine.counts["launches"] - launches)
            assert [cupy.machine.counts[one] for one in ("syncs", "gets", "sets")] == before
            for part, value in run(optimizer, weight, [grad] * 2, key).items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_allclose(space.to_host(state[part]), value, rtol=1e-5, atol=1e-30)
            np.testing.assert_allclose(space.to_host(there), weight, rtol=1e-5, atol=1e-7)
        assert counts[0] == counts[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 257, 4097, 16 * BLOCK_ELEMS + 16 * 5 + 3])
def test_a_sum_of_squares_is_near_the_exact_one(n: int, dtype: Any) -> None:
    """On both kinds of arrays; on a GPU it is not waited for."""
    cupy, rng = one_gpu()[0], np.random.default_rng(n)
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(dtype)
    on_gpu, exact = cupy.asarray(values), math.fsum(values.astype(np.float64) ** 2)
    found = sum_of_squares(on_gpu)
    assert (found.shape, found.dtype, cupy.machine.counts["gets"]) == ((), np.float64, 0)
    for one in (sum_of_squares(values), found.get()):
        assert math.isclose(one, exact, rel_tol=1e-14)
    assert on_gpu.get().tobytes() == values.tobytes()


def test_norms_of_nothing_and_of_what_is_no_number() -> None:
    for make in (np.asarray, one_gpu()[0].asarray):
        assert float(sum_of_squares(make(np.empty(0, np.float32)))) == 0.0
        assert math.isnan(sum_of_squares(make(np.array([1.0, np.nan]))))
        assert float(sum_of_squares(make(np.array([1.0, -np.inf])))) == math.inf
        assert float(norm(make(np.array([3.0, 4.0], np.float32)))) == 5.0


@EACH
def test_attributes_travel(name: str) -> None:
    there = optimizers.create(name)
    for field, default in there.attributes().items():
        if isinstance(default, float):
            setattr(there, field, 0.125)
    there.learning_rate, there.wd, there.rescale_grad, there.clip_gradient = np.float32(0.5), 1, -2.5, 3
    there.multi_precision = True
    there.set_lr_mult({"b": 0.5, "a": 2})
    there.set_wd_mult({3: 0, -1: 1.5, np.int64(7): 1})
    there.lr_scheduler = FactorScheduler(5, 0.5, base_lr=0.25, warmup_steps=3)
    sent = json.loads(json.dumps(there.attributes()))
    assert sent["lr_mult"] == [["a", 2.0], ["b", 0.5]]
    assert sent["wd_mult"] == [[-1, 1.5], [3, 0.0], [7, 1.0]]
    here, config = optimizers.create(name), json.dumps(there.config(), sort_keys=True)
    assert json.dumps(here.config(), sort_keys=True) != config
    here.set_attributes(sent)
    for other in (here, copy.deepcopy(there), pickle.loads(pickle.dumps(there))):
        assert type(other) is type(there)
        assert json.dumps(other.config(), sort_keys=True) == config
        assert other.lr_mult == {"a": 2.0, "b": 0.5}
        assert other.wd_mult == {3: 0.0, -1: 1.5, 7: 1.0}
        assert other.lr_scheduler == there.lr_scheduler
