"""What a store decides, as records of the logger `mpikv`: one for each decision, where it is made, and none in a step.

A record says which rank has decided in its text, as errors do, and in its attributes `role` ("worker" or "server"),
`rank` (its number among these) and `host`, for the formatters of a program that handles records itself. `MPIKV_LOG`
prints them to stderr; without it, and without handlers of the program, nothing is printed.

Cost: a comparison of levels for each decision; its text is made only where somebody listens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from mpikv.observe.stall import say

LOGGER = logging.getLogger("mpikv")
LOGGER.addHandler(logging.NullHandler())  # else Python would print warnings where the program has configured nothing

Text = Callable[[], str]


class StoreLog:
    """The decisions of one rank in one store. text, of its methods: makes the text.

    detailed(): whether somebody listens to `detail`, for who has thousands of keys to tell of.
    """

    detailed = staticmethod(partial(LOGGER.isEnabledFor, logging.DEBUG))

    def __init__(self, role: str, rank: int, host: str) -> None:
        self.label = f"{role} {rank} on {host}"
        self._attributes = {"role": role, "rank": rank, "host": host}
        self._of_job = logging.INFO if self.label.startswith("worker 0 ") else logging.DEBUG

    def job(self, text: Text) -> None:
        """A decision that is the same on all ranks: worker 0 alone says it at level info, the others at debug."""
        self._log(self._of_job, text)

    def rank(self, text: Text) -> None:
        self._log(logging.INFO, text)

    def detail(self, text: Text) -> None:
        self._log(logging.DEBUG, text)

    def _log(self, level: int, text: Text) -> None:
        if LOGGER.isEnabledFor(level):
            LOGGER.log(level, "%s: %s", self.label, text(), extra=self._attributes, stacklevel=3)


class _ToStderr(logging.Handler):
    """Prints records to what `sys.stderr` is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(f"mpikv {self.format(record)}")
        except Exception:  # noqa: BLE001 - as Python's own handlers do
            self.handleError(record)


_printing = _ToStderr()


def print_from(level: str) -> None:
    """Print records from this level on, `debug`, `info` or `warning`, to stderr; "": print none. For the process."""
    LOGGER.removeHandler(_printing)
    if level:
        _printing.setLevel(level.upper())
        LOGGER.addHandler(_printing)
        LOGGER.setLevel(min(LOGGER.getEffectiveLevel(), _printing.level))
