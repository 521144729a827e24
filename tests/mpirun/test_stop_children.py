"""Signals that stop a job spare what its ranks have started: a rank needs its data loader for the last step.

By `mpikv launch`, plain `mpirun` and a batch script, which send them to whole process groups, or to all that runs.
"""

from __future__ import annotations

import signal
from pathlib import Path

import frameworks
import pytest
from jobs import Job, Mpi
from test_batch_signals import run
from test_launch import launched

PROGRAM = str(Path(__file__).with_name("children_program.py"))
# PyTorch is beside Open MPI here; what MPICH's mpirun does to children is seen without it.
CASES = pytest.mark.parametrize(
    ("mpi", "case"),
    [
        ("openmpi", "processes"),
        ("mpich", "processes"),
        pytest.param("openmpi", "model", marks=pytest.mark.thorough),
    ],
    indirect=["mpi"],
)


def check_saved(job: Job) -> None:
    assert not job.timed_out, job.output
    assert (job.status, job.ranks_left) == (0, []), job.output
    assert job.stdout.count("saved ") == 2, job.output
    assert "killed by signal" not in job.output, job.output


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
@CASES
def test_mpikv_launch(mpi: Mpi, case: str, signum: signal.Signals) -> None:
    if case == "model":
        frameworks.need("torch")
    env = {"MPIKV_STOP_SIGNALS": "TERM,USR1"}
    with launched(mpi, "-n", "2", "-s", "0", "--grace", "30", "python", PROGRAM, case, env=env) as running:
        for rank in range(2):
            running.wait_for(f"ready {rank} ")
        running.kill(running._process.pid, signum)
    check_saved(running.result)


@CASES
def test_batch_script(mpi: Mpi, case: str, tmp_path: Path) -> None:
    if case == "model":
        frameworks.need("torch")
    check_saved(run("sge/train.sh", mpi, tmp_path, case, "ready 1 ", program=PROGRAM))
