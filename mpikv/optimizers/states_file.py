"""The format of a file of optimizer states.

A file is an archive (archive.py): a zip file of `header.json` and the arrays `0.npy`, `1.npy` and so on. Nothing in it
is ever executed. This is the header of a file with one key "w" of 2 x 3 elements, after three updates by SGD:

    {"format": "mpikv optimizer states",
     "version": 1,
     "arrays": [{"dtype": "float32", "shape": [6]}],
     "optimizer": null,
     "meta": {"optimizers": [["w", "sgd"]], "configs": []},
     "records": [{"key": "w", "shape": [2, 3], "dtype": "float32",
                  "state": {"t": 3, "momentum": {"array": 0, "scalar": false}}}]}

- arrays: dtype and shape of each array, which its own .npy header repeats.
- optimizer: always null; older versions of mpikv read it.
- meta: the optimizer of each key, and the optimizers' `config` if they were saved, too; `cuts`: where keys were divided
  between workers and servers, and `workers`: among how many (strategies/states.py).
- records: each a `StateRecord` (states.py). key: a str or an int. shape, dtype: of the key's whole value. begin, end:
  the flat elements that the state belongs to; if missing, all. worker: the rank of the worker whose codec's state it
  is; if missing, it is the optimizer's. state: numbers themselves, and for each array its index; scalar: whether it is
  a NumPy scalar, not an array of 0 dimensions. An optimizer's state has "t", the count of updates. Records of one key
  and worker are in the order of their elements.

In a file there is one record of the optimizer's state for each key, of all its elements, so that the file does not
depend on the workers and servers that wrote it. Ranks send each other their shards' records as archives of the same
format.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from mpikv.arrays.as_numpy import SUPPORTED_DTYPES, HostArray, dtype_of
from mpikv.common.checks import shown
from mpikv.common.files import open_regular, replacing
from mpikv.errors import StatesFileError, UnsupportedError
from mpikv.optimizers.archive import damaged, is_shape, read_archive, write_archive
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.step import State
from mpikv.placement.keys import Key, check_key

KIND = "mpikv optimizer states"


@dataclass(frozen=True)
class StatesFile:
    """The contents of a file. entries: the whole state of each key. codecs: the states of each worker's codecs."""

    entries: dict[Key, StateRecord]
    meta: dict[str, Any] = field(default_factory=dict)
    codecs: tuple[StateRecord, ...] = ()


class InMemory(io.BytesIO):
    """A file of states that lies in memory. origin: what errors call it."""

    def __init__(self, origin: str, content: bytes = b"") -> None:
        super().__init__(content)
        self._origin = origin

    def __str__(self) -> str:
        return self._origin


Place = str | os.PathLike[str] | InMemory


def save_states(path: Place, records: Iterable[StateRecord], *, meta: Mapping[str, Any] | None = None) -> None:
    """Write a file of states under another name, then rename it, so that it is never incomplete. Local, blocks.

    records: one of all elements for each key; those of codecs may be of any elements. meta: JSON. Raises
    UnsupportedError for a state that cannot be saved, TypeError if meta is no JSON, OSError. On an error an existing
    file does not change.
    """
    with contextlib.nullcontext(path) if isinstance(path, InMemory) else replacing(path) as file:
        _write(file, records, meta)


def load_states(path: Place) -> StatesFile:
    """Read a file of states. Local, blocks.

    Raises StatesFileError, which names the file and what is wrong with it, for any other content; OSError if it cannot
    be opened (FileNotFoundError if there is none).
    """
    origin = str(path)
    with contextlib.nullcontext(path) if isinstance(path, InMemory) else open_regular(path) as file:
        records, meta = _read(file, origin)
    entries: dict[Key, StateRecord] = {}
    for record in records:
        if record.worker is not None:
            continue
        if record.key in entries:
            damaged(origin, f"damaged: key {shown(record.key)} is there twice")
        if not record.whole:
            damaged(origin, f"it holds elements [{record.begin}, {record.end}) of key {shown(record.key)} alone")
        entries[record.key] = record
    return StatesFile(entries, meta, tuple(record for record in records if record.worker is not None))


