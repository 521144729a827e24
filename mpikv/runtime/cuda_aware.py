"""Whether the MPI library that this process has loaded can be given device memory.

A wrong "yes" is a segmentation fault, so a library's own word is not enough: one that was built for CUDA may run on a
transport that was not. The questions, each asked only where those before it were answered with "yes":

1. Is there a driver, and a GPU?
2. Does the library say that it takes device memory?
3. Is CuPy there, which the memory for a trial comes from?
4. Does it work? A child process, a job of its own with the same library, sends device memory to itself (cuda_trial.py).
   Whatever becomes of the child, this process lives on.

The verdict on a library is kept in a small file under $XDG_CACHE_HOME/mpikv (else ~/.cache/mpikv), named after a digest
of what it depends on: the library's file, the driver, the GPU, and the settings that choose MPI's transports. So a
trial is made once. That the trial could not be made, or took too long, is not kept.

The trial stays within one process: how the library sends device memory to another host is not tried.

Cost: microseconds without a driver; a read of a file later; about two seconds for the trial. One rank of each host asks
and sends the answer to the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpikv import files
from mpikv.digests import digest
from mpikv.runtime import cuda_driver, cuda_trial, library

FORMAT = 1  # of the file; another one is not read
LIMIT_S = 60.0  # for importing CuPy from a busy file system, and for the first use of a GPU
BACKSTOP_S = 10.0  # after which the child ends itself where this process does not live to end it
MOST_BYTES = 65536  # of the file
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)  # the library's own doing
# What launchers and schedulers tell their ranks. A child that sees it would take itself for one of these ranks.
LAUNCHERS = (
    *(
        "OMPI_",
        "PMIX_",
        "PRTE_",
        "ORTE_",
        "PMI_",
        "PMI2_",
        "HYDI_",
        "HYDRA_",
        "MPI_LOCAL",
        "MPIEXEC_",
        "MV2_COMM_WORLD_",
    ),
    *("SLURM_", "FLUX_", "PALS_", "ALPS_", "JSM_"),
)
# Of these, what the user said: where a moved Open MPI lies, and which of its parts carry messages.
USERS = re.compile(
    r"(PMIX|PRTE)_PREFIX|OMPI_ALLOW_RUN_AS_ROOT\w*|OMPI_MCA_(pml|mtl|btl|bml|accelerator|rcache|mpool|allocator|memory"
    r"|smsc|opal_cuda|opal_common_ucx|mpi_cuda|mpi_common_cuda|mca_base)(_\w+)?"
)
# By which variables a library is told how to carry messages: with others the verdict may be another.
SETTINGS = re.compile(r"(OMPI_MCA_|UCX_|FI_|MPICH_|MPIR_CVAR_|I_MPI_|MV2_|PSM2_|PSM3_)\w+")


class Answer(NamedTuple):
    """Whether device memory may be given to MPI, and why or why not, for a reader. Plain values, which can be sent."""

    aware: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.aware else 'no'}: {self.why}"


def find_out(
    setting: str = "auto", device: int = 0, *, source: str = cuda_trial.CUPY, limit_s: float = LIMIT_S
) -> Answer:
    """Return whether the loaded library takes device memory. Loads MPI if nothing has yet.

    setting: of MPIKV_CUDA_AWARE, `0`, `1` or `auto`. device: the number of a GPU among those that are visible. source:
    where the trial's memory comes from. Local; blocks at most `limit_s`, and as long as a child needs to end.
    """
    if setting != "auto":
        return Answer(setting == "1", f"MPIKV_CUDA_AWARE={setting}" + ", without a trial" * (setting == "1"))
    devices = cuda_driver.ask()
    if devices.problem:
        return Answer(False, devices.problem)
    if device >= len(devices.names):
        return Answer(False, f"there is no gpu:{device}, this process sees {len(devices.names)}, from 0")
    found = library.describe()
    if not found.cuda:
        return Answer(False, "the library says no" if found.cuda is False else "the library has no way to say so")
    if source == cuda_trial.CUPY and not cuda_driver.has_cupy():
        return Answer(False, cuda_driver.NO_CUPY)
    if not found.path:
        return Answer(False, "it cannot be told which file the library was loaded from, so a child cannot load it")
    question = _question(found, devices, device, source)
    place = _place(question, os.environ)
    kept = _read(place, question)
    if kept is not None:
        return kept._replace(why=f"{kept.why} (cached)")
    answer, final = trial(found.path, device, source=source, limit_s=limit_s)
    answer = answer._replace(why=f"{answer.why} on {devices.names[device]}")
    if final:
        _write(place, question, answer)
    return answer


def trial(
    path: str, device: int = 0, *, source: str = cuda_trial.CUPY, limit_s: float = LIMIT_S
) -> tuple[Answer, bool]:
    """Let a child process try the library at `path`. Returns the answer, and whether it is a verdict on the library.

    It is not where the child was ended from outside or too slow, or where something else failed than MPI. Local; blocks
    at most `limit_s` and as long as the child needs to end. The child leaves no files.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="mpikv-trial-", ignore_cleanup_errors=True) as folder:
            command = [sys.executable, "-m", "mpikv.runtime.cuda_trial", "--library", path, "--device", str(device)]
            command += ["--source", source, "--limit-s", str(limit_s + BACKSTOP_S)]
            status, out, err = _run(command, child_environment(path, folder), folder, limit_s)
    except OSError as error:
        return Answer(False, f"a trial could not be started: {error}"), False
    return _judge(status, out, err, limit_s)


