"""A piece of work on the GPU, an update or a codec's, beside how long the GPU needs to move as many bytes in a copy.

A run is several of these pieces, one behind the other, so that beginning one costs nothing while another is under way;
times are of one of them. The limit is `device_limits.work_limit`: what must be read and written, at the rate at which
the GPU copies, measured just before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpikv.arrays import HostArray
from mpikv.bench.device_limits import work_limit
from mpikv.bench.device_probes import device_rates
from mpikv.bench.gpu import finish
from mpikv.bench.measure import Contender, measure
from mpikv.bench.report import microseconds
from mpikv.bench.session import Session
from mpikv.bench.sizes import short
from mpikv.spaces.device import DeviceSpace
from mpikv.tables import Column, Table

IN_A_ROW = 8


@dataclass(frozen=True)
class WorkRow:
    """One of them. Times in seconds. n_bytes: of the values. moved_bytes: read and written at least.

    wrong: on how many ranks results are not those of the host, or not near enough.
    """

    what: str
    n_bytes: int
    moved_bytes: int
    iterations: int
    median_s: float
    p95_s: float
    limit_s: float
    limit_by: str
    limit_percent: float
    copy_bytes_per_s: float
    wrong: int


def table(of: str, width: int) -> Table:
    """Of rows of such work."""
    return Table(
        Column("bytes", 9),
        Column(of, width, left=True),
        Column("median us", 10),
        Column("p95 us", 10),
        Column("moved GB/s", 10),
        Column("copy moves", 10),
        Column("limit", 8),
        Column("% of it", 7),
    )


def measured(
    session: Session, space: DeviceSpace, what: str, work: Callable[[], object], *, n_bytes: int, moved_bytes: int
) -> WorkRow:
    """Measure a piece of work, which is put into the store's stream. Collective."""

    def several(times: int = IN_A_ROW) -> None:
        with space.here():
            for _ in range(times):
                work()
        finish(space.gpu, space.stream)

    several(1)
    rates = device_rates(session.job, space.gpu, n_bytes)
    (result,) = measure(session.job.comm, [Contender(what, _nothing, several)], session.plan)
    times, limit = result.summary, work_limit(moved_bytes, rates)
    median_s = times.median_s / IN_A_ROW
    return WorkRow(
        what=what,
        n_bytes=n_bytes,
        moved_bytes=moved_bytes,
        iterations=times.iterations,
        median_s=median_s,
        p95_s=times.p95_s / IN_A_ROW,
        limit_s=limit.time_s,
        limit_by=limit.by,
        limit_percent=100 * limit.time_s / median_s,
        copy_bytes_per_s=rates.copy_bytes_per_s,
        wrong=0,
    )


def _nothing() -> None:
    pass


def differs(found: HostArray, expected: HostArray) -> float:
    """Return by how much two arrays differ at most, as a part of the largest number that is expected."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    away, largest = (float(np.max(np.abs(one.astype(np.float64)), initial=0)) for one in (found - expected, expected))
    return away / largest if away else 0.0


def line(of: Table, row: WorkRow) -> str:
    """Return a row of the table; results that are wrong are said at its end."""
    return of.line(
        short(row.n_bytes),
        row.what,
        microseconds(row.median_s),
        microseconds(row.p95_s),
        f"{row.moved_bytes / row.median_s / 1e9:.1f}",
        f"{2 * row.copy_bytes_per_s / 1e9:.1f}",
        row.limit_by,
        f"{row.limit_percent:.0f}",
        end="  WRONG: not what the host comes to" if row.wrong else "",
    )
