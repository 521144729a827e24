"""A key as a worker sees it whose values live with servers: where its shards are, and how they travel there and back.

Both sides know the lengths of what travels, from the placement and the codec that they agreed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from mpikv import wire
from mpikv.arrays import HostArray
from mpikv.codecs import compression
from mpikv.codecs.base import State
from mpikv.keys import KeyInfo, partitions
from mpikv.placement import Placement

INLINE_BYTES = 1 << 16  # from here on two more messages cost less than copying in and out of one


class Route(NamedTuple):
    """How one shard travels. parts: bounds in the key's value. inline: behind its header.

    n_bytes: of a push of it, on its way.
    """

    owner: int
    begin: int
    end: int
    parts: tuple[tuple[int, int], ...]
    inline: bool
    n_bytes: int


class ClientKey:
    """One key as its client sees it. states: of its codec, by the first element of the piece."""

    def __init__(self, info: KeyInfo, placement: Placement) -> None:
        self.info, self.compression = info, compression.of_text(info.codec)
        self.states: dict[int, State] = {}
        self.pushed = 0
        self.move(placement)

    def move(self, placement: Placement) -> None:
        """The key lives there from now on."""
        self.placement = placement
        self.routes = []
        for shard in placement.shards:
            parts = partitions(shard.begin, shard.end, placement.part_elems)
            n_bytes = sum(self.compression.push.wire_bytes(end - begin, self.info.dtype) for begin, end in parts)
            self.routes.append(Route(*shard, parts, len(parts) == 1 and n_bytes <= INLINE_BYTES, n_bytes))
        self.small = len(self.routes) == 1 and self.routes[0].inline

    def encode(self, total: HostArray, begin: int, end: int) -> HostArray:
        """What travels of elements [begin, end) of a push."""
        codec = self.compression.push
        if (state := self.states.get(begin)) is None:
            state = self.states[begin] = codec.init(end - begin)
        return codec.encode(total[begin:end], state)

    def first_values(self, value: HostArray) -> Iterator[tuple[int, wire.Header, bytes]]:
        """What tells each server that it owns a part of the key, and the values there: server, header, payload."""
        info = self.info
        for shard in self.placement.shards:
            text = {"key": info.key, "shape": info.shape, "dtype": str(info.dtype), "begin": shard.begin}
            text |= {"part": self.placement.part_elems, "version": self.pushed, "codec": info.codec}
            payload = wire.with_text(json.dumps(text).encode(), value[shard.begin : shard.end].tobytes())
            yield shard.owner, wire.Header(wire.INIT, info.id), payload
