"""Groups whose messages say under which labels the values in them were pushed; the collectives know nothing of it.

Every rank adds in the *units* of its own factor. A message of a reduce-scatter ends with a *note* of 32 bytes where its
sender has anything to say that its last message to this receiver, in the rounds of the same queue, did not say: the
digest of what must be equal on all workers, the factor that the values are in, and whether any of what has come to the
sender so far was in other units (MIXED) or of another digest (WRONG). The receiver brings the values into its own units
before they are combined with its own. The messages by which one chunk is added connect all ranks. So where digests
differ, one of these messages came to a rank with another digest, all later ones say so, and the chunk's owner knows.

Owners know before they update. A rank that owns nothing learns it in the allgather: the first message from each sender,
who is an owner or has heard from one, ends with a note where there is anything to say.

Cost: no message. Where labels change, the notes and a copy of the values in front of them; at ranks that own nothing a
copy of the first message from each sender in every allgather.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.digests import digest
from mpikv.common.labels import Label
from mpikv.engine.request import Request, Waiter, Waking, wakes
from mpikv.transports.base import Group, Transport

MIXED, WRONG = 1, 2
_NOTE = struct.Struct("<QQdQ")  # 1: there is a note; then what `Said` holds
NOTE_BYTES = _NOTE.size  # a multiple of the size of every dtype


class Said(NamedTuple):
    """What a message says of its values. flags: MIXED, WRONG, both or none."""

    digest: int
    factor: float
    flags: int = 0

    def as_bytes(self) -> bytes:
        """A note."""
        return _NOTE.pack(1, *self)


def said_in(note: HostArray) -> Said:
    """What a note (NOTE_BYTES,) of uint8 says."""
    return Said(*_NOTE.unpack(note.data)[1:])


@lru_cache(maxsize=64)  # a store of many keys has few labels
def _said_of(label: Label, *, exact: bool) -> Said:
    if exact:
        return Said(digest(label), 1.0)
    return Said(digest(label.rest, label.factor == 0.0), label.factor)  # 0 cannot be scaled to anything else


class Comparison:
    """One worker's side of a queue: what it has said to whom and heard from whom, and what it knows of the round.

    labels: of each key of the queue, as all workers have them before the first round; None: it takes no part in rounds.
    exact: values are integers, which cannot be scaled.
    """

    def __init__(self, labels: Sequence[Label | None], *, exact: bool) -> None:
        self._exact = exact
        self._labels, self.own = labels, self._facts(labels)
        self._first = self.own
        self._said: dict[int, Said] = {}
        self._heard: dict[int, Said] = {}
        self.met: set[tuple[int, int]] = set()  # receiver and sender of messages of this allgather
        self.begin(labels)

    def begin(self, labels: Sequence[Label | None]) -> None:
        """The next round, which this worker has pushed under these labels."""
        if labels != self._labels:
            self._labels, self.own = labels, self._facts(labels)
        self.flags = 0
        self.units = self.own.factor  # of the sums of this rank's chunk
        self.met.clear()

    def _facts(self, labels: Sequence[Label | None]) -> Said:
        several = list(dict.fromkeys(label for label in labels if label is not None))
        if len(several) != 1:
            return Said(digest(several), 1.0)  # one factor is said for all keys, so these must be equal too
        return _said_of(several[0], exact=self._exact)

    @property
    def mixed(self) -> bool:
        """Whether values came in different units; all of them are in `units` now."""
        return bool(self.flags & MIXED)

    @property
    def wrong(self) -> bool:
        """Whether labels differ in what must be equal, so that nothing may be updated."""
        return bool(self.flags & WRONG)

    def news(self, rank: int) -> Said | None:
        """What a message to this rank has to say; None: what the last one said."""
        now = self.own if not self.flags else self.own._replace(flags=self.flags)
        if self._said.get(rank, self._first) == now:
            return None
        self._said[rank] = now
        return now

    def hear(self, rank: int, said: Said | None) -> float:
        """`ratio` for values from this rank. said: None: what it said last."""
        if said is None:
            said = self._heard.get(rank, self._first)
        else:
            self._heard[rank] = said
        return self.ratio(said)

    def ratio(self, said: Said) -> float:
        """What values of which this is said are to be multiplied by, to be in this rank's units."""
        self.flags |= said.flags
        if said.digest != self.own.digest:
            self.flags |= WRONG
        elif said.factor != self.own.factor:
            self.flags |= MIXED
            return said.factor / self.own.factor
        return 1.0

    def ratio_from(self, rank: int) -> float:
        """`ratio` for values of which this rank has said something by now, or has nothing to say."""
        return self.ratio(self._heard.get(rank, self._first))

    def ratio_of_all(self, said: Sequence[Said]) -> float:
        """What this rank's values are to be multiplied by where all know of all before they add. said: by rank."""
        for one in said:
            self.ratio(one)
        self.units = said[0].factor
        return 1.0 if self.own.factor == self.units else self.own.factor / self.units


