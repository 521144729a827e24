"""The way "ipc" on thread ranks, each with its own view of fake GPUs: the bits of the host's sums, counts, order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mpikv.arrays import BFLOAT16, SUPPORTED_DTYPES, sum_dtype
from mpikv.collectives.labelled import Comparison
from mpikv.engine.engine import Engine
from mpikv.engine.running import Running
from mpikv.errors import StallError
from mpikv.hostmemory.segment import private_memory
from mpikv.hostmemory.sums import in_order
from mpikv.keys import KeyInfo, even_bounds, whole_bounds
from mpikv.labels import Label
from mpikv.placement import Placement
from mpikv.reductions import REDUCTIONS, SUM, Reduction
from mpikv.spaces import pool
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import Spaces
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.ways import Ipc, Means
from mpikv.testing.fake_gpu import FakeGpus
from mpikv.testing.ranks import spawn
from mpikv.transports.base import Group

F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays lie in several chunks."""
    monkeypatch.setattr(pool, "CHUNK_BYTES", 1 << 14)


@dataclass
class Case:
    """What ranks do. gpus: how many they have; rank r uses number r % gpus. keys: each has such values of its own.

    outs: to how many arrays the result is written. factors: of each rank's labels. counts: of each rank's last round.
    """

    size: int
    n: int
    bounds: Sequence[int] = ()
    dtype: np.dtype[Any] = F32
    rounds: int = 2
    op: Reduction = SUM
    gpus: int = 1
    seed: int = 0
    keys: int = 1
    outs: int = 0
    factors: Sequence[float] = ()
    counts: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bounds = self.bounds or even_bounds(self.n, self.size)

    def values(self, rank: int, round_: int, key: int = 0) -> np.ndarray:
        """Values whose sum depends on the order of adding."""
        random = np.random.default_rng([rank, self.n, round_, key])
        some = random.integers(-1000, 1000, self.n) * (0.37 ** np.arange(5))[random.integers(0, 5, self.n)]
        return some.astype(self.dtype)

    def expected(self, round_: int, key: int = 0) -> np.ndarray:
        """The result, as host memory has it."""
        wide = sum_dtype(self.dtype)
        sources = [self.values(rank, round_, key).astype(wide) for rank in range(self.size)]
        total = np.empty(self.n, wide)
        for owner in range(self.size):
            part = slice(self.bounds[owner], self.bounds[owner + 1])
            mine = self.factors[owner] if self.factors else 1.0
            scaled = [
                source[part] * wide.type(self.factors[rank] / mine) if self.factors and rank != owner else source[part]
                for rank, source in enumerate(sources)
            ]
            in_order(total[part], scaled, self.op.combine)
            self.op.finish(total[part], self.size)
            if self.factors:
                total[part] *= wide.type(mine)
        return total.astype(self.dtype)

    def run(self) -> list[list[list[bytes]]]:
        """Each rank's results, by key and round. The keys' rounds are under way at the same time."""
        machine = FakeGpus(self.gpus, seed=self.seed, eager=(self.seed % 3) / 4)
        spaces = [DeviceSpace(machine.view()[rank % self.gpus]) for rank in range(self.size)]
        memories = private_memory(self.size)
        hosts = [HostKeys(memory, ["a"] * self.size, space) for memory, space in zip(memories, spaces, strict=True)]
        places = [hosts[0].reserve_key(0) for _ in range(self.keys)]
        placement = Placement("ipc", "naive", tuple(range(self.size)), tuple(self.bounds))
        self.counts = [{}] * self.size

        def rounds(way: Ipc, space: DeviceSpace, rank: int, key: int):
            gpu: Any = space.driver
            if rank == 0:
                space.copy(way.value, np.full(self.n, key + 1).astype(self.dtype))
            yield from way.share()
            assert space.to_host(way.value).tolist() == [key + 1] * self.n
            own = slice(self.bounds[rank], self.bounds[rank + 1])
            comparison = Comparison([Label("{}", 1.0)], exact=False) if self.factors else None
            found = []
            for round_ in range(self.rounds):
                if comparison is not None:
                    comparison.begin([Label("{}", self.factors[rank])])
                callers = space.callers([gpu.array(self.values(rank, round_, key))])
                values = space.total(callers, "value", on_device=True)
                outs = [space.empty(self.n, self.dtype) for _ in range(self.outs)]
                before = dict(gpu.counts)
                totals = yield from way.reduce_scatter(values, self.op.combine, comparison, changeable=True)
                if own.start < own.stop:
                    self.op.finish(totals[own], self.size)
                    if comparison is not None:
                        space.scale(totals[own], self.factors[rank], totals[own])
                    space.copy(way.value[own], totals[own])
                yield from way.allgather(outs, comparison)
                self.counts[rank] = {name: n - before.get(name, 0) for name, n in gpu.counts.items()}
                found.append([*outs, space.empty(self.n, self.dtype)])
                space.copy(found[-1][-1], way.value)  # nothing waits for it
                if comparison is not None:
                    assert comparison.mixed == (len(set(self.factors)) > 1)
                    assert not comparison.wrong
            results = []
            for arrays in found:
                (result,) = {space.to_host(array).tobytes() for array in arrays}
                results.append(result)
            return results

        def body(transport):
            rank = transport.rank
            space, fatal = spaces[rank], []
            engine = Engine(threaded=False, on_fatal=fatal.append)
            engine.serve(hosts[rank].listen(), "counters")
            means = Means(Group(transport, range(self.size)), Spaces(device=space), hosts[rank])
            running = []
            for key in range(self.keys):
                way = Ipc(means, KeyInfo(f"k{key}", key, (self.n,), self.dtype, space="device"), placement, places[key])
                running.append(engine.start(rounds(way, space, rank, key), f"k{key}"))
            for one in (*running, hosts[rank].close):
                request = one if isinstance(one, Running) else one()
                engine.wait(request, 20.0, lambda: StallError(f"rank {rank}"))
            assert not fatal
            space.pool.close()
            return [one.result for one in running]

        return spawn(self.size, body)

    def check(self) -> Case:
        """All ranks have the expected bits, and no byte has left device memory."""
        expected = [[self.expected(round_, key).tobytes() for round_ in range(self.rounds)] for key in range(self.keys)]
        assert self.run() == [expected] * self.size
        for counts in self.counts if self.keys == 1 else ():
            assert not any(n for name, n in counts.items() if "host" in name), counts
        return self


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4, 5])


