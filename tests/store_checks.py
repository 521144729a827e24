"""What a store of any mode must do: one body of checks, on thread ranks and under mpirun; each has keys of its own.

The values of every kind of call, dtype and shape are in `mpikv.testing.paths`.
"""

from __future__ import annotations

import copy
import functools
import pickle
import time
from typing import Any

import numpy as np
import pytest
from adasum_reference import close
from foreign_arrays import ForeignArray, ForeignDevice, Tensor
from on_workers import full, uniform
from store_modes import DTYPES, Mode

from mpikv import (
    KeyExists,
    KeyNotInitialized,
    KVStore,
    MpikvError,
    RowSparse,
    ShapeMismatch,
    UnsupportedError,
    optimizers,
)
from mpikv.calls.request import Request

LARGE = 5000  # float32: above the thread transport's eager limit, so that a message is read only when received
OPS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


# --- without an optimizer: sums


def forms_of_push_and_pull(store, mode):
    W = mode.workers
    store.init("a", np.zeros((2, 3), np.float32))
    store.init(["b", "c"], [ones(4), ones(2)])
    store.init(("d",), (ones(1),))

    def first(*keys):
        return [store.pull(key).flat[0] / W for key in keys]

    store.push("a", ones(2, 3))
    assert first("a") == [1]
    store.push("a", [ones(2, 3), 2 * ones(2, 3)])  # of devices
    assert first("a") == [3]
    store.push(["a", "b"], [ones(2, 3), [ones(4), ones(4)]])
    assert first("a", "b") == [1, 2]
    store.push(["b", "a", "b", "b"], [ones(4), ones(2, 3), [ones(4), 5 * ones(4)], ones(4)])  # one key again and again
    assert first("b", "a") == [8, 1]
    for call in (store.push, store.pull, store.pushpull, store.init):
        call([], [])
    assert store.pull([]) == []
    out = [np.zeros(4), np.zeros(4, np.float16)]
    store.pull("b", out)
    store.pull(["b", "b"], repeated := [np.zeros(4), [np.zeros(4), np.zeros(4, np.int32)]])
    assert [array[3] / W for array in (*out, *repeated[1])] == [8] * 4
    assert [array.shape for array in store.pull(["a", "c", "a"])] == [(2, 3), (2,), (2, 3)]
    first_array, second = store.pull("b"), store.pull("b")
    first_array[:] = 7  # it is the caller's own
    assert second.tolist() == store.pull("b").tolist() == [8.0 * W] * 4


def arrays_of_other_libraries(store, mode):
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        return  # an older NumPy takes DLPack for read-only
    device, total = ForeignDevice(), 4 * mode.workers
    store.init("foreign", device.asarray(ones(2, 3)))
    store.init("scalar", Tensor(ones()))
    target = device.asarray(np.zeros((2, 3), np.float64))
    store.push("foreign", [device.asarray(ones(2, 3)), Tensor(2 * ones(2, 3)), ones(2, 3)])
    store.pull("foreign", [target, tensor := Tensor(np.zeros((2, 3), np.float32))])
    scalar = device.asarray(np.float32(0))
    store.push("scalar", np.float32(4))
    store.pull("scalar", scalar)
    assert (target.memory[1, 2], tensor.memory[1, 2], scalar.memory[()]) == (total, total, total)


def subclasses_of_ndarray(store, mode):
    store.init("matrix", np.zeros((3, 4), np.float32))
    matrix, masked = np.matrix(np.zeros((3, 4), np.float32)), np.ma.masked_array(np.zeros((3, 4), np.float32))
    store.push("matrix", np.matrix(np.ones((3, 4), np.float32)))
    store.pull("matrix", [masked, matrix])
    for value in (matrix, masked):
        value[...] = 1
        store.pushpull("matrix", value)
    assert uniform(np.asarray(matrix)) == uniform(masked.data) == mode.workers
    assert type(store.pull("matrix")) is np.ndarray


