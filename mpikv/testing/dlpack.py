"""Capsules of DLPack, for arrays whose library is not a compiled one.

Source: dlpack.h, version 1.0 (DLManagedTensor, DLManagedTensorVersioned), and the array API's `__dlpack__`.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from mpikv.tensors import BFLOAT16

CUDA = 2  # kDLCUDA
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # DLDataTypeCode by NumPy's kind; bfloat16 is 4, kDLBfloat


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
    )


class _Managed(ctypes.Structure):
    """Before version 1."""

    name = b"dltensor"
    _fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    name = b"dltensor_versioned"
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Form = type[_Managed] | type[_Versioned]


class _Kept:
    """What lives until the consumer calls the deleter."""

    def __init__(self, array: Exported, managed: _Managed | _Versioned, numbers: Any) -> None:
        self.array, self.managed, self.numbers = array, managed, numbers


def _function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_decref = _function("Py_DecRef", None, ctypes.c_void_p)
_incref = _function("Py_IncRef", None, ctypes.c_void_p)
_new = _function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)


_fetch = _function("PyErr_Fetch", None, *[ctypes.POINTER(ctypes.c_void_p)] * 3)
_restore = _function("PyErr_Restore", None, *[ctypes.c_void_p] * 3)

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _functions(form: _Form) -> tuple[Any, Any]:
    """The deleter of such a structure, and the destructor of its capsule."""

    def delete(managed: int) -> None:
        _decref(form.from_address(managed).manager_ctx)

    def end(capsule: int) -> None:
        """A capsule that nobody has taken (which changes its name) lets go of its array itself."""
        error = [ctypes.c_void_p() for _ in range(3)]  # one that is on its way is none of these calls'
        _fetch(*error)
        if _is_valid(capsule, form.name):
            delete(_pointer(capsule, form.name))
        _restore(*error)

    return _Callback(delete), _Callback(end)


_FUNCTIONS = {form: _functions(form) for form in (_Managed, _Versioned)}


def capsule(array: Exported, device: tuple[int, int], max_version: tuple[int, int] | None) -> Any:
    """A new capsule of an array on a device. Raises BufferError for a dtype that DLPack has not.

    max_version: the consumer's; None: it knows 'dltensor' only, not 'dltensor_versioned'.
    """
    dtype, n = array.dtype, len(array.shape)
    code = 4 if dtype == BFLOAT16 else _CODES.get(dtype.kind)
    if code is None:
        raise BufferError(f"DLPack has no dtype {dtype}")
    numbers = (ctypes.c_int64 * (2 * n + 1))(*array.shape, *(stride // dtype.itemsize for stride in array.strides))
    tensor = _Tensor(array.address, *device, n, code, dtype.itemsize * 8, 1)
    tensor.shape = ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(ctypes.byref(numbers, n * 8), ctypes.POINTER(ctypes.c_int64))
    managed = _Versioned(major=1) if max_version is not None and max_version[0] >= 1 else _Managed()
    deleter, destructor = (ctypes.cast(one, ctypes.c_void_p) for one in _FUNCTIONS[type(managed)])
    kept = _Kept(array, managed, numbers)
    managed.tensor, managed.manager_ctx, managed.deleter = tensor, id(kept), deleter.value
    made = _new(ctypes.addressof(managed), managed.name, destructor)
    _incref(id(kept))
    return made