def child_environment(path: str, folder: str) -> dict[str, str]:
    """Return what a child sees: this process's environment, but as a job of its own, with the library at `path`.

    folder: for its temporary files. It imports from where this process does, as one of `multiprocessing` would.
    """
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**_without_launcher(os.environ), "MPI4PY_LIBMPI": path, "PYTHONPATH": search, "TMPDIR": folder}


def _without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if not name.startswith(LAUNCHERS) or USERS.fullmatch(name)}


def _run(command: list[str], env: dict[str, str], folder: str, limit_s: float) -> tuple[int | None, str, str]:
    """Run a child; returns its status, None where it was ended after `limit_s`, and its output."""
    out, err = Path(folder, "out"), Path(folder, "err")
    # Files, not pipes: nobody has to read while it runs, and a process that it started cannot hold them open.
    with out.open("wb") as stdout, err.open("wb") as stderr:
        child = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
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


def _judge(status: int | None, out: str, err: str, limit_s: float) -> tuple[Answer, bool]:
    """Return what the end of a child means."""
    if status is None:
        return Answer(False, f"the trial did not end within {limit_s:g} s"), False
    if status < 0:
        return Answer(False, f"the trial was ended by {_signal_name(-status)}"), -status in CRASHES
    last = next(iter(out.split("\n")[-2:-1]), "")
    try:
        said = json.loads(last)
        verdict, why = said["verdict"], said["why"]
    except (ValueError, TypeError, KeyError):
        verdict, why = cuda_trial.FAILED, ""
    if status > 0 or not why:
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        return Answer(
            False, f"the trial ended with status {status}: {lines[-1] if lines else 'it said nothing'}"
        ), False
    if verdict == cuda_trial.FAILED:
        return Answer(False, f"the trial failed: {why}"), False
    return Answer(verdict == cuda_trial.YES, why), True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _question(found: library.Library, devices: cuda_driver.Devices, device: int, source: str) -> dict[str, Any]:
    """Return all that a verdict depends on, as JSON has it."""
    from mpi4py import MPI  # noqa: PLC0415 - it is loaded

    path = os.path.realpath(found.path)
    status = os.stat(path)
    environ = _without_launcher(os.environ)
    return {
        "format": FORMAT,
        "library": path,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "version": MPI.Get_library_version().strip("\0\n "),
        "driver": devices.version,
        "gpu": devices.names[device],
        "source": source,
        "settings": {name: environ[name] for name in sorted(environ) if SETTINGS.fullmatch(name)},
    }


def _place(question: dict[str, Any], environ: Mapping[str, str]) -> Path | None:
    """Return the file for a verdict, None where this user has no folder for such files."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG Base Directory Specification has relative paths ignored
        base = os.path.expanduser("~/.cache")
    name = f"cuda-aware-{digest(json.dumps(question, sort_keys=True)):016x}.json"
    return Path(base, "mpikv", name) if os.path.isabs(base) else None


def _read(place: Path | None, question: dict[str, Any]) -> Answer | None:
    """Return the verdict that is kept there; None for no file, a damaged one, or one about something else."""
    if place is None:
        return None
    try:
        with files.open_regular(place) as file:
            kept = json.loads(file.read(MOST_BYTES))
        if kept["question"] == question and type(kept["aware"]) is bool and type(kept["why"]) is str:
            return Answer(kept["aware"], kept["why"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def _write(place: Path | None, question: dict[str, Any], answer: Answer) -> None:
    """Keep a verdict, where that is possible: a trial at the next start costs two seconds, and is no error."""
    if place is None:
        return
    text = json.dumps({"question": question, **answer._asdict()}, indent=2) + "\n"
    with contextlib.suppress(OSError):
        os.makedirs(place.parent, mode=0o700, exist_ok=True)
        with files.replacing(place) as file:
            file.write(text.encode())
