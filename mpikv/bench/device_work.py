"""A piece of work on the GPU, an update or a codec's, beside how long the GPU needs to move as many bytes in a copy.

A run is several of these pieces, one behind the other, so that beginning one costs nothing while another is under way;
times are of one of them. The limit is `device_limits.work_limit`: what must be read and written, at the rate at which
the GPU copies, measured in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpikv.arrays import HostArray
from mpikv.bench.device_limits import work_limit
from mpikv.bench.device_probes import DeviceProbes
from mpikv.bench.gpu import Gpu
from mpikv.bench.measure import Contender, measure
from mpikv.bench.report import microseconds
from mpikv.bench.session import Session
from mpikv.bench.sizes import short
from mpikv.tables import Column, Table

IN_A_ROW = 8


@dataclass(frozen=True)
class WorkRow:
    """One of them. Times in seconds. n_bytes: of the values. moved_bytes: read and written at least.

    wrong: on how many ranks the bits are not the host's.
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
    session: Session, gpu: Gpu, stream: int, what: str, work: Callable[[], None], *, n_bytes: int, moved_bytes: int
) -> WorkRow:
    """Measure a piece of work, which is put into `stream`. Collective."""

    def several() -> None:
        for _ in range(IN_A_ROW):
            work()
        gpu.finish(stream)

    work()
    gpu.finish(stream)
    probes = DeviceProbes(session.job, n_bytes, session.dtype, gpu)
    contenders = [Contender(what, _nothing, several), *probes.contenders()]
    results = {one.what: one for one in measure(session.job.comm, contenders, session.plan)}
    probes.rates(results)
    probes.close()
    times, limit = results[what].summary, work_limit(moved_bytes, probes.device_rates)
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
        copy_bytes_per_s=probes.device_rates.copy_bytes_per_s,
        wrong=0,
    )


def _nothing() -> None:
    pass


def same_bits(found: HostArray, expected: HostArray) -> bool:
    """Whether two arrays are equal in every bit."""
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def line(of: Table, row: WorkRow) -> str:
    """Return a row of the table; bits that are not the host's are said at its end."""
    return of.line(
        short(row.n_bytes),
        row.what,
        microseconds(row.median_s),
        microseconds(row.p95_s),
        f"{row.moved_bytes / row.median_s / 1e9:.1f}",
        f"{2 * row.copy_bytes_per_s / 1e9:.1f}",
        row.limit_by,
        f"{row.limit_percent:.0f}",
        end="  WRONG: not the bits of the host" if row.wrong else "",
    )
