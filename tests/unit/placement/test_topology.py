"""Which ranks share a host, and hosts that are only pretended."""

from __future__ import annotations

import pytest

from mpikv import ConfigError
from mpikv.placement.topology import pretended, topology


@pytest.mark.parametrize(
    ("names", "hosts", "host_of", "local_rank", "n_leaders"),
    [
        ("aabbb", ((0, 1), (2, 3, 4)), (0, 0, 1, 1, 1), (0, 1, 0, 1, 2), 2),
        ("babac", ((0, 2), (1, 3), (4,)), (0, 1, 0, 1, 2), (0, 0, 1, 1, 0), 1),  # ranks dealt out to hosts
    ],
)
def test_hosts_of_ranks(names, hosts, host_of, local_rank, n_leaders):
    found = topology(names)
    assert (found.hosts, found.host_of) == (hosts, host_of)
    assert (found.local_rank, found.n_leaders) == (local_rank, n_leaders)


def test_pretended_hosts_are_blocks_as_even_as_possible():
    assert pretended(["x"] * 4, 0) == ("x",) * 4
    assert pretended(["x"] * 4, 2) == ("x/0", "x/0", "x/1", "x/1")
    for size in range(1, 9):
        for n_hosts in range(1, size + 1):
            found = topology(pretended(["x"] * size, n_hosts))
            lengths = [len(ranks) for ranks in found.hosts]
            assert len(lengths) == n_hosts
            assert max(lengths) - min(lengths) <= 1
            assert [rank for ranks in found.hosts for rank in ranks] == list(range(size))


def test_more_hosts_than_ranks():
    with pytest.raises(ConfigError, match=r"MPIKV_TEST_HOSTS=4, but there are only 3 ranks"):
        pretended(["x"] * 3, 4)
