"""The launcher's connections: it listens on the job's addresses, lets in who proves to be a rank, and reads frames.

Whoever connects is a stranger until then: nothing that it sends is parsed, no more than a proof's length is read, it
has a limited time, and there are only so many of them at once. The oldest has to go for the newest, since a rank
proves itself at once. See `channel` for the proof. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mpikv.commands.launch import channel
from mpikv.commands.launch.ranks import LaunchedRank
from mpikv.errors import ConfigError

GREETING_S = channel.CONNECT_S + 5.0  # a rank gives up before
MORE_STRANGERS = 64  # beyond one connection of each rank to each address
OWN_FILES = 64  # listeners, mpirun's pipe, what Python has open
ANSWER_BYTES = channel.NONCE_BYTES + channel.PROOF_BYTES
READ_BYTES = 1 << 16
LOST = 0  # beside the kinds of frames of `channel`: the connection to a rank that has reported no end is gone
# The link is dead, or what came is nonsense
WRONG = (OSError, ValueError, KeyError, TypeError, RecursionError)


@dataclass
class Stranger:
    """A connection without a proof. address: of the launcher's that it has dialled; since_s: by the monotonic clock."""

    socket: socket.socket
    address: str
    since_s: float
    challenge: bytes = field(default_factory=lambda: os.urandom(channel.NONCE_BYTES))
    answer: bytes = b""


@dataclass
class Peer:
    """A connection that has proved that it belongs to the job. rank: None before its first frame names it."""

    socket: socket.socket
    rank: LaunchedRank | None = None
    frames: channel.Frames = field(default_factory=channel.Frames)


