"""Host files, the hosts of an allocation, and which host gets which rank."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.commands.launch.hosts import (
    Host,
    allocated,
    allocated_shell,
    counts,
    expand,
    in_allocation,
    is_here,
    parse,
    read,
)
from mpikv.commands.launch.ranks import RankBlock, per_host, place
from mpikv.errors import ConfigError


def test_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# the cluster\n\nh1\nh2:3\n  h3 slots=4   # new\nroot@10.0.0.7:2\nh5 slots=2 max_slots=8\n[fd00::1]:2\n"
        "h6 user=me\nh7 max-slots=3\n"
    )
    assert read(path) == [
        Host("h1"), Host("h2", 3), Host("h3", 4), Host("10.0.0.7", 2, "root"), Host("h5", 2), Host("[fd00::1]", 2),
        Host("h6", None, "me"), Host("h7", 3),
    ]  # fmt: skip


def test_named_twice(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h1:2\nh2\nh1:3\nh2\n")
    assert read(tmp_path / "hosts") == [Host("h1", 5), Host("h2", 2)]
    assert read("h1,h2:2,h1") == parse("h1,h2:2,h1") == [Host("h1", 2), Host("h2", 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h1\nh2 slot=4\n", r":2: 'slot=4' is none of slots=NUMBER"),
        ("h1:x\n", r":1: 'h1:x' is no host"),
        ("h 2\n", r":1: '2' is none of"),
        ("-oProxyCommand=x\n", r":1: '-oProxyCommand=x' is no host"),
        ("h1;reboot\n", "is no host"),
        ("h1:0\n", "'h1:0' has no slots"),
        ("h1:2222\n", "A port belongs into --ssh 'ssh -p 2222'"),
        ("# nothing\n\n", "names no host"),
        ("a@h1\nb@h1\n", "two users"),
        ("h1 user=-oProxyCommand=x\n", "'user=-oProxyCommand=x' is none of"),
        ("h1 user=a;reboot\n", "is none of"),
        ("h1 user=$(x)\n", "is none of"),
        ("-l@h1\n", "is no host"),
        ("h\u00e9\n", "is no host"),
    ],
)
def test_bad_lines(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no text"):
        read(tmp_path / "binary")
    with pytest.raises(ConfigError, match="-H h1,,h2: '' is no host"):
        parse("h1,,h2")


def test_this_machine() -> None:
    assert is_here("localhost")
    assert is_here(socket.gethostname())
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")  # RFC 5737: no machine's
    assert not is_here("no-such-host.invalid")


def of_each_host(blocks: list[RankBlock]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for block in blocks:
        workers, servers = found.get(block.host, (0, 0))
        is_worker = block.role == "worker"
        found[block.host] = (workers + block.ranks * is_worker, servers + block.ranks * (not is_worker))
    return found


def test_mxnets_placement() -> None:
    hosts = [Host("h1"), Host("h2"), Host("h3")]
    assert of_each_host(place(hosts, 2, 2)) == {"h1": (1, 1), "h2": (0, 1), "h3": (1, 0)}
    assert of_each_host(place(hosts, 7, 1)) == {"h1": (2, 1), "h2": (3, 0), "h3": (2, 0)}
    assert place(hosts, 1, 1) == [RankBlock("worker", 1, 0, 0, "h2"), RankBlock("server", 1, 0, 1, "h1")]


def test_slots_are_respected() -> None:
    hosts = [Host("h1", 1), Host("h2", 4)]
    assert of_each_host(place(hosts, 4, 1)) == {"h2": (4, 0), "h1": (0, 1)}
    with pytest.raises(ConfigError, match=r"6 processes .* 2 hosts with 5 slots in all"):
        place(hosts, 5, 1)
    assert of_each_host(place(hosts, 9, 1, oversubscribe=True)) == {"h1": (1, 1), "h2": (8, 0)}
    assert of_each_host(place([Host("h1"), Host("h2", 2)], 6, 0)) == {"h1": (2, 0), "h2": (4, 0)}  # h1 has no limit


def test_without_hosts() -> None:
    assert place([], 3, 2) == [RankBlock("worker", 3, 0, 0, ""), RankBlock("server", 2, 0, 3, "")]
    assert place([], 3, 0) == [RankBlock("worker", 3, 0, 0, "")]
    assert per_host(place([], 3, 2)) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 20), st.integers(0, 20), st.booleans())
def test_every_rank_has_one_place(slots: list[int], workers: int, servers: int, limited: bool) -> None:
    hosts = [Host(f"h{i}", n if limited else None) for i, n in enumerate(slots)]
    blocks = place(hosts, workers, servers, oversubscribe=True)
    ranks = [block.first_rank + i for block in blocks for i in range(block.ranks)]
    assert ranks == list(range(workers + servers))
    for role, number in (("worker", workers), ("server", servers)):
        numbers = [block.first_number + i for block in blocks if block.role == role for i in range(block.ranks)]
        assert numbers == list(range(number))
    assert blocks[0].role == "worker"
    order = [block.host for block in blocks]
    assert order == sorted(order, key=order.index)  # a host's ranks follow each other
    assert sum(n for _, n in per_host(blocks)) == workers + servers
    if not limited:
        expected = [len(range(i, workers + servers, len(hosts))) for i in range(len(hosts))]
        assert dict(per_host(blocks)) == {f"h{i}": n for i, n in enumerate(expected) if n}


# --- an allocation


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-11],login", ["n08", "n09", "n10", "n11", "login"]),
        ("r[1-2]n[0-1]x,a-b[3]", ["r1n0x", "r1n1x", "r2n0x", "r2n1x", "a-b3"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_bad_node_lists() -> None:
    for text in ("n[a]", "n[3-1]", "n[1-b]", "-oProxyCommand=x,n1", "n1;x", "$(x)[1-2]", "n1 n2", "n\u00e9"):
        with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
            expand(text)


def test_slots_of_slurm() -> None:
    assert counts("4(x3),2") == [4, 4, 4, 2]
    assert counts("1") == [1]
    assert counts("") == counts("4(x") == counts("x") == []


def test_hosts_of_slurm() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-2],m1", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_CPUS_PER_NODE": "8(x3)"}
    assert allocated(environ) == [Host("n1", 2), Host("n2", 2), Host("m1", 1)]
    del environ["SLURM_TASKS_PER_NODE"]
    assert allocated(environ) == [Host("n1", 8), Host("n2", 8), Host("m1", 8)]
    environ["SLURM_JOB_CPUS_PER_NODE"] = "8"
    assert allocated(environ) == [Host("n1"), Host("n2"), Host("m1")]
    assert in_allocation(environ)


def test_hosts_of_grid_engine(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("h1 2 all.q@h1 UNDEFINED\nh2.site 4 all.q@h2 <NULL>\nh1 1 fast.q@h1 UNDEFINED\n")
    assert allocated({"PE_HOSTFILE": str(file)}) == [Host("h1", 3), Host("h2.site", 4)]
    for text in ("h1 many\n", "-lroot 2 all.q@h1 UNDEFINED\n", "h1;x 2 all.q@h1 UNDEFINED\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            allocated({"PE_HOSTFILE": str(file)})


def test_no_allocation() -> None:
    assert allocated({"SLURM_JOB_NODELIST": ""}) == allocated({}) == []
    assert not in_allocation({})
    assert in_allocation({"PBS_NODEFILE": "x"})


def test_remote_shells() -> None:
    assert allocated_shell({"SLURM_JOB_NODELIST": "n1"})[0] == "srun"
    # Grid Engine leaves what it is given in files that others can read: by -V that would be everything.
    assert allocated_shell({"PE_HOSTFILE": "x"}) == ("qrsh", "-inherit", "-nostdin", "-v", "PATH,LD_LIBRARY_PATH")
    assert allocated_shell({"PBS_NODEFILE": "x"}) == ()
