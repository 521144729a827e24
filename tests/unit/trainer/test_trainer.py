"""Parameter and Trainer, in one process: on a local store with several devices, and without a store.

The optimizer `test` (weight += rescale_grad * grad) and whole numbers make the expected weights exact.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frameworks
import numpy as np
import pytest

from mpikv import kv, optimizers
from mpikv.create import spec
from mpikv.create.assembly import local_store
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.trainer.parameter import Parameter
from mpikv.trainer.trainer import Trainer


def renamed(kind: str) -> KVStore:
    """A store that says it is of another type: for the decisions that hang on the type alone."""
    return local_store(kind, spec.parse("local"))


def parameters(devices: int = 1) -> dict[str, Parameter]:
    names = [f"cpu:{i}" for i in range(devices)]
    return {
        "weight": Parameter(np.array([[1.0, 2.0], [3.0, 4.0]]), devices=names),
        "bias": Parameter(np.array([5.0, 6.0, 7.0], dtype=np.float32), devices=names),
    }


def backward(params: dict[str, Parameter], step: int) -> None:
    """Gradients that differ by device, parameter and step."""
    for p, parameter in enumerate(params.values()):
        for d, grad in enumerate(parameter.list_grad()):
            grad[...] = 4 * (10 * step + 3 * p + d) + 8


def total(step: int, p: int, devices: int) -> int:
    return sum(4 * (10 * step + 3 * p + d) + 8 for d in range(devices))


# ---- Parameter


def test_parameter_is_the_array_itself() -> None:
    array = np.ones((2, 3), dtype=np.float32)
    parameter = Parameter(array, "w")
    assert parameter.data is array
    assert (parameter.grad.shape, parameter.grad.dtype, parameter.grad.any()) == ((2, 3), np.float32, False)
    parameter.data -= 1
    parameter.grad += 2
    parameter.grad = np.full((2, 3), 4)
    assert not array.any()
    assert (parameter.grad == 4).all()
    parameter.zero_grad()
    assert not parameter.grad.any()
    assert repr(parameter) == "Parameter(w, shape=(2, 3), dtype=float32)"


def test_parameter_on_devices() -> None:
    array = np.array([1.0, np.inf])
    parameter = Parameter(array, devices=["cpu:0", "cpu:1"])
    first, second = parameter.list_data()
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(first, array)
    assert [grad.tolist() for grad in parameter.list_grad()] == [[0, 0], [0, 0]]
    parameter.data = [2.0, 3.0]
    assert first.tolist() == second.tolist() == [2, 3]
    with pytest.raises(ValueError, match="has 2 gradients, one per device: write into list_grad"):
        parameter.grad = np.zeros(2)


@pytest.mark.parametrize(
    ("parameter", "wanted"),
    [
        (Parameter(shape=(2, 2), init=3), np.full((2, 2), 3, "f4")),
        (Parameter(shape=[3], init=lambda shape: range(*shape), dtype="float64"), np.arange(3.0)),
        (Parameter(shape=()), np.zeros((), "f4")),
        (Parameter([1, 2]), np.array([1, 2])),
        *((Parameter(one, dtype="float16"), np.array(one, "f2")) for one in ([1, 2], np.float32(3), 3.0, True)),
    ],
)
def test_parameter_of_a_shape_or_of_what_numpy_takes(parameter: Parameter, wanted: np.ndarray) -> None:
    assert (parameter.data.dtype, parameter.shape) == (wanted.dtype, wanted.shape)
    assert parameter.data.tolist() == wanted.tolist()
    parameter.data += 1
    assert parameter.data.tolist() == (wanted + 1).tolist()


def read_only() -> np.ndarray:
    array = np.zeros(2)
    array.flags.writeable = False
    return array


# ---- the step

MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}
MODES: list[tuple[Any, bool | None, int]] = [
    *((kind, None, devices) for kind in (None, "device") for devices in (1, 2)),
    *(("local", None, 3), ("local", False, 2), (lambda: kv.create("device"), True, 2)),
    *((lambda: kv.create("local"), *more) for more in ((None, 1), (False, 2))),
]


def made(params: Any, store: Any, optimizer: Any, options: Any = None, on_store: bool | None = None) -> Trainer:
    store = store() if callable(store) else store
    return Trainer(params, optimizer, options, kvstore=store, update_on_kvstore=on_store)


@pytest.mark.parametrize(("store", "on_store", "devices"), MODES)
def test_momentum_schedule_and_changed_rates(store: Any, on_store: bool | None, devices: int) -> None:
    """Against SGD written out by hand, in float64; all replicas are equal."""
    params = parameters(devices)
    trainer = made(params, store, "sgd", {**MOMENTUM, "wd": 0.01, "rescale_grad": 2.0}, on_store)
    weights = {name: (p.data.astype(float), np.zeros(p.data.shape)) for name, p in params.items()}
    for step in range(6):
        rate = 0.1 if step < 3 else 0.025
        if step == 3:
            trainer.set_learning_rate(0.025)
        assert trainer.learning_rate == rate
        batch_size = 8 + step  # a last batch may be smaller: the factor must follow
        backward(params, step)
        trainer.step(batch_size)
        for p, name in enumerate(params):
            w, mom = weights[name]
            mom[...] = 0.9 * mom - rate * (total(step, p, devices) * 2 / batch_size + 0.01 * w)
            w[...] += mom
            for replica in params[name].list_data():
                np.testing.assert_allclose(replica, w, rtol=1e-13 if name == "weight" else 1e-5)
                assert np.array_equal(replica, params[name].data)


@pytest.mark.parametrize("store", [None, lambda: kv.create("local")])
def test_weights_stay_where_they_are(store: Any) -> None:
    """Also those that do not lie in one piece; without a store the model may change them between steps."""
    whole = np.zeros((3, 4))
    trainer = made([parameter := Parameter(array := whole[:, ::2])], store, "test")
    parameter.grad = np.arange(6).reshape(3, 2)
    for _ in range(2):
        if store is None:
            array[...] = 0
        trainer.step(1)
    assert parameter.data is array
    assert (array / (2 if store else 1)).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert not whole[:, 1::2].any()


@pytest.mark.parametrize("store", [None, "local"])
def test_allreduce_then_update(store: str | None) -> None:
    params = parameters(2)
    trainer = Trainer(params, "test", kvstore=store, update_on_kvstore=False if store else None)
    backward(params, 0)
    trainer.allreduce_grads()
    for p, parameter in enumerate(params.values()):
        for grad in parameter.list_grad():
            assert (grad == total(0, p, 2)).all()
            grad[...] = 6  # clipped, say
    trainer.update(3)
    assert params["bias"].data.tolist() == [7, 8, 9]
    assert params["bias"].list_data()[1].tolist() == [7, 8, 9]


def test_pull_weights_brings_what_others_pushed() -> None:
    store = renamed("dist_async")
    parameter = Parameter(np.zeros(2), "w", devices=["cpu", "cpu"])
    trainer = Trainer([parameter], "test", kvstore=store)
    store.push("trainer0/w", np.array([3.0, 4.0]))
    assert parameter.data.tolist() == [0, 0]
    trainer.pull_weights()
    assert [replica.tolist() for replica in parameter.list_data()] == [[3, 4], [3, 4]]
    alone = Parameter(np.ones(2))
    Trainer([alone], "test").pull_weights()
    assert alone.data.tolist() == [1, 1]


@pytest.mark.parametrize("store", [None, lambda: kv.create("local")])
def test_a_missing_gradient(store: Any) -> None:
    """Of parameters of somebody else's: `data`, and a `grad` that may be missing."""
    used, unused, also = (SimpleNamespace(data=np.zeros(2), grad=None) for _ in range(3))
    trainer = made({"used": used, "unused": unused, "also": also}, store, "test")
    used.grad = np.ones(2)
    with pytest.raises(ValueError, match="grad is None in 'also', 'unused'"):
        trainer.step(1)
    assert used.data.tolist() == [0, 0]
    trainer.step(1, ignore_stale_grad=True)
    assert [one.tolist() for one in (used.data, unused.data, unused.grad)] == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("store", [None, "device"])
