"""Raw TCP goodput: what one socket carries between two ranks, without MPI.

The receiver listens on all its addresses and tells them over MPI; the sender tries one after the other. Then it sends
for a fixed time. The receiver counts what comes after a warm-up, in which the connection finds its speed, so that
neither slow start nor full buffers are in the figure. Collective; ranks that take no part sleep.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import time

from mpikv.bench.job import Job
from mpikv.bench.probes import quiet_barrier
from mpikv.errors import MpikvError

WARM_S = 0.4
COUNT_S = 1.0
CONNECT_S = 2.0
ACCEPT_S = 60.0  # all of the receiver's addresses may have to be tried
CHUNK_BYTES = 1 << 18
SIOCGIFADDR = 0x8915  # Linux, bits/ioctls.h: the IPv4 address of an interface
LOOPBACK = "127.0.0.1"


def goodput(job: Job, sender: int, receiver: int) -> float:
    """Bytes per second from one rank to another, told to all. Raises MpikvError on all where they cannot connect."""
    listener = None
    offer: tuple[list[str], int] = ([], 0)
    if job.rank == receiver:
        listener = socket.create_server(("", 0))
        listener.settimeout(ACCEPT_S)
        offer = (addresses(), int(listener.getsockname()[1]))
    names, port = job.comm.bcast(offer, receiver)
    if job.hosts[sender] == job.hosts[receiver]:
        names = [LOOPBACK]
    connection = _connect(names, port) if job.rank == sender else None
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
        with listener, listener.accept()[0] as accepted:
            rate = _receive(accepted)
    quiet_barrier(job.comm)
    told: float = job.comm.bcast(rate, receiver)
    return told


def between_hosts(job: Job) -> float:
    """The smallest goodput from a host to the next. Collective."""
    leaders = job.leaders()
    return min(
        goodput(job, sender, receiver) for sender, receiver in zip(leaders, leaders[1:] + leaders[:1], strict=True)
    )


def _connect(names: list[str], port: int) -> socket.socket | None:
    for name in names:
        with contextlib.suppress(OSError):
            return socket.create_connection((name, port), CONNECT_S)
    return None


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
    """This host's IPv4 addresses, those that other hosts can reach first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))
