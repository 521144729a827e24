"""Files of optimizer states: what is saved comes back, and nothing else is taken for a file of states."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest

from mpikv import optimizers
from mpikv.errors import StatesFileError, UnsupportedError
from mpikv.optimizers import states_file
from mpikv.optimizers.states import StateRecord, join_states, slice_state
from mpikv.optimizers.states_file import StatesFile, load_states, records_from_bytes, records_to_bytes, save_states

FLOAT32 = np.dtype(np.float32)


def whole(key, shape: tuple[int, ...], dtype, state: dict) -> StateRecord:
    return StateRecord(key, shape, np.dtype(dtype), 0, int(np.prod(shape)), state)


def equal_states(a: dict, b: dict) -> bool:
    def same(x, y) -> bool:
        if isinstance(x, (np.ndarray, np.generic)):
            return type(x) is type(y) and x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        return type(x) is type(y) and (x == y or (x != x and y != y))  # noqa: PLR0124 - NaN

    return set(a) == set(b) and all(same(a[name], b[name]) for name in a)


def equal_parts(a: StateRecord, b: StateRecord) -> bool:
    return a._replace(state={}) == b._replace(state={}) and equal_states(a.state, b.state)


def equal_files(a: StatesFile, b: StatesFile) -> bool:
    return (
        (a.meta, list(a.entries)) == (b.meta, list(b.entries))
        and [type(key) for key in a.entries] == [type(key) for key in b.entries]
        and all(equal_parts(entry, b.entries[key]) for key, entry in a.entries.items())
    )


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
    save_states(path, file.entries.values(), meta=file.meta)


def saved(path: pathlib.Path, file: StatesFile) -> bytes:
    save(path, file)
    return path.read_bytes()


SMALL = records_to_bytes(example(small=True).entries.values())  # what is sent of it


def test_round_trip(tmp_path: pathlib.Path) -> None:
    file = example()
    path = tmp_path / "states"
    save(path, file)
    loaded = load_states(path)
    assert equal_files(loaded, file)
    assert os.listdir(tmp_path) == ["states"]
    arrays = [one for entry in loaded.entries.values() for one in entry.state.values() if isinstance(one, np.ndarray)]
    assert all(array.flags.writeable for array in arrays)  # so that they can be updated
    save(os.fsencode(path), example(small=True))
    assert equal_files(load_states(str(path)), example(small=True))
    save(path, StatesFile({}))
    assert equal_files(load_states(path), StatesFile({}))


def test_a_file_and_a_message_are_the_same_record(tmp_path: pathlib.Path) -> None:
    file = StatesFile(example().entries)
    data = saved(tmp_path / "states", file)
    assert data == records_to_bytes(file.entries.values())
    assert all(equal_parts(part, file.entries[part.key]) for part in records_from_bytes(data))


def test_numpy_reads_it_too(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "states.npz", example(small=True))
    with np.load(tmp_path / "states.npz", allow_pickle=False) as arrays:
        assert arrays["0"].tolist() == example(small=True).entries[1].state["momentum"].tolist()


def test_parts(tmp_path: pathlib.Path) -> None:
    state = optimizers.create("adam").init(np.ones(4, np.float32))
    parts = [
        StateRecord("w", (8,), FLOAT32, 0, 4, state),
        StateRecord(7, (3,), FLOAT32, 3, 3, {"t": 2}),
        StateRecord("w", (8,), FLOAT32, 4, 8, state),
    ]
    back = records_from_bytes(records_to_bytes(parts))
    assert all(equal_parts(a, b) for a, b in zip(back, parts, strict=True))
    assert records_from_bytes(records_to_bytes([])) == []
    (tmp_path / "parts").write_bytes(records_to_bytes(parts))
    with pytest.raises(StatesFileError, match=r"it holds elements \[0, 4\) of key 'w' alone"):
        load_states(tmp_path / "parts")
    overlapping = [parts[0], StateRecord("w", (8,), FLOAT32, 3, 8, {"t": 2})]
    with pytest.raises(StatesFileError, match="element 3 of key 'w' is there twice"):
        records_from_bytes(records_to_bytes(overlapping))


# --- damage


def test_every_truncation(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "states"
    for length in range(len(SMALL)):
        path.write_bytes(SMALL[:length])
        with pytest.raises(StatesFileError, match="states"):
            load_states(path)
    path.write_bytes(b"")
    with pytest.raises(StatesFileError, match=f"{path}: it is empty"):
        load_states(path)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_flipped_byte(flip: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "states"
    file = StatesFile(example(small=True).entries, {"epoch": 3, "note": "ä"})
    content = saved(path, file)
    noticed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(len(content)):
            damaged = bytearray(content)
            damaged[i] ^= flip
            path.write_bytes(damaged)
            try:
                loaded = load_states(path)
            except StatesFileError:
                noticed += 1
            else:
                assert equal_files(loaded, file), f"byte {i} was changed and not noticed"
    # What may go unnoticed is zip's own: dates, versions and attributes of members.
    assert noticed > 0.8 * len(content)


def rewritten(change=None, header=None, drop=(), add=(), compression=zipfile.ZIP_STORED) -> bytes:
    """A file with a valid checksum everywhere whose content was tampered with."""
    source = zipfile.ZipFile(io.BytesIO(SMALL))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name in source.namelist():
            if name in drop:
                continue
            data = source.read(name)
            if name == "header.json" and header is not None:
                content = json.loads(data)
                header(content)
                data = json.dumps(content).encode()
            archive.writestr(name, change(name, data) if change else data)
        for name, data in add:
            archive.writestr(name, data)
    return target.getvalue()


def npy(array: np.ndarray, **kwargs) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **kwargs)
    return file.getvalue()


def set_in(*path):
    """A change of the header: the value at a path."""

    def change(header):
        for step in path[:-2]:
            header = header[step]
        header[path[-2]] = path[-1]

    return change


class Evil:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def sharing() -> bytes:
    """A file with as many arrays as one likes in the bytes of one."""
    target = io.BytesIO(rewritten(lambda name, data: npy(np.zeros(2000, np.uint8)) if "npy" in name else data))
    with zipfile.ZipFile(target, "a") as archive:
        for i in range(1, 50):
            copy = zipfile.ZipInfo(f"{i}.npy")
            of = archive.getinfo("0.npy")
            copy.header_offset, copy.CRC, copy.file_size, copy.compress_size = (
                of.header_offset, of.CRC, of.file_size, of.compress_size,
            )  # fmt: skip
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
        archive._didModify = True
    return target.getvalue()


FOREIGN = {
    "arrays that share their bytes": sharing(),
    "text": b"hello world\n" * 20,
    "zeros": bytes(1000),
    "pickle": pickle.dumps({"a": Evil()}),
    "npy": npy(np.arange(3)),
    "pickled npy": npy(np.array([Evil()], object), allow_pickle=True),
    "zip without a header": rewritten(drop=["header.json"]),
    "missing array": rewritten(drop=["0.npy"]),
    "extra member": rewritten(add=[("1.npy", npy(np.arange(3)))]),
    "compressed": rewritten(compression=zipfile.ZIP_DEFLATED),
    "other version": rewritten(header=set_in("version", 2)),
    "no version": rewritten(header=lambda header: header.pop("version")),
    "other format": rewritten(header=set_in("format", "something")),
    "header is a list": rewritten(lambda name, data: b"[]" if name == "header.json" else data),
    "header is no JSON": rewritten(lambda name, data: b"{" if name == "header.json" else data),
    "header is deep": rewritten(lambda name, data: b"[" * 100000 if name == "header.json" else data),
    "header is no text": rewritten(lambda name, data: b"\xff\xfe\xfd" if name == "header.json" else data),
    "other shape": rewritten(header=set_in("arrays", 0, "shape", [1, 2])),
    "other dtype": rewritten(header=set_in("arrays", 0, "dtype", "float64")),
    "no dtype": rewritten(header=set_in("arrays", 0, "dtype", "fancy")),
    "object dtype": rewritten(header=set_in("arrays", 0, "dtype", "object")),
    "negative shape": rewritten(header=set_in("arrays", 0, "shape", [-2])),
    "huge shape": rewritten(
        lambda name, data: (
            data.replace(b"(2,), }" + b" " * 18, b"(2000000000000000000,), }") if "npy" in name else data
        ),
        header=set_in("arrays", 0, "shape", [2 * 10**18]),
    ),
    "shape of floats": rewritten(header=set_in("arrays", 0, "shape", [2.0])),
    "array of objects": rewritten(
        lambda name, data: npy(np.array([Evil()] * 2, object), allow_pickle=True) if name == "0.npy" else data
    ),
    "array too short": rewritten(lambda name, data: data[:-1] if name == "0.npy" else data),
    "array too long": rewritten(lambda name, data: data + b"0" if name == "0.npy" else data),
    "array without its header": rewritten(lambda name, data: b"12345678" if name == "0.npy" else data),
    "header of an array that ends early": rewritten(
        lambda name, data: data.replace(b"(2,)", b"(200") if name == "0.npy" else data
    ),
    "fortran order": rewritten(
        lambda name, data: npy(np.asfortranarray(np.ones((2, 2), np.float32))) if name == "0.npy" else data,
        header=set_in("arrays", 0, "shape", [2, 2]),
    ),
    "no records": rewritten(header=lambda header: header.pop("records")),
    "records of numbers": rewritten(header=set_in("records", [1])),
    "key of a wrong type": rewritten(header=set_in("records", 0, "key", 1.5)),
    "key out of range": rewritten(header=set_in("records", 0, "key", 2**63)),
    "no key": rewritten(header=lambda header: header["records"][0].pop("key")),
    "key twice": rewritten(header=lambda header: header["records"].append(header["records"][0])),
    "weight's shape": rewritten(header=set_in("records", 0, "shape", "2")),
    "weight's dtype": rewritten(header=set_in("records", 0, "dtype", "complex64")),
    "weight's dtype is a list": rewritten(header=set_in("records", 0, "dtype", ["float32"])),
    "no state": rewritten(header=set_in("records", 0, "state", None)),
    "no count": rewritten(header=lambda header: header["records"][0]["state"].pop("t")),
    "count is no int": rewritten(header=set_in("records", 0, "state", "t", 1.5)),
    "count below zero": rewritten(header=set_in("records", 0, "state", "t", -1)),
    "state of text": rewritten(header=set_in("records", 0, "state", "momentum", "x")),
    "array that is not there": rewritten(header=set_in("records", 0, "state", "momentum", {"array": 1})),
    "array numbered below": rewritten(header=set_in("records", 0, "state", "momentum", {"array": -1})),
    "meta": rewritten(header=set_in("meta", 3)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files(kind: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "states"
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(StatesFileError) as caught:
        load_states(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "share" not in kind or "its members claim to be larger than the file together" in str(caught.value)
    with pytest.raises(StatesFileError):
        records_from_bytes(FOREIGN[kind])
    path.write_bytes(rewritten())  # so it is the change that is refused
    assert equal_files(load_states(path), StatesFile(example(small=True).entries))


def test_a_plain_npz_is_foreign(tmp_path: pathlib.Path) -> None:
    for name, writer in (("a.npz", np.savez), ("b.npz", np.savez_compressed)):
        writer(tmp_path / name, momentum=np.ones(3))
        with pytest.raises(StatesFileError, match=f"{name}: not a file of states"):
            load_states(tmp_path / name)


def test_damaged_parts() -> None:
    good = records_to_bytes([StateRecord("w", (2,), FLOAT32, 0, 2, {"t": 1})])
    for bad in ({"begin": -1}, {"begin": 3}, {"end": None}, {"end": 1.5}):
        source = zipfile.ZipFile(io.BytesIO(good))
        header = json.loads(source.read("header.json"))
        header["records"][0].update(bad)
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr("header.json", json.dumps(header))
        with pytest.raises(StatesFileError, match="a record of elements"):
            records_from_bytes(target.getvalue(), "from rank 1")


def test_a_missing_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_states(tmp_path / "nowhere")


# --- writing


def test_a_failed_save_leaves_the_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "states"
    save(path, example())
    before = path.read_bytes()
    bad = [whole("w", (1,), np.float32, {"t": 1, "other": object()})]
    with pytest.raises(UnsupportedError, match="key 'w' cannot be saved"):
        save_states(path, bad)
    with pytest.raises(UnsupportedError, match="dtype complex128 cannot be saved"):
        save_states(path, [whole("w", (1,), np.float32, {"t": 1, "z": np.ones(1, complex)})])
    with pytest.raises(TypeError, match="JSON"):
        save_states(path, [], meta={"x": object()})
    with pytest.raises(TypeError, match="a key is a str or an int"):
        save_states(path, [whole(1.5, (), np.float32, {"t": 0})])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, example(small=True))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["states"]
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "no" / "directory", example())


def test_a_link_keeps_pointing_to_the_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "states", tmp_path / "latest"
    save(target, example())
    link.symlink_to(target)
    save(link, example(small=True))
    assert link.is_symlink()
    assert equal_files(load_states(target), example(small=True))


# --- slices


def test_slice_and_join() -> None:
    state = {"t": 3, "rate": 0.5, "m": np.arange(10.0), "v": np.arange(10, dtype=np.float32)}
    parts = [(begin, end, slice_state(state, begin, end, 10)) for begin, end in ((4, 9), (0, 4), (9, 10), (4, 4))]
    assert parts[0][2]["m"].tolist() == [4, 5, 6, 7, 8]
    parts[0][2]["m"][0] = 4.0  # a copy, so that it may be changed
    assert equal_states(join_states(parts, 10), state)
    assert equal_states(join_states(parts), state)
    whole = slice_state(state, 0, 10, 10)
    assert whole is not state
    assert equal_states(join_states([(0, 10, whole)]), state)
    # A whole value's state may hold anything.
    assert join_states([(0, 4, {"t": 1, "other": "x"})], 4) == {"t": 1, "other": "x"}
    assert join_states([(0, 0, {"t": 1})], 0) == {"t": 1}


def test_join_takes_the_largest_count_and_no_other_difference() -> None:
    parts = [(0, 1, {"t": 3, "x": 0.5}), (1, 2, {"t": 5, "x": 0.5}), (2, 3, {"t": 4, "x": 0.5})]
    assert join_states(parts) == {"t": 5, "x": 0.5}
    nan = float("nan")
    assert join_states([(0, 1, {"t": 3, "x": nan}), (1, 2, {"t": 5, "x": nan})])["t"] == 5
    parts[2][2]["x"] = 0.25
    with pytest.raises(ValueError, match=r"different 'x': 0\.5, 0\.5, 0\.25"):
        join_states(parts)


@pytest.mark.parametrize(
    ("text", "parts", "n"),
    [
        ("no slices", [], None),
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
def test_parts_that_cannot_be_joined(text: str, parts: list, n: int | None) -> None:
    with pytest.raises(ValueError, match=text):
        join_states(parts, n)


def test_states_that_cannot_be_cut() -> None:
    with pytest.raises(UnsupportedError, match=r"'m' of a state has shape \(2, 2\)"):
        slice_state({"t": 0, "m": np.ones((2, 2))}, 0, 2, 4)
    for begin, end in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="not within a key of 4"):
            slice_state({"t": 0}, begin, end, 4)