def test_replicas_begin_equal_factors_have_names_and_frozen_parameters_stay(store: str | None) -> None:
    two: dict[str, Any] = {"devices": ["cpu"] * 2}
    slow, steady = Parameter(np.full(2, 8.0), lr_mult=0.5, **two), Parameter(np.full(2, 8.0), **two)
    frozen = Parameter(np.full(2, 8.0), grad_req="null", **two)
    steady.list_data()[1][:] = 9
    optimizer = optimizers.create("sgd", learning_rate=1.0)
    trainer = Trainer({"slow": slow, "steady": steady, "frozen": frozen}, optimizer, kvstore=store)
    assert steady.list_data()[1].tolist() == [8, 8]
    for mult, found in (({"slow": 0.5, "steady": 0.25}, [7, 7, 8]), ({}, [5, 3, 8])):
        optimizer.set_lr_mult(mult)
        for grad in (*slow.list_grad(), *steady.list_grad(), *frozen.list_grad()):
            grad[:] = 2
        trainer.step(1)
        for of_device in zip(slow.list_data(), steady.list_data(), frozen.list_data(), strict=True):
            assert [one.tolist() for one in of_device] == [[one] * 2 for one in found]


# ---- what is chosen


@pytest.mark.parametrize(
    ("devices", "kvstore", "on_store", "kind"),
    [
        (1, "local", None, ""),
        (2, "device", None, "device, updating"),
        (2, "Local", None, "local, updating"),
        (2, "local", False, "local"),
        (1, renamed("dist_sync"), None, "dist_sync, updating"),
        (1, renamed("dist_async"), None, "dist_async, updating"),
    ],
    ids=str,
)
def test_which_store_and_who_updates(devices: int, kvstore: Any, on_store: bool | None, kind: str) -> None:
    params = [Parameter(np.zeros(1), devices=["cpu"] * devices)]
    trainer = Trainer(params, "sgd", kvstore=kvstore, update_on_kvstore=on_store)
    found = "" if trainer.kvstore is None else trainer.kvstore.type
    assert found + ", updating" * (trainer._updater is not None) == kind


