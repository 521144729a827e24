"""The format of a file of optimizer states.

A file is an archive (archive.py): arrays by name, and JSON. Nothing in it is ever executed. This is the JSON of a file
with one key "w" of 2 x 3 elements, after three updates by SGD, whose one array is "states/w/momentum":

    {"meta": {"optimizers": [["w", "sgd"]], "configs": []},
     "records": [{"key": "w", "shape": [2, 3], "dtype": "float32",
                  "state": {"t": 3, "momentum": {"array": "states/w/momentum", "scalar": false}}}]}

- meta: the optimizer of each key, and the optimizers' `config` if they were saved, too; `cuts`: where keys were divided
  between workers and servers, and `workers`: among how many (strategies/states.py).
- records: each a `StateRecord` (states.py). key: a str or an int. shape, dtype: of the key's whole value. begin, end:
  the flat elements that the state belongs to; if missing, all. worker: the rank of the worker whose codec's state it
  is; if missing, it is the optimizer's. state: numbers themselves, and for each array its name; scalar: whether it is a
  NumPy scalar, not an array of 0 dimensions. An optimizer's state has "t", the count of updates. Records of one key and
  worker are in the order of their elements.

In a file there is one record of the optimizer's state for each key, of all its elements, so that the file does not
depend on the workers and servers that wrote it. Ranks send each other their shards' records as archives of the same
format. A Trainer's checkpoint is such a file with more in it (trainer/checkpoint.py).
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import SUPPORTED_DTYPES, HostArray, dtype_of
from mpikv.common.checks import LARGEST, shown
from mpikv.common.files import open_regular, replacing
from mpikv.errors import StatesFileError, UnsupportedError
from mpikv.optimizers.archive import damaged, free_name, read_archive, write_archive
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.step import State
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
    """The place of a file of states that is not written, but kept. origin: what errors call it."""

    def __init__(self, origin: str, file: StatesFile | None = None) -> None:
        self._origin, self.file = origin, file

    def __str__(self) -> str:
        return self._origin


Place = str | os.PathLike[str] | InMemory


def save_states(path: Place, records: Iterable[StateRecord], *, meta: Mapping[str, Any] | None = None) -> None:
    """Write a file of states, whole or not at all. Local, blocks.

    records: one of all elements for each key; those of codecs may be of any elements. meta: JSON. Raises
    UnsupportedError for a state that cannot be saved, TypeError if meta is no JSON, OSError.
    """
    if isinstance(path, InMemory):
        path.file = _file_of(records, dict(meta or {}))
        return
    content, arrays = packed(records, meta)
    with replacing(path) as file:
        write_archive(file, KIND, content, arrays)


def load_states(path: Place) -> StatesFile:
    """Read a file of states. Local. Raises StatesFileError for any other content, OSError if it cannot be opened."""
    if isinstance(path, InMemory):
        return path.file or StatesFile({})
    with open_regular(path) as file:
        return unpacked(*read_archive(file, KIND, str(path)), str(path))


def records_to_bytes(records: Iterable[StateRecord]) -> bytes:
    """Return records as bytes that can be sent. Raises UnsupportedError for a state that cannot be saved."""
    write_archive(file := io.BytesIO(), KIND, *packed(records))
    return file.getvalue()


def records_from_bytes(data: bytes, origin: str = "records of states") -> list[StateRecord]:
    """Do the inverse of `records_to_bytes`. Raises StatesFileError."""
    return _records(*read_archive(io.BytesIO(data), KIND, origin), origin)


def packed(
    records: Iterable[StateRecord], meta: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, HostArray]]:
    """Return the content and the arrays of a file."""
    arrays: dict[str, HostArray] = {}
    listed = [
        {
            "key": check_key(record.key),
            "shape": list(record.shape),
            "dtype": str(record.dtype),
            **({} if record.whole else {"begin": record.begin, "end": record.end}),
            **({} if record.worker is None else {"worker": record.worker}),
            "state": _pack(record.key, record.state, arrays),
        }
        for record in records
    ]
    return {"meta": dict(meta or {}), "records": listed}, arrays


def _pack(key: Key, state: State, arrays: dict[str, HostArray]) -> dict[str, Any]:
    """Return a state as JSON. Its arrays are added to `arrays`, and their names stand for them."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, (np.ndarray, np.generic)):
            array = free_name(f"states/{key}/{name}", arrays)
            found[name] = {"array": array, "scalar": isinstance(value, np.generic)}
            arrays[array] = np.asarray(value)
        elif type(value) in (bool, int, float):
            found[name] = value
        else:
            raise UnsupportedError(
                f"the state of key {shown(key)} cannot be saved or moved: {shown(name)} is {type(value).__name__}. "
                "One that can be is None, a number, an array, or a flat dict, list or tuple of numbers and arrays"
            )
    return found


