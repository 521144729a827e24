"""One simulated rank: its core, its transport, and the generators that it runs.

Collectives, clients and servers see the transport as any other. A request wakes only the generator that waits for it,
as over MPI. What a message holds is not kept, except for requests to servers, which read the headers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.plan.costs import EAGER_BYTES
from mpikv.common.clock import MACHINE_CLOCK
from mpikv.engine.request import Completion, Request, Steps
from mpikv.engine.running import Running
from mpikv.transports import wire

if TYPE_CHECKING:
    from mpikv.commands.plan.simulation import Simulation
    from mpikv.commands.plan.waiting import Rhythm

EAGER, ANNOUNCED, AGREED, DATA = range(4)  # a short message; the three parts of a long one
CONTROL_SHARE = 0.2  # of a message's work, for an announcement or an agreement, of which Python knows nothing


class Transfer(Completion):
    """A send or a receive."""

    __slots__ = ("buf", "message", "rank")

    def __init__(self, rank: Rank, buf: HostArray | None) -> None:
        super().__init__()
        self.rank, self.buf = rank, buf
        self.message: Message | None = None


class Message:
    """A message on its way from one rank to another."""

    __slots__ = ("content", "incoming", "kind", "local", "n_bytes", "receiver", "request", "source", "tag")

    def __init__(self, receiver: Rank, source: int, tag: int, n_bytes: int, request: Transfer, *, local: bool) -> None:
        self.receiver, self.source, self.tag = receiver, source, tag
        self.n_bytes, self.request, self.local = n_bytes, request, local
        self.kind = EAGER
        self.content: HostArray | None = None  # of a request to a server
        self.incoming: Transfer | None = None  # the receive that it belongs to

    def arrive(self, time_s: float) -> None:
        """Note, as an event, that the message is there, or that the answer to its announcement is."""
        target = self.request.rank if self.kind == AGREED else self.receiver
        target.inbox.append(self)
        target.expect(time_s)


class Arrived:
    """A message that was found by `probe`."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self.source, self.n_bytes = message.source, message.n_bytes

    def receive(self, buf: HostArray) -> Request:
        """Start receiving it."""
        rank = self._message.receiver
        request = Transfer(rank, buf)
        rank.match(self._message, request)
        return request