W = Parameter(np.zeros(2), "w")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (Parameter, ValueError, "not both or neither"),
        (lambda: Parameter(np.zeros(2), shape=(2,)), ValueError, "not both or neither"),
        (lambda: Parameter(np.zeros(2), 3), TypeError, "the name of a parameter is a str"),
        (lambda: Parameter(np.zeros(2), grad_req="no"), ValueError, "grad_req must be one of 'write', 'add', 'null'"),
        (lambda: Parameter(np.zeros(2), devices=[]), ValueError, "devices is empty"),
        (lambda: Parameter(np.zeros(2), devices=["tpu"]), ValueError, "'tpu' is no device"),
        (lambda: Parameter(np.zeros(2, dtype=complex)), UnsupportedError, "complex128"),
        (lambda: Parameter("w"), UnsupportedError, "dtype"),
        (lambda: Parameter(read_only()), UnsupportedError, "read-only"),
        (lambda: Parameter(shape=(2,), init=lambda shape: np.zeros(3)), ValueError, r"shape \(3,\).*has shape \(2,\)"),
        (lambda: setattr(Parameter([1.0]), "data", np.zeros(3)), ValueError, r"must have shape \(1,\), got \(3,\)"),
        (lambda: Parameter(frameworks.need("torch").zeros(2)), TypeError, "one of torch; give a torch.nn.Parameter to"),
        (lambda: Trainer([], "sgd"), ValueError, "no parameters"),
        (lambda: Trainer(3, "sgd"), TypeError, "dict or a list of parameters, not int"),
        (lambda: Trainer(np.zeros(3), "sgd"), TypeError, "not ndarray"),
        (lambda: Trainer([np.zeros(3)], "sgd"), TypeError, r"'0' is ndarray.*mpikv.Parameter\(array\)"),
        (lambda: Trainer([W, W], "sgd"), ValueError, "two parameters are called 'w'"),
        (lambda: Trainer({"a": W, "b": W}, "sgd"), ValueError, "'b' comes twice"),
        (lambda: Trainer({1: W}, "sgd"), TypeError, "name of a parameter is a str, got 1"),
        (lambda: Trainer([W], "gradient"), ValueError, "unknown optimizer 'gradient'"),
        (lambda: Trainer([W], "sgd", {"speed": 1}), TypeError, "speed"),
        (lambda: Trainer([W], optimizers.create("sgd"), {"wd": 1}), TypeError, "exists already"),
        (lambda: Trainer([W], "sgd", kvstore="dist_snyc"), ValueError, "dist_snyc"),
        (lambda: Trainer([W], "sgd", kvstore=3), TypeError, "kvstore is a type such as 'dist_sync'"),
        (lambda: Trainer([W], "sgd", None, renamed("dist_async"), None, False), ValueError, "makes the updates itself"),
        (lambda: Trainer([W], "sgd", None, None, None, True), ValueError, "update_on_kvstore=True needs a store"),
        (lambda: Trainer([W], "sgd", None, None, None, "yes"), TypeError, "update_on_kvstore is True, False or None"),
        (lambda: Trainer([W], "sgd", None, None, {"type": "2bit"}), ValueError, "compression_params need a store"),
        (lambda: Trainer([W], "sgd", None, renamed("local"), {"type": "zip"}), ValueError, "unknown compression type"),
        (lambda: Trainer(parameters(2), "sgd").allreduce_grads(), UnsupportedError, "update_on_kvstore=False"),
        (lambda: Trainer(parameters(2), "sgd").update(1), UnsupportedError, "update_on_kvstore=False"),
        *(
            (lambda wrong=wrong: Trainer([W], "sgd").step(wrong), ValueError, "number of examples of all workers")
            for wrong in (0, -1, "8", True, float("nan"), float("inf"))
        ),
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_learning_rate_with_a_schedule() -> None:
    schedule = optimizers.FactorScheduler(step=2, factor=0.5, base_lr=1.0)
    trainer, rates = Trainer([Parameter(np.zeros(1))], "sgd", {"lr_scheduler": schedule}), []
    for _ in range(4):
        rates.append(trainer.learning_rate)
        trainer.step(1)
    assert rates == [1, 1, 1, 0.5]


