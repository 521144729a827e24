"""Messages through the memory of a host: what is sent arrives, whole, in the order of its sender and tag.

The ranks are polled by hand, so nothing here depends on time.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

import numpy as np
import pytest
from fake_gpus import one_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from store_modes import long_messages

from mpikv.errors import MpikvError
from mpikv.hostmemory.allocator import Allocator
from mpikv.hostmemory.segment import private_memory
from mpikv.hostmemory.waker import Waker
from mpikv.spaces.device import DeviceSpace
from mpikv.testing.ranks import Gathering, spawn
from mpikv.transports import memory
from mpikv.transports.loopback import Loopback
from mpikv.transports.memory import EAGER, HELD, LONGEST_BYTES, REFERENCE_BYTES, local_transport, ranks_here
from mpikv.transports.threads import Fabric

SLOT_BYTES = memory.LEAST_SLOT_BYTES
KINDS = {
    "empty": 0,
    "short": 100,
    "longest": LONGEST_BYTES,
    "announced": LONGEST_BYTES + 1,
    "slot": SLOT_BYTES,
    "pieces": 3 * SLOT_BYTES + 5,
}


def ranks(workers, servers, hosts=None, slot_bytes=SLOT_BYTES):
    """The transports of `workers` and `servers` ranks, and the fabric below."""
    size = workers + servers
    hosts = hosts or ["a"] * size
    fabric = Fabric(size, hosts)
    memories = {host: iter(private_memory(hosts.count(host))) for host in set(hosts)}
    W, S = list(range(workers)), list(range(workers, size))
    return [
        local_transport(fabric.rank(rank), next(memories[hosts[rank]]), W, S, slot_bytes) for rank in range(size)
    ], fabric


def numbers(n_bytes, seed=0):
    return np.random.default_rng([n_bytes, seed]).integers(0, 256, n_bytes, np.uint8)


def settle(transports, requests=()):
    """Poll until nothing moves any more, and all requests are done."""
    for _ in range(50):
        for transport in transports:
            transport.poll()
    assert all(request.test() for request in requests)


@pytest.mark.parametrize("n_bytes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shared", [False, True], ids=["unshared", "shared"])
def test_one_message(n_bytes, shared):
    """Both directions, sent and received first, by a probe, and borrowed; nothing goes through the transport below."""
    (worker, server), fabric = ranks(1, 1)
    for a, b in ((worker, server), (server, worker)):
        data = numbers(n_bytes, a.rank)
        if shared and n_bytes:
            data = a.segment.take(n_bytes)
            data[:] = numbers(n_bytes, a.rank)
        outs = np.zeros((3, n_bytes), np.uint8)
        settle([a, b], [b.irecv(outs[0], a.rank, 7), a.isend(data, b.rank, 7)])

        sent = [a.isend(data, b.rank, tag) for tag in (7, 8)]
        settle([a, b])
        assert b.probe(9) is None
        incoming = b.probe(8)
        assert (incoming.source, incoming.n_bytes) == (a.rank, n_bytes)
        settle([a, b], [*sent, b.irecv(outs[1], a.rank, 7), incoming.receive(outs[2])])
        assert b.probe(8) is None
        assert (outs == data).all()

        borrowed = b.borrow(n_bytes, a.rank, 9)
        sent = a.isend(data, b.rank, 9)
        settle([a, b], [borrowed])
        assert (borrowed.view == data).all()
        borrowed.release()
        settle([a, b], [sent])
    assert fabric.sent_messages == 0
    assert len(worker._slots) == EAGER + 1 + HELD  # all are back
    assert worker.flushed


def test_what_is_lent_is_read_where_it_is():
    """The sender's array is free when the receiver has given it back, not before."""
    (worker, server), _ = ranks(1, 1)
    data = worker.segment.take(REFERENCE_BYTES + 1)
    sent = worker.isend(data, 1, 5)
    borrowed = server.borrow(data.size, 0, 5)
    settle([worker, server], [borrowed])
    assert borrowed.view.__array_interface__["data"] == data.__array_interface__["data"]
    assert not sent.test()
    borrowed.release()
    settle([worker, server], [sent])
    assert server.copied_bytes == worker.copied_bytes == 0


