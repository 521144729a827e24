"""Arrays of any library, seen as NumPy arrays in host memory.

Three kinds are told apart by what they can do, not by their library: NumPy arrays; device arrays (they show
`__cuda_array_interface__` and have CuPy's `get` and `set`); anything else with DLPack on the CPU. PyTorch and JAX have
ways of their own that do better than DLPack (tensors.py). Reading is a view where memory can be shared and one copy
where not; writing goes into the caller's own memory.

Two dtypes are kept apart: the one a value is stored and moved in, and the one it is added in. float16 and bfloat16 are
added in float32, since neither MPI nor NumPy adds them with enough digits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpikv.arrays import tensors
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError

HostArray = npt.NDArray[Any]

BFLOAT16 = tensors.BFLOAT16
_DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int8", "uint8", "int32", "int64"))
SUPPORTED_DTYPES: tuple[np.dtype[Any], ...] = (*_DTYPES, BFLOAT16)
_BY_NAME = {str(dtype): dtype for dtype in SUPPORTED_DTYPES}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype with a name such as 'float32' or 'bfloat16'."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def dtype_named(dtype: Any) -> np.dtype[Any]:
    """Return the dtype for a name or a type. Raises UnsupportedError for one that a store cannot hold."""
    found = None
    if dtype is not None:  # which NumPy takes for float64
        with contextlib.suppress(Exception):  # what NumPy and odd objects raise is of many kinds
            found = dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    if found is None or found not in SUPPORTED_DTYPES:
        raise unsupported(f"dtype {shown(dtype)}")
    return found


def unsupported(text: str) -> UnsupportedError:
    """Return the error for a dtype that a store cannot hold. text: what has it."""
    return UnsupportedError(f"{text}; a store holds {', '.join(map(str, SUPPORTED_DTYPES))}")


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype in (np.float16, BFLOAT16) else dtype


def is_device(array: object) -> bool:
    if tensors.is_tensor(array):  # PyTorch raises RuntimeError when a parameter is asked for the interface
        return False
    return hasattr(array, "__cuda_array_interface__") and hasattr(array, "get")


def is_elsewhere(array: object) -> bool:
    """Return whether its values are in other memory than the host's, so that the host can see a copy of them alone."""
    return tensors.is_elsewhere(array) if tensors.is_tensor(array) else _on_gpu(array)


def _on_gpu(array: object) -> bool:
    """Return whether it is an array of CuPy, Numba or the like, which say so. Not to be asked of PyTorch's tensors."""
    return hasattr(array, "__cuda_array_interface__")


def is_space_array(value: object) -> bool:
    """Return whether it is an array as a store works on it: NumPy's, or CuPy's."""
    return isinstance(value, np.ndarray) or is_device(value)


def is_array(value: object) -> bool:
    """Return whether `value` is one array (of any library), not a list of arrays or a number of Python's."""
    return (
        isinstance(value, (np.ndarray, np.generic))
        or is_device(value)
        or hasattr(value, "__dlpack__")
        or _on_gpu(value)
    )


def host_view(array: Any, what: str) -> HostArray:
    """See `array` as a NumPy array: a view of the same memory where the host can see it, a copy of device memory.
    Local.

    Raises TypeError when `what` is no array, UnsupportedError for a dtype or memory that cannot be read.
    """
    if isinstance(array, np.generic):
        array = np.asarray(array)
    if isinstance(array, np.ndarray):
        host = array
    elif is_device(array):
        host = array.get()
    elif hasattr(array, "__dlpack__"):
        try:
            host = tensors.view(array)
        except UnsupportedError as error:
            raise UnsupportedError(f"{what}: {error}") from None
        except Exception as error:
            raise UnsupportedError(f"{what}: cannot read a {type(array).__name__} in host memory: {error}") from error
    elif _on_gpu(array):
        raise UnsupportedError(
            f"{what}: a {type(array).__module__}.{type(array).__name__} is in device memory, and only a store that "
            "uses this GPU can read it there: hand over a copy in host memory"
        )
    else:
        raise TypeError(f"{what} is an array (NumPy, CuPy or anything with DLPack), not {type(array).__name__}")
    if host.dtype not in SUPPORTED_DTYPES:
        raise unsupported(f"{what} has dtype {host.dtype}")
    return host


