"""Raw TCP goodput: what one socket carries between two ranks, without MPI.

The receiver listens on all its addresses and tells them over MPI, with a token that the sender's first bytes must be:
whoever else connects is turned away. The sender tries one address after the other. Then it sends for a fixed time. The
receiver counts what comes after a warm-up, in which the connection finds its speed, so that neither slow start nor full
buffers are in the figure. Collective; ranks that take no part sleep.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import socket
import struct
import time

from mpikv.commands.bench.job import Job
from mpikv.commands.bench.probes import quiet_barrier
from mpikv.errors import MpikvError

WARM_S = 0.4
COUNT_S = 1.0
CONNECT_S = 2.0
ACCEPT_S = 60.0  # all of the receiver's addresses may have to be tried
TOKEN_BYTES = 32
TOKEN_S = 2.0  # for it to come
SILENT_S = 60.0  # of a peer that neither sends nor takes anything: it is gone
CHUNK_BYTES = 1 << 18
SIOCGIFADDR = 0x8915  # Linux, bits/ioctls.h: the IPv4 address of an interface
LOOPBACK = "127.0.0.1"


def goodput(job: Job, sender: int, receiver: int) -> float:
    """Return the bytes per second from one rank to another, on all ranks. MpikvError on all if they cannot connect."""
    listener = None
    offer: tuple[list[str], int, bytes] = ([], 0, b"")
    same_host = job.hosts[sender] == job.hosts[receiver]
    if job.rank == receiver:
        listener = socket.create_server((LOOPBACK if same_host else "", 0))
        names = [LOOPBACK] if same_host else addresses()
        offer = (names, int(listener.getsockname()[1]), os.urandom(TOKEN_BYTES))
    names, port, token = job.comm.bcast(offer, receiver)
    connection = _connect(names, port, token) if job.rank == sender else None
    if not job.comm.bcast(connection is not None, sender):
        raise MpikvError(
            f"no TCP connection from rank {sender} on {job.hosts[sender]} to rank {receiver} on "
            f"{job.hosts[receiver]} at {', '.join(names) or 'any address'}, port {port}: is there a firewall?"
        )
    rate = 0.0
    if connection is not None:
        with connection:
            _send(connection)
    elif listener is not None:
        with listener, accept(listener, token) as accepted:
            rate = _receive(accepted)
    quiet_barrier(job.comm)
    told: float = job.comm.bcast(rate, receiver)
    return told


def between_hosts(job: Job) -> float:
    """Return the smallest goodput from a host to the next. Collective."""
    leaders = job.leaders()
    return min(
        goodput(job, sender, receiver) for sender, receiver in zip(leaders, leaders[1:] + leaders[:1], strict=True)
    )


def _connect(names: list[str], port: int, token: bytes) -> socket.socket | None:
    for name in names:
        with contextlib.suppress(OSError):
            return connect((name, port), token)
    return None


def connect(address: tuple[str, int], token: bytes) -> socket.socket:
    """Connect to whoever waits in `accept` with this token. Raises OSError where nobody answers."""
    connection = socket.create_connection(address, CONNECT_S)
    connection.settimeout(SILENT_S)
    connection.sendall(token)
    return connection


def accept(listener: socket.socket, token: bytes, limit_s: float = ACCEPT_S) -> socket.socket:
    """Return the connection that begins with the token; others are closed. Blocks; MpikvError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(TOKEN_S)
            if _begins_with(connection, token):
                connection.settimeout(SILENT_S)
                return connection
            connection.close()
    raise MpikvError(f"nobody with the token of this measurement has connected within {limit_s:g} s")


def _begins_with(connection: socket.socket, token: bytes) -> bool:
    said, deadline_s = b"", time.monotonic() + TOKEN_S
    with contextlib.suppress(OSError):
        while len(said) < len(token) and time.monotonic() < deadline_s:
            said += (piece := connection.recv(len(token) - len(said)))
            if not piece:
                break
    return hmac.compare_digest(said, token)


def _send(connection: socket.socket) -> None:
    data = bytes(CHUNK_BYTES)
    end_s = time.perf_counter() + WARM_S + COUNT_S
    with contextlib.suppress(ConnectionError):  # the receiver has counted enough
        while time.perf_counter() < end_s:
            connection.sendall(data)


def _receive(connection: socket.socket) -> float:
    room = memoryview(bytearray(CHUNK_BYTES))
    start_s, counted, first_s, last_s = time.perf_counter(), 0, 0.0, 0.0
    while n_bytes := connection.recv_into(room):
        now_s = time.perf_counter()
        if now_s - start_s < WARM_S:
            continue
        if not first_s:
            first_s = now_s  # what came with it came before it
            continue
        counted, last_s = counted + n_bytes, now_s
    return counted / (last_s - first_s) if counted else 0.0


def addresses() -> list[str]:
    """Return this host's IPv4 addresses, those that other hosts can reach first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))