def reductions(store, mode):
    """In every form, against NumPy over all workers' arrays: small whole numbers, exact in every dtype."""
    W, me, n = mode.workers, store.rank, 13
    for dtype in DTYPES[::2]:
        mine, more = (
            [((np.arange(n) * 5 + worker * 7 + add) % 4 + 1).astype(dtype) for worker in range(W)] for add in (0, 2)
        )
        keys = [f"{dtype}", f"{dtype} too"]
        store.init(keys, [np.zeros(n, dtype)] * 2)
        out = np.empty(n, dtype)
        ops = [op for op in OPS if op != "mean" or dtype.kind not in "iu"]
        for op in [*ops, *(["adasum"] if dtype == np.float32 and not mode.servers else [])]:
            value = mine[me].copy()
            assert store.pushpull(keys[0], value, op=op) is None
            check_reduced(value, op, mine)
            check_reduced(store.pull(keys[0]), op, mine)
            if dtype != np.float32:
                continue  # a form does not depend on the dtype
            store.pushpull(keys[0], mine[me], out, op=op)
            check_reduced(out, op, mine)
            store.pushpull(keys, both := [mine[me].copy(), more[me].copy()], op=op)
            check_reduced(both[1], op, more)
            store.pushpull_async(keys[0], more[me], out, op=op).wait()
            check_reduced(out, op, more)
            store.pushpull(keys[0], [mine[me], more[me]], out, op=op)  # of devices
            check_reduced(out, op, np.add(mine, more) if op == "adasum" else [*mine, *more], W)
        store.pushpull(keys[0], mine[me], out)  # known by its arrays, and the op is another one
        check_reduced(out, "sum", mine)
    for call in (store.pushpull, store.pushpull_async):
        for wrong in ("average", "SUM", None, 5, np.add, ["sum"]):
            with pytest.raises(ValueError, match="is no reduction; there are 'sum', 'mean', 'min', 'max', 'prod'"):
                call("float32", ones(n), op=wrong)
        with pytest.raises(UnsupportedError, match="op='mean' of key 'int32': int32 holds whole numbers"):
            call(["float32", "int32"], [ones(n), ones(n, dtype=np.int32)], op="mean")


def check_reduced(found: np.ndarray, op: str, arrays: Any, workers: int = 0) -> None:
    """In float64 or int64, which hold all of this exactly, and then in the dtype. workers: if there are more arrays."""
    if op == "adasum":
        close(found, arrays)
        return
    dtype = arrays[0].dtype
    wide = np.int64 if dtype.kind in "iu" else np.float64
    total = functools.reduce(OPS[op], [array.astype(wide) for array in arrays])
    if op == "mean":
        sums = np.float32 if dtype.itemsize <= 4 else np.float64
        total = total.astype(sums) / sums(workers or len(arrays))
    assert (found.dtype, found.tobytes()) == (dtype, total.astype(dtype).tobytes()), (found, total)


def a_float16_sum_is_made_in_float32(store, mode):
    """2048 + 1 + 1 is 2048 when added in float16. A NaN of one worker is one on all."""
    store.init("half", np.zeros(3, np.float16))
    store.push("half", np.array([2048 if store.rank == 0 else 1, 0, np.nan if store.rank == 0 else 1], np.float16))
    found = store.pull("half")
    assert found[0] == np.float16(2048 + mode.workers - 1)
    assert np.isnan(found[2])


# --- with an optimizer that adds


def broadcast(store, mode):
    out, second = np.zeros(3, np.float32), np.zeros(3, np.float16)
    store.broadcast("broad", np.full(3, store.rank + 5, np.float32), [out, second])
    store.broadcast(["broad2", "broad3"], [ones(1) * store.rank, ones(2)], [out[:1], second[1:]])
    assert (out.tolist(), second.tolist()) == ([0, 5, 5], [5, 1, 1])


