"""How optimizers are made and registered, and what their attributes, arrays and states are refused for."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpikv import optimizers
from mpikv.errors import ShapeMismatch, UnsupportedError
from mpikv.optimizers import FactorScheduler, Optimizer, Scheduler


def test_changes_take_effect_at_once() -> None:
    sgd = optimizers.create("sgd", learning_rate=1.0)
    weight, grad = np.zeros(2), np.ones(2)
    state = sgd.update("a", weight, grad, sgd.init(weight))
    sgd.learning_rate = 0.25
    state = sgd.update("a", weight, grad, state)
    assert weight.tolist() == [-1.25, -1.25]
    sgd.momentum = 0.5  # the state gains an array
    state = sgd.update("a", weight, grad, state)
    state = sgd.update("a", weight, grad, state)
    assert weight.tolist() == [-1.25 - 0.25 - 0.375] * 2
    sgd.momentum = 0.0  # and loses it, so that it does not come back stale
    state = sgd.update("a", weight, grad, state)
    assert set(state) == {"t"}
    half = np.zeros(2, np.float16)
    state = sgd.init(half)
    sgd.multi_precision = True
    state = sgd.update("a", half, np.full(2, 1e-4, np.float32), state)
    assert state["master"].tolist() == pytest.approx([-2.5e-5] * 2, rel=1e-6)
    sgd.multi_precision = False
    assert "master" not in sgd.update("a", half, np.ones(2, np.float32), state)


def test_attributes_that_do_not_exist() -> None:
    optimizer = optimizers.create("sgd", momentum=0.5)
    for name, text in (("lr", "learning_rate"), ("momentun", "momentum")):
        with pytest.raises(AttributeError, match=rf"sgd has no attribute '{name}'; it has .*Did you mean '{text}'\?"):
            setattr(optimizer, name, 0.1)

    class Own(Optimizer):
        bound = 0.5  # not declared, and so the same on all ranks for the user to see to

        def __init__(self, table: list[int], **kwargs: float) -> None:
            super().__init__(**kwargs)
            self.table = table

    own = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    assert own.momentum == 0.5
    made = Own([1], learning_rate=0.5)
    made.table, made.bound, made._cache = [2], 1.0, {}
    assert (made.table, made.bound) == ([2], 1.0)
    for one in (made, copy.deepcopy(made), own):
        with pytest.raises(AttributeError, match="no attribute 'tabel'"):
            one.tabel = [3]


def test_the_learning_rate_and_that_of_a_schedule() -> None:
    sgd, schedule = optimizers.create("sgd"), FactorScheduler(2, 0.5, base_lr=0.08)
    sgd.set_learning_rate(0.5)
    assert sgd.learning_rate == 0.5
    sgd.lr_scheduler = schedule
    with pytest.raises(UnsupportedError, match="lr_scheduler"):
        sgd.set_learning_rate(0.25)
    assert optimizers.create("sgd", learning_rate=1.0, lr_scheduler=schedule).lr_scheduler(3) == 0.5
    assert schedule(3) == 0.04


def test_a_function_as_schedule() -> None:
    sgd = optimizers.create("sgd", lr_scheduler=lambda t: 1.0 / t)
    weight = np.zeros(1)
    state = sgd.init(weight)
    for _ in range(3):
        state = sgd.update(0, weight, np.ones(1), state)
    assert weight[0] == pytest.approx(-11 / 6, rel=1e-15)
    other = np.zeros(1)
    sgd.update("another key, whose updates are counted by themselves", other, np.ones(1), sgd.init(other))
    assert other[0] == -1
    sent = json.loads(json.dumps(sgd.attributes()))
    sent["momentum"] = 0.5
    sgd.set_attributes(sent)  # its own function comes back as a description
    assert sgd.momentum == 0.5
    assert sgd.lr_scheduler(4) == 0.25
    for other in (optimizers.create("sgd"), optimizers.create("sgd", lr_scheduler=lambda t: 2.0 / t)):
        with pytest.raises(UnsupportedError, match="lr_scheduler is a function"):
            other.set_attributes(sent)
        assert other.momentum == 0.0


class Halving(Scheduler):
    """A schedule of a user's own."""

    def after_warmup(self, num_update: int) -> float:
        return self.base_lr * 0.5**num_update


