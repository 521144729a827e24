"""Collective calls without keys: against NumPy, in every mode, with arguments that differ."""

from __future__ import annotations

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from store_modes import DTYPES, Mode, mode_id

from mpikv import kv, optimizers
from mpikv.errors import ConfigError, ShapeMismatch, UnsupportedError
from mpikv.groups import keyless
from mpikv.groups.keyless import CollectiveCalls, size_class

MODES = (
    Mode("local", 1),
    Mode("dist_sync", 1),
    Mode("dist_sync", 3),
    Mode("dist_sync", 3, memory="off"),
    Mode("dist_sync", 2, 2),
)
THREE = Mode("dist_sync", 3)


def _arrays(rank: int) -> list[Any]:
    """One of each dtype and of several shapes, small whole numbers, so that every sum is exact."""
    shapes = [(), (3,), (0, 2), (2, 3, 4), (100,), (7, 1), (5,), (2, 2)]
    return [
        (np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape) % 3 + rank + 1).astype(dtype)
        for shape, dtype in zip(shapes, DTYPES, strict=True)
    ]


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_every_op_and_dtype(mode: Mode) -> None:
    given = [_arrays(rank) for rank in range(mode.workers)]
    floating = [i for i, array in enumerate(given[0]) if array.dtype.kind not in "iu"]

    def body(store: Any) -> None:
        calls, mine = CollectiveCalls(store), given[store.rank]
        for op, ufunc in (("sum", np.add), ("min", np.minimum), ("max", np.maximum), ("prod", np.multiply)):
            found = calls.allreduce(mine, op)
            for i, result in enumerate(found):
                expected = reduce(ufunc, [arrays[i].astype(np.float64) for arrays in given])
                assert result.dtype == mine[i].dtype
                np.testing.assert_array_equal(result.astype(np.float64), expected, strict=False)
                assert result.shape == mine[i].shape
        for i, result in zip(floating, calls.allreduce([mine[i] for i in floating], "mean"), strict=True):
            expected = sum(arrays[i].astype(np.float64) for arrays in given) / mode.workers
            np.testing.assert_allclose(result.astype(np.float64), expected, rtol=1e-2)
        for arrays, again in zip(given[store.rank], _arrays(store.rank), strict=True):
            np.testing.assert_array_equal(arrays, again)  # the caller's are as they were

    mode.run(body)


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_broadcast_is_exact_for_every_dtype_and_root(mode: Mode) -> None:
    def body(store: Any) -> None:
        calls = CollectiveCalls(store)
        for root in range(mode.workers):
            special = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)
            mine = [special * 1, np.array([True, False]), np.array([1 + 2j]), np.arange(3)[::-1], *_arrays(root)]
            if store.rank != root:
                mine = [np.full_like(array, 1) for array in mine]
            found = calls.broadcast(mine, root, name="all")
            expected = [special, np.array([True, False]), np.array([1 + 2j]), np.arange(3)[::-1], *_arrays(root)]
            for one, other in zip(found, expected, strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert one.tobytes() == np.ascontiguousarray(other).tobytes()
        assert calls.broadcast([]) == []

    mode.run(body)


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_allgather_of_different_lengths(mode: Mode) -> None:
    def body(store: Any) -> None:
        calls = CollectiveCalls(store)
        for dtype, rest in (("float32", ()), ("int64", (2,)), ("bool", (3, 2)), ("float32", (0,))):
            pieces = [np.full((2 * rank, *rest), rank).astype(dtype) for rank in range(mode.workers)]
            found = calls.allgather(pieces[store.rank])
            np.testing.assert_array_equal(found, np.concatenate(pieces))
            assert found.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(
            calls.allgather(np.full((1, 1), store.rank, ml_dtypes.bfloat16)).reshape(-1), np.arange(mode.workers)
        )

    mode.run(body)


def test_long_values_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyless, "PIECE_BYTES", 256)

    def body(store: Any) -> None:
        calls, n = CollectiveCalls(store), 1001
        (found,) = calls.allreduce([np.arange(n, dtype=np.float64)])
        np.testing.assert_array_equal(found, 3 * np.arange(n))

    THREE.run(body)