@SIZES
@pytest.mark.parametrize("n", [0, 1, 7, 1001, 70_001])
def test_sizes(size: int, n: int) -> None:
    Case(size, n, seed=size + n).check()


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_dtypes(size: int, dtype: np.dtype) -> None:
    Case(size, 1001, dtype=dtype, outs=1).check()


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(op: str) -> None:
    for dtype in (F32, BFLOAT16, np.dtype(np.float64)):
        Case(3, 100, dtype=dtype, op=REDUCTIONS[op]).check()


@pytest.mark.parametrize("gpus", [2, 3])
def test_gpus_that_read_each_others_memory(gpus: int) -> None:
    Case(gpus + 1, 1001, gpus=gpus, outs=1).check()


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_one_owner_of_everything(owner: int) -> None:
    Case(3, 500, bounds=whole_bounds(500, 3, owner), rounds=5, seed=owner).check()


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.25), (3.0, 3.0, 7.0)])
@pytest.mark.parametrize("dtype", [F32, np.dtype(np.float16)], ids=str)
def test_labels_with_different_factors(factors: tuple[float, ...], dtype: np.dtype) -> None:
    Case(3, 101, dtype=dtype, factors=factors, rounds=3).check()


@pytest.mark.parametrize("seed", range(12))
def test_rounds_in_a_row(seed: int) -> None:
    """Memory is used again and again, of arrays of different lengths in the same chunks, with no other order."""
    Case(2 + seed % 4, 600 + seed, rounds=12, keys=3, seed=seed, outs=seed % 2).check()


@pytest.mark.parametrize("outs", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_counts(size: int, outs: int) -> None:
    """Each rank: the sum of its part; its update, a copy here; the parts of the others; the value to each of outs."""
    case = Case(size, 40 * size, outs=outs).check()
    part_bytes = 40 * 4
    for counts in map(Counter, case.counts):
        copies = 1 + (size - 1) + outs
        assert counts["launches"] == 1
        assert counts["device_to_device"] == copies
        assert counts["device_to_device_bytes"] == part_bytes * (copies - outs + size * outs)
        assert counts["peer"] == counts["exports"] == counts["opens"] == counts["allocations"] == 0


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_counts_of_half_precision(size: int, dtype: np.dtype) -> None:
    """The sum reads the halves of all ranks, and is rounded into the value; what is copied are halves."""
    case = Case(size, 40 * size, dtype=dtype, outs=1).check()
    for counts in map(Counter, case.counts):
        assert counts["launches"] == 2
        assert counts["device_to_device"] == (size - 1) + 1
        assert counts["device_to_device_bytes"] == 2 * 40 * (size - 1 + size)


def test_copies_between_gpus_bring_each_byte_once() -> None:
    case = Case(2, 80, gpus=2, outs=2).check()
    for counts in case.counts:
        assert (counts["peer"], counts["peer_bytes"]) == (1, 40 * 4)
