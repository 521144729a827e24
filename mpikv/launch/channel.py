"""What a rank's process and the launcher say to each other: frames on one TCP connection.

A frame is its length (4 bytes, big endian), one byte that says what it is, and that many bytes. The launcher listens; a
rank's process connects to all of the launcher's addresses at once and keeps the first where the launcher knows the
job's secret. Then it proves that it knows it as well. `mpirun`'s own daemons connect back to their launcher in the same
way, so this asks nothing of the network that they do not ask.

The kernel probes an idle connection and ends it after `LOST_S` without an answer: so each side notices a host that has
gone, or a link that was cut, without a message of its own, and a process that is merely stopped is not taken for lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

HEADER = struct.Struct("!IB")
HELLO, OUT, ERR, ENDED, GONE = b"hoexg"  # a rank's process to the launcher
SIGNAL, BYE = b"sb"  # the launcher to a rank's process
LARGEST_BYTES = 1 << 22  # of a frame; a longer one is none of ours
GREETING_BYTES = hashlib.sha256().digest_size
CONNECT_S = 10.0
LOST_S = 30  # IDLE_S + PROBES * PROBE_S: longer than a switch needs to find another way, much shorter than TCP's hours
IDLE_S, PROBE_S, PROBES = 10, 5, 4


def frame(kind: int, data: bytes) -> bytes:
    """One frame."""
    return HEADER.pack(len(data), kind) + data


def message(kind: int, **fields: Any) -> bytes:
    """One frame of JSON."""
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


def proof(secret: str, who: str) -> bytes:
    """Shows that `who` knows the secret, without telling it."""
    return hmac.new(secret.encode(), who.encode(), hashlib.sha256).digest()


def watch_link(connection: socket.socket) -> None:
    """Let the kernel end the connection when the other host is silent for LOST_S."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # What was sent and not acknowledged counts as well; keepalive alone looks only at idle connections (tcp(7)).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def connect(addresses: Sequence[tuple[str, int]], secret: str, limit_s: float = CONNECT_S) -> socket.socket:
    """A connection to the launcher, which has greeted. Raises ConnectionError that says what each address did."""
    deadline = time.monotonic() + limit_s
    said = dict.fromkeys((f"{host}:{port}" for host, port in addresses), "no answer")
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as others:
        for host, port in addresses:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            trial = others.enter_context(socket.socket(family, socket.SOCK_STREAM))
            trial.setblocking(False)
            trial.connect_ex((host, port))
            selector.register(trial, selectors.EVENT_WRITE, f"{host}:{port}")
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, events in selector.select(left_s):
                assert isinstance(key.fileobj, socket.socket)
                trial, name = key.fileobj, key.data
                failure = trial.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failure:
                    selector.unregister(trial)
                    said[name] = OSError(failure, "").__class__.__name__
                elif events & selectors.EVENT_WRITE:
                    selector.modify(trial, selectors.EVENT_READ, name)  # connected: it greets
                elif _greeted(trial, secret):
                    return trial.dup()
                else:
                    selector.unregister(trial)
                    said[name] = "another program answered"
    raise ConnectionError(", ".join(f"{name}: {what}" for name, what in said.items()))


def _greeted(connection: socket.socket, secret: str) -> bool:
    # 32 bytes that were sent at once come at once: they fit in any segment.
    with contextlib.suppress(OSError):
        return hmac.compare_digest(connection.recv(GREETING_BYTES), proof(secret, "launcher"))
    return False
