"""What a rank sends, counted by running the store's own generators on a transport that moves nothing.

Every message is done at once, and nothing is added: `combine` takes the place of the sum. So the count of a step is
exact for every algorithm, without a second description of it. Memory is asked for, but never touched.

Cost: some microseconds for each message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.clock import MACHINE_CLOCK
from mpikv.engine.operation import Done, Operation, Steps
from mpikv.observe.recorder import Recorder
from mpikv.placement.costs import Costs, Link
from mpikv.transports.ledger import Ledger


class Counting:
    """A transport that counts and moves nothing.

    sent, received: of each message, the other rank and the bytes. added_bytes: what `combine` was given. coding_s: how
    long codecs would have worked (plan/priced.py).
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

    @property
    def sent_messages(self) -> int:
        """Return how many messages were sent."""
        return len(self.sent)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of all messages that were sent."""
        return sum(n_bytes for _, n_bytes in self.sent)

    def isend(self, buf: HostArray, dest: int, tag: int, room_bytes: int = 0) -> Operation:
        """Count a message that is sent."""
        self.sent.append((dest, buf.nbytes))
        return Done()

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        """Count a message that is received."""
        self.received.append((source, buf.nbytes))
        return Done()

    def probe(self, tag: int) -> None:
        """Return None: nothing comes."""

    def poll(self) -> None:
        """Do nothing: nothing is ever under way."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""

    def combine(self, one: HostArray, other: HostArray, out: HostArray) -> None:
        """Count what `np.add` would add."""
        self.added_bytes += out.nbytes

    def spend(self, seconds: float) -> None:
        """Count the work of a codec."""
        self.coding_s += seconds

    def run(self, steps: Steps[Any]) -> None:
        """Run a generator to its end."""
        for request in steps:
            request.test()

    def is_here(self, rank: int) -> bool:
        """Return whether a rank is on this one's host."""
        return self.hosts[rank] == self.hosts[self.rank]

    def link_s(self, link: Link) -> tuple[float, float]:
        """Return how long its messages keep the link of its host busy: out, and in."""
        out_s, into_s = (
            sum(link.time_s(n_bytes) for peer, n_bytes in messages if not self.is_here(peer))
            for messages in (self.sent, self.received)
        )
        return out_s, into_s

    def core_s(self, costs: Costs) -> float:
        """Return how long its core works to send, to receive, to encode, to decode and to add."""
        bytes_s = sum(
            n_bytes * (costs.copy_byte_s if self.is_here(peer) else costs.byte_s)
            for peer, n_bytes in self.sent + self.received
        )
        messages = len(self.sent) + len(self.received)
        return messages * costs.message_s + bytes_s + self.added_bytes * costs.add_byte_s + self.coding_s
