"""`mpikv info` under a real `mpirun`: the map is what a store then does, with 3 and with 5 ranks."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from jobs import find_mpi, mpirun

from mpikv.commands import models

PROGRAM = """
import sys
from mpikv.__main__ import main
assert main(["info", "--model", "resnet18"]) == 0
from mpi4py import MPI
from mpikv import kv
store = kv.create("dist_sync")
sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} is worker {store.rank}\\n")
sys.stdout.flush()
store.close()
"""
LINE = re.compile(r" +(\d+) +(\S+) +(worker|server) (\d+) +(\d+) +(\S+(?: \(visible: \S+\))?) +(.*)")


@pytest.mark.parametrize(
    ("kind", "n", "env"),
    [
        ("openmpi", 3, {"MPIKV_NUM_SERVERS": "1"}),
        ("mpich", 5, {"MPIKV_NUM_SERVERS": "2"}),
        ("mpich", 5, {"MPIKV_NUM_SERVERS": "2", "MPIKV_TEST_HOSTS": "3", "MPIKV_SERVER_PLACEMENT": "hosts"}),
        ("mpich", 3, {}),
    ],
)
def test_the_map_is_what_a_store_does(tmp_path: Path, kind: str, n: int, env: dict[str, str]) -> None:
    mpi = find_mpi(kind)
    if mpi is None:
        pytest.skip(f"no {kind} wheel here: scripts/test installs both")
    servers = int(env.get("MPIKV_NUM_SERVERS", "0"))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = mpirun(n, ["python", str(program)], env=env, mpi=mpi)
    assert (job.status, job.ranks_left) == (0, []), job.output
    found = [match.groups() for match in map(LINE.fullmatch, job.stdout.splitlines()) if match]
    assert [int(rank) for rank, *_ in found] == list(range(n))
    assert {host.split("/")[0] for _, host, *_ in found} == {socket.gethostname()}
    assert sum(role == "server" for _, _, role, *_ in found) == servers
    if "MPIKV_TEST_HOSTS" not in env:
        assert [int(local) for _, _, _, _, local, _, _ in found] == list(range(n))
    held = [int(match[1]) for *_, text in found if (match := re.search(r"(\d+) bytes", text))]
    # Servers on a host of their own share the keys with the workers.
    assert len(held) == (n if "MPIKV_TEST_HOSTS" in env else servers or n)
    assert sum(held) == 4 * models.values("resnet18")
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("rank "))
    assert said == [f"rank {rank} is worker {number}" for rank, _, role, number, *_ in found if role == "worker"]


def test_whole_hosts_that_do_not_fit() -> None:
    env = {"MPIKV_NUM_SERVERS": "2", "MPIKV_SERVER_PLACEMENT": "hosts"}
    job = mpirun(3, ["python", "-m", "mpikv", "info"], env=env)
    assert job.status != 0
    assert job.stdout.count("ERROR: MPIKV_SERVER_PLACEMENT=hosts") == 1
    assert "numbers that work are 0 " in job.stdout