class Rank:
    """A simulated rank, which is also its own transport."""

    local: None = None  # all are messages

    def __init__(self, simulation: Simulation, rank: int, rhythm: Rhythm) -> None:
        self._simulation = simulation
        self._rhythm = rhythm
        self._costs = simulation.costs
        self.rank = rank
        self.hosts = simulation.hosts
        self.size = len(self.hosts)
        self.max_tag = 2**31 - 1
        self.clock = MACHINE_CLOCK
        self.sent_messages = self.sent_bytes = 0
        self.now_s = 0.0  # where its core is
        self.busy_s = 0.0
        self.finished_s = 0.0  # when the last of its generators ended
        self.computing_until_s = 0.0  # a program computes beside
        self.inbox: deque[Message] = deque()
        self._since_s, self._turn, self._next_turn = 0.0, 0, 0
        self._look_s: float | None = None
        self._running: set[Running[Any]] = set()
        self._services: list[Running[Any]] = []
        self._serving = False
        self._ready: deque[Running[Any]] = deque()
        self._posted: dict[tuple[int, int], deque[Transfer]] = {}
        self._unexpected: dict[tuple[int, int], deque[Message]] = {}
        self._requests: deque[Message] = deque()  # to a server

    @property
    def waits(self) -> bool:
        """Return whether one of its generators has not ended."""
        return bool(self._running)

    # --- transport

    def isend(self, buf: HostArray, dest: int, tag: int, room_bytes: int = 0) -> Request:
        """Do what `Transport.isend` does, in virtual time."""
        n_bytes = buf.nbytes
        self.sent_messages += 1
        self.sent_bytes += n_bytes
        request = Transfer(self, None)
        local = self._simulation.is_local(self.rank, dest)
        message = Message(self._simulation.ranks[dest], self.rank, tag, n_bytes, request, local=local)
        if tag == wire.TAG_REQUEST:
            message.content = buf.copy()
            self.pay(n_bytes * self._costs.copy_byte_s)  # behind its header
        if local or n_bytes <= EAGER_BYTES:
            self._hand_over(message, n_bytes)
        else:
            message.kind = ANNOUNCED
            out, into = self._weights(tag)
            self.pay(out * self._costs.message_s)
            self._simulation.hand_over(self, message, local=False, n_bytes=0, out=out, into=into)
        return request

    def _weights(self, tag: int) -> tuple[float, float]:
        """Return how many messages one stands for at its sender, and at its receiver."""
        weight = self._simulation.weight
        if weight == 1:
            return 1.0, 1.0
        return (weight, 1.0) if wire.TAG_REPLY <= tag < wire.TAG_PAYLOAD else (1.0, weight)

    def _hand_over(self, message: Message, n_bytes: int) -> None:
        out, into = (1.0, 1.0) if message.local else self._weights(message.tag)
        self.pay(out * (self._costs.message_s + n_bytes * self._byte_s(message)))
        free_s = self._simulation.hand_over(self, message, local=message.local, n_bytes=n_bytes, out=out, into=into)
        request = message.request
        if free_s <= self.now_s:
            request.finish()
        else:
            self._simulation.at(free_s, lambda time_s: self._sent(request, time_s))

    def _sent(self, request: Transfer, time_s: float) -> None:
        request.finish()
        self.expect(time_s)

    def _byte_s(self, message: Message) -> float:
        return self._costs.copy_byte_s if message.local else self._costs.byte_s

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Request:
        """Do what `Transport.irecv` does, in virtual time."""
        request = Transfer(self, buf)
        waiting = self._unexpected.get((source, tag))
        if waiting:
            self.match(waiting.popleft(), request)
        else:
            self._posted.setdefault((source, tag), deque()).append(request)
        return request

    def probe(self, tag: int) -> Arrived | None:
        """Do what `Transport.probe` does; only requests to servers are found."""
        return Arrived(self._requests.popleft()) if tag == wire.TAG_REQUEST and self._requests else None

    def poll(self) -> None:
        """Do nothing: a look handles what has arrived."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""

    def match(self, message: Message, request: Transfer) -> None:
        """Let a message and the receive for it, which have found each other, go on."""
        if request.buf is not None and request.buf.nbytes != message.n_bytes:
            raise ValueError(f"{message.n_bytes} bytes of tag {message.tag} for an array of {request.buf.nbytes}")
        if message.kind == EAGER:
            self._complete(message, request)
            return
        message.incoming, message.kind = request, AGREED
        into, out = self._weights(message.tag)  # it goes the other way
        self.pay(out * CONTROL_SHARE * self._costs.message_s)
        back = _Back(message)
        self._simulation.hand_over(self, back, local=False, n_bytes=0, out=out, into=into)  # type: ignore[arg-type]

    def _complete(self, message: Message, request: Transfer) -> None:
        if message.content is not None and request.buf is not None:
            request.buf[...] = message.content
        request.buf = None
        request.finish()

    # --- the core

    def pay(self, seconds: float) -> None:
        """Keep the core busy for so long."""
        self.now_s += seconds
        self.busy_s += seconds

    def pay_work(self, seconds: float) -> None:
        """Keep the core busy with adding or copying; at a server, for all workers that are stood for."""
        self.pay(seconds * self._simulation.weight if self._serving else seconds)

    def expect(self, time_s: float) -> None:
        """Note that something has happened that the next look will see."""
        if time_s < self.computing_until_s:
            look_s = min(self._rhythm.look_beside(self._since_s, time_s), self.computing_until_s)
            turn = 0
        else:
            look_s, turn = self._rhythm.look(max(self._since_s, self.computing_until_s), self._turn, time_s)
        look_s = max(look_s, self._since_s)
        if self._look_s is None or look_s < self._look_s:
            self._look_s, self._next_turn = look_s, turn
            self._simulation.at(look_s, self._look)

    def _look(self, time_s: float) -> None:
        if time_s != self._look_s:
            return  # an earlier look has been taken since
        self._look_s = None
        self._turn = self._next_turn
        self.work(time_s, lambda: None)

    def work(self, time_s: float, what: Callable[[], None]) -> None:
        """Do something at this time, look at what has arrived, and run as far as possible."""
        self.now_s = max(self.now_s, time_s)
        self._simulation.current = self
        what()
        while self.inbox:
            self._handle(self.inbox.popleft())
        self._advance()
        self._simulation.current = None
        self._since_s = self.now_s

    def _handle(self, message: Message) -> None:
        costs = self._costs
        if message.kind == AGREED:
            message.kind = DATA
            self._hand_over(message, message.n_bytes)
            return
        weight = 1.0 if message.local else self._weights(message.tag)[1]
        if message.kind == ANNOUNCED:
            self.pay(weight * CONTROL_SHARE * costs.message_s)
        else:
            self.pay(weight * (costs.message_s + message.n_bytes * self._byte_s(message)))
        if message.kind == DATA:
            assert message.incoming is not None
            self._complete(message, message.incoming)
        elif message.tag == wire.TAG_REQUEST:
            self._requests.append(message)
        else:
            posted = self._posted.get((message.source, message.tag))
            if posted:
                self.match(message, posted.popleft())
            else:
                self._unexpected.setdefault((message.source, message.tag), deque()).append(message)

    # --- generators

    def start(self, steps: Steps[Any]) -> Running[Any]:
        """Start a generator, as the engine does. To be called inside `work`."""
        running: Running[Any] = Running(steps, "", self._ready)
        self._running.add(running)
        self._step(running)
        return running

    def serve(self, steps: Steps[Any]) -> None:
        """Start a generator that is resumed at every look, and need not end."""
        self._services.append(Running(steps, ""))

    def _step(self, running: Running[Any]) -> bool:
        moved = running.advance()
        if running.done:
            if running.error is not None:
                raise running.error
            self._running.discard(running)
            self.finished_s = self.now_s
        return moved

    def _advance(self) -> None:
        moved = True
        while moved:
            moved = False
            self._serving = True
            for service in self._services:
                moved |= not service.done and self._step(service)
            self._serving = False
            while self._ready:
                running = self._ready.popleft()
                if not running.done:
                    moved |= self._step(running)


class _Back:
    """The receiver's agreement, on its way to the sender."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self.receiver = message.request.rank

    def arrive(self, time_s: float) -> None:
        """Let the sender send."""
        self._message.arrive(time_s)