class Connections:
    """The listeners of one job, its strangers and its ranks, in the selector of the one who waits for events.

    reports: numbers for what ranks report, in the order of arrival.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        secret: str,
        ranks: Mapping[int, LaunchedRank],
        selector: selectors.BaseSelector,
    ) -> None:
        """addresses: of this host. ranks: those that may come. Raises ConfigError where this host has none of these."""
        self._secret = secret
        self._ranks = ranks
        self._selector = selector
        self._strangers: dict[socket.socket, Stranger] = {}  # the oldest first
        self._peers: dict[socket.socket, Peer] = {}
        self._paused = False
        self.reports = itertools.count(1)
        self._listeners = listeners(addresses, backlog=min(4096, len(ranks) + 16))
        self.addresses = [(host, listener.getsockname()[1]) for listener, host in self._listeners.items()]
        strangers, needed = MORE_STRANGERS + len(ranks) * len(self._listeners), len(ranks) + OWN_FILES
        files = allow_files(strangers + len(ranks) + needed)  # of each rank a connection and perhaps a log
        if files < needed:
            raise ConfigError(
                f"the launcher of {len(ranks)} ranks needs {needed} open files, and may have {files} here: raise the "
                "limit (ulimit -Hn, or LimitNOFILE of the service that starts it)"
            )
        # Without a file left for the next connection, the listener would be ready for ever, and this process spin.
        self._most_strangers = min(strangers, max(1, files - needed))
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ)

    def __contains__(self, one: object) -> bool:
        """Whether this socket is one of those whose events belong here."""
        return one in self._listeners or one in self._strangers or one in self._peers

    @property
    def open(self) -> bool:
        return any(peer.rank for peer in self._peers.values())

    def event(self, one: socket.socket) -> Iterator[tuple[LaunchedRank, int, bytes]]:
        """See to what has happened on a socket: who, the kind of frame (or LOST), and what it holds.

        What a rank reports of itself is in its `LaunchedRank` then.
        """
        if one in self._listeners:
            self._accept(one)
        elif one in self._strangers:
            self._read_stranger(self._strangers[one])
        else:
            yield from self._read_rank(self._peers[one])

    def send(self, kind: int, to: LaunchedRank | None = None, **fields: object) -> None:
        for peer in self._peers.values():
            if peer.rank is not None and (to is None or to is peer.rank):
                with contextlib.suppress(OSError):  # a full pipe: it does not listen; its end is noticed elsewhere
                    peer.socket.send(channel.message(kind, **fields))

    def pause(self, paused: bool) -> None:
        """Read nothing of ranks, or read on."""
        if paused != self._paused:
            self._paused = paused
            for connection in self._peers:
                if paused:
                    self._selector.unregister(connection)
                else:
                    self._selector.register(connection, selectors.EVENT_READ)

    def turn_away_slow(self, limit_s: float) -> None:
        """End the connections that have not proved themselves for so long."""
        latest_s = time.monotonic() - limit_s
        for stranger in [one for one in self._strangers.values() if one.since_s < latest_s]:
            self._forget(stranger).close()

    def drop_all(self) -> None:
        """End the connections to all ranks; those that have reported no end are lost."""
        for peer in list(self._peers.values()):
            self._drop(peer)

    def close(self) -> None:
        for one in (*self._listeners, *self._strangers, *self._peers):
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it went away before we came
            return
        if len(self._strangers) >= self._most_strangers:
            self._forget(next(iter(self._strangers.values()))).close()
        channel.watch_link(connection)
        connection.setblocking(False)
        address = f"{self._listeners[listener]}:{listener.getsockname()[1]}"
        stranger = Stranger(connection, address, time.monotonic())
        with contextlib.suppress(OSError):
            connection.send(stranger.challenge)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ)

    def _read_stranger(self, stranger: Stranger) -> None:
        try:
            proved = self._proves(stranger)
        except BlockingIOError:
            return
        except OSError:
            self._forget(stranger).close()
            return
        if proved:
            connection = self._forget(stranger)
            self._peers[connection] = Peer(connection)
            if not self._paused:
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

    def _forget(self, stranger: Stranger) -> socket.socket:
        """Its connection, which is no stranger's any more."""
        self._selector.unregister(stranger.socket)
        del self._strangers[stranger.socket]
        return stranger.socket

    def _read_rank(self, peer: Peer) -> Iterator[tuple[LaunchedRank, int, bytes]]:
        try:
            data = peer.socket.recv(READ_BYTES)
            for kind, body in peer.frames.add(data):
                yield self._rank_of(peer, kind, body), kind, body
        except BlockingIOError:
            return
        except WRONG:
            data = b""
        if not data and (lost := self._drop(peer)) is not None:
            yield lost, LOST, b""

    def _rank_of(self, peer: Peer, kind: int, body: bytes) -> LaunchedRank:
        """Whose frame it is. What it reports of itself is noted. Raises one of WRONG for nonsense."""
        rank = peer.rank
        if rank is None:
            if kind != channel.HELLO:
                raise ValueError("no greeting")
            fields = json.loads(body)
            rank = self._ranks[int(fields["rank"])]
            if rank.host:
                raise ValueError("the rank has reported before")
            rank.host, peer.rank = str(fields["host"]), rank
        elif kind == channel.ENDED:
            fields = json.loads(body)
            rank.asked, rank.error = bool(fields["asked"]), str(fields["error"])
            rank.snapshots = [str(name) for name in fields["snapshots"]]
            rank.order, rank.status = next(self.reports), int(fields["status"])
        return rank

    def _drop(self, peer: Peer) -> LaunchedRank | None:
        """End the connection. Its rank, if that has not reported its end."""
        if not self._paused:
            self._selector.unregister(peer.socket)
        del self._peers[peer.socket]
        peer.socket.close()
        if peer.rank is None or peer.rank.status is not None:
            return None
        peer.rank.lost, peer.rank.order = True, next(self.reports)
        return peer.rank


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
    wrong = ""
    for address in addresses:
        try:
            listener = socket.create_server((address, 0), family=channel.family_of(address), backlog=backlog)
        except OSError as error:  # of an interface that went down, or is not ready
            wrong = f"{address}: {error.strerror}"
            continue
        listener.setblocking(False)
        found[listener] = address
    if not found:
        raise ConfigError(f"the launcher cannot be reached at any address of this machine: {wrong}")
    return found
