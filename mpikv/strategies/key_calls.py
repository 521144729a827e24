"""The prepared calls of a key that go the direct path, and which of them has its newest value in its own arrays."""

from __future__ import annotations

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.digests import digest


class KeyCall:
    """What keys know of a call. values: of each key by its number, where the call adds in place."""

    def __init__(self) -> None:
        self.values: dict[int, HostArray] = {}
        self.rounds = 0
        self.last = 0  # when it was made last


class KeyCalls:
    """Of one key. at_home: when the newest value was last brought to the key's place."""

    __slots__ = ("_key_id", "at_home", "digest", "kept", "released_rounds")

    def __init__(self, key_id: int) -> None:
        self._key_id = key_id
        self.digest = digest("key", key_id)
        self.kept: list[KeyCall] = []
        self.released_rounds = 0
        self.at_home = 0

    @property
    def rounds(self) -> int:
        """How many rounds of the key went the direct path."""
        return self.released_rounds + sum(call.rounds for call in self.kept)

    @property
    def newest(self) -> KeyCall | None:
        """The call that was made last, if nothing has brought the value home since, and its arrays hold it."""
        last = max(self.kept, key=lambda call: call.last, default=None)
        return last if last is not None and last.values and last.last > self.at_home else None

    def array(self) -> HostArray | None:
        """The newest value, where it is in the arrays of a call."""
        newest = self.newest
        return None if newest is None else newest.values[self._key_id]
