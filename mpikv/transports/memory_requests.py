"""The requests of memory.py: what is under way through the memory of a host.

None of them moves by itself: each `test` first lets the transport handle the records that have come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation

if TYPE_CHECKING:
    from mpikv.transports.memory import LocalTransport


@dataclass(slots=True, eq=False)
class _Polled:
    """A request that is done once the transport has handled some record."""

    transport: LocalTransport
    done: bool = field(default=False, init=False)

    def test(self) -> bool:
        if not self.done:
            self.transport.poll()
        return self.done


@dataclass(slots=True, eq=False)
class Backlogged(_Polled):
    """A record that waits until there is space for it in its ring. Done: it has been written."""

    record: tuple[int, int, int, int, Any]


@dataclass(slots=True, eq=False)
class Sending(_Polled):
    """A message that is read by reference, or waits until its receiver wants it. Done: its array may be used again.

    at: bytes copied.
    """

    dest: int
    data: HostArray
    at: int = 0


@dataclass(slots=True, eq=False)
class Receiving(_Polled):
    """A receive into the array `buf`; with None, a receive by which the message is only looked at, in `view`.

    view: of what is borrowed, (n_bytes,) of uint8.
    """

    buf: HostArray | None
    n_bytes: int
    view: HostArray | None = None
    _at: int = 0
    _give_back: Callable[[], object] | None = None

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


@dataclass(slots=True, eq=False)
class Arrived:
    """A message that nobody has asked for yet: its bytes, or where they are in the memory, or only its length.

    data: (n_bytes,) of uint8, nobody else's. referred: its offset in the memory; -1: it is not there.
    """

    transport: LocalTransport
    source: int
    n_bytes: int
    number: int = 0
    data: HostArray | None = None
    referred: int = -1

    def receive(self, buf: HostArray) -> Operation:
        receiving = Receiving(self.transport, buf.reshape(-1).view(np.uint8), buf.nbytes)
        self.transport.match(receiving, self)
        return receiving
