"""The MPI transport itself: messages of every length, arrival in order, matched probes."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.engine.backoff import wait_until
from mpikv.errors import ShapeMismatch
from mpikv.transports import mpi
from mpikv.transports.base import Arrival


def nobody() -> BaseException:
    return AssertionError("a message did not arrive within 20 s")


def wait(request) -> None:
    wait_until(request.test, lambda: False, 20, nobody)


@pytest.fixture
def transport(comm):
    transport = mpi.open_transport(comm, 20, nobody)
    yield transport
    transport.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("limit", [2**31, 100], ids=["plain", "as if beyond 2 GiB"])
@pytest.mark.parametrize("n", [0, 1, 99, 100, 101, 128, 5000])
def test_lengths(transport, monkeypatch, limit: int, n: int) -> None:
    """From the limit on a message is one element of a datatype of its size; blocks and rests of all kinds."""
    monkeypatch.setattr(mpi, "INT_LIMIT", limit)
    monkeypatch.setattr(mpi, "BLOCK_BYTES", 64)
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    value = (np.arange(n) + transport.rank).astype(np.uint8)
    sends = [transport.isend(value, after, 5), transport.isend(value, after, 6)]
    received = np.full(n, 99, np.uint8)
    wait(transport.irecv(received, before, 5))
    np.testing.assert_array_equal(received, (np.arange(n) + before).astype(np.uint8))
    arrival = Arrival(transport, 6)
    wait(arrival)
    assert (arrival.incoming.source, arrival.incoming.n_bytes) == (before, n)
    probed = np.full(n, 99, np.uint8)
    wait(arrival.incoming.receive(probed))
    np.testing.assert_array_equal(probed, received)
    for send in sends:
        wait(send)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("n", [3, 200_000])  # sent at once, and when it is received
def test_a_shorter_message_is_an_error_of_its_receive_alone(transport, n: int) -> None:
    """Also where MPI ends it in one call with others, which have come as they should."""
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    received = {tag: np.zeros(n + extra) for tag, extra in ((1, 0), (2, 1), (3, 0))}
    receives = {tag: transport.irecv(buf, before, tag) for tag, buf in received.items()}
    room = transport.irecv(np.zeros(n + 2), before, 4, room_bytes=16)
    sends = [transport.isend(np.arange(float(n)), after, tag) for tag in (1, 2, 3, 4)]
    for tag in (1, 3):
        wait(receives[tag])
        np.testing.assert_array_equal(received[tag], np.arange(n))
    wait(room)
    with pytest.raises(ShapeMismatch, match=f"rank {before}, tag 2: {8 * n} bytes, {8 * n + 8} expected"):
        wait(receives[2])
    for send in sends:
        wait(send)


@pytest.mark.mpi(min_size=2)
def test_messages_of_one_tag_arrive_in_order(transport) -> None:
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sends = [transport.isend(np.full(1 + 3000 * (i % 3), i, np.int32), after, 7) for i in range(12)]
    for i in range(12):
        received = np.empty(1 + 3000 * (i % 3), np.int32)
        wait(transport.irecv(received, before, 7))
        assert (received == i).all()
    for send in sends:
        wait(send)


def test_hosts_and_bytes_of_all_ranks(transport) -> None:
    assert len(transport.hosts) == transport.size
    told = mpi.allgather_bytes(transport, bytes([transport.rank]) * transport.rank, 20, nobody)
    assert told == [bytes([rank]) * rank for rank in range(transport.size)]


def test_who_waits_for_many_messages_looks_at_a_few_of_them_for_each(transport, monkeypatch) -> None:
    """In the order in which they come, or the other way round; one look never takes in all that is under way."""
    n = 20 * mpi.AT_ONCE
    looked_at: list[int] = []

    class Looking:
        @staticmethod
        def Testsome(requests, statuses):  # noqa: N802 - MPI's name
            looked_at.append(len(requests))
            return real.Request.Testsome(requests, statuses)

    class Mpi:
        Request = Looking

        def __getattr__(self, name):
            return getattr(real, name)

    real = mpi.MPI
    monkeypatch.setattr(mpi, "MPI", Mpi())
    received = np.zeros((n, 1), np.int64)
    requests = [transport.irecv(received[i], transport.rank, i) for i in range(n)]
    for _ in range(3):
        before = sum(looked_at)
        transport.poll()
        assert sum(looked_at) - before <= mpi.AT_MOST
    before = sum(looked_at)
    for i in range(n):
        wait(transport.isend(np.array([i]), transport.rank, i))
        wait(requests[i])
    assert (sum(looked_at) - before) / n <= 2 * mpi.AT_MOST
    np.testing.assert_array_equal(received[:, 0], np.arange(n))
    assert max(looked_at) <= mpi.AT_ONCE
