"""Statistics and limits of the benchmark: pure functions against numbers worked out by hand."""

from __future__ import annotations

import pytest

from mpikv.commands.bench.counts import Counts, merge
from mpikv.commands.bench.limits import Rates, allreduce_limit, ring_bound_s, server_limit, work_bytes
from mpikv.commands.bench.measure import MAX_ITERATIONS, MIN_ITERATIONS, iterations_for
from mpikv.commands.bench.statistics import algbw, busbw, summarise

INFINITE = float("inf")


def test_summary() -> None:
    found = summarise([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.iterations, found.median_s, found.min_s, found.max_s) == (5, 3.0, 1.0, 5.0)
    assert found.p95_s == pytest.approx(4.8)  # four fifths of the way from the fourth to the fifth
    assert summarise([2.0]) == (1, 2.0, 2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="no iteration"):
        summarise([])


def test_bandwidths() -> None:
    assert algbw(3_000_000_000, 1.5) == 2.0
    assert busbw(3_000_000_000, 1.5, 2) == 2.0
    assert busbw(3_000_000_000, 1.5, 4) == 3.0
    assert busbw(3_000_000_000, 1.5, 1) == 0.0


def test_work_of_one_host() -> None:
    """Two ranks: add one half, copy the other half."""
    assert work_bytes(1000, 2, 1) == (500, 500)
    assert work_bytes(1200, 4, 1) == (900, 900)
    assert work_bytes(1000, 1, 1) == (0, 0)


def test_work_of_several_hosts() -> None:
    """Each of two ranks on each of two hosts adds a half of S of its neighbour, and a quarter of another host's."""
    assert work_bytes(1000, 2, 2) == (500 + 250, 500)
    assert work_bytes(1000, 1, 4) == (750, 0)


def test_memory_and_adders_bind_large_values() -> None:
    slow_copy = Rates(1e-6, 2e9, 1e9, 1e8)
    # 1 GB, two ranks: half of it copied at 1 GB/s and half of it added at 2 GB/s; piece by piece is slower.
    assert allreduce_limit(10**9, 2, 2, 1, slow_copy) == (0.75, "memory")
    slow_add = Rates(1e-6, 1e9, 2e9, 1e8)
    assert allreduce_limit(10**9, 2, 2, 1, slow_add) == (0.75, "add")


def test_piece_by_piece_may_be_faster() -> None:
    rates = Rates(1e-6, 1e9, 2e9, 4e9)
    assert allreduce_limit(10**9, 2, 2, 1, rates) == (0.25, "add")


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_latency_binds_small_values(ranks: int, steps: int) -> None:
    rates = Rates(2e-6, 1e9, 1e9, 1e9)
    assert allreduce_limit(4, ranks, ranks, 1, rates) == (steps * 2e-6, "latency")


def test_links_bind_across_hosts() -> None:
    rates = Rates(1e-6, 1e10, 1e10, 1e10, 25e6)
    # Four hosts at 25 MB/s (200 Mbit/s): 1.5 times 25 MB take 1.5 s.
    assert allreduce_limit(25_000_000, 4, 1, 4, rates) == (1.5, "link")
    assert allreduce_limit(25_000_000, 8, 2, 4, rates) == (1.5, "link")
    assert ring_bound_s(25_000_000, 2, 25e6) == 1.0


def test_one_rank_has_no_limit() -> None:
    assert allreduce_limit(10**9, 1, 1, 1, Rates(0.0, INFINITE, INFINITE, INFINITE)).time_s == 0


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


def test_counts_of_the_rank_with_most() -> None:
    found = merge([Counts(2, 10, 0, None, 7, 0), Counts(3, 5, 0, 4, 8, 0)])
    assert found == Counts(3, 10, 0, None, 8, 0)
