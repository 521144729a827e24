"""What a rank sends, counted by running the store's own generators on a transport that moves nothing.

Every message is done at once, and nothing is added: `combine` takes the place of the sum. So the count of a step is
exact for every algorithm, without a second description of it. Memory is asked for, but never touched.

Cost: some microseconds for each message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.plan.costs import Costs, Link
from mpikv.common.clock import MACHINE_CLOCK
from mpikv.engine.request import Done, Request, Steps


class Counting:
    """A transport that counts and moves nothing.

    out, into: the bytes of each message to and from other hosts; out_here, into_here: within the host. added_bytes:
    what `combine` was given. coding_s: how long codecs would have worked (plan/priced.py).
    """

    local: None = None  # all are messages

    def __init__(self, rank: int = 0, hosts: Sequence[str] = ("",)) -> None:
        self.rank, self.size, self.hosts = rank, len(hosts), tuple(hosts)
        self.max_tag = 2**31 - 1
        self.clock = MACHINE_CLOCK
        self.out: list[int] = []
        self.into: list[int] = []
        self.out_here: list[int] = []
        self.into_here: list[int] = []
        self.sent_messages = self.sent_bytes = self.added_bytes = 0
        self.coding_s = 0.0

    def isend(self, buf: HostArray, dest: int, tag: int, room_bytes: int = 0) -> Request:
        """Count a message that is sent."""
        self.sent_messages += 1
        self.sent_bytes += buf.nbytes
        (self.out_here if self._here(dest) else self.out).append(buf.nbytes)
        return Done()

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Request:
        """Count a message that is received."""
        (self.into_here if self._here(source) else self.into).append(buf.nbytes)
        return Done()

    def _here(self, rank: int) -> bool:
        return rank < self.size and self.hosts[rank] == self.hosts[self.rank] and self.size > 1

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

    def link_s(self, link: Link) -> tuple[float, float]:
        """Return how long its messages keep the link of its host busy: out, and in."""
        return sum(map(link.time_s, self.out)), sum(map(link.time_s, self.into))

    def core_s(self, costs: Costs) -> float:
        """Return how long its core works to send, to receive, to encode, to decode and to add."""
        across, here = self.out + self.into, self.out_here + self.into_here
        bytes_s = sum(across) * costs.byte_s + sum(here) * costs.copy_byte_s
        adding_s = self.added_bytes * costs.add_byte_s
        return (len(across) + len(here)) * costs.message_s + bytes_s + adding_s + self.coding_s
