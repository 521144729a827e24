"""What allreduce and parameter servers have in common beyond their session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpikv.arrays import HostArray
from mpikv.errors import UnsupportedError
from mpikv.keys import Key, KeyInfo
from mpikv.reductions import Reduction
from mpikv.session.workers import Workers
from mpikv.strategies.base import PreparedCall, Updater


class DistributedStrategy:
    """Base of the strategies over several processes."""

    def __init__(self, session: Workers) -> None:
        self._session = session

    def updates(self, info: KeyInfo) -> bool:
        """Whether an optimizer serves the key."""
        return self._session.attributes.optimizer(self._session.slot_of(info)) is not None

    def prepare(
        self, infos: Sequence[KeyInfo], values: Sequence[Any], outs: Sequence[Sequence[Any]], op: Reduction
    ) -> PreparedCall | None:
        """No shorter way."""
        return None

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Agree that all allocate the same; no shared memory."""
        self._session.agree("empty", [text, -1], "empty")
        return None

    def bucket(self, keys: Sequence[Key]) -> None:
        """Each key travels alone."""

    def skip(self, keys: Sequence[Key], *, changed: bool) -> None:
        """Nobody waits for them."""

    def flush(self, call: str) -> None:
        """Nobody has to be asked."""

    def set_updater(self, updater: Updater) -> None:
        """Not here: the owner is another process."""
        raise UnsupportedError("set_updater works in local stores only; use set_optimizer with a callable")

    def stats(self) -> dict[str, int]:
        """What the transport has sent."""
        transport = self._session.transport
        return {
            "messages_sent": transport.sent_messages,
            "bytes_sent": transport.sent_bytes,
            "control_messages_sent": self._session.control.sent_messages,
        }
