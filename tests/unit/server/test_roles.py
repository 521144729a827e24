"""Who is a server, from the hosts of the ranks as launchers number them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mpikv.errors import ConfigError
from mpikv.server.roles import Roles, assign


def test_no_servers():
    for placement in ("spread", "hosts", "last"):
        assert assign(["a"] * 3, 0, placement) == Roles((0, 1, 2), ())
        assert assign(["a"], 0, placement) == Roles((0,), ())


def test_last():
    assert assign(["a", "a", "b", "b"], 2, "last") == Roles((0, 1), (2, 3))


def test_spread_over_hosts():
    hosts = ["a", "a", "a", "b", "b", "b", "c", "c", "c"]
    assert assign(hosts, 3).servers == (2, 5, 8)
    assert assign(hosts, 6).servers == (1, 2, 4, 5, 7, 8)
    assert len({hosts[rank] for rank in assign(hosts, 2).servers}) == 2
    assert assign(["a", "b", "c"] * 2, 3).servers == (3, 4, 5)


# What launchers make of hosts and slots. Slurm: --distribution=block, cyclic, plane=2; SGE's parallel environments:
# $fill_up (blocks, the last host with the rest), $round_robin; mpirun with a host file of different slots.
LAYOUTS = {
    "slurm block 2x4": "aaaabbbb",
    "slurm cyclic 2x4": "abababab",
    "slurm plane=2 2x4": "aabbaabb",
    "slurm block, 5 tasks on 2 nodes": "aaabb",
    "slurm cyclic, 5 tasks on 2 nodes": "ababa",
    "sge fill_up, 2 slots each": "aabbc",
    "sge round_robin": "abcab",
    "slots 1, 3": "abbb",
    "slots 3, 1": "aaab",
    "one each": "abcd",
}


@pytest.mark.parametrize(
    ("layout", "one", "two"),
    [
        ("slurm block 2x4", (7,), (3, 7)),
        ("slurm cyclic 2x4", (7,), (6, 7)),
        ("slurm plane=2 2x4", (7,), (5, 7)),
        ("slurm block, 5 tasks on 2 nodes", (2,), (2, 4)),
        ("slurm cyclic, 5 tasks on 2 nodes", (4,), (3, 4)),
        ("sge fill_up, 2 slots each", (3,), (1, 3)),
        ("sge round_robin", (4,), (3, 4)),
        ("slots 1, 3", (3,), (2, 3)),
        ("slots 3, 1", (2,), (2, 3)),
        ("one each", (3,), (2, 3)),
    ],
)
def test_spread_on_what_launchers_make(layout, one, two):
    hosts = LAYOUTS[layout]
    assert assign(hosts, 1).servers == one
    assert assign(hosts, 2).servers == two


@pytest.mark.parametrize(
    ("layout", "works"),
    [
        ("slurm block 2x4", {0: (), 4: (4, 5, 6, 7)}),
        ("slurm cyclic 2x4", {0: (), 4: (1, 3, 5, 7)}),
        ("slurm plane=2 2x4", {0: (), 4: (2, 3, 6, 7)}),
        ("slurm block, 5 tasks on 2 nodes", {0: (), 2: (3, 4)}),
        ("sge fill_up, 2 slots each", {0: (), 1: (4,), 2: (2, 3), 3: (2, 3, 4)}),
        ("sge round_robin", {0: (), 1: (2,), 2: (1, 4), 3: (1, 2, 4)}),
        ("slots 1, 3", {0: (), 3: (1, 2, 3)}),
        ("slots 3, 1", {0: (), 1: (3,)}),
        ("one each", {0: (), 1: (3,), 2: (2, 3), 3: (1, 2, 3)}),
    ],
)
def test_hosts_of_their_own(layout, works):
    hosts = LAYOUTS[layout]
    for n in range(len(hosts)):
        if n in works:
            assert assign(hosts, n, "hosts").servers == works[n]
        else:
            with pytest.raises(ConfigError, match=rf"just {n} ranks.*work are {', '.join(map(str, works))} \("):
                assign(hosts, n, "hosts")


def test_the_last_hosts_that_fit():
    assert assign("aabbccdd", 4, "hosts").servers == (4, 5, 6, 7)
    assert assign("aabcccdd", 3, "hosts").servers == (2, 6, 7)  # d and b, the last ones that make three
    assert assign("abccddd", 2, "hosts").servers == (2, 3)


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


def test_rank_0_stays_a_worker():
    for hosts in (["a", "b", "c"], ["a", "b", "b"], ["a", "a", "b"], ["a"] * 3):
        for n in (0, 1, 2):
            assert 0 in assign(hosts, n).workers
            assert 0 in assign(hosts, n, "last").workers


def test_one_host():
    assert assign(["a"] * 5, 2) == Roles((0, 1, 2), (3, 4))


@pytest.mark.parametrize("n", [3, 4, 100])
@pytest.mark.parametrize("placement", ["spread", "hosts", "last"])
def test_no_worker_left(n, placement):
    with pytest.raises(ConfigError, match=rf"{n} servers among 3 ranks.*-n {n + 1}.*MPIKV_NUM_SERVERS"):
        assign(["a"] * 3, n, placement)


def test_what_is_no_request():
    with pytest.raises(ConfigError, match="-1 servers"):
        assign(["a"] * 3, -1)
    with pytest.raises(ConfigError, match="spread, hosts, last, not by 'first'"):
        assign(["a"] * 3, 1, "first")


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
    roles = assign(hosts, n)
    assert sorted(roles.workers + roles.servers) == list(range(len(hosts)))
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


@given(layouts(), st.data(), st.sampled_from(["spread", "hosts", "last"]))
def test_names_do_not_matter(hosts, data, placement):
    """Only which ranks share a host counts."""
    n = data.draw(st.integers(0, len(hosts) - 1))
    names = dict(zip(sorted(set(hosts)), data.draw(st.permutations("uvwxyz")), strict=False))
    try:
        roles = assign(hosts, n, placement)
    except ConfigError:
        with pytest.raises(ConfigError):
            assign([names[host] for host in hosts], n, placement)
        return
    assert assign([names[host] for host in hosts], n, placement) == roles


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_block_and_cyclic_agree(n_hosts, per_host, data):
    """The same number of servers on each host, however equal hosts are numbered, but for the order of the hosts."""
    n = data.draw(st.integers(0, n_hosts * per_host - 1))
    assume(n_hosts * per_host > 1)
    block = [f"h{host}" for host in range(n_hosts) for _ in range(per_host)]
    cyclic = [f"h{host}" for _ in range(per_host) for host in range(n_hosts)]
    shares = [Counter(hosts[rank] for rank in assign(hosts, n).servers) for hosts in (block, cyclic)]
    assert shares[0] == shares[1]


def test_server_needs_no_mpi_for_help() -> None:
    done = subprocess.run([sys.executable, "-m", "mpikv.server", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "mpirun -n 4 python train.py : -n 2 python -m mpikv.server" in done.stdout
