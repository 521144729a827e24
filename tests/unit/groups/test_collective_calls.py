"""Collective calls without keys: against NumPy, in every mode, with arguments that differ; made in turn by a thread."""

from __future__ import annotations

import threading
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from on_workers import limit, on
from store_modes import DTYPES, Mode, mode_id

from mpikv import kv, optimizers
from mpikv.calls import keyless
from mpikv.calls.keyless import CollectiveCalls
from mpikv.errors import ConfigError, MpikvError, PeerError, ShapeMismatch, StallError, UnsupportedError
from mpikv.groups.workers import CallsInTurn
from mpikv.session import waits

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
                np.testing.assert_array_equal(result, expected.astype(mine[i].dtype), strict=True)
        for i, result in zip(floating, calls.allreduce([mine[i] for i in floating], "mean"), strict=True):
            expected = sum(arrays[i].astype(np.float64) for arrays in given) / mode.workers
            np.testing.assert_allclose(result.astype(np.float64), expected, rtol=1e-2)
        for arrays, again in zip(given[store.rank], _arrays(store.rank), strict=True):
            np.testing.assert_array_equal(arrays, again)  # the caller's are as they were

    mode.run(body)


@on(*MODES)
def test_broadcast_is_exact_for_every_dtype_and_root(store: Any, W: int) -> None:
    calls = CollectiveCalls(store)
    for root in range(W):
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


@on(*MODES)
def test_allgather_of_different_lengths(store: Any, W: int) -> None:
    calls = CollectiveCalls(store)
    for dtype, rest in (("float32", ()), (ml_dtypes.bfloat16, (2,)), ("bool", (3, 2)), ("float32", (0,))):
        pieces = [np.full((2 * rank, *rest), rank).astype(dtype) for rank in range(W)]
        found = calls.allgather(pieces[store.rank])
        np.testing.assert_array_equal(found, np.concatenate(pieces))
        assert found.dtype == np.dtype(dtype)


@on(*MODES)
def test_long_values_and_no_keys(store: Any, W: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyless, "PIECE_BYTES", 10_000)  # of a broadcast by messages
    calls, values = CollectiveCalls(store), np.arange(200_001, dtype=np.float64)  # longer than the chunks in memory
    (found,) = calls.allreduce([values])
    np.testing.assert_array_equal(found, W * values)
    (found,) = calls.broadcast([values + store.rank], W - 1)
    np.testing.assert_array_equal(found, values + W - 1)
    assert not store.session.infos


@on(THREE, Mode("dist_sync", 2, 1))
def test_what_differs_is_an_error_on_every_worker(store: Any, W: int) -> None:
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
    calls = CollectiveCalls(store)
    for call, text in differing:
        with pytest.raises(ShapeMismatch, match=text):
            call(calls, store.rank)
        assert calls.allreduce([np.ones(1)])[0] == W  # nothing is left over
    with pytest.raises(ConfigError, match=r"the model: .* worker 0.*: b; worker 1: c"):
        calls.agree(["a", "bc"[store.rank == 1]], "the model")
    calls.agree(["a"], "the model")


@on(THREE, Mode("dist_sync", 3, memory="off"), Mode("dist_sync", 2, 1))
def test_what_one_worker_refuses_is_an_error_on_every_worker(store: Any, W: int) -> None:
    """Also as the first of all calls. Who has refused one can make the next one, and all may refuse one."""
    refused = [
        (lambda calls, bad: calls.allreduce([np.ones(2, bool if bad else np.float32)]), UnsupportedError, "allreduce"),
        (lambda calls, bad: calls.broadcast([np.ones(2)], 9 if bad else 0), ValueError, "broadcast"),
    ]
    calls = CollectiveCalls(store)
    for call, error, name in refused:
        if store.rank == 1:
            with pytest.raises(error):
                call(calls, True)
        else:
            with pytest.raises(ShapeMismatch, match=f"worker 1.*: {name}, which it refuses: {error.__name__}: "):
                call(calls, False)
        assert calls.allreduce([np.ones(1)])[0] == W  # nothing is left over
        with pytest.raises(error):
            call(calls, True)
        assert calls.allreduce([np.ones(1)])[0] == W


