"""The server's input and output: receives requests and partitions, hands them to the core, sends its replies.

`serve` is a generator, so that the same loop runs by itself in a server rank, and beside other transfers in a worker's
progress engine. For each worker `WINDOW` partitions are on their way here at a time, and as many replies to it. All
others wait in queues, larger priorities first. So a partition is received into memory that has just been used, and is
still in the cache. Partitions of workers that share memory with the server are added in that memory, if possible.

A server rank that has received nothing for the time limit sends the workers a ping. They may compute for longer than
that, but their progress threads answer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.backoff import Backoff
from mpikv.engine.operation import Done, Operation, Predicate, Steps
from mpikv.engine.running import Running
from mpikv.errors import StallError
from mpikv.placement.owners import is_asked_for
from mpikv.server.core import ServerCore
from mpikv.server.events import Event, Fetch, Refusal, ServerReply
from mpikv.transports import wire
from mpikv.transports.base import Incoming, Transport
from mpikv.transports.loopback import Loopback, OwnRank
from mpikv.transports.memory import HELD, LocalTransport
from mpikv.transports.memory_requests import Arrived, Receiving

# How long the server yields before it sleeps for the first time: a worker that pushes small values pushes again at
# once, and would wait for a server that sleeps.
YIELD_S = 1e-3
# A yield that returns within QUICK_YIELD_S means that no other process waits for this core. If there are more ranks
# than cores, two workers share another core then. So after QUICK_YIELDS such yields in a row the server sleeps, and the
# system moves one of these workers to the free core.
QUICK_YIELDS = 3
QUICK_YIELD_S = 3e-6
COPIED_BYTES = 2048  # shorter replies are copied: that costs less than testing whether they have been sent
KEPT_COPIES = 16  # copied replies whose requests are kept before they are tested
WINDOW = 3  # partitions under way for a worker: one is received, one added, one announced; more would leave the cache
# Of short partitions, as they cross links, so many bytes from a worker and to it: they keep a link busy for longer than
# a sleeping thread takes to wake, and wait in no queue of the network for long.
WINDOW_BYTES = 1 << 18
MOST_PARTITIONS = 16  # of those that are shorter still: MPI looks through all that is under way for each message
# Connections do not share a link evenly, and a sum needs the partitions of all workers. So none of those that have
# partitions to fetch gets so many elements ahead of another one.
LEAD_ELEMS = 1 << 15


def _fits(count: int, sizes: Iterable[int], most_bytes: int) -> bool:
    """Whether one more may be under way beside so many of these sizes, which are added up only where that decides."""
    return count < WINDOW or (count < MOST_PARTITIONS and sum(sizes) < most_bytes)


class _WorkerLink:
    """The partitions and replies between the server and one worker: those under way, and those that wait.

    end: sends and receives them.
    """

    def __init__(self, rank: int, end: Transport) -> None:
        self.rank, self.end = rank, end
        self.fetches: list[tuple[int, int, int, Fetch]] = []  # a heap of (-priority, turn of the key, order, event)
        self.replies: list[tuple[int, int, ServerReply]] = []  # a heap of (-priority, order, event)
        self.receiving: deque[tuple[Any, Fetch, HostArray | None]] = deque()  # None: it stays in the worker's memory
        self.held = 0  # partitions that are used in the worker's memory
        self.fetched_elems = 0  # how far it is, to compare with other workers
        self.sending: deque[tuple[Operation, ServerReply]] = deque()
        self.copying: deque[ServerReply] = deque()  # replies whose values are still being copied from a GPU


class _Traffic:
    """All messages of one server. It is a request, which is done when there is something to handle."""

    def __init__(
        self, transport: Transport, workers: Sequence[int], core: ServerCore, loopback: Loopback | None = None
    ) -> None:
        self._transport = transport
        self._loopback = Loopback() if loopback is None else loopback
        self._local: LocalTransport | None = transport.local
        self._core = core
        inner = transport.inner if isinstance(transport, OwnRank) else transport
        self._peers = [_WorkerLink(rank, transport if rank == transport.rank else inner) for rank in workers]
        self._index = {rank: worker for worker, rank in enumerate(workers)}
        self._order = 0
        self._message: tuple[Operation, int, HostArray] | None = None
        self._complete = False  # whether the message has been received
        self._sending = self._copying = 0
        # Of a round all wait for the last worker; without rounds nobody has to wait for a worker that is slow.
        here = transport.hosts[transport.rank]
        self._paces = core.counts_rounds and any(transport.hosts[rank] != here for rank in workers)
        self._copied: deque[Operation] = deque()

    def test(self) -> bool:
        """Whether a message or a partition has arrived, or a reply has been sent that others waited for."""
        self._receive_next()
        found = self._complete
        for peer in self._peers:
            found |= bool(peer.receiving) and peer.receiving[0][0].test()
            if self._copying:
                found |= bool(peer.copying) and self._is_there(peer.copying[0])
        if self._sending:
            found |= self._release_sent()
        return found

    def _receive_next(self) -> None:
        if self._message is None:
            incoming = self._transport.probe(wire.TAG_REQUEST)
            if incoming is not None:
                self._message = self._receive(incoming)
        if self._message is not None and not self._complete:
            self._complete = self._message[0].test()

    def _receive(self, incoming: Incoming) -> tuple[Operation, int, HostArray]:
        worker = self._index[incoming.source]
        data = incoming.data if isinstance(incoming, Arrived) else None
        if data is not None:
            return Done(), worker, data
        data = np.empty(incoming.n_bytes, np.uint8)
        return incoming.receive(data), worker, data

    def _release_sent(self) -> bool:
        """Release the memory of sent replies. Whether others can be sent now, or none is left."""
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
        self._drop_sent_copies(0)
        return not self._sending and not self._copying and not self._copied and self._flushed()

    def _flushed(self) -> bool:
        return self._local is None or self._local.flushed

    def last(self) -> Operation:
        """What to wait for when only replies are left."""
        if self._sending or self._copying:
            return self
        return self._copied[0] if self._copied else Predicate(self._flushed)

    def handle(self) -> None:
        """Handle what has arrived, and start the transfers that the core asks for."""
        for _ in self._peers:  # up to one message of each, so that partitions do not wait for long
            if self._message is None or not self._complete:
                break
            _, worker, data = self._message
            self._message, self._complete = None, False
            self._take(self._core.handle(worker, wire.parse_requests(data)))
            self._receive_next()
        for peer in self._peers:
            if peer.receiving and peer.receiving[0][0].test():
                request, fetch, array = peer.receiving.popleft()
                self._take(self._core.arrived(fetch, self._borrowed(peer, request, fetch) if array is None else array))
            while peer.copying and self._is_there(peer.copying[0]):
                self._copying -= 1
                self._order += 1
                self._reply(peer, peer.copying.popleft())
        for peer in self._peers:
            if peer.fetches or peer.replies:
                self._start(peer)

    @staticmethod
    def _is_there(reply: ServerReply) -> bool:
        return reply.ready is None or reply.ready.test()

    def _reply(self, peer: _WorkerLink, reply: ServerReply) -> None:
        if not peer.replies and self._may_send(peer):
            self._send(peer, reply)
        else:
            heappush(peer.replies, (-reply.priority, self._order, reply))

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._order += 1
            if isinstance(event, ServerReply):
                peer = self._peers[event.worker]
                if event.ready is None:
                    self._reply(peer, event)
                else:
                    peer.copying.append(event)
                    self._copying += 1
            elif isinstance(event, Refusal):
                for peer in self._peers:
                    self._tell(peer, {"kind": "refused", **event._asdict()})
            else:
                peer = self._peers[event.push.worker]
                if self._paces and not peer.fetches:  # it shares the link from now on, wherever the others are
                    peer.fetched_elems = max(peer.fetched_elems, self._least_fetched())
                heappush(peer.fetches, (-event.push.priority, self._turn(event), self._order, event))

    def _turn(self, fetch: Fetch) -> int:
        """The same for all workers: whoever pushes keys in another order sends what the others have sent first."""
        shard, round_ = fetch.shard, fetch.push.round
        if shard is None or not self._paces:
            return self._order
        if shard.turn[0] != round_:
            shard.turn = round_, self._order
        return shard.turn[1]

    def _tell(self, peer: _WorkerLink, message: dict[str, Any]) -> None:
        control = self._transport if self._local is None else self._local.inner
        self._keep(control.isend(wire.control(message), peer.rank, wire.TAG_CONTROL))

    def _keep(self, request: Operation) -> None:
        """Keep what is sent from memory of its own until it has been sent."""
        self._copied.append(request)
        if len(self._copied) > KEPT_COPIES:
            self._drop_sent_copies(KEPT_COPIES // 2)

    def _borrowed(self, peer: _WorkerLink, request: Receiving, fetch: Fetch) -> HostArray:
        """A partition in its worker's memory; a copy where many are held there, or it cannot stay there."""
        assert fetch.shard is not None
        assert request.view is not None
        data = request.view.view(fetch.push.format.dtype)
        if peer.held >= HELD or not fetch.shard.borrows(fetch.push):
            array = self._core.target(fetch)
            self._core.space.copy(array, data)
            request.release()
            return array

        def give_back() -> None:
            peer.held -= 1
            request.release()

        peer.held += 1
        self._core.pool.refer(data, give_back)
        return data

    def _least_fetched(self) -> int:
        return min((peer.fetched_elems for peer in self._peers if peer.fetches), default=0)

    def _may_fetch(self, peer: _WorkerLink) -> bool:
        if self._paces and peer.fetched_elems > self._least_fetched() + LEAD_ELEMS:
            return False
        sizes = (WINDOW_BYTES if array is None else array.nbytes for _, _, array in peer.receiving)
        return _fits(len(peer.receiving), sizes, WINDOW_BYTES)

    @staticmethod
    def _may_send(peer: _WorkerLink) -> bool:
        return _fits(len(peer.sending), (reply.data.nbytes for _, reply in peer.sending), WINDOW_BYTES)

    def _start(self, peer: _WorkerLink) -> None:
        asked: dict[int, int] = {}  # so many pieces, by their tag
        while peer.fetches and self._may_fetch(peer):
            fetch = heappop(peer.fetches)[3]
            if self._paces and fetch.shard is not None:
                begin, end = fetch.shard.partitions[fetch.partition]
                peer.fetched_elems += end - begin
            tag = wire.TAG_PAYLOAD + fetch.push.tag
            if fetch.push.by_loopback:
                array = None if fetch.shard is None else self._core.target(fetch)
                peer.receiving.append((self._loopback.receive(array, tag), fetch, array))
                continue
            if self._local is not None and fetch.shard is not None and self._local.reaches(peer.rank):
                n_bytes = fetch.shard.partition_bytes(fetch.push, fetch.partition)
                peer.receiving.append((self._local.borrow(n_bytes, peer.rank, tag), fetch, None))
                continue
            array = self._core.target(fetch)
            peer.receiving.append((peer.end.irecv(array, peer.rank, tag), fetch, array))
            if peer.rank != self._transport.rank and is_asked_for(array.nbytes):
                asked[tag] = asked.get(tag, 0) + 1
        for tag, count in asked.items():
            self._tell(peer, {"kind": "fetch", "tag": tag, "count": count})
        while peer.replies and self._may_send(peer):
            self._send(peer, heappop(peer.replies)[2])

    def _drop_sent_copies(self, left: int) -> None:
        while len(self._copied) > left and self._copied[0].test():
            self._copied.popleft()

    def _send(self, peer: _WorkerLink, reply: ServerReply) -> None:
        if not isinstance(reply.data, np.ndarray):
            self._under_way(peer, reply, self._loopback.send(reply.data, reply.tag))
            return
        if reply.data.nbytes <= COPIED_BYTES and (self._local is None or not self._local.reaches(peer.rank)):
            data = reply.data.copy() if reply.block is not None else reply.data
            self._keep(peer.end.isend(data, peer.rank, reply.tag))
            if reply.block is not None:
                reply.block.release()
            return
        self._under_way(peer, reply, peer.end.isend(reply.data, peer.rank, reply.tag))

    def _under_way(self, peer: _WorkerLink, reply: ServerReply, request: Operation) -> None:
        """Keep a reply's memory until the reply has been sent."""
        if not request.test():
            peer.sending.append((request, reply))
            self._sending += 1
        elif reply.block is not None:
            reply.block.release()


