"""A transport on which what waits for a link leaves by priority, and short messages together; over another transport.

For the collectives of keys, between ranks of different hosts. Many keys are under way at once, pushed in any order, and
each rank knows only its own. So nothing is agreed on beforehand.

Short messages to one rank travel together, in *bundles*. Every rank takes in all bundles that come; a short message
that nobody has begun to receive waits here. Long messages leave at once, until this rank has something of a priority to
send. From then on there is one rule: *nothing is sent that is not taken at the other end, whatever the other end waits
for.* A long message then leaves when its receiver has asked for it, which it does when it begins to receive it. Bundles
carry what receivers ask for, how much they have taken, and whether who sends them has priorities: while the other rank
has none, it waits for nothing that a bundle would say, so these numbers travel with what is sent anyway.

So what is under way gets through, and the sender can afford to have only so many bytes under way to each rank,
`WINDOW_BYTES`, until that rank says that it has taken them, and to choose what is next: of all that may leave, what has
the highest priority, short messages before long ones, and then in the order of their `isend`. (That MPI has sent a
message says nothing: it copies short ones, and the system keeps megabytes for a socket.) While the window is full short
messages gather. Nobody ever waits for a key that another rank has not pushed, except whoever waits for that key. Bytes
that left unasked do not count in the window.

Nothing leaves before `poll` or `flush`, so that what a call, or a step of the engine, has to send travels together.

Whether a message is short follows from the length of its values, which both ends know. Messages of one sender and tag
stay in order among the short ones and among the long ones, and each receive knows which of the two it waits for.

Cost: a short message is copied into its bundle and out of it; 8 bytes of a bundle for each message and for each run of
long messages that are asked for. With priorities one bundle more for each few long messages, without them one for each
16 MiB that are received where nothing else is sent. An `MPI_Improbe` in each step of the engine. Restrictions: arrays
in host memory. Messages between ranks of one host go straight to the transport below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Completion, Operation, wakes
from mpikv.errors import MpikvError
from mpikv.transports import wire
from mpikv.transports.base import Incoming, Transport, take_first

WINDOW_BYTES = 1 << 20  # 40 ms at 200 Mbit/s, more than a nap or a switch of threads
REPORT_BYTES = WINDOW_BYTES // 4  # a bundle reports what was taken once it is so much, or leaves anyway
LATE_BYTES = 16 * WINDOW_BYTES  # the same while the other rank does not wait for it; far below a count of 32 bits
_LINE = 2  # uint32 of a line of a bundle's head
_FIRST = 2 * _LINE  # numbers of lines of both kinds, bytes taken, whether the sender has priorities


class _Sending(Completion):
    """A message that waits to be sent. As a request, it is done when its array may be changed again.

    n_bytes: of its values, without a note.
    """

    __slots__ = ("data", "n_bytes", "tag")

    def __init__(self, data: HostArray, tag: int, n_bytes: int) -> None:
        super().__init__()
        self.data, self.tag, self.n_bytes = data, tag, n_bytes


class _Receiving(Completion):
    """A short message that has not come yet."""

    __slots__ = ("room_bytes", "target")

    def __init__(self, target: HostArray, room_bytes: int) -> None:
        super().__init__()
        self.target, self.room_bytes = target, room_bytes

    def take(self, data: HostArray, source: int, tag: int) -> None:
        if data.size not in (self.target.size, self.target.size - self.room_bytes):
            error = f"message from rank {source}, tag {tag}: {data.size} bytes, {self.target.size} expected"
            self.finish(MpikvError(error))
            return
        self.target[: data.size] = data
        self.finish()


class _UnderWay(Completion):
    """A message that is sent or received below. `ended(error)` is called once that is done, whoever waits for it."""

    __slots__ = ("_ended", "_peer", "_request")

    def __init__(self, request: Operation, peer: _RankLink, ended: Callable[[Exception | None], None]) -> None:
        super().__init__()
        self._request, self._peer, self._ended = request, peer, ended
        self.wake()

    def wake(self) -> None:
        while not self.done:
            error: Exception | None = None
            try:
                if not self._request.test():
                    if not wakes(self._request, self):
                        self._peer.looked_at.append(self)
                    return
            except Exception as found:  # noqa: BLE001 - raised to whoever waits for it
                error = found
            self._ended(error)
            self.finish(error)


Waiting = tuple[int, bool, int, _Sending]  # what is to leave first is smallest: -priority, is long, number


class _RankLink:
    """What goes to and comes from one other rank."""

    def __init__(self) -> None:
        self.short: list[Waiting] = []  # heaps of what may leave
        self.long: list[Waiting] = []
        self.short_bytes = 0
        self.held: dict[int, deque[Waiting]] = {}  # long messages that nobody has asked for, by tag
        self.asked: dict[int, int] = {}  # how many more the other one has asked for than have left, by tag
        self.asking: dict[int, int] = {}  # how many this rank asks for in its next bundle, by tag
        self.asking_bytes = 0
        self.expected: dict[int, int] = {}  # how many more were asked for than have come, by tag
        self.unread_bytes = 0  # sent, and not known to be taken
        self.unasked_bytes = 0  # of these at most so many left without being asked for
        self.taken_bytes = 0  # of what has come, to be reported in the next bundle
        self.looked_at: list[_UnderWay] = []  # messages that do not say when they are done
        self.arrived: dict[int, deque[HostArray]] = {}  # short messages that nobody receives yet, by tag
        self.receiving: dict[int, deque[_Receiving]] = {}  # by tag
        self.incoming: deque[tuple[HostArray, Operation]] = deque()  # bundles
        self.has_priorities = False  # it waits to be asked, and while its window is full
        self.announced_priorities = False  # it has learned that this rank does
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """The rank cannot be reached: so nothing comes from it, either, that was not under way."""
        self.error = error
        waiting = [*self.short, *self.long, *(one for queue in self.held.values() for one in queue)]
        self.short, self.long, self.held, self.short_bytes = [], [], {}, 0
        receiving = [one for queue in self.receiving.values() for one in queue]
        self.receiving = {}
        for one in (*(sending for *_, sending in waiting), *receiving):
            one.finish(error)


class OrderedTransport:
    """The ranks of `inner`. peers: those on other hosts. bucket_bytes: the most bytes of values in one bundle.

    priorities: of what a key sends, by the key's number, as it is at that time; 0 where there is none.
    gathering: how many calls are putting together what they send: meanwhile short messages leave in full bundles only.
    """

    local: None = None  # all are messages

    def __init__(
        self, inner: Transport, peers: Iterable[int], bucket_bytes: int, priorities: Mapping[int, int]
    ) -> None:
        self._inner = inner
        self.rank, self.size, self.max_tag, self.hosts = inner.rank, inner.size, inner.max_tag, inner.hosts
        self.clock, self.recorder, self.ledger = inner.clock, inner.recorder, inner.ledger  # a bundle is one message
        self._priorities = priorities
        self.gathering = 0
        self._bucket_bytes = bucket_bytes
        self._short_bytes = bucket_bytes // 2  # of a longer one at most one would fit into a bundle
        self._peers = {rank: _RankLink() for rank in peers}
        self._active: dict[int, _RankLink] = {}  # with something to send
        self._incoming: dict[int, _RankLink] = {}  # with bundles that are under way
        self._number = 0
        self._by_priority = False  # whether any was ever given

    # --- sending

    def isend(self, buf: HostArray, dest: int, tag: int, room_bytes: int = 0) -> Operation:
        peer = self._peers.get(dest)
        if peer is None:
            return self._inner.isend(buf, dest, tag, room_bytes)
        n_bytes = buf.nbytes - room_bytes
        sending = _Sending(buf.reshape(-1).view(np.uint8), tag, n_bytes)
        if peer.error is not None:
            sending.finish(peer.error)
            return sending
        is_long = n_bytes > self._short_bytes
        self._number += 1
        priority = self._priorities.get(wire.key_of(tag), 0)
        if priority:
            self._by_priority = True
        waiting = (-priority, is_long, self._number, sending)
        if is_long and self._by_priority and peer.asked.get(tag, 0) <= 0:
            peer.held.setdefault(tag, deque()).append(waiting)
            return sending
        if is_long:
            if peer.asked.get(tag, 0) <= 0:
                peer.unasked_bytes += n_bytes
            _count(peer.asked, tag, -1)
            heappush(peer.long, waiting)
        else:
            heappush(peer.short, waiting)
            peer.short_bytes += sending.data.size
        self._active[dest] = peer
        return sending

    def flush(self) -> None:
        """Send what may leave and fits into its window. Does not wait."""
        for dest, peer in tuple(self._active.items()):
            while not self._by_priority or peer.unread_bytes - peer.unasked_bytes < WINDOW_BYTES:
                may_bundle = peer.short and (not self.gathering or peer.short_bytes >= self._bucket_bytes)
                if may_bundle and not (peer.long and peer.long[0] < peer.short[0]):
                    self._bundle(dest, peer)
                elif peer.long:
                    sending = heappop(peer.long)[3]
                    self._send(peer, dest, sending.data, sending.tag, sending)
                else:
                    break
            if self._must_report(peer):
                self._bundle(dest, peer, only_asking=True)
            if not (peer.short or peer.long):
                del self._active[dest]

    def _must_report(self, peer: _RankLink) -> bool:
        """Whether the other rank waits for a report of this one, or has not learned that this one waits.

        While messages of a tag have yet to come that it was asked for, it has something to send, and more of them are
        asked for several at a time.
        """
        if peer.has_priorities and (
            max(peer.asking_bytes, peer.taken_bytes) >= REPORT_BYTES
            or any(peer.expected.get(tag, 0) <= 0 for tag in peer.asking)
        ):
            return True
        return peer.taken_bytes >= LATE_BYTES or (self._by_priority and not peer.announced_priorities)

    def _send(self, peer: _RankLink, dest: int, data: HostArray, tag: int, sending: _Sending | None = None) -> None:
        """Let a message leave. sending: whose it is; None: a bundle.

        MPI may be done with them in any order, as it is with a long one only when the other rank receives it.
        """
        peer.unread_bytes += data.size if sending is None else sending.n_bytes

        def has_left(error: Exception | None) -> None:
            if sending is not None:
                sending.finish(error)
            if error is not None:  # raised to whoever waits for a message to or from this rank
                peer.fail(error)

        _UnderWay(self._inner.isend(data, dest, tag), peer, has_left)

    def _bundle(self, dest: int, peer: _RankLink, *, only_asking: bool = False) -> None:
        """Send a bundle: what this rank asks for, and the short messages that fit and have no long one before them."""
        asking, peer.asking, peer.asking_bytes = peer.asking, {}, 0
        for tag, count in asking.items():
            _count(peer.expected, tag, count)
        sendings: list[_Sending] = []
        n_bytes = 0
        while peer.short and not only_asking and not (peer.long and peer.long[0] < peer.short[0]):
            size = peer.short[0][3].data.size
            if sendings and n_bytes + size > self._bucket_bytes:
                break
            sendings.append(heappop(peer.short)[3])
            n_bytes += size
        peer.short_bytes -= n_bytes
        head = [len(asking), len(sendings), peer.taken_bytes, int(self._by_priority)]
        peer.taken_bytes, peer.announced_priorities = 0, self._by_priority
        for pair in asking.items():
            head += pair
        for sending in sendings:
            head += (sending.tag, sending.data.size)
        at = 4 * len(head)
        bundle = np.empty(at + n_bytes, np.uint8)
        bundle[:at].view(np.uint32)[:] = head
        for sending in sendings:
            bundle[at : at + sending.data.size] = sending.data
            at += sending.data.size
            self.ledger.bundled(sending.tag, 4 * _LINE + sending.data.size)
            sending.finish()
        self._send(peer, dest, bundle, wire.TAG_BUNDLES)

    # --- receiving

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        peer = self._peers.get(source)
        if peer is None:
            return self._inner.irecv(buf, source, tag, room_bytes)
        n_bytes = buf.nbytes - room_bytes
        if n_bytes > self._short_bytes:
            _count(peer.asking, tag, 1)
            peer.asking_bytes += n_bytes
            self._active[source] = peer

            def has_come(error: Exception | None) -> None:
                _count(peer.expected, tag, -1)
                peer.taken_bytes += 0 if error else n_bytes

            return _UnderWay(self._inner.irecv(buf, source, tag, room_bytes), peer, has_come)
        receiving = _Receiving(buf.reshape(-1).view(np.uint8), room_bytes)
        if tag in peer.arrived:
            receiving.take(take_first(peer.arrived, tag), source, tag)
        elif peer.error is not None:
            receiving.finish(peer.error)
        else:
            peer.receiving.setdefault(tag, deque()).append(receiving)
        return receiving

    def poll(self) -> None:
        """Take in the bundles that have come, and send what may leave then."""
        self._inner.poll()
        while (incoming := self._inner.probe(wire.TAG_BUNDLES)) is not None:
            source = incoming.source
            bundle = np.empty(incoming.n_bytes, np.uint8)
            self._peers[source].incoming.append((bundle, incoming.receive(bundle)))
            self._incoming[source] = self._peers[source]
        for source, peer in tuple(self._incoming.items()):
            try:
                while peer.incoming and peer.incoming[0][1].test():
                    self._open(source, peer, peer.incoming.popleft()[0])
            except Exception as error:  # noqa: BLE001 - raised to whoever waits for a message from this rank
                peer.incoming.clear()
                peer.fail(error)
            if not peer.incoming:
                del self._incoming[source]
        for source, peer in self._peers.items():
            looked_at, peer.looked_at = peer.looked_at, []
            for asked in looked_at:
                asked.wake()
            if self._must_report(peer):
                self._active[source] = peer
        if self._active:
            self.flush()

    def _open(self, source: int, peer: _RankLink, bundle: HostArray) -> None:
        peer.taken_bytes += bundle.size
        n_asked, n_messages, read_bytes, has_priorities = bundle[: 4 * _FIRST].view(np.uint32).tolist()
        peer.has_priorities = bool(has_priorities)
        peer.unread_bytes -= read_bytes
        peer.unasked_bytes = min(peer.unasked_bytes, peer.unread_bytes)
        if peer.short or peer.long:
            self._active[source] = peer
        at = 4 * (_FIRST + _LINE * (n_asked + n_messages))
        head = bundle[4 * _FIRST : at].view(np.uint32).reshape(-1, _LINE).tolist()
        for tag, count in head[:n_asked]:
            self._active[source] = peer
            _count(peer.asked, tag, count)
            while tag in peer.held and peer.asked.get(tag, 0) > 0:
                heappush(peer.long, take_first(peer.held, tag))
                _count(peer.asked, tag, -1)
        for tag, n_bytes in head[n_asked:]:
            data = bundle[at : at + n_bytes]
            at += n_bytes
            if tag in peer.receiving:
                take_first(peer.receiving, tag).take(data, source, tag)
            else:
                peer.arrived.setdefault(tag, deque()).append(data)

    def probe(self, tag: int) -> Incoming | None:
        return self._inner.probe(tag)

    def close(self) -> None:
        pass


def _count(counts: dict[int, int], tag: int, more: int) -> None:
    left = counts.get(tag, 0) + more
    if left:
        counts[tag] = left
    else:
        counts.pop(tag, None)
