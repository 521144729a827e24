"""Benchmarks of arrays on a GPU (`--device`): the store by each way that works here, beside raw MPI through the host.

A contender is one way (`MPIKV_DEVICE_PATH`) with the user's own arrays, or with those of `store.zeros(device=...)`. It
ends when the stream that the user's work is in has come so far, which is asked as in `gpu`. Raw MPI copies all arrays
into page-locked memory, calls MPI_Allreduce once for all of them, and copies back.

What is to be reached, in `GOALS`, is printed beside what was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mpikv import kv
from mpikv.arrays import HostArray
from mpikv.bench.device_limits import DeviceRates, Ranks, device_limit, staged_limit
from mpikv.bench.device_probes import DeviceProbes
from mpikv.bench.gpu import DevicePattern, Gpu, address_of, device_store, open_gpu
from mpikv.bench.job import Job, mpi_can_add
from mpikv.bench.limits import Limit, Rates
from mpikv.bench.measure import Contender
from mpikv.bench.options import DEVICE_PATHS
from mpikv.bench.pattern import Pattern
from mpikv.bench.raw import RAW, checker, filler
from mpikv.bench.report import TABLE, Row
from mpikv.bench.session import Session
from mpikv.bench.sizes import short
from mpikv.bench.stores import Way, store_contender
from mpikv.config import Config
from mpikv.errors import ConfigError, MpikvError
from mpikv.tables import Column, Table

ZEROS = "zeros"  # in the name of a contender with arrays of store.zeros
THROUGH_HOST = ("staged", "host", RAW)  # ways whose arrays go down and up


@dataclass(frozen=True)
class Goal:
    """What a way is to reach with two ranks on one GPU: times of its limit, or seconds, at most.

    Of arrays from `least` bytes to `most`.
    """

    kind: str
    way: str
    times: float = math.inf
    time_s: float = math.inf
    least: int = 0
    most: int = 1 << 62

    def said(self, rows: Sequence[Row]) -> str:
        """Say how the rows of this goal compare with it; "" without any."""
        mine = [row for row in rows if way_of(row.what) == self.way and self.least <= row.n_bytes <= self.most]
        mine = [row for row in mine if row.limit_s]  # one rank alone has none
        if not mine:
            return ""
        sizes = "" if self.kind == "model" else f", {short(min(row.n_bytes for row in mine))} and more"
        if self.time_s < math.inf:
            slowest = max(mine, key=lambda row: row.median_s)
            found, limit = f"{slowest.median_s * 1e6:.0f} us", f"{self.time_s * 1e6:.0f} us"
            sizes = f", {short(slowest.n_bytes)}"
            reached = slowest.median_s <= self.time_s
        else:
            slowest = max(mine, key=lambda row: row.median_s / row.limit_s)
            found, limit = f"{slowest.median_s / slowest.limit_s:.2f} times the limit", f"{self.times:.2f}"
            reached = slowest.median_s <= self.times * slowest.limit_s
        return f"{self.way}{sizes}: {found} ({slowest.what}); to reach: {limit}{'' if reached else ', NOT REACHED'}"


GOALS = (
    Goal("allreduce", "ipc", times=1.3, least=16 << 20),
    Goal("allreduce", "ipc", time_s=100e-6, most=4),
    Goal("allreduce", "staged", times=1 / 0.8, least=16 << 20),
    Goal("model", "ipc", times=1.5),
)


def way_of(what: str) -> str:
    """Return the way in a contender's name."""
    return what.partition(",")[0]


def goal_lines(kind: str, rows: Sequence[Row]) -> list[str]:
    """Say what was found of what is to be reached."""
    return [said for goal in GOALS if goal.kind == kind for said in [goal.said(rows)] if said]


Bound = Callable[[Rates], Limit]


class Servers(NamedTuple):
    """What a comparison of stores with servers needs.

    everybody: workers and servers. bound: the limit of the servers, besides that of copies through host memory.
    """

    everybody: Job
    bound: Bound
    show_raw: bool


class Device:
    """What the contenders of one run share: this worker's GPU, and the ways that work. Collective.

    paths: those to compare, tried before; by default what the options name.
    """

    def __init__(self, session: Session, paths: Sequence[str] = ()) -> None:
        job = session.job
        with device_store(job) as store:
            self.gpu = open_gpu(job, store)
        gpus = len(set(job.comm.allgather((job.hosts[job.rank], self.gpu.driver.uuid))))
        session.note(f"GPU {self.gpu.driver.number} of rank 0: {self.gpu.driver.name}; {gpus} for {job.size} workers")
        session.note("raw MPI: page-locked copies down and up around MPI_Allreduce")
        self.paths = paths or usable(session, self.gpu)
        session.titles(TABLE)

    def ways(self, way: Way) -> list[Way]:
        """Return this way of using the store by each path, with the user's own arrays and with the store's."""
        found = []
        for path in self.paths:
            config, type_ = way.config.with_(device_path=path), f"{way.type_}_device"
            for shared in (False,) if way.out or path == "host" else (False, True):
                what = ", ".join(filter(None, (path, ZEROS * shared, way.what)))
                found.append(replace(way, what=what, config=config, type_=type_, shared=shared, device=True))
        return found

    def compare(self, session: Session, ways: Sequence[Way], more: Servers | None = None) -> None:
        """Measure these ways of using the store, which have the same shapes, beside raw MPI. Collective."""
        job, dtype, shapes = session.job, session.dtype, ways[0].shapes
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        n_bytes, gpu = sum(sizes), Gpu(self.gpu.driver)
        pattern = DevicePattern(gpu, Pattern(dtype, job.rank, job.size), max(sizes))
        arrays = gpu.arrays(shapes, dtype)
        over = None if more is None else more.everybody
        probes = DeviceProbes(job, n_bytes, dtype, gpu, link_bytes_per_s=session.link_bytes_per_s, over=over)
        comm = None if over is None else over.comm
        made = [store_contender(job, pattern, way, None if way.shared else arrays, comm) for way in ways]
        if mpi_can_add(dtype):
            made.append(copied_contender(job, gpu, pattern, arrays))
        among = Ranks(job.size, probes.ranks_per_gpu, len(job.host_names))

        def bounds(rates: Rates) -> Mapping[str, Limit]:
            found = {one.what: limit_of(one.what, n_bytes, among, probes.device_rates) for one in made}
            if more is not None:
                through_host = staged_limit(n_bytes, among, probes.device_rates)
                found |= {way.what: max(through_host, more.bound(rates)) for way in ways}
            return found

        show_raw = more is None or more.show_raw
        session.compare(n_bytes, len(shapes), made, probes, bounds, show_raw=show_raw)
        rates = {name: value if value != math.inf else None for name, value in probes.device_rates._asdict().items()}
        session.more.setdefault("device_rates", []).append({"n_bytes": n_bytes, **rates})
        probes.close()
        gpu.close()


