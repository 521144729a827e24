"""Groups whose messages say under which labels the values in them were pushed; the collectives know nothing of it.

A message of a reduce-scatter ends with a *note* of 8 bytes where its sender has anything to say that its last message
to this receiver, in the rounds of the same queue, did not say: the digest of its labels (labels.py), or that it has
come upon different ones. The messages by which one chunk is added connect all ranks. So where digests differ, one of
these messages came to a rank with another digest, all later ones say so, and the chunk's owner knows.

Owners know before they update. A rank that owns nothing learns it in the allgather: the first message from each sender,
who is an owner or knows it from one, ends with a note where digests differ.

Cost: no message. Where labels change, the notes and a copy of the values in front of them; at ranks that own nothing a
copy of the first message from each sender in every allgather.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Waiter, Waking, wakes
from mpikv.placement.labels import Comparison
from mpikv.transports.base import Group, Transport

NOTE = np.dtype(np.uint64)  # 0: there is none
NOTE_BYTES = NOTE.itemsize  # a multiple of the size of every dtype


class AddingGroup(Group):
    """For a reduce-scatter."""

    def __init__(self, transport: Transport, ranks: Sequence[int], comparison: Comparison) -> None:
        super().__init__(transport, ranks)
        self._comparison = comparison

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        """With a note where this rank has something to say."""
        digest = self._comparison.changed(self.ranks[dest])
        if digest is None:
            return self.transport.isend(buf, self.ranks[dest], tag)
        return self.transport.isend(_with_note(buf, digest), self.ranks[dest], tag, NOTE_BYTES)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Operation:
        """buf: values, then `room`."""
        return _Noted(self, buf, source, tag, self._comparison)

    def room(self, dtype: np.dtype[Any]) -> int:
        """That of a note."""
        return NOTE_BYTES // dtype.itemsize

    def part(self, ranks: Sequence[int]) -> AddingGroup:
        """Some of them."""
        return AddingGroup(self.transport, [self.ranks[rank] for rank in ranks], self._comparison)


class SharingGroup(Group):
    """For an allgather. owners: the transport's ranks of those that own something."""

    def __init__(
        self, transport: Transport, ranks: Sequence[int], comparison: Comparison, owners: frozenset[int]
    ) -> None:
        super().__init__(transport, ranks)
        self._comparison, self._owners = comparison, owners

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        """With a note where the receiver owns nothing and does not know yet."""
        if self._first(self.ranks[dest], self.transport.rank) and self._comparison.differ:
            return self.transport.isend(_with_note(buf, self._comparison.now), self.ranks[dest], tag, NOTE_BYTES)
        return self.transport.isend(buf, self.ranks[dest], tag)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Operation:
        """Where this rank owns nothing, the first message from each sender may end with a note."""
        if not self._first(self.transport.rank, self.ranks[source]):
            return super().irecv(buf, source, tag)
        return _Shared(self, buf, source, tag, self._comparison)

    def _first(self, receiver: int, sender: int) -> bool:
        if receiver in self._owners or (receiver, sender) in self._comparison.met:
            return False
        self._comparison.met.add((receiver, sender))
        return True

    def part(self, ranks: Sequence[int]) -> SharingGroup:
        """Some of them."""
        return SharingGroup(self.transport, [self.ranks[rank] for rank in ranks], self._comparison, self._owners)


def _with_note(buf: HostArray, digest: int) -> HostArray:
    n_bytes = buf.nbytes
    message = np.empty(n_bytes + NOTE_BYTES, np.uint8)
    message[:n_bytes] = buf.view(np.uint8)
    message[n_bytes:] = np.array([digest], NOTE).view(np.uint8)
    return message


class _Noted(Waking):
    """A request: a message that may end with a note, received into `buf`, values and then room."""

    def __init__(self, group: Group, buf: HostArray, source: int, tag: int, comparison: Comparison) -> None:
        end = buf.size - NOTE_BYTES // buf.itemsize
        self._values, self._note = buf[:end], buf[end:].view(np.uint8)
        self._note[:] = 0  # before the message can come
        self._source, self._comparison = group.ranks[source], comparison
        self._request = group.transport.irecv(buf, self._source, tag, NOTE_BYTES)
        self._done = False

    def test(self) -> bool:
        """Whether it has come."""
        if not self._done and self._request.test():
            self._done = True
            self._take(int.from_bytes(self._note.tobytes(), sys.byteorder) or None)
        return self._done

    def wakes(self, waiter: Waiter) -> bool:
        """When it has come, if the transport's request does."""
        return wakes(self._request, waiter)

    def _take(self, digest: int | None) -> None:
        self._comparison.take(self._source, digest)


class _Shared(_Noted):
    def __init__(self, group: Group, target: HostArray, source: int, tag: int, comparison: Comparison) -> None:
        longer = np.empty(target.size + NOTE_BYTES // target.itemsize, target.dtype)
        super().__init__(group, longer, source, tag, comparison)
        self._target = target

    def _take(self, digest: int | None) -> None:
        self._target[...] = self._values
        if digest is not None:
            self._comparison.compare(digest)
