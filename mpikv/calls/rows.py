"""Calls on row-sparse keys: their arguments checked, their rows added over this worker's devices, ids put in order.

What a call has for row-sparse keys is taken out of it here; the rest is done as for dense keys (forms.py). All of a
call is checked before anything is sent. Local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv import optimizers
from mpikv.arrays.as_numpy import HostArray, is_array
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse, checked_ids, is_sparse, total
from mpikv.calls.forms import CallForms, CallItem, Keys, Targets, Values
from mpikv.common.checks import shown, wrong
from mpikv.errors import ShapeMismatch, UnsupportedError
from mpikv.placement.keys import KeyInfo
from mpikv.session.base import NewKey, Pending, Session
from mpikv.spaces.named import HOST
from mpikv.strategies.base import Sink, Strategy

PULL = "row_sparse_pull"


class _Wanted(NamedTuple):
    """One result of a `row_sparse_pull`."""

    info: KeyInfo
    ids: Ids
    out: RowSparse


class _Filled:
    """A request: a dense pull of a row-sparse key, whose rows are then written to the caller's arrays."""

    def __init__(self, pending: Pending, values: HostArray, sink: Sink) -> None:
        self._request, self._values, self._sink = pending.request, values, sink
        self._done = False

    def pending(self) -> Pending | None:
        """See `UnderWay`."""
        found: Pending | None = self._request.pending()  # type: ignore[attr-defined]
        if found is None:
            self.test()
        return found

    def test(self) -> bool:
        if not self._done and self._request.test():
            self._sink.deliver(self._values.reshape(-1))
            self._done = True
        return self._done


