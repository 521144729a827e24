"""Calls with arguments that nobody would think of: every public callable, thousands of times, from a seed.

A call may succeed, or raise an error of the kinds in `generated_arguments.ALLOWED` whose text is neither empty nor
long. No thread may die, nothing may hang, the workers of a store must come to the same, and the store must work for
correct calls afterwards.

`MPIKV_TEST_CALLS=20000 MPIKV_TEST_SEED=7 python -m pytest tests/unit/test_generated_calls.py` looks longer.
"""

from __future__ import annotations

import inspect
import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import grids
import numpy as np
import pytest
from generated_arguments import argument, arguments, called, described, outcome, parameters, subtract
from store_modes import Mode, mode_id

import mpikv
from mpikv import Config, KVStore, LocalUpdates, Parameter, RowSparse, SplitSampler, Trainer, kv, optimizers
from mpikv.common.checks import shown
from mpikv.data import read_idx, split_and_load, split_data

CALLS = int(os.environ.get("MPIKV_TEST_CALLS", grids.examples(500)))  # of each kind
SEED = os.environ.get("MPIKV_TEST_SEED", "1")
CHECKED_EVERY = 25  # calls, after which a store has to do correct ones


# --- what is called


METHODS = tuple(
    name
    for name, method in inspect.getmembers(KVStore, inspect.isfunction)
    if not name.startswith("_") and name not in ("close", "request_stop")
)


def use_store(pick: Random, store: KVStore, kept: list[Any]) -> str:
    """One call of a method, or of a Request, a Trainer, ... that an earlier one gave. Alike on all workers."""
    what = pick.random()
    if kept and what < 0.3:
        return use_object(pick, pick.choice(kept))
    if what < 0.33:
        args, kwargs = arguments(pick, Trainer)
        kwargs = {"params": parameters(pick), **{name: value for name, value in kwargs.items() if name != "optimizer"}}
        kwargs |= {"optimizer": pick.choice(["sgd", "adam", optimizers.create("test")]), "kvstore": store}
        end, result = outcome(described("Trainer", args[:0], kwargs), lambda: Trainer(**kwargs))
    elif what < 0.36:
        args, kwargs = arguments(pick, LocalUpdates)
        kwargs |= {"params": parameters(pick), "store": store}
        if pick.random() < 0.5:
            kwargs |= {"every": pick.choice([1, 2, None]), "outer": "mean"}
        end, result = outcome(described("LocalUpdates", args[:0], kwargs), lambda: LocalUpdates(**kwargs))
    else:
        name = pick.choice(METHODS)
        function = getattr(store, name)
        args, kwargs = arguments(pick, function)
        if name == "set_optimizer":  # an optimizer's own exceptions end the job, whatever they are
            args = [one for one in args if not callable(one) or one is subtract][:1]
            kwargs = {name: one for name, one in kwargs.items() if not callable(one)}
        end, result = outcome(described(name, args, kwargs), lambda: function(*args, **kwargs))
    if isinstance(result, (mpikv.Request, Trainer, LocalUpdates)):
        kept.append(result)
        del kept[:-6]
    return end


OBJECTS: dict[type, tuple[str, ...]] = {
    mpikv.Request: ("wait", "test"),
    Trainer: (
        *("step", "step", "push_grad", "wait", "pull_weights", "allreduce_grads", "update", "save", "resume"),
        *("save_states", "load_states", "set_learning_rate", "steps", "examples"),
    ),
    LocalUpdates: ("step", "step", "exchange", "save", "resume", "sync_buffers"),
    RowSparse: ("assign", "to_dense", "__repr__"),
    Parameter: ("data", "grad", "zero_grad", "list_data", "list_grad", "shape"),
    SplitSampler: ("set_epoch", "indices", "__len__", "__iter__", "__repr__"),
    Config: ("with_", "from_environ"),
}
OF_OPTIMIZERS = (
    "init",
    "update",
    "set_attributes",
    "set_lr_mult",
    "set_wd_mult",
    "set_learning_rate",
    "check_state",
    "config",
)


