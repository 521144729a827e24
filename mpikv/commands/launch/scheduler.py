"""What `mpikv submit` asks of a scheduler, and how a scheduler's commands are run.

There are two, `slurm.SLURM` and `sge.SGE`. Each asks by running the scheduler's own commands, which exist on every site
and version; none of their libraries is loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpikv.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")  # Grid Engine's rule for job names, the narrower of the two
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")
# Before its time limit a job is asked to stop. Slurm looks for such jobs once in 30 s and may signal up to 60 s early.
NOTICE_S = 60
COMMAND_S = 60.0  # a busy controller answers within seconds, or its commands give up after some tens of them


def parse_time(text: str) -> int:
    """Seconds of a time limit as Slurm reads it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S. ConfigError if none."""
    match = TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{text!r} is no time limit; write 1:30:00 (hours, minutes, seconds), 90 (minutes) or 2-12 (days-hours)"
        )
    numbers = [int(number) for number in match["fields"].split(":")]
    if match["days"] is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    total = ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise ConfigError(f"a time limit of {text!r} leaves no time")
    return total


def time_text(seconds: int) -> str:
    """Seconds as H:MM:SS, which Slurm and Grid Engine both read."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


@dataclass(frozen=True)
class BatchJob:
    """What is asked of the scheduler, slurm or sge.

    workers, servers: ranks; restarts: how often they are started again where one dies; time_s: limit (None: the
    queue's); queue, python_env: None for the scheduler's or the script's choice; environ: names of variables that stand
    in the file `environment`; passed: names of this environment's variables that Grid Engine gives to the job, () for
    its usual ones; options: words for the scheduler; with_srun: Slurm starts the ranks itself; array: indices of a job
    array of Slurm's; program: shell text of the PROGRAM line instead of `command`.
    """

    scheduler: str
    workers: int = 4
    servers: int = 0
    command: tuple[str, ...] = ()
    name: str = "train"
    time_s: int | None = 1800
    cpus_per_task: int = 1
    queue: str | None = None
    parallel_environment: str = ""
    output_dir: str = ""
    requeue: bool = False
    restarts: int = 0
    python_env: str = ""
    environ: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    environment: str = ""
    options: tuple[str, ...] = ()
    with_srun: bool = False
    array: str = ""
    program: str = ""

    @property
    def ranks(self) -> int:
        return self.workers + self.servers

    def output(self, job_id: str) -> Path:
        """The file that the scheduler writes the job's output to. job_id: a number or the scheduler's pattern."""
        return Path(self.output_dir) / f"{self.name}-{job_id}.out"

    def check(self) -> BatchJob:
        """This job. Raises ConfigError where no scheduler could take it."""
        if mistake := next(self._mistakes(), ""):
            raise ConfigError(mistake)
        return self

    def _mistakes(self) -> Iterator[str]:
        for what, number, least in (
            ("workers", self.workers, 1),
            ("servers", self.servers, 0),
            ("restarts", self.restarts, 0),
            ("CPUs per task", self.cpus_per_task, 1),
        ):
            if number < least:
                yield f"{number} {what}: at least {least}"
        if not NAME.fullmatch(self.name):
            yield f"{self.name!r} is no job name for both schedulers: a letter, then letters, digits, '.', '_' and '-'"
        for name in self.environ:
            if not VARIABLE.fullmatch(name):
                yield f"{name!r} is no name of an environment variable"
        if self.time_s is not None and self.time_s <= NOTICE_S:
            text = time_text(self.time_s)
            yield f"a time limit of {text} is too short: the job is asked to stop {NOTICE_S} s before its end"
        if not self.command and not self.program:
            yield "no command to run"
        for option in (*self.options, self.queue or "", self.parallel_environment):
            if "\n" in option:
                yield f"the option {option!r} is not one line"
        if set(self.output_dir) & set('%$"\\\n'):
            yield f"--output-dir {self.output_dir!r}: schedulers give %, $, quotes and \\ a meaning there"
        for what, given in (("--srun", self.with_srun), ("--cpus-per-task", self.cpus_per_task > 1)):
            if given and self.scheduler == "sge":
                yield (
                    f"{what} is Slurm's: in Grid Engine the allocation rule of the parallel environment places the "
                    "slots (qconf -spl lists them, qconf -sp NAME shows one); choose one with --pe"
                )
        if self.restarts and self.with_srun:
            yield "--restarts goes without --srun: mpikv launch starts ranks again, by mpirun"
        if self.parallel_environment and self.scheduler == "slurm":
            yield "--pe is Grid Engine's; in Slurm say --option --nodes=N"


class BatchState(NamedTuple):
    """Where a job is. text: for a reader; status: what it exited with, None while it is waiting or running.

    lost: the scheduler knows nothing of the job any more, so that its output must show how it ended.
    """

    text: str
    status: int | None = None
    lost: bool = False


class SchedulerError(Exception):
    """A command failed that may work a moment later; its text is the scheduler's."""


class BatchSystem(NamedTuple):
    """A scheduler.

    lines: of a job, the template of its script and the option lines; state: where a job is, by its number, raises
    SchedulerError where there is no answer; submission: the command that takes a script and prints the job's number;
    ending: the command that ends a job.
    """

    name: str
    lines: Callable[[BatchJob], tuple[str, list[str]]]
    state: Callable[[str], BatchState]
    submission: tuple[str, ...]
    ending: str

    def submit(self, text: str, without: Collection[str] = ()) -> str:
        """Submit a script; the job's number. without: variables of this environment that the job shall not have.

        Raises ConfigError with the scheduler's words where it refuses, SchedulerError where it does not answer.
        """
        done = run(self.submission, self.name, text, without)
        if done.returncode != 0:
            raise ConfigError(f"{self.name} refused the job: {words_of(done)}")
        numbers: list[str] = re.findall(r"^\s*(\d+)(?:;.*)?\s*$", done.stdout, re.MULTILINE)  # 17, or 17;cluster
        if not numbers:
            raise ConfigError(f"{self.submission[0]} said no job number, but {words_of(done)}")
        return numbers[-1]

    def cancel(self, job_id: str) -> str:
        """Ask it to end the job; "" or why not."""
        done = run([self.ending, job_id], self.name)
        return "" if done.returncode == 0 else words_of(done)


def run(
    words: Sequence[str], name: str, text: str | None = None, without: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command. text: its input; without: variables that it does not see. ConfigError without it."""
    try:
        return subprocess.run(
            words,
            input=text,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # words of the script need not be UTF-8
            timeout=COMMAND_S,
            check=False,
            env={one: value for one, value in os.environ.items() if one not in without},
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


def words_of(done: subprocess.CompletedProcess[str]) -> str:
    """What a command wrote, in one piece."""
    return "\n".join(text.strip() for text in (done.stderr, done.stdout) if text.strip()) or "without a word"
