"""Jobs whose workers have GPUs, made of host memory: they settle on one path, and end in order. Real `mpirun`."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Mpi, mpirun

PROGRAM = str(Path(__file__).with_name("device_path_program.py"))


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_path_that_does_not_work_is_given_up_by_all(mpi: Mpi, hosts: int) -> None:
    """The wheels' MPI takes no device memory, and workers that share a GPU have no NCCL: between hosts a warning says
    why values are copied.
    """
    closes = "closes" if mpi.kind == "mpich" else "stays"
    env = {"MPIKV_TEST_HOSTS": str(hosts)}
    job = mpirun(3, ["python", PROGRAM, closes], env=env, mpi=mpi)
    job.check()
    assert "sum [9.0] path host" in job.stdout
    assert "'nccl': 'NCCL needs a GPU for each worker" in job.stdout
    assert "'mpi': 'on " in job.stdout
    assert job.output.count("Warning") == (hosts > 1)
    assert job.output.count("UserWarning: mpikv: arrays on GPUs are copied through host memory") == (hosts > 1)
