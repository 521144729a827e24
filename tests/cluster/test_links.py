"""Allreduce between hosts with shaped links: right sums, and every byte over a link once."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
from namespaces import missing, network
from needs import find

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


@pytest.mark.parametrize(("kind", "ranks"), JOBS, ids=str)
def test_every_byte_crosses_the_link_once(kind: str, ranks: tuple[int, ...]) -> None:
    mpi, command = find(kind), ["python", PROGRAM, str(N), "2"]
    with network(len(ranks), RATE_MBIT) as hosts:
        job = jobs.mpirun(sum(ranks), command, mpi=hosts.mpi(mpi), options=hosts.options(mpi, ranks))
    job.check()
    found = json.loads(job.stdout.partition("found ")[2])
    least_bytes = 2 * (len(ranks) - 1) * N * 4 / len(ranks)
    ratios = {host: n_bytes / least_bytes for host, n_bytes in found["sent"].items()}
    assert len(ratios) == len(ranks)
    assert all(1 <= ratio <= MOST for ratio in ratios.values()), ratios
