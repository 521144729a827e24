"""Every mode against the reference store: dtypes, shapes, views, several devices, several rounds, exact equality."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from store_modes import ASYNC, BOUND, DTYPES, FEW_ON_DEVICE, SYNC, Mode, mode_id

from mpikv import optimizers
from mpikv.testing.reference import ReferenceStore

SHAPES = ((), (0,), (2, 0, 3), (1,), (BOUND - 1,), (BOUND,), (2, 3), (5, 7), (37,))
ROUNDS = 2
DEVICES = 2


def _key(dtype, shape):
    return f"{dtype}{list(shape)}"


GRID = [(_key(dtype, shape), dtype, shape) for dtype in DTYPES for shape in SHAPES]
# A quarter of them: with every dtype and every shape. A mode has one part in every run, and all of them with --full.
PARTS = 4
PART = pytest.mark.parametrize("part", range(PARTS))


def _part(part):
    return [one for i, one in enumerate(GRID) if (i // len(SHAPES) + i % len(SHAPES)) % PARTS == part]


def _initial(dtype, shape):
    return (np.arange(np.prod(shape, dtype=int)) % 4).reshape(shape).astype(dtype)


@functools.cache
def _gradient(dtype, shape, worker, round_, device):
    """Small integers, so that every sum is exact in every dtype; all five workers' stay below int8's limit."""
    n = int(np.prod(shape, dtype=int))
    gradient = ((np.arange(n) * 3 + worker + 2 * round_ + device) % 4).reshape(shape).astype(dtype)
    gradient.flags.writeable = False
    return gradient


@functools.cache
def _expected(workers, *, synchronous, growing):
    """What is pulled in each round. growing: every update adds the sum to the value."""
    update = (lambda weight, total: weight + total) if growing else None
    store = ReferenceStore(workers, synchronous=synchronous, update=update)
    pulls: dict[tuple[str, int], np.ndarray] = {}
    for key, dtype, shape in GRID:
        store.init(key, _initial(dtype, shape))
        for round_ in range(ROUNDS):
            for worker in range(workers):
                store.push(worker, key, [_gradient(dtype, shape, worker, round_, d) for d in range(DEVICES)])
            pulls[key, round_] = store.pull(0, key)
    return pulls


def _strided(array):
    """The same values in memory that is not contiguous; 0-dimensional arrays have no such form."""
    if array.ndim == 0:
        return array
    spaced = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    view = spaced[..., ::2]
    view[...] = array
    return view


def _body(mode, optimizer, form, grid=GRID):
    def body(store):
        pulls = {}
        if optimizer is not None:
            store.set_optimizer(optimizer())
        keys = [key for key, _, _ in grid]
        if form == "lists":
            store.init(keys, [_initial(dtype, shape) for _, dtype, shape in grid])
        else:
            for key, dtype, shape in grid:
                store.init(key, _initial(dtype, shape) if store.rank == 0 else np.zeros(shape, dtype))
        for round_ in range(ROUNDS):
            values = [
                [_strided(_gradient(dtype, shape, store.rank, round_, d)) for d in range(DEVICES)]
                for _, dtype, shape in grid
            ]
            outs = [np.full(shape, 99, dtype) for _, dtype, shape in grid]
            if form == "lists":
                store.push(keys, values)
                if not mode.synchronous:
                    store.barrier()
                store.pull(keys, outs)
            elif form == "pushpull":
                outs = [_strided(out) for out in outs]
                store.pushpull(keys, values, outs)
            else:
                outs = [_strided(out) for out in outs]
                for key, value in zip(keys, values, strict=True):
                    store.push(key, value)
                for key, out in zip(keys, outs, strict=True):
                    store.pull(key, out)
            store.barrier()  # asynchronous: nobody pushes the next round before all have pulled this one
            pulls.update({(key, round_): np.array(out) for key, out in zip(keys, outs, strict=True)})
        return pulls

    return body


def _compare(mode, results, grid=GRID, *, growing=False):
    expected = _expected(mode.workers, synchronous=mode.synchronous, growing=growing)
    assert len(results) == mode.workers
    for worker, pulls in enumerate(results):
        assert len(pulls) == ROUNDS * len(grid)
        for (key, round_), found in pulls.items():
            value = expected[key, round_]
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert found.tobytes() == value.tobytes(), f"worker {worker}, key {key}, round {round_}"


# The forms share all code below the store's face: one of them runs through every mode.
CASES = [(mode, "lists") for mode in (*SYNC, *FEW_ON_DEVICE)] + [
    (mode, form) for mode in SYNC[::4] for form in ("one_by_one", "pushpull")
]


@pytest.mark.grid
@PART
@pytest.mark.parametrize(("mode", "form"), CASES, ids=[f"{mode_id(mode)}-{form}" for mode, form in CASES])
def test_sum_is_that_of_the_reference(mode, form, part):
    _compare(mode, mode.run(_body(mode, None, form, _part(part))), _part(part))


@pytest.mark.grid
@PART
@pytest.mark.parametrize("mode", [*SYNC[::5], *ASYNC], ids=mode_id)
def test_growing_sum_is_that_of_the_reference(mode, part):
    """With the optimizer 'test' all updates commute on integers, so that asynchronous stores have one result too."""
    body = _body(mode, lambda: optimizers.create("test"), "lists", _part(part))
    _compare(mode, mode.run(body), _part(part), growing=True)


@pytest.mark.parametrize(
    "mode",
    [Mode("dist_sync_device", 2), Mode("dist_device_sync", 2, 1), Mode("dist", 2), Mode("DIST_SYNC", 2, 1)],
    ids=mode_id,
)
def test_other_names_of_the_synchronous_store(mode):
    mode = mode._replace(name=mode.name.lower())
    _compare(mode, mode.run(_body(mode, None, "lists")))


@pytest.mark.parametrize("progress", ["thread", "calls"])
@pytest.mark.parametrize("mode", [Mode("dist_sync", 3), Mode("dist_sync", 2, 2), Mode("dist_async", 2)], ids=mode_id)
def test_with_and_without_a_progress_thread(mode, progress):
    body = _body(mode, lambda: optimizers.create("test"), "lists")
    _compare(mode, mode.run(body, progress=progress), growing=True)
