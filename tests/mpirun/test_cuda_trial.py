"""Whether MPI takes device memory, tried in a child of a rank: real children, whose memory needs no GPU."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import grids
import pytest
from jobs import CUDA_MPI, Mpi, mpirun

from mpikv.runtime import cuda_driver

HERE = Path(__file__).parent
PREFIX = os.environ.get(CUDA_MPI, "")
# The source, and for how long: a source that hangs for a short time, the others for longer than any machine takes.
SOURCES = ("Works=120", "WrongByte=120", "DevicePointer=120", "Hangs=4", "Segments=120")
# In these the library has a part: every run makes them with both, the others with MPICH, which starts a job faster.
OF_MPI = {"Works", "DevicePointer"}
EXPECTED = {
    "Works": [True, "tried with 8 MiB"],
    "WrongByte": [False, "of 8388608 bytes that were sent, others arrived"],
    "Hangs": [False, "the trial did not end within 4 s"],
    "Segments": [False, "the trial failed: RuntimeError: 0 segments"],
}


@pytest.mark.timeout(220)
def test_what_becomes_of_a_child(mpi: Mpi, tmp_path: Path) -> None:
    """Rank 0 of two makes the trials, and goes on whatever becomes of the children."""
    every = mpi.kind == "mpich" or grids.is_full()
    sources = [one for one in SOURCES if every or one.partition("=")[0] in OF_MPI]
    folders = dict.fromkeys(("TMPDIR", "HOME", "XDG_CACHE_HOME"), str(tmp_path))
    env = {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}", **folders}
    job = mpirun(2, ["python", str(HERE / "trial_program.py"), *sources], env=env, mpi=mpi, timeout_s=200)
    job.check()
    found = {said[0]: said[1:] for line in job.stdout.splitlines() if (said := json.loads(line))}
    pointer = found.pop("DevicePointer")
    if mpi.kind == "openmpi":
        assert pointer == [False, "the trial was ended by SIGSEGV"]
    else:  # MPICH itself ends a process that reads where no memory is
        assert pointer[0] is False
        assert "ended" in str(pointer[1])
    names = {one.partition("=")[0] for one in sources}
    assert found == {name: said for name, said in EXPECTED.items() if name in names}
    assert not list(tmp_path.rglob("*mpikv*"))


@pytest.mark.skipif(
    not PREFIX, reason=f"no CUDA-aware Open MPI: scripts/build_ompi_cuda PREFIX makes one, {CUDA_MPI}=PREFIX names it"
)
def test_an_open_mpi_that_is_built_for_cuda() -> None:
    """What mpikv finds out about it, with a driver or without."""
    env = {"MPI4PY_LIBMPI": f"{PREFIX}/lib/libmpi.so", "PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}
    said = []
    for words in (["-m", "mpikv", "info"], [str(HERE / "trial_program.py"), "Works=120", "Segments=120"]):
        mpi = Mpi("openmpi", Path(PREFIX))
        job = mpirun(2, ["python", *words], env=env, mpi=mpi, python=sys.executable, timeout_s=200)
        job.check()
        said.append(job.stdout)
    assert f" {Path(PREFIX).resolve()}/" in said[0]  # the library's file
    (row,) = re.findall(r"^CUDA-aware MPI +(.*)$", said[0], re.MULTILINE)
    problem = cuda_driver.ask().problem or ("" if cuda_driver.has_cupy() else cuda_driver.NO_CUPY)
    assert row == f"no: {problem}" if problem else row.startswith("yes: tried with 8 MiB on ")
    assert [json.loads(line) for line in said[1].splitlines()] == [
        ["Works", *EXPECTED["Works"]],
        ["Segments", *EXPECTED["Segments"]],
    ]
