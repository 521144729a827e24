"""Statistics and limits of the benchmark: pure functions against numbers worked out by hand."""

from __future__ import annotations

import pytest

from mpikv.commands.bench.device import DeviceRates, Sharing, limit_of, staged_limit
from mpikv.commands.bench.limits import Limit, Rates, allreduce_limit, server_limit, work_bytes
from mpikv.commands.bench.measure import MAX_ITERATIONS, MIN_ITERATIONS, iterations_for, summary

INFINITE = float("inf")


def test_summary() -> None:
    found = summary([5.0, 1.0, 2.0, 4.0, 3.0])
    p95_s = pytest.approx(4.8)  # four fifths of the way from the fourth to the fifth
    assert found == {"iterations": 5, "median_s": 3.0, "p95_s": p95_s, "min_s": 1.0, "max_s": 5.0}


@pytest.mark.parametrize(
    ("n_bytes", "per_host", "hosts", "added", "copied"),
    [
        (1000, 2, 1, 500, 500),  # add one half, copy the other half
        (1200, 4, 1, 900, 900),
        (1000, 1, 1, 0, 0),
        (1000, 2, 2, 500 + 250, 500),  # a half of the neighbour's, and a quarter of another host's
        (1000, 1, 4, 750, 0),
    ],
)
def test_work(n_bytes: int, per_host: int, hosts: int, added: float, copied: float) -> None:
    assert work_bytes(n_bytes, per_host, hosts) == (added, copied)


ALLREDUCES = [
    # 1 GB, two ranks: half of it copied at 1 GB/s and half of it added at 2 GB/s; piece by piece is slower.
    ((10**9, 2, 2, 1), Rates(1e-6, 2e9, 1e9, 1e8), Limit(0.75, "memory")),
    ((10**9, 2, 2, 1), Rates(1e-6, 1e9, 2e9, 1e8), Limit(0.75, "add")),
    ((10**9, 2, 2, 1), Rates(1e-6, 1e9, 2e9, 4e9), Limit(0.25, "add")),  # piece by piece is faster
    # Four hosts at 25 MB/s (200 Mbit/s): 1.5 times 25 MB take 1.5 s.
    ((25_000_000, 4, 1, 4), Rates(1e-6, 1e10, 1e10, 1e10, 25e6), Limit(1.5, "link")),
    ((25_000_000, 8, 2, 4), Rates(1e-6, 1e10, 1e10, 1e10, 25e6), Limit(1.5, "link")),
    ((10**9, 1, 1, 1), Rates(0.0, INFINITE, INFINITE, INFINITE), Limit(0.0, "latency")),  # one rank has no limit
]
# Short values: one way of a ping-pong for each doubling of the ranks.
ALLREDUCES += [
    ((4, ranks, ranks, 1), Rates(2e-6, 1e9, 1e9, 1e9), Limit(steps * 2e-6, "latency"))
    for ranks, steps in ((2, 1), (3, 2), (4, 2), (5, 3), (8, 3))
]


@pytest.mark.parametrize(("arguments", "rates", "limit"), ALLREDUCES)
def test_allreduces(arguments: tuple[int, int, int, int], rates: Rates, limit: Limit) -> None:
    """arguments: bytes, ranks, ranks on the fullest host, hosts."""
    assert allreduce_limit(*arguments, rates) == limit


def test_servers() -> None:
    rates = Rates(1e-6, 1e9, 2e9, 1e9, 1e8)
    # Two workers, one server: one contribution added, one copied, two answers copied at the same time.
    assert server_limit(10**9, 2, 1, 0, rates) == (1.0 + 1.0, "add")
    assert server_limit(10**9, 1, 1, 0, rates) == (1.0, "memory")
    assert server_limit(4, 2, 1, 0, rates) == (2e-6, "latency")
    # Two workers elsewhere send half of 100 MB each to each of two servers: 1 s at 100 MB/s.
    assert server_limit(10**8, 2, 2, 2, rates) == (1.0, "link")


def test_as_many_iterations_as_fit() -> None:
    assert iterations_for(0.5, 0.01) == 50
    assert iterations_for(0.5, 10.0) == MIN_ITERATIONS
    assert iterations_for(0.5, 0.0) == MAX_ITERATIONS


# --- GPUs

GPU = DeviceRates(1e-6, 10e-6, 1e12, 2e10, 4e10, 4e10)
ONE_GPU = Sharing(2, 2, 1)
SHORT_AND_LINKS = [
    (4, ONE_GPU, GPU, (pytest.approx(11e-6), "latency")),
    (4, Sharing(5, 5, 1), GPU, (pytest.approx(13e-6), "latency")),
    (10**9, Sharing(1, 1, 1), GPU, (0.0, "latency")),
    # Two hosts at 1 GB/s: 2 * 1/2 * 1 GB.
    (10**9, Sharing(2, 1, 2), GPU._replace(link_bytes_per_s=1e9), (1.0, "link")),
]


@pytest.mark.parametrize(("n_bytes", "among", "rates", "limit"), SHORT_AND_LINKS)
@pytest.mark.parametrize("what", ["ipc", "staged"])
def test_short_values_and_links_on_gpus(what: str, n_bytes: int, among: Sharing, rates: DeviceRates, limit) -> None:
    assert limit_of(what, n_bytes, among, rates) == limit


def test_long_values_on_gpus() -> None:
    """Two ranks of one GPU, 1 GB each: 4 GB are read and written, as in a copy of 2 GB."""
    for what in ("ipc", "ipc, zeros, sgd", "mpi", "nccl, zeros"):
        assert limit_of(what, 10**9, ONE_GPU, GPU) == (2e-3, "device")
    assert limit_of("ipc", 10**9, Sharing(4, 1, 1), GPU) == (1e-3, "device")
    # 1 GB down at 20 GB/s and up at 40 GB/s: 75 ms; both at once at 40 GB/s for the two together: 50 ms.
    for what in ("staged, out=", "host", "raw MPI"):
        assert limit_of(what, 10**9, ONE_GPU, GPU) == (0.05, "pinned")
    one_by_one = staged_limit(10**9, ONE_GPU, GPU._replace(both_bytes_per_s=1e10))
    assert one_by_one == (pytest.approx(0.075), "pinned")