def as_host(what: str, value: Any, dtype: Any = None) -> HostArray:
    """Make NumPy's array of a list, a number or an array, in `dtype`. TypeError, UnsupportedError where it cannot."""
    wanted = None if dtype is None else dtype_named(dtype)
    try:
        array = np.asarray(value)
        return array if wanted is None else array.astype(wanted, copy=False)
    except Exception as error:
        raise TypeError(f"{what} is no array and cannot be made one: {shown(value)}") from error


def shape_and_dtype(array: Any, what: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of an array, without moving its values where it is a device array."""
    if not isinstance(array, np.ndarray) and not tensors.is_tensor(array) and is_elsewhere(array):
        dtype = np.dtype(array.dtype)
        if dtype in SUPPORTED_DTYPES:
            return tuple(array.shape), dtype
    if tensors.is_elsewhere(array) or (tensors.is_jax(array) and not tensors.is_traced(array)):
        shape, name = tensors.shape_and_dtype(array)
        if name in _BY_NAME:
            return shape, _BY_NAME[name]
    host = host_view(array, what)
    return host.shape, host.dtype


def is_writable(array: Any, what: str) -> bool:
    if not isinstance(array, np.ndarray):
        if isinstance(array, np.generic) or (tensors.is_jax(array) and not tensors.is_traced(array)):
            return False
        if is_elsewhere(array):
            return True
    return host_view(array, what).flags.writeable


def check_writable(array: Any, what: str) -> None:
    """Raise UnsupportedError or TypeError when a result cannot be written into `array`."""
    if not is_array(array) or isinstance(array, np.generic):
        raise TypeError(f"{what} is an array to write into, not {type(array).__name__}")
    if not is_writable(array, what):
        hint = (
            " (JAX's arrays cannot be changed; with out=None the result is returned)" if tensors.is_jax(array) else ""
        )
        raise UnsupportedError(f"{what} is read-only{hint}")


def write(out: Any, value: HostArray, what: str) -> None:
    """Copy `value` (same number of elements) into `out`, in out's shape and dtype. Local."""
    if not isinstance(out, np.ndarray) and is_elsewhere(out):
        _write_elsewhere(out, value, what)
        return
    view = host_view(out, what)
    np.copyto(view, value.reshape(view.shape), casting="unsafe")


def _write_elsewhere(out: Any, value: HostArray, what: str) -> None:
    if is_device(out):
        # `asarray`, not `ascontiguousarray`, which would make a 0-dimensional array 1-dimensional.
        host = np.asarray(value.reshape(out.shape), dtype=out.dtype, order="C")
        if out.flags.c_contiguous:
            out.set(host)
        else:
            whole = out.copy()  # CuPy sets contiguous arrays only
            whole.set(host)
            out[...] = whole
    elif tensors.is_tensor(out):
        tensors.write(out, value.reshape(tuple(out.shape)))
    else:
        host_view(out, what)  # which says why not


def flat_copy(array: Any, what: str) -> HostArray:
    """Return the elements of `array` in C order, as a new contiguous 1-D array of its dtype."""
    host = host_view(array, what)
    try:
        return np.array(host, copy=True, order="C").reshape(-1)
    except MemoryError as error:
        raise MemoryError(f"{what}: {error}") from None


def sum_devices(arrays: Sequence[Any], what: str, *, on_device: bool, combine: np.ufunc = np.add) -> HostArray:
    """Return the sum of one worker's device arrays, flat, contiguous, in their dtype; always new memory.

    They are added in the order given, float16 and bfloat16 in float32 and rounded once. `on_device` adds on the first
    array's device, so that one array crosses to the host instead of one per device. combine: used in place of adding.
    """
    if len(arrays) == 1:
        return flat_copy(arrays[0], what)
    if on_device and combine is np.add and all(is_device(array) for array in arrays):
        return flat_copy(_sum_on_device(arrays), what)
    first = host_view(arrays[0], what)
    total = np.array(first, dtype=sum_dtype(first.dtype), copy=True, order="C")
    for array in arrays[1:]:
        combine(total, host_view(array, what), out=total, casting="unsafe")
    return total.astype(first.dtype, copy=False).reshape(-1)


def _sum_on_device(arrays: Sequence[Any]) -> Any:
    first = arrays[0]
    total = first.astype(sum_dtype(np.dtype(first.dtype)))  # a copy: astype always makes one
    for array in arrays[1:]:
        total += array
    return total.astype(first.dtype)
