"""Calls with arguments that nobody would think of: every public callable, and every method of what they make.

A call may succeed, or raise an error of the kinds in ALLOWED whose text is neither empty nor long. No thread may die,
nothing may hang, the workers of a store must come to the same, and the store must work for correct calls afterwards.

`--hypothesis-seed=7`, and a profile with more examples, look longer.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grids
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from store_modes import Mode, mode_id

import mpikv
from mpikv import Config, KVStore, LocalUpdates, Parameter, RowSparse, Snapshots, SplitSampler, Trainer, kv, optimizers
from mpikv.calls.request import Request
from mpikv.common.checks import shown
from mpikv.data import split_and_load, split_data
from mpikv.errors import MpikvError, StallError

ALLOWED = (MpikvError, TypeError, ValueError, KeyError, OSError, MemoryError)
LONGEST_TEXT = 5000


# --- arguments


class Raises:
    """Everything that Python asks of it is an error of a kind that nobody expects."""

    def _refuse(self, *_args: Any) -> Any:
        raise ArithmeticError("nobody expects this one")

    __eq__ = __lt__ = __len__ = __iter__ = __bool__ = __index__ = __float__ = __int__ = __str__ = _refuse
    __array__ = __dlpack__ = __dlpack_device__ = __getitem__ = __fspath__ = _refuse
    __hash__ = object.__hash__


class Lies:
    """Gives answers of the wrong kind."""

    __hash__ = object.__hash__
    shape, dtype, data, grad, rank = "shape", 5, None, None, "first"

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


class Agrees:
    """Has every attribute, and each is the object itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__cuda_array_interface__":
            raise AttributeError(name)
        return self


def nested() -> list[Any]:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


ODD: list[Callable[[], Any]] = [Raises, Lies, Agrees, object, set, nested, lambda: np.broadcast_to(0.0, 2)]
ODD += [lambda: [Raises()], lambda: iter([1, 2]), lambda: np.ma.masked_array(np.zeros(2), [True, False])]
ODD += [lambda: np.matrix([[1.0, 2.0]]), lambda: np.zeros((1,) * 30), lambda: [np.zeros(2), np.zeros(3)]]
ODD += [lambda: np.zeros(2, object), lambda: np.zeros(2, [("a", int)]), lambda: np.zeros(2, ml_dtypes.bfloat16)]
NUMBERS = (2**63 - 1, 2**63, 2**64, 10**400, -(10**400), 10**5000, math.inf, math.nan, np.float32("nan"), np.int8(-3))
NUMBERS += (np.bool_(True), np.datetime64("NaT"))
WORDS = ("w", "x", "\0", "\ud800", "local", "sgd", "../x", "k" * 10_000, np.str_("w"), memoryview(b"ab"))
OTHERS = (None, ..., NotImplemented, int, dict, mpikv, ValueError("x"), slice(1), range(3), frozenset({1}))
SMALL = st.sampled_from([0, 1, -1, 2, 3, 255, *NUMBERS, *WORDS, *OTHERS])
JUNK: st.SearchStrategy[Any] = st.one_of(
    SMALL,
    st.sampled_from(ODD).map(lambda make: make()),
    *(st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4), st.complex_numbers(), st.fractions()),
    st.decimals(),
    st.lists(SMALL, max_size=3),
    st.dictionaries(st.sampled_from(["a", "name", "learning_rate", 1]), SMALL, max_size=2),
    numpy_st.arrays(numpy_st.scalar_dtypes(), numpy_st.array_shapes(min_dims=0, min_side=0, max_side=3)),
)


def subtract(weight: Any, grad: Any, state: Any) -> Any:
    weight -= grad
    return (state or 0) + 1