def test_a_schedule_of_the_users_own_travels_to_an_optimizer_that_has_one() -> None:
    there, here = (optimizers.create("sgd", lr_scheduler=Halving(rate)) for rate in (1.0, 2.0))
    here.set_attributes(json.loads(json.dumps(there.attributes())))
    assert here.lr_scheduler == Halving(1.0)
    with pytest.raises(ValueError, match="unknown schedule 'Halving'"):
        optimizers.create("sgd").set_attributes(there.attributes())


@pytest.mark.parametrize(
    ("error", "text", "name", "parameters"),
    [
        (ValueError, "learning_rate must be at least 0, not -1", "sgd", {"learning_rate": -1}),
        (ValueError, "learning_rate must be finite", "sgd", {"learning_rate": float("inf")}),
        (TypeError, r"sgd: learning_rate is a number, not str \('0.1'\)", "sgd", {"learning_rate": "0.1"}),
        (TypeError, "learning_rate is a number, not bool", "sgd", {"learning_rate": True}),
        (TypeError, "rescale_grad is a number, not NoneType", "adam", {"rescale_grad": None}),
        (ValueError, "wd must be at least 0", "adam", {"wd": -0.1}),
        (TypeError, "clip_gradient is a number or None", "adam", {"clip_gradient": "1"}),
        (TypeError, "multi_precision is True or False, not int", "adam", {"multi_precision": 1}),
        (TypeError, "lr_scheduler is a schedule", "adam", {"lr_scheduler": 0.1}),
        (ValueError, "beta1 must be less than 1, not 1", "adam", {"beta1": 1.0}),
        (ValueError, "beta2 must be less than 1", "lamb", {"beta2": 1.5}),
        (ValueError, "gamma1 must be at least 0", "rmsprop", {"gamma1": -0.5}),
        (TypeError, "centered is True or False", "rmsprop", {"centered": "yes"}),
        (TypeError, "skip is a list or tuple of strings", "lars", {"skip": "bias"}),
        (TypeError, "skip is a list or tuple of strings, not list", "lars", {"skip": [1]}),
        (TypeError, "sgd has no parameter momentun; it has learning_rate.* momentum", "sgd", {"momentun": 0.9}),
        (TypeError, "adam has no parameter lr_mult, momentum", "adam", {"momentum": 0.9, "lr_mult": {}}),
        (ValueError, "unknown optimizer 'sdg'; known: adadelta, adagrad", "sdg", {}),
        (TypeError, r"sgd exists already.*learning_rate", optimizers.SGD(), {"learning_rate": 0.1}),
        *((TypeError, r"an optimizer is a name|torch.optim is wanted", wrong, {}) for wrong in (None, 3, int, (1, 2))),
        (ValueError, "must not exceed base_lr", "sgd", {"learning_rate": 0.1, "lr_scheduler": Scheduler(1, 2, 0.5)}),
    ],
)
def test_mistakes_are_named(error: type[Exception], text: str, name: Any, parameters: dict) -> None:
    with pytest.raises(error, match=text):
        optimizers.create(name, **parameters)


def test_wrong_attributes_change_nothing() -> None:
    sgd = optimizers.create("sgd")
    before = sgd.attributes()
    for values, error, text in (
        ({"momentum": 0.5, "learning_rate": -1}, ValueError, "learning_rate"),
        ({"momentum": 0.5, "speed": 1}, ValueError, "no attribute 'speed'; it has learning_rate"),
        ({"momentum": 0.5, "lr_mult": {1.5: 2}}, TypeError, "key"),
        ({"momentum": 0.5, "lr_mult": [[1, 2, 3]]}, TypeError, "lr_mult is a dict"),
        ({"momentum": 0.5, "lr_mult": [["a", -1]]}, ValueError, r"lr_mult\['a'\] must be at least 0"),
        ({"momentum": 0.5, "lr_scheduler": {"name": "None"}}, ValueError, "unknown schedule"),
    ):
        with pytest.raises(error, match=text):
            sgd.set_attributes(values)
        assert sgd.attributes() == before
    with pytest.raises(ValueError, match="momentum must be at least 0"):
        sgd.momentum = -0.5
    assert sgd.attributes() == before