def test_who_holds_all_it_may_still_gets_what_it_asks_for():
    """Messages that nobody wants yet, and what receivers hold, leave a slot for the next one."""
    transports, _ = ranks(1, 3)
    worker, *servers = transports
    for tag in range(5):
        for server in servers:
            worker.isend(numbers(SLOT_BYTES, tag), server.rank, 100 + tag)  # unwanted
    held = []
    for server in servers:
        for i in range(HELD):
            held.append(server.borrow(SLOT_BYTES, 0, i))
            worker.isend(numbers(SLOT_BYTES, i), server.rank, i)
    settle(transports, held)
    out = np.zeros(5 * SLOT_BYTES, np.uint8)
    data = numbers(out.size)
    for server in servers:
        sent = worker.isend(data, server.rank, 50)
        received = server.irecv(out, 0, 50)
        settle(transports, [sent, received])
        assert (out == data).all()
    for borrowed in held:
        borrowed.release()
    settle(transports)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 2), st.booleans(), st.data())
def test_many_messages(workers, servers, long, data):
    """Any lengths, tags and directions, received in any order: those of one sender and tag in the order they were sent.

    Part of the ranks may be on another host, which messages reach through the transport below.
    """
    size = workers + servers
    hosts = data.draw(st.sampled_from([["a"] * size, ["b"] + ["a"] * (size - 1)]))
    draws = np.random.default_rng(data.draw(st.integers(0, 1000)))
    lengths = [0, 1, 30, 200] if long else [0, 5, REFERENCE_BYTES + 1, LONGEST_BYTES + 1, 2 * SLOT_BYTES + 1]

    def run():
        transports, fabric = ranks(workers, servers, hosts)
        transports = [fabric.rank(i) if one is None else one for i, one in enumerate(transports)]
        log, requests = {}, []
        for i in range(25):
            a, b = int(draws.integers(workers)), workers + int(draws.integers(servers))
            a, b = (a, b) if draws.integers(2) else (b, a)
            place = a, b, int(draws.integers(3))
            array = numbers(int(draws.choice(lengths)), i)
            requests.append(transports[a].isend(array, b, place[2]))
            log.setdefault(place, []).append(array)
            if draws.integers(3) == 0:
                transports[int(draws.integers(size))].probe(99)
        received = []
        for a, b, tag in sorted(log, key=lambda place: draws.random()):
            for array in log[a, b, tag]:
                out = np.zeros_like(array)
                requests.append(transports[b].irecv(out, a, tag))
                received.append((out, array))
        for _ in range(400):
            for transport in transports:
                transport.probe(99)
            if all(request.test() for request in requests):
                break
        assert all(request.test() for request in requests)
        for out, array in received:
            assert (out == array).all()

    with long_messages() if long else contextlib.nullcontext():
        run()


def test_a_message_of_another_length_is_an_error():
    (worker, server), _ = ranks(1, 1)
    for n_bytes in (5, SLOT_BYTES):
        worker.isend(np.zeros(n_bytes, np.uint8), 1, n_bytes)
        received = server.irecv(np.zeros(6, np.uint8), 0, n_bytes)
        with pytest.raises(MpikvError, match=f"{n_bytes} bytes, 6 expected"):
            received.test()


def test_who_reaches_whom():
    """Workers and servers of one host, each other only; nobody where one of the two is missing."""
    transports, _ = ranks(2, 2, ["a", "b", "a", "c"])
    assert [one is None for one in transports] == [False, True, False, True]
    assert [transports[0].reaches(rank) for rank in range(4)] == [False, False, True, False]
    assert ranks_here(transports[0]) == [0, 2]
    assert local_transport(Fabric(2).rank(0), private_memory(2)[0], [0, 1], [], 1) is None


# --- memory that a rank takes for itself


