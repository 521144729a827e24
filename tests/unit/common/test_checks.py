"""Wrong arguments: errors that say what was expected, are short, and leave everything as it was."""

from __future__ import annotations

import enum
import inspect
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import Config, ConfigError, Parameter, SplitSampler, Trainer, kv, optimizers
from mpikv.common import checks
from mpikv.data import split_and_load, split_data

HUGE = 10**400


def trainer(*arguments: Any) -> Trainer:
    return Trainer({"p": Parameter(np.zeros(2))}, "sgd", *arguments)


# MXNet 1.9.1, python/mxnet/optimizer/: what its classes take first, by position. None: nothing.
FIRST_IN_MXNET = {
    **dict.fromkeys(("SGD", "NAG", "LARS", "DCASGD"), "momentum"),
    **dict.fromkeys(("Adam", "AdamW", "RMSProp", "LAMB", "Signum"), "learning_rate"),
    **{"AdaGrad": "eps", "AdaDelta": "rho", "Ftrl": "lamda1", "Test": None},
}


@pytest.mark.parametrize("name", FIRST_IN_MXNET)
def test_by_its_place_nothing_means_something_else_than_in_mxnet(name: str) -> None:
    cls = getattr(optimizers, name)
    if FIRST_IN_MXNET[name] == "learning_rate":
        assert cls(0.25).learning_rate == 0.25
        with pytest.raises(TypeError, match=f"{name} takes learning_rate by position and others by name: .*wd"):
            cls(0.25, 0.5)
    else:
        with pytest.raises(TypeError, match=f"{name} takes all by name: learning_rate, .*{FIRST_IN_MXNET[name] or ''}"):
            cls(0.9)
    assert "args" not in inspect.signature(cls).parameters
    assert cls(learning_rate=0.5).learning_rate == 0.5


def test_names_that_are_meant() -> None:
    meant = {"lr": "learning_rate", "mom": "momentum", "weight_decay": "wd", "Momentun": "momentum"}
    for name, wanted in meant.items():
        with pytest.raises(TypeError, match=rf"sgd has no parameter {name};.*Did you mean '{wanted}'\?"):
            optimizers.create("sgd", **{name: 0.1})
        with pytest.raises(TypeError, match=rf"Did you mean '{wanted}'"):
            trainer({name: 0.1})
    with pytest.raises(ValueError, match=r"unknown optimizer 'rmsprob'.*Did you mean 'rmsprop'"):
        optimizers.create("rmsprob")
    with pytest.raises(ValueError, match=r"no attribute 'lr'.*Did you mean 'learning_rate'"):
        optimizers.create("sgd").set_attributes({"lr": 1})
    with pytest.raises(ConfigError, match=r"no such setting: timeout.*Did you mean 'timeout_s'"):
        Config().with_(timeout=3)
    with pytest.raises(TypeError) as caught:
        optimizers.create("sgd", qqqq=1)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "'local' store is of one process and has no servers", lambda: kv.create("local", num_servers=2)),
        (TypeError, "comm is an mpi4py.MPI.Intracomm or None, not str", lambda: kv.create("local", comm="junk")),
        (TypeError, "comm is an mpi4py.MPI.Intracomm or None, not int", lambda: kv.create("dist_sync", comm=3)),
        (TypeError, "config is an mpikv.Config or None, not int", lambda: kv.create(config=1)),
        (ConfigError, "num_servers='x'.*is not a whole number", lambda: kv.create("local", num_servers="x")),
        (ConfigError, "num_servers=True", lambda: kv.create("local", num_servers=True)),
        (ConfigError, "stop_file=None.*is not a str", lambda: Config(stop_file=None)),
        (ConfigError, "interface=None.*is not a str", lambda: Config(interface=None)),
        (ConfigError, "stop_file=.*a character of number 0", lambda: Config(stop_file="a\0b")),
        (ConfigError, r"timeout_s=1e\+300.*at most 1e\+09", lambda: Config(timeout_s=1e300)),
        (ConfigError, r"S='1e300'.*at most 1e\+09", lambda: Config.from_environ({"MPIKV_TIMEOUT_S": "1e300"})),
        (ConfigError, "must be at most 9223372036854775807", lambda: Config(num_servers=HUGE)),
        (TypeError, "environ is a dict", lambda: Config.from_environ(5)),
        (TypeError, "MPIKV_TIMEOUT_S is a str, not int", lambda: Config.from_environ({"MPIKV_TIMEOUT_S": 5})),
        (TypeError, "store is a KVStore", lambda: SplitSampler.for_store(5, object())),
        (TypeError, "shuffle is True or False, not str", lambda: SplitSampler(5, shuffle="no")),
        (ValueError, "length must be at most 9223372036854775807, not 1000.*000$", lambda: SplitSampler(HUGE)),
        (ValueError, "num_slice must be at most", lambda: split_data(np.zeros(0), 2**60)),
        (TypeError, "even_split is True or False", lambda: split_data(np.zeros(4), 2, 0, "no")),
        (ValueError, "batch_axis 1000.*000 is out of range", lambda: split_data(np.zeros(4), 2, HUGE)),
        (ValueError, "True is no device", lambda: split_and_load(np.zeros(4), True)),
        (ValueError, "wd must be a number that a float can hold", lambda: optimizers.create("sgd", wd=HUGE)),
        (ValueError, "wd must be a number that a float can hold", lambda: optimizers.create("sgd", wd=Fraction(HUGE))),
        (TypeError, "Optimizer defines no formula", lambda: optimizers.create(optimizers.Optimizer)),
        (TypeError, "Optimizer defines no formula", lambda: optimizers.create(optimizers.Optimizer())),
        (TypeError, "optimizer_params is a dict", lambda: trainer(0.1)),
        (TypeError, "a name in optimizer_params is a str", lambda: trainer({1: 2})),
        (TypeError, "compression_params is a dict", lambda: trainer(None, "device", 5)),
        (TypeError, "lr_mult is a number, not str", lambda: Parameter(np.zeros(2), lr_mult="x")),
        (ValueError, "more than any memory", lambda: Parameter(shape=(HUGE,))),
        (mpikv.UnsupportedError, "dtype 'junk'; a store holds", lambda: Parameter(np.zeros(2), dtype="junk")),
    ],
)
def test_mistakes_are_named(error: type[Exception], words: str, call: Any) -> None:
    with pytest.raises(error, match=words):
        call()


