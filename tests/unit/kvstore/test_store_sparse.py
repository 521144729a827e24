"""Row-sparse keys in every mode, beside the reference store, which is dense; and what they cost.

Their bits: test_store_bits.py. Their states: test_store_states.py.
"""

from __future__ import annotations

from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from on_workers import counted, limit, on, uniform
from store_modes import Mode

from mpikv import KeyNotInitialized, RowSparse, ShapeMismatch, StallError, UnsupportedError, kv, optimizers
from mpikv.testing.reference import ReferenceStore

SHAPE = (11, 2)
LOCAL = Mode("local", 1)
WORKERS = tuple(Mode("dist_sync", w) for w in (1, 2, 3, 5))
SERVERS = tuple(
    Mode("dist_sync", w, s, memory=m) for w, s, m in ((1, 1, "off"), (2, 3, "auto"), (3, 2, "long"), (4, 2, "off"))
)
FEW_SYNC = (LOCAL, Mode("dist_sync", 3), Mode("dist_sync", 3, 2, memory="off"))
FEW = (*FEW_SYNC, Mode("dist_async", 2))
each = pytest.mark.parametrize


def ones(*ids, shape=SHAPE, dtype="float32"):
    return RowSparse([*ids], np.ones((len(ids), *shape[1:]), dtype), shape)


def drawn(rng, dtype):
    """The rows of two devices, some of none, some of all, some repeated."""
    ids = [np.empty(0, int), np.arange(SHAPE[0]), rng.integers(0, 11, 4), rng.integers(0, 11, 25)]
    chosen = [ids[rng.integers(4)] for _ in range(2)]
    return [RowSparse(one, rng.integers(-3, 4, (one.size, 2)).astype(dtype), SHAPE) for one in chosen]


@each(("dtype", "update"), [("float32", True), ("float16", False), (ml_dtypes.bfloat16, True), ("int32", False)])
@on(LOCAL, Mode("device", 1), *WORKERS, *SERVERS, Mode("dist_async", 2), Mode("dist_async", 3, 2, memory="off"))
def test_beside_the_reference(store, mode, W, update, dtype):
    """With an optimizer whose updates commute; without one where there may be none, asynchronous stores after all."""

    def change(one, total):
        return (one.astype("float64") + total.astype("float64")).astype(one.dtype)

    update = update or not mode.synchronous
    rng, dense, first = np.random.default_rng(7), np.ones(3, "float32"), np.arange(22).reshape(SHAPE).astype(dtype)
    reference = ReferenceStore(W, update=change if update else None)
    first = first if update else first * 0
    for one, rows in ((store, RowSparse.of(first)), (reference, first)):
        one.init("rows", rows)
        one.init("dense", dense)
    if update:
        store.set_optimizer(optimizers.create("test"))
    for _ in range(4):
        for worker in range(W):
            rows = drawn(rng, dtype)
            reference.push(worker, "rows", [one.to_dense() for one in rows])
            reference.push(worker, "dense", [dense])
            if worker == store.rank:
                store.push(["rows", "dense"], [rows, dense])
        store.barrier() if not mode.synchronous else None
        some = store.row_sparse_pull("rows", row_ids=np.array([9, 2, 2]))
        expected = [reference.pull(0, key) for key in ("dense", "rows")]
        assert (some.indices.tolist(), some.values.tobytes()) == ([2, 9], expected[1][[2, 9]].tobytes())
        for found, wanted in zip(store.pull(["dense", "rows"], ignore_sparse=False), expected, strict=True):
            assert found.tobytes() == wanted.tobytes()
        store.barrier() if not mode.synchronous else None


# --- what it costs


@on(Mode("dist_sync", 2, memory="off"), Mode("dist_sync", 2, 2, memory="off"))
def test_messages_bytes_and_memory_follow_the_rows(store, mode):
    """10 million rows of 64 bytes, 1000 of them used: 640 MB if a message held them all. See test_store_by_key.py."""
    shape, row_bytes = (10_000_000, 16), 64
    mine = np.arange(500) * 20_000 + 7 + store.rank  # as many for either owner
    store.set_optimizer(optimizers.SGD(learning_rate=1.0))
    store.init("rows", RowSparse.zeros(shape))

    def call():
        store.push("rows", ones(*mine, shape=shape))
        store.push("rows", RowSparse.zeros(shape))
        assert uniform(store.row_sparse_pull("rows", row_ids=mine).values) == -1

    messages, control, n_bytes = counted(store, call, "messages_sent", "control_messages_sent", "bytes_sent")
    if mode.servers:
        assert (messages - control, n_bytes < 2 * 500 * row_bytes) == (3 * mode.servers, True)
    held = store.stats().get("row_bytes", 0)
    store.barrier()
    assert mode.servers or 500 * (row_bytes + 16) <= held <= 750 * (row_bytes + 32)


