"""Every formula against itself written again: float64, element after element, from MXNet's text and the papers."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from concurrent import futures
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpikv import optimizers
from mpikv.arrays.as_numpy import sum_dtype
from mpikv.optimizers import FactorScheduler

# Each reference updates the lists in place. `h` holds the hyperparameters, `s` is the state, a dict of lists.


def clip(x: float, bound: float | None) -> float:
    return x if bound is None or bound <= 0 else max(-bound, min(bound, x))


def sign(x: float) -> float:
    return (x > 0) - (x < 0)


def zeros(s: dict[str, Any], n: int, *names: str) -> None:
    for name in names:
        s.setdefault(name, [0.0] * n)


def plain_sum(w, g, s, t, h):
    for i in range(len(w)):
        w[i] += h["rescale_grad"] * g[i]


def sgd(w, g, s, t, h):
    mu = h["momentum"]
    zeros(s, len(w), "m")
    for i in range(len(w)):
        rescaled = h["lr"] * (clip(h["rescale_grad"] * g[i], h["clip_gradient"]) + h["wd"] * w[i])
        s["m"][i] = mu * s["m"][i] + rescaled
        w[i] -= s["m"][i]


def nag(w, g, s, t, h):
    zeros(s, len(w), "m")
    for i in range(len(w)):
        full = clip(h["rescale_grad"] * g[i], h["clip_gradient"]) + h["wd"] * w[i]
        # The documented form, with the state free of the rate; equal to the kernel's while the rate stays the same.
        s["m"][i] = h["momentum"] * s["m"][i] + full
        w[i] -= h["lr"] * (full + h["momentum"] * s["m"][i])


def signum(w, g, s, t, h):
    zeros(s, len(w), "m")
    mu = h["momentum"]
    for i in range(len(w)):
        if mu == 0:
            w[i] = (1 - h["lr"] * (h["wd"] + h["wd_lh"])) * w[i] - h["lr"] * sign(h["rescale_grad"] * g[i])
            continue
        full = clip(h["rescale_grad"] * g[i], h["clip_gradient"]) + h["wd"] * w[i]
        s["m"][i] = mu * s["m"][i] + (1 - mu) * full
        w[i] = (1 - h["lr"] * h["wd_lh"]) * w[i] - h["lr"] * sign(s["m"][i])


def dcasgd(w, g, s, t, h):
    zeros(s, len(w), "m")
    s.setdefault("previous", list(w))
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        late = h["lamda"] * grad * grad * (w[i] - s["previous"][i])
        s["m"][i] = h["momentum"] * s["m"][i] - h["lr"] * (grad + h["wd"] * w[i] + late)
        s["previous"][i] = w[i]
        w[i] += s["m"][i]


def adam(w, g, s, t, h):
    zeros(s, len(w), "m", "v")
    rate = h["lr"] * math.sqrt(1 - h["beta2"] ** t) / (1 - h["beta1"] ** t)
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i] + h["wd"] * w[i], h["clip_gradient"])
        s["m"][i] = h["beta1"] * s["m"][i] + (1 - h["beta1"]) * grad
        s["v"][i] = h["beta2"] * s["v"][i] + (1 - h["beta2"]) * grad**2
        w[i] -= rate * s["m"][i] / (math.sqrt(s["v"][i]) + h["epsilon"])


def adamw(w, g, s, t, h):
    zeros(s, len(w), "m", "v")
    rate = h["lr"]
    if h["correct_bias"]:
        rate *= math.sqrt(1 - h["beta2"] ** t) / (1 - h["beta1"] ** t)
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["m"][i] = h["beta1"] * s["m"][i] + (1 - h["beta1"]) * grad
        s["v"][i] = h["beta2"] * s["v"][i] + (1 - h["beta2"]) * grad**2
        w[i] -= rate * (s["m"][i] / (math.sqrt(s["v"][i]) + h["epsilon"]) + h["wd"] * w[i])


def adagrad(w, g, s, t, h):
    zeros(s, len(w), "h")
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["h"][i] += grad**2
        w[i] += -h["lr"] * (grad / math.sqrt(s["h"][i] + h["eps"]) + h["wd"] * w[i])


def rmsprop(w, g, s, t, h):
    zeros(s, len(w), "n", "g", "delta")
    g1, g2 = h["gamma1"], h["gamma2"]
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i] + h["wd"] * w[i], h["clip_gradient"])
        s["n"][i] = (1 - g1) * grad**2 + g1 * s["n"][i]
        if h["centered"]:
            s["g"][i] = (1 - g1) * grad + g1 * s["g"][i]
            below = math.sqrt(s["n"][i] - s["g"][i] ** 2 + h["epsilon"])
            s["delta"][i] = g2 * s["delta"][i] - h["lr"] * grad / below
            w[i] += s["delta"][i]
        else:
            w[i] -= h["lr"] * grad / math.sqrt(s["n"][i] + h["epsilon"])
        w[i] = clip(w[i], h["clip_weights"])


def adadelta(w, g, s, t, h):
    zeros(s, len(w), "g", "d")
    rho, eps = h["rho"], h["epsilon"]
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["g"][i] = rho * s["g"][i] + (1 - rho) * grad**2
        delta = math.sqrt(s["d"][i] + eps) / math.sqrt(s["g"][i] + eps) * grad
        s["d"][i] = rho * s["d"][i] + (1 - rho) * delta**2
        w[i] -= delta + h["wd"] * w[i]


def ftrl(w, g, s, t, h):
    zeros(s, len(w), "z", "n")
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["z"][i] += grad - (math.sqrt(s["n"][i] + grad**2) - math.sqrt(s["n"][i])) * w[i] / h["lr"]
        s["n"][i] += grad**2
        z = s["z"][i]
        below = (h["beta"] + math.sqrt(s["n"][i])) / h["lr"] + h["wd"]
        w[i] = (sign(z) * h["lamda1"] - z) / below if abs(z) > h["lamda1"] else 0.0


def norm(values) -> float:
    return math.sqrt(math.fsum(value**2 for value in values))


def lars(w, g, s, t, h):
    mu = h["momentum"]
    if h["momentum_correction"] and s.get("last"):
        mu *= h["lr"] / s["last"]
    s["last"] = h["lr"]
    w_norm, g_norm = norm(w), norm(h["rescale_grad"] * x for x in g)
    rate = h["lr"]
    if w_norm > 0 and g_norm > 0:
        rate *= h["eta"] * w_norm / (g_norm + h["wd"] * w_norm + h["eps"])
    sgd(w, g, s, t, {**h, "lr": rate, "momentum": mu})


def lamb(w, g, s, t, h):
    zeros(s, len(w), "m", "v")
    step = []
    for i in range(len(w)):
        grad = clip(h["rescale_grad"] * g[i], h["clip_gradient"])
        s["m"][i] = h["beta1"] * s["m"][i] + (1 - h["beta1"]) * grad
        s["v"][i] = h["beta2"] * s["v"][i] + (1 - h["beta2"]) * grad**2
        m, v = s["m"][i], s["v"][i]
        if h["bias_correction"]:
            m, v = m / (1 - h["beta1"] ** t), v / (1 - h["beta2"] ** t)
        step.append(m / (math.sqrt(v) + h["epsilon"]) + h["wd"] * w[i])
    r1, r2 = norm(w), norm(step)
    if h["lower_bound"]:
        r1 = max(r1, h["lower_bound"])
    if h["upper_bound"]:
        r1 = min(r1, h["upper_bound"])
    ratio = r1 / r2 if r1 > 0 and r2 > 0 else 1.0
    for i in range(len(w)):
        w[i] -= h["lr"] * ratio * step[i]


REFERENCES = {
    "test": plain_sum,
    "sgd": sgd,
    "nag": nag,
    "signum": signum,
    "dcasgd": dcasgd,
    "adam": adam,
    "adamw": adamw,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "adadelta": adadelta,
    "ftrl": ftrl,
    "lars": lars,
    "lamb": lamb,
}

COMMON = [
    {},
    {"rescale_grad": 0.25, "learning_rate": 0.03},
    {"wd": 0.1, "learning_rate": 0.05},
    {"clip_gradient": 0.5, "rescale_grad": 1.5, "wd": 0.05},
    {"clip_gradient": -1.0, "rescale_grad": 1.0},
]
OWN = {
    "sgd": [{"momentum": 0.9}, {"momentum": 0.9, "lazy_update": False}],
    "nag": [{"momentum": 0.9}, {"momentum": 0.5}],
    "signum": [{"momentum": 0.0}, {"momentum": 0.5, "wd_lh": 0.1}, {"momentum": 0.0, "wd_lh": 0.1}],
    "dcasgd": [{"momentum": 0.9, "lamda": 0.3}, {"lamda": 2.0}],
    "adam": [{"beta1": 0.5, "beta2": 0.8, "epsilon": 1e-3}],
    "adamw": [{"correct_bias": False}, {"beta1": 0.0, "epsilon": 0.01}],
    "adagrad": [{"eps": 0.1}],
    "rmsprop": [{"centered": True}, {"gamma1": 0.5, "clip_weights": 0.7}, {"centered": True, "gamma2": 0.2}],
    "adadelta": [{"rho": 0.5, "epsilon": 1e-2}],
    "ftrl": [{"lamda1": 0.8, "beta": 0.5}],
    "lars": [{"momentum": 0.9}, {"momentum": 0.9, "eta": 0.5, "eps": 0.1}],
    "lamb": [{"bias_correction": False}, {"lower_bound": 5.0}, {"upper_bound": 0.5}, {"beta1": 0.0}],
}
CASES = [(name, {**common, **own}) for name in REFERENCES for own in [{}, *OWN.get(name, [])] for common in COMMON]

STEPS = 6


def data(shape: tuple[int, ...], dtype: Any = np.float64) -> tuple[np.ndarray, list[np.ndarray]]:
    """A weight and gradients, float32 values so that both sides begin with the same numbers; some are zero."""
    rng = np.random.default_rng(7)
    weight = rng.standard_normal(shape).astype(np.float32)
    grads = [rng.standard_normal(shape).astype(np.float32) for _ in range(STEPS)]
    if weight.size > 3:
        weight.flat[1] = 0.0
        for grad in grads:
            grad.flat[2] = 0.0
    return weight.astype(dtype), [grad.astype(dtype) for grad in grads]


def expected(
    name: str, optimizer: optimizers.Optimizer, weight: np.ndarray, grads: list[np.ndarray], rates=None
) -> list:
    """The weight after the reference has seen all gradients."""
    w: list[float] = weight.astype(np.float64).reshape(-1).tolist()
    state: dict[str, Any] = {}
    for t, grad in enumerate(grads, 1):
        h = {**optimizer.attributes(), "lr": rates[t - 1] if rates else optimizer.learning_rate}
        REFERENCES[name](w, grad.astype(np.float64).reshape(-1).tolist(), state, t, h)
    return w


def run(optimizer: optimizers.Optimizer, weight: np.ndarray, grads: list[np.ndarray], key: Any = "w") -> dict[str, Any]:
    state = optimizer.init(weight)
    for t, grad in enumerate(grads, 1):
        before = grad.copy()
        state = optimizer.update(key, weight, grad, state)
        assert state["t"] == t
        assert np.array_equal(grad, before), "the gradient was changed"
    return state


# float64: some 20 roundings of 1e-16 per step, and up to 1e3 of cancellation in the centered variance. float32: values
# are below 4 in size, so that some 20 roundings of 6e-8 per step and 6 steps make 3e-5 at the very worst.
@pytest.mark.parametrize(("name", "parameters"), CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-11), (np.float32, 1e-5)])
def test_formula(name: str, parameters: dict[str, Any], dtype: Any, tolerance: float) -> None:
    optimizer = optimizers.create(name, **parameters)
    weight, grads = data((3, 5), dtype)
    wanted = expected(name, optimizer, weight, grads)
    state = run(optimizer, weight, grads)
    np.testing.assert_allclose(weight.reshape(-1), wanted, rtol=tolerance, atol=tolerance)
    assert all(value.dtype == dtype for value in state.values() if isinstance(value, np.ndarray))


def test_one_step_by_hand() -> None:
    """Figures worked out on paper, so that the reference itself is checked."""
    weight, grad = np.array([1.0, -2.0]), np.array([0.5, 4.0])
    sgd_ = optimizers.create("sgd", learning_rate=0.1, wd=0.1, clip_gradient=1.0, rescale_grad=2.0)
    run(sgd_, weight, [grad])
    # 1 - 0.1 (1 + 0.1) and -2 - 0.1 (1 - 0.2)
    np.testing.assert_allclose(weight, [0.89, -2.08], rtol=1e-15)
    weight = np.array([1.0, 1.0])
    # The first step of Adam is lr in size, whatever the gradient.
    run(optimizers.create("adam", learning_rate=0.01, epsilon=0.0), weight, [np.array([3.0, -1e-3])])
    np.testing.assert_allclose(weight, [0.99, 1.01], rtol=1e-12)
    weight = np.array([3.0, 4.0])
    # |w| = 5, |g| = 10: the rate is 0.1 * 5 / 10.
    run(optimizers.create("lars", learning_rate=1.0, eta=0.1), weight, [np.array([6.0, 8.0])])
    np.testing.assert_allclose(weight, [2.7, 3.6], rtol=1e-15)


@pytest.mark.parametrize("name", ["sgd", "adam", "lars", "lamb"])
def test_a_schedule_gives_the_rate_of_each_update(name: str) -> None:
    schedule = FactorScheduler(2, 0.5, base_lr=0.08, warmup_steps=2)
    optimizer = optimizers.create(name, lr_scheduler=schedule, **({"momentum": 0.9} if name in ("sgd", "lars") else {}))
    assert optimizer.learning_rate == 0.08
    weight, grads = data((4,))
    wanted = expected(name, optimizer, weight, grads, [schedule(t) for t in range(1, STEPS + 1)])
    run(optimizer, weight, grads)
    np.testing.assert_allclose(weight, wanted, rtol=1e-12)


def test_an_explicit_learning_rate_replaces_the_schedules() -> None:
    schedule = FactorScheduler(2, 0.5, base_lr=0.08)
    assert optimizers.create("sgd", learning_rate=1.0, lr_scheduler=schedule).lr_scheduler(3) == 0.5
    assert schedule(3) == 0.04


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


def test_lars_leaves_out_keys_by_their_endings() -> None:
    weight, grads = data((4,))
    lars_ = optimizers.create("lars", learning_rate=0.1)
    sgd_ = optimizers.create("sgd", learning_rate=0.1)
    wanted = weight.copy()
    run(sgd_, wanted, grads)
    for key, same in (("fc_bias", True), ("bn_gamma", True), ("bn_beta", True), ("fc_weight", False), (0, False)):
        value = weight.copy()
        run(lars_, value, grads, key)
        assert np.allclose(value, wanted) == same, key
    lars_.skip = ()
    run(lars_, weight, grads, "fc_bias")
    assert not np.allclose(weight, wanted)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision(name: str, dtype: Any) -> None:
    weight, grads = data((3, 5), dtype)
    grads = [grad.astype(np.float32) for grad in grads]
    parameters = {"wd": 0.05, "rescale_grad": 0.5}
    # Without a master copy: every update is the float32 one, rounded once.
    optimizer = optimizers.create(name, **parameters)
    value, state = weight.copy(), optimizer.init(weight)
    check = weight.astype(np.float32)
    check_state = optimizer.init(check)
    if "previous" in state:
        assert np.array_equal(state["previous"], check_state["previous"])
    for grad in grads:
        state = optimizer.update("w", value, grad, state)
        check_state = optimizer.update("w", check, grad, check_state)
        check = check.astype(dtype).astype(np.float32)
        assert np.array_equal(value.astype(np.float32), check)
    assert "master" not in state
    # With one: the weight is the rounded float32 weight at all times.
    optimizer = optimizers.create(name, multi_precision=True, **parameters)
    value, state = weight.copy(), optimizer.init(weight)
    wide = weight.astype(np.float32)
    wide_state = optimizer.init(wide)
    for grad in grads:
        state = optimizer.update("w", value, grad, state)
        wide_state = optimizer.update("w", wide, grad, wide_state)
        assert np.array_equal(state["master"].reshape(3, 5), wide)
        assert np.array_equal(value, wide.astype(dtype))
    assert state["master"].dtype == np.float32
    assert "master" not in wide_state


@pytest.mark.grid
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
    for part, value in state.items():
        assert np.array_equal(value, other_state[part]), part


class Nested(optimizers.SGD):
    """Makes an update of another weight while it makes its own."""

    def formula(self, step: Any, w: Any, g: Any, arrays: Any, tmp: Any) -> None:
        tmp[0][:] = g
        inner = optimizers.SGD(learning_rate=0.5)
        other = np.zeros(w.size, w.dtype)
        inner.update_sum("other", other, (np.full(w.size, 7, w.dtype), np.full(w.size, 9, w.dtype)), inner.init(other))
        assert (other == -8).all()
        w -= tmp[0]


def test_an_update_within_an_update() -> None:
    optimizer = Nested()
    weight = np.zeros(100_003, np.float32)
    for _ in range(2):
        optimizer.update_sum("w", weight, (np.ones_like(weight), np.ones_like(weight)), optimizer.init(weight))
    assert (weight == -4).all()


def test_threads_share_an_optimizer() -> None:
    """Each update has its temporaries for itself; a copy begins without any."""
    optimizer = optimizers.create("adam")
    grads = np.random.default_rng(0).standard_normal((16, 50_000)).astype(np.float32)
    alone = [np.ones_like(grad) for grad in grads]
    together = [np.ones_like(grad) for grad in grads]

    def update(weight: np.ndarray, grad: np.ndarray) -> None:
        state = optimizer.init(weight)
        for _ in range(3):
            optimizer.update("w", weight, grad, state)

    for weight, grad in zip(alone, grads, strict=True):
        update(weight, grad)
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(update, together, grads))
    assert np.array_equal(alone, together)
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert len(pickle.dumps(copied)) < 1000
        update(together[0], grads[0])


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_integers_are_updated_in_floats_and_rounded(name: str, dtype: str) -> None:
    optimizer = optimizers.create(name, learning_rate=0.5)
    weight = np.array([10, 20, 100, 0, 5], dtype)
    grads = [np.array([1, 3, 0, 2, 7], dtype)] * 2
    work = np.float32 if dtype in ("int8", "uint8") else np.float64
    wide = weight.astype(work)
    state, wide_state = optimizer.init(weight), optimizer.init(wide)
    limits = np.iinfo(dtype)
    for grad in grads:
        state = optimizer.update(0, weight, grad, state)
        wide_state = optimizer.update(0, wide, grad.astype(work), wide_state)
        wide = np.clip(np.rint(wide), limits.min, limits.max)
        assert np.array_equal(weight, wide.astype(dtype))


def test_integers_stay_in_their_range() -> None:
    for dtype in ("int8", "uint8", "int32", "int64"):
        limits = np.iinfo(dtype)
        weight = np.array([limits.max, limits.min, 0], dtype)
        optimizer = optimizers.create("test", rescale_grad=1e30)
        optimizer.update(0, weight, np.array([1, 0, 1], dtype), optimizer.init(weight))
        top = limits.max if dtype != "int64" else 2**63 - 1024  # the largest float64 below 2^63
        assert weight.tolist() == [top, limits.min, top]


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("bounds", [{}, {"lower_bound": 0.5}, {"upper_bound": 0.001}, {"lower_bound": 0.0}])
def test_norms_that_are_zero_or_small(name: str, scale: float, zero_grad: bool, bounds: dict[str, float]) -> None:
    optimizer = optimizers.create(name, rescale_grad=-0.5, wd=0.1, **(bounds if name == "lamb" else {}))
    weight, grads = data((4,))
    weight *= scale
    grads = [grad * (not zero_grad) for grad in grads]
    wanted = expected(name, optimizer, weight, grads)
    run(optimizer, weight, grads)
    np.testing.assert_allclose(weight, wanted, rtol=1e-12, atol=1e-15)
