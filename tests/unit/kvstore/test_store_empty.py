"""`store.empty` and `store.zeros`: arguments, agreement of the workers, where the arrays lie, how long they last."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
import pytest
from direct_stores import DTYPES, F32, refused, run
from on_workers import on, uniform
from store_modes import Mode

from mpikv import MpikvError, ShapeMismatch, UnsupportedError, optimizers

WRONG_SHAPES = (3.0, "3", None, True, {}, [(2, 3), 4], [(2, 3), (1.5,)], (2, None), object())
EITHER = (Mode("dist_sync", 2), Mode("dist_sync", 2, memory="off"))  # with and without shared memory


@on(*EITHER)
def test_wrong_arguments_of_empty(store):
    for shape in WRONG_SHAPES:
        assert refused(store.empty, shape)[0] is TypeError
    for shape in (-1, (2, -1), [(1,), (3, -2)]):
        assert refused(store.zeros, shape)[0] is ValueError
    for dtype in ("complex64", object, ">f4", "nonsense", "U3"):
        assert refused(store.zeros, 3, dtype)[0] is UnsupportedError
    store.barrier()
    assert store.zeros(3).tolist() == [0.0] * 3


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**62,), (2**70,), 2**50, [(2**50,), (3,)]])
@on(EITHER[0])
def test_more_memory_than_there_is(store, shape):
    kind, text = refused(store.zeros, shape)
    assert issubclass(kind, (MpikvError, ValueError, MemoryError))
    assert text
    store.barrier()
    x = store.zeros(3)
    x[:] = 1
    store.init("w", x)
    store.pushpull("w", x)
    assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *([[one], [other]] for one, other in [((3,), (4,)), ((2, 3), (3, 2)), ([(3,), (4,)], [(4,), (3,)])]),
        ([3, "float32"], [3, "int32"]),
    ],
)
@on(*EITHER)
def test_different_arguments_on_different_workers(store, first, second):
    kind, text = refused(store.empty, *second) if store.rank == 1 else refused(store.zeros, *first)
    assert kind is ShapeMismatch, (kind, text)
    assert "worker 0 on localhost" in text
    assert "worker 1 on localhost" in text
    store.barrier()
    assert store.zeros(2).tolist() == [0.0, 0.0]


@on(*EITHER)
def test_shapes_and_dtypes_of_empty(store):
    for shape in (3, (3,), [3], [2, 3], (2, 3), (), 0, (0, 3), np.int64(4), (np.int32(2), 1)):
        for make in (store.empty, store.zeros):
            array = make(shape)
            assert array.dtype == F32
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert array.shape == np.zeros(shape).shape
    for dtype in DTYPES:
        assert store.zeros(5, dtype).dtype == dtype
        assert store.zeros(5, str(dtype)).dtype == dtype
    several = store.zeros([(2, 3), (0,), (), (7,)], dtype="int64")
    assert type(several) is list
    assert not any(array.any() for array in several)
    assert [array.shape for array in several] == [(2, 3), (0,), (), (7,)]


@on(Mode("dist_sync", 3))
def test_arrays_of_one_list_lie_side_by_side_and_do_not_overlap(store):
    shapes = [(3,), (5, 5), (), (1000,), (16,), (1,)]
    lists = store.empty(shapes), store.empty(shapes, "int8")
    for i, array in enumerate(lists[0] + lists[1]):
        array[...] = i + 10 * store.rank
    store.barrier()
    assert [uniform(array) for array in lists[0] + lists[1]] == [i + 10 * store.rank for i in range(12)]
    for arrays in lists:
        for one, after in pairwise(arrays):
            begin, end = (array.__array_interface__["data"][0] for array in (one, after))
            assert 0 <= end - begin - one.nbytes < 64


def test_memory_stays_valid_after_close():
    def body(store):
        arrays = store.zeros([(1000,), (7,)])
        store.init(["a", "b"], arrays)
        for array in arrays:
            array[:] = store.rank + 1
        for _ in range(2):
            store.pushpull(["a", "b"], arrays)
        store.close()
        for call, *arguments in ((store.pushpull, ["a", "b"], arrays), (store.empty, 3), (store.zeros, 3)):
            assert refused(call, *arguments)[0] is MpikvError
        return arrays

    results = run(2, body)
    gc.collect()
    for arrays in results:
        assert [uniform(array) for array in arrays] == [6, 6]
        arrays[0][:] = 5
        assert arrays[0].sum() == 5000


@on(Mode("local", 1), Mode("device", 1), Mode("dist_async", 2))
def test_empty_in_stores_that_share_nothing(store, W):
    store.set_optimizer(optimizers.create("test"))
    arrays = store.zeros([(3,), (2, 2)])
    store.init(["a", "b"], arrays)
    for array in arrays:
        array[:] = 1
    store.pushpull(["a", "b"], arrays)
    store.barrier()
    assert [uniform(one) for one in store.pull(["a", "b"])] == [W, W]
