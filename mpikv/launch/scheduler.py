"""What `mpikv submit` asks of a scheduler, and how its commands are run.

A scheduler is a module with `script`, `submit`, `state`, `cancel` (see `slurm` and `sge`). Each asks by running the
scheduler's own commands, which exist on every site and version; none of their libraries is loaded.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Sequence
from typing import NamedTuple

from mpikv.errors import ConfigError

COMMAND_S = 60.0  # a busy controller answers within seconds, or its commands give up after some tens of them


class State(NamedTuple):
    """Where a job is. text: for a reader; status: what it exited with, None while it is waiting or running.

    lost: the scheduler knows nothing of the job any more, so that its output must tell how it ended.
    """

    text: str
    status: int | None = None
    lost: bool = False


class SchedulerError(Exception):
    """A command failed that may work a moment later; its text is the scheduler's."""


def run(
    words: Sequence[str], name: str, text: str | None = None, without: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command. text: its input; without: variables that it does not see. ConfigError without it."""
    seen = {name: value for name, value in os.environ.items() if name not in without}
    try:
        return subprocess.run(
            words,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            check=False,
            env=seen,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} was not found, so {name} cannot be reached from here: run this where jobs are submitted, "
            "or put the scheduler's commands on PATH (often `module load`)"
        ) from None
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{words[0]} gave no answer in {COMMAND_S:.0f} s") from None


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What a command wrote, in one piece."""
    return "\n".join(part.strip() for part in (done.stderr, done.stdout) if part.strip()) or "without a word"