W = np.zeros(2)
PRIORITY, FNAME = "priority is a whole number, not", "fname is the name of a file"
# Of a store that has a key 'w' and an optimizer.
WRONG_CALLS: list[tuple[type[Exception], str, Any]] = [
    *((TypeError, PRIORITY, lambda store, wrong=wrong: store.push("w", W, wrong)) for wrong in ("x", 1.5, None, True)),
    (TypeError, PRIORITY, lambda store: store.pushpull("w", W, priority=[1])),
    (TypeError, PRIORITY, lambda store: store.push_async("w", W, priority="x")),
    (TypeError, PRIORITY, lambda store: store.pushpull_async("w", W, priority="x")),
    (TypeError, PRIORITY, lambda store: store.pull("w", W, "x")),
    (TypeError, PRIORITY, lambda store: store.pull_async("w", W, "x")),
    (TypeError, PRIORITY, lambda store: store.broadcast("v", W, W, "x")),
    (TypeError, "ignore_sparse is True or False", lambda store: store.pull("w", ignore_sparse="no")),
    (TypeError, "timeout_s", lambda store: store.pull_async("w").wait("x")),
    *((ValueError, "timeout_s", lambda store, s=s: store.wait_all(s)) for s in (-1, float("nan"), 1e10)),
    (TypeError, "updater is a function", lambda store: store.set_updater(5)),
    (TypeError, "compression_params is a dict", lambda store: store.set_gradient_compression(5)),
    (TypeError, "Optimizer defines no formula", lambda store: store.set_optimizer(optimizers.Optimizer())),
    (TypeError, FNAME, lambda store: store.load_optimizer_states(5)),
    *((ValueError, FNAME, lambda s, name=name: s.save_optimizer_states(name)) for name in ("", "a\0b", "x" * 5000)),
    (TypeError, "dump_optimizer is True or False", lambda store: store.save_optimizer_states("f", "x")),
]


def test_calls_of_a_store() -> None:
    with kv.create("local") as store:
        store.init("w", W)
        store.set_optimizer("test")
        for error, words, call in WRONG_CALLS:
            with pytest.raises(error, match=words):
                call(store)
        assert store.pull("w", priority=HUGE).tolist() == [0, 0]
        assert store.pull_async("w").wait(0).tolist() == [0, 0]


def test_what_errors_show_is_short() -> None:
    """Whatever it is, and whatever its own repr does; test_generated_calls.py looks at errors."""

    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("k" * 10**6, b"k" * 10**6, list(range(10**6)), deep, 10**4000, {i: i for i in range(10**5)}, Odd()):
        assert 0 < len(checks.shown(value)) < 1000
    assert checks.shown(Odd()).startswith("<Odd")
    assert checks.shown("k" * 10**6).startswith("'kkk")
    assert len(checks.shown("k" * 10**6)) > 10


def test_keys_are_their_values() -> None:
    """An enumeration's member is the text or the number that it is, as it is in a dict."""

    class Name(str, enum.Enum):
        WEIGHT = "weight"

    with kv.create("local") as store:
        store.init(Name.WEIGHT, np.ones(2))
        assert store.pull("weight").tolist() == [1, 1]
