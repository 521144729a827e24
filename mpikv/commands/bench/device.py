"""Benchmarks of arrays on a GPU (`--device`): the store by each path that works here, beside raw MPI through the host.

A contender is one path (`MPIKV_DEVICE_PATH`) with the user's own arrays, or with those of `store.zeros(device=...)`. It
ends when the stream that the user's work is in has come so far. Raw MPI copies all arrays into page-locked memory,
calls MPI_Allreduce once for all of them, and copies back.

What binds, for p ranks on h hosts that sum a value of S bytes, with one copy of the value per rank, where g ranks share
the GPU with most of them:

    latency   ceil(log2 p) * l + w       l: one way of a ping-pong of 8 bytes, as in limits.py; w: a copy of 8 bytes on
                                         the GPU, begun and waited for. No result is there without one piece of work on
                                         the GPU that was begun after all others are known to be there.
    device    g S / c                    every rank's array is read once and written once: 2 g S bytes cross the memory
                                         of the GPU, as in a copy of g S bytes. c: bytes copied per second by one
                                         process that has the GPU for itself.
    pinned    min(S/d + S/u, 2 S/b)      through host memory each array goes down once and comes up once. d, u: the
                                         rates of copies to and from page-locked memory, each alone; b: of both at
                                         once, the bytes of both counted; all with every rank at work.
    link      2 S (h-1)/h  / B           as in limits.py

An exchange that stays on the GPUs of a host is bound by the largest of latency, device and link; one that goes through
host memory by the largest of latency, pinned and link. The sum itself is not in it. Between several GPUs of a host the
links between them may bind before their memory does; these are not measured.

The rates are measured just before each size by the same processes, medians of the slowest rank (of the wait its lowest
tenth): copies of as many bytes as the value has, 64 MiB at least, which are in no cache; on the device by the first
rank of each GPU, while the others that share it sleep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpikv import kv
from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench.choices import DEVICE_PATHS
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.limits import Limit, Rates, ring_bound_s
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.raw import mpi_can_add, sums_in_place
from mpikv.commands.bench.report import RAW, SUMS, BenchTable
from mpikv.commands.bench.session import BenchRun, Limits
from mpikv.commands.bench.sizes import short
from mpikv.commands.bench.stores import StoreUse, store_contender
from mpikv.config import Config
from mpikv.errors import ConfigError, MpikvError
from mpikv.kvstore import KVStore
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.pinned import Pinned

ZEROS = "zeros"  # in the name of a contender with arrays of store.zeros
THROUGH_HOST = ("staged", "host", RAW)  # paths whose arrays go down and up
LEAST_BYTES = 64 << 20  # of a measured copy: below, beginning it is measured and not the memory
COPIES, TURNS, WAITS = 8, 7, 100


# --- this worker's GPU


def device_store(job: BenchJob) -> KVStore:
    """Return a store of this worker's on its GPU, without servers. Collective; blocks."""
    return kv.create("dist_sync_device", comm=job.comm, config=job.config.with_(num_servers=0))


def open_space(job: BenchJob, store: KVStore) -> DeviceSpace:
    """Return where a store of this worker's has arrays on its GPU, which is this thread's from now on.

    Raises ConfigError on all where one has no GPU. Collective.
    """
    space = store.session.spaces.device
    without = [str(rank) for rank, one in enumerate(job.comm.allgather(space is None)) if one]
    if space is None or without:
        why = next(iter(dict(store.stats().get("device_path_reasons", ())).values()), store.session.spaces.missing)
        raise ConfigError(f"--device needs a GPU for each worker, and rank {', '.join(without)} has none: {why}")
    space.gpu.take()  # a benchmark's thread is its own
    return space


def finish(gpu: Gpu, *streams: Any) -> None:
    """Wait for the end of all work in these streams, by default in the current one, where a user's work is."""
    for stream in streams or (gpu.cupy.cuda.get_current_stream(),):
        stream.synchronize()