# --- forms of calls


@on(*FEW)
def test_pulls(store):
    first = np.arange(22.0).reshape(SHAPE)
    store.init(["a", "b", "d"], [RowSparse.of(first), RowSparse([3], first[[3]], SHAPE), first])
    a = store.row_sparse_pull("a", row_ids=[])
    assert (a.indices.size, a.to_dense().any()) == (0, False)
    both = store.row_sparse_pull(["a", "b"], row_ids=np.array([[3, 2]]))
    assert [one.to_dense().sum(1).tolist() for one in both][1][2:4] == [0, 13]
    each_own = store.row_sparse_pull(["a", "b"], row_ids=[[1], [0, 3]])
    assert [one.indices.tolist() for one in each_own] == [[1], [0, 3]]
    outs = [RowSparse.zeros(SHAPE, "float32") for _ in range(2)]
    assert store.row_sparse_pull("a", outs, row_ids=[np.array([1]), np.array([4, 4])]) is None
    assert [(one.indices.tolist(), str(one.dtype)) for one in outs] == [([1], "float32"), ([4], "float32")]
    store.row_sparse_pull("a", outs, row_ids=[7])
    assert outs[1].values.tolist() == first[[7]].tolist()
    assert store.pull("a") is None
    assert [one is None for one in store.pull(["a", "d", "b"])] == [True, False, True]
    out = [np.full(SHAPE, 9.0), np.zeros(SHAPE)]
    store.pull(["a", "d"], out)
    assert (out[0][0, 0], out[1].tolist()) == (9, first.tolist())
    store.pull("a", out[0], ignore_sparse=False)
    assert out[0].tolist() == first.tolist()
    store.broadcast("e", RowSparse([3], first[[3]], SHAPE), whole := np.ones(SHAPE))
    assert whole.sum(1).tolist() == [0, 0, 0, 13] + [0] * 7
    assert store.pull_async(["a", "d"]).wait()[0].tolist() == first.tolist()


@on(*FEW)
def test_rows_are_pushed_to_dense_keys_and_pulled_whole(store, mode, W):
    """As in MXNet: a push of rows counts as one of the whole array; a RowSparse is filled, or left alone."""
    first = np.arange(22.0).reshape(SHAPE) + 1
    store.init(["d", "r"], [first, RowSparse([3, 5], first[[3, 5]], SHAPE)])
    outs = [RowSparse([9], np.ones((1, 2)), SHAPE), RowSparse.zeros(SHAPE, "float32"), RowSparse.zeros(SHAPE)]
    assert store.pull(["d", "r"], [outs[:2], outs[2]]) is None
    assert [one.indices.tolist() for one in outs] == [[9], [], []]
    assert store.pull(["d", "r"], [outs[:2], outs[2]], ignore_sparse=False) is None
    assert [one.to_dense().tolist() for one in outs[:2]] == [first.tolist()] * 2
    assert (outs[2].indices.tolist(), outs[1].dtype) == ([3, 5], np.float32)
    if mode.synchronous:
        store.push("d", [RowSparse([1, 3], first[[1, 3]], SHAPE), first])
        store.pull("d", outs[0], ignore_sparse=False)
        expected = first + RowSparse([1, 3], first[[1, 3]], SHAPE).to_dense()
        assert outs[0].to_dense().tolist() == (W * expected).tolist()


ROWS, SHORT = ones(1, dtype="float64"), RowSparse.zeros((3, 2), "float64")
WRONG = [  # the method, its arguments, and the error
    ("row_sparse_pull", ["r"], {"row_ids": [11]}, IndexError, "'r'.*row 11 of an array of 11 rows"),
    ("row_sparse_pull", ["r"], {"row_ids": [-1]}, IndexError, "row -1"),
    ("row_sparse_pull", ["r"], {}, ValueError, "row_ids says"),
    ("row_sparse_pull", ["r"], {"row_ids": [0.5]}, TypeError, "whole numbers"),
    ("row_sparse_pull", ["r", np.zeros(SHAPE)], {"row_ids": [1]}, TypeError, "RowSparse"),
    ("row_sparse_pull", ["r", RowSparse.zeros((3, 2))], {"row_ids": [1]}, ShapeMismatch, "'r'"),
    ("row_sparse_pull", ["d"], {"row_ids": [1]}, UnsupportedError, "dense"),
    ("row_sparse_pull", ["x"], {"row_ids": [1]}, KeyNotInitialized, "'x'"),
    ("row_sparse_pull", [["r"]], {"row_ids": [[1], [2]]}, ValueError, "1 keys but 2"),
    ("row_sparse_pull", [["r", "r"], ROWS], {"row_ids": [1]}, TypeError, "list of out"),
    ("push", ["r", SHORT], {}, ShapeMismatch, r"\(3, 2\)"),
    ("push", ["r", RowSparse.zeros(SHAPE)], {}, ShapeMismatch, "float32"),
    ("push", [["d", "r"], [np.ones(SHAPE), RowSparse.zeros(SHAPE)]], {}, ShapeMismatch, "float32"),
    ("push", ["d", SHORT], {}, ShapeMismatch, r"\(3, 2\)"),
    ("pull", ["d", SHORT], {"ignore_sparse": False}, ShapeMismatch, r"\(3, 2\)"),
    ("pushpull", ["r", ROWS], {}, UnsupportedError, "row-sparse"),
    ("pushpull_async", ["r", ROWS], {}, UnsupportedError, "row-sparse"),
    ("broadcast", ["n", ROWS, ROWS], {}, UnsupportedError, "row-sparse"),
    ("init", ["n", [ROWS, ROWS]], {}, ValueError, "2 arrays"),
]


