"""A file of JSON and arrays, in the format of safetensors: `safetensors.numpy.load_file` opens it, too.

Its content is one value: dicts, lists, tuples, texts and numbers, and arrays and tensors anywhere in them. The arrays
are the file's tensors, called by their way through the content, such as "weights/bias"; the JSON has {"array": name,
"scalar": whether it is one of NumPy's numbers} in their place, {"tensor": name} for PyTorch's, {"tuple": list}, and
{"pairs": list} for a dict with other keys than texts. The file's metadata is `format`, the kind of file;
`version`; `content`, the JSON; and `crc32`, a checksum of all that, since safetensors has none. Nothing in a file is
executed. The library holds sizes in the header against the size of the file before it allocates memory.

States of optimizers (states_file.py) and checkpoints (trainer/checkpoint.py) are such files, and what ranks send each
other of them is the same in bytes.

Cost: writing reads the arrays once more, for the checksum; reading holds them twice until it ends.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
from safetensors import SafetensorError, deserialize

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import BFLOAT16, HostArray, host_view
from mpikv.common.checks import plain, shown
from mpikv.common.files import open_regular, replacing
from mpikv.errors import StatesFileError, UnsupportedError

VERSION = "1"
MOST_HEADER_BYTES = 100_000_000  # the library's own limit
# The dtypes of weights, and others for counts and flags in a user's own state, by safetensors' names.
DTYPES: Mapping[str, np.dtype[Any]] = {
    **{"F64": np.dtype("f8"), "F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": BFLOAT16, "BOOL": np.dtype("?")},
    **{f"{letter}{8 * size}": np.dtype(f"{letter.lower()}{size}") for letter in "IU" for size in (8, 4, 2, 1)},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MARKS = {"array", "tensor", "tuple", "pairs"}


class _StoredTensor(NamedTuple):
    name: str
    dtype: str
    shape: Sequence[int]
    data: Any  # its bytes


def save(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all. Local, blocks. Raises OSError, and what `write_archive` raises."""
    with replacing(path) as file:
        write_archive(file, kind, content)


