"""Batch scripts: what a job asks for, and the script that a scheduler is given for it.

A script holds what a user edits: the scheduler's option lines and a few settings. Then it finds Python, asks for
`TEMPLATES`, and goes on with the lines of `job.sh` there: in the same shell, since its traps, set in the script's first
line, must stay. It is a template in which three kinds of lines are replaced: `@directives` by the scheduler's option
lines, `@settings` by the settings, `@part NAME` by a file beside it.

The scripts of `scripts/slurm` and `scripts/sge` are these templates with default values. After a change of a template
`python -m mpikv.commands.launch.batch` writes them again, from the root of the repository.

All calls are local and touch no scheduler.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mpikv.config import VARIABLES
from mpikv.errors import ConfigError

SCHEDULERS = ("slurm", "sge")
DISTRIBUTIONS = ("block", "cyclic")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")  # Grid Engine's rule for job names, the narrower of the two
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")
TEMPLATES = Path(__file__).with_name("templates")
NOTICE_S = 60  # Slurm looks for jobs near their limit once in 30 s and may signal up to 60 s early


def parse_time(text: str) -> int:
    """Seconds of a time limit as Slurm reads it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S. ConfigError if none."""
    match = TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{text!r} is no time limit; write 1:30:00 (hours, minutes, seconds), 90 (minutes) or 2-12 (days-hours)"
        )
    numbers = [int(number) for number in match["fields"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    total = ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise ConfigError(f"a time limit of {text!r} leaves no time")
    return total


def time_text(seconds: int) -> str:
    """Seconds as H:MM:SS, which Slurm and Grid Engine both read."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


@dataclass(frozen=True)
class Job:
    """What is asked of the scheduler. Raises ConfigError, from `check`, where that is contradictory.

    workers, servers: ranks; time_s: limit (None: the queue's); nodes, tasks_per_node, queue, python_env: None for the
    scheduler's or the script's choice; environ: names of variables that stand in the file `environment`; passed: names
    of this environment's variables that Grid Engine gives to the job, () for its usual ones; options: words for the
    scheduler; launch_options: words for mpirun or srun; with_srun: Slurm starts the ranks itself; notice_s: how long
    before its time limit the job is told; stop_file: "" for one named like the output; program: shell text of the
    PROGRAM line instead of `command`.
    """

    scheduler: str
    workers: int = 4
    servers: int = 0
    command: tuple[str, ...] = ()
    name: str = "train"
    time_s: int | None = 1800
    notice_s: int = NOTICE_S
    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int = 1
    queue: str | None = None
    parallel_environment: str = ""
    output_dir: str = ""
    placement: str = "spread"
    distribution: str = "block"
    requeue: bool = False
    stop_file: str = ""
    python_env: str = ""
    environ: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    environment: str = ""
    options: tuple[str, ...] = ()
    launch_options: tuple[str, ...] = ()
    with_srun: bool = False
    program: str = ""

    @property
    def ranks(self) -> int:
        """Workers and servers: the slots that the job needs."""
        return self.workers + self.servers

    def output(self, job_id: str) -> Path:
        """The file that the scheduler writes the job's output to. job_id: a number or the scheduler's pattern."""
        return Path(self.output_dir) / f"{self.name}-{job_id}.out"

    def check(self) -> Job:
        """This job, if a scheduler could take it."""
        if self.scheduler not in SCHEDULERS:
            raise ConfigError(f"no such scheduler: {self.scheduler!r}; there are {', '.join(SCHEDULERS)}")
        for what, number, least in (
            ("workers", self.workers, 1),
            ("servers", self.servers, 0),
            ("nodes", self.nodes, 1),
            ("tasks per node", self.tasks_per_node, 1),
            ("CPUs per task", self.cpus_per_task, 1),
            ("seconds of notice", self.notice_s, 1),
        ):
            if number is not None and number < least:
                raise ConfigError(f"{number} {what}: at least {least}")
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} is no job name for both schedulers: a letter, then letters, digits, '.', '_' and '-'"
            )
        for name in self.environ:
            if not VARIABLE.fullmatch(name):
                raise ConfigError(f"{name!r} is no name of an environment variable")
        if self.time_s is not None and self.time_s <= self.notice_s:
            raise ConfigError(
                f"a time limit of {time_text(self.time_s)} leaves no time before the notice of {self.notice_s} s that "
                "the job gets; give more time or a shorter notice"
            )
        if self.distribution not in DISTRIBUTIONS:
            raise ConfigError(f"distribution {self.distribution!r} is none of {', '.join(DISTRIBUTIONS)}")
        if not self.command and not self.program:
            raise ConfigError("no command to run")
        for option in (*self.options, self.queue or "", self.parallel_environment):
            if "\n" in option:
                raise ConfigError(f"the option {option!r} is not one line")
        if set(self.output_dir) & set('%$"\\\n'):
            raise ConfigError(f"--output-dir {self.output_dir!r}: schedulers give %, $, quotes and \\ a meaning there")
        _check_placement(self.placement)
        if self.scheduler == "sge":
            self._check_sge()
        else:
            self._check_slurm()
        return self

    def _check_sge(self) -> None:
        for what, given in (
            ("--nodes", self.nodes),
            ("--tasks-per-node", self.tasks_per_node),
            ("--srun", self.with_srun),
            ("--cpus-per-task", self.cpus_per_task > 1),
        ):
            if given:
                raise ConfigError(
                    f"{what} is Slurm's: in Grid Engine the allocation rule of the parallel environment places the "
                    "slots (qconf -spl lists them, qconf -sp NAME shows one); choose one with --pe"
                )

    def _check_slurm(self) -> None:
        if self.parallel_environment:
            raise ConfigError("--pe is Grid Engine's; in Slurm say --nodes and --tasks-per-node")
        if self.nodes and self.nodes > self.ranks:
            raise ConfigError(f"{self.nodes} nodes for {self.ranks} ranks: some node would get none")
        if self.nodes and self.tasks_per_node and self.nodes * self.tasks_per_node < self.ranks:
            raise ConfigError(
                f"{self.ranks} ranks ({self.workers} workers and {self.servers} servers) do not fit into "
                f"{self.nodes} nodes with {self.tasks_per_node} tasks each"
            )