def requests(store, mode):
    W = mode.workers
    store.init(["r1", "r2", "r3"], [full(0), full(0), full(0, LARGE)])
    pushed = store.push_async("r1", full(1))
    assert isinstance(pushed, Request)
    assert pushed.wait() is None
    assert pushed.test()
    store.barrier()
    assert store.pull_async("r1").wait().tolist() == [W] * 4
    out = full(9)
    assert store.pull_async("r1", out).wait() is None
    both = store.pushpull_async("r2", full(1))
    deadline = time.monotonic() + 60
    while not both.test():
        assert time.monotonic() < deadline
    assert both.wait(timeout_s=1) is None
    listed = store.pull_async(["r1", "r2"])
    store.wait_all()
    assert listed.test()
    store.barrier()
    assert uniform([out, listed.wait()[0], store.pull("r2")]) == W
    for together, n, key in ((True, LARGE, "r3"), (False, 4, "r2")):
        if not mode.synchronous:
            break  # a result is of the round of the last push before it
        before = uniform(store.pull(key))
        outs, under_way = [full(-1, n) for _ in range(6)], []
        for one in outs:
            if together:
                under_way.append(store.pushpull_async(key, full(1, n), one))
            else:
                store.push(key, full(1, n))
                under_way.append(store.pull_async(key, one))
        for request in reversed(under_way):
            request.wait()
        assert [uniform(one) for one in outs] == [before + W * (i + 1) for i in range(6)]


def orders_of_their_own(store, mode):
    """Keys are initialised and pushed in another order by each worker, and one has lists where others have keys."""
    keys = list("ABCDEFG")
    order = [str(key) for key in np.random.default_rng(100 + store.rank).permutation(keys)]
    for key in order:
        store.init(key, full(ord(key) if store.rank == 0 else -1, LARGE))
        store.push(key, full(1, LARGE))
    store.barrier()
    assert [uniform(store.pull(key)) for key in keys] == [ord(key) + mode.workers for key in keys]
    names = [f"{key} again" for key in order]
    values = [full(ord(key) if store.rank == 0 else 0) for key in order]
    if store.rank == 1:
        for name, value in zip(names, values, strict=True):
            store.init(name, value)
    else:
        cut = 7 if store.rank == 0 else 3
        store.init(names[:cut], values[:cut])
        store.init(names[cut:], values[cut:])
    assert [store.pull(f"{key} again")[0] for key in keys] == [float(ord(key)) for key in keys]


def init_of_what_is_there_or_differs(store, mode):
    first = full(1, 3)
    store.init("second", first)
    first[:] = 9  # it is the caller's again
    for key, value in (("second", full(2, 3)), (["b2", "second"], [full(2, 3)] * 2), ("second", full(2, 4))):
        with pytest.raises(KeyError, match=r"init: key 'second' is there already") as caught:
            store.init(key, value)
        assert isinstance(caught.value, KeyExists)
    with pytest.raises(KeyError):
        store.broadcast("second", full(5, 3), full(6, 3))
    with pytest.raises(KeyNotInitialized):
        store.pull("b2")
    assert store.pull("second").tolist() == [1.0] * 3
    if mode.workers == 1:
        return
    usual, rows = full(0, 3), RowSparse.zeros((3,))
    odd_ones = (
        *((usual, full(0, 2), "float32 (2,)"), (usual, full(0, 3, np.float64), "float64 (3,)")),
        *((usual, ones(3, 1), "float32 (3, 1)"), (usual, rows, "float32 (3,), row-sparse")),
        *((rows, RowSparse.zeros((4,)), "(4,), row-sparse"), (rows, RowSparse.zeros((3,), "float64"), "float64")),
    )
    for i, (usual, odd, text) in enumerate(odd_ones):
        with pytest.raises(ShapeMismatch) as caught:
            store.init(["differs", f"other {i}"], [odd if store.rank == 1 else usual, full(i, 3)])
        for part in ("'differs'", "worker 0 on ", "worker 1 on ", "float32 (3,)", text):
            assert part in str(caught.value)
        with pytest.raises(KeyNotInitialized):
            store.pull("differs")
        assert uniform(store.pull(f"other {i}")) == i
    store.init("differs", full(0, 3))
    told = ""
    for key in ["good", "bad"] if store.rank == 0 else ["bad", "good"]:  # everybody hears of it, if later
        try:
            store.init(key, full(0, 2 + (store.rank == 1 and key == "bad")))
        except ShapeMismatch as error:
            told = str(error)
    store.push("good", full(1, 2))
    store.barrier()
    if not told:
        with pytest.raises(ShapeMismatch) as caught:
            store.push("bad", full(1, 2))
        told = str(caught.value)
    assert uniform(store.pull("good")) == mode.workers
    for part in ("'bad'", "worker 0 on ", "worker 1 on ", "(2,)", "(3,)"):
        assert part in told


