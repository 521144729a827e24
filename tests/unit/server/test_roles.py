"""Who is a server, from the hosts of the ranks as launchers number them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.config import PLACEMENTS
from mpikv.errors import ConfigError
from mpikv.server.roles import assign

# What launchers make of hosts and slots; the servers that `spread` takes where one and where two are asked for, and
# those of `hosts`, by their number. Slurm: --distribution=block, cyclic, plane=2; SGE's environments: $fill_up
# (blocks, the last host with the rest), $round_robin; mpirun with a host file of different slots.
LAYOUTS = {
    "slurm block 2x4": ("aaaabbbb", (7,), (3, 7), {4: (4, 5, 6, 7)}),
    "slurm cyclic 2x4": ("abababab", (7,), (6, 7), {4: (1, 3, 5, 7)}),
    "slurm plane=2 2x4": ("aabbaabb", (7,), (5, 7), {4: (2, 3, 6, 7)}),
    "slurm block, 5 tasks on 2 nodes": ("aaabb", (2,), (2, 4), {2: (3, 4)}),
    "slurm cyclic, 5 tasks on 2 nodes": ("ababa", (4,), (3, 4), {2: (1, 3)}),
    "sge fill_up, 2 slots each": ("aabbc", (3,), (1, 3), {1: (4,), 2: (2, 3), 3: (2, 3, 4)}),
    "sge round_robin": ("abcab", (4,), (3, 4), {1: (2,), 2: (1, 4), 3: (1, 2, 4)}),
    "slots 1, 3": ("abbb", (3,), (2, 3), {3: (1, 2, 3)}),
    "slots 3, 1": ("aaab", (2,), (2, 3), {1: (3,)}),
    "one each": ("abcd", (3,), (2, 3), {1: (3,), 2: (2, 3), 3: (1, 2, 3)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_launchers_make(layout):
    hosts, one, two, works = LAYOUTS[layout]
    assert (assign(hosts, 1).servers, assign(hosts, 2).servers) == (one, two)
    assert assign(hosts, 2, "last").servers == (len(hosts) - 2, len(hosts) - 1)
    works = {0: (), **works}
    for n in range(len(hosts)):
        if n in works:
            assert assign(hosts, n, "hosts").servers == works[n]
        else:
            with pytest.raises(ConfigError, match=rf"just {n} ranks.*work are {', '.join(map(str, works))} \("):
                assign(hosts, n, "hosts")


def test_numbers_that_work_are_named():
    with pytest.raises(ConfigError) as caught:
        assign(["a"] * 4 + ["b"] * 4 + ["c"] * 4, 5, "hosts")
    for part in ("work are 0, 4, 8 (", "a 4, b 4, c 4", "MPIKV_NUM_SERVERS", "spread"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"work are 0 \("):
        assign("aaa", 1, "hosts")
    many = [host for host in range(100) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"0, 2, 4, 6, 8, 10, 12, \.\.\., 198 \(.*, \.\.\.\)"):
        assign(list(map(str, many)), 3, "hosts")


@pytest.mark.parametrize(
    ("n", "placement", "text"),
    [
        *((3, placement, r"3 servers among 3 ranks.*-n 4.*MPIKV_NUM_SERVERS") for placement in PLACEMENTS),
        (100, "spread", r"100 servers among 3 ranks.*-n 101"),
        (-1, "spread", "-1 servers"),
        (1, "first", "spread, hosts, last, not by 'first'"),
    ],
)
def test_what_cannot_be(n, placement, text):
    with pytest.raises(ConfigError, match=text):
        assign("aaa", n, placement)


@st.composite
def layouts(draw):
    """Hosts of any sizes with their ranks in blocks, in turn, or in any order."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    order = draw(st.sampled_from(["block", "cyclic", "any"]))
    if order == "cyclic":
        return [f"h{host}" for turn in range(max(sizes)) for host, size in enumerate(sizes) if turn < size]
    block = [f"h{host}" for host, size in enumerate(sizes) for _ in range(size)]
    return draw(st.permutations(block)) if order == "any" else block


@given(layouts(), st.data())
def test_spread(hosts, data):
    """Just so many; rank 0 works; a host has two more than another only where that one has no more to give."""
    n = data.draw(st.integers(0, len(hosts) - 1))
    for roles in (assign(hosts, n, "last"), assign(hosts, n)):
        assert sorted(roles.workers + roles.servers) == list(range(len(hosts)))
        assert (roles.workers, roles.servers) == (tuple(sorted(roles.workers)), tuple(sorted(roles.servers)))
        assert (len(roles.servers), 0 in roles.workers) == (n, True)
    size, share = Counter(hosts), Counter(hosts[rank] for rank in roles.servers)
    for host in size:
        full = share[host] == size[host] - (host == hosts[0])
        assert full or max(share.values(), default=0) <= share[host] + 1


@given(layouts(), st.data())
def test_whole_hosts(hosts, data):
    """Against all sets of hosts: it finds one where there is one, whole, and without rank 0's host."""
    n = data.draw(st.integers(0, len(hosts) - 1))
    size = Counter(hosts)
    others = [host for host in size if host != hosts[0]]
    fitting = [
        {host for i, host in enumerate(others) if mask >> i & 1}
        for mask in range(2 ** len(others))
        if sum(size[host] for i, host in enumerate(others) if mask >> i & 1) == n
    ]
    try:
        servers = {hosts[rank] for rank in assign(hosts, n, "hosts").servers}
    except ConfigError:
        assert fitting == []
        return
    assert servers in fitting
    assert not servers & {hosts[rank] for rank in assign(hosts, n, "hosts").workers}
    assert len(assign(hosts, n, "hosts").servers) == n
    # The last hosts: of two sets the one that has the last host in which they differ.
    weight = {host: 2**i for i, host in enumerate(others)}
    assert sum(weight[host] for host in servers) == max(sum(weight[host] for host in one) for one in fitting)