def download(gpu: Gpu, array: Any, out: HostArray) -> None:
    """Begin to copy an array, in the current stream, to page-locked memory."""
    array.data.copy_to_host_async(out.ctypes.data, array.nbytes, gpu.cupy.cuda.get_current_stream())


def upload(gpu: Gpu, array: Any, values: HostArray, stream: Any = None) -> None:
    """Begin to copy page-locked memory to an array, in the current stream or another one."""
    stream = gpu.cupy.cuda.get_current_stream() if stream is None else stream
    array.data.copy_from_host_async(values.ctypes.data, array.nbytes, stream)


class DevicePattern(Pattern):
    """A pattern for arrays on a GPU: they are filled by a copy on the GPU, and compared on the host."""

    def __init__(self, gpu: Gpu, dtype: np.dtype[np.generic], rank: int, size: int, largest_bytes: int) -> None:
        """largest_bytes: of the arrays to come."""
        super().__init__(dtype, rank, size)
        self._gpu, self._dtype = gpu, dtype
        self._host = Pinned(gpu).take(largest_bytes).view(dtype)
        self._masters: dict[int, Any] = {}  # this rank's values in device memory, by their sign

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self._gpu.cupy.zeros(shape, self._dtype)

    def fill(self, array: Any, sign: int = 1) -> None:
        if sign not in self._masters:
            super().fill(self._host, sign)
            self._masters[sign] = self._gpu.cupy.empty(self._host.shape, self._dtype)
            upload(self._gpu, self._masters[sign], self._host)
            self.finish()
        self._gpu.cupy.copyto(array, self._masters[sign][: array.size].reshape(array.shape))

    def is_total(self, array: Any, factor: int = 1) -> bool:
        if isinstance(array, np.ndarray):  # what a pull of a host key returns
            return super().is_total(array, factor)
        values: HostArray = self._host[: array.size]
        download(self._gpu, array, values)
        self.finish()
        return super().is_total(values, factor)

    def finish(self) -> None:
        finish(self._gpu)


# --- limits


class DeviceRates(NamedTuple):
    """What was measured: seconds, and bytes per second. wait: the shortest piece of work. link: None on one host."""

    latency_s: float
    wait_s: float
    copy_bytes_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    both_bytes_per_s: float
    link_bytes_per_s: float | None = None


class Sharing(NamedTuple):
    """How many ranks there are, on the GPU with most of them, and on how many hosts."""

    ranks: int
    per_gpu: int
    hosts: int


def limit_of(what: str, n_bytes: int, among: Sharing, rates: DeviceRates) -> Limit:
    """Return the limit of a contender, whose name begins with its path, for `n_bytes` in one array or in several."""
    if what.partition(",")[0] not in THROUGH_HOST:
        return _largest(Limit(among.per_gpu * n_bytes / rates.copy_bytes_per_s, "device"), n_bytes, among, rates)
    return staged_limit(n_bytes, among, rates)


def staged_limit(n_bytes: int, among: Sharing, rates: DeviceRates) -> Limit:
    """Return the limit where each array goes down to page-locked host memory and comes up from there."""
    one_by_one_s = n_bytes / rates.down_bytes_per_s + n_bytes / rates.up_bytes_per_s
    at_once_s = 2 * n_bytes / rates.both_bytes_per_s
    return _largest(Limit(min(one_by_one_s, at_once_s), "pinned"), n_bytes, among, rates)


def _largest(moved: Limit, n_bytes: int, among: Sharing, rates: DeviceRates) -> Limit:
    if among.ranks < 2:
        return Limit(0.0, "latency")
    found = [Limit(math.ceil(math.log2(among.ranks)) * rates.latency_s + rates.wait_s, "latency"), moved]
    if among.hosts > 1 and rates.link_bytes_per_s:
        found.append(Limit(ring_bound_s(n_bytes, among.hosts, rates.link_bytes_per_s), "link"))
    return max(found)


