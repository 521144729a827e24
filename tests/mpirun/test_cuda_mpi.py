"""An Open MPI that is built for CUDA: what mpikv finds out about it, with a driver or without.

MPIKV_TEST_CUDA_MPI=PREFIX names one, as scripts/build_ompi_cuda makes it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from jobs import CUDA_MPI, Job, Mpi, mpirun

from mpikv.runtime import cuda_driver

HERE = Path(__file__).parent
PREFIX = os.environ.get(CUDA_MPI, "")
MPI = Mpi("openmpi", Path(PREFIX))
pytestmark = pytest.mark.skipif(
    not PREFIX, reason=f"no CUDA-aware Open MPI: scripts/build_ompi_cuda PREFIX makes one, {CUDA_MPI}=PREFIX names it"
)


def run(n: int, *arguments: str, **env: str) -> Job:
    env = {"MPI4PY_LIBMPI": f"{PREFIX}/lib/libmpi.so", "PYTHONPATH": f"{HERE.parents[1]}:{HERE}", **env}
    job = mpirun(n, ["python", *arguments], env=env, mpi=MPI, python=sys.executable, timeout_s=200)
    job.check()
    return job


def test_info() -> None:
    text = run(2, "-m", "mpikv", "info").stdout
    assert f" {Path(PREFIX).resolve()}/" in text  # the library's file
    (row,) = re.findall(r"^CUDA-aware MPI +(.*)$", text, re.MULTILINE)
    problem = cuda_driver.ask().problem
    if problem:
        assert row == f"no: {problem}"
    elif not cuda_driver.has_cupy():
        assert row == f"no: {cuda_driver.NO_CUPY}"
    else:
        assert row.startswith("yes: tried with 8 MiB on ")


def test_trials_with_it() -> None:
    job = run(2, str(HERE / "trial_program.py"), "Works=120", "Segments=120")
    assert [json.loads(line) for line in job.stdout.splitlines()] == [
        ["Works", True, "tried with 8 MiB"],
        ["Segments", False, "the trial failed: RuntimeError: 0 segments"],
    ]
