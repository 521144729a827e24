"""The format of a file of optimizer states.

A file is an archive (archive.py): a zip file of `header.json` and the arrays `0.npy`, `1.npy` and so on. Nothing in it
is ever executed. This is the header of the file of a key "w" of 2 x 3 elements, after three updates by SGD:

    {"format": "mpikv optimizer states",
     "version": 1,
     "arrays": [{"dtype": "float32", "shape": [6]}],
     "optimizer": null,
     "meta": {"optimizers": [["w", "sgd"]], "configs": []},
     "records": [{"key": "w", "shape": [2, 3], "dtype": "float32",
                  "state": {"t": 3, "momentum": {"array": 0, "scalar": false}}}]}

- arrays: dtype and shape of each array, which its own .npy header repeats.
- optimizer: nothing; it is there for versions of mpikv that look at it.
- meta: which optimizer each key's state is of, and the optimizers' `config` where they were saved, too
  (strategies/states.py).
- records: the `Part`s (states.py). key: a str or an int. shape, dtype: those of the key's whole value. begin, end: the
  flat elements that the state is of; all, where they are missing. worker: whose codec's state it is; the optimizer's,
  where it is missing. state: numbers as they are, and the number of each array; scalar: whether it is one of NumPy's
  scalars and no array of 0 dimensions. An optimizer's state has "t", the count of updates. Parts of one key and worker
  come in the order of their elements.

In a file the optimizer's parts are whole, one for each key, so that it knows nothing of the workers or servers that
wrote it. Ranks send each other the parts that they own as the same archive, in which parts need not be whole.
"""

from __future__ import annotations

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
from mpikv.common.files import open_regular, replace_file
from mpikv.errors import StatesFileError, UnsupportedError
from mpikv.optimizers.archive import damaged, read_archive, write_archive
from mpikv.optimizers.states import Part
from mpikv.optimizers.step import State
from mpikv.placement.keys import Key, check_key

KIND = "mpikv optimizer states"


@dataclass(frozen=True)
class StatesFile:
    """What a file holds. entries: the whole state of each key. codecs: what the codecs of each worker remember."""

    entries: dict[Key, Part]
    meta: dict[str, Any] = field(default_factory=dict)
    codecs: tuple[Part, ...] = ()


def save_states(path: str | os.PathLike[str], parts: Iterable[Part], *, meta: Mapping[str, Any] | None = None) -> None:
    """Write a file of states, whole or not at all: beside its place first, then renamed. Local, blocks.

    parts: whole ones, one for each key; those of codecs may be of any elements. meta: JSON. Raises UnsupportedError for
    a state that cannot be saved, TypeError where meta is no JSON, OSError; a file that is there already stays as it
    was.
    """
    replace_file(path, lambda file: _write(file, parts, meta))


def load_states(path: str | os.PathLike[str]) -> StatesFile:
    """Read a file of states. Local, blocks.

    Raises StatesFileError, which names the file and what is wrong with it, for any other content; OSError where it
    cannot be opened (FileNotFoundError where there is none).
    """
    origin = os.fsdecode(path)
    with open_regular(path) as file:
        parts, meta = _read(file, origin)
    entries: dict[Key, Part] = {}
    for part in parts:
        if part.worker is not None:
            continue
        if part.key in entries:
            damaged(origin, f"damaged: key {shown(part.key)} is there twice")
        if not part.whole:
            damaged(origin, f"it holds elements [{part.begin}, {part.end}) of key {shown(part.key)} alone")
        entries[part.key] = part
    return StatesFile(entries, meta, tuple(part for part in parts if part.worker is not None))


def parts_to_bytes(parts: Iterable[Part]) -> bytes:
    """Return parts of states as bytes that can be sent. UnsupportedError for a state that cannot be saved."""
    file = io.BytesIO()
    _write(file, parts)
    return file.getvalue()


def parts_from_bytes(data: bytes, origin: str = "parts of states") -> list[Part]:
    """Do the inverse of `parts_to_bytes`. Raises StatesFileError."""
    return _read(io.BytesIO(data), origin)[0]


# --- writing


def _write(file: IO[bytes], parts: Iterable[Part], meta: Mapping[str, Any] | None = None) -> None:
    arrays: list[HostArray] = []
    records = [
        {
            "key": check_key(part.key),
            "shape": list(part.shape),
            "dtype": str(part.dtype),
            **({} if part.whole else {"begin": part.begin, "end": part.end}),
            **({} if part.worker is None else {"worker": part.worker}),
            "state": _pack(part.key, part.state, arrays),
        }
        for part in parts
    ]
    content = {"optimizer": None, "meta": dict(meta or {}), "records": records}
    write_archive(file, KIND, json.loads(json.dumps(content)), arrays)


def _pack(key: Key, state: State, arrays: list[HostArray]) -> dict[str, Any]:
    """A state as JSON in which arrays are numbers into `arrays`, where they are appended."""
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


def _read(file: IO[bytes], origin: str) -> tuple[list[Part], dict[str, Any]]:
    header, arrays = read_archive(file, KIND, origin)
    meta, records = header.get("meta"), header.get("records")
    if not isinstance(meta, dict):
        damaged(origin, f"damaged: meta in its header is {shown(meta)}")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        damaged(origin, "damaged: its header lists no records")
    parts: list[Part] = []
    ends: dict[tuple[Key, int | None], int] = {}
    for record in records:
        part = _part(record, arrays, origin)
        if part.begin < ends.get((part.key, part.worker), 0):
            damaged(origin, f"damaged: element {part.begin} of key {shown(part.key)} is there twice")
        ends[part.key, part.worker] = part.end
        parts.append(part)
    return parts, meta


def _part(record: dict[str, Any], arrays: list[HostArray], origin: str) -> Part:
    try:
        key = check_key(record.get("key"))
    except (TypeError, ValueError) as error:
        raise StatesFileError(f"{origin}: damaged: {error}") from error
    shape, dtype, worker = (record.get(name) for name in ("shape", "dtype", "worker"))
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        damaged(origin, f"damaged: key {shown(key)} has shape {shown(shape)}")
    if dtype not in [str(known) for known in SUPPORTED_DTYPES]:  # a list: what is there may have no hash
        damaged(origin, f"damaged: key {shown(key)} has dtype {shown(dtype)}")
    n_elems = math.prod(shape)
    begin, end = record.get("begin", 0), record.get("end", n_elems)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= n_elems:
        damaged(origin, f"damaged: a part of elements [{begin!r}, {end!r}) of {n_elems}")
    if not (worker is None or (type(worker) is int and worker >= 0)):
        damaged(origin, f"damaged: a state of key {shown(key)} is said to be that of worker {shown(worker)}")
    packed = record.get("state")
    if not isinstance(packed, dict):
        damaged(origin, f"damaged: key {key!r} has no state")
    if worker is None and (type(packed.get("t")) is not int or packed["t"] < 0):
        damaged(origin, f"damaged: key {key!r} has no state with a count of updates")
    state: State = {}
    for name, value in packed.items():
        if type(value) in (bool, int, float):
            state[name] = value
            continue
        index = value.get("array") if isinstance(value, dict) else None
        if type(index) is not int or not 0 <= index < len(arrays):
            damaged(origin, f"damaged: {shown(name)} in the state of key {key!r} is {value!r}")
        array = arrays[index]
        state[name] = array[()] if value.get("scalar") and array.ndim == 0 else array
    return Part(key, tuple(shape), dtype_of(str(dtype)), begin, end, state, worker)
