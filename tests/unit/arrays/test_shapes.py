"""What `store.empty` is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv import kv
from mpikv.arrays import shapes
from mpikv.errors import UnsupportedError


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (3, [(3,)]),
        ((), [()]),
        ((2, 3), [(2, 3)]),
        ([2, 3], [(2, 3)]),
        ([(2, 3), (4,), ()], [(2, 3), (4,), ()]),
        ([[2, 3]], [(2, 3)]),
        ([], []),
        (np.int64(5), [(5,)]),
    ],
    ids=str,
)
def test_shapes(asked: object, found: list[tuple[int, ...]]) -> None:
    assert shapes.parse(asked) == found


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        *((one, TypeError, "an int or a tuple of ints") for one in ("a", 2.0, None, True, (2, "3"), [(2,), 3], {3})),
        *((one, ValueError, "no negative length") for one in (-1, (2, -3), [(1,), (-1,)])),
    ],
    ids=str,
)
def test_what_is_no_shape(asked: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        shapes.parse(asked)


def test_more_than_any_memory() -> None:
    for asked in ((2**40, 2**40), (2**70,)):
        with pytest.raises(ValueError, match="more than any memory"):
            shapes.total_bytes(shapes.parse(asked), np.dtype("float32"))
    assert shapes.total_bytes([(2**70, 0)], np.dtype("float32")) == 0


def test_arrays_lie_one_behind_the_other() -> None:
    memory = np.zeros(11, np.float32)
    first, second, third = shapes.arrays_in(memory, [(2, 3), (), (4,)])
    first[...], second[...], third[...] = 1, 2, 3
    assert memory.tolist() == [1] * 6 + [2] + [3] * 4
    assert (first.shape, second.shape, third.shape) == ((2, 3), (), (4,))


def test_a_local_store_gives_ordinary_arrays() -> None:
    with kv.create("local") as store:
        one = store.zeros((2, 2), "float16")
        several = store.empty([(3,), (1, 1)])
        assert (one.dtype, one.tolist()) == (np.float16, [[0, 0], [0, 0]])
        assert [array.dtype for array in several] == [np.float32, np.float32]
        with pytest.raises(UnsupportedError, match="a store holds float16"):
            store.zeros(2, "complex64")
