"""Whether the MPI library that this process has loaded can be given device memory.

A wrong "yes" is a segmentation fault, so a library's own word is not enough: one that was built for CUDA may run on a
transport that was not. The questions, each asked only where those before it were answered with "yes":

1. Is there a driver, and a GPU?
2. Does the library say that it takes device memory?
3. Is CuPy there, whose arrays are sent?
4. Does it work? A child process, a job of its own with the same library, sends itself device memory (cuda_trial.py).
   Whatever becomes of the child, this process lives on.

The trial stays within one process: how the library sends device memory to another host is not tried. Cost: microseconds
without a driver; about two seconds for the trial. One rank of each host asks and sends the answer to the others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from mpikv.runtime import cuda_driver, cuda_trial, library

LIMIT_S = 60.0  # for importing CuPy from a busy file system, and for the first use of a GPU
BACKSTOP_S = 10.0  # after which the child ends itself where this process does not live to end it
# What launchers and schedulers set for their ranks. A child that sees it would take itself for one of these ranks.
LAUNCHERS = (
    *("OMPI_", "PMIX_", "PRTE_", "ORTE_", "PMI_", "PMI2_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_"),
    *("MV2_COMM_WORLD_", "SLURM_", "FLUX_", "PALS_", "ALPS_", "JSM_"),
)
# Of these, what the user has set: where a moved Open MPI lies, and which of its parts carry messages.
USERS = re.compile(
    r"(PMIX|PRTE)_PREFIX|OMPI_ALLOW_RUN_AS_ROOT\w*|OMPI_MCA_(pml|mtl|btl|bml|accelerator|rcache|mpool|allocator|memory"
    r"|smsc|opal_cuda|opal_common_ucx|mpi_cuda|mpi_common_cuda|mca_base)(_\w+)?"
)


class CudaSupport(NamedTuple):
    """Whether device memory may be given to MPI, and why or why not, for a reader. Plain values, which can be sent."""

    aware: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.aware else 'no'}: {self.why}"


def find_out(device: int = 0, *, source: str = cuda_trial.CUPY, limit_s: float = LIMIT_S) -> CudaSupport:
    """Return whether the loaded library takes device memory of a visible GPU. Loads MPI if nothing has yet. Blocks."""
    devices = cuda_driver.ask()
    if devices.problem:
        return CudaSupport(False, devices.problem)
    if device >= len(devices.names):
        return CudaSupport(False, f"there is no gpu:{device}, this process sees {len(devices.names)}, from 0")
    found = library.describe()
    if not found.cuda:
        return CudaSupport(False, "the library says no" if found.cuda is False else "the library has no way to say so")
    if source == cuda_trial.CUPY and not cuda_driver.has_cupy():
        return CudaSupport(False, cuda_driver.NO_CUPY)
    if not found.path:
        return CudaSupport(False, "it cannot be told which file the library was loaded from, so a child cannot load it")
    answer = trial(found.path, device, source=source, limit_s=limit_s)
    return answer._replace(why=f"{answer.why} on {devices.names[device]}")


def trial(path: str, device: int = 0, *, source: str = cuda_trial.CUPY, limit_s: float = LIMIT_S) -> CudaSupport:
    """Let a child process try the library at `path`. Blocks at most `limit_s` and as long as the child needs to end."""
    try:
        with tempfile.TemporaryDirectory(prefix="mpikv-trial-", ignore_cleanup_errors=True) as folder:
            arguments = [path, str(device), source, str(limit_s + BACKSTOP_S)]
            command = [sys.executable, "-m", "mpikv.runtime.cuda_trial", *arguments]
            status, out, err = _run(command, child_environment(path, folder), folder, limit_s)
    except OSError as error:
        return CudaSupport(False, f"a trial could not be started: {error}")
    return _judge(status, out, err, limit_s)


def child_environment(path: str, folder: str) -> dict[str, str]:
    """Return what a child sees: this process's environment, but as a job of its own, with the library at `path`.

    folder: for its temporary files. It imports from where this process does, as one of `multiprocessing` would.
    """
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS) or USERS.fullmatch(name)}
    return {**kept, "MPI4PY_LIBMPI": path, "PYTHONPATH": search, "TMPDIR": folder}


def _run(command: list[str], env: dict[str, str], folder: str, limit_s: float) -> tuple[int | None, str, str]:
    """Run a child; returns its status, None where it was ended after `limit_s`, and its output."""
    out, err = Path(folder, "out"), Path(folder, "err")
    # Files, not pipes: nobody has to read while it runs, and a process that it started cannot hold them open.
    with out.open("wb") as stdout, err.open("wb") as stderr:
        child = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            status: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if child.returncode is None:  # also where this process is interrupted
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return status, out.read_text(errors="replace"), err.read_text(errors="replace")


def _judge(status: int | None, out: str, err: str, limit_s: float) -> CudaSupport:
    if status is None:
        return CudaSupport(False, f"the trial did not end within {limit_s:g} s")
    if status < 0:
        return CudaSupport(False, f"the trial was ended by {_signal_name(-status)}")
    try:
        answer = json.loads(out.split("\n")[-2])  # a last line without an end was cut off
        aware, why = answer["aware"], answer["why"]
    except (ValueError, TypeError, LookupError):
        aware, why = False, ""
    if status > 0 or not why:
        lines = [line.strip() for line in err.splitlines() if line.strip()] or ["it said nothing"]
        return CudaSupport(False, f"the trial ended with status {status}: {lines[-1]}")
    return CudaSupport(aware is True, why)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