def use_object(pick: Random, made: Any) -> str:
    """One call of a method, or an attribute set."""
    if isinstance(made, optimizers.Optimizer):
        names = (*OF_OPTIMIZERS, *made.fields)
    elif isinstance(made, optimizers.Scheduler):
        names = ("__call__", "config")
    else:
        names = OBJECTS[type(made)]
    name = pick.choice(names)
    if isinstance(made, SplitSampler) and made.length > 10**6 and name in ("indices", "__iter__"):
        return "too long"
    found = getattr(made, name) if name not in ("data", "grad", "steps", "examples", "shape") else None
    if callable(found) and not isinstance(found, optimizers.Scheduler):
        return called(pick, f"{type(made).__name__}.{name}", found)[0]
    if name == "shape":
        return outcome(name, lambda: made.shape)[0]
    value = argument(pick, name, 0.5)
    return outcome(f"{type(made).__name__}.{name} = {shown(value)}", lambda: setattr(made, name, value))[0]


CLASSES = [getattr(optimizers, name) for name in optimizers.__all__ if isinstance(getattr(optimizers, name), type)]
CALLABLES: dict[str, Callable[..., Any]] = {
    **{cls.__name__: cls for cls in CLASSES if issubclass(cls, (optimizers.Optimizer, optimizers.Scheduler))},
    "optimizers.create": optimizers.create,
    "optimizers.from_config": optimizers.from_config,
    "optimizers.register": optimizers.register,
    "kv.create": kv.create,
    "Config": Config,
    "Config.from_environ": Config.from_environ,
    "Parameter": Parameter,
    "RowSparse": RowSparse,
    "Trainer": Trainer,
    "LocalUpdates": LocalUpdates,
    "SplitSampler": SplitSampler,
    "SplitSampler.for_store": SplitSampler.for_store,
    "split_data": split_data,
    "split_and_load": split_and_load,
    "read_idx": read_idx,
}


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


def picks() -> Iterator[tuple[int, Random]]:
    for i in range(CALLS):
        yield i, Random(f"{SEED} {i}")


def test_public_names_are_all_called() -> None:
    """What is public and can be called is in one of the tables, or stands here."""
    errors = {name for name, one in vars(mpikv).items() if isinstance(one, type) and issubclass(one, Exception)}
    made_by_the_store = {"KVStore", "Request"}
    modules = {"data", "errors", "kv", "optimizers", "__version__"}
    known = {name.rpartition(".")[2] for name in CALLABLES}
    assert set(mpikv.__all__) - errors - made_by_the_store - modules <= known
    declarations = {"Array", "Scalar", "field", "flag", "number", "texts"}
    assert set(optimizers.__all__) - known - declarations == {"State", "Step", "names"}


@pytest.mark.filterwarnings("ignore")  # NumPy warns of some of these arrays
def test_without_a_store() -> None:
    """Constructors and functions, and what they made."""
    ends: dict[str, int] = {}
    kept: list[Any] = []
    for _, pick in picks():
        if kept and pick.random() < 0.4:
            use_object(pick, pick.choice(kept))
            continue
        name = pick.choice(list(CALLABLES))
        end, result = called(pick, name, CALLABLES[name])
        ends[end] = ends.get(end, 0) + 1
        if isinstance(result, KVStore):
            result.close()
        elif isinstance(result, (optimizers.Optimizer, optimizers.Scheduler, *OBJECTS)):
            kept.append(result)
            del kept[:-12]
    assert all(ends.get(kind, 0) > CALLS / 100 for kind in ("ok", "TypeError", "ValueError")), ends


MODES = (
    *(Mode("local", 1), Mode("device", 1), Mode("dist_sync", 2), Mode("dist_sync", 2, memory="off")),
    *(Mode("dist_sync", 2, 1), Mode("dist_async", 2, 0), Mode("dist_async", 2, 1, memory="off")),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_a_store(mode: Mode) -> None:
    """Every method, on all workers at once; correct calls in between do what they should."""

    def works(store: KVStore, name: str) -> None:
        store.wait_all()
        store.set_optimizer("test")
        store.init(name, np.arange(3.0))
        store.push(name, np.ones(3))
        store.barrier()
        store.pushpull(name, np.full(3, 2.0), out=np.empty(3))
        store.barrier()
        assert store.pull(name).tolist() == (np.arange(3) + 3 * store.num_workers).tolist()
        store.barrier()

    def body(store: KVStore) -> list[str]:
        ends, kept = [], list[Any]()
        store.init(["w", "v"], [np.zeros(2, np.float32)] * 2)
        for i, pick in picks():
            ends.append(use_store(pick, store, kept))
            if i % CHECKED_EVERY == 0:
                works(store, f"checked {i}")
        works(store, "last")
        return ends

    ends = mode.run(body)
    for i, these in enumerate(itertools.zip_longest(*ends)):
        assert len(set(these)) == 1, (i, these)
    assert len(set(ends[0])) >= 5, set(ends[0])
