"""The prepared direct calls of a key (direct.py), and which of them has the key's newest value in its arrays."""

from __future__ import annotations

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.digests import digest


class DirectCallRecord:
    """What a key must know about a direct call.

    values: the arrays of each key, by its number, if the call adds in place. rounds: how often it was made. last: the
    number of its last event, see `Direct`.
    """

    def __init__(self) -> None:
        self.values: dict[int, HostArray] = {}
        self.rounds = 0
        self.last = 0


class KeyDirectCalls:
    """The direct calls of one key. copied_at: the number of the event that last put the value at the key's place."""

    __slots__ = ("_key_id", "copied_at", "digest", "kept", "released_rounds")

    def __init__(self, key_id: int) -> None:
        self._key_id = key_id
        self.digest = digest("key", key_id)
        self.kept: list[DirectCallRecord] = []
        self.released_rounds = 0
        self.copied_at = 0

    @property
    def rounds(self) -> int:
        return self.released_rounds + sum(call.rounds for call in self.kept)

    @property
    def newest(self) -> DirectCallRecord | None:
        """The call made last, if its arrays still hold the key's newest value and nothing has copied it out since."""
        last = max(self.kept, key=lambda call: call.last, default=None)
        return last if last is not None and last.values and last.last > self.copied_at else None

    def array(self) -> HostArray | None:
        newest = self.newest
        return None if newest is None else newest.values[self._key_id]
