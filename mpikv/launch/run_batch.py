"""`mpikv batch`: what a batch script calls once it runs. It becomes the shell of `templates/job.sh`.

The shell takes this process's place, so that the signals of the scheduler, which go to the batch script's process,
arrive there. It checks the job, runs `mpikv info` on its ranks, starts the program, passes the scheduler's signals on,
counts the ranks that have ended, and requeues the job if asked to.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpikv.errors import ConfigError

KINDS = ("slurm-mpirun", "slurm-srun", "sge-mpirun")
BAD_INPUT = 2


def add_parser(commands: Any) -> None:
    """Add `batch` to the commands of `mpikv`."""
    parser = commands.add_parser(
        "batch",
        help="what the scripts of mpikv submit call",
        description="Start the ranks of a batch job, pass the scheduler's signals on, and requeue the job. Called by "
        "the scripts that mpikv submit writes; the settings are those at their top, in the environment.",
    )
    parser.add_argument("kind", choices=KINDS, help="the scheduler, and what starts the ranks")
    parser.add_argument(
        "--launch-option", action="append", default=[], metavar="TEXT", help="a word for mpirun or srun"
    )
    parser.add_argument("--array-option", default="", metavar="NAME", help="the option that differs in a job array")
    parser.add_argument("--array-value", action="append", default=[], metavar="VALUE", help="its value in each task")
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="what every rank runs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Become the shell. Returns BAD_INPUT where the job is wrong."""
    program = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        program = [*program, *_array_words(options, os.environ)]
    except ConfigError as error:
        print(f"mpikv: error: {error}", file=sys.stderr)
        return BAD_INPUT
    script = Path(__file__).with_name("templates") / "job.sh"
    words = [str(script), options.kind, str(len(options.launch_option)), *options.launch_option, *program]
    sys.stdout.flush()
    os.execvp("bash", ["bash", *words])
    return BAD_INPUT  # never reached


def _array_words(options: argparse.Namespace, environ: Mapping[str, str]) -> Sequence[str]:
    """What this task of a job array appends to the program. Raises ConfigError."""
    values = options.array_value
    if not options.array_option:
        return ()
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    if not task:
        raise ConfigError(f"this is no job array; submit the script with sbatch --array=0-{len(values) - 1}")
    if int(task) >= len(values):
        raise ConfigError(
            f"task {task} of the array has no value: VALUES has {len(values)}, for tasks 0 to {len(values) - 1}"
        )
    print(f"mpikv: task {task} of array {environ.get('SLURM_ARRAY_JOB_ID', '')}")
    return options.array_option, values[int(task)]
