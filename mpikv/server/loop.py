"""The server's input and output: receives requests and partitions, hands them to the core, sends its replies.

`serve` is a generator, so that the same loop runs alone in a server rank and beside everything else in a worker's
progress engine. Of each worker's partitions `WINDOW` are on their way at a time, and of the replies to it as many: what
is more waits here, larger priorities first. A partition so finds the memory of one that has just been added.

A server rank that has heard nothing for the time limit asks the workers whether they are there: they may well compute
for longer than that, and answer from their progress thread.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from mpikv import wire
from mpikv.arrays import HostArray
from mpikv.errors import StallError
from mpikv.server.core import ServerCore
from mpikv.server.events import Event, Fetch, Reply
from mpikv.transports.base import Incoming, Request, Steps, Transport
from mpikv.transports.progress import Backoff, Running

YIELDS = 250  # idle turns, about a millisecond, in which others may have the core before the first nap: a worker that
# pushes again at once, as it does with small values, must not find the server asleep
COPIED_BYTES = 2048  # replies up to here: copying one costs less than asking when it has left
FEW = 16  # copied replies that may wait to be forgotten
WINDOW = 3  # one is received while one is added and one is announced; more only fall out of the cache


class _Peer:
    """What is on its way between the server and one worker, and what waits for that."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fetches: list[tuple[int, int, Fetch]] = []  # heaps of (-priority, order, what)
        self.replies: list[tuple[int, int, Reply]] = []
        self.receiving: deque[tuple[Request, Fetch, HostArray]] = deque()
        self.sending: deque[tuple[Request, Reply]] = deque()


class _Traffic:
    """All messages of one server. As a request it is done when there is something to handle."""

    def __init__(self, transport: Transport, workers: Sequence[int], core: ServerCore) -> None:
        self._transport = transport
        self._core = core
        self._peers = [_Peer(rank) for rank in workers]
        self._index = {rank: worker for worker, rank in enumerate(workers)}
        self._order = 0
        self._incoming: Incoming | None = None
        self._message: tuple[Request, int, HostArray] | None = None
        self._complete = False  # whether the message has been received
        self._sending = 0
        self._copied: deque[Request] = deque()

    def test(self) -> bool:
        """Whether a message or a partition has come, or a reply has left that others waited for."""
        if self._message is None:
            incoming = self._transport.probe(wire.TAG_REQUEST)
            if incoming is not None:
                data: HostArray = np.empty(incoming.n_bytes, np.uint8)
                self._message = (incoming.receive(data), self._index[incoming.source], data)
        if self._message is not None and not self._complete:
            self._complete = self._message[0].test()
        found = self._complete
        for peer in self._peers:
            found |= bool(peer.receiving) and peer.receiving[0][0].test()
        if self._sending:
            found |= self._reap()
        return found

    def _reap(self) -> bool:
        """Forget replies that have left; whether that lets others go, or was the last one."""
        freed = False
        for peer in self._peers:
            while peer.sending and peer.sending[0][0].test():
                reply = peer.sending.popleft()[1]
                self._sending -= 1
                if reply.block is not None:
                    reply.block.release()
                freed |= bool(peer.replies) or not self._sending
        return freed

    @property
    def idle(self) -> bool:
        """Whether every reply has left."""
        self._forget(0)
        return not self._sending and not self._copied

    def last(self) -> Request:
        """What is to be waited for when no more requests come."""
        return self if self._sending else self._copied[0]

    def handle(self) -> None:
        """Handle what has come, and start what follows from it."""
        if self._message is not None and self._complete:
            _, worker, data = self._message
            self._message, self._complete = None, False
            self._take(self._core.handle(worker, wire.parse_requests(data)))
        for peer in self._peers:
            if peer.receiving and peer.receiving[0][0].test():
                _, fetch, array = peer.receiving.popleft()
                self._take(self._core.arrived(fetch, array))
            if peer.fetches or peer.replies:
                self._start(peer)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._order += 1
            if isinstance(event, Reply):
                peer = self._peers[event.worker]
                if len(peer.sending) < WINDOW and not peer.replies:
                    self._send(peer, event)
                else:
                    heappush(peer.replies, (-event.priority, self._order, event))
            else:
                peer = self._peers[event.push.worker]
                heappush(peer.fetches, (-event.push.priority, self._order, event))
                self._start(peer)

    def _start(self, peer: _Peer) -> None:
        while peer.fetches and len(peer.receiving) < WINDOW:
            fetch = heappop(peer.fetches)[2]
            array = self._core.target(fetch)
            request = self._transport.irecv(array, peer.rank, wire.TAG_PAYLOAD + fetch.push.tag)
            peer.receiving.append((request, fetch, array))
        while peer.replies and len(peer.sending) < WINDOW:
            self._send(peer, heappop(peer.replies)[2])

    def _forget(self, left: int) -> None:
        """Forget copied replies that have left, where there are more than `left`."""
        while len(self._copied) > left and self._copied[0].test():
            self._copied.popleft()

    def _send(self, peer: _Peer, reply: Reply) -> None:
        if reply.data.nbytes <= COPIED_BYTES:
            data = reply.data.copy() if reply.block is not None else reply.data
            self._copied.append(self._transport.isend(data, peer.rank, reply.tag))
            if reply.block is not None:
                reply.block.release()
            if len(self._copied) > FEW:
                self._forget(FEW // 2)
            return
        request = self._transport.isend(reply.data, peer.rank, reply.tag)
        if not request.test():
            peer.sending.append((request, reply))
            self._sending += 1
        elif reply.block is not None:
            reply.block.release()


def serve(transport: Transport, workers: Sequence[int], core: ServerCore) -> Steps[None]:
    """Answer requests until every worker has said goodbye. workers: their ranks, in order."""
    traffic = _Traffic(transport, workers, core)
    while not core.finished:
        yield traffic
        traffic.handle()
    while not traffic.idle:
        yield traffic.last()
        traffic.handle()


def run_server(transport: Transport, workers: Sequence[int], core: ServerCore, timeout_s: float) -> None:
    """Serve in this thread until the end. Raises what the core raises, and StallError when all workers are silent."""
    running = Running(serve(transport, workers, core), "server")
    backoff = Backoff()
    idle_turns = 0
    pings: list[Request] = []  # MPI reads their arrays until they are sent
    heard_s = asked_s = time.monotonic()
    while not running.test():
        moved = running.advance()
        # What comes here besides requests are answers to our own pings, for which there is time when all is quiet.
        incoming = None if moved else transport.probe(wire.TAG_CONTROL)
        if incoming is not None:
            incoming.receive(np.empty(incoming.n_bytes, np.uint8))
        if moved or incoming is not None:
            heard_s = asked_s = time.monotonic()
            backoff.reset()
            idle_turns = 0
            continue
        idle_turns += 1
        if idle_turns < YIELDS:
            os.sched_yield()
            continue
        now_s = time.monotonic()
        if now_s - asked_s > timeout_s:
            if asked_s > heard_s:
                hosts = ", ".join(f"worker {i} on {transport.hosts[rank]}" for i, rank in enumerate(workers))
                raise StallError(
                    f"server, rank {transport.rank} of {transport.size} on {transport.hosts[transport.rank]}: "
                    f"no request and no answer for {now_s - heard_s:.0f} s from {hosts}"
                )
            asked_s = now_s
            ping = wire.control({"kind": "ping"})
            pings += [transport.isend(ping, rank, wire.TAG_CONTROL) for rank in workers]
        backoff.pause()
