"""The codecs of a store by their names, under which workers and servers agree on them when a key is initialised."""

from __future__ import annotations

from collections.abc import Sequence

from mpikv.arrays import sum_dtype
from mpikv.codecs.base import Codec
from mpikv.codecs.identity import IDENTITY
from mpikv.keys import KeyInfo
from mpikv.spaces.base import Space, SpaceArray


class Codecs:
    """Those that one rank knows. of_new_keys: what keys that are initialised from now on travel as."""

    def __init__(self, further: Sequence[Codec] = (), of_new_keys: str = IDENTITY.name) -> None:
        self._by_name = {codec.name: codec for codec in (IDENTITY, *further)}
        self.of_new_keys = of_new_keys

    def of(self, info: KeyInfo) -> Codec:
        """The codec that was agreed on for a key."""
        return self._by_name[info.codec]

    def plain(self, info: KeyInfo) -> bool:
        """Whether the key's pushes travel as they are."""
        return info.codec == IDENTITY.name

    def can_be_added(self, info: KeyInfo) -> bool:
        """Whether ranks can add what travels while it travels, as an allreduce does, or must decode it first."""
        return self.of(info).wire_dtype(info.dtype) is not None

    def added(self, info: KeyInfo, values: SpaceArray, space: Space) -> SpaceArray:
        """What such ranks add of a push: what it is encoded to, in the dtype that the key is added in.

        space: the key's, where the values are, and what they are decoded into.
        """
        codec, dtype = self.of(info), sum_dtype(info.dtype)
        if codec is IDENTITY:
            return values if values.dtype == dtype else space.cast(values, dtype)
        data = codec.encode(values)
        if data.dtype == dtype:
            return data
        out = space.empty(values.size, dtype)
        codec.decode(data, out)
        return out
