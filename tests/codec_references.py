"""What each codec is defined to do, one element after another; the tests compare bytes and bits with these.

Each function returns `encode` and `decode`. encode(values, residual), of lists of float32, gives the bytes, and changes
the residual where the definition of the codec has one. decode(data, n) gives the values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

f32 = np.float32
Encode = Callable[[list[Any], "list[Any] | None"], bytes]
Decode = Callable[[bytes, int], list[Any]]


def push(
    encode: Encode, decode: Decode, values: np.ndarray, residual: np.ndarray | None, *, feeds_back: bool
) -> tuple[bytes, np.ndarray | None]:
    """One push: the bytes, and the residual afterwards. feeds_back: error feedback is around the codec."""
    with np.errstate(all="ignore"):
        owed = None if residual is None else list(residual)
        numbers = list(values.astype(np.float32))
        if feeds_back:
            assert owed is not None
            numbers = [f32(one + rest) for one, rest in zip(numbers, owed, strict=True)]
            data = encode(numbers, None)
            owed = [f32(one - sent) for one, sent in zip(numbers, decode(data, len(numbers)), strict=True)]
        else:
            data = encode(numbers, owed)
        if owed is None:
            return data, None
        return data, np.array([one if np.isfinite(one) else 0 for one in owed], np.float32)


def two_bit(threshold: float) -> tuple[Encode, Decode]:
    t = f32(threshold)

    def encode(values: list[Any], residual: list[Any] | None) -> bytes:
        assert residual is not None
        data = bytearray((len(values) + 3) // 4)
        for i, value in enumerate(values):
            residual[i] = f32(residual[i] + value)
            code = 0b00
            if residual[i] >= t:
                code = 0b11
                residual[i] = f32(residual[i] - t)
            elif residual[i] <= -t:
                code = 0b10
                residual[i] = f32(residual[i] + t)
            data[i // 4] |= code << (6 - 2 * (i % 4))
        return bytes(data)

    def decode(data: bytes, n: int) -> list[Any]:
        return [{0b11: t, 0b10: -t}.get(data[i // 4] >> (6 - 2 * (i % 4)) & 0b11, f32(0)) for i in range(n)]

    return encode, decode


def one_bit(threshold: float) -> tuple[Encode, Decode]:
    t = f32(threshold)

    def encode(values: list[Any], residual: list[Any] | None) -> bytes:
        assert residual is not None
        data = bytearray((len(values) + 7) // 8)
        for i, value in enumerate(values):
            residual[i] = f32(residual[i] + value)
            if residual[i] > t:
                data[i // 8] |= 1 << (7 - i % 8)
                residual[i] = f32(residual[i] - f32(1))
            else:
                residual[i] = f32(residual[i] + f32(1))
        return bytes(data)

    def decode(data: bytes, n: int) -> list[Any]:
        return [f32(1) if data[i // 8] >> (7 - i % 8) & 1 else f32(-1) for i in range(n)]

    return encode, decode


def int8(block: int) -> tuple[Encode, Decode]:
    def encode(values: list[Any], _: list[Any] | None) -> bytes:
        data = b""
        for begin in range(0, len(values), block):
            part = values[begin : begin + block]
            if all(map(np.isfinite, part)):
                scale = f32(max(map(abs, part)) / f32(127))
                largest = np.nextafter(f32(np.finfo(f32).max / f32(127)), f32(0))
                scale = min(scale, largest)
                if scale < np.finfo(np.float32).tiny:
                    scale = f32(0)
            else:
                scale = f32(math.nan)
            codes = [0] * len(part)
            if scale > 0:
                inverse = f32(f32(1) / scale)
                codes = [round(float(f32(value * inverse))) for value in part]  # ties to even, as Python rounds
            data += struct.pack(f"<f{len(part)}b", scale, *codes)
        return data

    def decode(data: bytes, n: int) -> list[Any]:
        values: list[Any] = []
        while len(values) < n:
            length = min(block, n - len(values))
            scale, *codes = struct.unpack(f"<f{length}b", data[: 4 + length])
            values += [f32(f32(code) * f32(scale)) for code in codes]
            data = data[4 + length :]
        return values

    return encode, decode


def topk(ratio: float, whole_elems: int = 0) -> tuple[Encode, Decode]:
    def encode(values: list[Any], _: list[Any] | None) -> bytes:
        n = len(values)
        if n <= whole_elems:
            return b"".join(value.tobytes() for value in values)
        k = min(n, max(1, math.ceil(Fraction(str(ratio)) * n)))
        by_size = sorted(range(n), key=lambda i: (-_magnitude(values[i]), i))
        sent = sorted(by_size[:k])
        return struct.pack(f"<{k}I", *sent) + b"".join(values[i].tobytes() for i in sent)

    def decode(data: bytes, n: int) -> list[Any]:
        if n <= whole_elems:
            return list(np.frombuffer(data, "<f4"))
        k = len(data) // 8
        values = [f32(0)] * n
        for i, position in enumerate(struct.unpack(f"<{k}I", data[: 4 * k])):
            values[position] = np.frombuffer(data, "<f4", 1, 4 * k + 4 * i)[0]
        return values

    return encode, decode


def powersgd(values: list[Any], q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P and the new Q, float32, of one step that begins with q, (columns, rank)."""
    columns, rank = q.shape
    rows = -(-len(values) // columns)
    matrix = [[float(values[i * columns + j]) if i * columns + j < len(values) else 0.0 for j in range(columns)]
              for i in range(rows)]  # fmt: skip
    p = [[math.fsum(matrix[i][j] * float(q[j, r]) for j in range(columns)) for i in range(rows)] for r in range(rank)]
    for r in range(rank):
        for s in range(r):
            along = math.fsum(a * b for a, b in zip(p[r], p[s], strict=True))
            p[r] = [a - along * b for a, b in zip(p[r], p[s], strict=True)]
        length = math.sqrt(math.fsum(a * a for a in p[r]))
        p[r] = [a / length for a in p[r]]
    sent = np.array(p).T.astype(f32)
    new = [
        [math.fsum(matrix[i][j] * float(sent[i, r]) for i in range(rows)) for r in range(rank)] for j in range(columns)
    ]
    return sent, np.array(new).astype(f32)


def powersgd_decoded(p: np.ndarray, q: np.ndarray, n: int) -> list[Any]:
    columns, rank = q.shape
    found = []
    for place in range(n):
        i, j = divmod(place, columns)
        value = f32(p[i, 0] * q[j, 0])
        for r in range(1, rank):
            value = f32(value + f32(p[i, r] * q[j, r]))
        found.append(value)
    return found


def _magnitude(value: Any) -> int:
    """A float32 without its sign, as an integer, which is in the same order; NaN is on top."""
    bits: int = struct.unpack("<I", np.float32(value).tobytes())[0]
    return bits & 0x7FFFFFFF
