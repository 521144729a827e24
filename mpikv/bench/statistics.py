"""From the times of one contender to one row: median, p95, and the two bandwidths of nccl-tests.

    algbw = S / t                     bytes of the value per second
    busbw = algbw * 2 (n - 1) / n     what one rank's links carry in an allreduce by any bandwidth-optimal algorithm

Source: NVIDIA nccl-tests, doc/PERFORMANCE.md. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GIGA = 1e9  # nccl-tests prints GB/s of 10^9


class Summary(NamedTuple):
    """The times of one contender at one size, in seconds. Each is the slowest rank's."""

    iterations: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float


def summarise(times_s: Sequence[float]) -> Summary:
    """Raises ValueError without a time. p95 by linear interpolation between the two nearest times."""
    if not len(times_s):
        raise ValueError("no iteration was measured")
    values = np.asarray(times_s, np.float64)
    median_s, p95_s = np.percentile(values, (50, 95))
    return Summary(values.size, float(median_s), float(p95_s), float(values.min()), float(values.max()))


def algbw(n_bytes: int, time_s: float) -> float:
    """In GB/s."""
    return n_bytes / time_s / GIGA


def busbw(n_bytes: int, time_s: float, ranks: int) -> float:
    """In GB/s. 0 for one rank, which sends nothing."""
    return algbw(n_bytes, time_s) * 2 * (ranks - 1) / ranks