def device_rates(session: BenchRun, gpu: Gpu, n_bytes: int, *, first_on_gpu: bool) -> DeviceRates:
    """Measure. latency_s is left 0: it is the host's. Collective, blocks."""
    cupy, n, job = gpu.cupy, max(LEAST_BYTES, n_bytes), session.job
    source, to = (cupy.zeros(n, np.uint8) for _ in range(2))
    below, above = (Pinned(gpu).take(n) for _ in range(2))
    below[:], above[:] = 0, 0
    streams = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)

    def seconds(work: Callable[[], None], percent: int = 50, turns: int = TURNS, times: int = 1) -> float:
        found = []
        for _ in range(turns):
            finish(gpu, *streams)
            start_s = time.perf_counter()
            for _ in range(times):
                work()
            finish(gpu, *streams)
            found.append((time.perf_counter() - start_s) / times)
        return float(np.percentile(found, percent))

    def both() -> None:
        upload(gpu, to, above, streams[1])
        download(gpu, source, below)

    copy_s = seconds(lambda: cupy.copyto(to, source), times=COPIES) if first_on_gpu else 0.0
    job.quiet_barrier()
    down_s = seconds(lambda: download(gpu, source, below))
    up_s = seconds(lambda: upload(gpu, to, above))
    both_s = seconds(both)
    wait_s = seconds(lambda: cupy.copyto(to[:8], source[:8]), percent=10, turns=WAITS)
    wait_s, *slowest = (
        max(one) for one in zip(*job.comm.allgather((wait_s, copy_s, down_s, up_s, both_s)), strict=True)
    )
    copy, down, up, both_ways = (factor * n / one for factor, one in zip((1, 1, 1, 2), slowest, strict=True))
    return DeviceRates(0.0, wait_s, copy, down, up, both_ways, session.link_bytes_per_s)


# --- comparing

RATES = BenchTable(
    ("bytes", 9, lambda row: short(row["n_bytes"])),
    ("device copy GB/s", 16, lambda row: f"{row['copy_bytes_per_s'] / 1e9:.1f}"),
    ("down", 7, lambda row: f"{row['down_bytes_per_s'] / 1e9:.1f}"),
    ("up", 7, lambda row: f"{row['up_bytes_per_s'] / 1e9:.1f}"),
    ("both", 7, lambda row: f"{row['both_bytes_per_s'] / 1e9:.1f}"),
)


