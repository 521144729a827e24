"""How a benchmark is started: by `mpirun`, or alone with `-n`; then this process becomes an `mpirun` of the same
command.

It becomes it by exec, so that signals reach `mpirun` and its status is this command's. Where a launcher has started the
ranks already, `-n` may only repeat their number. Every rank finds what is wrong with the options; rank 0 alone prints
it.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import mpikv
from mpikv.commands.mpirun import find_mpirun, identify
from mpikv.common.checks import meant
from mpikv.errors import ConfigError
from mpikv.runtime import launcher

BAD_INPUT = 2
# NumPy would start a thread per core in every rank.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def environment_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return this process's rank by its launcher's variables, 0 without a launcher. Needs no MPI."""
    environ = os.environ if environ is None else environ
    if launcher.find(environ) is None:
        return 0  # a batch script has SLURM_PROCID, too
    return launcher.said_rank(environ)


class RankedParser(argparse.ArgumentParser):
    """A parser whose help and errors come from rank 0 alone, and whose errors name what a misspelt name may mean."""

    hint = ""  # after an option that does not exist
    gone: Mapping[str, str] = {}  # commands, options and choices that there were once, and what to do instead

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """See argparse; but what is unknown is an error of this command already, which knows its own options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            if instead := self.gone.get(name):
                self.error(f"{name} is gone: {instead}")
            names = [option.lstrip("-") for option in self._option_string_actions]
            near = difflib.get_close_matches(name.lstrip("-"), names, n=2)
            meaning = f". Did you mean {' or '.join(f'--{name}' for name in near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.hint}{meaning}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if instead := self.gone.get(str(value)):
                raise argparse.ArgumentError(action, f"{value!r} is gone: {instead}") from None
            near = meant(value, action.choices or ())
            raise argparse.ArgumentError(action, f"{error.message}{near and '.'}{near}") from None

    def print_help(self, file: object = None) -> None:
        if environment_rank() == 0:
            super().print_help(file)  # type: ignore[arg-type] # argparse says SupportsWrite

    def error(self, message: str) -> NoReturn:
        if environment_rank() == 0:
            super().error(message)
        launcher.let_rank_0_speak()
        raise SystemExit(BAD_INPUT)


def check_ranks(wanted: int | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is to become an `mpirun`. Raises ConfigError where `-n` contradicts the launcher."""
    found = launcher.find(environ)
    if found is not None and wanted not in (None, found.size):
        raise ConfigError(f"-n {wanted}, but {found.size} ranks were started by {found}: leave -n out under a launcher")
    return found is None and wanted is not None


def become_mpirun(n: int, arguments: Sequence[str], *, one_thread: bool) -> NoReturn:
    """Replace this process by `mpirun -n N python -m mpikv ARGUMENTS`. ConfigError where there is no mpirun.

    one_thread: of NumPy's in each rank.
    """
    mpirun = identify(find_mpirun())
    # More ranks than cores, and several not tied to one.
    line = [mpirun.program, *mpirun.oversubscribed(), *mpirun.unbound(), "-n", str(n)]
    line += [sys.executable, "-m", "mpikv", *arguments]
    env = {**mpirun.environment(), **(ONE_THREAD if one_thread else {}), **os.environ}
    # `mpikv` may be run from a checkout, which the ranks must find as this process did.
    here = str(Path(mpikv.__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    sys.stdout.flush()
    os.execvpe(mpirun.program, line, env)
