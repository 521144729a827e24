"""What a rank is doing in one of its stores, for those who wait for it.

A rank with several stores may wait in one of them while others miss it in another store, and these must learn of it:
two ranks that close two stores in different orders wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mpikv.common.clock import MACHINE_CLOCK, Clock


class Activity:
    """The store call that a rank is in, or was in last, and since when.

    others: the activities of the process's other stores. waits_for: the processes that a call waits for past its limit,
    and those that these wait for in turn, as far as is known.
    """

    def __init__(self, clock: Clock = MACHINE_CLOCK) -> None:
        self._clock = clock
        self._call: object = None  # whose text says what it is, which is not asked for in every call
        self._last: object = "kv.create"
        self._failed = False  # the last call; the process is about to end then, and others still ask
        self._since_s = self._clock.now_s()
        self.others: Callable[[], Iterable[Activity]] = tuple
        self.waits_for: frozenset[str] = frozenset()

    @contextmanager
    def during(self, call: object) -> Iterator[None]:
        """Note a call for as long as it lasts."""
        self._call, self._since_s, self._failed = call, self._clock.now_s(), False
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._last, self._call, self._since_s = call, None, self._clock.now_s()

    def note(self, call: object) -> None:
        """Note a call that does not wait."""
        self._last, self._since_s, self._failed = call, self._clock.now_s(), False

    def waiting(self) -> str | None:
        """Return text such as 'in pull of key 'w' for 2.1 s' during a call, else None."""
        return self.text() if self._call is not None else None

    def text(self) -> str:
        """Return text such as 'in pull of key 'w' for 2.1 s', or 'outside the store for 7.0 s, its last call was ...'.

        Where the rank waits in another store: 'in close of another store for 2.1 s'; where it has waited there in vain:
        'its close of another store failed 0.3 s ago'.
        """
        elapsed_s = self._clock.now_s() - self._since_s
        if self._call is not None:
            return f"in {self._call} for {elapsed_s:.1f} s"
        for other in self.others():
            if (call := other._call) is not None:  # noqa: SLF001 - of the same class
                return f"in {call} of another store for {self._clock.now_s() - other._since_s:.1f} s"  # noqa: SLF001 - of the same class
            if other._failed:  # noqa: SLF001 - of the same class
                return f"its {other._last} of another store failed {self._clock.now_s() - other._since_s:.1f} s ago"  # noqa: SLF001 - of the same class
        return f"outside the store for {elapsed_s:.1f} s, its last call was {self._last}"

    def held_by(self) -> frozenset[str]:
        """Return the processes that this one waits for in its other stores."""
        return frozenset().union(*(other.waits_for for other in self.others()))