class RowCalls:
    """What the store's calls do with row-sparse keys."""

    def __init__(self, session: Session, strategy: Strategy, forms: CallForms) -> None:
        self._session, self._strategy, self._forms = session, strategy, forms

    def is_sparse(self, key: Any) -> bool:
        info = self._session.lookup(self._forms.key(key))
        return info is not None and info.sparse

    def refuse(self, call: str, keys: Keys) -> None:
        """Raise UnsupportedError where one of these is row-sparse."""
        for key in keys if isinstance(keys, (list, tuple)) else [keys]:
            if self._session.any_sparse and self.is_sparse(key):
                raise UnsupportedError(
                    f"{call}: key {shown(key)} is row-sparse: push its rows, and get some by {PULL}; nothing was sent"
                )

    # --- init

    def new_key(self, item: CallItem) -> NewKey:
        (value,) = item.arrays
        rows = total([RowSparse.of(value)])
        return NewKey(item.key, rows.shape, rows, HOST, sparse=True)

    # --- push

    def split(self, call: str, items: list[CallItem]) -> tuple[list[CallItem], list[tuple[KeyInfo, RowSparse]]]:
        """What is for dense keys, and for each row-sparse key the sum of its rows over devices, in new memory."""
        dense: list[CallItem] = []
        rows: list[tuple[KeyInfo, list[RowSparse]]] = []
        for item in items:
            info = self._forms.info(call, item.key)
            if info.sparse:
                rows.append((info, [self._rows_of(call, info, array) for array in item.arrays]))
                continue
            if any(type(array) is not np.ndarray and is_sparse(array) for array in item.arrays):
                whole = [RowSparse.of(one).to_dense() if is_sparse(one) else one for one in item.arrays]
                item = item._replace(arrays=whole)  # noqa: PLW2901 - the same, with dense arrays
            dense.append(item)
        for info, _ in rows:
            self._check_update(call, info)
        return dense, [(info, total(parts)) for info, parts in rows]

    def _rows_of(self, call: str, info: KeyInfo, array: Any) -> RowSparse:
        rows = RowSparse.of(array)
        if (rows.shape, rows.dtype) != (info.shape, info.dtype):
            raise ShapeMismatch(
                f"{call}: key {shown(info.key)} is {info.dtype} {info.shape}, this value is {rows.dtype} {rows.shape} "
                f"({self._forms.where()}); nothing was sent"
            )
        return rows

    def _check_update(self, call: str, info: KeyInfo) -> None:
        """Raise UnsupportedError where what updates the key cannot update some of its rows."""
        optimizer = self._session.optimizer_of(info)
        why = ""
        if self._session.updater is not None:
            why = "an updater takes whole values"
        elif optimizer is not None and not optimizer.updates_rows:
            able = [name for name in optimizers.names() if optimizers.create(name).updates_rows]
            why = f"{optimizer!r} does not update some rows alone; these do, with lazy_update=True: {', '.join(able)}"
        if why:
            raise UnsupportedError(f"{call}: key {shown(info.key)} is row-sparse, and {why}; nothing was sent")

    # --- pull

    def whole(self, out: Any, found: list[tuple[RowSparse, HostArray]]) -> Any:
        """`out` of a pull with a dense array in place of each RowSparse; both are appended to `found`."""
        if isinstance(out, (list, tuple)):
            return [self.whole(one, found) for one in out]
        if not isinstance(out, RowSparse):
            return out
        found.append((out, np.empty(out.shape, out.dtype)))
        return found[-1][1]

    def fill(self, found: list[tuple[RowSparse, HostArray]]) -> None:
        """Give each RowSparse the rows of its dense array that are not zero."""
        for rows, values in found:
            ids = np.flatnonzero(values.any(axis=tuple(range(1, values.ndim))))
            rows.assign(ids, values[ids])

    def dense_entries(self, targets: Targets, priority: int) -> tuple[Targets, list[Pending]]:
        """Begin to pull the row-sparse keys among these as whole values; the other keys are returned."""
        pending: list[Pending] = []
        for info, arrays in targets:
            if info.sparse:
                sink = Sink(info, arrays, self._session.spaces)
                values, begun = self._strategy.rows.pull(info, np.arange(info.shape[0]), priority, "pull")
                pending += [one._replace(request=_Filled(one, values, sink)) for one in begun]
                if not begun:
                    sink.deliver(values.reshape(-1))
        return [target for target in targets if not target[0].sparse], pending

    def without(self, keys: Keys, out: Values, like: Values) -> tuple[list[int], list[Any], Values, Values]:
        """The places of the dense ones in a list of keys; these keys, and what the call has for them."""
        listed = list(keys) if isinstance(keys, (list, tuple)) else [keys]
        kept = [i for i, key in enumerate(listed) if not self.is_sparse(key)]

        def those(values: Values) -> Values:
            fits = isinstance(values, (list, tuple)) and len(values) == len(listed)
            return [values[i] for i in kept] if fits else values

        return kept, [listed[i] for i in kept], those(out), those(like)

    def pull(self, keys: Keys, out: Any, row_ids: Any, priority: int) -> Any:
        several = isinstance(keys, (list, tuple))
        listed: Sequence[Any] = keys if several else [keys]  # type: ignore[assignment]
        outs = _spread("out", out, len(listed)) if several else [out]
        ids = _spread("row_ids", row_ids, len(listed)) if several else [row_ids]
        found = [self._wanted(*one) for one in zip(listed, outs, ids, strict=True)]
        wanted = [one for of_key in found for one in of_key]
        begun = [self._strategy.rows.pull(one.info, one.ids, priority, PULL) for one in wanted]
        for _, pending in begun:
            for one in pending:
                self._session.wait(one)
        for (info, ids_of, target), (values, _) in zip(wanted, begun, strict=True):
            rows = values.reshape(ids_of.size, *info.shape[1:])
            target.assign(ids_of, rows.astype(target.dtype, copy=False))
        if out is not None:
            return None
        results = [[one.out for one in of_key] for of_key in found]
        form = [some if _is_list_of_arrays(ids_of) else some[0] for some, ids_of in zip(results, ids, strict=True)]
        return form if several else form[0]

    def sparse_info(self, call: str, key: Any) -> KeyInfo:
        info = self._forms.info(call, self._forms.key(key))
        if not info.sparse:
            raise UnsupportedError(
                f"{call}: key {shown(info.key)} is dense: initialise it with a RowSparse, or use pull"
            )
        return info

    def _wanted(self, key: Any, out: Any, row_ids: Any) -> list[_Wanted]:
        info = self.sparse_info(PULL, key)
        if row_ids is None:
            raise ValueError(
                f"{PULL}: key {shown(info.key)}: row_ids says which rows are wanted; "
                "pull with ignore_sparse=False gives all"
            )
        parts = list(row_ids) if _is_list_of_arrays(row_ids) else [row_ids]
        outs = list(out) if isinstance(out, (list, tuple)) else [out] * (len(parts) if out is None else 1)
        if len(parts) == 1:
            parts *= len(outs)
        if not outs or len(parts) != len(outs):
            raise ValueError(f"{PULL}: key {shown(info.key)}: {len(outs)} results but {len(parts)} arrays of row_ids")
        what = f"{PULL}: row_ids of key {shown(info.key)}"
        return [
            _Wanted(info, np.unique(checked_ids(what, part, info.shape[0])), self._out(info, to))
            for part, to in zip(parts, outs, strict=True)
        ]

    def _out(self, info: KeyInfo, out: Any) -> RowSparse:
        if out is None:
            return RowSparse.zeros(info.shape, info.dtype)
        if not isinstance(out, RowSparse):
            raise wrong(f"{PULL}: out of key {shown(info.key)}", "a RowSparse", out)
        if out.shape != info.shape:
            raise ShapeMismatch(
                f"{PULL}: key {shown(info.key)} has shape {info.shape}, `out` {out.shape} ({self._forms.where()})"
            )
        return out


def _is_list_of_arrays(value: Any) -> bool:
    """Whether it is a list of arrays or lists, not one of numbers."""
    return isinstance(value, (list, tuple)) and any(
        (is_array(one) and getattr(one, "ndim", 0)) or isinstance(one, list) for one in value
    )


def _spread(what: str, values: Any, n_keys: int) -> list[Any]:
    """What a list of keys has: one for each, or the same for all."""
    if (
        values is None
        or not isinstance(values, (list, tuple))
        or (what == "row_ids" and not _is_list_of_arrays(values))
    ):
        if what == "out" and values is not None:
            raise TypeError(f"{PULL}: a list of keys needs a list of {what}, not {type(values).__name__}")
        return [values] * n_keys
    if len(values) != n_keys:
        raise ValueError(f"{PULL}: {n_keys} keys but {len(values)} of {what}")
    return list(values)
