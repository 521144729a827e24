"""The ids of rows: sorted, added up and written as bytes. Pure functions on NumPy arrays.

Rows are in an array (k, columns), and their ids in an array (k,) of int64 beside it, in ascending order and each once.
As bytes, ids take what is shortest: nothing where they are all there are, else one bit for each row there is, or 4 or
8 bytes for each id. So a message of rows is never longer than the whole value and one bit for each of its rows.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from mpikv.errors import MpikvError

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]

ALL, BITS, SHORT, LONG = range(4)  # how ids are written
_HEAD = struct.Struct("<QB7x")  # the number of ids, and how they are written
ALIGN_BYTES = 16  # what follows the ids is aligned for every dtype, as requests to servers are
PASSES = 64  # ids that are repeated more often are rare; a pass adds one row to each of many ids


def merge(ids: Ids, rows: Rows, wide: np.dtype[Any]) -> tuple[Ids, Rows]:
    """Return the ids sorted and once each, with their rows.

    The rows of a repeated id are added in the order given, in the dtype `wide`, and rounded once. Ids that are sorted
    and once each already are returned as they are, with the same array of rows.
    """
    if ids.size < 2 or bool((ids[1:] > ids[:-1]).all()):
        return ids, rows
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    unique = ordered[starts]
    total = rows[order[starts]].astype(wide, copy=False)
    counts = np.diff(starts, append=ids.size)
    for nth in range(1, min(int(counts.max()), PASSES)):
        again = np.flatnonzero(counts > nth)
        total[again] += rows[order[starts[again] + nth]].astype(wide, copy=False)
    for often in np.flatnonzero(counts > PASSES):
        for at in range(starts[often] + PASSES, starts[often] + counts[often]):
            total[often] += rows[order[at]].astype(wide, copy=False)
    return unique, total.astype(rows.dtype, copy=False)


def add(ids: Ids, total: Rows, more_ids: Ids, more: Rows) -> tuple[Ids, Rows]:
    """Return the sum of two sets of rows of one dtype; `total` may be changed, and may be the sum."""
    if np.array_equal(ids, more_ids):
        total += more
        return ids, total
    union = np.union1d(ids, more_ids)
    if union.size > ids.size:
        wider = np.zeros((union.size, *total.shape[1:]), total.dtype)
        wider[np.searchsorted(union, ids)] = total
        total = wider
    total[np.searchsorted(union, more_ids)] += more
    return union, total


def encode(ids: Ids, n_rows: int) -> npt.NDArray[np.uint8]:
    """Return ids below `n_rows` as bytes, a whole number of `ALIGN_BYTES`."""
    if ids.size == n_rows:
        form, data = ALL, np.empty(0, np.uint8)
    elif -(-n_rows // 8) < 4 * ids.size:
        marks = np.zeros(n_rows, np.bool_)
        marks[ids] = True
        form, data = BITS, np.packbits(marks)
    elif n_rows <= 1 << 32:
        form, data = SHORT, ids.astype("<u4").view(np.uint8)
    else:
        form, data = LONG, ids.astype("<i8").view(np.uint8)
    written = np.zeros(_HEAD.size + _padded(data.size), np.uint8)
    _HEAD.pack_into(written.data, 0, ids.size, form)
    written[_HEAD.size : _HEAD.size + data.size] = data
    return written


def decode(written: npt.NDArray[np.uint8], n_rows: int) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """Return the ids, and a view of the bytes that follow them. Raises MpikvError for what `encode` has not written."""
    try:
        count, form = _HEAD.unpack_from(written.data)
    except struct.error:
        raise _damaged(f"{written.size} bytes are too few") from None
    n_bytes = {ALL: 0, BITS: -(-n_rows // 8), SHORT: 4 * count, LONG: 8 * count}.get(form)
    end = _HEAD.size + _padded(n_bytes or 0)
    if n_bytes is None or count > n_rows or end > written.size or (form == ALL and count != n_rows):
        raise _damaged(f"{count} of {n_rows} rows, form {form}, {written.size} bytes")
    data = written[_HEAD.size : _HEAD.size + n_bytes]
    if form == ALL:
        ids = np.arange(n_rows, dtype=np.int64)
    elif form == BITS:
        ids = np.flatnonzero(np.unpackbits(data, count=n_rows)).astype(np.int64, copy=False)
    else:
        ids = data.view("<u4" if form == SHORT else "<i8").astype(np.int64)
    wrong = ids.size and (ids[0] < 0 or ids[-1] >= n_rows or not (ids[1:] > ids[:-1]).all())
    if ids.size != count or wrong:
        raise _damaged(f"{count} of {n_rows} rows are announced, and the ids are others")
    return ids, written[end:]


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _damaged(text: str) -> MpikvError:
    return MpikvError(f"damaged ids of rows: {text}")
