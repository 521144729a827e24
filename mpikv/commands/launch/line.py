"""The one `mpirun` line of a job: global options, then a program for each block of ranks, separated by `:`.

As it is run, each rank is below a process of ours. `mpikv launch --dry-run` prints a line without them, which starts
the same ranks and can be typed. The variables that ranks get travel in one variable of `mpirun`'s own environment, so
that no value shows in a list of processes. On other hosts ranks start with what a remote shell gives them: what a
training program needs of this environment goes along without being asked for.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from mpikv.commands.launch import quick
from mpikv.commands.launch.processes import JOB
from mpikv.commands.launch.rank import LAUNCH, guarded
from mpikv.commands.launch.ranks import RankBlock, per_host
from mpikv.commands.mpirun import Mpirun
from mpikv.errors import ConfigError

TWICE = ("--bind-to", "--map-by", "--with-ft")
# Where programs and libraries are, how numerical libraries compute (the bits depend on it), and settings of MPI.
ALWAYS = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|PYTHONUNBUFFERED|PYTHONDONTWRITEBYTECODE"
    r"|(OMP|OPENBLAS|MKL|BLIS|KMP|NUMEXPR|NPY)_\w+"
    r"|MPIKV_\w+|MPI4PY_\w+|OMPI_(MCA_\w+|ALLOW_RUN_AS_ROOT\w*)|MPIR_CVAR_\w+|I_MPI_\w+|UCX_\w+|FI_\w+|NCCL_\w+"
)
PAIR = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:(?P<sign>[=:])(?P<value>.*))?", re.DOTALL)
SERVER = (sys.executable, "-m", "mpikv.server")


def build(
    mpirun: Mpirun,
    blocks: Sequence[RankBlock],
    command: Sequence[str],
    *,
    remote_shell: Sequence[str] = (),
    oversubscribe: bool = False,
    more: Sequence[str] = (),
    continues: bool = False,
    to_type: Sequence[str] | None = None,
) -> list[str]:
    """The words of the line.

    remote_shell: () for mpirun's own choice. oversubscribe: whether mpirun may start more ranks than it has slots.
    more: further options of mpirun, as the user gave them. continues: whether the others go on when a rank dies,
    ConfigError where they cannot. to_type: for a line that can be typed, the names of the
    variables that ranks on other hosts are to have from mpirun's environment.
    """
    ours = mpirun.unbound() + mpirun.on_hosts(per_host(blocks)) + (mpirun.fault_tolerant() if continues else [])
    for option in TWICE:  # Open MPI refuses an option that is given twice: the user's counts
        if option in ours and option in more:
            del ours[ours.index(option) : ours.index(option) + 2]
    words = [mpirun.program, *(mpirun.oversubscribed() if oversubscribe else []), *ours]
    if remote_shell:
        words += mpirun.remote_shell(remote_shell)
    words += more
    for i, block in enumerate(blocks):
        program = SERVER if block.role == "server" else command
        words += [":"] * (i > 0)
        if to_type is not None:
            words += [*mpirun.exported(to_type), "-n", str(block.ranks), *program]
            continue
        words += mpirun.exported([LAUNCH, JOB])
        # Ranks change to their folder themselves. Hydra fails on hosts that lack the one it was started in.
        words += mpirun.in_folder("/") if remote_shell and not mpirun.is_open_mpi else []
        above = quick.command("rank", block.role, str(block.first_number), str(block.first_rank), "--")
        words += ["-n", str(block.ranks), *above, *map(guarded, program)]
    return words


def shown(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """The line as a shell takes it, with the variables that are set for it in front."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())), shlex.join(words)])


def package_path(environ: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with this package's folder, where it is not installed: ranks must find it as this process did."""
    folder = quick.PACKAGE.parent
    if folder.name in ("site-packages", "dist-packages"):
        return {}
    others = [one for one in environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != str(folder)]
    return {"PYTHONPATH": os.pathsep.join([str(folder), *others])}


def read_pairs(option: str, texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `NAME` and `NAME=VALUE` texts; NAME alone has its value in `environ`. Raises ConfigError."""
    found = {}
    for text in texts:
        pair = PAIR.fullmatch(text)
        if pair is None:
            shown = re.split("[=:]", text, maxsplit=1)[0]  # without the value, which may be a secret
            raise ConfigError(f"{option} {shown}: it is NAME=VALUE, or NAME for a variable of this environment")
        name = pair["name"]
        if pair["sign"] is None and name not in environ:
            raise ConfigError(f"{option} {name}: no such variable is set here; give {option} {name}=VALUE")
        found[name] = environ[name] if pair["sign"] is None else pair["value"]
    return found


def always(environ: Mapping[str, str]) -> dict[str, str]:
    """What of this environment goes to every rank on another host."""
    return {name: value for name, value in environ.items() if ALWAYS.fullmatch(name)}
