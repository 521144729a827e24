"""The server's input and output: receives requests, hands them to the core, sends its replies.

`serve` is a generator, so that the same loop runs alone in a server rank and beside everything else in a worker's
progress engine. A server rank that has heard nothing for the time limit asks the workers whether they are there: they
may well compute for longer than that, and answer from their progress thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from mpikv import wire
from mpikv.arrays import HostArray
from mpikv.errors import StallError
from mpikv.server.core import ServerCore
from mpikv.transports.base import Arrival, Request, Steps, Transport
from mpikv.transports.progress import Backoff, Running


def serve(transport: Transport, workers: Sequence[int], core: ServerCore) -> Steps[None]:
    """Answer requests until every worker has said goodbye. workers: their ranks, in order."""
    index = {rank: worker for worker, rank in enumerate(workers)}
    sends: deque[Request] = deque()
    while not core.finished:
        arrival = Arrival(transport, wire.TAG_REQUEST)
        yield arrival
        message: HostArray = np.empty(arrival.incoming.n_bytes, np.uint8)
        yield arrival.incoming.receive(message)
        for reply in core.handle(index[arrival.incoming.source], *wire.parse_request(message)):
            sends.append(transport.isend(reply.data, workers[reply.worker], reply.tag))
        while sends and sends[0].test():
            sends.popleft()
    yield from sends


def run_server(transport: Transport, workers: Sequence[int], core: ServerCore, timeout_s: float) -> None:
    """Serve in this thread until the end. Raises what the core raises, and StallError when all workers are silent."""
    running = Running(serve(transport, workers, core), "server")
    backoff = Backoff()
    pings: list[Request] = []  # MPI reads their arrays until they are sent
    heard_s = asked_s = time.monotonic()
    while not running.test():
        moved = running.advance()
        incoming = transport.probe(wire.TAG_CONTROL)
        if incoming is not None:
            incoming.receive(np.empty(incoming.n_bytes, np.uint8))
        if moved or incoming is not None:
            heard_s = asked_s = time.monotonic()
            backoff.reset()
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
