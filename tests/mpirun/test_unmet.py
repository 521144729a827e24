"""One rank does not come to MPI_Init, where the others go and wait for it: the job ends all the same.

If it finds something wrong before, they would wait for ever with MPICH, and with Open MPI mpirun may: the rank must
have come to MPI_Init before it ends. If it never comes, they tell.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import mpirun

PROGRAM = str(Path(__file__).with_name("unmet_program.py"))
LIMIT_S = 60
CASES = {
    "unknown type": "ValueError: unknown type of store 'dist_asink'",
    "variable is no number": "ConfigError: MPIKV_TIMEOUT_S='ten' is not a number",
    "no such interface": "InterfaceError: MPIKV_INTERFACE=absent0: .* has no such interface",
    "others never come": "ConfigError: MPIKV_TIMEOUT_S='ten' is not a number",
}


@pytest.mark.parametrize("case", [*CASES, "caught", "never comes"])
def test_ends_and_says_why(mpi, case: str) -> None:
    limit = {"MPIKV_TIMEOUT_S": "2"} if case == "never comes" else {}
    job = mpirun(3, ["python", PROGRAM, case], env=limit, timeout_s=LIMIT_S, mpi=mpi)
    job.check(None)
    assert "survived" not in job.stdout, job.output
    if case == "never comes":
        assert re.search(r"\[rank [02] of 3 on \S+\] StallError: .* waited 3 s in MPI_Init for the other", job.output)
    elif case in CASES:
        (line,) = re.findall(r"^mpikv: error: \[rank 1 of 3 on [^\s\]]+\] (.*)$", job.output, re.MULTILINE)
        assert re.match(CASES[case] + r".* \(tests/mpirun/unmet_program.py:\d+\)$", line), job.output
        assert "Traceback" not in job.output
        assert job.status == 2
    if mpi.kind == "openmpi" and case != "others never come":
        assert "rank 0 comes" in job.stdout, job.output
        assert "rank 2 comes" in job.stdout, job.output


@pytest.mark.parametrize(("errors", "handler"), [("exception", "ERRORS_RETURN"), ("fatal", "ERRORS_ARE_FATAL")])
def test_mpi_is_as_mpi4py_would_have_left_it(mpi, errors: str, handler: str) -> None:
    """Begun through ctypes, it has mpi4py's error handlers, and is ended by mpi4py: mpirun would complain."""
    code = (
        f"import mpi4py; mpi4py.rc.errors = {errors!r}; from mpikv.runtime import library; library.prepare()\n"
        "from mpi4py import MPI\n"
        f"assert all(comm.Get_errhandler() == MPI.{handler} for comm in (MPI.COMM_WORLD, MPI.COMM_SELF))\n"
        "assert MPI.COMM_WORLD.allreduce(1) == 2"
    )
    job = mpirun(2, ["python", "-c", code], timeout_s=LIMIT_S, mpi=mpi)
    assert (job.status, job.output, job.ranks_left) == (0, "", [])
