"""What a rank sends, counted by running the store's own generators on a transport that moves nothing.

Every message is done at once, nothing is added or encoded: `combine` takes the place of the sum, and codecs have the
lengths of others and say what these would cost. So the count of a step is exact for every algorithm, without a second
description of it. Memory is asked for, but never touched. Cost: some microseconds for each message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import Codec, State
from mpikv.codecs.speed import Speed
from mpikv.commands.plan.step import Speeds
from mpikv.common.clock import MACHINE_CLOCK
from mpikv.engine.operation import Done, Operation, Steps
from mpikv.observe.recorder import Recorder
from mpikv.placement.costs import Costs, Link
from mpikv.transports.ledger import Ledger


class Counting:
    """A transport that counts and moves nothing.

    sent, received: of each message, the other rank and the bytes. added_bytes: what `combine` was given. coding_s: how
    long codecs would have worked.
    """

    local: None = None  # all are messages

    def __init__(self, rank: int, hosts: Sequence[str]) -> None:
        self.rank, self.size, self.hosts = rank, len(hosts), tuple(hosts)
        self.max_tag = 2**31 - 1
        self.clock = MACHINE_CLOCK
        self.recorder = Recorder(self.clock)
        self.ledger = Ledger()  # nobody asks
        self.sent: list[tuple[int, int]] = []
        self.received: list[tuple[int, int]] = []
        self.added_bytes = 0
        self.coding_s = 0.0

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        self.sent.append((dest, buf.nbytes))
        return Done()

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        self.received.append((source, buf.nbytes))
        return Done()

    def probe(self, tag: int) -> None:
        pass

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass

    def combine(self, one: HostArray, other: HostArray, out: HostArray) -> None:
        self.added_bytes += out.nbytes

    def run(self, steps: Steps[Any]) -> None:
        for request in steps:
            request.test()

    @property
    def sent_bytes(self) -> int:
        return sum(n_bytes for _, n_bytes in self.sent)

    def _is_here(self, rank: int) -> bool:
        return self.hosts[rank] == self.hosts[self.rank]

    def link_s(self, link: Link) -> tuple[float, float]:
        """Return how long its messages keep the link of its host busy: out, and in."""
        out_s, into_s = (
            sum(link.time_s(n_bytes) for peer, n_bytes in messages if not self._is_here(peer))
            for messages in (self.sent, self.received)
        )
        return out_s, into_s

    def core_s(self, costs: Costs) -> float:
        """Return how long its core works to send, to receive, to encode, to decode and to add."""
        messages = self.sent + self.received
        bytes_s = sum(n * (costs.copy_byte_s if self._is_here(peer) else costs.byte_s) for peer, n in messages)
        return len(messages) * costs.message_s + bytes_s + self.added_bytes * costs.add_byte_s + self.coding_s

    def priced(self, codec: Codec, speeds: Speeds) -> Codec:
        """Return a codec of the same lengths that encodes nothing, whose work is counted as `coding_s`."""
        return _Priced(codec, speeds[codec], self._spend)

    def _spend(self, seconds: float) -> None:
        self.coding_s += seconds


class _Priced(Codec):
    """Has the lengths of `codec`. spend: called with the seconds that it would have worked."""

    name = "priced"

    def __init__(self, codec: Codec, speed: Speed, spend: Callable[[float], None]) -> None:
        self._codec, self._speed, self._spend = codec, speed, spend

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        return self._codec.wire_dtype(dtype)

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        return self._codec.wire_bytes(n_elems, dtype)

    @property
    def row_elems(self) -> int:
        return self._codec.row_elems

    def encode(self, values: HostArray, state: State) -> HostArray:
        self._spend(values.size * self._speed.encode_s)
        wire_dtype = self._codec.wire_dtype(values.dtype)
        data: HostArray = np.empty(self._codec.wire_bytes(values.size, values.dtype), np.uint8)
        return data if wire_dtype is None else data.view(wire_dtype)

    def decode(self, data: HostArray, out: HostArray) -> None:
        self._spend(out.size * self._speed.decode_s)

    def add(self, data: HostArray, out: HostArray) -> None:
        self._spend(out.size * self._speed.add_s)
