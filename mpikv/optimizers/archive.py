"""A zip file of a JSON header and NumPy arrays. Damage is detected when it is read, and nothing in it is executed.

Members are stored, not compressed: `header.json`, then `0.npy`, `1.npy` and so on, which `numpy.load` opens, too. The
header repeats dtype and shape of every array, and zip keeps a CRC of every member, so that a changed byte or a missing
end is found. bfloat16, which .npy has no name for, is stored as uint16. The same contents give the same bytes.

Before memory is allocated, sizes in the header are checked against the size of the file. Nothing is ever unpickled.

Cost: writing streams the arrays; reading holds each array once and reads the file twice, first for the CRCs.
Source: PKWARE APPNOTE 6.3 (zip); NumPy enhancement proposal 1 (.npy).
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Sequence
from math import prod
from typing import IO, Any, NoReturn, TypeGuard

import numpy as np

from mpikv.arrays.as_numpy import BFLOAT16, SUPPORTED_DTYPES, HostArray, dtype_of
from mpikv.common.checks import LARGEST, plain, shown
from mpikv.errors import StatesFileError, UnsupportedError

HEADER = "header.json"
VERSION = 1
MOST_AXES = 64
_CHUNK_BYTES = 1 << 20  # read at one time, so that an array is not held twice
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's earliest date: equal states make equal files
# The dtypes of weights, and others for counts and flags in a user's own state.
DTYPES = (*SUPPORTED_DTYPES, *(np.dtype(name) for name in ("bool", "int16", "uint16", "uint32", "uint64")))


def write_archive(file: IO[bytes], kind: str, content: dict[str, Any], arrays: Sequence[HostArray]) -> None:
    """Write a header of `kind` and `content` (JSON), and the arrays. UnsupportedError for a dtype not in DTYPES."""
    for array in arrays:
        if array.dtype not in DTYPES:
            raise UnsupportedError(f"an array of dtype {array.dtype} cannot be saved in a file of states")
    described = [{"dtype": str(array.dtype), "shape": list(array.shape)} for array in arrays]
    header = {"format": kind, "version": VERSION, "arrays": described, **content}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(HEADER, _EPOCH), json.dumps(header))
        for i, array in enumerate(arrays):
            with archive.open(zipfile.ZipInfo(f"{i}.npy", _EPOCH), "w", force_zip64=True) as member:
                stored = array.view(np.uint16) if array.dtype == BFLOAT16 else array
                np.lib.format.write_array(member, np.asarray(stored, order="C"), version=(1, 0), allow_pickle=False)


def read_archive(file: IO[bytes], kind: str, origin: str) -> tuple[dict[str, Any], list[HostArray]]:
    """Return the header and the arrays that `write_archive` has written. origin: the file's name in errors.

    Raises StatesFileError, which says what is wrong, for any other file.
    """
    try:
        length = file.seek(0, os.SEEK_END)
        if length == 0:
            damaged(origin, "it is empty")
        with zipfile.ZipFile(file) as archive:
            return _read(archive, kind, origin, length)
    except StatesFileError:
        raise
    except zipfile.BadZipFile as error:
        raise StatesFileError(f"{origin}: not a file of states, or a damaged one ({plain(error)})") from error
    except Exception as error:  # of zipfile, struct, json and NumPy
        raise StatesFileError(f"{origin}: damaged ({type(error).__name__}: {plain(error)})") from error


def are_names(given: Any) -> TypeGuard[list[str]]:
    """Whether it is a list of distinct strings."""
    return isinstance(given, list) and all(type(name) is str for name in given) and len(set(given)) == len(given)


def is_shape(given: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of extents, of as many axes as NumPy has, so that their product is quickly known."""
    few = isinstance(given, list) and len(given) <= MOST_AXES
    return few and all(type(extent) is int and 0 <= extent <= LARGEST for extent in given)


