"""The hosts of an allocation, from what Slurm and Grid Engine say."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpikv.commands.launch.allocation import counts, expand, hosts, inside, remote_shell
from mpikv.commands.launch.hosts import Host
from mpikv.errors import ConfigError


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


def test_counts() -> None:
    assert counts("4(x3),2") == [4, 4, 4, 2]
    assert counts("1") == [1]
    assert counts("") == counts("4(x") == counts("x") == []


def test_slurm() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-2],m1", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_CPUS_PER_NODE": "8(x3)"}
    assert hosts(environ) == [Host("n1", 2), Host("n2", 2), Host("m1", 1)]
    del environ["SLURM_TASKS_PER_NODE"]
    assert hosts(environ) == [Host("n1", 8), Host("n2", 8), Host("m1", 8)]
    environ["SLURM_JOB_CPUS_PER_NODE"] = "8"
    assert hosts(environ) == [Host("n1"), Host("n2"), Host("m1")]
    assert inside(environ)


def test_grid_engine(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("h1 2 all.q@h1 UNDEFINED\nh2.site 4 all.q@h2 <NULL>\nh1 1 fast.q@h1 UNDEFINED\n")
    assert hosts({"PE_HOSTFILE": str(file)}) == [Host("h1", 3), Host("h2.site", 4)]
    for text in ("h1 many\n", "-lroot 2 all.q@h1 UNDEFINED\n", "h1;x 2 all.q@h1 UNDEFINED\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            hosts({"PE_HOSTFILE": str(file)})


def test_none() -> None:
    assert hosts({"SLURM_JOB_NODELIST": ""}) == hosts({}) == []
    assert not inside({})
    assert inside({"PBS_NODEFILE": "x"})


def test_remote_shells() -> None:
    assert remote_shell({"SLURM_JOB_NODELIST": "n1"})[0] == "srun"
    # Grid Engine leaves what it is given in files that others can read: by -V that would be everything.
    assert remote_shell({"PE_HOSTFILE": "x"}) == ("qrsh", "-inherit", "-nostdin", "-v", "PATH,LD_LIBRARY_PATH")
    assert remote_shell({"PBS_NODEFILE": "x"}) == ()
