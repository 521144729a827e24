"""Compares the ranks' labels: in the messages of a collective, without its knowledge, or in messages before it.

A message of a reduce-scatter ends with a *trailer* of 8 bytes: the digest of its sender's labels (placement/labels.py),
or `DIFFERENT` once the sender has received another digest. A sender leaves the trailer out while it is the same as in
its last message to this receiver, in the rounds of the same queue. Why owners know of different labels before they
update, and the others by the first message of the allgather from each sender, says docs/adr/0013.

Cost: no message. Where labels change, the trailers and a copy of the values in front of them; at ranks that own nothing
a copy of the first message from each sender in every allgather.

Where a collective's own messages cannot carry digests, `compare` gathers them before it, in ceil(log2(p)) messages of
each rank, one after another, 8 (p-1) bytes in all. Source: Bruck, Ho, Kipnis, Upfal and Weathersby, IEEE Trans.
Parallel Distrib. Syst. 8 (1997).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Steps, Waiter, Waking, wakes
from mpikv.placement.labels import Comparison
from mpikv.transports.base import Group, Transport

TRAILER = np.dtype(np.uint64)  # 0: there is none
TRAILER_BYTES = TRAILER.itemsize  # a multiple of the size of every dtype


class ReduceScatterGroup(Group):
    """A group for a reduce-scatter."""

    def __init__(self, transport: Transport, ranks: Sequence[int], comparison: Comparison) -> None:
        super().__init__(transport, ranks)
        self._comparison = comparison

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        """Send `buf`, with a trailer where this rank's digest is not what it last sent to `dest`."""
        digest = self._comparison.changed(self.ranks[dest])
        if digest is None:
            return self.transport.isend(buf, self.ranks[dest], tag)
        return self.transport.isend(_with_trailer(buf, digest), self.ranks[dest], tag)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Operation:
        """Receive into `buf`, which ends with `room` elements for a trailer."""
        return _TrailerReceive(self, buf, source, tag, self._comparison)

    def room(self, dtype: np.dtype[Any]) -> int:
        """Return how many elements a trailer takes."""
        return TRAILER_BYTES // dtype.itemsize

    def part(self, ranks: Sequence[int]) -> ReduceScatterGroup:
        """Return a group of some of these ranks."""
        return ReduceScatterGroup(self.transport, [self.ranks[rank] for rank in ranks], self._comparison)


class AllgatherGroup(Group):
    """A group for an allgather. owners: the ranks, as the transport numbers them, that own something."""

    def __init__(
        self, transport: Transport, ranks: Sequence[int], comparison: Comparison, owners: frozenset[int]
    ) -> None:
        super().__init__(transport, ranks)
        self._comparison, self._owners = comparison, owners

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        """Send `buf`, with a trailer in the first message to a rank that owns nothing, where digests differ."""
        if self._first(self.ranks[dest], self.transport.rank) and self._comparison.differ:
            return self.transport.isend(_with_trailer(buf, self._comparison.now), self.ranks[dest], tag)
        return self.transport.isend(buf, self.ranks[dest], tag)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Operation:
        """Receive into `buf`. Where this rank owns nothing, the first message from each sender may have a trailer."""
        if not self._first(self.transport.rank, self.ranks[source]):
            return super().irecv(buf, source, tag)
        return _AllgatherReceive(self, buf, source, tag, self._comparison)

    def _first(self, receiver: int, sender: int) -> bool:
        if receiver in self._owners or (receiver, sender) in self._comparison.pairs_begun:
            return False
        self._comparison.pairs_begun.add((receiver, sender))
        return True

    def part(self, ranks: Sequence[int]) -> AllgatherGroup:
        """Return a group of some of these ranks."""
        return AllgatherGroup(self.transport, [self.ranks[rank] for rank in ranks], self._comparison, self._owners)


def _with_trailer(buf: HostArray, digest: int) -> HostArray:
    n_bytes = buf.nbytes
    message = np.empty(n_bytes + TRAILER_BYTES, np.uint8)
    message[:n_bytes] = buf.view(np.uint8)
    message[n_bytes:] = np.array([digest], TRAILER).view(np.uint8)
    return message


class _TrailerReceive(Waking):
    """A request to receive a message that may end with a trailer. buf: room for the values, then for the trailer."""

    def __init__(self, group: Group, buf: HostArray, source: int, tag: int, comparison: Comparison) -> None:
        end = buf.size - TRAILER_BYTES // buf.itemsize
        self._values, self._trailer = buf[:end], buf[end:].view(np.uint8)
        self._trailer[:] = 0  # before the message can come
        self._source, self._comparison = group.ranks[source], comparison
        self._request = group.transport.irecv(buf, self._source, tag, TRAILER_BYTES)
        self._done = False

    def test(self) -> bool:
        """Return whether the message has been received."""
        if not self._done and self._request.test():
            self._done = True
            self._take(int.from_bytes(self._trailer.tobytes(), sys.byteorder) or None)
        return self._done

    def wakes(self, waiter: Waiter) -> bool:
        """Promise what the transport's request does."""
        return wakes(self._request, waiter)

    def _take(self, digest: int | None) -> None:
        self._comparison.take(self._source, digest)


class _AllgatherReceive(_TrailerReceive):
    def __init__(self, group: Group, target: HostArray, source: int, tag: int, comparison: Comparison) -> None:
        longer = np.empty(target.size + TRAILER_BYTES // target.itemsize, target.dtype)
        super().__init__(group, longer, source, tag, comparison)
        self._target = target

    def _take(self, digest: int | None) -> None:
        self._target[...] = self._values
        if digest is not None:
            self._comparison.compare(digest)


def compare(group: Group, comparison: Comparison | None, tag: int) -> Steps[None]:
    """Compare the digests of all ranks; None, on all: only wait until all have begun. group: of host memory.

    In step k a rank sends the digests that it has by then, its own and those of the next 2^k - 1 ranks, to the rank 2^k
    before it. So each rank has twice as many after each step.
    """
    p, me = group.size, group.rank
    digests = np.empty(p, TRAILER)  # this rank's, then those of the ranks after it
    digests[0] = 0 if comparison is None else comparison.own
    known = 1
    while known < p:
        n = min(known, p - known)
        send = group.isend(digests[:n], (me - known) % p, tag)
        yield group.irecv(digests[known : known + n], (me + known) % p, tag)
        yield send
        known += n
    if comparison is not None:
        for digest in digests.tolist():
            comparison.compare(digest)
