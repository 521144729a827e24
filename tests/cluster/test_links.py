"""Allreduce between hosts with shaped links: right sums, and every byte over a link once."""

from __future__ import annotations

import json
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
    pytest.param("openmpi", (1, 1, 1), marks=pytest.mark.cluster_full),
    pytest.param("openmpi", (2, 2), marks=pytest.mark.cluster_full),
    pytest.param("openmpi", (3, 1), marks=pytest.mark.cluster_full),
    pytest.param("openmpi", (2, 2, 2), marks=pytest.mark.cluster_full),
    pytest.param("mpich", (1, 1), marks=pytest.mark.cluster_full),
    ("mpich", (2, 2)),
    pytest.param("mpich", (2, 2, 2), marks=pytest.mark.cluster_full),
)


def exchanged(hosts: Network, kind: str, ranks: tuple[int, ...], n: int, rounds: int) -> dict[str, dict[str, float]]:
    mpi = jobs.find_mpi(kind)
    if mpi is None:
        pytest.skip(f"no {kind} in any known environment")
    command = ["python", PROGRAM, str(n), str(rounds)]
    job = jobs.mpirun(sum(ranks), command, mpi=hosts.mpi(mpi), options=hosts.options(mpi, ranks), timeout_s=60)
    job.check()
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


@pytest.mark.cluster_full
def test_short_values_too() -> None:
    with network(3) as hosts:
        for n in (1, 1000):
            exchanged(hosts, "openmpi", (1, 2, 1), n, 2)
