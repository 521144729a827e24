"""Benchmarks of arrays on a GPU (`--device`): the store by each way that works here, beside raw MPI through the host.

A contender is one way (`MPIKV_DEVICE_PATH`) with the user's own arrays, or with those of `store.zeros(device=...)`. It
ends when the stream that the user's work is in has come so far. Raw MPI copies all arrays into page-locked memory,
calls MPI_Allreduce once for all of them, and copies back. Limits: `device_limits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpikv import kv
from mpikv.commands.bench.device_limits import DeviceRates, Ranks, device_limit, staged_limit
from mpikv.commands.bench.device_probes import device_rates, ranks_per_gpu
from mpikv.commands.bench.gpu import DevicePattern, device_store, download, finish, open_space, upload
from mpikv.commands.bench.job import Job, mpi_can_add
from mpikv.commands.bench.limits import Limit, Rates
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.options import DEVICE_PATHS
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.raw import RAW, checker, filler
from mpikv.commands.bench.report import TABLE
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.sizes import short
from mpikv.commands.bench.stores import Way, store_contender
from mpikv.commands.tables import Column, Table
from mpikv.config import Config
from mpikv.errors import ConfigError, MpikvError
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.pinned import Pinned

ZEROS = "zeros"  # in the name of a contender with arrays of store.zeros
THROUGH_HOST = ("staged", "host", RAW)  # ways whose arrays go down and up

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
            self.gpu = open_space(job, store).gpu
        gpus = len(set(job.comm.allgather((job.hosts[job.rank], self.gpu.uuid))))
        session.note(f"GPU {self.gpu.number} of rank 0: {self.gpu.name}; {gpus} for {job.size} workers")
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
        pool = self.gpu.cupy.cuda.MemoryPool()  # given back with the arrays of this size: the next ones are larger
        with self.gpu.cupy.cuda.using_allocator(pool.malloc):
            self._compare(session, ways, more)
        finish(self.gpu)

    def _compare(self, session: Session, ways: Sequence[Way], more: Servers | None) -> None:
        job, dtype, shapes, gpu = session.job, session.dtype, ways[0].shapes, self.gpu
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        n_bytes, over = sum(sizes), None if more is None else more.everybody
        device = device_rates(job, gpu, n_bytes, session.link_bytes_per_s)
        pattern = DevicePattern(gpu, Pattern(dtype, job.rank, job.size), max(sizes))
        arrays = [gpu.cupy.empty(shape, dtype) for shape in shapes]
        probes, comm = session.probes(n_bytes, over), None if over is None else over.comm
        made = [store_contender(job, pattern, way, None if way.shared else arrays, comm) for way in ways]
        if mpi_can_add(dtype):
            made.append(copied_contender(job, gpu, pattern, arrays))
        among = Ranks(job.size, ranks_per_gpu(job, gpu)[0], len(job.host_names))

        def bounds(rates: Rates) -> Mapping[str, Limit]:
            here = device._replace(latency_s=rates.latency_s)
            found = {one.what: limit_of(one.what, n_bytes, among, here) for one in made}
            if more is not None:
                through_host = staged_limit(n_bytes, among, here)
                found |= {way.what: max(through_host, more.bound(rates)) for way in ways}
            return found

        session.compare(n_bytes, len(shapes), made, probes, bounds, show_raw=more is None or more.show_raw)
        rates = {name: value for name, value in device._asdict().items() if name != "latency_s"}
        session.more.setdefault("device_rates", []).append({"n_bytes": n_bytes, **rates})


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
            store.init(0, np.zeros(job.size, np.float32))
            store.pushpull(0, gpu.cupy.asarray(np.ones(job.size, np.float32)))
            finish(gpu)
    except MpikvError as error:
        why = str(error)
    return next((one for one in job.comm.allgather(why) if one), "")


def limit_of(what: str, n_bytes: int, among: Ranks, rates: DeviceRates) -> Limit:
    """Return the limit of a contender, whose name begins with its way."""
    return (staged_limit if what.partition(",")[0] in THROUGH_HOST else device_limit)(n_bytes, among, rates)


def copied_contender(job: Job, gpu: Gpu, pattern: DevicePattern, arrays: Sequence[Any]) -> Contender:
    """Make the contender that copies down, calls MPI_Allreduce once in place, and copies up."""
    from mpi4py import MPI  # noqa: PLC0415

    buffer = Pinned(gpu).take(sum(array.nbytes for array in arrays)).view(arrays[0].dtype)
    ends = np.cumsum([array.size for array in arrays])
    pairs = [(array, buffer[end - array.size : end]) for array, end in zip(arrays, ends, strict=True)]
    in_place: Any = MPI.IN_PLACE

    def run() -> None:
        for array, below in pairs:
            download(gpu, array, below)
        finish(gpu)
        job.comm.Allreduce(in_place, buffer, MPI.SUM)
        for array, below in pairs:
            upload(gpu, array, below)
        finish(gpu)

    return Contender(RAW, filler(pattern, arrays), run, checker(pattern, arrays))


RATES = Table(Column("bytes", 9), Column("device copy GB/s", 16), Column("down", 7), Column("up", 7), Column("both", 7))


def summary(session: Session) -> None:
    """Print the rates that the limits follow from."""
    if session.job.rank == 0:
        session.progress.say("# measured before each size:", f"# {RATES.head()}")
        for one in session.more.get("device_rates", ()):
            figures = [f"{one[f'{name}_bytes_per_s'] / 1e9:.1f}" for name in ("copy", "down", "up", "both")]
            session.progress.say(f"# {RATES.line(short(one['n_bytes']), *figures)}")
