"""What allreduce and parameter servers answer in the same way: everything that only asks the workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from mpikv.arrays import HostArray
from mpikv.errors import UnsupportedError
from mpikv.keys import Key, KeyInfo
from mpikv.observe.activity import Activity
from mpikv.optimizers.base import Optimizer
from mpikv.reductions import Reduction
from mpikv.strategies.base import OneByOne, Pending, PreparedCall, Updater
from mpikv.strategies.own_updates import OwnUpdates
from mpikv.strategies.workers import Workers


class DistributedStrategy(OneByOne):
    """Base of the strategies over several processes. A subclass sets `_workers`."""

    _workers: Workers
    shares_memory = False

    def __init__(self) -> None:
        self.pid = os.getpid()

    def lookup(self, key: Key) -> KeyInfo | None:
        """What was agreed on `key`."""
        return self._workers.lookup(key)

    def updates(self, info: KeyInfo) -> bool:
        """Whether an optimizer serves the key."""
        return self._workers.attributes.optimizer(self._workers.slot_of(info)) is not None

    def infos(self) -> Sequence[KeyInfo]:
        """All keys, by number."""
        return sorted(self._workers.infos.values(), key=lambda info: info.id)

    def prepare(
        self, infos: Sequence[KeyInfo], values: Sequence[Any], outs: Sequence[Sequence[Any]], op: Reduction
    ) -> PreparedCall | None:
        """No shorter way."""
        return None

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Agree that all allocate the same; no shared memory."""
        self._workers.agree("empty", [text, -1], "empty")
        return None

    def bucket(self, keys: Sequence[Key]) -> None:
        """Each key travels alone."""

    def skip(self, infos: Sequence[KeyInfo], *, changed: bool) -> None:
        """Nobody waits for them."""

    def own_updates(self, optimizer: Optimizer, keys: Sequence[Key]) -> OwnUpdates | None:
        """Agree on the optimizer."""
        if self._workers.group.size == 1:
            return None
        exact = any(info.dtype.kind in "iu" for info in self.infos() if info.key in keys)
        return OwnUpdates(self._workers, optimizer, keys, exact=exact)

    def stats(self) -> dict[str, int]:
        """What the transport has sent."""
        transport = self._workers.transport
        return {
            "messages_sent": transport.sent_messages,
            "bytes_sent": transport.sent_bytes,
            "control_messages_sent": self._workers.control.sent_messages,
        }

    def wait(self, pending: Pending, timeout_s: float | None = None) -> None:
        """Block until a transfer is done."""
        self._workers.wait(pending, timeout_s)

    def set_updater(self, updater: Updater) -> None:
        """Not here: the owner is another process."""
        raise UnsupportedError("set_updater works in local stores only; use set_optimizer with a callable")

    def decide(self, call: str, attempt: Callable[[], Any]) -> Any:
        """Worker 0 tries; all get its result or its error."""
        return self._workers.outcome(call, attempt)

    def stop_requested(self) -> bool:
        """One read."""
        return self._workers.stop_requested()

    def request_stop(self, why: str) -> None:
        """Tell worker 0."""
        self._workers.control.wish(why)

    def listen_for(self, asked: Callable[[], str | None]) -> None:
        """The progress engine asks."""
        self._workers.listen_for(asked)

    def begin_epoch(self, epoch: int) -> None:
        """Tell worker 0."""
        self._workers.begin_epoch(epoch)

    def progress(self) -> None:
        """Move transfers on."""
        self._workers.engine.step()

    @property
    def activity(self) -> Activity:
        """What this worker does in the store."""
        return self._workers.control.activity

    def abandon(self) -> None:
        """Stop the engine."""
        self._workers.stop()
