"""`store.empty` and `store.zeros`: arguments, agreement of the workers, where the arrays lie, how long they last."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from direct_stores import DTYPES, F32, refused, run

from mpikv import MpikvError, ShapeMismatch, UnsupportedError, optimizers
from mpikv.testing.stores import spawn_stores

WRONG_SHAPES = (3.0, "3", None, True, {}, [(2, 3), 4], [(2, 3), (1.5,)], (2, None), object())


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_wrong_arguments_of_empty(shared_memory):
    def body(store):
        found = [refused(store.empty, shape)[0] for shape in WRONG_SHAPES]
        negative = [refused(store.zeros, shape)[0] for shape in (-1, (2, -1), [(1,), (3, -2)])]
        dtypes = [refused(store.zeros, 3, dtype)[0] for dtype in ("complex64", object, ">f4", "nonsense", "U3")]
        store.barrier()
        return found, negative, dtypes, store.zeros(3).tolist()

    found, negative, dtypes, after = run(2, body, shared_memory=shared_memory)[0]
    assert found == [TypeError] * len(WRONG_SHAPES)
    assert negative == [ValueError] * 3
    assert dtypes == [UnsupportedError] * 5
    assert after == [0.0] * 3


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**62,), (2**70,), 2**50, [(2**50,), (3,)]])
def test_more_memory_than_there_is(shape):
    def body(store):
        kind, text = refused(store.zeros, shape)
        store.barrier()
        x = store.zeros(3)
        x[:] = 1
        store.init("w", x)
        store.pushpull("w", x)
        return kind is not None and issubclass(kind, (MpikvError, ValueError, MemoryError)), text, x.tolist()

    for said, text, after in run(2, body):
        assert said, text
        assert text
        assert after == [2.0] * 3


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@pytest.mark.parametrize(
    ("first", "second"),
    [((3,), (4,)), ((2, 3), (3, 2)), ([(3,), (4,)], [(4,), (3,)]), ((3, "float32"), (3, "int32"))],
)
def test_different_arguments_on_different_workers(first, second, shared_memory):
    def body(store):
        arguments = second if store.rank == 1 else first
        call = store.empty if store.rank else store.zeros
        kind, text = refused(call, *arguments) if isinstance(arguments[-1], str) else refused(call, arguments)
        store.barrier()
        return kind, text, store.zeros(2).tolist()

    results = run(3, body, shared_memory=shared_memory)
    for kind, text, after in results:
        assert kind is ShapeMismatch, (kind, text)
        for worker in (0, 1):
            assert f"worker {worker} on localhost" in text
        assert after == [0.0, 0.0]


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_shapes_and_dtypes_of_empty(shared_memory):
    def body(store):
        found = []
        for shape in (3, (3,), [3], [2, 3], (2, 3), (), 0, (0, 3), np.int64(4), (np.int32(2), 1)):
            for make in (store.empty, store.zeros):
                array = make(shape)
                assert array.dtype == F32
                assert array.flags.c_contiguous
                assert array.flags.writeable
                found.append(array.shape)
        for dtype in DTYPES:
            assert store.zeros(5, dtype).dtype == dtype
            assert store.zeros(5, str(dtype)).dtype == dtype
        several = store.zeros([(2, 3), (0,), (), (7,)], dtype="int64")
        assert type(several) is list
        assert not any(array.any() for array in several)
        found.append([array.shape for array in several])
        return found

    shapes = [(3,), (3,), (3,), (2, 3), (2, 3), (), (0,), (0, 3), (4,), (2, 1)]
    expected = [shape for shape in shapes for _ in range(2)] + [[(2, 3), (0,), (), (7,)]]
    assert run(2, body, shared_memory=shared_memory) == [expected] * 2


def test_arrays_of_one_list_lie_side_by_side_and_do_not_overlap():
    def body(store):
        shapes = [(3,), (5, 5), (), (1000,), (16,), (1,)]
        arrays = store.empty(shapes) + store.empty(shapes, "int8")
        for i, array in enumerate(arrays):
            array[...] = i + 10 * store.rank
        store.barrier()
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        gaps = [
            after - before - array.nbytes
            for half in (slice(0, 6), slice(6, 12))
            for before, after, array in zip(addresses[half], addresses[half][1:], arrays[half], strict=False)
        ]
        return gaps, [np.unique(array).tolist() for array in arrays]

    for rank, (gaps, values) in enumerate(run(3, body)):
        assert all(0 <= gap < 64 for gap in gaps), gaps
        assert values == [[i + 10 * rank] for i in range(12)]


def test_memory_stays_valid_after_close():
    def body(store):
        arrays = store.zeros([(1000,), (7,)])
        store.init(["a", "b"], arrays)
        for array in arrays:
            array[:] = store.rank + 1
        for _ in range(2):
            store.pushpull(["a", "b"], arrays)
        store.close()
        kinds = [
            refused(call)[0]
            for call in (
                lambda: store.pushpull(["a", "b"], arrays),
                lambda: store.empty(3),
                lambda: store.zeros(3),
                lambda: store.pull("a"),
            )
        ]
        return kinds, arrays

    results = run(2, body)
    gc.collect()
    for kinds, arrays in results:
        assert kinds == [MpikvError] * 4
        assert [np.unique(array).tolist() for array in arrays] == [[6.0], [6.0]]
        arrays[0][:] = 5
        assert float(arrays[0].sum()) == 5000.0


@pytest.mark.parametrize("name", ["local", "device", "dist_async"])
def test_empty_in_stores_that_share_nothing(name):
    from mpikv import kv

    def body(store):
        store.set_optimizer(optimizers.create("test"))
        arrays = store.zeros([(3,), (2, 2)])
        store.init(["a", "b"], arrays)
        for array in arrays:
            array[:] = 1
        store.pushpull(["a", "b"], arrays)
        store.barrier()
        return [float(one.flat[0]) for one in store.pull(["a", "b"])]

    if name == "dist_async":
        assert spawn_stores(name, 2, body) == [[2.0, 2.0]] * 2
    else:
        with kv.create(name) as store:
            assert body(store) == [1.0, 1.0]
