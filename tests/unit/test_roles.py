"""Who is a server."""

from __future__ import annotations

import pytest

from mpikv.errors import ConfigError
from mpikv.server.roles import Roles, assign


def test_no_servers():
    assert assign(["a"] * 3, 0) == Roles((0, 1, 2), ())


def test_last():
    assert assign(["a", "a", "b", "b"], 2, "last") == Roles((0, 1), (2, 3))


def test_spread_over_hosts():
    hosts = ["a", "a", "a", "b", "b", "b", "c", "c", "c"]
    assert assign(hosts, 3).servers == (2, 5, 8)
    assert assign(hosts, 6).servers == (1, 2, 4, 5, 7, 8)
    assert len({hosts[rank] for rank in assign(hosts, 2).servers}) == 2
    assert assign(["a", "b", "c"] * 2, 3).servers == (3, 4, 5)


def test_rank_0_stays_a_worker():
    for hosts in (["a", "b", "c"], ["a", "b", "b"], ["a", "a", "b"], ["a"] * 3):
        for n in (0, 1, 2):
            assert 0 in assign(hosts, n).workers
            assert 0 in assign(hosts, n, "last").workers


def test_one_host():
    assert assign(["a"] * 5, 2) == Roles((0, 1, 2), (3, 4))


@pytest.mark.parametrize("n", [3, 4, 100])
@pytest.mark.parametrize("placement", ["spread", "last"])
def test_no_worker_left(n, placement):
    with pytest.raises(ConfigError, match=rf"{n} servers among 3 ranks.*-n {n + 1}.*MPIKV_NUM_SERVERS"):
        assign(["a"] * 3, n, placement)
