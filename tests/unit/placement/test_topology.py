"""Which ranks share a host, and hosts that are only pretended."""

from __future__ import annotations

import pytest

from mpikv import ConfigError
from mpikv.placement.topology import pretended, topology


def test_blocks_of_ranks():
    found = topology(["a", "a", "b", "b", "b"])
    assert found.hosts == ((0, 1), (2, 3, 4))
    assert found.host_of == (0, 0, 1, 1, 1)
    assert found.local_rank == (0, 1, 0, 1, 2)
    assert found.n_leaders == 2


def test_ranks_dealt_out_to_hosts():
    found = topology(["b", "a", "b", "a", "c"])
    assert found.hosts == ((0, 2), (1, 3), (4,))
    assert found.host_of == (0, 1, 0, 1, 2)
    assert found.local_rank == (0, 0, 1, 1, 0)
    assert found.n_leaders == 1


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
