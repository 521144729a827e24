"""Codecs that treat each element by itself, as programs: so that values in device memory are encoded and decoded there.

A codec says as `Elements` what becomes of an element, in operations on whole arrays that `spaces.tracing` understands.
The programs here are made of that, and do what the codec does with arrays of NumPy, bit for bit, error feedback and the
check for what is not finite included; but a NaN that is sent may have another sign and payload.

Codecs whose elements depend on each other (a block's scale, the largest of all) have no `Elements`; for them values are
copied to the host first.

Cost: a program reads and writes each array once. Each is traced once for a codec and a dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays import sum_dtype
from mpikv.spaces.program import Numbers, Program
from mpikv.spaces.tracing import trace, where_positive

if TYPE_CHECKING:
    from mpikv.codecs.base import Codec

KEPT = 256  # programs; more than a store has codecs and dtypes
FLOAT32 = np.dtype(np.float32)
BYTE = np.dtype(np.uint8)


@dataclass(frozen=True)
class Elements:
    """What a codec does to each element of a key.

    wire: what is sent for each, a number of this dtype; or, of uint8, so many `bits`, if that is not 0. encode: from
    float32, or from the key's dtype where nothing is remembered, to `wire`; decode: from there to floating point
    numbers. remembers: whether what is lost is added to the next push.
    """

    wire: np.dtype[Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    bits: int = 0
    remembers: bool = False


def elements_of(codec: Codec, dtype: np.dtype[Any]) -> Elements:
    """Those of a codec that has some."""
    found = codec.elements(dtype)
    assert found is not None
    return found


@functools.lru_cache(KEPT)
def encoding(codec: Codec, dtype: np.dtype[Any]) -> tuple[Program, Numbers]:
    """values, of this dtype, data; and the residual, float32, where the codec remembers what it loses."""
    found = elements_of(codec, dtype)

    def alone(values: Any, data: Any) -> None:
        data[...] = found.encode(values)

    def with_residual(values: Any, data: Any, residual: Any) -> None:
        total = residual + values.astype(FLOAT32, copy=False)
        code = found.encode(total)
        data[...] = code
        residual[...] = _finite(total - found.decode(code))

    dtypes = [dtype, found.wire]
    if found.remembers:
        return trace(with_residual, [*dtypes, FLOAT32], {1: found.bits})
    return trace(alone, dtypes, {1: found.bits})


@functools.lru_cache(KEPT)
def decoding(codec: Codec, dtype: np.dtype[Any], *, add: bool) -> tuple[Program, Numbers]:
    """out, data, of a key of this dtype: the values are added to `out`, in the dtype of sums, or written there."""
    found, wide = elements_of(codec, dtype), sum_dtype(dtype)

    def decode(out: Any, data: Any) -> None:
        values = found.decode(data).astype(wide, copy=False)
        out[...] = out + values if add else values

    return trace(decode, [wide, found.wire], {1: found.bits})


@functools.lru_cache(KEPT)
def paying(dtype: np.dtype[Any]) -> tuple[Program, Numbers]:
    """values, of this dtype, residual: what is owed is added to the values; what their dtype cannot say stays owed."""
    wide = sum_dtype(dtype)

    def pay(values: Any, residual: Any) -> None:
        total = values.astype(wide, copy=False) + residual.astype(wide, copy=False)
        paid = total.astype(dtype, copy=False)
        values[...] = paid
        residual[...] = _finite(total - paid.astype(wide)) if dtype != wide else FLOAT32.type(0)

    return trace(pay, [dtype, FLOAT32])


def _finite(values: Any) -> Any:
    """The values, and 0 where they are NaN or infinite."""
    return where_positive(1.0 - np.absolute(values - values), values, 0.0)
