"""Arguments for test_generated_calls.py, likely ones and others, from a seed; and what may come of a call."""

from __future__ import annotations

import decimal
import fractions
import inspect
import math
import pathlib
from collections.abc import Callable
from random import Random
from typing import Any

import ml_dtypes
import numpy as np

import mpikv
from mpikv import Config, Parameter, RowSparse, kv, optimizers
from mpikv.errors import MpikvError, StallError

ALLOWED = (MpikvError, TypeError, ValueError, KeyError, OSError)
LONGEST_TEXT = 5000


class Raises:
    """Everything that Python asks of it is an error of a kind that nobody expects."""

    def _refuse(self, *_args: Any) -> Any:
        raise ArithmeticError("nobody expects this one")

    __eq__ = __lt__ = __len__ = __iter__ = __bool__ = __index__ = __float__ = __int__ = __str__ = __repr__ = _refuse
    __array__ = __dlpack__ = __dlpack_device__ = __getitem__ = __fspath__ = _refuse
    __hash__ = object.__hash__


class Lies:
    """Gives answers of the wrong kind."""

    __hash__ = object.__hash__
    shape = "shape"
    dtype = 5
    data = grad = None
    rank = "first"

    def __len__(self) -> int:
        return 2**62

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise IndexError
        return self

    def __array__(self, *_args: Any, **_kwargs: Any) -> Any:
        return np.array([None, "x"])

    def __dlpack__(self, **_kwargs: Any) -> Any:
        return "capsule"


