"""Signals that stop a job spare what its ranks have started: a rank needs its data loader for the last step.

By `mpikv launch` and a batch script, which send them to whole process groups, or to all that runs.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from jobs import Mpi
from test_batch_signals import run
from test_launch import launched

PROGRAM = str(Path(__file__).with_name("children_program.py"))


@pytest.mark.parametrize("way", ["batch script", signal.SIGTERM, signal.SIGUSR1])
def test_children_outlive_the_signal(mpi: Mpi, way: str | signal.Signals, tmp_path: Path) -> None:
    if isinstance(way, signal.Signals):
        env = {"MPIKV_STOP_SIGNALS": "TERM,USR1"}
        with launched(mpi, "-n", "2", "-s", "0", "--grace", "30", "python", PROGRAM, env=env) as running:
            for rank in range(2):
                running.wait_for(f"ready {rank} ")
            running.kill(running._process.pid, way)
        job = running.result
    else:
        job = run("sge/train.sh", mpi, tmp_path, "", "ready 1 ", program=PROGRAM)
    job.check()
    assert job.stdout.count("saved ") == 2, job.output
    assert "killed by signal" not in job.output, job.output
