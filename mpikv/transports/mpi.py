"""Ranks of an MPI communicator.

Talks on a duplicate of the user's communicator, so that the two never meet. Only two-sided, non-blocking calls are
used: no windows, no spawned processes, nothing that waits inside MPI. Bytes travel as MPI.BYTE, so every dtype can be
moved.

`open_mpi_transport` is collective over the communicator and the only place where ranks meet before a store exists.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.clock import MACHINE_CLOCK
from mpikv.engine.backoff import wait_until
from mpikv.engine.operation import Completion, Operation
from mpikv.errors import ShapeMismatch
from mpikv.observe.recorder import Recorder
from mpikv.transports.ledger import Ledger
from mpikv.transports.wire import TAG_MEETING, TAG_NOTHING, TAG_REPLY

FEW = 8  # requests: looking at so many costs as much as looking at one
AT_ONCE = 64  # requests that are looked at in one call
AT_MOST = 512  # requests that one look takes in, where none is done: the others wait for the next
POLL_AGAIN_S = 50e-6  # some ten times what looking at a hundred requests takes


class MpiRequest:
    """An MPI request; keeps the array alive that MPI reads or writes."""

    __slots__ = ("buf", "request")

    def __init__(self, request: MPI.Request, buf: object) -> None:
        self.request = request
        self.buf = buf

    def test(self) -> bool:
        return self.request.Test()


def has_ended(request: MPI.Request, status: MPI.Status | None = None) -> bool:
    """Test a request without giving it up where it has failed, of which this says nothing: it is then never done.

    Open MPI 5.0.11 ends the job where a message fails after its request was freed, as MPI_Test frees one of which a
    death, or a revoked communicator, is known, whatever is still under way of it.
    """
    return bool(request.Get_status(status)) and request.Test(status)


INT_LIMIT = 2**31  # counts from here on need MPI 4, which Open MPI 5 is not
BLOCK_BYTES = 1 << 20


def start(call: Callable[..., MPI.Request], buf: HostArray, *arguments: int) -> MpiRequest:
    """Start a transfer of the bytes of a contiguous array; from 2 GiB on as one element of a datatype of that size."""
    flat = buf.reshape(-1).view(np.uint8)
    if flat.size < INT_LIMIT:
        return MpiRequest(call([flat, MPI.BYTE], *arguments), buf)
    blocks, rest = divmod(flat.size, BLOCK_BYTES)
    block = MPI.BYTE.Create_contiguous(BLOCK_BYTES)
    whole = MPI.Datatype.Create_struct([blocks, rest], [0, blocks * BLOCK_BYTES], [block, MPI.BYTE]).Commit()
    block.Free()
    request = MpiRequest(call([flat, 1, whole], *arguments), buf)
    whole.Free()  # MPI keeps it as long as the transfer needs it
    return request


class PolledRequest(Completion):
    """A request whose transport asks MPI about many that are under way at once.

    One call, not one for each: with many transfers a step of the engine stays short, and beside Python code that
    computes each call costs a wait for the interpreter's lock.

    expected: of a receive, whom it is from, the tag, and how many bytes may come: as many as `buf` has, or less.
    """

    __slots__ = ("_transport", "buf", "expected")

    def __init__(self, transport: MpiTransport, buf: object, expected: tuple[int, int, int, int] | None = None) -> None:
        super().__init__()
        self._transport = transport
        self.buf: object = buf  # kept alive as long as MPI reads or writes it
        self.expected = expected

    def test(self) -> bool:
        if not self.done:
            self._transport.poll_again()
        return super().test()

    def finish(self, error: Exception | None = None) -> None:
        self.buf = None
        super().finish(error)

    def arrived(self, status: MPI.Status) -> None:
        """MPI is done with it; a message of another length than the receiver expects is an error."""
        if self.expected is None:
            return self.finish()
        source, tag, most, other = self.expected
        n_bytes = status.Get_elements(MPI.BYTE)
        if n_bytes in (most, other):
            return self.finish()
        return self.finish(ShapeMismatch(f"message from rank {source}, tag {tag}: {n_bytes} bytes, {most} expected"))


class MpiIncoming:
    """A matched message (MPI_Improbe)."""

    def __init__(self, message: MPI.Message, transport: MpiTransport) -> None:
        self._message, self._transport = message, transport
        self.source = transport.status.Get_source()
        self.n_bytes = transport.status.Get_elements(MPI.BYTE)

    def receive(self, buf: HostArray) -> Operation:
        return self._transport.start(self._message.Irecv, buf)


class MpiTransport:
    """The ranks of `comm`, which this transport owns and frees."""

    local: None = None  # all are messages

    def __init__(self, comm: MPI.Intracomm, hosts: tuple[str, ...]) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.max_tag = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        self.hosts = hosts
        self.clock = MACHINE_CLOCK
        self.recorder = Recorder(self.clock)
        self.ledger = Ledger()
        self.status = MPI.Status()
        self._statuses = [MPI.Status() for _ in range(AT_ONCE)]
        self._under_way: list[PolledRequest] = []
        self._requests: list[MPI.Request] = []  # of the same, in the same order
        self._at = 0  # the first of those that are looked at next
        self._polled_s = 0.0
        self.send: Callable[..., MPI.Request] = comm.Isend
        self._keeps = False  # requests that have failed

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        ledger = self.ledger
        ledger.messages += 1
        ledger.by_tag[tag if tag < TAG_REPLY or tag >= ledger.tags_from else TAG_REPLY] += buf.nbytes
        return self._polled(start(self.send, buf, dest, tag), None)

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        expected = (source, tag, buf.nbytes, buf.nbytes - room_bytes)
        return self._polled(start(self.comm.Irecv, buf, source, tag), expected)

    def _polled(self, started: MpiRequest, expected: tuple[int, int, int, int] | None) -> PolledRequest:
        polled = PolledRequest(self, started.buf, expected)
        self._under_way.append(polled)
        self._requests.append(started.request)
        return polled

    def poll(self) -> None:
        """Ask MPI what is done, of so many requests at a time, until something is or enough have been looked at.

        As a rule they are done in the order in which they were started: so the next look begins where one was done.
        """
        self._polled_s = time.monotonic()
        if self._keeps:
            self._poll_kept()
            return
        left = min(len(self._requests), AT_MOST)
        if left <= AT_ONCE:
            self._at = 0
        while left > 0:
            if self._at >= len(self._requests):
                self._at = 0
            looked_at = self._requests[self._at : self._at + AT_ONCE]
            try:
                done = MPI.Request.Testsome(looked_at, self._statuses)
            except MPI.Exception as error:
                self._some_failed(looked_at, error)
                return
            if done:
                # From the last one on, so that the places of those before it stay what they are.
                for i, status in sorted(zip(done, self._statuses, strict=False), key=_place, reverse=True):
                    self._requests.pop(self._at + i)
                    self._under_way.pop(self._at + i).arrived(status)
                return
            self._at += AT_ONCE
            left -= len(looked_at)

    def _some_failed(self, looked_at: list[MPI.Request], error: MPI.Exception) -> None:
        """End those that MPI has ended, which are null requests by now; which of them failed is lost with the error."""
        for i in reversed(range(len(looked_at))):
            if looked_at[i] == MPI.REQUEST_NULL:
                self._requests.pop(self._at + i)
                self._under_way.pop(self._at + i).finish(error)

    def _poll_kept(self) -> None:
        """`poll`, of each by itself. Deaths are noticed where messages are looked for."""
        status, left = self._statuses[0], list[tuple[PolledRequest, MPI.Request]]()
        for polled, request in zip(self._under_way, self._requests, strict=True):
            if has_ended(request, status):
                polled.arrived(status)
            else:
                left.append((polled, request))
        if len(left) < len(self._requests):
            self._under_way, self._requests = [polled for polled, _ in left], [request for _, request in left]

    def poll_again(self) -> None:
        """`poll`, unless much is under way and the last poll was a moment ago."""
        if len(self._requests) <= FEW or time.monotonic() - self._polled_s > POLL_AGAIN_S:
            self.poll()

    def probe(self, tag: int) -> MpiIncoming | None:
        message = self.comm.Improbe(MPI.ANY_SOURCE, tag, self.status)
        return None if message is None else MpiIncoming(message, self)

    def keep_requests(self) -> None:
        """Give up no request before all of its message has gone: ranks may die. See `has_ended`.

        So messages are synchronous: MPI says of short others that they have gone as soon as it has a copy.
        """
        self._keeps, self.send = True, self.comm.Issend

    def start(self, call: Callable[..., MPI.Request], buf: HostArray, *arguments: int) -> Operation:
        """A request that whoever starts it tests by itself, unless this transport keeps all."""
        started = start(call, buf, *arguments)
        return self._polled(started, None) if self._keeps else started

    def give_up(self) -> list[MpiRequest]:
        """Take back the receives that nothing has come for, once `comm` is revoked. Returns what else MPI has not ended
        and whose memory it may use until then.
        """
        left = [*zip(self._under_way, self._requests, strict=True)]
        for polled, request in left:
            if polled.expected is not None:
                with contextlib.suppress(MPI.Exception):  # another thread has just seen its end
                    request.Cancel()
        return [MpiRequest(request, polled.buf) for polled, request in left]

    def look(self) -> bool:
        """Raise MPI's error where a rank has died, or the communicator was revoked. Returns False: nothing moved."""
        if self._keeps:
            self.comm.Iprobe(MPI.ANY_SOURCE, TAG_NOTHING)
        return False

    def close(self) -> None:
        if self.comm != MPI.COMM_NULL:
            self.comm.Free()


