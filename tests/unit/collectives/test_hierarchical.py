"""Allreduce over several hosts, on thread ranks: sums, bits, and bytes that cross a link once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mpikv.collectives import hierarchical
from mpikv.collectives.stages import LINK_WINDOW
from mpikv.placement.algorithms import LINK_SEGMENT_BYTES, bounds_of, choose
from mpikv.placement.keys import even_bounds, whole_bounds
from mpikv.placement.topology import topology
from mpikv.testing.ranks import run_collective
from mpikv.transports.threads import Fabric

# One letter for the host of each rank.
LAYOUTS = (
    "a", "aa", "ab", "aab", "abb", "aba", "aabb", "abab", "aaab", "abcd", "aabbc", "abcab", "aabbcc", "abcabc",
    "aaabbc", "aaaabbb", "aabbccdd", "abcdabcd", "aaaabbbb", "abbbbbbb", "abcdefgh", "aaabbbcc", "abcdea", "abcdeabc",
)  # fmt: skip
SIZES = (0, 1, 7, 1001)
HOSTS = pytest.mark.parametrize("hosts", LAYOUTS)


def contribution(rank: int, n: int, dtype: str) -> np.ndarray:
    return np.tile((np.arange(5) + rank % 3).astype(dtype), n // 5 + 1)[:n].copy()


def check(hosts: str, n: int, dtype: str, bounds: tuple[int, ...]) -> Fabric:
    expected = sum(contribution(rank, n, dtype) for rank in range(len(hosts)))  # small whole numbers, exact in all
    fabric = Fabric(len(hosts), hosts)

    def steps(group):
        buf = contribution(group.rank, n, dtype)
        yield from hierarchical.reduce_scatter(group, buf, bounds, 100)
        own = slice(bounds[group.rank], bounds[group.rank + 1])
        scattered = buf[own].copy()
        result = np.full(n, 99, dtype)
        result[own] = scattered
        yield from hierarchical.allgather(group, result, bounds, 101)
        return scattered, result

    for rank, (scattered, result) in enumerate(run_collective(len(hosts), steps, fabric=fabric)):
        own = slice(bounds[rank], bounds[rank + 1])
        np.testing.assert_array_equal(scattered, expected[own])
        np.testing.assert_array_equal(result, expected)
    return fabric


@HOSTS
@pytest.mark.parametrize("n", SIZES)
def test_sizes(hosts: str, n: int) -> None:
    check(hosts, n, "float32", bounds_of("hierarchical", n, hosts))
    check(hosts, n, "float32", even_bounds(n, len(hosts)))


@HOSTS
def test_around_what_is_short_and_more_segments_than_a_window(hosts: str) -> None:
    """Just above what is short some chunks have one segment and others none."""
    leaders = topology(hosts).n_leaders
    long = (LINK_WINDOW + 3) * (LINK_SEGMENT_BYTES // 4) * min(len(hosts), 3) + 5
    for n, dtype in ((hierarchical.SHORT_BYTES * leaders // 4 + 1, "float32"), (37, "int8"), (long, "float32")):
        check(hosts, n, dtype, bounds_of("hierarchical", n, hosts))


@pytest.mark.parametrize("hosts", [one for one in LAYOUTS if len(set(one)) > 1])
@pytest.mark.parametrize("n", [840, 840 * 200])
def test_every_byte_crosses_a_link_once(hosts: str, n: int) -> None:
    """840 elements divide evenly over any number of hosts and ranks here, so the count is exact, also of each rank."""
    h, fabric = len(set(hosts)), check(hosts, n, "float32", bounds_of("hierarchical", n, hosts))
    out, into = Counter(), Counter()
    for (source, dest), n_bytes in fabric.bytes_between.items():
        if hosts[source] != hosts[dest]:
            out[hosts[source]] += n_bytes
            into[hosts[dest]] += n_bytes
            out[source] += n_bytes
    expected = 2 * (h - 1) * n * 4 // h
    assert {host: (out[host], into[host]) for host in hosts} == dict.fromkeys(hosts, (expected, expected))
    if len({hosts.count(host) for host in hosts}) == 1:  # all ranks of a host share its link
        assert [out[rank] for rank in range(len(hosts))] == [expected // hosts.count(hosts[0])] * len(hosts)


@pytest.mark.parametrize("hosts", ["ab", "aab", "aabb", "aaabc", "abcab"])
@pytest.mark.parametrize("n", [13, 100_003])
def test_one_owner_of_everything(hosts: str, n: int) -> None:
    for owner in range(len(hosts)):
        check(hosts, n, "float32", whole_bounds(n, len(hosts), owner))


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_host_owns_the_same(hosts: str) -> None:
    for n in (0, 1, 5, 840):
        bounds = bounds_of("hierarchical", n, hosts)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, n, len(hosts) + 1)
        owned = [sum(bounds[r + 1] - bounds[r] for r in range(len(hosts)) if hosts[r] == host) for host in set(hosts)]
        assert sum(owned) == n
        assert max(owned) - min(owned) <= 1


def test_what_is_chosen() -> None:
    for n_bytes in (4, 1 << 10, 1 << 20, 1 << 28):
        assert choose(n_bytes, 4, hosts="aabb") == "hierarchical"
        assert choose(n_bytes, 4, hosts="abcb") == "hierarchical"
        assert choose(n_bytes, 4, hosts="aaaa") == choose(n_bytes, 4)
        assert choose(n_bytes, 4, "ring", "aabb") == "ring"
        assert choose(n_bytes, 4, hosts="abcd") in ("naive", "halving_doubling", "ring")
    assert choose(1 << 24, 2, hosts="ab") == "ring"
