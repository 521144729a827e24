"""States of optimizers as values to save, cut, join and send.

There is one record, a `Part`: the state of some elements of a key, with the shape and dtype of the key's whole value.
Ranks send each other the parts that they own. A file holds parts that are whole, one for each key, so that it knows
nothing of the workers or servers that wrote it. Both are the same archive (archive.py): arrays and numbers are kept
exactly, and nothing in it is ever executed.

A state is cut and joined like its weight: arrays along the elements; numbers are copied, and must agree again when
parts are joined, all but "t", of which the largest counts (parts of an asynchronous store may have seen different
numbers of updates).
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import SUPPORTED_DTYPES, HostArray, dtype_of, host_view, is_device
from mpikv.common.checks import shown
from mpikv.common.files import open_regular, replace_file
from mpikv.errors import StatesFileError, UnsupportedError
from mpikv.optimizers.archive import damaged, read_archive, write_archive
from mpikv.optimizers.step import State
from mpikv.placement.keys import Key, KeyInfo, check_key
from mpikv.spaces.base import Space

KIND = "mpikv optimizer states"


class Part(NamedTuple):
    """The state of the elements [begin, end) of a key, whose whole value has this shape and dtype.

    worker: whose codec has it; None: it is the optimizer's, of which there is one.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int
    end: int
    state: State
    worker: int | None = None

    @property
    def n_elems(self) -> int:
        """The elements of the whole value; 1 for a 0-dimensional one."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether it is the state of all elements."""
        return (self.begin, self.end) == (0, self.n_elems)


def part_of(info: KeyInfo, begin: int, end: int, state: State) -> Part:
    """Make the state of some elements of a store's key."""
    return Part(info.key, info.shape, info.dtype, begin, end, state)


@dataclass(frozen=True)
class StatesFile:
    """What a file holds. entries: the whole state of each key. optimizer: `Optimizer.config()` of the one that made the
    states, if it was saved. codecs: what the codecs of each worker remember, piece by piece.
    """

    entries: dict[Key, Part]
    optimizer: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    codecs: tuple[Part, ...] = ()


# --- files