def _check_placement(text: str) -> None:
    parse = next(variable.parse for variable in VARIABLES if variable.name == "MPIKV_SERVER_PLACEMENT")
    try:
        parse(text)
    except ValueError as error:
        raise ConfigError(f"server placement {text!r} {error}") from None


def render(template: str, job: Job, directives: list[str]) -> str:
    """The script. template: a file of `templates/`; directives: the scheduler's option lines, in its own form."""
    lines: list[str] = []
    for line in _read(template).splitlines():
        if line == "@directives":
            lines += directives
        elif line == "@settings":
            lines += _settings(job)
        elif line.startswith("@part "):
            lines += _read(line.removeprefix("@part ")).splitlines()
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _settings(job: Job) -> list[str]:
    """The variables at the script's top, each with its comment."""
    settings = [
        (f"PYTHON_ENV={quoted(job.python_env) if job.python_env else ''}",
         "the Python environment's folder; empty: the active one, else .venv here"),
        (f"PROGRAM=({job.program or quoted(*job.command)})", "what every rank runs"),
        ("RANKS=", "how many; empty: one in each slot of the job"),
        (f"SERVERS={job.servers}", "how many of them are parameter servers; 0: none, the workers own the weights"),
        (f"PLACEMENT={job.placement}", "of the servers: spread over the hosts, hosts of their own, or last"),
        (f"DISTRIBUTION={job.distribution}", "block: ranks fill host after host; cyclic: each host in turn gets one"),
        (f"REQUEUE={'yes' if job.requeue else 'no'}", "yes: stopped and saved before its limit, it goes on later"),
    ]  # fmt: skip
    if job.scheduler == "sge":  # Slurm signals a job that nears its limit; in Grid Engine job.sh keeps the time
        after = job.time_s - job.notice_s if job.time_s else ""
        settings.append((f"STOP_AFTER={after}", "seconds until the ranks are asked to stop: below h_rt; empty: never"))
    settings.append((f"STOP_FILE={_stop_file(job)}", "where a Trainer saves everything then"))
    names = ", ".join(job.environ) or "more variables for all ranks"
    settings.append((f"ENV_FILE={quoted(job.environment)}" if job.environ else "ENV_FILE=",
                     f"a file with lines export NAME=VALUE: {names}"))  # fmt: skip
    launcher = "srun" if job.with_srun else "mpirun"
    settings.append((f"LAUNCH_OPTIONS=({quoted(*job.launch_options)})", f"more words for {launcher}"))
    return [f"{setting}  # {comment}" for setting, comment in settings]


def quoted(*words: str) -> str:
    """Words as bash takes them, on one line: one that begins with `#$` would be an option for Grid Engine."""
    return " ".join(
        "$'" + word.replace("\\", r"\\").replace("'", r"\'").replace("\n", r"\n") + "'"
        if "\n" in word
        else shlex.quote(word)
        for word in words
    )


def environment_file(variables: Mapping[str, str]) -> str:
    """The lines of the file that ENV_FILE names: a shell sets the variables by it."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _stop_file(job: Job) -> str:
    """As shell text. A requeued job keeps its number, and so finds its file."""
    if job.stop_file:
        return quoted(job.stop_file)
    number = "SLURM_JOB_ID" if job.scheduler == "slurm" else "JOB_ID"
    before, after = str(job.output("\n")).removesuffix(".out").split("\n")
    return f"${{MPIKV_STOP_FILE:-{quoted(before)}${number}{after}.state}}"


def repository_scripts() -> dict[str, str]:
    """The scripts of this repository, by their path below `scripts/`."""
    from mpikv.commands.launch import sge, slurm  # noqa: PLC0415 - they import this file

    program = "python examples/train_mnist.py"
    on_slurm = Job("slurm", program=program)
    on_sge = Job("sge", program=program)
    return {
        "slurm/train.sbatch": slurm.script(on_slurm),
        "slurm/train-srun.sbatch": slurm.script(replace(on_slurm, with_srun=True)),
        "slurm/array.sbatch": slurm.script(on_slurm, array="0-3"),
        "sge/train.sh": sge.script(on_sge),
        "sge/train-servers.sh": sge.script(replace(on_sge, servers=2)),
    }


if __name__ == "__main__":
    for path, text in repository_scripts().items():
        file = Path("scripts") / path
        if not file.parent.parent.is_dir():
            sys.exit("there is no directory scripts here; run this in the root of the repository")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)
        print(file)