def compare_sizes(session: Session, sizes: Sequence[int], ways: Callable[[tuple[int, ...]], Sequence[Way]]) -> None:
    """Measure one array of each size. ways: of using the store for an array of a shape. Collective, blocks."""
    device = Device(session)
    for n_bytes in sizes:
        shape = (n_bytes // session.dtype.itemsize,)
        device.compare(session, [one for way in ways(shape) for one in device.ways(way)])
    summary(session)


def compare_lists(session: Session, way: Way) -> None:
    """Measure one call with all arrays of this way. Collective, blocks."""
    device = Device(session)
    device.compare(session, device.ways(way))
    summary(session)


def usable(session: Session, gpu: Gpu) -> list[str]:
    """Return the ways that work, and note why others do not. Raises ConfigError where none does. Collective."""
    found, paths = [], session.options.device_paths or DEVICE_PATHS
    for path in paths:
        why = reason_against(session.job, gpu, session.job.config.with_(num_servers=0, device_path=path))
        if why:
            session.note(f"left out: {path} ({why})")
        else:
            found.append(path)
    if not found:
        raise ConfigError("--device: none of the ways works here: " + "; ".join(session.notes[-len(paths) :]))
    return found


def reason_against(job: Job, gpu: Gpu, config: Config) -> str:
    """Return why a store with these settings cannot exchange an array on the GPU, "" where it can. Collective."""
    why = ""
    try:
        with kv.create("dist_sync_device", comm=job.comm, config=config) as store:
            (array,) = gpu.arrays([(job.size,)], np.dtype(np.float32))
            store.init(0, np.zeros(job.size, np.float32))
            store.pushpull(0, array)
            gpu.finish()
    except MpikvError as error:
        why = str(error)
    return next((one for one in job.comm.allgather(why) if one), "")


def limit_of(what: str, n_bytes: int, among: Ranks, rates: DeviceRates) -> Limit:
    """Return the limit of a contender of this name."""
    return (staged_limit if way_of(what) in THROUGH_HOST else device_limit)(n_bytes, among, rates)


def copied_contender(job: Job, gpu: Gpu, pattern: DevicePattern, arrays: Sequence[Any]) -> Contender:
    """Make the contender that copies down, calls MPI_Allreduce once in place, and copies up."""
    from mpi4py import MPI  # noqa: PLC0415

    memory = gpu.driver.pinned(sum(array.nbytes for array in arrays))
    buffer: HostArray = memory.view(arrays[0].dtype)
    ends = np.cumsum([array.nbytes for array in arrays])
    pieces = [
        (memory.ctypes.data + int(end) - array.nbytes, address_of(array), array.nbytes)
        for end, array in zip(ends, arrays, strict=True)
    ]
    in_place: Any = MPI.IN_PLACE

    def run() -> None:
        for below, on_device, n_bytes in pieces:
            gpu.copy(below, on_device, n_bytes)
        gpu.finish(gpu.stream)
        job.comm.Allreduce(in_place, buffer, MPI.SUM)
        for below, on_device, n_bytes in pieces:
            gpu.copy(on_device, below, n_bytes)
        gpu.finish(gpu.stream)

    return Contender(RAW, filler(pattern, arrays), run, checker(pattern, arrays))


RATES = Table(
    Column("bytes", 9),
    Column("device copy GB/s", 16),
    Column("down", 7),
    Column("up", 7),
    Column("both", 7),
    Column("wait us", 8),
    Column("ping us", 8),
)


def summary(session: Session) -> None:
    """Print the rates that the limits follow from, and what was found of what is to be reached."""
    rates = session.more.get("device_rates", [])
    if session.job.rank == 0 and rates:
        session.progress.say("# measured in between:", f"# {RATES.head()}")
        for one in rates:
            values = [one[f"{name}_bytes_per_s"] for name in ("copy", "down", "up", "both")]
            figures = ["-" if value is None else f"{value / 1e9:.1f}" for value in values]
            waits = [f"{one[name] * 1e6:.1f}" for name in ("wait_s", "latency_s")]
            session.progress.say(f"# {RATES.line(short(one['n_bytes']), *figures, *waits)}")
    lines = goal_lines(session.options.kind, session.rows)
    session.more["goals"] = lines
    session.progress.say(*(f"# {line}" for line in lines))
