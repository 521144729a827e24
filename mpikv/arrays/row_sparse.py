"""A value of which few rows are there: what embeddings and other tables are pushed as and pulled into.

`RowSparse(indices, values, shape)` holds the rows of an array of `shape` whose numbers are in `indices`; all others are
zero. It is in host memory, and always in one form: ids in ascending order, each once. What SciPy, PyTorch and JAX call
sparse becomes one by `RowSparse.of`, without these libraries being imported.

Cost: memory for the rows that are there. Sorting where the ids are not in order yet; else no copy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays import row_ids
from mpikv.arrays.as_numpy import HostArray, as_host, dtype_named, host_view, is_array, sum_dtype
from mpikv.arrays.row_ids import Ids
from mpikv.common.checks import whole, wrong
from mpikv.errors import ShapeMismatch, UnsupportedError


class RowSparse:
    """Some rows of an array; all others are zero.

    indices: the rows' numbers, whole numbers in any order; the rows of a repeated one are added in the order given
    (float16 and bfloat16 in float32). values: (len(indices), *shape[1:]), any supported dtype, of NumPy or a library
    with DLPack; the memory is shared where it can be. shape: of the whole array, at least one axis.

    Raises IndexError for a number out of range, ShapeMismatch where the lengths do not fit, TypeError, UnsupportedError
    for a dtype.

    >>> rows = mpikv.RowSparse([4, 1, 4], np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]), (10000000, 2))
    >>> rows
    <RowSparse: 2 of 10000000 rows, (10000000, 2) float64>
    >>> rows.indices, rows.values.tolist(), rows.dtype
    (array([1, 4]), [[2.0, 2.0], [4.0, 4.0]], dtype('float64'))
    >>> rows.nbytes
    48
    """

    def __init__(self, indices: Any, values: Any, shape: Sequence[int]) -> None:
        self.shape = _checked_shape(shape)
        self.indices: Ids
        self.values: HostArray
        self.assign(indices, values)

    def assign(self, indices: Any, values: Any) -> None:
        """Hold these rows from now on. Takes and raises what the class does.

        >>> rows = mpikv.RowSparse.zeros((3, 2))
        >>> rows.assign([2], np.ones((1, 2), 'float32'))
        >>> rows.to_dense().tolist()
        [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
        """
        ids = checked_ids("RowSparse: indices", indices, self.shape[0])
        what = "RowSparse: values"
        rows = host_view(values if is_array(values) else as_host(what, values), what)
        if rows.shape != (ids.size, *self.shape[1:]):
            raise ShapeMismatch(
                f"RowSparse: {ids.size} rows of an array of shape {self.shape} are {(ids.size, *self.shape[1:])}; "
                f"these values are {rows.shape}"
            )
        self.indices, self.values = row_ids.merge(ids, rows, sum_dtype(rows.dtype))

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any = "float32") -> RowSparse:
        """Make one without rows.

        >>> mpikv.RowSparse.zeros((10000000, 16))
        <RowSparse: 0 of 10000000 rows, (10000000, 16) float32>
        """
        checked = _checked_shape(shape)
        return cls(np.empty(0, np.int64), np.empty((0, *checked[1:]), dtype_named(dtype)), checked)

    @classmethod
    def of(cls, value: Any) -> RowSparse:
        """Make one of a sparse matrix of SciPy, a `torch.sparse_coo` tensor, a BCOO of JAX, or a dense array.

        A row is there where the sparse value has an entry; of a dense array all rows are. A RowSparse is returned as it
        is. Raises TypeError for anything else, UnsupportedError for a BCOO with batches and for other dtypes.

        >>> mpikv.RowSparse.of(np.ones((3, 2)))
        <RowSparse: 3 of 3 rows, (3, 2) float64>
        """
        if isinstance(value, RowSparse):
            return value
        if _is_torch(value):
            value = value.detach()  # entries that stand there twice are added in their order
            return _of_entries(value._indices(), value._values(), tuple(value.shape))  # noqa: SLF001
        if _is_scipy(value):
            coo = value.tocoo()
            return _of_entries(np.stack([coo.row, coo.col]), coo.data, coo.shape)
        if _is_bcoo(value):
            if value.n_batch:
                raise UnsupportedError(f"RowSparse.of: a BCOO with {value.n_batch} axes of batches")
            places = np.asarray(value.indices).T
            inside = (places < np.array(value.shape[: len(places)])[:, None]).all(0)  # what is outside is filling
            return _of_entries(places[:, inside], host_view(value.data, "RowSparse.of")[inside], tuple(value.shape))
        rows = host_view(value, "RowSparse.of: the value")
        return cls(np.arange(rows.shape[0] if rows.ndim else 0), rows, rows.shape)

    def to_dense(self) -> HostArray:
        """Return the whole array as a new one of NumPy.

        >>> mpikv.RowSparse([1], np.ones((1, 2)), (3, 2)).to_dense().tolist()
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
        """
        whole = np.zeros(self.shape, self.dtype)
        whole[self.indices] = self.values
        return whole

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of indices and values."""
        return self.indices.nbytes + self.values.nbytes

    def __repr__(self) -> str:
        return f"<RowSparse: {self.indices.size} of {self.shape[0]} rows, {self.shape} {self.dtype}>"


def is_sparse(value: object) -> bool:
    """Return whether it is a RowSparse, or what another library calls sparse and `RowSparse.of` takes."""
    return isinstance(value, RowSparse) or _is_torch(value) or _is_scipy(value) or _is_bcoo(value)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo


def _is_scipy(value: Any) -> bool:
    return hasattr(value, "tocoo") and hasattr(value, "tocsr")


def _is_bcoo(value: Any) -> bool:
    return hasattr(value, "n_batch") and hasattr(value, "n_sparse") and hasattr(value, "indices")


def _of_entries(places: Any, values: Any, shape: tuple[int, ...]) -> RowSparse:
    """Make one of entries; places: (axes, entries), values: (entries, *shape[axes:]), added in their order."""
    places = np.asarray(host_view(places, "indices") if is_array(places) else places).astype(np.int64)
    values = host_view(values, "values")
    if len(places) == 1:
        return RowSparse(places[0], values, shape)
    inner = shape[1 : len(places)]
    flat = np.ravel_multi_index(tuple(places), shape[: len(places)])
    cells, sums = row_ids.merge(np.asarray(flat, np.int64), values, sum_dtype(values.dtype))
    width = int(np.prod(inner, dtype=np.int64))
    rows, at = np.unique(cells // max(width, 1), return_inverse=True)
    whole = np.zeros((rows.size, width, *values.shape[1:]), values.dtype)
    whole[at.reshape(-1), cells % max(width, 1)] = sums
    return RowSparse(rows, whole.reshape(rows.size, *shape[1:]), shape)


def total(parts: Sequence[RowSparse]) -> RowSparse:
    """Return the sum of values of one shape and dtype, in new memory, added in the order given and rounded once."""
    first = parts[0]
    wide = sum_dtype(first.dtype)
    ids, rows = first.indices.copy(), first.values.astype(wide)
    for part in parts[1:]:
        ids, rows = row_ids.add(ids, rows, part.indices, part.values.astype(wide, copy=False))
    return RowSparse(ids, rows.astype(first.dtype, copy=False), first.shape)


def checked_ids(what: str, ids: Any, n_rows: int) -> Ids:
    """Return numbers of rows as a flat array of int64. TypeError for other things, IndexError out of range."""
    if isinstance(ids, np.ndarray):
        found = ids
    else:
        try:
            found = host_view(ids, what) if is_array(ids) else np.asarray(ids)
        except Exception as error:  # what objects raise that are no arrays
            raise wrong(what, "an array of whole numbers", ids) from error
    if found.size and found.dtype.kind not in "iu":
        raise wrong(what, "an array of whole numbers", ids)
    found = found.reshape(-1)
    if found.size and not (found.min() >= 0 and found.max() < n_rows):
        outside = found[(found < 0) | (found >= n_rows)]
        raise IndexError(f"{what}: row {outside[0]} of an array of {n_rows} rows")
    return found.astype(np.int64, copy=False)


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)):
        raise wrong("RowSparse: shape", "a tuple of whole numbers", shape)
    if not shape:
        raise ValueError("RowSparse: shape () has no axis, and so no rows")
    return tuple(whole("RowSparse: an extent of shape", extent) for extent in shape)