def damaged(origin: str, what: str) -> NoReturn:
    """Raise the StatesFileError that names the file and what is wrong."""
    raise StatesFileError(f"{origin}: {what}")


def _read(archive: zipfile.ZipFile, kind: str, origin: str, length: int) -> tuple[dict[str, Any], list[HostArray]]:
    members = {member.filename: member for member in archive.infolist()}
    for name, member in members.items():
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            damaged(origin, f"not a file of states: its member {shown(name)} is compressed")
        if member.file_size > length:
            damaged(origin, f"damaged: its member {shown(name)} claims to be larger than the file")
    # Members that share bytes of the file could make a small file claim any number of large arrays.
    if sum(member.file_size for member in archive.infolist()) > length:
        damaged(origin, "damaged: its members claim to be larger than the file together")
    if HEADER not in members:
        damaged(origin, f"not a file of states: it has no {HEADER}")
    # All CRCs are checked before anything is parsed.
    wrong = archive.testzip()
    if wrong is not None:
        damaged(origin, f"damaged: the checksum of its member {shown(wrong)} is wrong")
    header = json.loads(archive.read(HEADER))
    if not isinstance(header, dict) or header.get("format") != kind:
        found = header.get("format") if isinstance(header, dict) else header
        damaged(origin, f"not a file of states: its format is {shown(found)}, not {kind!r}")
    if header.get("version") != VERSION:
        damaged(origin, f"written in version {shown(header.get('version'))}; this mpikv reads version {VERSION}")
    described = header["arrays"]
    wanted = {HEADER, *(f"{i}.npy" for i in range(len(described)))}
    if len(archive.infolist()) != len(members) or set(members) != wanted:
        odd = sorted(set(members) ^ wanted) or ["a member twice"]
        damaged(origin, f"damaged: members that are missing or do not belong there: {', '.join(map(shown, odd[:8]))}")
    return header, [_array(archive, i, text, origin) for i, text in enumerate(described)]


def _array(archive: zipfile.ZipFile, i: int, described: dict[str, Any], origin: str) -> HostArray:
    name = f"{i}.npy"
    dtype, shape = dtype_of(described["dtype"]), described["shape"]
    if dtype not in DTYPES or not is_shape(shape):
        damaged(origin, f"damaged: {name} is said to be {shown(described['dtype'])} of shape {shown(shape)}")
    shape = tuple(shape)
    stored = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
    n_bytes = prod(shape) * stored.itemsize
    with archive.open(name) as member:
        found = _npy_header(member.read(10), member.read)
        # Compared with what NumPy writes, not parsed, since ast.literal_eval fails now and then while other threads run
        # (CPython issue 106905, in 3.10 and early 3.11 and 3.12).
        if found != f"{{'descr': {stored.str!r}, 'fortran_order': False, 'shape': {shape}, }}":
            damaged(origin, f"damaged: {name} describes itself as {shown(found)}, and the header says {dtype}{shape}")
        if member.tell() + n_bytes != archive.getinfo(name).file_size:
            damaged(origin, f"damaged: {name} does not hold {n_bytes} bytes of values")
        array = np.empty(shape, stored)
        target, filled = array.reshape(-1).view(np.uint8), 0
        while filled < n_bytes:
            chunk = np.frombuffer(member.read(_CHUNK_BYTES), np.uint8)
            if not chunk.size:
                damaged(origin, f"truncated: {name} ends after {filled} of {n_bytes} bytes")
            target[filled : filled + chunk.size] = chunk
            filled += chunk.size
    return array.view(BFLOAT16) if dtype == BFLOAT16 else array


def _npy_header(prefix: bytes, read: Callable[[int], bytes]) -> str:
    """Return the header of a .npy array of version 1.0. NumPy's own reader would repair a damaged one and warn."""
    if prefix[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError(f"an array that begins with {prefix[:8]!r}")
    return read(int.from_bytes(prefix[8:], "little")).decode("latin1").strip()
