"""Collective calls on NumPy arrays that need no key of the caller's: allreduce, broadcast, allgather.

The adapters for PyTorch and JAX share them. A call first compares what the workers brought (one exchange of 32 bytes),
so that calls that differ are an error on every worker and not a wrong number or a wait without end; then the values
travel through a few keys of the store that are used again and again: one for each dtype and size class. Long values go
in pieces of 4 MiB, short ones are filled up with zeros to the next of four sizes per power of two.

Broadcast and allgather are sums of bytes, to which all workers but one add zero: exact for every dtype, and twice the
bytes of a collective of its own. They are for the start of a program and for a few values per epoch; for a step's
gradients there are better ways.

Cost of a call: two exchanges through the store (5 to 20 us each on one host), and a copy in and out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, dtype_named
from mpikv.arrays.reductions import REDUCTIONS
from mpikv.errors import ConfigError, MpikvError, ShapeMismatch, UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.session.agreement import grouped

PIECE_BYTES = 4 << 20  # bounds the memory that the store keeps for these keys
LEAST_BYTES = 64
_HASH_BITS = 26  # the squares of so many bits, added over 2048 workers, fit in 64 bits
_SHOWN = 2000  # characters of a description in an error

OPS = tuple(REDUCTIONS)
GATHERED = ("min", "max", "prod")


class CollectiveCalls:
    """Collective calls on a synchronous or local store; `CollectiveCalls(store)` is local and cheap.

    Every worker makes the same calls in the same order, with arrays of the same shapes and dtypes and the same `op`,
    `root` and `name`; otherwise ShapeMismatch, which says who brought what, on every worker that is in such a call.
    `name` is only compared, and shown in errors. Calls block. Raises UnsupportedError for a `dist_async` store, and
    where the store has an optimizer for all keys, since it then gives no sums.

    allreduce(arrays: Sequence[np.ndarray], op="sum", name=None) -> list[np.ndarray]
    broadcast(arrays: Sequence[np.ndarray], root=0, name=None) -> list[np.ndarray]
    allgather(array: np.ndarray, name=None) -> np.ndarray
    agree(lines: Sequence[str], what, error=ConfigError) -> None
    """

    def __init__(self, store: KVStore) -> None:
        if not isinstance(store, KVStore):
            raise TypeError(f"store is a KVStore, such as kv.create('dist_sync') gives, not {type(store).__name__}")
        if "async" in store.type:
            raise UnsupportedError(
                f"a {store.type} store applies every push at once and never sums over the workers; use 'dist_sync'"
            )
        self.store = store
        self._buffers: dict[str, HostArray] = {}

    # --- the calls

    def allreduce(self, arrays: Sequence[HostArray], op: str = "sum", name: str | None = None) -> list[HostArray]:
        """Return the sum, mean, minimum, maximum or product over the workers of each array, as new arrays.

        Collective, blocks. arrays: of any shapes, in the dtypes of the store. op: one of `OPS`. The mean is of floating
        dtypes only. The result has the same bits on every worker. min, max and prod bring all workers' values to every
        worker.
        """
        if op not in OPS:
            raise ValueError(f"op is one of {', '.join(OPS)}; got {op!r}")
        values = _arrays("allreduce", arrays)
        for value in values:
            dtype_named(value.dtype)
            if op == "mean" and value.dtype.kind in "iub":
                raise UnsupportedError(f"allreduce: the mean of {value.dtype} is not a whole number; use op='sum'")
        self._check_call(f"allreduce({op}{_named(name)})", [_form(value) for value in values])
        results: list[HostArray | None] = [None] * len(values)
        for dtype in dict.fromkeys(value.dtype for value in values):
            chosen = [i for i, value in enumerate(values) if value.dtype == dtype]
            flat = np.concatenate([values[i].reshape(-1) for i in chosen])
            if op in GATHERED:
                total = reduce(REDUCTIONS[op].combine, self._gather_equal(flat))
            else:
                total = self._sum(flat)
                if op == "mean":
                    total /= self.store.num_workers
            for i, part in zip(chosen, _split(total, [values[i].size for i in chosen]), strict=True):
                results[i] = part.reshape(values[i].shape)
        return [result for result in results if result is not None]

    def broadcast(self, arrays: Sequence[HostArray], root: int = 0, name: str | None = None) -> list[HostArray]:
        """Return worker `root`'s values of each array, as new arrays. Collective, blocks.

        arrays: of any shapes and dtypes; on other workers than `root` only their shapes and dtypes count.
        """
        self.check_root(root)
        values = _arrays("broadcast", arrays)
        self._check_call(f"broadcast(root {root}{_named(name)})", [_form(value) for value in values])
        flat = np.concatenate([np.empty(0, np.uint8), *(_bytes(value) for value in values)])
        if self.store.rank != root:
            flat[:] = 0
        parts = _split(self._sum(flat), [value.nbytes for value in values])
        return [_from_bytes(part, value) for part, value in zip(parts, values, strict=True)]

    def allgather(self, array: HostArray, name: str | None = None) -> HostArray:
        """Return all workers' arrays one behind the other, in the order of the workers, as a new array.

        Collective, blocks. array: at least one dimension, any dtype; the first dimension may differ between workers,
        the others not.
        """
        (value,) = _arrays("allgather", [array])
        if not value.ndim:
            raise ValueError("allgather: an array without dimensions cannot be put behind others; give it one")
        rest = value.shape[1:]
        self._check_call(f"allgather({_named(name)})", [f"{value.dtype} (any, {', '.join(map(str, rest))})"])
        blobs = self._gather(_bytes(value))
        row_bytes = value.dtype.itemsize * int(np.prod(rest, dtype=np.int64))
        lengths = self._lengths(len(value)) if not row_bytes else [blob.size // row_bytes for blob in blobs]
        like = np.empty((sum(lengths), *rest), value.dtype)
        return _from_bytes(np.concatenate(blobs), like)

    def agree(self, lines: Sequence[str], what: str, error: type[MpikvError] = ConfigError) -> None:
        """Raise `error` on every worker if they bring different lines of text. Collective, blocks.

        what: what the lines describe. The error shows the first line in which workers differ, and who brought what.
        """
        text = "\n".join([what, *lines])
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        parts = [digest >> i * _HASH_BITS & (1 << _HASH_BITS) - 1 for i in range(2)]
        mine = np.array([*parts, *(part * part for part in parts)], np.int64)
        total = self._sum(mine)
        n = self.store.num_workers
        # Numbers are all equal where the square of their sum is n times the sum of their squares, and only there; so
        # every worker comes to the same conclusion.
        if all(int(total[i]) ** 2 == n * int(total[i + 2]) for i in range(2)):
            return
        texts = [bytes(blob).decode() for blob in self._gather(np.frombuffer(text.encode(), np.uint8))]
        raise error(f"{what}: the workers differ. {difference(texts)}")

    def check_root(self, root: int) -> None:
        """Raise TypeError or ValueError for what is no worker. Local."""
        if isinstance(root, bool) or not isinstance(root, (int, np.integer)):
            raise TypeError(f"root is a worker's number, not {root!r}")
        if not 0 <= root < self.store.num_workers:
            raise ValueError(f"root is a worker, 0 to {self.store.num_workers - 1}; got {root}")

    def check_sums(self) -> None:
        """Raise UnsupportedError where the store gives no sums. Local."""
        if self.store.has_optimizer:
            raise UnsupportedError(
                "the store has an optimizer for all keys, so it gives updated weights and not sums; "
                "make collective calls on another store"
            )

    # --- how they are done

    def _check_call(self, call: str, forms: list[str]) -> None:
        self.agree([f"{call} of {', '.join(forms) or 'nothing'}"], "a collective call", ShapeMismatch)

    def _lengths(self, mine: int) -> list[int]:
        lengths = np.zeros(self.store.num_workers, np.int64)
        lengths[self.store.rank] = mine
        return [int(length) for length in self._sum(lengths)]

    def _gather(self, mine: HostArray) -> list[HostArray]:
        """Return every worker's bytes."""
        lengths = self._lengths(mine.size)
        flat = np.zeros(sum(lengths), np.uint8)
        begin = sum(lengths[: self.store.rank])
        flat[begin : begin + mine.size] = mine
        return _split(self._sum(flat), lengths)

    def _gather_equal(self, mine: HostArray) -> list[HostArray]:
        """Return every worker's flat values, which are equally many on each."""
        return [_from_bytes(blob, mine) for blob in self._gather(_bytes(mine))]

    def _sum(self, flat: HostArray) -> HostArray:
        """Return the sum over the workers, as a new flat array."""
        self.check_sums()
        total = np.empty_like(flat)
        piece = PIECE_BYTES // flat.dtype.itemsize
        for begin in range(0, flat.size, piece):
            mine = flat[begin : begin + piece]
            key, buf = self._key(mine.size, mine.dtype)
            buf[: mine.size] = mine
            buf[mine.size :] = 0
            self.store.pushpull(key, buf)
            total[begin : begin + mine.size] = buf[: mine.size]
        return total

    def _key(self, n_elems: int, dtype: np.dtype[Any]) -> tuple[str, HostArray]:
        """Return the key for values of this size, and a buffer for it. Other objects may use the same key."""
        size = size_class(n_elems * dtype.itemsize) // dtype.itemsize
        key = f"mpikv collective calls/{dtype} {size}"
        if key not in self._buffers:
            buf = np.zeros(size, dtype)
            if key not in self.store:
                self.store.session.compressions.exempt(key)  # what one call owes is not for the next one
                self.store.init(key, buf)
            self._buffers[key] = buf
        return key, self._buffers[key]


