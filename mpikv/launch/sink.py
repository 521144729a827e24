"""Where the process above a rank sends what it has to say: to the launcher, or to its own streams."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpikv.launch import channel


class Place(NamedTuple):
    """Which rank this is."""

    role: str
    number: int
    rank: int
    host: str

    @property
    def label(self) -> str:
        return f"{self.role} {self.number} @ {self.host}"


class Printer:
    """Writes tagged lines to this process's own streams. For a line that was started by hand."""

    socket = None
    pending = b""

    def __init__(self, place: Place) -> None:
        self._tag = f"[{place.label}] ".encode()

    def write(self, kind: int, data: bytes) -> None:
        """Whole lines of the command, or what became of it."""
        if kind in (channel.OUT, channel.ERR):
            text = b"".join(self._tag + line for line in data.splitlines(keepends=True))
            os.write(1 if kind == channel.OUT else 2, text)
        elif kind == channel.ENDED and json.loads(data)["error"]:
            os.write(2, self._tag + json.loads(data)["error"].encode() + b"\n")

    def flush(self) -> bool:
        """Nothing waits here."""
        return True


class Sink:
    """The connection to the launcher. Never blocks: what it does not take yet waits in `pending`."""

    def __init__(self, plan: Mapping[str, Any], place: Place) -> None:
        addresses = [(host, port) for host, port in plan["addresses"]]
        self.socket = channel.connect(channel.dialled_from(addresses, plan["network"]), plan["secret"])
        channel.watch_link(self.socket)
        self.pending = bytearray()
        self.pending += channel.message(channel.HELLO, **place._asdict(), pid=os.getpid(), parent=os.getppid())
        self.flush()  # now: this process may be killed as soon as it has started the command

    def write(self, kind: int, data: bytes) -> None:
        """Queue one frame, and send what can be sent now."""
        self.pending += channel.frame(kind, data)
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
