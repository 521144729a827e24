"""Capsules of DLPack, for arrays whose library is not a compiled one.

Source: dlpack.h, version 0.8 (DLManagedTensor), and the array API's `__dlpack__`.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from mpikv.tensors import BFLOAT16

CUDA = 2  # kDLCUDA
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # DLDataTypeCode by NumPy's kind; bfloat16 is 4, kDLBfloat
_NAME = b"dltensor"


class Exported(Protocol):
    """What a capsule tells of an array, which it keeps. strides: in bytes."""

    @property
    def address(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Kept:
    """What lives until the consumer calls the deleter."""

    def __init__(self, array: Exported, tensor: _Tensor, numbers: Any) -> None:
        self.array, self.tensor, self.numbers = array, tensor, numbers


def _function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_decref = _function("Py_DecRef", None, ctypes.c_void_p)
_incref = _function("Py_IncRef", None, ctypes.c_void_p)
_new = _function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)


def _delete(tensor: int) -> None:
    _decref(_Tensor.from_address(tensor).manager_ctx)


def _end(capsule: int) -> None:
    """A capsule that nobody has taken (which changes its name) lets go of its array itself."""
    if _is_valid(capsule, _NAME):
        _delete(_pointer(capsule, _NAME))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DELETER, _DESTRUCTOR = _Callback(_delete), _Callback(_end)


def capsule(array: Exported, device: tuple[int, int]) -> Any:
    """A new capsule 'dltensor' of an array on a device. Raises BufferError for a dtype that DLPack has not."""
    dtype, n = array.dtype, len(array.shape)
    code = 4 if dtype == BFLOAT16 else _CODES.get(dtype.kind)
    if code is None:
        raise BufferError(f"DLPack has no dtype {dtype}")
    numbers = (ctypes.c_int64 * (2 * n + 1))(*array.shape, *(stride // dtype.itemsize for stride in array.strides))
    tensor = _Tensor(array.address, *device, n, code, dtype.itemsize * 8, 1)
    tensor.shape = ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(ctypes.byref(numbers, n * 8), ctypes.POINTER(ctypes.c_int64))
    kept = _Kept(array, tensor, numbers)
    tensor.manager_ctx = id(kept)
    tensor.deleter = ctypes.cast(_DELETER, ctypes.c_void_p).value
    made = _new(ctypes.addressof(tensor), _NAME, ctypes.cast(_DESTRUCTOR, ctypes.c_void_p))
    _incref(id(kept))
    return made
