"""What `mpikv submit` asks of a scheduler, and how its commands are run.

There are two, `slurm.SLURM` and `sge.SGE`. Each asks by running the scheduler's own commands, which exist on every site
and version; none of their libraries is loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mpikv.commands.launch.batch import Job
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


class Scheduler(NamedTuple):
    """One of them.

    script: of a job. state: where a job is, by its number; raises SchedulerError where there is no answer. submission:
    the command that takes a script and prints the job's number. ending: the command that ends a job. option: an example
    of `mpikv submit --option`.
    """

    name: str
    script: Callable[[Job], str]
    state: Callable[[str], State]
    submission: tuple[str, ...]
    ending: str
    option: str

    def submit(self, text: str, without: Collection[str] = ()) -> str:
        """Hand over a script; the job's number. without: variables of this environment that the job shall not have.

        Raises ConfigError with the scheduler's words where it refuses, SchedulerError where it does not answer.
        """
        done = run(self.submission, self.name, text, without)
        if done.returncode != 0:
            raise ConfigError(f"{self.name} refused the job: {said(done)}")
        numbers: list[str] = re.findall(r"^\s*(\d+)(?:;.*)?\s*$", done.stdout, re.MULTILINE)  # 17, or 17;cluster
        if not numbers:
            raise ConfigError(f"{self.submission[0]} said no job number, but {said(done)}")
        return numbers[-1]

    def cancel(self, job_id: str) -> str:
        """Ask it to end the job; "" or why not."""
        done = run([self.ending, job_id], self.name)
        return "" if done.returncode == 0 else said(done)


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
            errors="surrogateescape",  # words of the script need not be UTF-8
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
