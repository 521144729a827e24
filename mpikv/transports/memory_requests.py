"""The requests of memory.py: what is under way through the memory of a host.

None of them moves by itself: each `test` first lets the transport handle the records that have come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation

if TYPE_CHECKING:
    from mpikv.transports.memory import LocalTransport


class _Polled:
    """A request that is done once the transport has handled some record.

    Whoever makes one sets both fields: messages are made too often for a call of this class's own.
    """

    __slots__ = ("_transport", "done")

    _transport: LocalTransport
    done: bool

    def test(self) -> bool:
        if not self.done:
            self._transport.poll()
        return self.done


class Backlogged(_Polled):
    """A record that waits until there is space for it in its ring. Done: it has been written."""

    __slots__ = ("record",)

    def __init__(self, transport: LocalTransport, record: tuple[int, int, int, int, Any]) -> None:
        self._transport = transport
        self.record = record
        self.done = False


class Sending(_Polled):
    """A message that is read by reference, or waits until its receiver wants it. Done: its array may be used again."""

    __slots__ = ("at", "data", "dest")

    def __init__(self, transport: LocalTransport, dest: int, data: HostArray) -> None:
        self._transport = transport
        self.dest = dest
        self.data = data
        self.at = 0  # bytes copied
        self.done = False


class Receiving(_Polled):
    """A receive into the array `buf`; with None, a receive by which the message is only looked at, in `view`."""

    __slots__ = ("_at", "_give_back", "buf", "n_bytes", "view")

    def __init__(self, transport: LocalTransport, buf: HostArray | None, n_bytes: int) -> None:
        self._transport = transport
        self.buf = buf
        self.n_bytes = n_bytes
        self.view: HostArray | None = None  # of what is borrowed, (n_bytes,) of uint8
        self._at = 0
        self._give_back: Callable[[], object] | None = None
        self.done = False

    def take(self, piece: HostArray) -> None:
        """Copy the next bytes of the message."""
        if self.buf is None:
            self.buf = self.view = np.empty(self.n_bytes, np.uint8)
        end = self._at + piece.size
        self.buf[self._at : end] = piece
        self._at = end
        self.done = end == self.n_bytes

    def refer(self, view: HostArray, give_back: Callable[[], object]) -> None:
        """Take the whole message by reference: it stays in the sender's memory until `give_back` is called."""
        self.view, self._give_back, self.done = view, give_back, True

    def release(self) -> None:
        """Give the sender's memory back."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None


class Arrived:
    """A message that nobody has asked for yet: its bytes, or where they are in the memory, or only its length."""

    __slots__ = ("_transport", "data", "n_bytes", "number", "referred", "source")

    def __init__(
        self,
        transport: LocalTransport,
        source: int,
        n_bytes: int,
        *,
        number: int = 0,
        data: HostArray | None = None,
        referred: int = -1,
    ) -> None:
        self._transport = transport
        self.source = source
        self.n_bytes = n_bytes
        self.number = number
        self.data = data  # (n_bytes,) of uint8, nobody else's
        self.referred = referred  # offset in the memory, -1: it is not

    def receive(self, buf: HostArray) -> Operation:
        receiving = Receiving(self._transport, buf.reshape(-1).view(np.uint8), buf.nbytes)
        self._transport.match(receiving, self)
        return receiving
