"""Whole jobs whose workers give different batch sizes, or different rates, by each way that gradients can go."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import mpirun

PROGRAM = str(Path(__file__).with_name("labels_program.py"))
LIMIT_S = 60
WAYS = {
    "memory": {},
    "native": {"MPIKV_ALGORITHM": "native"},
    "hosts": {"MPIKV_TEST_HOSTS": "2"},
    "servers": {"MPIKV_NUM_SERVERS": "1"},
}


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("mpi", "way", "workers"),
    [
        *(("mpich", way, 3) for way in ("memory", "native", "hosts")),
        ("openmpi", "servers", 2),
    ],
    indirect=["mpi"],
)
def test_each_gradient_counts_with_its_own_batch_size(mpi, way: str, workers: int) -> None:
    ranks = workers + (way == "servers")
    job = mpirun(ranks, ["python", PROGRAM, "sizes"], env=WAYS[way], timeout_s=LIMIT_S, mpi=mpi)
    assert (job.status, job.stdout.count("right")) == (0, workers), job.output


@pytest.mark.parametrize(
    ("mpi", "way", "case"),
    [("mpich", "hosts", "store"), ("openmpi", "servers", "workers")],
    indirect=["mpi"],
)
def test_different_rates_end_the_job(mpi, way: str, case: str) -> None:
    job = mpirun(3, ["python", PROGRAM, case], env=WAYS[way], timeout_s=LIMIT_S, mpi=mpi)
    assert not job.timed_out, job.output
    assert job.status != 0, job.output
    assert "right" not in job.stdout, job.output
    assert "learning_rate=0.5; worker 1 on" in job.output, job.output
    assert ": learning_rate=0.75" in job.output, job.output
