"""The states of optimizers as the content of a file.

A file is an archive (archive.py): JSON with arrays in it. Nothing in it is ever executed. This is the content of a file
with one key "w" of 2 x 3 elements, after three updates by SGD:

    {"meta": {"optimizers": [["w", "sgd"]], "configs": []},
     "records": [{"key": "w", "shape": [2, 3], "dtype": "float32", "state": {"t": 3, "momentum": ARRAY}}]}

- meta: the optimizer of each key, and the optimizers' `config` if they were saved, too; `cuts`: where keys were divided
  between workers and servers, and `workers`: among how many (strategies/states.py).
- records: each a `StateRecord` (states.py). key: a str or an int. shape, dtype: of the key's whole value. begin, end:
  the flat elements that the state belongs to; if missing, all. worker: the rank of the worker whose codec's state it
  is; if missing, it is the optimizer's. state: numbers and arrays; an optimizer's has "t", the count of updates.
  Records of one key and worker are in the order of their elements.

In a file there is one record of the optimizer's state for each key, of all its elements, so that the file does not
depend on the workers and servers that wrote it. Ranks send each other their shards' records as archives of the same
format. A Trainer's checkpoint is such a file with more in it (trainer/checkpoint.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import SUPPORTED_DTYPES, dtype_of
from mpikv.common.checks import LARGEST, shown
from mpikv.errors import StatesFileError, UnsupportedError
from mpikv.optimizers import archive
from mpikv.optimizers.archive import damaged
from mpikv.optimizers.states import StateRecord
from mpikv.placement.keys import Key, check_key

KIND = "mpikv optimizer states"
MOST_AXES = 64  # as NumPy has it


@dataclass(frozen=True)
class StatesFile:
    """The contents of a file. entries: the whole state of each key. codecs: the states of each worker's codecs."""

    entries: dict[Key, StateRecord]
    meta: dict[str, Any] = field(default_factory=dict)
    codecs: tuple[StateRecord, ...] = ()


class InMemory:
    """The place of a file of states that is kept, not written. origin: what errors call it. content: see `packed`."""

    def __init__(self, origin: str, content: Mapping[str, Any] | None = None) -> None:
        self._origin, self.content = origin, content or {}

    def __str__(self) -> str:
        return self._origin


Place = str | os.PathLike[str] | InMemory


def save_content(path: Place, content: Mapping[str, Any]) -> None:
    """Write a file of states, whole or not at all. Local, blocks. Raises OSError.

    content: what `packed` has returned, of one record of all elements for each key; those of codecs may be of any.
    """
    if isinstance(path, InMemory):
        path.content = content
    else:
        archive.save(path, KIND, content)


def load_states(path: Place) -> StatesFile:
    """Read a file of states. Local. Raises StatesFileError for any other content, OSError if it cannot be opened."""
    content, origin = path.content if isinstance(path, InMemory) else archive.load(path, KIND), str(path)
    records, meta = records_of(content, origin), content.get("meta")
    if not isinstance(meta, dict):
        damaged(origin, f"damaged: meta in its header is {shown(meta)}")
    for record in records:
        if record.worker is None and not record.whole:
            damaged(origin, f"it holds elements [{record.begin}, {record.end}) of key {shown(record.key)} alone")
    entries = {record.key: record for record in records if record.worker is None}
    return StatesFile(entries, meta, tuple(record for record in records if record.worker is not None))


def records_to_bytes(records: Iterable[StateRecord]) -> bytes:
    """Return records as bytes that can be sent. Raises UnsupportedError for a state that cannot be saved."""
    return archive.to_bytes(KIND, packed(records))


def records_from_bytes(data: bytes, origin: str = "records of states") -> list[StateRecord]:
    """Do the inverse of `records_to_bytes`. Raises StatesFileError."""
    return records_of(archive.from_bytes(data, KIND, origin), origin)


def packed(records: Iterable[StateRecord], meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a file. Raises UnsupportedError for a state that cannot be saved."""
    return {"meta": dict(meta or {}), "records": [_packed(record) for record in records]}


def _packed(record: StateRecord) -> dict[str, Any]:
    for name, value in record.state.items():
        if not _is_kept(value):
            raise UnsupportedError(
                f"the state of key {shown(record.key)} cannot be saved or moved: {shown(name)} is "
                f"{type(value).__name__}. One that can be is None, a number, an array, or a flat dict, list or tuple "
                "of numbers and arrays"
            )
    return {
        "key": check_key(record.key),
        "shape": list(record.shape),
        "dtype": str(record.dtype),
        **({} if record.whole else {"begin": record.begin, "end": record.end}),
        **({} if record.worker is None else {"worker": record.worker}),
        "state": record.state,
    }


def _is_kept(value: Any) -> bool:
    """Whether it may be in a state that is saved. A user's own function may keep anything."""
    return type(value) in (bool, int, float) or isinstance(value, (np.ndarray, np.generic))


def records_of(content: Mapping[str, Any], origin: str) -> list[StateRecord]:
    listed = content.get("records")
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        damaged(origin, "damaged: its header lists no records")
    records = [_record(item, origin) for item in listed]
    ends: dict[tuple[Key, int | None], int] = {}
    for record in records:
        end = ends.get((record.key, record.worker))
        if end is not None and (record.begin < end or not record.n_elems):
            damaged(origin, f"damaged: element {record.begin} of key {shown(record.key)} is there twice")
        ends[record.key, record.worker] = record.end
    return records


def _record(item: dict[str, Any], origin: str) -> StateRecord:
    try:
        key = check_key(item.get("key"))
    except (TypeError, ValueError) as error:
        raise StatesFileError(f"{origin}: damaged: {error}") from error
    shape, dtype, worker, state = (item.get(name) for name in ("shape", "dtype", "worker", "state"))
    # Of few axes, so that their product is quickly known.
    if not (isinstance(shape, list) and len(shape) <= MOST_AXES and all(_is_count(extent) for extent in shape)):
        damaged(origin, f"damaged: key {shown(key)} has shape {shown(shape)}")
    n_elems = math.prod(shape)
    begin, end = item.get("begin", 0), item.get("end", n_elems)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= n_elems:
        damaged(origin, f"damaged: a record of elements [{shown(begin)}, {shown(end)}) of {shown(n_elems)}")
    if dtype not in [str(known) for known in SUPPORTED_DTYPES]:  # compared in a list, since `dtype` may have no hash
        damaged(origin, f"damaged: key {shown(key)} has dtype {shown(dtype)}")
    if worker is not None and not _is_count(worker):
        damaged(origin, f"damaged: a state of key {shown(key)} is said to be that of worker {shown(worker)}")
    if not isinstance(state, dict) or (worker is None and not _is_count(state.get("t"))):
        damaged(origin, f"damaged: key {shown(key)} has no state with a count of updates")
    for name, value in state.items():
        if not _is_kept(value):
            damaged(origin, f"damaged: {shown(name)} in the state of key {shown(key)} is {shown(value)}")
    return StateRecord(key, tuple(shape), dtype_of(str(dtype)), begin, end, state, worker)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST
