"""Batch scripts: how one is made from what a job asks for.

A script holds what a user edits: the scheduler's option lines and a few settings. Then it finds Python, asks for
`TEMPLATES`, and goes on with the lines of `job.sh` there: in the same shell, since its traps, set in the script's first
line, must stay. It is a template in which three kinds of lines are replaced: `@directives` by the scheduler's option
lines, `@settings` by the settings, `@part NAME` by a file beside it.

The scripts of `scripts/slurm` and `scripts/sge` are these templates with default values. After a change of a template
`python -m mpikv.commands.launch.batch` writes them again, from the root of the repository.

All calls are local and touch no scheduler.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from mpikv.commands.launch.scheduler import NOTICE_S, BatchJob
from mpikv.commands.launch.sge import SGE
from mpikv.commands.launch.slurm import SLURM

SYSTEMS = {"slurm": SLURM, "sge": SGE}
TEMPLATES = Path(__file__).with_name("templates")


def script(job: BatchJob) -> str:
    """The batch script of a job. Raises ConfigError where no scheduler could take it."""
    template, directives = SYSTEMS[job.check().scheduler].lines(job)
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


def _settings(job: BatchJob) -> list[str]:
    settings = [
        (f"PYTHON_ENV={quoted(job.python_env) if job.python_env else ''}",
         "the Python environment's folder; empty: the active one, else .venv here"),
        (f"PROGRAM=({job.program or quoted(*job.command)})", "what every rank runs"),
        ("RANKS=", "how many; empty: one in each slot of the job"),
        (f"SERVERS={job.servers}", "how many of them are parameter servers; 0: none, the workers own the weights"),
        ("PLACEMENT=spread", "of the servers: spread over the hosts, hosts of their own, or last"),
        ("DISTRIBUTION=block", "block: ranks fill host after host; cyclic: each host in turn gets one"),
        (f"REQUEUE={'yes' if job.requeue else 'no'}", "yes: stopped and saved before its limit, it goes on later"),
    ]  # fmt: skip
    if not job.with_srun:
        more = ", or with #SBATCH --no-kill a node" if job.scheduler == "slurm" else ""
        comment = f"how often they are started again, from their last snapshot, where one dies{more}"
        settings.insert(-1, (f"RESTARTS={job.restarts}", comment))
    if job.scheduler == "sge":  # Slurm signals a job that nears its limit; in Grid Engine job.sh keeps the time
        after = job.time_s - NOTICE_S if job.time_s else ""
        settings.append((f"STOP_AFTER={after}", "seconds until the ranks are asked to stop: below h_rt; empty: never"))
    settings.append((f"STOP_FILE={_stop_file(job)}", "where a Trainer saves everything then"))
    names = ", ".join(job.environ) or "more variables for all ranks"
    settings.append((f"ENV_FILE={quoted(job.environment)}" if job.environ else "ENV_FILE=",
                     f"a file with lines export NAME=VALUE: {names}"))  # fmt: skip
    launcher = "srun" if job.with_srun else "mpirun"
    settings.append(("LAUNCH_OPTIONS=()", f"more words for {launcher}"))
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


def _stop_file(job: BatchJob) -> str:
    """As shell text. A requeued job keeps its number, and so finds its file."""
    number = "SLURM_JOB_ID" if job.scheduler == "slurm" else "JOB_ID"
    before, after = str(job.output("\n")).removesuffix(".out").split("\n")
    return f"${{MPIKV_STOP_FILE:-{quoted(before)}${number}{after}.state}}"


def repository_scripts() -> dict[str, str]:
    """The scripts of this repository, by their path below `scripts/`."""
    program = "python examples/train_mnist.py"
    return {
        "slurm/train.sbatch": script(BatchJob("slurm", program=program)),
        "slurm/train-srun.sbatch": script(BatchJob("slurm", program=program, with_srun=True)),
        "slurm/array.sbatch": script(BatchJob("slurm", program=program, array="0-3")),
        "sge/train.sh": script(BatchJob("sge", program=program)),
        "sge/train-servers.sh": script(BatchJob("sge", program=program, servers=2)),
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