def save_states(
    path: str | os.PathLike[str],
    parts: Iterable[Part],
    *,
    optimizer: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Write a file of states, whole or not at all: beside its place first, then renamed. Local, blocks.

    parts: whole ones, one for each key; those of codecs may be of any piece. optimizer, meta: JSON. Raises
    UnsupportedError for a state that cannot be saved, TypeError where optimizer or meta is no JSON, OSError; a file
    that is there already stays as it was.
    """
    replace_file(path, lambda file: _write(file, parts, optimizer, meta))


def load_states(path: str | os.PathLike[str]) -> StatesFile:
    """Read a file of states. Local, blocks.

    Raises StatesFileError, which names the file and what is wrong with it, for any other content; OSError where it
    cannot be opened (FileNotFoundError where there is none).
    """
    origin = os.fsdecode(path)
    with open_regular(path) as file:
        parts, optimizer, meta = _read(file, origin)
    entries: dict[Key, Part] = {}
    for part in parts:
        if part.worker is not None:
            continue
        if part.key in entries:
            damaged(origin, f"damaged: key {shown(part.key)} is there twice")
        if not part.whole:
            damaged(origin, f"it holds elements [{part.begin}, {part.end}) of key {shown(part.key)} alone")
        entries[part.key] = part
    return StatesFile(entries, optimizer, meta, tuple(part for part in parts if part.worker is not None))


def parts_to_bytes(parts: Iterable[Part]) -> bytes:
    """Return parts of states as bytes that can be sent. UnsupportedError for a state that cannot be saved."""
    file = io.BytesIO()
    _write(file, parts)
    return file.getvalue()


def parts_from_bytes(data: bytes, origin: str = "parts of states") -> list[Part]:
    """Do the inverse of `parts_to_bytes`. Raises StatesFileError."""
    return _read(io.BytesIO(data), origin)[0]


def _write(
    file: IO[bytes],
    parts: Iterable[Part],
    optimizer: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> None:
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
    content = {"optimizer": optimizer, "meta": dict(meta or {}), "records": records}
    write_archive(file, KIND, json.loads(json.dumps(content)), arrays)


def _read(file: IO[bytes], origin: str) -> tuple[list[Part], dict[str, Any] | None, dict[str, Any]]:
    header, arrays = read_archive(file, KIND, origin)
    optimizer, meta = header.get("optimizer"), header.get("meta")
    if not (optimizer is None or isinstance(optimizer, dict)) or not isinstance(meta, dict):
        damaged(origin, "damaged: its header describes neither optimizer nor meta as it should")
    parts: list[Part] = []
    ends: dict[tuple[Key, int | None], int] = {}
    for record in _records(header, origin):
        key, shape, dtype = _key(record, origin), record.get("shape"), record.get("dtype")
        if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
            damaged(origin, f"damaged: key {shown(key)} has shape {shown(shape)}")
        if dtype not in [str(known) for known in SUPPORTED_DTYPES]:  # a list: what is there may have no hash
            damaged(origin, f"damaged: key {shown(key)} has dtype {shown(dtype)}")
        n_elems = math.prod(shape)
        begin, end = record.get("begin", 0), record.get("end", n_elems)
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= n_elems:
            damaged(origin, f"damaged: a part of elements [{begin!r}, {end!r}) of {n_elems}")
        worker = record.get("worker")
        if not (worker is None or (type(worker) is int and worker >= 0)):
            damaged(origin, f"damaged: a state of key {shown(key)} is said to be that of worker {shown(worker)}")
        if begin < ends.get((key, worker), 0):
            damaged(origin, f"damaged: element {begin} of key {shown(key)} is there twice")
        ends[key, worker] = end
        state = _unpack(record, arrays, origin)
        parts.append(Part(key, tuple(shape), dtype_of(str(dtype)), begin, end, state, worker))
    return parts, optimizer, meta


def _records(header: dict[str, Any], origin: str) -> list[dict[str, Any]]:
    records = header.get("records")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        damaged(origin, "damaged: its header lists no records")
    return records


def _key(record: dict[str, Any], origin: str) -> Key:
    try:
        return check_key(record.get("key"))
    except (TypeError, ValueError) as error:
        raise StatesFileError(f"{origin}: damaged: {error}") from error


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


def _unpack(record: dict[str, Any], arrays: list[HostArray], origin: str) -> State:
    packed = record.get("state")
    if not isinstance(packed, dict):
        damaged(origin, f"damaged: key {record.get('key')!r} has no state")
    if record.get("worker") is None and (type(packed.get("t")) is not int or packed["t"] < 0):
        damaged(origin, f"damaged: key {record.get('key')!r} has no state with a count of updates")
    state: State = {}
    for name, value in packed.items():
        if type(value) in (bool, int, float):
            state[name] = value
            continue
        index = value.get("array") if isinstance(value, dict) else None
        if type(index) is not int or not 0 <= index < len(arrays):
            damaged(origin, f"damaged: {shown(name)} in the state of key {record.get('key')!r} is {value!r}")
        array = arrays[index]
        state[name] = array[()] if value.get("scalar") and array.ndim == 0 else array
    return state


# --- spaces


def on_host(state: State) -> State:
    """The state with its arrays in host memory, as all else here takes them."""
    return {name: host_view(value, name) if is_device(value) else value for name, value in state.items()}


def in_space(state: State, space: Space) -> State:
    """The state with its arrays, which are in host memory, in a space."""
    return {name: space.from_host(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}


# --- slices


def slice_state(state: State, begin: int, end: int, n_elems: int) -> State:
    """The state of the elements [begin, end) of a key of n_elems; arrays are copied unless it is all of them.

    Raises UnsupportedError where an array does not run along the elements, ValueError for bounds outside the key.
    """
    if not 0 <= begin <= end <= n_elems:
        raise ValueError(f"elements [{begin}, {end}) are not within a key of {n_elems}")
    if (begin, end) == (0, n_elems):
        return dict(state)
    result: State = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            if value.shape != (n_elems,):
                raise UnsupportedError(
                    f"{shown(name)} of a state has shape {value.shape}, so it cannot be cut like its {n_elems} elements"
                )
            value = value[begin:end].copy()  # noqa: PLW2901
        result[name] = value
    return result


def join_states(parts: Sequence[tuple[int, int, State]], n_elems: int | None = None) -> State:
    """The state of a whole key from (begin, end, state) of its slices, in any order; empty ones are left out.

    n_elems: what the key has; None: where the last part ends. Raises ValueError where parts are missing, overlap, hold
    different things or different numbers ("t" aside: the largest counts).
    """
    ordered = sorted((part for part in parts if part[0] < part[1]), key=lambda part: part[0])
    ordered = ordered or list(parts[:1])
    if not ordered:
        raise ValueError("there are no parts to join")
    bounds = [0, *(end for _, end, _ in ordered)]
    if bounds[:-1] != [begin for begin, _, _ in ordered] or n_elems not in (None, bounds[-1]):
        cut = ", ".join(f"[{begin}, {end})" for begin, end, _ in ordered)
        raise ValueError(f"parts {cut} do not cover a key of {bounds[-1] if n_elems is None else n_elems} elements")
    first = ordered[0][2]
    if len(ordered) == 1:
        return dict(first)
    for _, _, state in ordered[1:]:
        if set(state) != set(first):
            raise ValueError(f"parts of a state hold different things: {sorted(first)} and {sorted(state)}")
    return {name: _join(name, ordered) for name in first}


def _join(name: str, parts: Sequence[tuple[int, int, State]]) -> Any:
    values = [state[name] for _, _, state in parts]
    if name == "t":
        return max(values)
    if not any(isinstance(value, np.ndarray) for value in values):
        # NaN, which equals nothing, agrees with NaN.
        if all(value == values[0] or (value != value and values[0] != values[0]) for value in values):  # noqa: PLR0124
            return values[0]
        raise ValueError(f"parts of a state have different {shown(name)}: {', '.join(str(value) for value in values)}")
    for (begin, end, _), value in zip(parts, values, strict=True):
        if not isinstance(value, np.ndarray) or value.shape != (end - begin,) or value.dtype != values[0].dtype:
            what = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else repr(value)
            raise ValueError(
                f"{shown(name)} in the part [{begin}, {end}) of a state is {what}, not one value per element"
            )
    return np.concatenate(values)
