"""Files of optimizer states: what is saved comes back, and nothing else is taken for a file of states."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mpikv import optimizers
from mpikv.errors import StatesFileError, UnsupportedError
from mpikv.optimizers import archive, states_file
from mpikv.optimizers.archive import to_bytes
from mpikv.optimizers.states import StateRecord, join_states, slice_state
from mpikv.optimizers.states_file import (
    StatesFile,
    load_states,
    packed,
    records_from_bytes,
    records_to_bytes,
    save_content,
)

FLOAT32 = np.dtype(np.float32)
FIXTURE = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "states" / "version-1.safetensors"


def whole(key, shape: tuple[int, ...], dtype, state: dict) -> StateRecord:
    return StateRecord(key, shape, np.dtype(dtype), 0, int(np.prod(shape)), state)


def told(value: Any) -> str:
    """All of it: types, dtypes, shapes, and every digit."""
    with np.printoptions(floatmode="unique", threshold=1000):
        return repr(value)


def example(small: bool = False) -> StatesFile:
    rng = np.random.default_rng(1)
    parts = [whole(1, (2,), np.float32, {"t": 3, "momentum": rng.standard_normal(2).astype(np.float32)})]
    if not small:
        adam = optimizers.create("adam", multi_precision=True)
        for key, dtype in (("1", np.float16), ("ünï/../code", ml_dtypes.bfloat16), (-(2**63), np.float64)):
            weight = rng.standard_normal((3, 4)).astype(dtype)
            grad = weight.astype(np.float32) if weight.dtype.itemsize == 2 else weight.copy()
            parts.append(whole(key, (3, 4), weight.dtype, adam.update(key, weight, grad, adam.init(weight))))
        numbers = {"t": 0, "x": 0.1, "nan": float("nan"), "inf": float("-inf"), "big": 2**80, "flag": True}
        parts.append(whole("numbers", (), np.int64, numbers))
        odd = [np.arange(6).reshape(2, 3)[:, ::-1], np.array(3.5), np.zeros((0, 2)), np.float32(0.1), np.array([True])]
        odd += [np.ones(3, ml_dtypes.bfloat16), np.array(2, np.uint64)]
        parts.append(whole("odd", (0,), np.uint8, {"t": 1, **{str(i): value for i, value in enumerate(odd)}}))
    return StatesFile({part.key: part for part in parts}, {"epoch": 3, "note": "ä"})


def save(path, file: StatesFile) -> None:
    save_content(path, packed(file.entries.values(), file.meta))


SMALL = records_to_bytes(example(small=True).entries.values())  # what is sent of it


def test_round_trip(tmp_path: pathlib.Path) -> None:
    """Also of what is sent; and the library reads it, too."""
    file, path = example(), tmp_path / "states"
    save(path, file)
    loaded = load_states(path)
    assert told(loaded) == told(file)
    assert os.listdir(tmp_path) == ["states"]
    sent = records_to_bytes(file.entries.values())
    assert told(records_from_bytes(sent)) == told([*file.entries.values()])
    arrays = [one for entry in loaded.entries.values() for one in entry.state.values() if isinstance(one, np.ndarray)]
    assert all(array.flags.writeable for array in arrays)  # so that they can be updated
    opened = safetensors.numpy.load_file(path)
    for key, entry in file.entries.items():
        for name, value in entry.state.items():
            if isinstance(value, (np.ndarray, np.generic)) and key != "1":
                assert told(opened[f"records/{key}/state/{name}"]) == told(np.asarray(value))
    assert opened["records/1/state/momentum"].shape == (2,)  # of two keys of one name the int, which comes first
    save(os.fsencode(path), example(small=True))
    assert told(load_states(str(path))) == told(example(small=True))
    save(path, StatesFile({}))
    assert told(load_states(path)) == told(StatesFile({}))


def test_any_text_is_a_key(tmp_path: pathlib.Path) -> None:
    keys = [1, "1", "1'", "\ud800", "\\ud800", "", "__metadata__", "a/b"]
    file = StatesFile({key: whole(key, (1,), np.float32, {"t": i, "m": np.full(1, i)}) for i, key in enumerate(keys)})
    save(tmp_path / "states", file)
    assert told(load_states(tmp_path / "states")) == told(file)


def test_the_format_stays() -> None:
    """A file of the first version that mpikv reads; a change of the format needs another version."""
    assert told(load_states(FIXTURE)) == told(example())


def test_parts(tmp_path: pathlib.Path) -> None:
    state = optimizers.create("adam").init(np.ones(4, np.float32))
    parts = [
        StateRecord("w", (8,), FLOAT32, 0, 4, state),
        StateRecord(7, (3,), FLOAT32, 3, 3, {"t": 2}),
        StateRecord("w", (8,), FLOAT32, 4, 8, state),
    ]
    assert told(records_from_bytes(records_to_bytes(parts))) == told(parts)
    assert records_from_bytes(records_to_bytes([])) == []
    (tmp_path / "parts").write_bytes(records_to_bytes(parts))
    with pytest.raises(StatesFileError, match=r"it holds elements \[0, 4\) of key 'w' alone"):
        load_states(tmp_path / "parts")
    overlapping = [parts[0], StateRecord("w", (8,), FLOAT32, 3, 8, {"t": 2})]
    with pytest.raises(StatesFileError, match="element 3 of key 'w' is there twice"):
        records_from_bytes(records_to_bytes(overlapping))


# --- damage


def test_every_truncation_and_every_flipped_byte(tmp_path: pathlib.Path) -> None:
    places = range(len(SMALL))
    flipped = (SMALL[:i] + bytes([SMALL[i] ^ flip]) + SMALL[i + 1 :] for i in places for flip in (1, 0x80))
    for damaged in (*(SMALL[:n] for n in places), *flipped):
        try:
            found = records_from_bytes(damaged, "here")
        except StatesFileError as error:
            assert str(error).startswith("here: ")  # noqa: PT017
        else:  # a byte of what pads the header
            assert told(found) == told(records_from_bytes(SMALL))
            assert damaged.replace(b"!", b" ") == SMALL
    (path := tmp_path / "states").write_bytes(b"")
    with pytest.raises(StatesFileError, match=f"{path}: it is empty"):
        load_states(path)


class Evil:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def raw(header: Any, data: bytes = b"") -> bytes:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def rewritten(header: Callable[[dict], None], data: bytes | None = None) -> bytes:
    """A file whose header was changed, and not its checksum."""
    end = 8 + int.from_bytes(SMALL[:8], "little")
    content = json.loads(SMALL[8:end])
    header(content)
    return raw(content, SMALL[end:] if data is None else data)


def tampered(change: Callable[[dict], Any]) -> bytes:
    """A file with the right checksum, and something else in its content."""
    content = states_file.packed(example(small=True).entries.values())
    change(content)
    with mock.patch.object(archive, "MARKS", set()):  # with which a dict that looks like an array is told from one
        return to_bytes(states_file.KIND, content)


def set_in(*path: Any) -> Callable[[Any], None]:
    """A change of a document: the value at a path."""

    def change(document: Any) -> None:
        for step in path[:-2]:
            document = document[step]
        document[path[-2]] = path[-1]

    return change


def zipped() -> bytes:
    """What mpikv wrote before."""
    file = io.BytesIO()
    np.savez(file, header=np.ones(3))
    return file.getvalue()


def tensor(dtype: str, size: int, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [size], "data_offsets": [begin, end]}


METADATA, MOMENTUM, ABSENT = "__metadata__", "records/1/state/momentum", {"array": "x", "scalar": False}
FOREIGN = {
    "text": (b"hello world\n" * 20, "not a file of states"),
    "zeros": (bytes(1000), "not a file of states"),
    "zip": (zipped(), "a zip file, as mpikv wrote before 0.1.0: this version reads safetensors; save it anew"),
    "pickle": (pickle.dumps({"a": Evil()}), "not a file of states"),
    "of others": (safetensors.numpy.save({"a": np.ones(3)}), "not a file of states"),
    "header is a list": (raw([]), "not a file of states"),
    "header is deep": (raw(b"[" * 100_000), "not a file of states"),
    "header of 16 EB": (b"\xff" * 8 + SMALL[8:], "not a file of states"),
    "other version": (rewritten(set_in(METADATA, "version", "2")), "written in version '2'"),
    "no version": (rewritten(lambda header: header[METADATA].pop("version")), "written in version None"),
    "other kind": (rewritten(set_in(METADATA, "format", "x")), "its format is 'x', not 'mpikv optimizer states'"),
    "no content": (rewritten(lambda header: header[METADATA].pop("content")), "damaged"),
    "other content": (rewritten(set_in(METADATA, "content", "{}")), "its checksum is wrong"),
    "other dtype": (rewritten(set_in(MOMENTUM, "dtype", "I32")), "its checksum is wrong"),
    "no dtype": (rewritten(set_in(MOMENTUM, "dtype", "F3")), "damaged"),
    "a dtype that NumPy has not": (rewritten(set_in(MOMENTUM, tensor("F8_E5M2", 8, 0, 8))), "damaged"),
    "other shape": (rewritten(set_in(MOMENTUM, "shape", [1, 2])), "its checksum is wrong"),
    "huge shape": (rewritten(set_in(MOMENTUM, "shape", [2**62, 2**62])), "damaged"),
    "too many bytes": (SMALL + b"0", "damaged"),
    "arrays that share their bytes": (rewritten(set_in("other", tensor("F32", 2, 0, 8))), "damaged"),
    "one array more": (rewritten(set_in("other", tensor("F32", 0, 8, 8))), "its checksum is wrong"),
    **{
        name: (tampered(change), words)
        for name, change, words in (
            ("no records", lambda content: content.pop("records"), "lists no records"),
            ("records of numbers", set_in("records", [1]), "lists no records"),
            ("key of a wrong type", set_in("records", 0, "key", 1.5), "a key is a str or an int"),
            ("key out of range", set_in("records", 0, "key", 2**63), "does not fit in 64 bits"),
            ("no key", lambda content: content["records"][0].pop("key"), "a key is a str or an int"),
            ("key twice", lambda content: content["records"].append(content["records"][0]), "is there twice"),
            ("weight's shape", set_in("records", 0, "shape", "2"), "key 1 has shape '2'"),
            ("many axes", set_in("records", 0, "shape", [1] * 65), "key 1 has shape"),
            ("negative shape", set_in("records", 0, "shape", [-2]), "key 1 has shape"),
            ("weight's dtype", set_in("records", 0, "dtype", ["float32"]), "has dtype"),
            ("begin below zero", set_in("records", 0, "begin", -1), "a record of elements"),
            ("begin behind the end", set_in("records", 0, "begin", 3), "a record of elements"),
            ("no end", set_in("records", 0, "end", None), "a record of elements"),
            ("a part", set_in("records", 0, "end", 1), r"it holds elements \[0, 1\) of key 1 alone"),
            ("worker below zero", set_in("records", 0, "worker", -1), "said to be that of worker -1"),
            ("no state", set_in("records", 0, "state", None), "has no state"),
            ("count is no int", set_in("records", 0, "state", "t", 1.5), "no state with a count"),
            ("count below zero", set_in("records", 0, "state", "t", -1), "no state with a count"),
            ("state of text", set_in("records", 0, "state", "momentum", "x"), "state of key 1 is 'x'"),
            ("array that is not there", set_in("records", 0, "state", "momentum", ABSENT), "no array 'x'"),
            ("array of no name", set_in("records", 0, "state", "momentum", {"array": ["x"]}), "'momentum' in the"),
            ("meta", set_in("meta", 3), "meta in its header is 3"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files(kind: str, tmp_path: pathlib.Path) -> None:
    content, words = FOREIGN[kind]
    path = tmp_path / "states"
    path.write_bytes(content)
    with pytest.raises(StatesFileError, match=f"^{path}: .*{words}"):
        load_states(path)
    path.write_bytes(tampered(lambda content: None))  # so it is the change that is refused
    assert told(load_states(path)) == told(StatesFile(example(small=True).entries))


# --- writing


def test_a_failed_save_leaves_the_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "states"
    save(path, example())
    before = path.read_bytes()
    bad = [whole("w", (1,), np.float32, {"t": 1, "other": object()})]
    with pytest.raises(UnsupportedError, match="key 'w' cannot be saved"):
        save_content(path, packed(bad))
    with pytest.raises(UnsupportedError, match="has dtype complex128; a file of states holds"):
        save_content(path, packed([whole("w", (1,), np.float32, {"t": 1, "z": np.ones(1, complex)})]))
    with pytest.raises(UnsupportedError, match="meta/x is of type object; a file of states holds arrays"):
        save_content(path, packed([], {"x": object()}))
    with pytest.raises(TypeError, match="a key is a str or an int"):
        save_content(path, packed([whole(1.5, (), np.float32, {"t": 0})]))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, example(small=True))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["states"]
    for call in (load_states, lambda path: save(path, example())):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            call(tmp_path / "nowhere" / "states")


# --- slices


def test_slice_and_join() -> None:
    state = {"t": 3, "rate": 0.5, "m": np.arange(10.0), "v": np.arange(10, dtype=np.float32)}
    parts = [(begin, end, slice_state(state, begin, end, 10)) for begin, end in ((4, 9), (0, 4), (9, 10), (4, 4))]
    assert parts[0][2]["m"].tolist() == [4, 5, 6, 7, 8]
    parts[0][2]["m"][0] = 4.0  # a copy, so that it may be changed
    assert told(join_states(parts, 10)) == told(state)
    whole = slice_state(state, 0, 10, 10)
    assert whole is not state
    assert told(join_states([(0, 10, whole)], 10)) == told(state)
    # A whole value's state may hold anything.
    assert join_states([(0, 4, {"t": 1, "other": "x"})], 4) == {"t": 1, "other": "x"}
    assert join_states([(0, 0, {"t": 1})], 0) == {"t": 1}


def test_join_takes_the_largest_count_and_no_other_difference() -> None:
    parts = [(0, 1, {"t": 3, "x": 0.5}), (1, 2, {"t": 5, "x": 0.5}), (2, 3, {"t": 4, "x": 0.5})]
    assert join_states(parts, 3) == {"t": 5, "x": 0.5}
    nan = float("nan")
    assert join_states([(0, 1, {"t": 3, "x": nan}), (1, 2, {"t": 5, "x": nan})], 2)["t"] == 5
    parts[2][2]["x"] = 0.25
    with pytest.raises(ValueError, match=r"different 'x': 0\.5, 0\.5, 0\.25"):
        join_states(parts, 3)


@pytest.mark.parametrize(
    ("text", "parts", "n"),
    [
        ("of no elements do not cover", [], 0),
        ("do not cover", [(1, 2, {"t": 0})], 2),
        ("do not cover", [(0, 1, {"t": 0}), (2, 3, {"t": 0})], 3),
        ("do not cover", [(0, 2, {"t": 0}), (1, 3, {"t": 0})], 3),
        (r"slices \[0, 2\) do not cover a key of 3", [(0, 2, {"t": 0})], 3),
        ("have different entries", [(0, 1, {"t": 0}), (1, 2, {"t": 0, "x": 1})], 2),
        ("not one value per element", [(0, 1, {"t": 0, "m": np.ones(1)}), (1, 2, {"t": 0, "m": 3.0})], 2),
        ("not one value per element", [(0, 1, {"t": 0, "m": np.ones(1)}), (1, 2, {"t": 0, "m": np.ones(2)})], 2),
        ("not one value per element", [(0, 1, {"m": np.ones(1)}), (1, 2, {"m": np.ones(1, np.float32)})], 2),
    ],
)
def test_parts_that_cannot_be_joined(text: str, parts: list, n: int) -> None:
    with pytest.raises(ValueError, match=text):
        join_states(parts, n)


def test_states_that_cannot_be_cut() -> None:
    with pytest.raises(UnsupportedError, match=r"'m' of a state has shape \(2, 2\)"):
        slice_state({"t": 0, "m": np.ones((2, 2))}, 0, 2, 4)
    for begin, end in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="not within a key of 4"):
            slice_state({"t": 0}, begin, end, 4)
