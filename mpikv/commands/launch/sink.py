"""The connection by which the process above a rank tells the launcher what it has to say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpikv.commands.launch import channel


class Place(NamedTuple):
    """Which rank this is."""

    role: str
    number: int
    rank: int
    host: str

    @property
    def label(self) -> str:
        return f"{self.role} {self.number} @ {self.host}"


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
