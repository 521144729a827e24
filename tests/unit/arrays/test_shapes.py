"""What `store.empty` is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.arrays import shapes


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
