"""A program for Horovod runs with the import changed: process sets, join, compression objects, sparse gradients."""

from __future__ import annotations

from pathlib import Path

import frameworks
import pytest
from jobs import find_mpi, mpirun

PROGRAM = str(Path(__file__).with_name("horovod_program.py"))
LIMIT_S = 220  # each rank imports PyTorch, on a busy machine half a minute


@pytest.mark.thorough  # on thread ranks every run makes these calls
@pytest.mark.parametrize(
    ("ranks", "environment"),
    [
        (3, {}),
        (4, {"MPIKV_NUM_SERVERS": "1"}),
        pytest.param(3, {"MPIKV_SHARED_MEMORY": "off"}, marks=pytest.mark.full),
    ],
    ids=["workers", "server", "messages"],
)
def test_a_program_for_horovod(ranks: int, environment: dict[str, str]) -> None:
    frameworks.need("torch")
    environment = {"OMP_NUM_THREADS": "1", **environment}
    job = mpirun(ranks, ["python", PROGRAM], env=environment, timeout_s=LIMIT_S, mpi=find_mpi())
    job.check()
    assert job.stdout.count("all as Horovod has it") == 3, job.output
