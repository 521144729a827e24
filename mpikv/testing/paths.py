"""What a path of gradients has to do, as checks that every path goes through: `check_path(run, workers)`.

Each kind of call is made with keys of each shape and dtype, and what workers get is compared with the reference store,
bit by bit. Values are small whole numbers, so that every sum is exact in every dtype and in any order. The checks need
no test framework.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv import optimizers
from mpikv.arrays.as_numpy import BFLOAT16
from mpikv.errors import KeyNotInitialized, ShapeMismatch
from mpikv.testing.reference import ReferenceStore

# No elements, fewer than workers, not divisible, whole cache lines.
SHAPES = ((), (0,), (2, 0, 3), (1,), (2, 3), (7,), (8,), (5, 7), (37,), (1001,))
LONG = (70_001,)  # longer than a segment of a message
DTYPES = tuple(np.dtype(d) for d in ("f4", "f8", np.float16, BFLOAT16, "i1", "u1", "i4", "i8"))
Key = tuple[Any, tuple[int, ...]]  # dtype and shape
KINDS = ("push and pull", "in place", "elsewhere", "one by one", "two ahead", "lists", "devices")

Run = Callable[[Callable[[Any], Any]], Sequence[Any]]
"""Runs `body(store)` on every worker of a store of its own, and returns what they return, by rank."""


def check_path(
    run: Run, workers: int, *, dtypes: Sequence[Any] = DTYPES, synchronous: bool = True, path: str | None = None
) -> None:
    """Make all checks, with an optimizer and without. path: that all keys must go (None: it is not looked at).

    An asynchronous store has one result where updates commute, as those of the optimizer 'test' do. Raises
    AssertionError.

    >>> from mpikv.testing.paths import check_path
    >>> from mpikv.testing.stores import spawn_stores
    >>> check_path(lambda body: spawn_stores('dist_sync', 2, body), 2, dtypes=['float32'], path='direct')
    """
    for updated in (False, True) if synchronous else (True,):
        _check(run, workers, _keys(dtypes), synchronous=synchronous, updated=updated, path=path)


def _check(run: Run, workers: int, keys: dict[str, Key], *, synchronous: bool, updated: bool, path: str | None) -> None:
    expected = _expected(keys, workers, synchronous=synchronous, updated=updated)
    results = run(lambda store: _every_call(store, keys, updated=updated, path=path))
    _require(len(results) == workers, f"{len(results)} workers, not {workers}")
    for rank, found in enumerate(results):
        _require(found.keys() == expected.keys(), f"worker {rank} has not made every call")
        for (kind, key), value in found.items():
            wanted = expected[kind, key]
            _require(
                (value.dtype, value.shape, value.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()),
                f"worker {rank} of {workers}, key {key!r}, {kind}{', with an optimizer' if updated else ''}: "
                f"{value.ravel()[:8]} instead of {wanted.ravel()[:8]}",
            )


def _keys(dtypes: Sequence[Any]) -> dict[str, Key]:
    keys = {f"{np.dtype(dtype)} {shape}": (np.dtype(dtype), shape) for dtype in dtypes for shape in SHAPES}
    return keys | {"long": (np.dtype(dtypes[0]), LONG)}


def _value(key: Key, rank: int, round_: int) -> Any:
    """At most 3 in each element, so that the sum over 5 workers with 2 devices stays in every dtype."""
    dtype, shape = key
    return ((np.arange(math.prod(shape)) * 3 + rank + 2 * round_) % 4).reshape(shape).astype(dtype)


def _first(key: Key) -> Any:
    dtype, shape = key
    return (np.arange(math.prod(shape)) % 3).reshape(shape).astype(dtype)


def _spaced(array: Any) -> Any:
    """The same values in memory that is not contiguous; arrays without dimensions have no such form."""
    if array.ndim == 0:
        return array
    view = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
    view[...] = array
    return view


def _expected(keys: dict[str, Key], workers: int, *, synchronous: bool, updated: bool) -> dict[tuple[str, str], Any]:
    update = (lambda weight, total: weight + total) if updated else None
    reference = ReferenceStore(workers, synchronous=synchronous, update=update)
    found: dict[tuple[str, str], Any] = {}
    for name, key in keys.items():
        reference.init(name, _first(key))
        found["first", name] = reference.pull(0, name)
        for round_, kind in enumerate(KINDS):
            for ahead in range(2 if kind == "two ahead" else 1):
                for rank in range(workers):
                    value = _value(key, rank, round_ + ahead)
                    reference.push(rank, name, [value, value] if kind == "devices" else [value])
            found[kind, name] = reference.pull(0, name)
    return found


def _every_call(store: Any, keys: dict[str, Key], *, updated: bool, path: str | None) -> dict[tuple[str, str], Any]:
    names, found = [*keys], dict[tuple[str, str], Any]()
    if updated:
        store.set_optimizer(optimizers.create("test"))
    store.init(names, [_first(key) if store.rank == 0 else np.zeros(key[1], key[0]) for key in keys.values()])
    if path is not None and (ring := getattr(store.strategy, "ring", None)) is not None:
        paths = {queue.info.key: queue.placement.path for queue in ring.all()}
        _require(set(paths.values()) == {path}, f"keys go {paths}, not {path!r}")
    found |= {("first", name): value for name, value in zip(names, store.pull(names), strict=True)}
    store.barrier()  # nobody pushes before all have pulled
    order = names[:]
    random.Random(store.rank).shuffle(order)  # each worker has an order of its own
    for round_, kind in enumerate(KINDS):
        if kind == "in place":
            _check_refused(store, names[-1])
        values = {name: _value(key, store.rank, round_) for name, key in keys.items()}
        outs = {name: np.full_like(value, 99) for name, value in values.items()}
        if kind == "push and pull":
            for name in order:
                store.push(name, values[name], priority=store.rank - len(name))
                values[name][...] = 7  # it is the caller's again
        elif kind == "in place":
            for request in [store.pushpull_async(name, values[name], priority=len(name)) for name in order]:
                request.wait()
            outs = values
        elif kind == "elsewhere":
            for request in [store.pushpull_async(name, values[name], outs[name]) for name in order]:
                request.wait()
        elif kind == "one by one":
            for name in names:  # blocking calls, in the same order, with arrays that are not contiguous
                outs[name] = _spaced(outs[name])
                store.pushpull(name, _spaced(values[name]), outs[name])
        elif kind == "two ahead":
            store.push(names, [*values.values()])
            store.push(names, [_value(key, store.rank, round_ + 1) for key in keys.values()])
        elif kind == "lists":
            store.pushpull(names, [*values.values()])
            outs = values
        else:
            store.pushpull(names, [[value, value.copy()] for value in values.values()], [*outs.values()])
        if not store.session.synchronous:
            store.barrier()  # nobody pulls before all have pushed
        if kind in {"push and pull", "two ahead"} or not store.session.synchronous:
            store.pull(order, [outs[name] for name in order])
        found |= {(kind, name): out.copy() for name, out in outs.items()}
        store.barrier()  # nor pushes again before all have
    return found


def _check_refused(store: Any, name: str) -> None:
    """A call that cannot be sends nothing: the rounds that follow are as if it had not been made."""
    for wrong, value, error in ((name, np.ones((3, 3)), ShapeMismatch), ("none such", np.ones(3), KeyNotInitialized)):
        for call in (store.push, store.pushpull, store.pushpull_async):
            try:
                call(wrong, value)
            except error:
                continue
            raise AssertionError(f"{call.__name__} of key {wrong!r} with {value.dtype} {value.shape} was not refused")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)