def test_keys_are_few_and_shared() -> None:
    def body(store: Any) -> None:
        for _ in range(3):
            calls = CollectiveCalls(store)
            for n in range(1, 90):
                calls.allreduce([np.ones(n, np.float32)], name=f"name {n}")
        assert len(store.session.infos) <= 20

    THREE.run(body)


def test_size_classes() -> None:
    for n in range(1, 5000):
        assert n <= size_class(n) <= max(keyless.LEAST_BYTES, 1.25 * n)
        assert size_class(n) % 8 == 0
        assert size_class(size_class(n)) == size_class(n)
    assert size_class(keyless.PIECE_BYTES) == keyless.PIECE_BYTES


@pytest.mark.parametrize("mode", [THREE, Mode("dist_sync", 2, 1)], ids=mode_id)
def test_what_differs_is_an_error_on_every_worker(mode: Mode) -> None:
    differing = [
        (lambda calls, rank: calls.allreduce([np.ones(2 + (rank == 1))]), r"float64 \(3,\)"),
        (lambda calls, rank: calls.allreduce([np.ones(2, np.int32 if rank == 1 else np.int64)]), "int32"),
        (lambda calls, rank: calls.allreduce([np.ones(2)], "min" if rank == 1 else "max"), "min"),
        (lambda calls, rank: calls.allreduce([np.ones(2)] * (1 + (rank == 1))), "allreduce"),
        (lambda calls, rank: calls.broadcast([np.ones(2)], root=int(rank == 1)), "root 1"),
        (lambda calls, rank: calls.broadcast([np.ones(2)]) if rank else calls.allgather(np.ones(2)), "allgather"),
        (lambda calls, rank: calls.allgather(np.ones((1, 2 + rank))), "any, 3"),
        (lambda calls, rank: calls.allreduce([np.ones(2)], name="ab"[rank == 1]), "'b'"),
    ]

    def body(store: Any) -> None:
        calls = CollectiveCalls(store)
        for call, text in differing:
            with pytest.raises(ShapeMismatch, match=text):
                call(calls, store.rank)
            assert calls.allreduce([np.ones(1)])[0] == mode.workers  # nothing is left over
        with pytest.raises(ConfigError, match=r"the model: .* worker 0.*: b; worker 1: c"):
            calls.agree(["a", "bc"[store.rank == 1]], "the model")
        calls.agree(["a"], "the model")

    mode.run(body)


def test_bad_arguments() -> None:
    with kv.create("local") as store:
        calls = CollectiveCalls(store)
        for call, error in (
            (lambda: calls.allreduce([np.ones(1)], "median"), ValueError),
            (lambda: calls.allreduce(np.ones(1)), TypeError),
            (lambda: calls.allreduce([[1.0]]), TypeError),
            (lambda: calls.allreduce([np.array(["a"], object)]), TypeError),
            (lambda: calls.allreduce([np.array([True])]), UnsupportedError),
            (lambda: calls.allreduce([np.array([1])], "mean"), UnsupportedError),
            (lambda: calls.broadcast([np.ones(1)], root=1), ValueError),
            (lambda: calls.broadcast([np.ones(1)], root=-1), ValueError),
            (lambda: calls.broadcast([np.ones(1)], root="0"), TypeError),
            (lambda: calls.allgather(np.float32(1)), ValueError),
            (lambda: calls.allgather(np.ones(())), ValueError),
        ):
            with pytest.raises(error):
                call()
        store.set_optimizer(optimizers.create("sgd"))
        with pytest.raises(UnsupportedError, match="optimizer"):
            calls.allreduce([np.ones(1)])
    with pytest.raises(TypeError, match="KVStore"):
        CollectiveCalls("dist_sync")  # type: ignore[arg-type]


def test_asynchronous_stores_are_refused() -> None:
    def body(store: Any) -> None:
        with pytest.raises(UnsupportedError, match="dist_sync"):
            CollectiveCalls(store)

    Mode("dist_async", 2).run(body)
