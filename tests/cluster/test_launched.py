"""`mpikv launch` on one host and on several with a real sshd: what it starts where, and what the ranks learn."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
import training
from batch_jobs import looping
from launching import host_file, launch, launched
from namespaces import Network
from needs import find

full = pytest.mark.cluster_full


# ---- training


@full
@pytest.mark.parametrize(("launcher", "servers"), [("mpi", 2), ("ssh", 0)])
def test_training_on_three_hosts(  # noqa: PLR0917
    ssh_hosts: Network,
    mpi: jobs.Mpi,
    launcher: str,
    servers: int,
    images: Path,
    learned: Callable[..., training.Weights],
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights.npz"
    with ssh_hosts.nothing_left():
        options = ["-n", 4, "-s", servers, "-H", host_file(ssh_hosts), "--launcher", launcher]
        job = launch(ssh_hosts, mpi, options, training.command(images, weights), **training.SAME_BITS)
    job.check()
    training.assert_same_bits(training.read(weights), learned(4))
    assert re.search(r"^\[worker 0 @ h\d\] accuracy", job.stdout, re.M), job.output


# ---- what runs where


def running_on(hosts: Network) -> dict[str, list[int]]:
    count = {}
    for host in hosts.hosts:
        others = re.compile(r"quick\.py|mpirun|mpikv launch")  # they have the command among their arguments
        lines = [line for line in hosts.processes(host).values() if not others.search(line)]
        of_host = [sum(bool(re.search(what, line)) for line in lines) for what in (r"looping\.py", r"mpikv\.server")]
        count[host.name] = of_host
    return count


@pytest.mark.parametrize(
    ("kind", "workers", "servers", "entry", "expected"),
    [
        pytest.param("mpich", 4, 2, "{name}", {"h1": [1, 1], "h2": [1, 1], "h3": [2, 0]}),
        pytest.param("openmpi", 4, 2, "{name} slots=2", {"h1": [1, 1], "h2": [1, 1], "h3": [2, 0]}, marks=full),
        pytest.param("mpich", 5, 0, "{name}:2", {"h1": [2, 0], "h2": [2, 0], "h3": [1, 0]}, marks=full),
        pytest.param("openmpi", 3, 3, "{name}", {"h1": [1, 1], "h2": [1, 1], "h3": [1, 1]}, marks=full),
    ],
)
def test_processes_cycle_through_the_hosts(  # noqa: PLR0917
    ssh_hosts: Network, kind: str, workers: int, servers: int, entry: str, expected: dict[str, list[int]]
) -> None:
    """As MXNet's launcher does: process i, servers first, on host i modulo their number."""
    options = ["-n", workers, "-s", servers, "-H", host_file(ssh_hosts, entry)]
    with ssh_hosts.nothing_left(), launched(ssh_hosts, find(kind), options, looping("forever")) as running:
        for worker in range(workers):
            running.wait_for(rf"\[worker {worker} @ h\d\] worker {worker} of {workers} is")
        assert running_on(ssh_hosts) == expected
        running.kill(running.pid, signal.SIGTERM)
    assert running.result.ranks_left == []


@full
def test_oversubscribed_when_asked_for(ssh_hosts: Network, mpi: jobs.Mpi) -> None:
    options = ["-n", 7, "-s", 0, "-H", host_file(ssh_hosts, "{name} slots=2"), "--oversubscribe"]
    with ssh_hosts.nothing_left(), launched(ssh_hosts, mpi, options, looping("exits")) as running:
        running.wait_for(r"worker 6 of 7 is")
    assert running.result.status == 3
