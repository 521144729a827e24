"""The loops of 2bit, 1bit and int8 as machine code, where Numba is installed (the extra `fast`).

Each does in one pass over memory what NumPy does in several, with the same bits: no `fastmath`, and every sum is
rounded to float32 by itself. Without Numba, or where it does not work, `encode` is NumPy's.

A loop is compiled when the state of the first piece that needs it is made, which `init` of a key does. It takes
seconds, which would stall a training step; and a thread in the background would take the core that training needs.
Numba keeps the machine code beside this file or in the user's cache; where it can write to neither, each process
compiles. `import mpikv` does not import Numba. The loops give the interpreter's lock back while they run.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mpikv.arrays import HostArray

_CHUNK = 1024  # values whose codes are made before they are packed: both loops over them use a core's vectors
_INFINITY = np.float32(np.inf)
_LEAST = np.finfo(np.float32).tiny
_LARGEST = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # times 127 it is no infinity
_ZERO, _ONE, _127 = np.float32(0), np.float32(1), np.float32(127)
_ROUNDER = np.float32(3 << 22)  # what is added to this is rounded to a whole number, ties to even


def _two_bit(values: HostArray, residual: HostArray, t: Any, data: HostArray) -> None:
    codes = np.zeros(_CHUNK, np.uint8)
    n = values.size
    for begin in range(0, n, _CHUNK):
        length = min(_CHUNK, n - begin)
        of, left = values[begin : begin + length], residual[begin : begin + length]
        for i in range(length):
            total = left[i] + of[i]
            plus, minus = total >= t, total <= -t
            codes[i] = np.uint8(3) if plus else (np.uint8(2) if minus else np.uint8(0))
            rest = total - (t if plus else (-t if minus else _ZERO))
            left[i] = rest if abs(rest) < _INFINITY else _ZERO
        codes[length : (length + 3) // 4 * 4] = 0
        packed = data[begin // 4 : (begin + length + 3) // 4]
        for j in range(packed.size):
            packed[j] = codes[4 * j] << 6 | codes[4 * j + 1] << 4 | codes[4 * j + 2] << 2 | codes[4 * j + 3]


def _one_bit(values: HostArray, residual: HostArray, t: Any, data: HostArray) -> None:
    codes = np.zeros(_CHUNK, np.uint8)
    n = values.size
    for begin in range(0, n, _CHUNK):
        length = min(_CHUNK, n - begin)
        of, left = values[begin : begin + length], residual[begin : begin + length]
        for i in range(length):
            total = left[i] + of[i]
            above = total > t
            codes[i] = np.uint8(1) if above else np.uint8(0)
            rest = total + (-_ONE if above else _ONE)
            left[i] = rest if abs(rest) < _INFINITY else _ZERO
        codes[length : (length + 7) // 8 * 8] = 0
        packed = data[begin // 8 : (begin + length + 7) // 8]
        for j in range(packed.size):
            k = 8 * j
            high = codes[k] << 7 | codes[k + 1] << 6 | codes[k + 2] << 5 | codes[k + 3] << 4
            packed[j] = high | codes[k + 4] << 3 | codes[k + 5] << 2 | codes[k + 6] << 1 | codes[k + 7]


def _int8(values: HostArray, block: int, data: HostArray) -> None:
    scale_ = np.zeros(1, np.float32)
    scale_bytes = scale_.view(np.uint8)
    n = values.size
    to = 0
    for begin in range(0, n, block):
        of = values[begin : min(begin + block, n)]
        magnitudes = of.view(np.int32)
        most = np.int32(0)
        for i in range(of.size):
            magnitude = np.int32(magnitudes[i] & np.int32(0x7FFFFFFF))
            most = max(most, magnitude)
        scale_.view(np.int32)[0] = most
        scale = scale_[0] / _127
        codes = data[to + 4 : to + 4 + of.size].view(np.int8)
        if not (scale < _INFINITY):
            scale_[0] = np.nan
            codes[:] = 0
        elif scale < _LEAST:
            scale_[0] = _ZERO
            codes[:] = 0
        else:
            scale_[0] = min(scale, _LARGEST)
            inverse = _ONE / scale_[0]
            for i in range(of.size):
                codes[i] = np.int8(np.int32((of[i] * inverse + _ROUNDER) - _ROUNDER))
        data[to : to + 4] = scale_bytes
        to += 4 + of.size


_LOOPS: dict[str, tuple[Callable[..., None], str]] = {
    "2bit": (_two_bit, "values, float32[::1], float32, uint8[::1]"),
    "1bit": (_one_bit, "values, float32[::1], float32, uint8[::1]"),
    "int8": (_int8, "values, int64, uint8[::1]"),
}
_compiled: dict[str, Callable[..., None] | None] = {}
_lock = threading.Lock()


def prepare(name: str) -> None:
    """Compile the loop of this codec, once in a process. Takes seconds, where Numba is there; else does nothing."""
    with _lock:
        if name not in _compiled:
            _compiled[name] = _compile(*_LOOPS[name])


def encode(name: str, *arguments: Any) -> bool:
    """Encode by the compiled loop. False, with nothing written, where there is none for these arrays."""
    loop = _compiled.get(name)
    arrays = [one for one in arguments if isinstance(one, np.ndarray)]
    floats = [one for one in arrays if one.dtype != np.uint8]
    if loop is None or not all(one.dtype == np.float32 and one.dtype.isnative for one in floats):
        return False
    if not all(one.flags.c_contiguous and one.flags.aligned for one in arrays):
        return False
    loop(*arguments)
    return True


def describe() -> str:
    """Say whether Numba is used, for `mpikv info`. Imports it where it is there."""
    if importlib.util.find_spec("numba") is None:
        return "NumPy alone; `pip install numba` compiles those of 2bit, 1bit and int8"
    try:
        import numba  # noqa: PLC0415 - as in `_compile`
    except Exception as error:  # noqa: BLE001 - as in `_compile`
        return "NumPy alone: Numba cannot be used: " + " ".join(f"{type(error).__name__}: {error}".split())
    return f"2bit, 1bit and int8 encode by Numba {numba.__version__}, the others by NumPy"


def _compile(loop: Callable[..., None], arguments: str) -> Callable[..., None] | None:
    """Return machine code; None where Numba is missing or refuses this Python or this NumPy."""
    try:
        import numba  # noqa: PLC0415 - takes half a second, and is not always there
    except Exception:  # noqa: BLE001 - one that does not fit NumPy fails in several ways
        return None
    readonly = numba.types.Array(numba.float32, 1, "C", readonly=True)
    words = [word.strip() for word in arguments.split(",")]
    kinds = {
        "values": readonly,
        "float32[::1]": numba.float32[::1],
        "uint8[::1]": numba.uint8[::1],
        "float32": numba.float32,
        "int64": numba.int64,
    }
    signature = numba.void(*(kinds[word] for word in words))
    try:
        compiled: Callable[..., None] = numba.njit(signature, nogil=True, cache=True)(loop)
    except (RuntimeError, OSError):  # no directory that a cache can be written to
        compiled = numba.njit(signature, nogil=True)(loop)
    return compiled
