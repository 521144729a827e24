"""What leaves first between hosts, what travels together, and that nothing under way is ever in the way.

Both ranks are moved by hand in one thread, so that every order and every count is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.labelled import TRAILER_BYTES
from mpikv.engine.operation import Completion, Operation
from mpikv.errors import MpikvError
from mpikv.transports import wire
from mpikv.transports.ordered import LATE_BYTES, REPORT_BYTES, WINDOW_BYTES, OrderedTransport
from mpikv.transports.threads import EAGER_BYTES, Fabric, ThreadTransport

BUCKET_BYTES = 1000
LONG = EAGER_BYTES + 1  # bytes; the transport below has it only once it is received
WINDOWFUL = -(-WINDOW_BYTES // LONG)  # so many of them are under way at a time


def tag(key: int) -> int:
    return wire.key_tag(key, 1)


class Pair:
    """Two ranks on two hosts. left: (receiver, tag) of every message that was given to the transport below."""

    def __init__(self, hosts: tuple[str, str] = ("a", "b")) -> None:
        self.fabric = Fabric(2, hosts)
        self.left: list[tuple[int, int]] = []
        self.priorities: dict[int, int] = {}
        pair = self

        class Logged(ThreadTransport):
            def isend(self, buf: HostArray, dest: int, tag: int, room_bytes: int = 0) -> Operation:
                pair.left.append((dest, tag))
                return super().isend(buf, dest, tag, room_bytes)

        inner = [Logged(self.fabric, rank) for rank in range(2)]
        peers = [[other for other in range(2) if hosts[other] != hosts[rank]] for rank in range(2)]
        self.ranks = [OrderedTransport(inner[i], peers[i], BUCKET_BYTES, self.priorities) for i in range(2)]

    def send(self, key: int, values: HostArray, priority: int = 0) -> Operation:
        """From rank 0 to rank 1."""
        self.priorities[key] = priority
        return self.ranks[0].isend(values, 1, tag(key))

    def receive(self, key: int, n_bytes: int) -> tuple[HostArray, Operation]:
        buf = np.zeros(n_bytes, np.uint8)
        return buf, self.ranks[1].irecv(buf, 0, tag(key))

    def poll(self, times: int = 1) -> None:
        """What rank 1 says gets to rank 0, and what that sends gets to rank 1."""
        for _ in range(times):
            for rank in (1, 0, 1):
                self.ranks[rank].poll()

    def keys(self) -> list[int]:
        """Of the messages of values to rank 1, in their order."""
        return [wire.key_of(one) for dest, one in self.left if dest == 1 and one != wire.TAG_BUNDLES]


def came(received: tuple[HostArray, Operation], values: HostArray) -> bool:
    buf, request = received
    return request.test() and np.array_equal(buf[: values.size], values)


def some(n_bytes: int, first: int = 0) -> HostArray:
    return (np.arange(first, first + n_bytes) % 251).astype(np.uint8)


def test_a_hundred_short_messages_are_one() -> None:
    pair = Pair()
    sent = [pair.send(key, some(4, key)) for key in range(100)]
    received = [pair.receive(key, 4) for key in range(100)]
    assert pair.fabric.sent_messages == 0
    assert not any(request.test() for request in sent)
    pair.poll()
    assert pair.fabric.sent_messages == 1
    assert pair.fabric.sent_bytes == 16 + 100 * (8 + 4)
    assert all(request.test() for request in sent)
    assert all(came(one, some(4, key)) for key, one in enumerate(received))


@pytest.mark.parametrize(("n_bytes", "bundles"), [(100, 3), (500, 13), (334, 13)])
def test_a_bundle_has_at_most_the_bytes_of_a_bucket(n_bytes: int, bundles: int) -> None:
    pair = Pair()
    for key in range(25):
        pair.send(key, some(n_bytes, key))
    received = [pair.receive(key, n_bytes) for key in range(25)]
    pair.poll()
    assert pair.left == [(1, wire.TAG_BUNDLES)] * bundles
    assert all(came(one, some(n_bytes, key)) for key, one in enumerate(received))


def test_a_call_that_is_being_put_together_sends_full_bundles_only() -> None:
    pair = Pair()
    pair.ranks[0].gathering += 1
    pair.send(0, some(400))
    pair.poll()
    assert not pair.left
    for key in (1, 2):
        pair.send(key, some(400))
    pair.poll()
    assert len(pair.left) == 1  # of two; the third one waits
    pair.ranks[0].gathering -= 1
    pair.ranks[0].flush()
    assert len(pair.left) == 2


def test_short_messages_wait_at_the_receiver_until_they_are_received() -> None:
    pair = Pair()
    for number in range(3):
        pair.send(7, some(10, number))
    pair.poll()
    for number in range(3):  # in the order in which they were sent
        assert came(pair.receive(7, 10), some(10, number))


def test_a_message_that_nobody_receives_yet_hides_no_other_one_that_is_done() -> None:
    pair = Pair()
    first = pair.send(0, some(LONG))
    sent = [pair.send(key, some(LONG, key)) for key in (1, 2)]
    pair.poll()
    for key, request in ((2, sent[1]), (1, sent[0])):
        received = pair.receive(key, LONG)
        pair.poll()
        assert request.test()
        assert came(received, some(LONG, key))
    assert not first.test()
    assert came(pair.receive(0, LONG), some(LONG))
    assert first.test()


def test_without_priorities_a_long_message_leaves_at_once() -> None:
    """And none is in the way of those that have priorities later, though nobody receives it."""
    pair = Pair()
    n = 2 * WINDOWFUL
    for _ in range(n):
        pair.send(0, some(LONG))
    pair.ranks[0].poll()
    assert pair.keys() == [0] * n
    pair.send(1, some(LONG), priority=1)
    pair.send(0, some(LONG))
    pair.poll()
    assert pair.keys() == [0] * n  # from now on they are asked for
    _, received = pair.receive(1, LONG)
    pair.poll(3)
    assert pair.keys() == [0] * n + [1]
    assert received.test()
    late = [pair.receive(0, LONG) for _ in range(n + 1)]
    pair.poll(3)
    assert pair.keys() == [0] * n + [1, 0]
    assert all(request.test() for _, request in late)
    (peer,) = pair.ranks[0]._peers.values()
    assert (peer.asked, peer.held, peer.unasked_bytes) == ({}, {}, 0)


def test_a_long_message_leaves_when_it_has_been_asked_for() -> None:
    pair = Pair()
    request = pair.send(0, some(LONG), priority=1)
    pair.poll()
    assert pair.left == [(1, wire.TAG_BUNDLES)]  # which says that there are priorities
    pair.left.clear()
    received = pair.receive(0, LONG)
    pair.poll()
    assert pair.left == [(0, wire.TAG_BUNDLES), (1, tag(0))]
    pair.poll()
    assert came(received, some(LONG))
    assert request.test()


def test_one_message_asks_for_all_that_a_rank_begins_to_receive() -> None:
    pair = Pair()
    for key in range(20):
        pair.receive(key, LONG)
        pair.receive(key, LONG)
    pair.poll()
    assert pair.fabric.sent_messages == 0  # nobody waits to be asked
    pair.send(99, some(LONG), priority=1)
    pair.poll()
    assert pair.left == [(1, wire.TAG_BUNDLES), (0, wire.TAG_BUNDLES)]
    assert pair.fabric.sent_bytes == 16 + 16 + 20 * 8


def test_of_one_key_several_messages_are_asked_for_at_a_time() -> None:
    """16 receives of a key are ahead of its messages, which come one by one, as over a slow link."""
    pair = Pair()
    n, n_bytes = 100, REPORT_BYTES // 4
    pair.send(1, some(4), priority=1)
    pair.poll()
    waiting = [pair.receive(0, n_bytes) for _ in range(16)]
    for number in range(n):
        pair.send(0, some(n_bytes, number))
        pair.poll()
        assert came(waiting.pop(0), some(n_bytes, number))
        if number + 16 < n:
            waiting.append(pair.receive(0, n_bytes))
            pair.ranks[1].flush()
    assert not waiting
    assert n // 4 - 5 <= pair.left.count((0, wire.TAG_BUNDLES)) <= n // 3  # it asks, and reports what it has taken
    (peer,) = pair.ranks[1]._peers.values()
    assert (peer.asking, peer.expected) == ({}, {})


def test_without_priorities_what_was_taken_is_reported_rarely() -> None:
    pair = Pair()
    n = 3 * LATE_BYTES // LONG
    for _ in range(n):
        pair.receive(0, LONG)
        pair.send(0, some(LONG))
        pair.poll()
    bundles = [one for one in pair.left if one[1] == wire.TAG_BUNDLES]
    assert bundles == [(0, wire.TAG_BUNDLES)] * (n // -(-LATE_BYTES // LONG))
    pair.send(0, some(4), priority=1)
    pair.poll(3)
    (peer,) = pair.ranks[0]._peers.values()
    assert (peer.asked, peer.unread_bytes) == ({}, 0)


def test_a_window_that_filled_without_priorities_opens_when_there_are_some() -> None:
    pair = Pair()
    for key in range(2 * WINDOWFUL):
        pair.receive(key, LONG)
    pair.receive(99, 4)
    for _ in range(3):
        pair.ranks[1].isend(some(4), 0, tag(7))  # with which rank 1 asks
        pair.poll()
    for key in range(2 * WINDOWFUL):
        pair.send(key, some(LONG))
        pair.poll()
    (peer,) = pair.ranks[0]._peers.values()
    assert peer.unread_bytes - peer.unasked_bytes > WINDOW_BYTES
    received = pair.receive(98, LONG)[1]
    pair.send(98, some(LONG), priority=1)
    pair.poll(3)
    assert received.test()


def test_short_and_long_messages_of_one_tag_find_their_receives() -> None:
    pair = Pair()
    sizes = [LONG, 3, LONG + 5, 4, 500, 501]
    for size in sizes:
        pair.send(0, some(size, size))
    received = [pair.receive(0, size) for size in sizes]
    pair.poll(2)
    assert all(came(one, some(size, size)) for size, one in zip(sizes, received, strict=True))


@pytest.mark.parametrize("n_bytes", [500 - TRAILER_BYTES, 500, 501])
@pytest.mark.parametrize("noted", [False, True])
def test_a_note_makes_no_short_message_long(n_bytes: int, *, noted: bool) -> None:
    """The receiver does not know whether there is one, and has to wait for the right kind of message."""
    pair = Pair()
    message = some(n_bytes + TRAILER_BYTES * noted)
    pair.ranks[0].isend(message, 1, tag(0), TRAILER_BYTES * noted)
    buf = np.zeros(n_bytes + TRAILER_BYTES, np.uint8)
    request = pair.ranks[1].irecv(buf, 0, tag(0), TRAILER_BYTES)
    pair.poll(2)
    assert came((buf, request), message)
    assert (1, tag(0)) not in pair.left or n_bytes > 500


def test_of_what_waits_for_the_link_the_highest_priority_leaves_first() -> None:
    """The link is full of a long key when a key of higher priority comes; what is under way cannot be called back."""
    pair = Pair()
    pair.send(9, some(LONG), priority=1)  # nobody asks for it; it tells that there are priorities
    pair.poll()
    n = 2 * WINDOWFUL
    for _ in range(n):
        pair.send(0, some(LONG))
        pair.receive(0, LONG)
    received = [pair.receive(1, LONG) for _ in range(5)]
    pair.ranks[1].flush()  # asks, and receives nothing
    pair.ranks[0].poll()
    assert pair.keys() == [0] * WINDOWFUL
    for _ in received:
        pair.send(1, some(LONG), priority=3)
    pair.ranks[0].poll()
    assert pair.keys() == [0] * WINDOWFUL  # still no room
    pair.poll(3)
    assert pair.keys() == [0] * WINDOWFUL + [1] * 5 + [0] * (n - WINDOWFUL)
    assert all(request.test() for _, request in received)


def test_equal_priorities_leave_in_the_order_of_their_calls_and_short_ones_before_long_ones() -> None:
    pair = Pair()
    pair.send(9, some(4), priority=1)
    pair.poll()
    pair.left.clear()
    for key in (3, 1, 2):
        pair.send(key, some(LONG))
        pair.receive(key, LONG)
    pair.send(4, some(LONG), priority=-1)
    pair.receive(4, LONG)
    pair.ranks[1].flush()
    pair.send(5, some(4))
    pair.send(6, some(4), priority=-2)
    pair.ranks[0].poll()
    assert [one for dest, one in pair.left if dest == 1] == [
        wire.TAG_BUNDLES,
        *(tag(key) for key in (3, 1, 2, 4)),
        wire.TAG_BUNDLES,
    ]


def test_what_nobody_receives_is_in_nobodys_way() -> None:
    """More than a window of a key that the other rank has not begun, and of long and short messages."""
    pair = Pair()
    for _ in range(3 * WINDOWFUL):
        pair.send(0, some(LONG), priority=9)
        pair.send(1, some(400), priority=9)
    pair.poll()
    last = pair.send(2, some(LONG, 5), priority=-9)
    received = pair.receive(2, LONG)
    pair.poll(5)
    assert came(received, some(LONG, 5))
    assert last.test()


def test_ranks_of_one_host_send_as_ever() -> None:
    pair = Pair(("a", "a"))
    pair.send(0, some(4))
    assert came(pair.receive(0, 4), some(4))
    assert pair.left == [(1, tag(0))]


def test_a_message_of_another_length_names_its_rank_and_tag() -> None:
    pair = Pair()
    pair.send(0, some(5))
    _, request = pair.receive(0, 4)
    pair.poll()
    with pytest.raises(MpikvError, match=f"rank 0, tag {tag(0)}: 5 bytes, 4 expected"):
        request.test()


def test_all_that_waits_for_a_rank_that_cannot_be_reached_fails() -> None:
    class Broken(ThreadTransport):
        def isend(self, buf: HostArray, dest: int, tag: int, room_bytes: int = 0) -> Operation:
            request = Completion()
            request.finish(ConnectionError("gone"))
            return request

    broken = OrderedTransport(Broken(Fabric(2, ["a", "b"]), 0), [1], BUCKET_BYTES, {})
    held, buf = broken.isend(some(LONG), 1, tag(0)), np.zeros(4, np.uint8)
    receiving = broken.irecv(buf, 1, tag(1))
    broken.isend(some(4), 1, tag(2))
    broken.poll()  # sends the bundle
    broken.poll()
    later: list[Any] = [broken.isend(some(4), 1, tag(3)), broken.irecv(buf, 1, tag(3))]
    for request in (held, receiving, *later):
        with pytest.raises(ConnectionError, match="gone"):
            request.test()