def _place(done: tuple[int, MPI.Status]) -> int:
    return done[0]


def wait_for(request: MPI.Request, timeout_s: float, on_timeout: Callable[[], BaseException]) -> None:
    """Wait for an MPI request with a limit and without spinning."""
    wait_until(request.Test, lambda: False, timeout_s, on_timeout)


def open_transport(
    comm: MPI.Intracomm,
    timeout_s: float,
    on_timeout: Callable[[], BaseException],
    own: Callable[[MpiTransport], None] | None = None,
) -> MpiTransport:
    """A transport over a duplicate of `comm`, or where ranks may die over itself, which `own` is told of first.

    Collective over `comm`; waits at most `timeout_s` for the other ranks.
    """
    if own is None:
        comm, request = comm.Idup()
        wait_for(request, timeout_s, on_timeout)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    transport = MpiTransport(comm, ())
    if own is not None:
        transport.keep_requests()
        own(transport)
    names = allgather_bytes(transport, socket.gethostname().encode(), timeout_s, on_timeout)
    transport.hosts = tuple(name.decode() for name in names)
    return transport


def allgather_bytes(
    transport: MpiTransport, data: bytes, timeout_s: float, on_timeout: Callable[[], BaseException]
) -> list[bytes]:
    """Every rank's bytes, in rank order. Collective.

    In each step a rank sends all that it has to one before it, so that it has twice as much after it. Not by MPI's own
    collectives, which give up messages that are under way where a rank has died: Open MPI ends the job then.
    Cost: log2(p) messages of a rank. Source: Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8 (1997).
    """
    comm, rank, size = transport.comm, transport.rank, transport.size
    known = [data]  # of this rank and those behind it
    while len(known) < size:
        step, n = len(known), min(len(known), size - len(known))
        lengths = np.array([len(one) for one in known[:n]], np.int64)
        mine = np.frombuffer(lengths.tobytes() + b"".join(known[:n]), np.uint8)
        sent = transport.start(transport.send, mine, (rank - step) % size, TAG_MEETING)
        found: list[MPI.Message] = []

        def came(source: int = (rank + step) % size, found: list[MPI.Message] = found) -> bool:
            message = comm.Improbe(source, TAG_MEETING, transport.status)
            found.extend([] if message is None else [message])
            return bool(found)

        wait_until(came, transport.look, timeout_s, on_timeout)
        incoming: HostArray = np.empty(transport.status.Get_elements(MPI.BYTE), np.uint8)
        received = transport.start(found[0].Irecv, incoming)
        wait_until(lambda: received.test() and sent.test(), transport.look, timeout_s, on_timeout)  # noqa: B023 - at once
        texts, ends = incoming[8 * n :].tobytes(), np.cumsum([0, *incoming[: 8 * n].view(np.int64)]).tolist()
        known += [texts[begin:end] for begin, end in pairwise(ends)]
    return known[size - rank :] + known[: size - rank]