class GpuComparison:
    """What the contenders of one run share: this worker's GPU, and the paths that work. Collective.

    paths: those to compare, tried before; by default what the options name.
    """

    def __init__(self, session: BenchRun, paths: Sequence[str] = ()) -> None:
        job = session.job
        with device_store(job) as store:
            self.gpu = open_space(job, store).gpu
        of_ranks = job.comm.allgather((job.hosts[job.rank], self.gpu.uuid))
        self._first_on_gpu = of_ranks.index(of_ranks[job.rank]) == job.rank
        self._among = Sharing(job.size, max(map(of_ranks.count, of_ranks)), len(job.host_names))
        session.note(f"GPU {self.gpu.number} of rank 0: {self.gpu.name}; {len(set(of_ranks))} for {job.size} workers")
        session.note("raw MPI: page-locked copies down and up around MPI_Allreduce")
        self.paths = paths or usable(session, self.gpu)
        session.titles(SUMS)

    def by_each_path(self, use: StoreUse) -> list[StoreUse]:
        """Return this use of the store by each path, with the user's own arrays and with the store's."""
        found = []
        for path in self.paths:
            config, type_ = use.config.with_(device_path=path), f"{use.type_}_device"
            for shared in (False,) if use.out or path == "host" else (False, True):
                what = ", ".join(filter(None, (path, ZEROS * shared, use.what)))
                found.append(replace(use, what=what, config=config, type_=type_, shared=shared))
        return found

    def compare(
        self,
        session: BenchRun,
        uses: Sequence[StoreUse],
        comm: Any = None,
        bounds: Limits = lambda _what, _rates: None,
        *,
        show_raw: bool = True,
    ) -> None:
        """Measure these uses of the store, which have the same shapes, beside raw MPI. Collective.

        comm: that of the stores, by default the job's. bounds: of what stores do besides copying through host memory.
        """
        pool = self.gpu.cupy.cuda.MemoryPool()  # given back with the arrays of this size: the next ones are larger
        with self.gpu.cupy.cuda.using_allocator(pool.malloc):
            self._compare(session, uses, comm, bounds, show_raw=show_raw)
        finish(self.gpu)

    def _compare(
        self, session: BenchRun, uses: Sequence[StoreUse], comm: Any, bounds: Limits, *, show_raw: bool
    ) -> None:
        job, dtype, shapes, gpu = session.job, session.dtype, uses[0].shapes, self.gpu
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        n_bytes = sum(sizes)
        rates = device_rates(session, gpu, n_bytes, first_on_gpu=self._first_on_gpu)
        pattern = DevicePattern(gpu, dtype, job.rank, job.size, max(sizes))
        arrays = [gpu.cupy.empty(shape, dtype) for shape in shapes]
        made = [
            store_contender(job, pattern, replace(use, device=True), None if use.shared else arrays, comm)
            for use in uses
        ]
        if mpi_can_add(dtype):
            made.append(copied_contender(job, gpu, pattern, arrays))

        def limits(what: str, host_rates: Rates) -> Limit:
            bound, here = bounds(what, host_rates), rates._replace(latency_s=host_rates.latency_s)
            if bound is None:
                return limit_of(what, n_bytes, self._among, here)
            return max(bound, staged_limit(n_bytes, self._among, here))

        session.compare(n_bytes, len(shapes), made, limits, show_raw=show_raw)
        measured = {name: value for name, value in rates._asdict().items() if name != "latency_s"}
        session.more.setdefault("device_rates", []).append({"n_bytes": n_bytes, **measured})

    @staticmethod
    def summary(session: BenchRun) -> None:
        """Print the rates that the limits follow from."""
        if session.job.rank == 0:
            lines = [RATES.head(), *map(RATES.line, session.more.get("device_rates", ()))]
            session.progress.say("# measured before each size:", *(f"# {line}" for line in lines))


def compare_cases(session: BenchRun, cases: Sequence[Sequence[StoreUse]]) -> None:
    """Measure cases, each some uses of the store with the same shapes, by each path. Collective, blocks."""
    comparison = GpuComparison(session)
    for uses in cases:
        comparison.compare(session, [one for use in uses for one in comparison.by_each_path(use)])
    comparison.summary(session)


def usable(session: BenchRun, gpu: Gpu) -> list[str]:
    """Return the paths that work, and note why others do not. Raises ConfigError where none does. Collective."""
    found, paths = [], session.options.device_paths or DEVICE_PATHS
    for path in paths:
        why = reason_against(session.job, gpu, session.job.config.with_(num_servers=0, device_path=path))
        if why:
            session.note(f"left out: {path} ({why})")
        else:
            found.append(path)
    if not found:
        raise ConfigError("--device: none of the paths works here: " + "; ".join(session.notes[-len(paths) :]))
    return found


def reason_against(job: BenchJob, gpu: Gpu, config: Config) -> str:
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


def copied_contender(job: BenchJob, gpu: Gpu, pattern: DevicePattern, arrays: Sequence[Any]) -> Contender:
    """Make the contender that copies down, calls MPI_Allreduce once in place, and copies up."""
    from mpi4py import MPI  # noqa: PLC0415

    buffer = Pinned(gpu).take(sum(array.nbytes for array in arrays)).view(arrays[0].dtype)
    pairs = list(zip(arrays, np.split(buffer, np.cumsum([array.size for array in arrays])[:-1]), strict=True))
    in_place: Any = MPI.IN_PLACE

    def run() -> None:
        for array, below in pairs:
            download(gpu, array, below)
        finish(gpu)
        job.comm.Allreduce(in_place, buffer, MPI.SUM)
        for array, below in pairs:
            upload(gpu, array, below)
        finish(gpu)

    return sums_in_place(RAW, pattern, arrays, run)