def unknown_keys(store, mode):
    store.init("known", full(0, 2))
    out = full(7, 2)
    for call, values in ((store.push, full(1, 2)), (store.pull, out), (store.pushpull, full(1, 2))):
        with pytest.raises(KeyNotInitialized, match=r"'x'.*worker \d of \d.*; the store holds '") as caught:
            call("x", values)
        assert isinstance(caught.value, KeyError)
        with pytest.raises(KeyNotInitialized, match="'x'"):
            call(["known", "x"], [values, values])
    with pytest.raises(KeyNotInitialized):
        store.pull(["known", "x"])
    store.barrier()
    assert (out.tolist(), store.pull("known").tolist()) == ([7.0] * 2, [0.0] * 2)


def wrong_shapes_and_dtypes(store, mode):
    store.init(["s23", "s4", "s"], [full(0, (2, 3)), full(0, 4), full(0, ())])
    right = full(1, (2, 3))
    for wrong in (full(1, (3, 2)), full(1, 6), full(1, ()), full(1, (2, 3, 1)), full(1, (2, 3), np.float64)):
        for call in (store.push, store.pushpull):
            with pytest.raises(ShapeMismatch, match=r"'s23' is float32 \(2, 3\).*worker \d of \d") as caught:
                call("s23", wrong)
            assert isinstance(caught.value, ValueError)
            with pytest.raises(ShapeMismatch):
                call(["s4", "s23"], [full(1, 4), wrong])
            with pytest.raises(ShapeMismatch):
                call("s23", [right, wrong])
    for wrong in (full(1, (3, 2)), full(1, 6), full(1, ()), [right, full(1, (1, 3))]):
        with pytest.raises(ShapeMismatch, match="'s23'"):
            store.pull("s23", wrong)
        with pytest.raises(ShapeMismatch, match="'s23'"):
            store.pushpull("s23", right, wrong)
    with pytest.raises(ShapeMismatch, match="'s'"):
        store.push("s", full(1, 1))
    store.barrier()
    assert [float(store.pull(key).sum()) for key in ("s23", "s4", "s")] == [0.0, 0.0, 0.0]


def lengths_and_kinds_of_values(store, mode):
    store.init(["l", "m"], [ones(2), ones(2)])
    for call in (store.init, store.push, store.pull, store.pushpull):
        with pytest.raises(ValueError, match="2 keys but 1 values"):
            call(["l", "m"], [ones(2)])
        with pytest.raises(TypeError, match="needs a list of values"):
            call(["l", "m"], ones(2, 2))
        for wrong in (1.0, "text", {"x": 1}, [1.0, 2.0], [ones(2), None]):
            with pytest.raises(TypeError, match=r"not an array|array to write"):
                call("l", wrong)
    for key in ("n", ["n", "n"]):
        with pytest.raises(ValueError, match="initialised with one"):
            store.init(key, [ones(2), ones(2)])
    for dtype in (bool, complex, np.int16, object, ">f4", "S3", "M8[s]"):
        with pytest.raises(UnsupportedError, match="dtype"):
            store.init("n", np.zeros(2, dtype))
    read_only = ones(2)
    read_only.flags.writeable = False
    for call in (store.pull, lambda key, out: store.pushpull(key, ones(2), out)):
        with pytest.raises(UnsupportedError, match="read-only"):
            call("l", read_only)
    for call in (store.pushpull, store.pushpull_async):
        text = "every push by itself" if not mode.synchronous else "op='max' of key 'l': it is updated by an optimizer"
        with pytest.raises(UnsupportedError, match=text):
            call("l", ones(2), op="max")
    store.barrier()
    assert store.pull("l").tolist() == [1.0, 1.0]


