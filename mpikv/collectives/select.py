"""Which algorithm runs: a table of sizes and rank counts, or the one that `MPIKV_ALGORITHM` forces.

The choice depends only on what all ranks agreed on at `init`, so that every rank makes the same one without asking.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from mpikv.collectives import halving_doubling, naive, ring

# `native` is not among them: it runs on communicators of its own, not on a group.
ALGORITHMS: dict[str, ModuleType] = {"naive": naive, "ring": ring, "halving_doubling": halving_doubling}


class Row(NamedTuple):
    """Up to `max_ranks` ranks and up to `max_bytes` bytes on the wire: `algorithm`. None: no limit."""

    max_ranks: int | None
    max_bytes: int | None
    algorithm: str


# The first row that fits. Short messages cost their steps, long ones their bytes. See docs/adr for the measurement.
TABLE = (
    Row(4, 1 << 18, "naive"),
    Row(None, 1 << 16, "halving_doubling"),
    Row(None, None, "ring"),
)


def choose(n_bytes: int, size: int, forced: str = "auto") -> str:
    """The name of the algorithm for `n_bytes` bytes over `size` ranks."""
    if forced != "auto":
        return forced
    for row in TABLE:
        if (row.max_ranks is None or size <= row.max_ranks) and (row.max_bytes is None or n_bytes <= row.max_bytes):
            return row.algorithm
    raise AssertionError("the last row of the table fits everything")