def unpacked(content: Mapping[str, Any], arrays: Mapping[str, HostArray], origin: str) -> StatesFile:
    """Do the inverse of `packed`. Raises StatesFileError."""
    records, meta = _records(content, arrays, origin), content.get("meta")
    if not isinstance(meta, dict):
        damaged(origin, f"damaged: meta in its header is {shown(meta)}")
    for record in records:
        if record.worker is None and not record.whole:
            damaged(origin, f"it holds elements [{record.begin}, {record.end}) of key {shown(record.key)} alone")
    return _file_of(records, meta)


def _file_of(records: Iterable[StateRecord], meta: dict[str, Any]) -> StatesFile:
    records = list(records)
    entries = {record.key: record for record in records if record.worker is None}
    return StatesFile(entries, meta, tuple(record for record in records if record.worker is not None))


def _records(content: Mapping[str, Any], arrays: Mapping[str, HostArray], origin: str) -> list[StateRecord]:
    listed = content.get("records")
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        damaged(origin, "damaged: its header lists no records")
    records: list[StateRecord] = []
    ends: dict[tuple[Key, int | None], int] = {}
    for item in listed:
        record = _record(item, arrays, origin)
        end = ends.get((record.key, record.worker))
        if end is not None and (record.begin < end or not record.n_elems):
            damaged(origin, f"damaged: element {record.begin} of key {shown(record.key)} is there twice")
        ends[record.key, record.worker] = record.end
        records.append(record)
    return records


def _record(item: dict[str, Any], arrays: Mapping[str, HostArray], origin: str) -> StateRecord:
    try:
        key = check_key(item.get("key"))
    except (TypeError, ValueError) as error:
        raise StatesFileError(f"{origin}: damaged: {error}") from error
    shape: Any = item.get("shape")
    dtype, worker = item.get("dtype"), item.get("worker")
    few = isinstance(shape, list) and len(shape) <= MOST_AXES  # so that their product is quickly known
    if not (few and all(type(extent) is int and 0 <= extent <= LARGEST for extent in shape)):
        damaged(origin, f"damaged: key {shown(key)} has shape {shown(shape)}")
    if dtype not in [str(known) for known in SUPPORTED_DTYPES]:  # compared in a list, since `dtype` may have no hash
        damaged(origin, f"damaged: key {shown(key)} has dtype {shown(dtype)}")
    n_elems = math.prod(shape)
    begin, end = item.get("begin", 0), item.get("end", n_elems)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= n_elems:
        damaged(origin, f"damaged: a record of elements [{shown(begin)}, {shown(end)}) of {shown(n_elems)}")
    if not (worker is None or (type(worker) is int and worker >= 0)):
        damaged(origin, f"damaged: a state of key {shown(key)} is said to be that of worker {shown(worker)}")
    given = item.get("state")
    if not isinstance(given, dict):
        damaged(origin, f"damaged: key {shown(key)} has no state")
    if worker is None and (type(given.get("t")) is not int or given["t"] < 0):
        damaged(origin, f"damaged: key {shown(key)} has no state with a count of updates")
    state: State = {}
    for name, value in given.items():
        if type(value) in (bool, int, float):
            state[name] = value
            continue
        stored = value.get("array") if isinstance(value, dict) else None
        if type(stored) is not str or stored not in arrays:
            damaged(origin, f"damaged: {shown(name)} in the state of key {shown(key)} is {shown(value)}")
        array = arrays[stored]
        state[name] = array[()] if value.get("scalar") and array.ndim == 0 else array
    return StateRecord(key, tuple(shape), dtype_of(str(dtype)), begin, end, state, worker)