def serve(
    transport: Transport, workers: Sequence[int], core: ServerCore, loopback: Loopback | None = None
) -> Steps[None]:
    """Answer requests until every worker has closed the store. loopback: of the worker in this process, if any."""
    traffic = _Traffic(transport, workers, core, loopback)
    recorder = core.recorder
    while not core.finished:
        yield traffic
        part = recorder.begin() if recorder.on else None
        traffic.handle()
        if part is not None:
            part.done("serve")
    while not traffic.idle:
        yield traffic.last()
        traffic.handle()


def run_server(
    transport: Transport,
    workers: Sequence[int],
    core: ServerCore,
    timeout_s: float,
    asked_to_stop: Callable[[], str | None] = lambda: None,
) -> None:
    """Serve in this thread until the end. Raises what the core raises, and StallError when all workers are silent.

    asked_to_stop: who or what has asked this rank to end the program after its step; it is sent to worker 0 once.
    """
    running = Running(serve(transport, workers, core), "server")
    clock, local = transport.clock, transport.local
    backoff = Backoff(sleep=None if local is None else local.waker.sleep, clock=clock)
    idle_since_s: float | None = None
    reported = False  # whether worker 0 has been told that this rank was asked to stop
    crowded = local is not None and local.crowded
    quick_yields = 0
    control: Transport = transport if local is None else local.inner  # workers receive control messages there
    pings: list[Operation] = []  # MPI reads their arrays until they are sent
    received_s = asked_s = clock.now_s()
    while not running.test():
        moved = running.advance()
        # Besides requests only answers to our own pings arrive; they are received when there is nothing else to do.
        incoming = None if moved else control.probe(wire.TAG_CONTROL)
        if incoming is not None:
            incoming.receive(np.empty(incoming.n_bytes, np.uint8))
        if moved or incoming is not None:
            received_s = asked_s = clock.now_s()
            backoff.reset()
            idle_since_s = None
            continue
        if not reported and (why := asked_to_stop()) is not None:
            reported = True
            text = f"{why} at the server of rank {transport.rank} on {transport.hosts[transport.rank]}"
            pings.append(control.isend(wire.control({"kind": "wish", "text": text}), workers[0], wire.TAG_CONTROL))
        now_s = clock.now_s()
        if idle_since_s is None:
            idle_since_s = now_s
        if now_s - idle_since_s < YIELD_S and quick_yields < QUICK_YIELDS:
            os.sched_yield()
            quick_yields = quick_yields + 1 if crowded and clock.now_s() - now_s < QUICK_YIELD_S else 0
            continue
        quick_yields = 0
        if now_s - asked_s > timeout_s:
            if asked_s > received_s:
                hosts = ", ".join(f"worker {i} on {transport.hosts[rank]}" for i, rank in enumerate(workers))
                raise StallError(
                    f"server, rank {transport.rank} of {transport.size} on {transport.hosts[transport.rank]}: "
                    f"no request and no answer for {now_s - received_s:.0f} s from {hosts}"
                )
            asked_s = now_s
            ping = wire.control({"kind": "ping"})
            pings += [control.isend(ping, rank, wire.TAG_CONTROL) for rank in workers]
        backoff.pause()
