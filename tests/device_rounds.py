"""Rounds of several keys side by side by one way, with values on the host or on a fake GPU, to compare their bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import HostArray, sum_dtype
from mpikv.collectives.labelled import Comparison
from mpikv.collectives.nccl import ID_BYTES, Nccl
from mpikv.engine.engine import Engine
from mpikv.engine.running import Running
from mpikv.errors import StallError
from mpikv.keys import KeyInfo
from mpikv.labels import Label
from mpikv.placement import Path, Placement, bounds_of
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.host import HostSpace
from mpikv.spaces.named import DEVICE, HOST, Spaces
from mpikv.strategies.nccl_way import NcclWorkers
from mpikv.strategies.ways import WAYS, Means
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.transports.base import Group, Transport

FIRST = Label("{}", 1.0)
LIMIT_S = 60.0
CROSSINGS = ("host_to_device", "device_to_host")


class Case(NamedTuple):
    """A key and its rounds. labels: of each rank, in each round; None: they are not compared.

    whole: values are small whole numbers, whose sums are exact in any order.
    """

    algorithm: str
    n: int
    dtype: Any = np.float32
    combine: np.ufunc = np.add
    labels: Sequence[Sequence[Label]] | None = None
    rounds: int = 2
    whole: bool = False


def contribution(rank: int, round_: int, case: Case) -> HostArray:
    """Numbers whose sum hangs on the order in which they are added, where the dtype rounds, unless they are whole."""
    n, dtype = case.n, case.dtype
    if case.whole:
        return ((np.arange(n) * 7 + 3 * rank + round_) % 5 + 1).astype(sum_dtype(np.dtype(dtype)))
    return numbers(rank, round_, n).astype(sum_dtype(np.dtype(dtype)))


@functools.lru_cache(maxsize=512)  # the host's rounds and the GPU's, of each algorithm, begin with the same ones
def numbers(rank: int, round_: int, n: int) -> HostArray:
    return np.random.default_rng([rank, round_ + 1, n]).standard_normal(n) * 10.0 ** (rank % 3)


class Side:
    """Where a rank's values are. gpu: None: in host memory. nccl: for the way of this name."""

    def __init__(self, gpu: FakeGpu | None = None, nccl: Nccl | None = None) -> None:
        self.gpu, self.nccl = gpu, nccl
        self.workers: NcclWorkers | None = None
        self.space: Any = HostSpace() if gpu is None else DeviceSpace(gpu)
        self.own_crossings = dict.fromkeys(CROSSINGS, 0)

    def _counted(self, call: Callable[[], Any]) -> Any:
        """What a test itself brings to the GPU and from there does not count."""
        before = self._crossings()
        result = call()
        for name, count in self._crossings().items():
            self.own_crossings[name] += count - before[name]
        return result

    def _crossings(self) -> dict[str, int]:
        return {name: 0 if self.gpu is None else self.gpu.counts[name] for name in CROSSINGS}

    @property
    def crossings(self) -> dict[str, int]:
        """Copies between host and device that the test has not made itself."""
        return {name: count - self.own_crossings[name] for name, count in self._crossings().items()}

    def pushed(self, values: HostArray) -> Any:
        """As a push brings it: on a GPU still being written in the caller's stream."""

        def call() -> Any:
            if self.gpu is None:
                return values.copy()
            with self.gpu.user_stream():
                return self.space.total(self.space.callers([self.gpu.array(values)]), "x", on_device=True)

        return self._counted(call)

    def to_host(self, array: Any) -> HostArray:
        return self._counted(lambda: array.copy() if self.gpu is None else self.space.to_host(array))

    def set(self, array: Any, values: HostArray) -> None:
        self._counted(lambda: self.space.copy(array, values))


def steps(path: Path, group: Group, side: Side, key_id: int, case: Case):
    """Of each round: what is known of labels, and the bytes of the value. The value before the first round, too."""
    p, me, dtype = group.size, group.rank, np.dtype(case.dtype)
    bounds = bounds_of(case.algorithm, case.n, group.hosts)
    info = KeyInfo(key_id, key_id, (case.n,), dtype, space=HOST if side.gpu is None else DEVICE)
    placement = Placement(path, case.algorithm, tuple(range(p)), bounds)
    way = WAYS[path](Means(group, Spaces(device=side.space), nccl=side.workers), info, placement, None)
    side.set(way.value, contribution(me, -1, case).astype(dtype))
    assert not way.share_now()
    yield from way.share()
    found: list[Any] = [side.to_host(way.value).tobytes()]
    comparison = None
    if case.labels is not None and p > 1 and case.n:
        comparison = Comparison((FIRST,), exact=dtype.kind in "iu")
    begin, end = bounds[me], bounds[me + 1]
    for round_ in range(case.rounds if case.labels is None else len(case.labels)):
        if comparison is not None:
            comparison.begin((case.labels[round_][me],))
        values = side.pushed(contribution(me, round_, case))
        totals = yield from way.reduce_scatter(values, case.combine, comparison, changeable=True)
        totals = values if totals is None else totals
        said: Any = None
        if begin < end and not (comparison is not None and comparison.wrong):
            side.space.copy(way.value[begin:end], totals[begin:end])
            said = None if comparison is None else (comparison.mixed, comparison.units)
        yield from way.allgather((), comparison)
        wrong = comparison is not None and comparison.wrong
        found.append((said, wrong, side.to_host(way.value).tobytes()))
    return found


def run_rounds(path: Path, transport: Transport, side: Side, cases: Sequence[Case]) -> list[Any]:
    """What `steps` finds for each case, all of them under way at the same time, on an engine.

    Ranks start them in orders of their own.
    """
    group = Group(transport, range(transport.size))
    engine = Engine(threaded=False, on_fatal=lambda error: None, poll=transport.poll)
    try:
        if side.nccl is not None:
            comm = side.nccl.init(group.size, bytes(ID_BYTES), group.rank) if group.size > 1 else None
            side.workers = NcclWorkers(comm, LIMIT_S)
        running: dict[int, Running[Any]] = {}
        for i in np.random.default_rng(transport.rank).permutation(len(cases)).tolist():
            running[i] = engine.start(steps(path, group, side, i, cases[i]), f"{cases[i]}")
        for one in running.values():
            engine.wait(one, LIMIT_S, lambda: StallError(f"rank {transport.rank}: the rounds have not ended"))
        if side.workers is not None:
            side.workers.close()
        return [running[i].result for i in range(len(cases))]
    finally:
        engine.stop()
