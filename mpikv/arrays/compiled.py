"""Loops of codecs, and of half precision, as machine code, where Numba is installed (the extra `fast`).

Each does in one pass over memory what NumPy does in several, with the same bits: no `fastmath`, and every sum is
rounded to float32 by itself. Without Numba, or where it does not work, `run` does nothing, and NumPy does it.
A signalling NaN, which no arithmetic makes, becomes quiet; NumPy does so on some machines.

One loop of a codec adds what has come, subtracts it, or, added to -0.0, writes it. "finite" is the check of the
residual, for error feedback.

Those of a codec are compiled when one is first made of its name (`registry.create`), those of float16 and bfloat16 (of
the codecs fp16 and bf16) also when a large key of that dtype is initialised. It takes seconds, which would stall a
training step; and a thread in the background would take the core that training needs.
Numba keeps the machine code beside this file or in the user's cache; where it can write to neither, each process
compiles. `import mpikv` does not import Numba. The loops give the interpreter's lock back while they run.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import BFLOAT16, HostArray

_CHUNK = 1024  # values whose codes are made before they are packed: both loops over them use a core's vectors
_INFINITY = np.float32(np.inf)
_LEAST = np.finfo(np.float32).tiny
_LARGEST = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # times 127 it is no infinity
_ZERO, _ONE, _127 = np.float32(0), np.float32(1), np.float32(127)
_ROUNDER = np.float32(3 << 22)  # what is added to this is rounded to a whole number, ties to even
_NOTHING = np.float32(-0.0)  # a sum with it is the other number, 0.0 and -0.0, too
_HALF = np.float32(0.5)
_LEAST_HALF = np.float32(2.0**-24)  # the least number of float16 above 0


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


def _int8_add(data: HostArray, block: int, factor: Any, fresh: bool, out: HostArray) -> None:
    scale_ = np.zeros(1, np.float32)
    scale_bytes = scale_.view(np.uint8)
    n = out.size
    at = 0
    for begin in range(0, n, block):
        of = out[begin : min(begin + block, n)]
        scale_bytes[:] = data[at : at + 4]
        scale = scale_[0] * factor
        if fresh:
            of[:] = _NOTHING
        codes = data[at + 4 : at + 4 + of.size].view(np.int8)
        for i in range(of.size):
            of[i] += np.float32(codes[i]) * scale
        at += 4 + of.size


def _fp16(values: HostArray, beyond: Any, data: HostArray) -> None:
    """Add to the bits below the last one that stays: what they carry over is the rounding, ties to even.

    beyond: the bits of what finite numbers become that are too large. Those of numbers below 2^-14 are rounded by a sum
    with 0.5, whose last bit is worth 2^-24.
    """
    small = np.zeros(_CHUNK, np.float32)
    small_bits = small.view(np.int32)
    n = values.size
    for begin in range(0, n, _CHUNK):
        length = min(_CHUNK, n - begin)
        of, to = values[begin : begin + length], data[begin : begin + length]
        bits = of.view(np.int32)
        for i in range(length):
            small[i] = abs(of[i]) + _HALF
        for i in range(length):
            magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))
            odd = np.int32(np.int32(magnitude >> np.int32(13)) & np.int32(1))
            half = np.int32(np.int32(magnitude + np.int32(0xFFF - (112 << 23)) + odd) >> np.int32(13))
            half = np.int32(small_bits[i] - np.int32(0x3F000000)) if magnitude < np.int32(0x38800000) else half
            half = beyond if magnitude >= np.int32(0x477FF000) else half  # from 65520 on
            half = np.int32(0x7C00) if magnitude >= np.int32(0x7F800000) else half
            half = (
                np.int32(np.int32(0x7E00) | np.int32(np.int32(magnitude >> np.int32(13)) & np.int32(0x3FF)))
                if magnitude > np.int32(0x7F800000)
                else half
            )
            sign = np.int32(np.int32(bits[i] >> np.int32(16)) & np.int32(0x8000))
            to[i] = np.uint16(sign | half)


def _fp16_add(data: HostArray, factor: Any, fresh: bool, out: HostArray) -> None:
    normal = np.zeros(_CHUNK, np.float32)
    normal_bits = normal.view(np.int32)
    n = out.size
    for begin in range(0, n, _CHUNK):
        length = min(_CHUNK, n - begin)
        halves, of = data[begin : begin + length], out[begin : begin + length]
        if fresh:
            of[:] = _NOTHING
        for i in range(length):
            half = np.int32(halves[i])
            magnitude = np.int32(half & np.int32(0x7FFF))
            bits = np.int32(np.int32(magnitude << np.int32(13)) + np.int32(112 << 23))
            bits = np.int32(bits + np.int32(112 << 23)) if magnitude >= np.int32(0x7C00) else bits
            normal_bits[i] = np.int32(bits | np.int32(np.int32(half & np.int32(0x8000)) << np.int32(16)))
        for i in range(length):
            magnitude = np.int32(np.int32(halves[i]) & np.int32(0x7FFF))
            small = np.float32(magnitude) * _LEAST_HALF
            small = -small if halves[i] & np.int32(0x8000) else small
            value = small if magnitude < np.int32(0x400) else normal[i]
            of[i] += value * factor


def _bf16(values: HostArray, data: HostArray) -> None:
    """As in `_fp16`. A NaN becomes the one that ml_dtypes makes of it, of the same sign."""
    bits = values.view(np.int32)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))
        odd = np.int32(np.int32(magnitude >> np.int32(16)) & np.int32(1))
        half = np.int32(np.int32(magnitude + np.int32(0x7FFF) + odd) >> np.int32(16))
        half = np.int32(0x7FC0) if magnitude > np.int32(0x7F800000) else half
        sign = np.int32(np.int32(bits[i] >> np.int32(16)) & np.int32(0x8000))
        data[i] = np.uint16(sign | half)


def _bf16_add(data: HostArray, factor: Any, fresh: bool, out: HostArray) -> None:
    wide = np.zeros(_CHUNK, np.float32)
    wide_bits = wide.view(np.int32)
    n = out.size
    for begin in range(0, n, _CHUNK):
        length = min(_CHUNK, n - begin)
        halves, of = data[begin : begin + length], out[begin : begin + length]
        if fresh:
            of[:] = _NOTHING
        for i in range(length):
            wide_bits[i] = np.int32(np.int32(halves[i]) << np.int32(16))
        for i in range(length):
            of[i] += wide[i] * factor


def _finite(residual: HostArray) -> None:
    for i in range(residual.size):
        residual[i] = residual[i] if abs(residual[i]) < _INFINITY else _ZERO


# Which lengths of the arrays fit: machine code looks at none, and would write beyond the shorter one.
def _few_bits(per_byte: int) -> Callable[..., bool]:
    return lambda values, residual, _t, data: (
        residual.size == values.size and data.size == (values.size + per_byte - 1) // per_byte
    )


def _int8_bytes(n: int, block: int) -> int:
    return n + (n + block - 1) // block * 4


_LOOPS: dict[str, tuple[Callable[..., None], str, Callable[..., bool]]] = {
    "2bit": (_two_bit, "values, float32[::1], float32, uint8[::1]", _few_bits(4)),
    "1bit": (_one_bit, "values, float32[::1], float32, uint8[::1]", _few_bits(8)),
    "int8": (
        _int8,
        "values, int64, uint8[::1]",
        lambda values, block, data: data.size == _int8_bytes(values.size, block),
    ),
    "int8 add": (
        _int8_add,
        "bytes, int64, float32, bool, float32[::1]",
        lambda data, block, _factor, _fresh, out: data.size == _int8_bytes(out.size, block),
    ),
    "fp16": (_fp16, "values, int32, uint16[::1]", lambda values, _beyond, data: data.size == values.size),
    "fp16 add": (_fp16_add, "halves, float32, bool, float32[::1]", lambda data, _f, _fresh, out: data.size == out.size),
    "bf16": (_bf16, "values, uint16[::1]", lambda values, data: data.size == values.size),
    "bf16 add": (_bf16_add, "halves, float32, bool, float32[::1]", lambda data, _f, _fresh, out: data.size == out.size),
    "finite": (_finite, "float32[::1]", lambda _residual: True),
}
_OF_CODEC = {
    "2bit": ("2bit",),
    "1bit": ("1bit",),
    **{codec: (codec, f"{codec} add", "finite") for codec in ("int8", "fp16", "bf16")},
}
_DTYPES = frozenset(map(np.dtype, (np.float32, np.uint8, np.uint16)))  # in the order of this machine's bytes
_compiled: dict[str, Callable[..., None] | None] = {}
_lock = threading.Lock()


def prepare(codec: str) -> None:
    """Compile the loops of this codec, once in a process. Takes seconds, where Numba is there; else does nothing."""
    with _lock:
        for name in _OF_CODEC.get(codec, ()):
            if name not in _compiled:
                _compiled[name] = _compile(*_LOOPS[name][:2])


def run(name: str, *arguments: Any) -> bool:
    """Run the compiled loop. False, with nothing written, where there is none for these arrays or lengths.

    The first argument is an array; where it is none of NumPy's there is no loop.
    """
    loop = _compiled.get(name)
    if loop is None or not isinstance(arguments[0], np.ndarray):
        return False
    for one in arguments:
        if isinstance(one, np.ndarray) and not (
            one.ndim == 1 and one.dtype in _DTYPES and one.flags.forc and one.flags.aligned
        ):
            return False
    if not _LOOPS[name][2](*arguments):
        return False
    loop(*arguments)
    return True


LARGEST, INFINITE = np.int32(0x7BFF), np.int32(0x7C00)  # of float16, as bits
_FLOAT32, _FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
_HALVES = {_FLOAT16: "fp16", BFLOAT16: "bf16"}
LARGE_BYTES = 1 << 20  # from here on a key of half precision is worth some seconds, once for a machine


def prepare_key(dtype: np.dtype[Any], n_bytes: int) -> None:
    """Compile what a key of this dtype and length is added and rounded by, where that is worth it."""
    if dtype in _HALVES and n_bytes >= LARGE_BYTES:
        prepare(_HALVES[dtype])


def cast_into(out: HostArray, values: HostArray | int) -> None:
    """`np.copyto(out, values, casting="unsafe")`. NumPy takes four times as long to and from float16."""
    if isinstance(values, np.ndarray) and values.shape == out.shape:
        dtypes, done = (values.dtype, out.dtype), False
        if dtypes == (_FLOAT32, _FLOAT16):
            done = run("fp16", values, INFINITE, out.view(np.uint16))
        elif dtypes == (_FLOAT32, BFLOAT16):
            done = run("bf16", values, out.view(np.uint16))
        elif dtypes == (_FLOAT16, _FLOAT32):
            done = run("fp16 add", values.view(np.uint16), _ONE, True, out)
        if done:
            return
    np.copyto(out, values, casting="unsafe")


def add_half(out: HostArray, values: HostArray) -> bool:
    """Add half precision to float32, with the bits of NumPy. False, with nothing done, where there is no loop."""
    name = _HALVES.get(values.dtype)
    return name is not None and run(f"{name} add", values.view(np.uint16), _ONE, False, out)


def describe() -> str:
    """Say whether Numba is used, for `mpikv info`. Imports it where it is there."""
    if importlib.util.find_spec("numba") is None:
        return "NumPy alone; `pip install numba` compiles those of 2bit, 1bit, int8, fp16 and bf16"
    try:
        import numba  # noqa: PLC0415 - as in `_compile`
    except Exception as error:  # noqa: BLE001 - as in `_compile`
        return "NumPy alone: Numba cannot be used: " + " ".join(f"{type(error).__name__}: {error}".split())
    return f"2bit, 1bit, int8, fp16 and bf16 by Numba {numba.__version__}, the others by NumPy"


def _compile(loop: Callable[..., None], arguments: str) -> Callable[..., None] | None:
    """Return machine code; None where Numba is missing or refuses this Python or this NumPy."""
    try:
        import numba  # noqa: PLC0415 - takes half a second, and is not always there
    except Exception:  # noqa: BLE001 - one that does not fit NumPy fails in several ways
        return None

    def readonly(kind: Any) -> Any:
        return numba.types.Array(kind, 1, "C", readonly=True)

    words = [word.strip() for word in arguments.split(",")]
    kinds = {
        "values": readonly(numba.float32),
        "bytes": readonly(numba.uint8),
        "halves": readonly(numba.uint16),
        "bool": numba.boolean,
        **{name: getattr(numba, name) for name in ("float32", "int32", "int64")},
        **{f"{name}[::1]": getattr(numba, name)[::1] for name in ("float32", "uint8", "uint16")},
    }
    signature = numba.void(*(kinds[word] for word in words))
    try:
        compiled: Callable[..., None] = numba.njit(signature, nogil=True, cache=True)(loop)
    except (RuntimeError, OSError):  # no directory that a cache can be written to
        compiled = numba.njit(signature, nogil=True)(loop)
    return compiled
