"""What ranks add that add while values travel, as an allreduce does: a push as it comes out of its codec."""

from __future__ import annotations

from mpikv.arrays import sum_dtype
from mpikv.codecs import compression
from mpikv.codecs.identity import IDENTITY
from mpikv.keys import KeyInfo
from mpikv.spaces.base import Space, SpaceArray


def can_be_added(info: KeyInfo) -> bool:
    """Whether ranks can add what travels, or must decode it first."""
    return compression.of_text(info.codec).push.wire_dtype(info.dtype) is not None


def added(info: KeyInfo, values: SpaceArray, space: Space) -> SpaceArray:
    """What is added of a push, in the dtype that the key is added in. space: the key's, where the values are."""
    codec, dtype = compression.of_text(info.codec).push, sum_dtype(info.dtype)
    if codec is IDENTITY:
        return values if values.dtype == dtype else space.cast(values, dtype)
    data = codec.encode(values, codec.init(values.size))
    if data.dtype == dtype:
        return data
    out = space.empty(values.size, dtype)
    codec.decode(data, out)
    return out
