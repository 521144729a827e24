"""How far it is: a bar of tqdm's where somebody looks and tqdm is installed, else a line on stderr now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

EVERY_S = 10.0  # between lines


class Progress:
    """Shows that `done` of `total` are done. what: what is done, for the user. unit: 'B' for bytes, or ' images'."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._bar: Any = None
        self._next_s = time.monotonic() + EVERY_S
        if not sys.stderr.isatty():
            return
        try:
            from tqdm import tqdm  # noqa: PLC0415 - an extra
        except ImportError:
            return
        self._bar = tqdm(
            total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False, dynamic_ncols=True, file=sys.stderr
        )

    def to(self, done: int) -> None:
        """So many are done."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            unit = " bytes" if self._unit == "B" else self._unit
            print(f"{self._what}: {done} of {self._total}{unit}", file=sys.stderr, flush=True)

    def say(self, line: str, *, error: bool = False) -> None:
        """Print a line, on stderr if it is an error, without tearing the bar apart."""
        if self._bar is not None:
            self._bar.clear()
        print(line, file=sys.stderr if error else sys.stdout, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
