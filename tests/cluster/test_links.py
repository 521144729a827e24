"""Allreduce between hosts with shaped links: right sums, and every byte over a link once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jobs
import pytest
from namespaces import Network, missing, network

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())

RATE_MBIT = 200
N = 1_260_000  # elements, 5 MB: 0.2 to 0.4 s on the link; divides evenly over every layout here
PROGRAM = str(Path(__file__).with_name("exchange.py"))
MOST = 1.01  # MPI's own headers, barriers, and what TCP sends twice
# MPI and the ranks of each host
JOBS = (
    ("openmpi", (1, 1, 1)),
    ("openmpi", (2, 2)),
    ("openmpi", (3, 1)),
    ("openmpi", (2, 2, 2)),
    ("mpich", (1, 1)),
    ("mpich", (2, 2)),
    ("mpich", (2, 2, 2)),
)


def exchanged(hosts: Network, kind: str, ranks: tuple[int, ...], n: int, rounds: int) -> dict[str, dict[str, float]]:
    mpi = jobs.find_mpi(kind)
    if mpi is None:
        pytest.skip(f"no {kind} in any known environment")
    command = ["python", PROGRAM, str(n), str(rounds)]
    job = jobs.mpirun(sum(ranks), command, mpi=hosts.mpi(mpi), options=hosts.options(mpi, ranks), timeout_s=60)
    assert (job.status, job.ranks_left) == (0, []), job.output
    found = re.search(r"found (\{.*\})", job.stdout)
    assert found is not None, job.output
    return json.loads(found[1])


@pytest.mark.parametrize(("kind", "ranks"), JOBS, ids=str)
def test_every_byte_crosses_the_link_once(kind: str, ranks: tuple[int, ...]) -> None:
    with network(len(ranks), RATE_MBIT) as hosts:
        found = exchanged(hosts, kind, ranks, N, 2)
    least_bytes = 2 * (len(ranks) - 1) * N * 4 / len(ranks)
    ratios = {host: n_bytes / least_bytes for host, n_bytes in found["sent"].items()}
    assert len(ratios) == len(ranks)
    assert all(1 <= ratio <= MOST for ratio in ratios.values()), ratios
    assert found["choice"] == ("ring" if max(ranks) == 1 else "hierarchical")


def test_short_values_too() -> None:
    with network(3) as hosts:
        for n in (1, 1000):
            exchanged(hosts, "mpich", (1, 2, 1), n, 2)


def processes_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and path.parts[2] != str(os.getpid()):
            found.append(line)
    return found


def test_a_host_is_a_world_of_its_own() -> None:
    with network(2) as hosts:
        folder = str(hosts.folder)
        (hosts.folder / "seen").mkdir()
        for host in hosts.hosts:
            hosts.run(host, "sh", "-c", f'hostname > {folder}/seen/$(hostname); touch /dev/shm/mine-"$(hostname)"')
        assert sorted(path.name for path in (hosts.folder / "seen").iterdir()) == ["h1", "h2"]
        assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("mine-h")]
        assert hosts.run(hosts[0], "ls", "/dev/shm").split() == ["mine-h1"]
        before = hosts[0].sent_bytes()
        hosts.run(hosts[1], "python3", "-c", "import socket; socket.socket(2, 2).sendto(bytes(1000), ('h1', 9))")
        assert hosts[0].received_bytes() >= 1000
        assert hosts[1].sent_bytes() >= 1000
        assert hosts[0].sent_bytes() >= before
    assert not Path(folder).exists()
    assert processes_with(folder) == []


def test_nothing_is_left_of_hosts_whose_test_failed() -> None:
    made: list[Network] = []

    def fails() -> None:
        with network(2) as hosts:
            made.append(hosts)
            started = hosts.start(hosts[0], "sh", "-c", f"echo; sleep 1000.{os.getpid()}")
            assert started.stdout is not None
            started.stdout.readline()
            assert processes_with(f"1000.{os.getpid()}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    (hosts,) = made
    assert not hosts.folder.exists()
    assert processes_with(str(hosts.folder)) == []
    assert processes_with(f"1000.{os.getpid()}") == []
    assert jobs.have_ended([host.pid for host in hosts.hosts])
