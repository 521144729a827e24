"""Right programs end in real jobs, too, with the right values; and nobody finds a circle in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import mpirun

PROGRAM = str(Path(__file__).with_name("waits_program.py"))
WAYS = {
    "hosts": (2, {"MPIKV_TEST_HOSTS": "2"}),
    "ring": (3, {"MPIKV_TEST_HOSTS": "3", "MPIKV_ALGORITHM": "ring"}),
    "calls": (2, {"MPIKV_TEST_HOSTS": "2", "MPIKV_PROGRESS": "calls"}),
    "divided": (
        3,
        {
            "MPIKV_TEST_HOSTS": "3",
            "MPIKV_NUM_SERVERS": "1",
            "MPIKV_SERVER_PLACEMENT": "last",
            "MPIKV_SERVERS_TAKE": "0.5",
        },
    ),
    "one host": (3, {}),
}


@pytest.mark.grid(1)
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_right_programs_end_with_the_right_values(mpi, way: str) -> None:
    ranks, env = WAYS[way]
    seeds = ["1"] if "MPIKV_NUM_SERVERS" in env else ["1", "2", "3"]
    settings = {"MPIKV_STALL_WARN_S": "1", "MPIKV_TIMEOUT_S": "40", **env}
    job = mpirun(ranks, ["python", PROGRAM, *seeds], env=settings, timeout_s=90, mpi=mpi)
    workers = ranks - int(env.get("MPIKV_NUM_SERVERS", "0"))
    assert (job.status, job.stdout.count("right")) == (0, workers), job.output
