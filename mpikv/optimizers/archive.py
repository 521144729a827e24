"""A file of arrays and JSON, in the format of safetensors: `safetensors.numpy.load_file` opens it, too.

The arrays are the file's tensors. Its metadata is `format`, the kind of file; `version`; `content`, the JSON; and
`crc32`, a checksum of all that, since safetensors has none. Nothing in a file is executed. The library holds sizes in
the header against the size of the file before it allocates memory.

Cost: writing reads the arrays once more, for the checksum; reading holds them twice until it ends.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Container, Mapping, Sequence
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
from safetensors import SafetensorError, deserialize

from mpikv.arrays.as_numpy import BFLOAT16, HostArray
from mpikv.common.checks import plain, shown
from mpikv.errors import StatesFileError, UnsupportedError

VERSION = "1"
MOST_HEADER_BYTES = 100_000_000  # the library's own limit
# The dtypes of weights, and others for counts and flags in a user's own state, by safetensors' names.
DTYPES: Mapping[str, np.dtype[Any]] = {
    **{"F64": np.dtype("f8"), "F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": BFLOAT16, "BOOL": np.dtype("?")},
    **{f"{letter}{8 * size}": np.dtype(f"{letter.lower()}{size}") for letter in "IU" for size in (8, 4, 2, 1)},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _StoredTensor(NamedTuple):
    name: str
    dtype: str
    shape: Sequence[int]
    data: Any  # its bytes


def write_archive(file: IO[bytes], kind: str, content: Mapping[str, Any], arrays: Mapping[str, HostArray]) -> None:
    """Write arrays by name, and `content` (JSON). UnsupportedError for a dtype not in DTYPES, TypeError for no JSON."""
    for array in arrays.values():
        if array.dtype not in _NAMES:
            raise UnsupportedError(f"an array of dtype {array.dtype} cannot be saved in a file of states")
    tensors = [
        _StoredTensor(
            name, _NAMES[array.dtype], list(array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
        for name, array in arrays.items()
    ]
    tensors.sort(key=lambda one: -DTYPES[one.dtype].itemsize)  # each begins at a multiple of its elements' size
    text, end = json.dumps(content), 0
    metadata = {"format": kind, "version": VERSION, "content": text, "crc32": _checksum(text, tensors)}
    header: dict[str, Any] = {"__metadata__": metadata}
    for one in tensors:
        begin, end = end, end + one.data.size
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    # Not by the library, which would hold all arrays in memory once or twice more.
    file.write(len(described).to_bytes(8, "little") + described)
    for one in tensors:
        file.write(one.data)


def read_archive(file: IO[bytes], kind: str, origin: str) -> tuple[dict[str, Any], dict[str, HostArray]]:
    """Return the content and the arrays of a file. Raises StatesFileError, which names `origin`, for any other file."""
    try:
        begin = file.read(8)
        if not begin:
            damaged(origin, "it is empty")
        if begin.startswith(b"PK"):
            damaged(origin, "a zip file, as mpikv wrote before 0.1.0: this version reads safetensors; save it anew")
        metadata = _metadata(file.read(min(int.from_bytes(begin, "little"), MOST_HEADER_BYTES)))
        if metadata.get("format") != kind:
            damaged(origin, f"not a file of states: its format is {shown(metadata.get('format'))}, not {kind!r}")
        if metadata.get("version") != VERSION:
            damaged(origin, f"written in version {shown(metadata.get('version'))}; this mpikv reads version {VERSION}")
        file.seek(0)
        opened: Any = deserialize(file.read())  # type: ignore[no-untyped-call]
        tensors = [_StoredTensor(name, one["dtype"], one["shape"], one["data"]) for name, one in opened]
        text = metadata["content"]
        if metadata.get("crc32") != _checksum(text, tensors):
            damaged(origin, "damaged: its checksum is wrong")
        content = json.loads(text)
        if not isinstance(content, dict):
            damaged(origin, f"damaged: its content is {shown(content)}")
        return content, {one.name: np.frombuffer(one.data, DTYPES[one.dtype]).reshape(one.shape) for one in tensors}
    except StatesFileError:
        raise
    except SafetensorError as error:
        raise StatesFileError(f"{origin}: not a file of states, or a damaged one ({plain(error)})") from error
    except Exception as error:  # of json and NumPy
        raise StatesFileError(f"{origin}: damaged ({type(error).__name__}: {plain(error)})") from error


def free_name(name: str, taken: Container[str]) -> str:
    """Return a name for an array that is not taken, and that is text in UTF-8: keys may be any str."""
    name = name.encode(errors="backslashreplace").decode()
    while name in taken:
        name += "'"
    return name


def damaged(origin: str, what: str) -> NoReturn:
    """Raise the StatesFileError that names the file and what is wrong."""
    raise StatesFileError(f"{origin}: {what}")


def _metadata(header: bytes) -> dict[str, Any]:
    """Return what a file's header tells of mpikv, before the whole file is read: {} for a file of somebody else's."""
    try:
        found = json.loads(header)["__metadata__"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _checksum(text: str, tensors: Sequence[_StoredTensor]) -> str:
    found = zlib.crc32(text.encode())
    for one in sorted(tensors):
        found = zlib.crc32(one.data, zlib.crc32(f"{one.name} {one.dtype} {[*one.shape]}".encode(), found))
    return f"{found:08x}"
