"""Where ranks connect to the launcher: it listens on the job's addresses, and lets in who proves that it is a rank.

Whoever connects is a stranger until then: nothing that it sends is parsed, no more than a proof's length is read, it
has a limited time, and there are only so many of them at once. The newest is heard rather than the oldest, since a rank
proves itself at once. See `channel` for the proof. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mpikv.commands.launch import channel
from mpikv.errors import ConfigError

GREETING_S = channel.CONNECT_S + 5.0  # a rank gives up before
MORE_STRANGERS = 64  # beyond one connection of each rank to each address
OWN_FILES = 64  # listeners, mpirun's pipes, what Python has open
ANSWER_BYTES = channel.NONCE_BYTES + channel.PROOF_BYTES


@dataclass
class Stranger:
    """A connection without a proof. address: of the launcher's that it has dialled; since_s: by the monotonic clock."""

    socket: socket.socket
    address: str
    since_s: float
    challenge: bytes = field(default_factory=lambda: os.urandom(channel.NONCE_BYTES))
    answer: bytes = b""


class Entrance:
    """The listeners of one job, and its strangers, in the selector of the one who waits for events."""

    def __init__(self, addresses: Sequence[str], secret: str, ranks: int, selector: selectors.BaseSelector) -> None:
        """addresses: of this host. ranks: how many may come. Raises ConfigError where this host has none of them."""
        self._secret = secret
        self._selector = selector
        self._strangers: dict[socket.socket, Stranger] = {}  # the oldest first
        self._listeners = listeners(addresses, backlog=min(4096, ranks + 16))
        self.addresses = [(host, listener.getsockname()[1]) for listener, host in self._listeners.items()]
        strangers = MORE_STRANGERS + ranks * len(self._listeners)
        files = allow_files(strangers + 2 * ranks + OWN_FILES)  # of each rank a connection and perhaps a log
        if files < ranks + OWN_FILES:
            raise ConfigError(
                f"the launcher of {ranks} ranks needs {ranks + OWN_FILES} open files, and may have {files} here: raise "
                "the limit (ulimit -Hn, or LimitNOFILE of the service that starts it)"
            )
        # Without a file left for the next connection, the listener would be ready for ever, and this process spin.
        self._most_strangers = min(strangers, max(1, files - ranks - OWN_FILES))
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ)

    def __contains__(self, one: object) -> bool:
        """Whether this socket is one of those whose events belong here."""
        return one in self._listeners or one in self._strangers

    def __iter__(self) -> Iterator[socket.socket]:
        """All sockets that are open here."""
        return iter([*self._listeners, *self._strangers])

    def event(self, one: socket.socket) -> socket.socket | None:
        """See to what has happened on a socket. A connection that has proved itself, no longer in the selector."""
        if one in self._listeners:
            self._accept(one)
            return None
        stranger = self._strangers[one]
        try:
            if not self._proves(stranger):
                return None
        except BlockingIOError:
            return None
        except OSError:
            self._turn_away(stranger)
            return None
        self._forget(stranger)
        return stranger.socket

    def turn_away_slow(self, limit_s: float) -> None:
        """End the connections that have not proved themselves for so long."""
        latest_s = time.monotonic() - limit_s
        for stranger in [one for one in self._strangers.values() if one.since_s < latest_s]:
            self._turn_away(stranger)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it went away before we came
            return
        if len(self._strangers) >= self._most_strangers:
            self._turn_away(next(iter(self._strangers.values())))
        channel.watch_link(connection)
        connection.setblocking(False)
        address = f"{self._listeners[listener]}:{listener.getsockname()[1]}"
        stranger = Stranger(connection, address, time.monotonic())
        with contextlib.suppress(OSError):
            connection.send(stranger.challenge)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ)

    def _proves(self, stranger: Stranger) -> bool:
        """Whether the answer is there, and right; then ours goes back. Raises OSError for a wrong one."""
        data = stranger.socket.recv(ANSWER_BYTES - len(stranger.answer))
        if not data:
            raise ConnectionError("closed")
        stranger.answer += data
        if len(stranger.answer) < ANSWER_BYTES:
            return False
        nonce, given = stranger.answer[: channel.NONCE_BYTES], stranger.answer[channel.NONCE_BYTES :]
        facts = (stranger.address, stranger.challenge, nonce)
        if not hmac.compare_digest(given, channel.proof(self._secret, "rank", *facts)):
            raise ConnectionError("it does not know the secret")
        stranger.socket.send(channel.proof(self._secret, "launcher", *facts))
        return True

    def _turn_away(self, stranger: Stranger) -> None:
        self._forget(stranger)
        stranger.socket.close()

    def _forget(self, stranger: Stranger) -> None:
        self._selector.unregister(stranger.socket)
        del self._strangers[stranger.socket]


def allow_files(count: int) -> int:
    """Let this process, and what it starts, open so many files, or as many as it may. Returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else soft


def listeners(addresses: Sequence[str], backlog: int) -> dict[socket.socket, str]:
    """A socket that listens, for each of these addresses of this host, on a port that is free. ConfigError for none."""
    found: dict[socket.socket, str] = {}
    said = ""
    for address in addresses:
        try:
            listener = socket.create_server((address, 0), family=channel.family_of(address), backlog=backlog)
        except OSError as error:  # of an interface that went down, or is not ready
            said = f"{address}: {error.strerror}"
            continue
        listener.setblocking(False)
        found[listener] = address
    if not found:
        raise ConfigError(f"the launcher cannot be reached at any address of this machine: {said}")
    return found
