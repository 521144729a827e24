"""Ranks of an MPI communicator.

Talks on a duplicate of the user's communicator, so that the two never meet. Only two-sided, non-blocking calls are
used: no windows, no spawned processes, nothing that waits inside MPI. Bytes travel as MPI.BYTE, so every dtype can be
moved.

`open_mpi_transport` is collective over the communicator and the only place where ranks meet before a store exists.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.clock import MACHINE_CLOCK
from mpikv.engine.backoff import wait_until
from mpikv.engine.operation import Completion, Operation
from mpikv.errors import ShapeMismatch
from mpikv.observe.recorder import Recorder
from mpikv.transports.ledger import Ledger
from mpikv.transports.wire import TAG_REPLY

FEW = 8  # requests: looking at so many costs as much as looking at one
AT_ONCE = 64  # requests that are looked at in one call
AT_MOST = 512  # requests that one look takes in, where none is done: the others wait for the next
POLL_AGAIN_S = 50e-6  # some ten times what looking at a hundred requests takes
HOST_BYTES = 256  # names are at most 255 bytes long (RFC 1035)


class MpiRequest:
    """An MPI request; keeps the array alive that MPI reads or writes."""

    __slots__ = ("buf", "request")

    def __init__(self, request: MPI.Request, buf: object) -> None:
        self.request = request
        self.buf = buf

    def test(self) -> bool:
        return self.request.Test()


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

    def __init__(self, message: MPI.Message, status: MPI.Status) -> None:
        self._message = message
        self.source = status.Get_source()
        self.n_bytes = status.Get_elements(MPI.BYTE)

    def receive(self, buf: HostArray) -> Operation:
        return start(self._message.Irecv, buf)


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
        self._status = MPI.Status()
        self._statuses = [MPI.Status() for _ in range(AT_ONCE)]
        self._under_way: list[PolledRequest] = []
        self._requests: list[MPI.Request] = []  # of the same, in the same order
        self._at = 0  # the first of those that are looked at next
        self.meeting: MPI.Request | None = None  # of the last `allgather_bytes`
        self._polled_s = 0.0

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        ledger = self.ledger
        ledger.messages += 1
        ledger.by_tag[tag if tag < TAG_REPLY or tag >= ledger.tags_from else TAG_REPLY] += buf.nbytes
        return self._polled(start(self.comm.Isend, buf, dest, tag), None)

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

    def poll_again(self) -> None:
        """`poll`, unless much is under way and the last poll was a moment ago."""
        if len(self._requests) <= FEW or time.monotonic() - self._polled_s > POLL_AGAIN_S:
            self.poll()

    def probe(self, tag: int) -> MpiIncoming | None:
        message = self.comm.Improbe(MPI.ANY_SOURCE, tag, self._status)
        return None if message is None else MpiIncoming(message, self._status)

    def close(self) -> None:
        if self.comm != MPI.COMM_NULL:
            self.comm.Free()


def _place(done: tuple[int, MPI.Status]) -> int:
    return done[0]


def wait_for(request: MPI.Request, timeout_s: float, on_timeout: Callable[[], BaseException]) -> None:
    """Wait for an MPI request with a limit and without spinning."""
    wait_until(request.Test, lambda: False, timeout_s, on_timeout)


def open_transport(comm: MPI.Intracomm, timeout_s: float, on_timeout: Callable[[], BaseException]) -> MpiTransport:
    """A transport over a duplicate of `comm`. Collective over `comm`; waits at most `timeout_s` for the other ranks."""
    own, request = comm.Idup()
    wait_for(request, timeout_s, on_timeout)
    name = np.zeros(HOST_BYTES, np.uint8)
    text = socket.gethostname().encode()[:HOST_BYTES]
    name[: len(text)] = np.frombuffer(text, np.uint8)
    names = np.empty((own.Get_size(), HOST_BYTES), np.uint8)
    wait_for(own.Iallgather([name, MPI.BYTE], [names, MPI.BYTE]), timeout_s, on_timeout)
    hosts = tuple(row.tobytes().rstrip(b"\0").decode() for row in names)
    own.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiTransport(own, hosts)


def allgather_bytes(
    transport: MpiTransport, data: bytes, timeout_s: float, on_timeout: Callable[[], BaseException]
) -> list[bytes]:
    """Every rank's bytes, in rank order. Collective."""
    comm: Any = transport.comm

    def done(request: MPI.Request) -> None:
        transport.meeting = request  # and with it its arrays: MPI may write into them after a StallError, too
        wait_for(request, timeout_s, on_timeout)

    sizes = np.empty(transport.size, np.int64)
    done(comm.Iallgather(np.array([len(data)], np.int64), sizes))
    gathered = np.empty(int(sizes.sum()), np.uint8)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    mine = np.frombuffer(data, np.uint8)
    done(comm.Iallgatherv([mine, MPI.BYTE], [gathered, sizes, offsets[:-1], MPI.BYTE]))
    return [gathered[offsets[i] : offsets[i + 1]].tobytes() for i in range(transport.size)]