def test_segments_are_disjoint_and_end():
    memories = private_memory(3)
    segments = [Allocator(memory, 1000) for memory in memories]
    arrays = [segment.take(n) for segment in segments for n in (1, 100, 5000)]
    for i, array in enumerate(arrays):
        array[:] = i
    assert [np.unique(array).tolist() for array in arrays] == [[i] for i in range(9)]
    assert segments[0].take(memories[0].n_bytes // 3) is None
    assert [segment.taken_bytes for segment in segments] == [5101] * 3


def test_what_is_given_back_is_zero_and_taken_again():
    (memory,) = private_memory(1)
    segment = Allocator(memory, 0)
    first = segment.take(100_000)
    first[:] = 7
    segment.give(first)
    segment.give(np.ones(100_000, np.uint8))  # not of this memory
    assert segment.taken_bytes == 0
    second, third = segment.take(100_000), segment.take(100_000)
    assert second.__array_interface__["data"] == first.__array_interface__["data"]
    assert not second.any()
    assert third.__array_interface__["data"] != first.__array_interface__["data"]


# --- wakers


@pytest.fixture
def wakers():
    made, gathering = [Waker(memory) for memory in private_memory(2)], Gathering(2)
    spawn(2, lambda transport: made[transport.rank].connect(gathering.of(transport.rank)))
    pipes = {os.readlink(f"/proc/self/fd/{waker._own}") for waker in made}
    assert len(pipes) == 2
    assert open_ends(pipes) == 6  # of each: both ends of its pipe, and the other's
    yield made
    for waker in made:
        waker.close()
        waker.close()
    assert open_ends(pipes) == 0


def open_ends(pipes):
    """How many of this process's files are these pipes. Other tests' files may be closed meanwhile."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}") in pipes
    return count


def test_a_bell_wakes_who_sleeps(wakers):
    ended = threading.Event()

    def sleep():
        wakers[0].sleep(60.0)
        ended.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    while not ended.wait(0.001):
        wakers[1].wake_sleeper(0)
    thread.join()


def test_nobody_is_woken_who_does_not_sleep(wakers):
    """Nor does anybody sleep who has something to handle."""
    wakers[1].wake_sleeper(0)
    wakers[0].wake_self()
    assert select.select([wakers[0]._own], [], [], 0)[0] == []
    wakers[0].sleep(0.001)  # ends by itself
    wakers[0].waiting = lambda: True
    wakers[0].sleep(60.0)


def test_a_bell_without_a_pipe_sleeps_its_time():
    (memory,) = private_memory(1)
    waker = Waker(memory)
    waker.sleep(0.001)
    waker.wake_sleeper(0)
    waker.close()


# --- within a process


def test_what_a_worker_hands_to_the_server_in_its_process() -> None:
    """Whoever comes first, by tags; in the dtype of who receives; nothing is left behind."""
    space, handed = DeviceSpace(one_gpu()[1]), Loopback()
    arrays = [space.from_host(np.full(3, i, np.dtype(np.float16))) for i in range(4)]
    targets = [space.zeros(3, np.dtype(np.float32)) for _ in range(4)]
    with space.in_stream():  # as whoever holds the engine's lock is
        under_way = handed.send(arrays[0], 7), handed.send(arrays[1], 7), handed.receive(targets[3], 8)
        assert [one.test() for one in under_way] == [False] * 3
        assert handed.receive(targets[0], 7).test()
        assert [one.test() for one in under_way] == [True, False, False]
        assert handed.receive(targets[1], 7).test()
        assert handed.send(arrays[3], 8).test()
        assert [one.test() for one in under_way] == [True] * 3
    assert [space.to_host(one).tolist() for one in targets] == [[0] * 3, [1] * 3, [0] * 3, [3] * 3]
    assert not handed._sent
    assert not handed._asked

    dropped, sent = handed.receive(None, 1), handed.send(arrays[0], 1)  # what nobody wants is thrown away
    assert (dropped.test(), sent.test()) == (True, True)