def test_create_from_other_things() -> None:
    sgd = optimizers.SGD(learning_rate=0.5)
    assert optimizers.create(sgd) is sgd
    assert optimizers.create(optimizers.Adam, beta1=0.5).beta1 == 0.5
    with pytest.raises(TypeError, match=r"torch\.optim is wanted"):
        optimizers.create(("sgd", {}))


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_registry", dict(optimizers._registry))

    @optimizers.register
    class Shrink(Optimizer):
        factor: float = optimizers.number(default=0.5, low=0.0, doc="what the weight is multiplied by")

        def formula(self, step, w, g, arrays, tmp):
            w *= step.real(self.factor)

    shrink = optimizers.create("SHRINK", factor=0.25)
    weight = np.full(3, 8.0, np.float32)
    shrink.update(0, weight, weight.copy(), shrink.init(weight))
    assert weight.tolist() == [2.0] * 3
    assert optimizers.register(Shrink) is Shrink
    with pytest.raises(ValueError, match=r"name 'shrink' belongs to .*Shrink"):
        optimizers.register(type("Shrink", (Optimizer,), {}))
    for taken in ("sgd", "function", "torch"):
        with pytest.raises(ValueError, match=f"name '{taken}' belongs to"):
            optimizers.register(type("Mine", (Optimizer,), {"name": taken}))
    with pytest.raises(TypeError, match="derived from Optimizer"):
        optimizers.register(int)
    with pytest.raises(TypeError, match="Late: a field is declared like"):
        type("Late", (Optimizer,), {"fields": {}})
    with pytest.raises(UnsupportedError, match="Empty defines no formula"):
        type("Empty", (Optimizer,), {})().update(0, weight, weight.copy(), {"t": 0})


def test_arrays_that_cannot_be_updated() -> None:
    sgd = optimizers.create("sgd", momentum=0.9)
    weight = np.ones(3, np.float32)
    state = sgd.init(weight)
    for bad, error, text in (
        ((weight, np.ones(2, np.float32)), ShapeMismatch, r"key 'k' has shape \(3,\), its gradient \(2,\)"),
        ((weight, [1, 2, 3]), TypeError, "grad is a NumPy array, not list"),
        ((weight, np.ones(3, complex)), TypeError, "grad has dtype complex128; supported are float16"),
        ((np.ones(3, np.longdouble), weight), TypeError, "weight has dtype"),
        ((np.ones(4, np.float32), np.ones(4, np.float32)), ValueError, r"'momentum' of the state is float32\(3,\)"),
        ((np.ones(3), np.ones(3)), ValueError, "'momentum' of the state is float32"),
    ):
        with pytest.raises(error, match=text):
            sgd.update("k", *bad, state)
    weight.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        sgd.update("k", weight, np.ones(3, np.float32), state)
    with pytest.raises(TypeError, match="weight is a NumPy array"):
        sgd.init([1.0])
    assert state["t"] == 0
    assert (weight == 1).all()


def test_ftrl_refuses_a_rate_of_zero() -> None:
    ftrl = optimizers.create("ftrl", learning_rate=0)
    weight = np.ones(2)
    with pytest.raises(ValueError, match="update 1 of key 'k' has learning rate 0"):
        ftrl.update("k", weight, np.ones(2), ftrl.init(weight))
    assert weight.tolist() == [1.0, 1.0]


def test_overflow_and_nan_stay_visible_and_warn_nobody(recwarn: pytest.WarningsRecorder) -> None:
    adam = optimizers.create("adam")
    weight = np.ones(4, np.float32)
    adam.update(0, weight, np.array([np.nan, np.inf, 1e30, 1.0], np.float32), adam.init(weight))
    assert np.isnan(weight).tolist() == [True, True, False, False]
    assert len(recwarn) == 0


def test_check_state() -> None:
    adam = optimizers.create("adam", multi_precision=True)
    weight = np.ones((2, 3), ml_dtypes.bfloat16)
    good = adam.init(weight)
    adam.check_state(weight, good)
    for change, text in (
        ({"mean": np.zeros(5, np.float32)}, r"'mean' .* is float32\(6,\), not float32\(5,\)"),
        ({"mean": np.zeros(6)}, r"not float64\(6,\)"),
        ({"var": 0.0}, "'var' .* not 0.0"),
        ({"t": None}, r"'t' .* is a number \(int\), not None"),
        ({"t": 1.0}, r"'t' .* is a number \(int\), not 1\.0"),
        ({"momentum": np.zeros(6, np.float32)}, "holds master, mean, t, var, this one .*momentum"),
    ):
        with pytest.raises(ValueError, match=text):
            adam.check_state(weight, {**good, **change})
    with pytest.raises(ValueError, match="this one t"):
        adam.check_state(weight, {"t": 3})
