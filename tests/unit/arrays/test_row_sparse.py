"""RowSparse: what it takes, checks and makes of the sparse values of other libraries."""

from __future__ import annotations

import frameworks
import ml_dtypes
import numpy as np
import pytest

from mpikv import RowSparse, ShapeMismatch, UnsupportedError
from mpikv.arrays.row_sparse import is_sparse, total


def test_rows_are_sorted_and_repeated_ones_added():
    rows = RowSparse([4, 1, 4], np.array([[1, 1], [2, 2], [3, 3]], "float32"), (6, 2))
    assert rows.indices.tolist() == [1, 4]
    assert rows.indices.dtype == np.int64
    assert rows.values.tolist() == [[2, 2], [4, 4]]
    assert rows.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [0, 0], [4, 4], [0, 0]]
    assert rows.nbytes == 2 * 8 + 4 * 4
    assert repr(rows) == "<RowSparse: 2 of 6 rows, (6, 2) float32>"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_added_in_float32_and_rounded_once(dtype):
    values = np.array([2048, 1, 1], np.float32).astype(dtype)  # 2048 + 1 is 2048 in either
    expected = values.astype(np.float32).sum(dtype=np.float32).astype(dtype)
    assert RowSparse([0, 0, 0], values, (3,)).values.tolist() == [float(expected)]


def test_shapes_of_every_kind():
    assert RowSparse([2], [5.0], (4,)).to_dense().tolist() == [0, 0, 5, 0]
    assert RowSparse([], np.empty((0, 2, 3)), (4, 2, 3)).to_dense().shape == (4, 2, 3)
    assert RowSparse.zeros((0, 3)).to_dense().shape == (0, 3)
    assert RowSparse.zeros((5, 0), "int8").dtype == np.int8
    assert RowSparse.of(np.ones((3, 2))).indices.tolist() == [0, 1, 2]


def test_values_in_order_are_shared_and_a_sum_is_not():
    values = np.ones((2, 2))
    rows = RowSparse([0, 3], values, (4, 2))
    assert np.shares_memory(rows.values, values)
    assert not np.shares_memory(total([rows]).values, values)
    two = total([rows, RowSparse([3, 1], np.full((2, 2), 2.0), (4, 2))])
    assert two.to_dense()[:, 0].tolist() == [1, 2, 0, 3]
    assert values.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([5], np.ones((1, 2)), (5, 2)), IndexError, "row 5 of an array of 5 rows"),
        (([0, -1], np.ones((2, 2)), (5, 2)), IndexError, "row -1"),
        ((np.array([2**63], np.uint64), np.ones((1, 2)), (5, 2)), IndexError, "9223372036854775808"),
        *(
            ((ids, np.ones((1, 2)), (5, 2)), TypeError, "whole numbers")
            for ids in ([0.5], [True], ["a"], [[1], [2, 3]])
        ),
        (([0, 1], np.ones((1, 2)), (5, 2)), ShapeMismatch, r"2 rows .* \(2, 2\); these values are \(1, 2\)"),
        (([0], np.ones((1, 3)), (5, 2)), ShapeMismatch, r"\(1, 3\)"),
        (([0], np.ones((1, 2), complex), (5, 2)), UnsupportedError, "complex"),
        (([0], np.ones(1), ()), ValueError, "no axis"),
        (([0], np.ones(1), (-1,)), ValueError, "at least 0"),
        (([0], np.ones(1), 5), TypeError, "shape is a tuple"),
        (([0], np.ones(1), (2.5,)), TypeError, "whole number"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        RowSparse(*arguments)


def test_a_failed_assignment_changes_nothing():
    rows = RowSparse([1], [5.0], (4,))
    with pytest.raises(IndexError):
        rows.assign([4], [6.0])
    assert rows.to_dense().tolist() == [0, 5, 0, 0]


DENSE = np.array([[0, 1.0], [0, 0], [2, 3]], "float32")


def of_scipy():
    sparse = pytest.importorskip("scipy.sparse")
    twice = sparse.coo_matrix((np.array([1.0, 2.0]), ([1, 1], [0, 0])), shape=(2, 2))
    several = [(kind(DENSE), DENSE) for kind in (sparse.csr_matrix, sparse.coo_matrix, sparse.csc_array)]
    return [*several, (twice, twice.toarray()), (sparse.csr_matrix((3, 2)), np.zeros((3, 2)))]


def of_torch():
    torch = frameworks.need("torch")
    twice = torch.sparse_coo_tensor([[3, 1, 3]], torch.ones(3, 2), (5, 2), check_invariants=True)
    half = torch.sparse_coo_tensor([[0, 0]], torch.ones(2, 1, dtype=torch.bfloat16), (2, 1), check_invariants=True)
    assert str(RowSparse.of(half).dtype) == "bfloat16"
    return [(one, one.to_dense().float().numpy()) for one in (twice, torch.tensor(DENSE).to_sparse(), half)]


def of_jax():
    jax, sparse = frameworks.need("jax"), frameworks.need("jax.experimental.sparse")

    def made(values, indices, shape=DENSE.shape):
        return sparse.BCOO((jax.numpy.asarray(values), jax.numpy.asarray(indices)), shape=shape)

    with pytest.raises(UnsupportedError, match="batches"):
        RowSparse.of(made(np.ones((1, 1), "float32"), np.zeros((1, 1, 1), int), (1, 2)))
    # Elements, and rows; each with filling behind the end.
    elements = made([1.0, 2, 3, 0], [[0, 1], [2, 0], [2, 1], [3, 2]])
    rows = made([*DENSE[[0, 2]], [0, 0]], [[0], [2], [3]])
    return [(elements, DENSE), (rows, DENSE)]


@pytest.mark.parametrize("kinds", [of_scipy, of_torch, of_jax])
def test_of_other_libraries(kinds):
    for made, dense in kinds():
        assert is_sparse(made)
        assert RowSparse.of(made).indices.tolist() == np.flatnonzero(np.any(dense, axis=1)).tolist()
        assert RowSparse.of(made).to_dense().tolist() == dense.tolist()


def test_what_is_not_sparse():
    rows = RowSparse.zeros((2, 2))
    assert RowSparse.of(rows) is rows
    assert not any(map(is_sparse, (np.ones(2), frameworks.need("torch").ones(2), "text")))
    with pytest.raises(TypeError):
        RowSparse.of("text")
    with pytest.raises(ValueError, match="axis"):
        RowSparse.of(np.float32(1))
