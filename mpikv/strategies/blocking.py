"""A `pushpull` through the keys' queues, straight from the caller's own arrays.

A caller that blocks until the call has ended does not change its arrays meanwhile, so that a round can add where the
values are, or where the result goes, and needs no copy. For large values this counts: the first use of new memory takes
some times as long as the copy, and the link waits for it. Nor does a caller that has its result in place of the value
and waits later (`pushpull_async`).

Cost: no copy of a value that is pushed in place, one into the result otherwise; on a host whose workers share memory
none but theirs (collectives/hosted).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import Reduction
from mpikv.errors import ConfigError
from mpikv.placement.keys import KeyInfo
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.named import Spaces
from mpikv.strategies.arguments import Flat, address_of
from mpikv.strategies.base import Sink
from mpikv.strategies.bucketed import Bucket
from mpikv.strategies.queues import Delivery, Round, RoundQueue

Start = Callable[[int, KeyInfo, HostArray, tuple[HostArray, ...], Reduction], Pending]


class Rounds:
    """One call, ready to be made. start: pushes and pulls one key, in the caller's own arrays."""

    valid = True

    def __init__(
        self,
        start: Start,
        session: Workers,
        infos: Sequence[KeyInfo],
        flat: Sequence[Flat],
        op: Reduction,
    ) -> None:
        self._start, self._session = start, session
        self._entries: list[Any] = [(info, *one, op) for info, one in zip(infos, flat, strict=True)]

    def start(self, priority: int = 0) -> list[Pending]:
        """Push all keys."""
        with self._session.gathering():
            return [self._start(priority, *entry) for entry in self._entries]

    def run(self, priority: int = 0) -> bool:
        """Push all keys, then wait for all. Blocks."""
        refused: ConfigError | None = None
        started = self.start(priority)
        for pending in started:
            try:
                self._session.wait(pending, None, started)
            except ConfigError as error:
                if not isinstance(pending.request, Delivery) or pending.request.error is not error:
                    raise
                refused = refused or error  # so will be the other keys, whose arrays are in use until they are
        if refused is not None:
            raise refused
        return True

    def release(self) -> None:
        """Forget the arrays."""
        self.valid = False
        self._entries = []


def in_place_round(
    queue: RoundQueue, info: KeyInfo, value: HostArray, outs: tuple[HostArray, ...], spaces: Spaces
) -> tuple[Round, Sink]:
    """The round of a key whose caller waits for its end, and where the result is still to be written to then."""
    dtype = queue.paths.dtype
    if isinstance(queue, Bucket) or value.dtype != dtype:
        return Round(queue.space.cast(value, dtype)), Sink(info, outs, spaces)  # copied on its way, there or here
    in_place = any(address_of(value) == address_of(out) for out in outs)
    if queue.paths.writes_outs:
        return Round(value, callers=True, changeable=in_place, outs=outs), Sink(info, (), spaces)
    if in_place or not queue.paths.changes:
        return Round(value, callers=True, changeable=in_place), Sink(info, outs, spaces)
    queue.space.copy(outs[0], value)
    return Round(outs[0], callers=True), Sink(info, outs, spaces)
