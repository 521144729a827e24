"""Messages between ranks of one host through the memory that they share; to all other ranks through MPI.

This is a transport over another one, for a store with servers (docs/adr/0011). Between ranks that share memory a
message takes the shortest of three paths, and its receiver need not know which:

- A short message stands behind its record in a ring (rings.py); it is copied in and out.
- A message that lies in shared memory already is read there (*by reference*): the record says where it is. It counts as
  sent when the receiver says that it has read it.
- A long message is announced by its record. When the receiver wants it, the sender copies it into its *slots*, piece by
  piece, and the receiver reads it there by reference. Where a slot is free, a few are copied at once, unasked.

`borrow` receives without a copy: the receiver reads from the sender's memory until it gives it back. There are enough
slots for every long message that is wanted: receivers hold at most `HELD` of one sender, and `EAGER` may lie unread.

Cost: a record for a short message, two for one by reference, four for a long one; nothing of MPI. A slot's copy stays
in the cache. Memory: one ring in each direction for every pair that talks; `EAGER + 1 + HELD` slots for each receiver.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Done, Operation
from mpikv.errors import MpikvError
from mpikv.hostmemory.allocator import Allocator
from mpikv.hostmemory.rings import LONGEST_BYTES, RingReader, RingWriter, ring_begin, rings_bytes
from mpikv.hostmemory.segment import HostMemory
from mpikv.hostmemory.waker import Waker, waker_bytes
from mpikv.transports.base import Incoming, Transport, take_first
from mpikv.transports.memory_requests import Arrived, Backlogged, Receiving, Sending

MESSAGE, REFERENCE, ANNOUNCED, WANTED, READ = 1, 2, 3, 4, 5
REFERENCE_BYTES = 1 << 14  # copying less in and out costs less than the record that says it has been read
EAGER = 2
HELD = 4
LEAST_SLOT_BYTES, MOST_SLOT_BYTES = 1 << 18, 1 << 22  # slots should stay in the cache, and pieces be few
NUMBERS = 1 << 32  # of messages, beside their tag in one word

_DONE = Done()


class LocalTransport:
    """One rank of `inner`, some of whose ranks share `memory`.

    here: the numbers that these ranks have in `inner`, in the order of the memory. slot_bytes: about the length of a
    long message. receivers: how many of these ranks this one sends long messages to.
    """

    def __init__(
        self,
        inner: Transport,
        memory: HostMemory,
        here: Sequence[int],
        peers: Sequence[int],
        *,
        slot_bytes: int,
        receivers: int,
    ) -> None:
        self.inner = inner
        self.memory = memory
        self.rank, self.size, self.max_tag, self.hosts = inner.rank, inner.size, inner.max_tag, inner.hosts
        self.clock, self.recorder, self.ledger = inner.clock, inner.recorder, inner.ledger
        self.sent_messages = 0  # through memory, counted since the start
        self.sent_bytes = 0
        self.copied_bytes = 0  # in and out, by this rank
        self.waker = Waker(memory)
        self._place = {rank: place for place, rank in enumerate(here)}
        begin, n = waker_bytes(memory.size), memory.size
        me = self._place[inner.rank]
        self._writers = {rank: RingWriter(memory, ring_begin(begin, n, me, self._place[rank])) for rank in peers}
        self._readers = {rank: RingReader(memory, ring_begin(begin, n, self._place[rank], me)) for rank in peers}
        self._polled = [(reader, partial(self._record, rank)) for rank, reader in self._readers.items()]
        self._peers = tuple(peers)
        self._alone = len(peers) == inner.size  # every rank can be reached through memory
        self.segment = Allocator(memory, begin + rings_bytes(n))
        self._slot_bytes = min(MOST_SLOT_BYTES, max(LEAST_SLOT_BYTES, slot_bytes))
        taken = [self.segment.take(self._slot_bytes) for _ in range(EAGER + 1 + HELD * max(1, receivers))]
        self._slots = [slot for slot in taken if slot is not None]
        self._number = 0
        self._sendings: dict[int, Sending] = {}  # by reference or announced, by number
        self._slots_out: dict[int, deque[HostArray]] = {}  # that hold pieces of a message, in order, by number
        self._eager: set[int] = set()
        self._wanted: deque[int] = deque()
        self._backlog: dict[int, deque[Backlogged]] = {}
        self._posted: dict[tuple[int, int], deque[Receiving]] = {}
        self._pieces: dict[tuple[int, int], Receiving] = {}  # by source and number
        self._boxes: dict[tuple[int, int], deque[Arrived]] = {}
        self.waker.waiting = self._waiting

    # --- what it is

    @property
    def local(self) -> LocalTransport:
        return self

    @property
    def crowded(self) -> bool:
        """Return whether this host has more ranks than cores."""
        return self.memory.size > len(os.sched_getaffinity(0))

    @property
    def held_bytes(self) -> int:
        """Return how many bytes of scratch memory this rank holds."""
        return self._slot_bytes * (len(self._slots) + sum(map(len, self._slots_out.values())))

    def reaches(self, rank: int) -> bool:
        """Return whether messages to and from this rank go through memory."""
        return rank in self._writers

    # --- sending

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        if dest not in self._writers:
            return self.inner.isend(buf, dest, tag)
        data = buf.reshape(-1).view(np.uint8)
        n_bytes = data.size
        self.sent_messages += 1
        self.sent_bytes += n_bytes
        offset = self.memory.offset_of(data) if n_bytes > REFERENCE_BYTES else None
        if offset is None and n_bytes <= LONGEST_BYTES:
            self.copied_bytes += n_bytes
            return self._put(dest, MESSAGE, tag, 0, 0, data.data) or _DONE
        self._number = number = (self._number + 1) % NUMBERS
        name = tag * NUMBERS + number
        if offset is not None:
            sending = self._sendings[number] = Sending(self, dest, data)
            self._put(dest, REFERENCE, name, offset, n_bytes)
            return sending
        if n_bytes <= self._slot_bytes and len(self._eager) < EAGER and self._slots:
            self._eager.add(number)
            self._refer_to_copy(dest, name, data)
            return _DONE
        sending = self._sendings[number] = Sending(self, dest, data)
        self._put(dest, ANNOUNCED, name, n_bytes)
        return sending

    def _refer_to_copy(self, dest: int, name: int, piece: HostArray) -> None:
        slot = self._slots.pop()
        slot[: piece.size] = piece
        self.copied_bytes += piece.size
        self._slots_out.setdefault(name % NUMBERS, deque()).append(slot)
        self._put(dest, REFERENCE, name, self.memory.offset_of(slot) or 0, piece.size)

    def _fill(self) -> None:
        """Copy pieces of wanted messages into free slots."""
        while self._wanted and self._slots:
            number = self._wanted[0]
            sending = self._sendings[number]
            piece = sending.data[sending.at : sending.at + self._slot_bytes]
            self._refer_to_copy(sending.dest, number, piece)
            sending.at += piece.size
            if sending.at == sending.data.size:
                sending.done = True
                del self._sendings[number]
                self._wanted.popleft()

    def _put(  # noqa: PLR0917 - a record's fields, many times in a call
        self, dest: int, kind: int, a: int, b: int = 0, c: int = 0, payload: memoryview | None = None
    ) -> Backlogged | None:
        backlog = self._backlog.get(dest)
        if backlog is None and self._writers[dest].put(kind, a, b, c, payload):
            self.waker.wake_sleeper(self._place[dest])
            return None
        waiting = Backlogged(self, (kind, a, b, c, payload))
        self._backlog.setdefault(dest, deque()).append(waiting)
        return waiting

    def _flush(self) -> None:
        for dest in tuple(self._backlog):
            backlog = self._backlog[dest]
            before = len(backlog)
            while backlog and self._writers[dest].put(*backlog[0].record):
                backlog.popleft().done = True
            if len(backlog) < before:
                self.waker.wake_sleeper(self._place[dest])
            if not backlog:
                del self._backlog[dest]

    @property
    def flushed(self) -> bool:
        """Return whether every record has been written."""
        if self._backlog:
            self._flush()
        return not self._backlog

    # --- receiving

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        """Do what `Transport.irecv` does; a message through memory never comes shorter by `room_bytes`."""
        if source not in self._readers:
            return self.inner.irecv(buf, source, tag, room_bytes)
        return self._receive(Receiving(self, buf.reshape(-1).view(np.uint8), buf.nbytes), source, tag)

    def borrow(self, n_bytes: int, source: int, tag: int) -> Receiving:
        """Start receiving `n_bytes` bytes that may be read from `view` until `release`.

        source: a rank that it `reaches`.
        """
        return self._receive(Receiving(self, None, n_bytes), source, tag)

    def _receive(self, receiving: Receiving, source: int, tag: int) -> Receiving:
        if (source, tag) in self._boxes:
            self.match(receiving, take_first(self._boxes, (source, tag)))
        else:
            self._posted.setdefault((source, tag), deque()).append(receiving)
        return receiving

    def probe(self, tag: int) -> Incoming | None:
        self.poll()
        if self._boxes:
            for source in self._peers:
                if (source, tag) in self._boxes:
                    return take_first(self._boxes, (source, tag))
        return None if self._alone else self.inner.probe(tag)

    def match(self, receiving: Receiving, arrived: Arrived) -> None:
        """Give this message to this receive."""
        source, number = arrived.source, arrived.number
        if arrived.n_bytes != receiving.n_bytes:
            raise MpikvError(f"message from rank {source}: {arrived.n_bytes} bytes, {receiving.n_bytes} expected")
        if arrived.data is not None:
            self.copied_bytes += arrived.n_bytes
            receiving.take(arrived.data)
        elif arrived.referred >= 0:
            self._pieces[source, number] = receiving
            view = self.memory.array(arrived.referred, arrived.n_bytes, np.dtype(np.uint8))
            self._piece(receiving, source, number, view)
        else:
            self._pieces[source, number] = receiving
            self._put(source, WANTED, number)

    # --- records

    def _waiting(self) -> bool:
        return any(reader.waiting for reader in self._readers.values())

    def poll(self) -> None:
        """Handle every record that has come."""
        for reader, handle in self._polled:
            reader.take(handle)
        if self._backlog:
            self._flush()

    def _record(  # noqa: PLR0917 - a record's fields
        self, source: int, kind: int, a: int, b: int, c: int, payload: memoryview
    ) -> None:
        if kind == MESSAGE:
            if (source, a) in self._posted:
                receiving = take_first(self._posted, (source, a))
                if len(payload) != receiving.n_bytes:
                    raise MpikvError(f"message from rank {source}: {len(payload)} bytes, {receiving.n_bytes} expected")
                self.copied_bytes += len(payload)
                receiving.take(np.frombuffer(payload, np.uint8))
                return
            data = np.frombuffer(payload, np.uint8).copy()
            self._arrived(source, a, Arrived(self, source, data.size, data=data))
        elif kind == REFERENCE:
            tag, number = divmod(a, NUMBERS)
            pieces = self._pieces.get((source, number))
            if pieces is not None:
                self._piece(pieces, source, number, self.memory.array(b, c, np.dtype(np.uint8)))
            else:
                self._arrived(source, tag, Arrived(self, source, c, number=number, referred=b))
        elif kind == ANNOUNCED:
            tag, number = divmod(a, NUMBERS)
            self._arrived(source, tag, Arrived(self, source, b, number=number))
        elif kind == WANTED:
            self._wanted.append(a)
            self._fill()
        else:
            self._read(a)

    def _piece(self, receiving: Receiving, source: int, number: int, piece: HostArray) -> None:
        if receiving.buf is None and piece.size == receiving.n_bytes:
            receiving.refer(piece, partial(self._put, source, READ, number))
        else:
            self.copied_bytes += piece.size
            receiving.take(piece)
            self._put(source, READ, number)
        if receiving.done:
            del self._pieces[source, number]

    def _arrived(self, source: int, tag: int, arrived: Arrived) -> None:
        if (source, tag) in self._posted:
            self.match(take_first(self._posted, (source, tag)), arrived)
        else:
            self._boxes.setdefault((source, tag), deque()).append(arrived)

    def _read(self, number: int) -> None:
        slots = self._slots_out.get(number)
        if slots is None:
            self._sendings.pop(number).done = True
            return
        self._slots.append(slots.popleft())
        if not slots:
            del self._slots_out[number]
            self._eager.discard(number)
        self._fill()

    def close(self) -> None:
        self.waker.close()
        self._polled = []


def local_transport(
    inner: Transport, memory: HostMemory, workers: Sequence[int], servers: Sequence[int], slot_bytes: int
) -> LocalTransport | None:
    """Make this rank's transport over `memory`, which the ranks of its host share; None if it has nobody to talk to.

    workers, servers: ranks of `inner`; a rank may be both.
    """
    here = ranks_here(inner)
    workers_here = [rank for rank in workers if rank in here]
    servers_here = [rank for rank in servers if rank in here]
    peers = set(servers_here if inner.rank in workers_here else ()) | set(
        workers_here if inner.rank in servers_here else ()
    )
    room = (memory.n_bytes - waker_bytes(len(here)) - rings_bytes(len(here))) // len(here)
    if not peers or room < 2 * MOST_SLOT_BYTES * (EAGER + 1 + HELD * len(servers_here)):
        return None
    return LocalTransport(inner, memory, here, sorted(peers), slot_bytes=slot_bytes, receivers=len(servers_here))


def ranks_here(transport: Transport) -> list[int]:
    """Return the ranks on the host of this rank."""
    mine = transport.hosts[transport.rank]
    return [rank for rank, host in enumerate(transport.hosts) if host == mine]
