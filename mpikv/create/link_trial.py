"""How fast the links between the hosts of a store are, measured once while the store is made.

One rank of each host takes part; each streams to the next host's and at the same time receives from the one before, so
that all links are as busy as in an exchange. A receiver asks for as many pieces as it wants, twice as many each time,
until they take `LEAST_S`: by then the connection is there and has found its speed.

Cost: 0.1 to 0.2 s, more where a piece takes longer than `LEAST_S`, below 16 Mbit/s. Between pretended hosts
(MPIKV_TEST_HOSTS) nothing is measured: their links are this machine's memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mpikv.engine.operation import Operation, Predicate, Steps
from mpikv.engine.running import Running, run
from mpikv.errors import StallError
from mpikv.placement.links import LINK_SEGMENT_BYTES, LinkRates, given, in_ring
from mpikv.placement.members import Members
from mpikv.transports.base import Transport

if TYPE_CHECKING:
    from mpikv.session.processes import Processes  # importing it initialises MPI

LEAST_S, AGAIN = 0.02, 4
FIRST, MOST = 2, 1 << 14  # pieces at a time
PINGS = 10
WINDOW = 8  # pieces under way
WANTED, PIECE = 1, 2  # tags


def settled(members: Members, processes: Processes) -> Members:
    """With the links of the hosts: those given, or measured where there are several hosts.

    Collective over all ranks where they are measured, and then blocks.
    """
    said = given(members.config.link)
    if said is not None:
        return replace(members, link=said)
    if not members.links or members.config.test_hosts:
        return members
    return replace(members, link=measured(processes.transport, processes.gather, members.config.timeout_s))


def measured(transport: Transport, gather: Callable[[bytes], list[bytes]], timeout_s: float) -> LinkRates:
    """Measure the links. gather: returns what each rank of the transport brings, in rank order. Collective, blocks."""
    hosts = list(dict.fromkeys(transport.hosts))
    leaders = [transport.hosts.index(host) for host in hosts]
    found: tuple[float, float] | None = None
    if transport.rank in leaders:
        at = leaders.index(transport.rank)
        before, after = leaders[at - 1], leaders[(at + 1) % len(leaders)]

        def late() -> StallError:
            return StallError(
                f"rank {transport.rank} waited {timeout_s:g} s for ranks {before} and {after}, to measure the links"
            )

        found = run(_both(_received(transport, before), _sent(transport, after)), timeout_s, late)
    told = [json.loads(text) for text in gather(json.dumps(found).encode())]
    of_streams = [told[rank] for rank in (*leaders[1:], leaders[0])]  # the receiver of each host's stream has measured
    return in_ring(hosts, [rate for rate, _ in of_streams], [latency_s for _, latency_s in of_streams])


def _both(receiving: Steps[tuple[float, float]], sending: Steps[None]) -> Steps[tuple[float, float]]:
    """Do both at the same time. Returns what was received."""
    first, second = Running(receiving, "receive"), Running(sending, "send")

    def done() -> bool:
        moved = True
        while moved:
            moved = [first.advance(), second.advance()] != [False, False]
        return first.test() and second.test()

    yield Predicate(done)
    assert first.result is not None
    return first.result


def _received(transport: Transport, source: int) -> Steps[tuple[float, float]]:
    """Return the rate of what comes from `source`, in bytes per second, and the latency in seconds."""
    now_s = transport.clock.now_s
    pieces = [np.empty(LINK_SEGMENT_BYTES, np.uint8) for _ in range(WINDOW)]

    def asked(n: int, elems: int) -> Steps[float]:
        """Return the seconds until all are here: a rank that has lost its core never looks faster by that."""
        under_way: list[Operation] = []
        for i in range(min(n, WINDOW)):
            under_way.append(transport.irecv(pieces[i][:elems], source, PIECE))
        begun_s = now_s()
        yield transport.isend(np.array([n, elems]), source, WANTED)
        for i in range(n):
            yield under_way[i % WINDOW]
            if i + WINDOW < n:
                under_way[i % WINDOW] = transport.irecv(pieces[i % WINDOW][:elems], source, PIECE)
        return now_s() - begun_s

    round_trips_s = []
    for _ in range(PINGS):
        round_trips_s.append((yield from asked(1, 1)))
    n = FIRST
    took_s = yield from asked(n, LINK_SEGMENT_BYTES)
    while took_s < LEAST_S and n < MOST:
        n *= 2
        took_s = yield from asked(n, LINK_SEGMENT_BYTES)
    for _ in range(AGAIN):  # a rank that lost its core for a moment looks like a slow link
        took_s = min(took_s, (yield from asked(n, LINK_SEGMENT_BYTES)))
    yield transport.isend(np.array([0, 0]), source, WANTED)
    ping_s = min(round_trips_s)
    return n * LINK_SEGMENT_BYTES / max(took_s - ping_s, 1e-9), ping_s / 2


def _sent(transport: Transport, dest: int) -> Steps[None]:
    """Send to `dest` what it asks for, until it asks for nothing."""
    wanted, piece = np.empty(2, np.int64), np.zeros(LINK_SEGMENT_BYTES, np.uint8)
    while True:
        yield transport.irecv(wanted, dest, WANTED)
        n, elems = (int(number) for number in wanted)
        if not n:
            return
        under_way: list[Operation] = []
        for i in range(n):
            if i >= WINDOW:
                yield under_way[i - WINDOW]
            under_way.append(transport.isend(piece[:elems], dest, PIECE))
        yield from under_way[-WINDOW:]
