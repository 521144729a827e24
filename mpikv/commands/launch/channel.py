"""What a rank's process and the launcher say to each other: a greeting, then frames, on one TCP connection.

The launcher listens on the addresses that it names to the ranks, and on no other. A rank's process connects to all of
them at once and keeps the first where both sides have proved that they know the job's secret:

    launcher -> rank   32 random bytes
    rank -> launcher   32 random bytes of its own, and a proof (HMAC-SHA-256) over both and the address it has dialled
    launcher -> rank   a proof over the same

So a greeting that was recorded, or that was made for another address, proves nothing, and nothing of a stranger's is
looked at beyond these 64 bytes. What follows is not encrypted (docs/security.md). `mpirun`'s own daemons connect back
to their launcher in the same manner, so this asks nothing of the network that they do not ask.

A frame is its length (4 bytes, big endian), one byte for its kind, and that many bytes.

The kernel probes an idle connection and ends it after `LOST_S` without an answer: so each side notices a host that has
gone, or a link that was cut, without a message of its own, and a process that is merely stopped is not taken for lost.

Only the standard library is imported: see quick.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mpikv.common import proc

HEADER = struct.Struct("!IB")
HELLO, OUT, ERR, ENDED = b"hoex"  # a rank's process to the launcher
SIGNAL, BYE = b"sb"  # the launcher to a rank's process
LARGEST_BYTES = 1 << 22  # of a frame; a longer one is none of ours
NONCE_BYTES = PROOF_BYTES = hashlib.sha256().digest_size
CONNECT_S = 10.0
LOST_S = 30  # IDLE_S + PROBES * PROBE_S: longer than a switch needs to find another link, much shorter than TCP's hours
IDLE_S, PROBE_S, PROBES = 10, 5, 4


def frame(kind: int, data: bytes) -> bytes:
    return HEADER.pack(len(data), kind) + data


def message(kind: int, **fields: Any) -> bytes:
    return frame(kind, json.dumps(fields).encode())


class Frames:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The frames that `data` completes. Raises ValueError where these are no frames."""
        self._data += data
        while len(self._data) >= HEADER.size:
            length, kind = HEADER.unpack_from(self._data)
            if length > LARGEST_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._data) < HEADER.size + length:
                return
            body = bytes(self._data[HEADER.size : HEADER.size + length])
            del self._data[: HEADER.size + length]
            yield kind, body


def proof(secret: str, who: str, address: str, challenge: bytes, nonce: bytes) -> bytes:
    """Shows that `who` (launcher or rank) knows the secret, on this connection alone.

    address: "host:port" as the rank has dialled it; challenge, nonce: NONCE_BYTES each, the launcher's and the rank's.
    """
    return hmac.new(secret.encode(), f"{who} {address} ".encode() + challenge + nonce, hashlib.sha256).digest()


def family_of(address: str) -> socket.AddressFamily:
    """Of an address in figures."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def network() -> str:
    """Names the network that this process sees, its own loopback interface included: a host's or a container's."""
    boot = proc.boot_id()
    with contextlib.suppress(OSError):
        return boot and f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    return ""


def watch_link(connection: socket.socket) -> None:
    """Let the kernel end the connection when the other host is silent for LOST_S."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # What was sent and not acknowledged counts as well; keepalive alone looks only at idle connections (tcp(7)).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class ToLauncher:
    """A rank's connection to the launcher. It never blocks: what it does not take yet waits in `pending`."""

    def __init__(self, addresses: Sequence[tuple[str, int]], launchers_network: str, secret: str) -> None:
        """Raises ConnectionError with what became of each address."""
        self.socket = connect(dialled_from(addresses, launchers_network), secret)
        watch_link(self.socket)
        self.pending = bytearray()

    def write(self, data: bytes) -> None:
        """Queue frames, and send what can be sent now."""
        self.pending += data
        self.flush()

    def flush(self) -> bool:
        """Send what can be sent now. False where the launcher is gone."""
        try:
            while self.pending:
                del self.pending[: self.socket.send(self.pending)]
        except BlockingIOError:
            return True
        except OSError:
            self.pending.clear()
            return False
        return True


class Dialled:
    """One of the launcher's addresses, while a rank tries it. Nothing here blocks."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self.address = f"{host}:{port}"
        self.socket = socket.socket(family_of(host), socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.connect_ex((host, port))
        self._secret = secret
        self._nonce = os.urandom(NONCE_BYTES)
        self._challenge = b""
        self._data = b""

    def read(self) -> bool:
        """Take what has come, and answer. Whether the launcher has proved itself; OSError where it is not the one."""
        data = self.socket.recv(NONCE_BYTES - len(self._data))
        if not data:
            raise ConnectionError("closed")
        self._data += data
        if len(self._data) < NONCE_BYTES:
            return False
        data, self._data = self._data, b""
        if not self._challenge:
            self._challenge = data
            self.socket.sendall(self._nonce + self._proof("rank"))
            return False
        if not hmac.compare_digest(data, self._proof("launcher")):
            raise ConnectionError("a wrong proof")
        return True

    def _proof(self, who: str) -> bytes:
        return proof(self._secret, who, self.address, self._challenge, self._nonce)


def connect(addresses: Sequence[tuple[str, int]], secret: str, limit_s: float = CONNECT_S) -> socket.socket:
    """A connection to the launcher, both sides of which are proved. Raises ConnectionError: what each address did."""
    deadline = time.monotonic() + limit_s
    results = dict.fromkeys((f"{host}:{port}" for host, port in addresses), "no answer")
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as others:
        for host, port in addresses:
            dialled = Dialled(host, port, secret)
            others.enter_context(dialled.socket)
            selector.register(dialled.socket, selectors.EVENT_WRITE, dialled)
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, events in selector.select(left_s):
                dialled = key.data
                assert isinstance(dialled, Dialled)
                try:
                    failure = dialled.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if failure:
                        raise OSError(failure, "")
                    if events & selectors.EVENT_WRITE:  # connected: the launcher speaks first
                        selector.modify(dialled.socket, selectors.EVENT_READ, dialled)
                    elif dialled.read():
                        return dialled.socket.dup()
                except OSError as error:
                    selector.unregister(dialled.socket)
                    connected = not events & selectors.EVENT_WRITE
                    results[dialled.address] = "another program answered" if connected else error.__class__.__name__
    raise ConnectionError(", ".join(f"{address}: {result}" for address, result in results.items()))


def dialled_from(addresses: Sequence[tuple[str, int]], launchers_network: str) -> list[tuple[str, int]]:
    """Those of the launcher's addresses that lead to it from here.

    On another host an address that this host has as well (of a loopback interface, of a bridge to containers) leads to
    a program here, which could carry the greeting to and fro between a rank and the launcher.
    """
    same = network() == launchers_network
    return [(host, port) for host, port in addresses if same or not is_own(host)]


def is_own(host: str) -> bool:
    """Whether this address is one of this host's: then it can be bound."""
    try:
        with socket.socket(family_of(host), socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except OSError:
        return False
    return True