def one_or_list(likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return likely | likely | likely | st.lists(likely, max_size=3)


def among(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


DTYPE = among(*[np.float32] * 15, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8)
ARRAY = st.builds(np.ones, among(*[2] * 9, (2, 2), (), 0), DTYPE)
VALUE = ARRAY | ARRAY | ARRAY | st.builds(lambda a: RowSparse.of(a) if a.ndim else a, ARRAY)
KEYS = one_or_list(among("w", "w", "w", "v", "v", "k1", "k2"))
OPTIMIZER = st.sampled_from(optimizers.names()).flatmap(
    lambda name: (
        among(name, name.upper(), subtract) | st.builds(optimizers.create, st.just(name), learning_rate=st.just(0.5))
    )
)
SCHEDULES = st.builds(optimizers.FactorScheduler, st.just(3), st.just(0.5)) | st.builds(
    optimizers.CosineScheduler, st.just(10), st.just(0.5), warmup_steps=st.just(2)
)
PARAMETERS = st.lists(st.builds(Parameter, ARRAY, name=among(None, "p", "q")), min_size=1, max_size=3)
# What an argument of that name may well be; of any other name a small number.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("key", "keys"), KEYS),
    **dict.fromkeys(("indices", "row_ids"), among(0, [0], [1, 0, 1], [2], np.array([1]), [[0], [1]], [])),
    **dict.fromkeys(
        ("fname", "path"), among("file", "other", b"file", "folder", "pipe", "no/such", "file\0", "x" * 300)
    ),
    **dict.fromkeys(("lr_mult", "wd_mult"), among({"w": 2.0}, {}, 0.5)),
    **dict.fromkeys(("data", "weight", "grad"), ARRAY),
    **dict.fromkeys(("kvstore", "name"), among(None, "local", "device", "sgd")),
    **dict.fromkeys(("comm", "lr_scheduler"), st.none() | SCHEDULES),
    "value": one_or_list(VALUE),
    "out": st.none() | one_or_list(VALUE),
    "values": among({"learning_rate": 0.5}, {"lr_mult": [["w", 2]]}, {"wd": None}, np.ones((1, 2)), [5.0]),
    "priority": among(0, 1, -5, 2**70),
    "optimizer": OPTIMIZER,
    "optimizer_params": among(None, {}, {"learning_rate": 0.5}, {"lr": 1}),
    "params": PARAMETERS | PARAMETERS.map(lambda made: {f"p{i}": one for i, one in enumerate(made)}),
    "shape": among(3, (2, 2), (), [(2,), (3,)], [2, 2], 0),
    "dtype": among("float32", np.float64, "bfloat16", np.dtype("int32"), None),
    "devices": among("cpu", ["cpu", "cpu:1"], None, ["gpu:0"], 0),
    "length": among(0, 1, 10, 1000),
    "step": among(1, 5, [1, 4], (3, 2)),
    "timeout_s": among(None, 5, 0.5),
    "config": among(None, Config(), {"name": "sgd", "attributes": {"momentum": 0.5}}),
    "state": among({"t": 0}, {"t": 3, "momentum": np.zeros(2, np.float32)}, {}, {"t": "x"}),
    "environ": st.dictionaries(among("MPIKV_TIMEOUT_S", "MPIKV_INTERFACE", "MPIKV_NUM_SERVERS"), JUNK, max_size=1),
    "updater": st.just(lambda key, total, stored: np.add(stored, total, out=stored)),
    "op": among("sum", "max", "mean", "adasum"),
    "outer": st.just("mean"),
    "objects": among({"w": np.ones(2)}, {}, {"w": {}}, np.ones(2)),
    "folder": among("folder", "new", None, "pipe"),
    "every_s": among(0.001, 30.0, None),
    "last": among("uneven", "drop", "wrap"),
    "init": among(0.5, np.ones, lambda shape: None),
    "function": st.just(subtract),
    "compression_params": among(None, {}, {"type": "2bit", "threshold": 0.5}),
}


def argument(name: str, junk: int) -> st.SearchStrategy[Any]:
    """junk: how many of four arguments are no likely one."""
    likely = LIKELY.get(name, among(0, 1, 2, 0.5))
    return st.integers(1, 4).flatmap(lambda n: JUNK if n <= junk else likely)


@st.composite
def arguments(draw: st.DrawFn, function: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
    """For most arguments likely values, for some or all of them junk; too few and unknown ones now and then."""
    junk, by_place = draw(among(0, 0, 0, 1, 2, 4)), draw(st.booleans())
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            names = draw(st.lists(among("learning_rate", "wd", "momentum", "lr_scheduler", "lr", "é"), max_size=2))
            kwargs.update({one: draw(argument(one, junk)) for one in names})
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            if draw(st.integers(0, 9)) < (1 if parameter.default is parameter.empty else 6):
                by_place = False
            elif by_place and parameter.kind is not parameter.KEYWORD_ONLY:
                args.append(draw(argument(name, junk)))
            else:
                kwargs[name] = draw(argument(name, junk))
    return args, kwargs


# --- calls

CLASSES = [getattr(optimizers, name) for name in optimizers.__all__ if isinstance(getattr(optimizers, name), type)]
ON_STORES = (LocalUpdates, Snapshots)
CALLABLES: dict[str, Callable[..., Any]] = {
    **{cls.__name__: cls for cls in CLASSES if issubclass(cls, (optimizers.Optimizer, optimizers.Scheduler))},
    **{f"optimizers.{name}": getattr(optimizers, name) for name in ("create", "register")},
    **{one.__name__: one for one in (Config, Parameter, RowSparse, Trainer, *ON_STORES, SplitSampler)},
    **{"kv.create": kv.create, "split_data": split_data, "split_and_load": split_and_load},
    **{"Config.from_environ": Config.from_environ, "SplitSampler.for_store": SplitSampler.for_store},
}
KINDS = (
    *(KVStore, Request, Trainer, *ON_STORES, RowSparse, Parameter, SplitSampler, Config),
    *(optimizers.Optimizer, optimizers.Scheduler),
)
ATTRIBUTES = {
    Trainer: ("steps", "examples"),
    Parameter: ("data", "grad"),
    optimizers.Optimizer: ("learning_rate", "wd", "lr_mult", "lr_scheduler", "rescale_grad", "clip_gradient"),
}
# What a store and its optimizers call, with what they have made; `close` and `request_stop` would end the play.
NOT_OF_USERS = ("close", "request_stop", "formula", "prepared", "complete_arrays", "completed", "check_update")
NOT_OF_USERS += ("update_sum",)
Call = tuple[type | None, str, list[Any], dict[str, Any]]


def methods_of(owner: type) -> list[str]:
    found = [name for name, _ in inspect.getmembers(owner, inspect.isfunction) if not name.startswith("_")]
    return [name for name in found if name not in NOT_OF_USERS]


def method(owner: type) -> st.SearchStrategy[Call]:
    """A call of one of its methods, as a caller sees it, or an attribute that is set."""
    calls = st.sampled_from(methods_of(owner)).flatmap(
        lambda name: arguments(getattr(owner, name).__get__(object())).map(lambda given: (owner, name, *given))
    )
    if owner not in ATTRIBUTES:
        return calls
    return calls | st.sampled_from(ATTRIBUTES[owner]).flatmap(
        lambda name: argument(name, 2).map(lambda value: (owner, f"{name} =", [value], {}))
    )


def made(names: Any) -> st.SearchStrategy[Call]:
    return st.sampled_from(sorted(names)).flatmap(
        lambda name: arguments(CALLABLES[name]).map(lambda given: (None, name, *given))
    )


def outcome(what: str, call: Callable[[], Any]) -> tuple[str, Any]:
    """'ok' and the result, or the error's name and text."""
    try:
        return "ok", call()
    except Exception as error:
        text = str(error)
        # Ids of rows are the only places that users name.
        of_its_kind = isinstance(error, ALLOWED) or (isinstance(error, IndexError) and ": row " in text)
        if not of_its_kind or isinstance(error, StallError) or not 0 < len(text) <= LONGEST_TEXT:
            raise AssertionError(f"{what}: {type(error).__name__} of {len(text)} characters: {text[:300]}") from error
        return type(error).__name__, text


def fresh(value: Any) -> Any:
    """Each worker has arguments of its own, as far as they can be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def play(calls: list[Call], store: KVStore | None = None) -> list[str]:
    """Make the calls; a method is one of the last object of its kind that an earlier call has made."""
    ends, kept = [], dict[type, Any]({KVStore: store})
    for owner, name, *values in calls:
        args, kwargs = map(fresh, values)
        target = kept.get(owner) if owner else None
        if owner and target is None:
            continue
        if store is not None and name in ("Trainer", "LocalUpdates", "Snapshots"):
            args, kwargs = [], {**kwargs, "kvstore" if name == "Trainer" else "store": store}
        if store is not None and name == "set_optimizer":  # its own exceptions end the job, whatever they are
            args = [one for one in (*args, *kwargs.values()) if not callable(one) or one is subtract][:1]
            kwargs = {}
        what = f"{name}({', '.join([*map(shown, args), *(f'{key}={shown(one)}' for key, one in kwargs.items())])})"
        if isinstance(target, SplitSampler) and target.length > 10**6:
            continue  # it would take too long
        if name.endswith(" ="):
            end, result = outcome(what, lambda: setattr(target, name[:-2], args[0]))  # noqa: B023 - at once
        else:
            function = getattr(target, name) if owner else CALLABLES[name]
            end, result = outcome(what, lambda: function(*args, **kwargs))  # noqa: B023 - at once
        ends.append(end)
        if isinstance(result, KVStore):
            result.close()
        else:
            kept.update({kind: result for kind in KINDS if isinstance(result, kind)})
    return ends


@pytest.fixture(autouse=True)
def a_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """To write into; and no thread may die."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe")
    monkeypatch.setattr(optimizers, "_registry", dict(optimizers._registry))
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert died == []
    assert pathlib.Path("pipe").is_fifo()


def test_public_names_are_all_called() -> None:
    """What is public and can be called is in one of the tables, or stands here."""
    errors = {name for name, one in vars(mpikv).items() if isinstance(one, type) and issubclass(one, Exception)}
    known = {name.rpartition(".")[2] for name in CALLABLES} | {"KVStore"}
    assert set(mpikv.__all__) - errors - {"data", "errors", "kv", "optimizers", "__version__"} <= known
    assert set(optimizers.__all__) - known - {"Array", "Scalar", "flag", "number"} == {"Step", "names"}


settled = settings(
    suppress_health_check=list(HealthCheck), deadline=None, max_examples=grids.examples(75), derandomize=True
)


@pytest.mark.filterwarnings("ignore")  # NumPy warns of some of these arrays
@settled
@given(st.lists(st.one_of(*[made(CALLABLES)] * 8, *map(method, KINDS[2:])), min_size=10, max_size=25))
def test_without_a_store(calls: list[Call]) -> None:
    play(calls)


MODES = (Mode("local", 1), Mode("dist_sync", 2), Mode("dist_sync", 2, 1, memory="off"), Mode("dist_async", 2, 0))
OF_STORE = st.one_of(
    *[method(KVStore)] * 5,
    method(Request),
    made(["Trainer", "LocalUpdates", "Snapshots"]),
    method(Trainer),
    method(LocalUpdates),
    method(Snapshots),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@settings(settled, max_examples=10)
@given(calls=st.lists(OF_STORE, min_size=10, max_size=25))
def test_a_store(mode: Mode, calls: list[Call]) -> None:
    """Every method, on all workers at once; correct calls afterwards do what they should."""

    def body(store: KVStore) -> list[str]:
        store.init(["w", "v"], [np.zeros(2, np.float32)] * 2)
        ends = play(calls, store)
        store.wait_all()
        store.set_optimizer("test")
        store.init("last", np.arange(3.0))
        store.push("last", np.ones(3))
        store.barrier()
        store.pushpull("last", np.full(3, 2.0), out=np.empty(3))
        store.barrier()
        assert store.pull("last").tolist() == (np.arange(3) + 3 * store.num_workers).tolist()
        store.barrier()
        return ends

    ends = mode.run(body)
    assert ends == [ends[0]] * len(ends)
