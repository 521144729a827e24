"""Control messages between the ranks of one store: how they are sent, received and acted on.

A message is a dict, which travels as JSON. Its `kind` decides which object of the session acts on it. A listener, one
generator in the progress engine, receives every message and acts on it at once, also while this rank's program
computes. So a rank that waits too long can ask the others what they are doing.

Cost: a message is one send of some hundred bytes; an idle listener asks for messages once in each step of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpikv.engine.engine import Engine
from mpikv.engine.operation import Operation, Predicate, Steps
from mpikv.errors import MpikvError
from mpikv.transports import wire
from mpikv.transports.base import Arrival, Group, Transport

Message = dict[str, Any]
Act = Callable[[int, Message], None]  # with the rank that has sent the message


class ControlMessages:
    """One worker's end. workers: the workers' ranks.

    acts: what is done with a message of each kind, under the engine's lock. due: called in each step of the engine.
    names: how workers are named in errors; me: how this one is.
    """

    def __init__(self, transport: Transport, workers: Group, engine: Engine) -> None:
        self._transport, self.engine = transport, engine
        # A server asks whether this worker is alive when nothing has come from it for long.
        self.acts: dict[str, Act] = {"ping": lambda source, _: self.send(source, {"kind": "pong"})}
        self.due: list[Callable[[], None]] = []
        self._sending: list[Operation] = []
        self.sent_messages = 0  # counted since the start
        self.workers = workers
        self.names = [f"worker {i} on {host}" for i, host in enumerate(workers.hosts)]
        self.me = f"{self.names[workers.rank]} (rank {self._transport.rank} of {self._transport.size})"

    @property
    def leads(self) -> bool:
        """Whether this is worker 0, which decides what workers agree on."""
        return self.workers.rank == 0

    def send(self, rank: int, message: Message) -> None:
        """Send to a rank of the transport. Under the engine's lock."""
        self.sent_messages += 1
        data = wire.control(message)
        self._sending = [request for request in self._sending if not request.test()]
        self._sending.append(self._transport.isend(data, rank, wire.TAG_CONTROL))

    def send_to(self, worker: int, message: Message) -> None:
        """Send to a worker, and let this one act at once, under the engine's lock. The message names the sender."""
        message = {"worker": self.workers.rank, **message}
        if worker == self.workers.rank:
            self.acts[message["kind"]](self._transport.rank, message)
        else:
            self.send(self.workers.ranks[worker], message)

    def sent(self) -> bool:
        self._sending = [request for request in self._sending if not request.test()]
        return not self._sending

    def _has_come(self, arrival: Arrival) -> bool:
        for call in self.due:
            call()
        return arrival.test()

    def listen(self) -> Steps[None]:
        while True:
            arrival = Arrival(self._transport, wire.TAG_CONTROL)
            yield Predicate(partial(self._has_come, arrival))
            data = np.empty(arrival.incoming.n_bytes, np.uint8)
            yield arrival.incoming.receive(data)
            source, message = arrival.incoming.source, wire.parse_control(data)
            act = self.acts.get(message["kind"])
            if act is None:
                raise MpikvError(f"{self.me}: a control message of unknown kind {message['kind']!r} from rank {source}")
            act(source, message)