class AddingGroup(Group):
    """For a reduce-scatter."""

    def __init__(self, transport: Transport, ranks: Sequence[int], comparison: Comparison) -> None:
        super().__init__(transport, ranks)
        self._comparison = comparison

    def isend(self, buf: HostArray, dest: int, tag: int) -> Request:
        """With a note where there is news."""
        said = self._comparison.news(self.ranks[dest])
        if said is None:
            return self.transport.isend(buf, self.ranks[dest], tag)
        return self.transport.isend(_with_note(buf, said), self.ranks[dest], tag, NOTE_BYTES)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Request:
        """buf: values, then `room`."""
        return _Added(self, buf, source, tag, self._comparison)

    def room(self, dtype: np.dtype[Any]) -> int:
        """That of a note."""
        return NOTE_BYTES // dtype.itemsize

    def part(self, ranks: Sequence[int]) -> AddingGroup:
        """Some of them."""
        return AddingGroup(self.transport, [self.ranks[rank] for rank in ranks], self._comparison)


class DecodingGroup(AddingGroup):
    """For a reduce-scatter of values that have to be decoded: whoever does scales them then (`ratio_from`)."""

    def irecv(self, buf: HostArray, source: int, tag: int) -> Request:
        """buf: data, then `room`."""
        return _Heard(self, buf, source, tag, self._comparison)


class SharingGroup(Group):
    """For an allgather. owners: the transport's ranks of those that own something."""

    def __init__(
        self, transport: Transport, ranks: Sequence[int], comparison: Comparison, owners: frozenset[int]
    ) -> None:
        super().__init__(transport, ranks)
        self._comparison, self._owners = comparison, owners

    def isend(self, buf: HostArray, dest: int, tag: int) -> Request:
        """With a note where the receiver owns nothing and does not know yet."""
        if self._first(self.ranks[dest], self.transport.rank) and self._comparison.flags:
            noted = _with_note(buf, self._comparison.own._replace(flags=self._comparison.flags))
            return self.transport.isend(noted, self.ranks[dest], tag, NOTE_BYTES)
        return self.transport.isend(buf, self.ranks[dest], tag)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Request:
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


def _with_note(buf: HostArray, said: Said) -> HostArray:
    n_bytes = buf.nbytes
    message = np.empty(n_bytes + NOTE_BYTES, np.uint8)
    message[:n_bytes] = buf.view(np.uint8)
    message[n_bytes:] = np.frombuffer(said.as_bytes(), np.uint8)
    return message


class _Noted(Waking):
    """A request: a message that may end with a note, received into `buf`, values and then room."""

    def __init__(self, group: Group, buf: HostArray, source: int, tag: int, comparison: Comparison) -> None:
        end = buf.size - NOTE_BYTES // buf.itemsize
        self._values, self._note = buf[:end], buf[end:].view(np.uint8)
        self._note[0] = 0  # before the message can come
        self._source, self._comparison = group.ranks[source], comparison
        self._request = group.transport.irecv(buf, self._source, tag, NOTE_BYTES)
        self._done = False

    def test(self) -> bool:
        """Whether it has come, and its values are as this rank needs them."""
        if not self._done and self._request.test():
            self._done = True
            self._take(said_in(self._note) if self._note[0] else None)
        return self._done

    def wakes(self, waiter: Waiter) -> bool:
        """When it has come, if the transport's request does."""
        return wakes(self._request, waiter)

    def _take(self, said: Said | None) -> None:
        raise NotImplementedError


class _Added(_Noted):
    def _take(self, said: Said | None) -> None:
        ratio = self._comparison.hear(self._source, said)
        if ratio != 1.0:
            self._values *= self._values.dtype.type(ratio)


class _Heard(_Noted):
    def _take(self, said: Said | None) -> None:
        self._comparison.hear(self._source, said)


class _Shared(_Noted):
    def __init__(self, group: Group, target: HostArray, source: int, tag: int, comparison: Comparison) -> None:
        longer = np.empty(target.size + NOTE_BYTES // target.itemsize, target.dtype)
        super().__init__(group, longer, source, tag, comparison)
        self._target = target

    def _take(self, said: Said | None) -> None:
        self._target[...] = self._values
        if said is not None:
            self._comparison.flags |= said.flags
