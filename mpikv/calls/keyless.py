"""Collective calls on NumPy arrays that need no key of the caller's: allreduce, reduce_scatter, broadcast, allgather.

The adapters for PyTorch and JAX share them. This file reads their arguments; groups/workers.py makes the calls, and
compares what the workers brought: calls that differ are an error on every worker.

Cost of a call: one exchange among the workers (10 to 20 us on one host), two of an `allgather`, whose lengths come
first; and a copy in and out. Between hosts a small exchange more, of what is compared.

A worker that has joined (`join`) brings the text "join" in every call. So a call of the others is one in which workers
differ: they exchange the texts, and make it again with zeros of those that have joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mpikv.arrays.as_numpy import HostArray, dtype_named
from mpikv.arrays.reductions import REDUCTIONS, Reduction
from mpikv.errors import ConfigError, MpikvError, ShapeMismatch, UnsupportedError
from mpikv.groups import collective
from mpikv.groups.collective import Collective
from mpikv.groups.shared import MismatchError
from mpikv.hostmemory.segment import aligned
from mpikv.session.agreement import grouped

PIECE_BYTES = 4 << 20  # of what goes by messages: bounds their memory, and is passed on while the next one comes
_SHOWN = 2000  # characters of a description in an error

T = TypeVar("T")
OPS = tuple(REDUCTIONS)
_CALL = "a collective call"
_JOIN = f"{_CALL}\njoin"
_NOTHING = collective.broadcast([], 0)  # for a call of which only the texts are compared


class CollectiveCalls:
    """Collective calls on a synchronous or local store; `CollectiveCalls(store)` is local and cheap.

    Every worker makes the same calls in the same order, with arrays of the same shapes and dtypes and the same `op`,
    `root` and `name`; otherwise ShapeMismatch, which says who brought what, on every worker that is in such a call.
    `name` is only compared, and shown in errors. Calls block. Raises UnsupportedError for a `dist_async` store, and
    where the store has an optimizer for all keys, since it then gives no sums. A spare that has no place yet
    (MPIKV_SPARES) is alone in them: it gets back what it brings, from `allgather` once for each worker.
    """

    def __init__(self, store: Any) -> None:
        if not hasattr(store, "workers_group"):  # the class itself is in a layer beside this one
            raise TypeError(f"store is a KVStore, such as kv.create('dist_sync') gives, not {type(store).__name__}")
        if "async" in store.type:
            raise UnsupportedError(
                f"a {store.type} store applies every push at once and never sums over the workers; use 'dist_sync'"
            )
        self.store: Any = store

    # --- the calls

    def whole(self, call: Callable[[], T]) -> T:
        """Make one call of several; where workers go on after a death all of it is made again, or ends on all of them.

        Collective, blocks. Those that were begun before end first.
        """
        if (group := self.store.workers_group) is not None:
            group.in_turn.wait()
        found: T = self.store.session.whole("calls", call)
        return found

    def allreduce(self, arrays: Sequence[HostArray], op: str = "sum", name: str | None = None) -> list[HostArray]:
        """Return the sum, mean, minimum, maximum or product over the workers of each array, as new arrays.

        Collective, blocks. arrays: of any shapes, in the dtypes of the store. op: one of `OPS`. The mean of whole
        numbers is cut towards zero. The result has the same bits on every worker.
        """
        return self.whole(partial(self._allreduce, arrays, op, name))

    def _allreduce(self, arrays: Sequence[HostArray], op: str, name: str | None) -> list[HostArray]:
        with self._refusing("allreduce"):
            values = _arrays("allreduce", arrays)
            operator = _operator("allreduce", op, values)
            text = f"allreduce({op}{_named(name)}) of {_forms(values)}"
        groups: dict[Any, list[int]] = {}
        for i, value in enumerate(values):
            groups.setdefault(value.dtype, []).append(i)
        totals = [np.concatenate([values[i].reshape(-1) for i in chosen]) for chosen in groups.values()]
        made = collective.allreduce([piece for total in totals for piece in _pieces(total)], operator)
        self._run(made, "allreduce", text)
        results: dict[int, HostArray] = {}
        for chosen, total in zip(groups.values(), totals, strict=True):
            for i, part in zip(chosen, _split(total, [values[i].size for i in chosen]), strict=True):
                results[i] = part.reshape(values[i].shape)
        return [results[i] for i in range(len(values))]

    def reduce_scatter(self, arrays: Sequence[HostArray], op: str = "sum", name: str | None = None) -> list[HostArray]:
        """Return this worker's rows of what `allreduce` returns, as new arrays. Collective, blocks.

        arrays: with at least one dimension. The first worker has the first rows, and so on; where they cannot be shared
        out evenly, the first workers have one row more.
        """
        return self.whole(partial(self._reduce_scatter, arrays, op, name))

    def _reduce_scatter(self, arrays: Sequence[HostArray], op: str, name: str | None) -> list[HostArray]:
        with self._refusing("reduce_scatter"):
            values = _arrays("reduce_scatter", arrays)
            operator = _operator("reduce_scatter", op, values)
            text = f"reduce_scatter({op}{_named(name)}) of {_forms(values)}"
            if any(not value.ndim for value in values):
                raise ValueError("reduce_scatter: an array without dimensions has no rows; give it one")
        parts = [np.array_split(value, self.store.num_workers) for value in values]
        outs = [rows[self.store.rank].copy() for rows in parts]  # the result where there is one worker
        flat = [
            ([np.ascontiguousarray(one).reshape(-1) for one in rows], out.reshape(-1))
            for rows, out in zip(parts, outs, strict=True)
        ]
        made = collective.reduce_scatter(flat, operator)
        self._run(made, "reduce_scatter", text)
        return outs

    def broadcast(
        self,
        arrays: Sequence[HostArray],
        root: int = 0,
        name: str | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[HostArray]:
        """Return worker `root`'s values of each array, as new arrays; others bring shapes and dtypes. Blocks.

        numbers: of the workers among which it is `root`, default those of now. If that worker dies meanwhile
        (MPIKV_ON_FAILURE=continue), the first of those that are left gives its own.
        """
        return self.whole(partial(self._broadcast, arrays, root, name, numbers or self.store.session.numbers))

    def _broadcast(
        self, arrays: Sequence[HostArray], root: int, name: str | None, numbers: Sequence[int]
    ) -> list[HostArray]:
        with self._refusing("broadcast"):
            check_root(root, len(numbers))
            there = self.store.session.numbers
            root = there.index(numbers[root]) if numbers[root] in there else 0
            values = _arrays("broadcast", arrays)
            text = f"broadcast(root {root}{_named(name)}) of {_forms(values)}"
        ends = np.cumsum([aligned(value.nbytes) for value in values], dtype=np.int64)
        flat: HostArray = np.empty(ends[-1] if values else 0, np.uint8)
        results = [
            flat[end - aligned(value.nbytes) :][: value.nbytes].view(value.dtype).reshape(value.shape)
            for end, value in zip(ends, values, strict=True)
        ]
        if self.store.rank == root or self.store.session.alone:
            for result, value in zip(results, values, strict=True):
                result[...] = value
        self._run(collective.broadcast(_pieces(flat), root), "broadcast", text)
        return results

    def allgather(self, array: HostArray, name: str | None = None) -> HostArray:
        """Return all workers' arrays one behind the other, as a new array; first dimensions may differ. Blocks."""
        return self.whole(partial(self._allgather, array, name))

    def _allgather(self, array: HostArray, name: str | None) -> HostArray:
        with self._refusing("allgather"):
            (value,) = _arrays("allgather", [array])
            if not value.ndim:
                raise ValueError("allgather: an array without dimensions cannot be put behind others; give it one")
            rest = value.shape[1:]
            text = f"allgather({_named(name)}) of {collective.name_of(value.dtype)} (any, {', '.join(map(str, rest))})"
        lengths = self._lengths(len(value), text)
        row_elems = math.prod(rest)
        result: HostArray = np.empty((sum(lengths), *rest), value.dtype)
        self._gather(_bytes(value), _split(result.reshape(-1), [length * row_elems for length in lengths]))
        return result

    def agree(self, lines: Sequence[str], what: str, error: type[MpikvError] = ConfigError) -> None:
        """Raise `error` on every worker if they bring different lines of `what`, with the first such line. Blocks."""
        self.whole(lambda: self._run(_NOTHING, "agree", "\n".join(lines), what, error))

    def join(self, *, patient: bool = False) -> int:
        """Take part in the allreduces of the others, with zeros or the like, until every worker has called this.

        Collective, blocks. Returns the last worker that came, the largest number where several came in one round of
        calls. Other calls than `allreduce` are a ShapeMismatch where they are made. patient: whether to wait for the
        others' next call without the store's limit, since something else ends the wait. Raises UnsupportedError where
        workers go on after a death.
        """
        self.store.session.check_all_stay("join needs", ", or use Trainer.join")
        return self.whole(partial(self._join, patient=patient))

    def _join(self, *, patient: bool) -> int:
        rounds = 0
        while (form := self._run(_NOTHING, "join", "join", patient=patient)) is not None:
            rounds += 1
            if form:
                self._run(collective.neutral(form), "join", form)
        counts = self.allgather(np.array([rounds], np.int64)).tolist()
        return max(worker for worker, count in enumerate(counts) if count == min(counts))

    # --- how they are done

    @contextmanager
    def _refusing(self, call: str) -> Iterator[None]:
        """A block that reads arguments. What it refuses is told to the other workers, which may wait in their calls."""
        try:
            yield
        except Exception as error:
            text = f"{call}, which it refuses: {type(error).__name__}: {error}"
            if self.store.workers_group is not None:
                self.store.workers_group.in_turn.begin(lambda: self._run(_NOTHING, call, text))
            raise

    def _run(
        self,
        made: Collective,
        call: str,
        text: str,
        what: str = _CALL,
        error: type[MpikvError] = ShapeMismatch,
        *,
        patient: bool = False,
    ) -> str | None:
        """Make a call, which is what `what` and `text` say. Raises `error` on every worker where they differ.

        None: it is made. In `join`, while others are in another call: the form of the allreduce that they make next,
        with workers that have joined; "" where they raise.
        """
        self.store.session.check_open(call)
        if self.store.has_optimizer:
            raise UnsupportedError(
                "the store has an optimizer for all keys, so it gives updated weights and not sums; "
                "make collective calls on another store"
            )
        group = self.store.workers_group
        if group is None or self.store.session.alone:
            return None
        text = f"{what}\n{text}"
        try:
            group.run(made._replace(text=text), call, patient=patient)
            return None
        except MismatchError:
            mine = np.frombuffer(f"{made.text}\n{text}".encode(), np.uint8)
            blobs = [np.empty(n, np.uint8) for n in self._lengths(mine.size, "texts that differ")]
            self._gather(mine, blobs)
            forms, _, texts = zip(*(bytes(blob).decode().partition("\n") for blob in blobs), strict=True)
        others = {one for one in zip(forms, texts, strict=True) if one[1] != _JOIN}
        form = next(iter(others))[0] if _JOIN in texts and len(others) == 1 else ""
        if not form.startswith(collective.ALLREDUCE):
            form = ""
        if text == _JOIN:
            return form
        if form:
            return self._run(made, call, form)
        joined = [f"worker {worker}" for worker, one in enumerate(texts) if one == _JOIN]
        if joined and len(others) == 1:
            raise error(f"{call}: {', '.join(joined)} has joined (join); only allreduces can be made without it")
        raise error(f"{what}: the workers differ. {difference(texts)}")

    def _lengths(self, mine: int, text: str) -> list[int]:
        lengths = np.full((self.store.num_workers, 1), mine, np.int64)
        self._run(collective.allgather([(lengths[self.store.rank].copy(), list(lengths))]), "allgather", text)
        return [int(length) for (length,) in lengths]

    def _gather(self, mine: HostArray, outs: Sequence[HostArray]) -> None:
        blobs = [_bytes(out) for out in outs]
        for blob in blobs if self.store.session.alone else [blobs[self.store.rank]]:
            blob[:] = mine
        self._run(collective.allgather([(mine, blobs)]), "allgather", f"bytes: {[blob.size for blob in blobs]}")


def check_root(root: int, n_workers: int) -> None:
    """Raise TypeError or ValueError for what is no worker's number."""
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)):
        raise TypeError(f"root is a worker's number, not {root!r}")
    if not 0 <= root < n_workers:
        raise ValueError(f"root is a worker, 0 to {n_workers - 1}; got {root}")


def _operator(call: str, op: str, values: Sequence[HostArray]) -> Reduction:
    if op not in OPS:
        raise ValueError(f"{call}: op is one of {', '.join(OPS)}; got {op!r}")
    for value in values:
        dtype_named(value.dtype)
    return REDUCTIONS[op]


def _named(name: str | None) -> str:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a text, not {name!r}")
    return "" if name is None else f", {name!r}"


def _forms(values: Sequence[HostArray]) -> str:
    return ", ".join(f"{collective.name_of(value.dtype)} {value.shape}" for value in values) or "nothing"


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


def _pieces(flat: HostArray) -> list[HostArray]:
    step = PIECE_BYTES // flat.itemsize
    return [flat[begin : begin + step] for begin in range(0, flat.size, step)]


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