def an_array_that_cannot_be_written_harms_only_its_pull(store, mode):
    class Broken(ForeignArray):
        def fails(self, *arguments):
            raise RuntimeError("no memory left")

        set = fails
        if mode.device:  # whose arrays are written where they say that they are
            __cuda_array_interface__ = property(fails)

    store.init("broken", zeros := np.zeros(20, np.float32))
    out = Broken(ForeignDevice(), np.zeros(20, np.float32))
    store.push("broken", zeros + 1)
    if store.rank == 0:
        for call in (lambda: store.pull("broken", out), lambda: store.pull_async("broken", out).wait()):
            with pytest.raises(RuntimeError, match="no memory left"):
                call()
    store.push("broken", zeros + 1)
    store.barrier()
    assert uniform(store.pull("broken")) == 2 * mode.workers


def copies_and_pickles(store, mode):
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy({"model": [one]})):
        with pytest.raises(TypeError, match=rf"worker {store.rank} .* belongs to its process"):
            attempt(store)


def the_end(store, mode):
    """What is under way is finished; every call afterwards says that the store is closed."""
    store.init("end", full(0, LARGE))
    request = store.pushpull_async("end", full(1, LARGE), out := full(-1, LARGE))
    store.close()
    store.close()
    request.wait()
    # An asynchronous pushpull may see any number of the pushes, its own among them.
    assert set(np.unique(out)) <= ({mode.workers} if mode.synchronous else set(range(1, mode.workers + 1)))
    two = full(0, 2)
    for name, *arguments in (
        ("init", "b", two),
        *(("push", "a", two), ("push_async", "a", two), ("pull", "a"), ("pull_async", "a")),
        *(("pushpull", "a", two), ("pushpull_async", "a", two), ("broadcast", "b", two, two), ("row_sparse_pull", "a")),
        *(("barrier",), ("_barrier",), ("wait_all",), ("__enter__",)),
        *(("set_optimizer", "sgd"), ("set_updater", print), ("set_gradient_compression", {"type": "fp16"})),
        *(("save_optimizer_states", "never"), ("load_optimizer_states", "never")),
    ):
        with pytest.raises(MpikvError, match="closed") as caught:
            getattr(store, name)(*arguments)
        assert type(caught.value) is MpikvError, name
    assert (store.num_workers, store.type) == (mode.workers, mode.name)
    assert store.rank in range(mode.workers)


SUMS = (
    forms_of_push_and_pull,
    arrays_of_other_libraries,
    subclasses_of_ndarray,
    reductions,
    a_float16_sum_is_made_in_float32,
)
UPDATES = (
    broadcast,
    requests,
    orders_of_their_own,
    init_of_what_is_there_or_differs,
    unknown_keys,
    wrong_shapes_and_dtypes,
    lengths_and_kinds_of_values,
    an_array_that_cannot_be_written_harms_only_its_pull,
    copies_and_pickles,
    the_end,
)


def every_check(store: KVStore, mode: Mode) -> None:
    for check in SUMS if mode.synchronous else ():
        check(store, mode)
        store.barrier()
    store.set_optimizer(optimizers.create("test"))
    for check in UPDATES:
        check(store, mode)
        if check is not the_end:
            store.barrier()
