"""The links of hosts, measured over thread ranks: streams of all hosts at once, one of each host, end by themselves."""

from __future__ import annotations

import pytest

from mpikv.create import link_trial
from mpikv.placement.links import LinkRates
from mpikv.testing.ranks import Gathering, spawn
from mpikv.transports.base import Transport


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabbcdd", "abab"])
def test_all_ranks_find_the_same(hosts: str) -> None:
    gathering = Gathering(len(hosts))

    def body(transport: Transport) -> LinkRates:
        return link_trial.measured(transport, gathering.of(transport.rank), 30.0)

    found = spawn(len(hosts), body, hosts=list(hosts))
    assert len(set(found)) == 1
    assert [host for host, _ in found[0].by_host] == list(dict.fromkeys(hosts))
    assert all(rate > 0 for _, rate in found[0].by_host)
    assert found[0].latency_s > 0