def load(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Return the content of a file. Local. Raises StatesFileError for any other file, OSError if there is none."""
    with open_regular(path) as file:
        return read_archive(file, kind, str(path))


def to_bytes(kind: str, content: Mapping[str, Any]) -> bytes:
    """Return the bytes of such a file."""
    write_archive(file := io.BytesIO(), kind, content)
    return file.getvalue()


def from_bytes(data: bytes, kind: str, origin: str) -> dict[str, Any]:
    """Do the inverse of `to_bytes`. Raises StatesFileError."""
    return read_archive(io.BytesIO(data), kind, origin)


def write_archive(file: IO[bytes], kind: str, content: Mapping[str, Any]) -> None:
    """Write a content. Raises UnsupportedError for an array of a dtype not in DTYPES, TypeError for what is no JSON."""
    (text, arrays), end = apart(content), 0
    tensors = [
        _StoredTensor(
            name, _NAMES[array.dtype], list(array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
        for name, array in arrays.items()
    ]
    tensors.sort(key=lambda one: -DTYPES[one.dtype].itemsize)  # each begins at a multiple of its elements' size
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


def apart(content: Any) -> tuple[str, dict[str, HostArray]]:
    """Return a content as JSON, and its arrays by their names. Raises UnsupportedError for what cannot be saved."""
    arrays: dict[str, HostArray] = {}
    return json.dumps(_apart(content, "", arrays)), arrays


def _apart(value: Any, name: str, arrays: dict[str, HostArray]) -> Any:
    """Return a content as JSON. name: of the way to it. Its arrays are added to `arrays`."""
    within = f"{name}/" if name else ""
    if isinstance(value, Mapping):
        items = [(key, _apart(one, f"{within}{key}", arrays)) for key, one in value.items()]
        if all(type(key) is str for key, _ in items) and not MARKS & value.keys():
            return dict(items)
        return {"pairs": [[_apart(key, name, arrays), one] for key, one in items]}
    if isinstance(value, (list, tuple)):
        parts = [_apart(one, f"{within}{_called(one, i)}", arrays) for i, one in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if value is None or type(value) in (str, bool, int, float):
        return value
    array = _array_of(value, name)
    name = name.encode(errors="backslashreplace").decode()  # UTF-8, and the name of a parameter may be any str
    while name in arrays:
        name += "'"
    arrays[name] = array
    if tensors.is_tensor(value):
        return {"tensor": name}
    return {"array": name, "scalar": isinstance(value, np.generic)}


def _array_of(value: Any, name: str) -> HostArray:
    """Return an array of any library in host memory."""
    if tensors.is_tensor(value):
        value = value.detach().cpu()
        value = value if str(value.dtype) == "torch.bfloat16" else value.numpy()  # of which NumPy has none
    if not isinstance(value, (np.ndarray, np.generic)):
        try:
            value = host_view(value, name)
        except TypeError:
            holds = "a file of states holds arrays, tensors, numbers, texts, None, and dicts, lists and tuples of these"
            raise UnsupportedError(f"{name} is of type {type(value).__name__}; {holds}") from None
    if value.dtype not in _NAMES:
        listed = ", ".join(map(str, _NAMES))
        raise UnsupportedError(f"{name or 'an array'} has dtype {value.dtype}; a file of states holds {listed}")
    return np.asarray(value)


def together(text: str, arrays: Mapping[str, HostArray], origin: str) -> Any:
    """Do the inverse of `apart`. Raises StatesFileError for an array that is not there, ValueError for no JSON."""

    def whole(found: dict[str, Any]) -> Any:
        """Return what a mark stands for."""
        if found.keys() == {"tuple"}:
            return tuple(found["tuple"])
        if found.keys() == {"pairs"}:
            return {key: one for key, one in found["pairs"]}  # noqa: C416 - dict() would take three of them
        name = found.get("array", found.get("tensor"))
        if type(name) is not str or found.keys() not in ({"array", "scalar"}, {"tensor"}):
            return found
        if name not in arrays:
            damaged(origin, f"damaged: it has no array {shown(name)}")
        if "tensor" in found:
            return tensors.in_memory_of(np.array(arrays[name]))[0]
        return arrays[name][()] if found["scalar"] and not arrays[name].ndim else arrays[name]

    return json.loads(text, object_hook=whole)


def _called(one: Any, i: int) -> Any:
    """Return what an element of a list is called in the names of its arrays: as the key that it is of, if it is."""
    key = one.get("key") if isinstance(one, Mapping) else None
    return key if isinstance(key, (str, int)) else i


def read_archive(file: IO[bytes], kind: str, origin: str) -> dict[str, Any]:
    """Return the content of a file. Raises StatesFileError, which names `origin`, for any other file."""
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
        arrays = {one.name: np.frombuffer(one.data, DTYPES[one.dtype]).reshape(one.shape) for one in tensors}

        content = together(text, arrays, origin)
        if not isinstance(content, dict):
            damaged(origin, f"damaged: its content is {shown(content)}")
        return content
    except StatesFileError:
        raise
    except SafetensorError as error:
        raise StatesFileError(f"{origin}: not a file of states, or a damaged one ({plain(error)})") from error
    except Exception as error:  # of json and NumPy
        raise StatesFileError(f"{origin}: damaged ({type(error).__name__}: {plain(error)})") from error


def arrays_by_name(found: Any, origin: str) -> dict[str, HostArray]:
    """Return a part of a content that has to be a dict of arrays. Raises StatesFileError for anything else."""
    if type(found) is not dict or not all(isinstance(one, np.ndarray) for one in found.values()):
        damaged(origin, f"damaged: {shown(found)} in place of arrays by their names")
    arrays: dict[str, HostArray] = found
    return arrays


def damaged(origin: str, what: str) -> NoReturn:
    """Raise the StatesFileError that names the file and what is wrong."""
    raise StatesFileError(f"{origin}: {plain(what)}")


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
