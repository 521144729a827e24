"""Where other processes of this host ask this one what it does: a Unix socket that only the same user can use.

It is an abstract one (unix(7)), `\\0mpikv-UID-PID`: it has no file, and is gone with its process, however that ends. It
is there while something is offered; a thread sleeps in `accept`, and serves one client after another. A client asks
with one line, `here` (what the process knows by itself, at once) or `workers` (everything, for which other ranks may be
asked), and gets one JSON document. Both sides look at who the other one is, as the kernel has it, and wait with a
limit.

Cost: one sleeping thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mpikv.common.checks import plain

HERE, WORKERS = "here", "workers"  # what can be asked
QUESTION_S = 1.0  # within which a client sends its line, and takes what it is answered
QUESTION_BYTES = 64
MOST_BYTES = 1 << 20  # of an answer: some thousand workers
WAITING_CLIENTS = 16
JOIN_S = 5.0
AGAIN_S = 0.5  # after an error of `accept`, for which this process may have too many files open


class Offer(Protocol):
    """Something that this process tells of."""

    def answer(self, *, whole: bool) -> dict[str, Any]:
        """Return it as JSON. whole: other ranks may be asked, which takes some seconds where they do not answer."""


def name_of(pid: int, uid: int) -> str:
    return f"\0mpikv-{uid}-{pid}"


def allowed(peer_uid: int, own_uid: int) -> bool:
    """Return whether a process of this user may ask one of `own_uid`, and be believed by it."""
    return peer_uid in (0, own_uid)


def _user_of(connection: socket.socket) -> int:
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]  # type: ignore[no-any-return]


class Endpoint:
    def __init__(self) -> None:
        self._offers: list[Offer] = []
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._client: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def offered(self, offer: Offer) -> Iterator[None]:
        self.offer(offer)
        try:
            yield
        finally:
            self.withdraw(offer)

    def offer(self, offer: Offer) -> None:
        """Answer with this, too. Local. Where the socket cannot be had, nobody is told of anything."""
        with self._lock:
            self._offers.append(offer)
            if self._socket is None:
                self._open()

    def withdraw(self, offer: Offer) -> None:
        """Do not any more; once nothing is offered the socket is closed, and its thread has ended."""
        with self._lock:
            if offer in self._offers:
                self._offers.remove(offer)
            if self._offers or self._socket is None:
                return
            listening, thread = self._socket, self._thread
            self._socket = self._thread = None
            for one in (listening, self._client):
                if one is not None:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)  # ends what the thread waits for; `close` would not
        if thread is not None:
            thread.join(JOIN_S)
        listening.close()

    def _open(self) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(name_of(os.getpid(), os.geteuid()))
            listening.listen(WAITING_CLIENTS)
        except OSError:  # no abstract sockets here, or somebody else has taken the name
            listening.close()
            return
        self._socket = listening
        self._thread = threading.Thread(target=self._serve, args=(listening,), name="mpikv-endpoint", daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Close what a forked child has inherited, which would keep the name when its parent has ended."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._offers.clear()
        for one in (self._socket, self._client):
            if one is not None:
                one.close()
        self._socket = self._client = self._thread = None

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                with self._lock:
                    if self._socket is not listening:  # closed
                        return
                time.sleep(AGAIN_S)
                continue
            with client:
                with self._lock:
                    if self._socket is not listening:
                        return
                    self._client = client
                # Whoever sends nothing, or goes: it is their loss. What an offer raises is told to the client.
                with contextlib.suppress(OSError):
                    client.settimeout(QUESTION_S)
                    self._answer(client)
                with self._lock:
                    self._client = None

    def _answer(self, client: socket.socket) -> None:
        if allowed(_user_of(client), os.geteuid()):
            question = client.recv(QUESTION_BYTES).decode(errors="replace").strip()
            if question in (HERE, WORKERS):
                client.sendall(json.dumps(self.told(whole=question == WORKERS)).encode())

    def told(self, *, whole: bool) -> dict[str, Any]:
        offers = []
        for offer in tuple(self._offers):
            try:
                offers.append(offer.answer(whole=whole))
            except Exception as error:  # noqa: BLE001 - the process is not to end because somebody looks at it
                offers.append({"kind": "error", "doing": f"{type(error).__name__}: {error}"})
        program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
        return {"pid": os.getpid(), "host": socket.gethostname(), "program": program, "offers": offers}


OWN = Endpoint()  # a process has one name
os.register_at_fork(after_in_child=OWN.forget)


# --- who asks


def endpoints() -> dict[int, int]:
    """Return the processes of this host that can be asked, each with its user. {}: none, or no such sockets here.

    Anybody may take a name, so only those count that name the user whose process it is.
    """
    found = {}
    with contextlib.suppress(OSError):
        text = Path("/proc/net/unix").read_text(errors="replace")
        for uid, pid in re.findall(r"@mpikv-(\d+)-(\d+)$", text, re.MULTILINE):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == int(uid):
                    found[int(pid)] = int(uid)
    return found


def ask(pid: int, uid: int, question: str, timeout_s: float) -> dict[str, Any]:
    """Ask a process of this host, of user `uid`. Blocks, at most `timeout_s`.

    Raises OSError where it does not answer, PermissionError where the socket is another user's.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(name_of(pid, uid))
        if not allowed(_user_of(connection), uid):
            raise PermissionError(f"the socket of process {pid} belongs to another user")
        connection.sendall(f"{question}\n".encode())
        parts = bytearray()
        while part := connection.recv(1 << 16):
            parts += part
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(parts) > MOST_BYTES:
                raise TimeoutError(f"process {pid} has not answered in {timeout_s:g} s, or too much")
            connection.settimeout(left_s)
    try:
        return document_of(parts)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConnectionResetError(f"process {pid} has given another answer than a document") from None


def document_of(content: bytes | bytearray) -> dict[str, Any]:
    """Return what a process tells, which is any user's where root asks: all that is shown is there and can be printed.

    Raises ValueError, TypeError, KeyError or RecursionError for any other content.
    """
    found: dict[str, Any] = _printable(json.loads(content, parse_int=lambda digits: int(digits[:19])))
    _check(found, pid=int, host=str, program=str, offers=list)
    for offer in found["offers"]:
        _check(offer, kind=str, doing=str)
        if offer["kind"] in ("store", "server"):
            _check(offer, store=str, workers=int, servers=int)
        if offer["kind"] == "store":
            _check(offer, type=str, host=str, worker=int, asks=bool, rows=list | None)
            for row in offer["rows"] or ():
                _check(row, rank=int, host=str, pid=int, seen_s=float | int | None, doing=str)
    return found


def _check(told: Mapping[str, Any], **shown: Any) -> None:
    if not all(isinstance(told[name], kind) for name, kind in shown.items()):
        raise TypeError(f"{', '.join(shown)}: one is of another type")


def _printable(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_printable, value)]
    if isinstance(value, dict):
        return {name: _printable(one) for name, one in value.items()}
    return plain(value) if isinstance(value, str) else value