def records_to_bytes(records: Iterable[StateRecord]) -> bytes:
    """Return records as bytes that can be sent. Raises UnsupportedError for a state that cannot be saved."""
    file = io.BytesIO()
    _write(file, records)
    return file.getvalue()


def records_from_bytes(data: bytes, origin: str = "records of states") -> list[StateRecord]:
    """Do the inverse of `records_to_bytes`. Raises StatesFileError."""
    return _read(io.BytesIO(data), origin)[0]


# --- writing


def _write(file: IO[bytes], records: Iterable[StateRecord], meta: Mapping[str, Any] | None = None) -> None:
    arrays: list[HostArray] = []
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
    content = {"optimizer": None, "meta": dict(meta or {}), "records": listed}
    write_archive(file, KIND, json.loads(json.dumps(content)), arrays)


def _pack(key: Key, state: State, arrays: list[HostArray]) -> dict[str, Any]:
    """Return a state as JSON. Its arrays are appended to `arrays`, and their indices stand for them."""
    packed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, (np.ndarray, np.generic)):
            packed[name] = {"array": len(arrays), "scalar": isinstance(value, np.generic)}
            arrays.append(np.asarray(value))
        elif type(value) in (bool, int, float):
            packed[name] = value
        else:
            raise UnsupportedError(
                f"the state of key {shown(key)} cannot be saved or moved: {shown(name)} is {type(value).__name__}. "
                "One that can be is None, a number, an array, or a flat dict, list or tuple of numbers and arrays"
            )
    return packed


# --- reading


def _read(file: IO[bytes], origin: str) -> tuple[list[StateRecord], dict[str, Any]]:
    header, arrays = read_archive(file, KIND, origin)
    meta, listed = header.get("meta"), header.get("records")
    if not isinstance(meta, dict):
        damaged(origin, f"damaged: meta in its header is {shown(meta)}")
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        damaged(origin, "damaged: its header lists no records")
    records: list[StateRecord] = []
    ends: dict[tuple[Key, int | None], int] = {}
    for item in listed:
        record = _record(item, arrays, origin)
        if record.begin < ends.get((record.key, record.worker), 0):
            damaged(origin, f"damaged: element {record.begin} of key {shown(record.key)} is there twice")
        ends[record.key, record.worker] = record.end
        records.append(record)
    return records, meta


def _record(item: dict[str, Any], arrays: list[HostArray], origin: str) -> StateRecord:
    try:
        key = check_key(item.get("key"))
    except (TypeError, ValueError) as error:
        raise StatesFileError(f"{origin}: damaged: {error}") from error
    shape, dtype, worker = (item.get(name) for name in ("shape", "dtype", "worker"))
    if not is_shape(shape):
        damaged(origin, f"damaged: key {shown(key)} has shape {shown(shape)}")
    if dtype not in [str(known) for known in SUPPORTED_DTYPES]:  # compared in a list, since `dtype` may have no hash
        damaged(origin, f"damaged: key {shown(key)} has dtype {shown(dtype)}")
    n_elems = math.prod(shape)
    begin, end = item.get("begin", 0), item.get("end", n_elems)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= n_elems:
        damaged(origin, f"damaged: a record of elements [{shown(begin)}, {shown(end)}) of {shown(n_elems)}")
    if not (worker is None or (type(worker) is int and worker >= 0)):
        damaged(origin, f"damaged: a state of key {shown(key)} is said to be that of worker {shown(worker)}")
    packed = item.get("state")
    if not isinstance(packed, dict):
        damaged(origin, f"damaged: key {shown(key)} has no state")
    if worker is None and (type(packed.get("t")) is not int or packed["t"] < 0):
        damaged(origin, f"damaged: key {shown(key)} has no state with a count of updates")
    state: State = {}
    for name, value in packed.items():
        if type(value) in (bool, int, float):
            state[name] = value
            continue
        index = value.get("array") if isinstance(value, dict) else None
        if type(index) is not int or not 0 <= index < len(arrays):
            damaged(origin, f"damaged: {shown(name)} in the state of key {shown(key)} is {shown(value)}")
        array = arrays[index]
        state[name] = array[()] if value.get("scalar") and array.ndim == 0 else array
    return StateRecord(key, tuple(shape), dtype_of(str(dtype)), begin, end, state, worker)