@pytest.mark.parametrize("mode", MODES[1:], ids=mode_id)
def test_workers_that_have_joined_bring_zeros(mode: Mode) -> None:
    """Worker i makes i calls. They are exact in all dtypes; other calls than allreduces are refused."""
    last = mode.workers - 1

    def body(store: Any) -> None:
        calls = CollectiveCalls(store)
        for call in range(store.rank):
            total, mean, half = calls.allreduce(
                [np.ones(3), np.full((2, 1), 7), np.float16([2])], "sum", f"call {call}"
            )
            there = mode.workers - 1 - call
            assert total.tolist() == [there] * 3
            assert mean.tolist() == [[7 * there]] * 2
            assert half.tolist() == [2 * there]
        if store.rank == last > 0:
            for refused in (lambda: calls.allgather(np.ones(2)), lambda: calls.broadcast([np.ones(1)], last)):
                with pytest.raises(ShapeMismatch, match=r"worker 0.* joined"):
                    refused()
            assert calls.allreduce([np.array([-7])], "mean")[0].item() == -(7 // mode.workers)
            for op in ("min", "max", "prod"):
                values = [np.array([-3]), np.array([-3.5]), np.array([7], np.uint8)]
                assert calls.allreduce(values, op) == values
        assert calls.join() == last
        assert calls.allreduce([np.ones(1)])[0].item() == mode.workers  # and all are there again

    mode.run(body)


@on(*MODES)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_reduce_scatter_is_the_rows_of_an_allreduce(store: Any, W: int, op: str) -> None:
    calls, n = CollectiveCalls(store), W
    for rows in (0, 1, n, 2 * n + 1):
        mine = [(np.arange(rows * 3).reshape(rows, 3) * (store.rank + 1)).astype(dtype) for dtype in DTYPES]
        found = calls.reduce_scatter(mine, op, "rows")
        for one, whole in zip(found, calls.allreduce(mine, op), strict=True):
            np.testing.assert_array_equal(one, np.array_split(whole, n)[store.rank], strict=True)


def test_bad_arguments() -> None:
    with kv.create("local") as store:
        calls = CollectiveCalls(store)
        for call, error in (
            (lambda: calls.allreduce([np.ones(1)], "median"), ValueError),
            (lambda: calls.allreduce(np.ones(1)), TypeError),
            (lambda: calls.allreduce([[1.0]]), TypeError),
            (lambda: calls.allreduce([np.array(["a"], object)]), TypeError),
            (lambda: calls.allreduce([np.array([True])]), UnsupportedError),
            (lambda: calls.reduce_scatter([np.ones(1)], "median"), ValueError),
            (lambda: calls.reduce_scatter([np.ones(())]), ValueError),
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

    def asynchronous(store: Any) -> None:
        with pytest.raises(UnsupportedError, match="dist_sync"):
            CollectiveCalls(store)

    Mode("dist_async", 2).run(asynchronous)


@on(*MODES[2:4], timeout_s=3600)
def test_who_has_closed_is_not_waited_for(store: Any) -> None:
    """However long the time limit is, and `close` says nothing that was said."""
    calls = CollectiveCalls(store)
    calls.allreduce([np.ones(1)])
    if store.rank != 1:
        with pytest.raises(PeerError, match=r"allreduce of .*worker 1 on localhost closed its store"):
            calls.allreduce([np.ones(1)])
        with pytest.raises(MpikvError, match="an earlier collective call of this store has failed"):
            calls.agree(["a"], "the model")
    store.close()
    with pytest.raises(MpikvError, match="allgather on a closed store"):
        calls.allgather(np.ones(1))


@pytest.mark.parametrize("mode", MODES[2:], ids=mode_id)
def test_who_is_missing_is_named(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "ANSWER_S", 60.0)  # however late the answers are
    reported = [threading.Event() for _ in range(mode.workers)]

    def body(store: Any) -> None:
        calls = CollectiveCalls(store)
        calls.agree(["a"], "the model")
        if store.rank == 1:
            assert all(event.wait(60) for event in reported[:1] + reported[2:])
            return
        with (
            limit(store),
            pytest.raises(StallError, match=r"waited 0.2 s in broadcast of .*Not arrived: worker 1 on localhost"),
        ):
            calls.broadcast([np.ones(1)])
        reported[store.rank].set()
        with pytest.raises(PeerError, match="pushed 2 times here and 1 times by worker 1"):
            store.close()

    mode.run(body)


# --- calls that a thread makes one after another


def test_calls_are_made_in_order_and_do_not_block() -> None:
    calls, may_end, order = CallsInTurn(threaded=True), threading.Event(), list[int]()

    def first() -> str:
        assert may_end.wait(60)
        calls.wait()  # within a call there is nothing to wait for
        order.append(1)
        return "one"

    one = calls.begin(first, "name")
    two = calls.begin(lambda: order.append(2))
    with pytest.raises(ValueError, match="'name' is under way"):
        calls.begin(lambda: None, "name")
    assert not one.done()
    may_end.set()
    calls.wait()
    assert (one.result(), order) == ("one", [1, 2])
    assert two.done()
    with pytest.raises(ZeroDivisionError):
        calls.begin(lambda: 1 // 0, "name").result()  # the name is free, as soon as the result is there
    assert [calls.begin(lambda i=i: i, "name").result() for i in range(200)] == list(range(200))


def test_without_threads_the_caller_makes_the_call() -> None:
    calls = CallsInTurn(threaded=False)
    assert calls.begin(threading.get_ident, "name").result() == threading.get_ident()
    assert isinstance(calls.begin(lambda: 1 // 0, "name").exception(), ZeroDivisionError)
