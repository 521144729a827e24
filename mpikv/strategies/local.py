"""One process, several devices: the sum and the update happen here and at once. Needs no MPI.

Also the reference that every other mode is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpikv.arrays import HostArray, sum_dtype
from mpikv.keys import Key, KeyInfo
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import AS_SET, DEFAULT_SLOT, Owner
from mpikv.reductions import SUM, Reduction
from mpikv.session.base import Pending, Session
from mpikv.strategies.base import Entry, PreparedCall, Updater
from mpikv.strategies.states import chosen, collect, distribute, read_file, restored, write_file


class LocalStrategy:
    """The strategy of `local` and `device`."""

    def __init__(self, session: Session) -> None:
        self._session, self._infos = session, session.infos
        self._stored: dict[int, HostArray] = {}
        self._space = session.space
        self._owner = Owner(self._space, own=False)
        self._updater: Updater | None = None
        self._slots = 0

    def init(self, values: Sequence[tuple[Key, tuple[int, ...], HostArray]]) -> None:
        """Store the values."""
        for key, shape, value in values:
            info = KeyInfo(key, len(self._infos), shape, value.dtype)
            self._infos[key] = info
            self._stored[info.id] = value

    def updates(self, info: KeyInfo) -> bool:
        """Whether an optimizer or an updater serves the key."""
        return self._updater is not None or self._owner.optimizer_of(info.id) is not None

    def prepare(
        self, infos: Sequence[KeyInfo], values: Sequence[Any], outs: Sequence[Sequence[Any]], op: Reduction
    ) -> PreparedCall | None:
        """No shorter way: nothing is sent in any case."""
        return None

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Nobody to share memory with."""
        return None

    def bucket(self, keys: Sequence[Key]) -> None:
        """Each key travels alone."""

    def skip(self, keys: Sequence[Key], *, changed: bool) -> None:
        """Nobody waits for them."""

    def stats(self) -> dict[str, int]:
        """Nothing is sent."""
        return {"messages_sent": 0, "bytes_sent": 0, "control_messages_sent": 0}

    def exchange(self, entries: Sequence[Entry], priority: int, op: Reduction = SUM) -> list[Pending]:
        """Update the stored values now, and copy them out. Every reduction is what one worker makes of its devices."""
        for info, total, sink in entries:
            if total is not None:
                self.push(info, total)
            if sink is not None:
                sink.deliver(self._stored[info.id], self._space)
        return []

    def push(self, info: KeyInfo, total: HostArray) -> None:
        """Update the stored value now."""
        stored = self._stored[info.id]
        if self._updater is not None:
            self._updater(info.key, total.reshape(info.shape), stored.reshape(info.shape))
        else:
            self._owner.apply(info, stored, self._space.cast(total, sum_dtype(info.dtype)), AS_SET)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """The user's own object, so that a changed attribute needs no carrying."""
        self._updater = None
        slot = DEFAULT_SLOT
        if keys is not None:
            self._slots += 1
            slot = self._slots
        self._owner.set_optimizer(slot, optimizer, [self._infos[key].id for key in keys or ()])

    def set_updater(self, updater: Updater) -> None:
        """`updater(key, pushed_sum, stored)` changes `stored` in place."""
        self._updater = updater

    def save_states(self, path: str, keys: Sequence[Key] | None = None, *, dump_optimizer: bool) -> None:
        """One file, whole or not at all."""
        parts = collect(self._owner, [(info, 0, info.n_elems) for info in self._infos.values()])
        write_file(
            path, [parts], chosen(self._session.in_order(), keys), self._optimizers(), dump_optimizer=dump_optimizer
        )

    def _optimizers(self) -> dict[Key, Optimizer]:
        found = {key: self._owner.optimizer_of(info.id) for key, info in self._infos.items()}
        return {key: optimizer for key, optimizer in found.items() if optimizer is not None}

    def load_states(self, path: str) -> None:
        """Read and check first, then change."""
        file = read_file(path, self._infos, self._optimizers())
        keys, configs = restored(file)
        for key in keys:
            self._owner.states.pop(self._infos[key].id, None)
        for part in distribute(file, [(info, 0, info.n_elems) for info in self._infos.values()]):
            self._owner.states[self._infos[part.key].id] = part.state
        for key, config in configs:
            optimizer = self._owner.optimizer_of(self._infos[key].id)
            if optimizer is not None:
                optimizer.set_attributes(config["attributes"])

    def flush(self, call: str) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to end."""