class Agrees:
    """Has every attribute, and each is the object itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__cuda_array_interface__":
            raise AttributeError(name)
        return self


class Number(float):
    """A float all the same."""


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


JUNK: list[Callable[[], Any]] = [
    *(
        lambda n=n: n
        for n in (0, 1, -1, 2, 3, 255, -(2**31), 2**62, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400), 10**5000)
    ),
    *(lambda x=x: x for x in (0.0, -0.0, 0.5, -1.5, 1e300, 5e-324, math.inf, -math.inf, math.nan, Number(0.5))),
    *(lambda x=x: x for x in (None, True, False, 1j, ..., NotImplemented, int, dict, mpikv, ValueError("x"))),
    *(lambda x=x: x for x in (fractions.Fraction(10**400), decimal.Decimal("NaN"), fractions.Fraction(1, 3))),
    *(
        lambda x=x: x
        for x in (np.float32("nan"), np.int8(-3), np.bool_(True), np.float64(2), np.str_("w"), np.datetime64("NaT"))
    ),
    *(
        lambda x=x: x
        for x in ("", "w", "x", "é", "\ud800", "\0", "a\nb", "None", "-1", "nan", "local", "../x", "k" * 10_000)
    ),
    *(lambda x=x: x for x in (b"", b"w", b"\xff\0", bytearray(3), memoryview(b"ab"))),
    *(lambda x=x: x for x in ((), (1,), (None, None), ("w", "w"), frozenset({1}), range(3), slice(1))),
    lambda: [],
    lambda: {},
    set,
    lambda: [[]],
    lambda: ["w", 1],
    lambda: {"a": 1},
    lambda: {1: 2, "a": None},
    lambda: {"name": "sgd", "attributes": {"wd": -1}},
    lambda: iter([1, 2]),
    lambda: nested(20),
    lambda: nested(5000),
    lambda: [Raises()],
    object,
    Raises,
    Lies,
    Agrees,
    lambda: np.zeros(()),
    lambda: np.zeros(0),
    lambda: np.zeros((0, 3), np.float32),
    lambda: np.zeros(4),
    lambda: np.zeros((2, 2), np.float32),
    lambda: np.zeros(2, complex),
    lambda: np.zeros(2, bool),
    lambda: np.zeros(2, object),
    lambda: np.array(["a", "b"]),
    lambda: np.zeros(2, [("a", int)]),
    lambda: np.zeros(2, np.int16),
    lambda: np.zeros(2, "M8[s]"),
    lambda: np.zeros(2, ">f4"),
    lambda: np.zeros((1,) * 30),
    lambda: np.full(2, np.nan),
    lambda: read_only(np.zeros(2)),
    lambda: np.ma.masked_array(np.zeros(2), [True, False]),
    lambda: np.matrix([[1.0, 2.0]]),
    lambda: [np.zeros(2), np.zeros(3)],
    lambda: [np.zeros(2)] * 2,
]


def optimizer(pick: Random) -> Any:
    """One that works."""
    name = pick.choice([*optimizers.names(), "function"])
    if name == "function":
        return subtract
    return pick.choice(
        [name, name.upper(), optimizers.create(name), optimizers.create(name, learning_rate=0.5, wd=0.25)]
    )


def subtract(weight: Any, grad: Any, state: Any) -> Any:
    weight -= grad
    return (state or 0) + 1


def schedule(pick: Random) -> Any:
    return pick.choice(
        [
            optimizers.FactorScheduler(3, 0.5),
            optimizers.MultiFactorScheduler([2, 5], 0.5, 0.25),
            optimizers.PolyScheduler(10, 0.5),
            optimizers.CosineScheduler(10, 0.5, warmup_steps=2),
            None,
        ]
    )


def array(pick: Random) -> np.ndarray:
    dtype = pick.choice([np.float32] * 6 + [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8])
    return np.ones(pick.choice([2, 2, 2, (2, 2), (), 0]), dtype)


def value(pick: Random) -> Any:
    """An array, or now and then one of which some rows are there."""
    made = array(pick)
    return RowSparse.of(made) if pick.random() < 0.2 and made.ndim else made


def rows(pick: Random) -> Any:
    return pick.choice([0, [0], [1, 0, 1], [2], np.array([1]), [[0], [1]], []])


def key(pick: Random) -> Any:
    return pick.choice(["w", "w", "v", f"k{pick.randrange(40)}"])


def pairs(make: Callable[[Random], Any]) -> Callable[[Random], Any]:
    """One, or a list of a few."""
    return lambda pick: make(pick) if pick.random() < 0.7 else [make(pick) for _ in range(pick.randrange(4))]


def parameters(pick: Random) -> Any:
    made = [Parameter(array(pick), name=pick.choice([None, "p", "q"])) for _ in range(pick.randrange(1, 4))]
    return pick.choice([made, {f"p{i}": one for i, one in enumerate(made)}])


def file(pick: Random) -> Any:
    return pick.choice(
        ["file", "other", b"file", pathlib.Path("file"), "folder", "pipe", "no/such", "file\0", "x" * 300]
    )


# What an argument of that name may well be.
LIKELY: dict[str, Callable[[Random], Any]] = {
    "key": pairs(key),
    "keys": pairs(key),
    "value": pairs(value),
    "values": lambda pick: pick.choice(
        [{"learning_rate": 0.5}, {"lr_mult": [["w", 2]]}, {"wd": None}, {"x": 1}, np.ones((1, 2)), np.ones(1), [5.0]]
    ),
    "indices": rows,
    "row_ids": rows,
    "out": lambda pick: None if pick.random() < 0.5 else pairs(value)(pick),
    "priority": lambda pick: pick.choice([0, 1, -5, 2**70]),
    "optimizer": optimizer,
    "optimizer_params": lambda pick: pick.choice([None, {}, {"learning_rate": 0.5}, {"lr": 1}, {"learning_rate": "x"}]),
    "learning_rate": lambda pick: pick.choice([0.1, 0, 1, None]),
    "lr": lambda pick: 0.5,
    "lr_scheduler": schedule,
    "params": parameters,
    "parameter": lambda pick: pick.choice(["p0", "p", "0"]),
    "fname": file,
    "path": file,
    "data": lambda pick: pick.choice([array(pick), np.zeros((6, 4)), [1, 2, 3, 4], [[1], [2]]]),
    "weight": array,
    "grad": array,
    "shape": lambda pick: pick.choice([3, (2, 2), (), [(2,), (3,)], [2, 2], 0]),
    "dtype": lambda pick: pick.choice(["float32", np.float64, "bfloat16", np.dtype("int32"), None]),
    "devices": lambda pick: pick.choice(["cpu", ["cpu", "cpu:1"], None, ["gpu:0"], 0]),
    "num_slice": lambda pick: pick.choice([1, 2, 3]),
    "num_parts": lambda pick: pick.choice([1, 2, 5]),
    "length": lambda pick: pick.choice([0, 1, 10, 1000]),
    "step": lambda pick: pick.choice([1, 5, [1, 4], (3, 2)]),
    "batch_size": lambda pick: pick.choice([1, 4, 2.5, np.int64(3)]),
    "timeout_s": lambda pick: pick.choice([None, 5, 0.5]),
    "name": lambda pick: pick.choice(["local", "device", "nccl", "a"]),
    "kvstore": lambda pick: pick.choice([None, "local", "device"]),
    "config": lambda pick: pick.choice([None, Config(), {"name": "sgd", "attributes": {"momentum": 0.5}}]),
    "store": lambda pick: kv.create("local"),
    "lr_mult": lambda pick: pick.choice([{"w": 2.0}, {}, 0.5]),
    "wd_mult": lambda pick: pick.choice([{"w": 2.0}, {}, 0.5]),
    "state": lambda pick: pick.choice([{"t": 0}, {"t": 3, "momentum": np.zeros(2, np.float32)}, {}, {"t": "x"}]),
    "environ": lambda pick: {pick.choice(["MPIKV_TIMEOUT_S", "MPIKV_INTERFACE", "MPIKV_NUM_SERVERS"]): junk(pick)},
    "updater": lambda pick: lambda key, total, stored: np.add(stored, total, out=stored),
    "capability": lambda pick: "optimizer",
    "last": lambda pick: pick.choice(["uneven", "drop", "wrap"]),
    "init": lambda pick: pick.choice([0.5, np.ones, lambda shape: None]),
    "comm": lambda pick: None,
    "function": lambda pick: subtract,
    "torch_class": lambda pick: object,
    "compression_params": lambda pick: pick.choice([None, {}, {"type": "2bit", "threshold": 0.5}]),
    "num_servers": lambda pick: pick.choice([None, 0, 2]),
}
FLAGS = ("dump_optimizer", "ignore_sparse", "even_split", "shuffle", "update_on_kvstore", "ignore_stale_grad", "wait")


def junk(pick: Random) -> Any:
    return pick.choice(JUNK)()


def argument(pick: Random, name: str, likely: float) -> Any:
    if pick.random() >= likely:
        return junk(pick)
    if name in FLAGS:
        return pick.random() < 0.5
    return LIKELY[name](pick) if name in LIKELY else pick.choice([0, 1, 2, 0.5])


def arguments(pick: Random, function: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
    """For most arguments likely values, for some or all of them junk; too few and unknown ones now and then."""
    likely = pick.choice([0.0, 0.5, 0.8, 0.95, 1.0])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_place = pick.random() < 0.5
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            names = [name for name in optimizers.Optimizer.fields if pick.random() < 0.15]
            kwargs.update({name: argument(pick, name, likely) for name in names})
            if pick.random() < 0.05:
                kwargs[pick.choice(["lr", "momentun", "é", "_x"])] = junk(pick)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            wanted = parameter.default is parameter.empty and pick.random() < 0.98
            if not wanted and pick.random() < 0.6:
                by_place = False
                continue
            if by_place and parameter.kind is not parameter.KEYWORD_ONLY:
                args.append(argument(pick, name, likely))
            else:
                kwargs[name] = argument(pick, name, likely)
    if isinstance(function, type) and issubclass(function, optimizers.Optimizer) and pick.random() < 0.05:
        kwargs[pick.choice(["lr", "momentun", "é", "_x"])] = junk(pick)
    if pick.random() < 0.02:
        args.append(junk(pick))
    return args, kwargs


class FoundError(AssertionError):
    """What must not be, with the call that did it."""


def outcome(what: str, call: Callable[[], Any]) -> tuple[str, Any]:
    """'ok' and the result, or the error's name and text."""
    try:
        return "ok", call()
    except ALLOWED as error:
        text = str(error)
        if isinstance(error, StallError) or not 0 < len(text) <= LONGEST_TEXT:
            raise FoundError(f"{what}: {type(error).__name__} with {len(text)} characters: {text[:300]}") from error
        return type(error).__name__, text
    except IndexError as error:
        if ": row " not in str(error):  # ids of rows alone are places that users name
            raise FoundError(f"{what}: IndexError: {str(error)[:300]}") from error
        return "IndexError", str(error)
    except Exception as error:
        raise FoundError(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error


def described(name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    listed = [mpikv.common.checks.shown(one) for one in args]
    listed += [f"{name}={mpikv.common.checks.shown(one)}" for name, one in kwargs.items()]
    return f"{name}({', '.join(listed)})"


def called(pick: Random, name: str, function: Callable[..., Any]) -> tuple[str, Any]:
    args, kwargs = arguments(pick, function)
    return outcome(described(name, args, kwargs), lambda: function(*args, **kwargs))