# ---- states


@pytest.mark.parametrize(
    ("first", "second"),  # what the updates are made by; the file does not tell
    [*((one, one) for one in MODES), (("device", None, 2), (None, None, 2)), ((None, None, 2), ("device", None, 2))],
)
@pytest.mark.parametrize(("optimizer", "whole"), [("sgd", False), ("adam", True)], ids=["states", "checkpoint"])
def test_states_continue_a_run(first: Any, second: Any, optimizer: str, whole: bool, tmp_path: Path) -> None:
    """Two steps, saved, then two more in new objects: bitwise the same as four steps.

    whole: with the weights, which `save_states` leaves to others.
    """

    def run(params: dict[str, Parameter], kind: Any, steps: range) -> Trainer:
        trainer = made(params, kind[0], optimizer, MOMENTUM if optimizer == "sgd" else None, kind[1])
        if steps.start:
            assert trainer.resume(path) == steps.start if whole else trainer.load_states(path) is None
        for step in steps:
            backward(params, step)
            trainer.step(7)
        return trainer

    path = tmp_path / "file"
    through, params, others = (parameters(first[2]) for _ in range(3))
    run(through, first, range(4))
    trainer = run(params, first, range(2))
    trainer.save(path) if whole else trainer.save_states(path)
    for name, parameter in others.items():
        parameter.data = parameter.data + 100 if whole else params[name].data
    run(others, second, range(2, 4))
    for name, parameter in others.items():
        assert all(np.array_equal(replica, through[name].data) for replica in parameter.list_data())


def test_two_trainers_on_one_store(tmp_path: Path) -> None:
    """Each has its own optimizer, and its own file of states: loading one leaves the other alone."""

    params, options = [Parameter(np.zeros(1), "w") for _ in range(2)], {"learning_rate": 1.0, "momentum": 0.5}

    def begun() -> list[Trainer]:
        store = kv.create("local")
        return [made([one], store, kind, options) for one, kind in zip(params, ("sgd", "nag"), strict=True)]

    def step(both: list[Trainer]) -> list[float]:
        before = [float(parameter.data[0]) for parameter in params]
        for parameter, trainer in zip(params, both, strict=True):
            parameter.grad[:] = 1
            trainer.step(1)
        return [float(parameter.data[0]) - old for parameter, old in zip(params, before, strict=True)]

    both = begun()
    first = step(both)
    for i, trainer in enumerate(both):
        trainer.save_states(tmp_path / f"states{i}")
    second = step(both)
    assert (first, second) == ([-1.0, -1.5], [-1.5, -1.75])
    for i in (0, 1):
        both = begun()
        both[i].load_states(tmp_path / f"states{i}")
        moved = step(both)
        assert (moved[i], moved[1 - i]) == (second[i], first[1 - i])