def size_class(n_bytes: int) -> int:
    """Return the least size of a key that holds so many bytes; there are four in each power of two."""
    step = 1 << max(0, (n_bytes - 1).bit_length() - 3)
    return max(LEAST_BYTES, -(-n_bytes // step) * step)


def _named(name: str | None) -> str:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a text, not {name!r}")
    return "" if name is None else f", {name!r}"


def _form(value: HostArray) -> str:
    return f"{value.dtype} {value.shape}"


def _arrays(call: str, arrays: Sequence[HostArray]) -> list[HostArray]:
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(f"{call}: a list of arrays is needed, not {type(arrays).__name__}")
    for array in arrays:
        if not isinstance(array, (np.ndarray, np.generic)):
            raise TypeError(f"{call}: NumPy arrays are needed, not {type(array).__name__}")
        if array.dtype.hasobject:
            raise TypeError(f"{call}: arrays of numbers are needed, not of {array.dtype}")
    return [np.asarray(array) for array in arrays]


def _bytes(value: HostArray) -> HostArray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _from_bytes(flat: HostArray, like: HostArray) -> HostArray:
    return np.array(flat, copy=True).view(like.dtype).reshape(like.shape)


def _split(flat: HostArray, sizes: Sequence[int]) -> list[HostArray]:
    return np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []


def difference(texts: Sequence[str]) -> str:
    """Return the first line that is not the same everywhere, and who brought what. Empty texts are not compared."""
    rows = [text.split("\n") for text in texts if text]
    labels = [f"worker {i}" for i, text in enumerate(texts) if text]
    for i in range(max(map(len, rows))):
        lines = [row[i][:_SHOWN] if i < len(row) else "nothing more" for row in rows]
        if len(set(lines)) > 1:
            return grouped(lines, labels)
    raise AssertionError("texts that are equal, with different hashes")
