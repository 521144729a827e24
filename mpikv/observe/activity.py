"""What a rank is doing, for the report of somebody who waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """The store call that a rank is in, or was in last, and since when."""

    def __init__(self) -> None:
        self._call: str | None = None
        self._last = "kv.create"
        self._since_s = time.monotonic()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Note a call for as long as it lasts."""
        self._call, self._since_s = call, time.monotonic()
        try:
            yield
        finally:
            self._last, self._call, self._since_s = call, None, time.monotonic()

    def note(self, call: str) -> None:
        """Note a call that does not wait."""
        self._last, self._since_s = call, time.monotonic()

    def waiting(self) -> str | None:
        """'in pull of key 'w' for 2.1 s' during a call, else None."""
        return self.text() if self._call is not None else None

    def text(self) -> str:
        """'in pull of key 'w' for 2.1 s', or 'outside the store for 7.0 s, its last call was ...'."""
        elapsed_s = time.monotonic() - self._since_s
        if self._call is not None:
            return f"in {self._call} for {elapsed_s:.1f} s"
        return f"outside the store for {elapsed_s:.1f} s, its last call was {self._last}"
