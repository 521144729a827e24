"""From times to figures: median, spread, ratios, and the two bandwidths of nccl-tests. All that is computed of times.

    algbw = S / t                     bytes of the value per second
    busbw = algbw * 2 (n - 1) / n     what one rank's links carry in an allreduce by any bandwidth-optimal algorithm

Percentiles come from linear interpolation between the two nearest times. Source: NVIDIA nccl-tests, doc/PERFORMANCE.md.
Pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

GIGA = 1e9  # nccl-tests prints GB/s of 10^9


class Summary(NamedTuple):
    """The times of one contender at one size, in seconds. Each time is the slowest rank's."""

    iterations: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float


def summarise(times_s: Any) -> Summary:
    """Summarise times_s, (n,). Raises ValueError without a time."""
    if not len(times_s):
        raise ValueError("no iteration was measured")
    values = np.asarray(times_s, np.float64)
    median_s, p95_s = np.percentile(values, (50, 95))
    return Summary(values.size, float(median_s), float(p95_s), float(values.min()), float(values.max()))


def median(values: Any) -> float:
    """Return the median of values, (n,), n > 0."""
    return float(np.median(values))


def undisturbed(times_s: Any) -> float:
    """Return the 10th percentile: of many short times, of which some waited for a core. 0 where there are none."""
    return float(np.percentile(times_s, 10)) if len(times_s) else 0.0


def ratios(times_s: Any, base_s: Any) -> tuple[float, float]:
    """Return median and 95th percentile of the ratios within the same rounds. times_s, base_s: (rounds,)."""
    middle, p95 = np.percentile(np.asarray(times_s) / np.asarray(base_s), (50, 95))
    return float(middle), float(p95)


def algbw(n_bytes: int, time_s: float) -> float:
    """Return the bytes of the value per second, in GB/s."""
    return n_bytes / time_s / GIGA


def busbw(n_bytes: int, time_s: float, ranks: int) -> float:
    """Return what one rank's links carry, in GB/s. 0 for one rank, which sends nothing."""
    return algbw(n_bytes, time_s) * 2 * (ranks - 1) / ranks