@on(*FEW)
def test_wrong_calls_say_so_and_send_nothing(store, mode, W):
    store.init(["r", "d"], [RowSparse.zeros(SHAPE, "float64"), np.zeros(SHAPE)])
    store.barrier()
    # Where workers are owners, what they answer to others is counted, too: the lock keeps the engine from that.
    with getattr(store.session, "engine", mock.MagicMock()).lock:
        before = store.stats()
        for name, arguments, named, error, text in WRONG:
            with pytest.raises(error, match=text):
                getattr(store, name)(*arguments, **named)
        assert store.stats() == before
    if mode.synchronous:
        store.push("r", ROWS)
        assert store.pull(["r", "d"], ignore_sparse=False)[0].sum() == 2 * W


@on(*FEW)
def test_optimizers_that_need_all_rows_are_refused(store):
    store.init("r", RowSparse.zeros(SHAPE))
    for optimizer in (optimizers.NAG(), optimizers.SGD(lazy_update=False), optimizers.LAMB()):
        store.set_optimizer(optimizer)
        with pytest.raises(UnsupportedError, match="adagrad, adam, ftrl, sgd, test"):
            store.push("r", RowSparse.zeros(SHAPE))


# --- rounds


@on(Mode("dist_sync", 2), Mode("dist_sync", 2, 2))
@pytest.mark.usefixtures("answers")
def test_a_stall_names_key_round_and_who_is_missing(store, told):
    store.init("rows", RowSparse.zeros(SHAPE))
    if store.rank:
        store.push("rows", RowSparse.zeros(SHAPE))
        with (
            limit(store),
            pytest.raises(StallError, match=r"row_sparse_pull of key 'rows', round 1.*Not arrived: worker 0"),
        ):
            store.row_sparse_pull("rows", row_ids=[0, 5])
        told.set()
    else:
        assert told.wait(60)
        store.push("rows", RowSparse.zeros(SHAPE))
    assert store.row_sparse_pull("rows", row_ids=[5]).values.tolist() == [[0, 0]]


@on(Mode("dist_sync", 3), Mode("dist_sync", 3, 2))
def test_factors_and_changed_attributes_reach_the_owners(store):
    """The learning rate of each round is that of all; rescale_grad counts for the worker that has set it."""
    optimizer = optimizers.SGD(learning_rate=1.0)
    store.init(["dense", "rows"], [np.zeros(6), RowSparse.of(np.zeros(6))])
    store.set_optimizer(optimizer)
    for i in range(3):
        optimizer.learning_rate = 0.5**i
        optimizer.rescale_grad = 1.0 if i == 1 else store.rank + 1.0
        store.push("rows", RowSparse([store.rank, 5], [1.0, 2.0], (6,)))
        store.push("dense", np.ones(6))
    assert store.pull("dense").tolist() == [-(6 + 1.5 + 1.5)] * 6
    rows = [-sum(0.5**i * (1 if i == 1 else r + 1) for i in range(3)) for r in range(3)]
    assert store.pull("rows", ignore_sparse=False).tolist() == [*rows, 0, 0, -2 * (6 + 1.5 + 1.5)]


def test_states_of_a_dense_key_are_no_states_of_a_sparse_one(tmp_path):
    def store_with(value):
        store = kv.create("local")
        store.init("w", value)
        store.set_optimizer("adam")
        store.push("w", value)
        return store

    with store_with(np.ones(SHAPE)) as dense, store_with(RowSparse.of(np.ones(SHAPE))) as sparse:
        dense.save_optimizer_states(tmp_path / "dense")
        sparse.save_optimizer_states(tmp_path / "sparse")
        with pytest.raises(ValueError, match="row-sparse"):
            sparse.load_optimizer_states(tmp_path / "dense")
        with pytest.raises(ValueError, match="rows"):
            dense.load_optimizer_states(tmp_path / "sparse")
