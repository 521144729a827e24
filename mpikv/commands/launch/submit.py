"""`mpikv submit slurm|sge`: a batch script for a training, handed to the scheduler, and followed with --wait.

The script is that of `scripts/`, with the options' values at its top. `mpikv launch --launcher slurm|sge` does the same
and always waits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TextIO

from mpikv.commands.launch import environment
from mpikv.commands.launch.batch import DISTRIBUTIONS, NOTICE_S, Job, environment_file, parse_time
from mpikv.commands.launch.follow import Follower
from mpikv.commands.launch.options import command_words
from mpikv.commands.launch.scheduler import SchedulerError
from mpikv.commands.launch.sge import SGE
from mpikv.commands.launch.slurm import SLURM
from mpikv.common.files import write_private
from mpikv.errors import ConfigError

SCHEDULERS = {"slurm": SLURM, "sge": SGE}
BAD_INPUT = 2
EXAMPLES = """examples:
  mpikv submit slurm -n 4 -s 2 --time 1:00:00 -- python train.py
  mpikv submit slurm -n 16 --nodes 4 --tasks-per-node 4 --queue gpu --option "--account=x" --wait -- python train.py
  mpikv submit sge -n 8 --pe mpi --time 30 --requeue -- python train.py
  mpikv submit slurm -n 4 --dry-run -- python train.py > train.sbatch

exit status: 0 when the job was submitted; with --wait the job's; 2 for a wrong option or a refused job; 130 after
Ctrl-C, which cancels a job that is waited for."""


class Parser(argparse.ArgumentParser):
    """The options of one scheduler's jobs. `DASHED` take the word after them even if it begins with a dash.

    argparse would take such a word for an option of its own, and say that the value is missing.
    """

    DASHED = ("options", "launch_options")
    hint = ""  # after an option that does not exist

    def _get_nargs_pattern(self, action: argparse.Action) -> str:
        # A for a word, O for one that looks like an option. In argparse since its beginning.
        return "([AO])" if action.dest in self.DASHED else super()._get_nargs_pattern(action)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """See argparse; but what is unknown is an error here already, where its cure is known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.hint}")
        return found, unknown


def add_parser(commands: Any) -> None:
    """Add `submit` to the commands of `mpikv`."""
    submit = commands.add_parser(
        "submit",
        help="write a batch script for Slurm or Grid Engine and submit it",
        description="Write a batch script that starts a command as workers and servers, and submit it. The script, and "
        "what it does with signals, is described in docs/clusters.md.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = submit.add_subparsers(metavar="slurm|sge", required=True, dest="scheduler", parser_class=Parser)
    for key, scheduler in SCHEDULERS.items():
        parser = kinds.add_parser(
            key,
            help=f"submit to {scheduler.name}",
            usage=f"mpikv submit {key} -n WORKERS [options] -- COMMAND...",
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_options(parser)
        parser.hint = f"; what {scheduler.name} itself understands goes through --option, as in {scheduler.option}"
        parser.set_defaults(run=_run, parser=parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """The options; each is stored under the name of the field of `Job` that it sets."""
    add = parser.add_argument
    add("-n", "--num-workers", dest="workers", type=int, required=True, metavar="N", help="workers")
    add("-s", "--num-servers", dest="servers", type=int, default=0, metavar="N", help="servers beside them (0)")
    add("-t", "--time", metavar="LIMIT", help="H:MM:SS, M:SS, minutes or D-H; default: the queue's limit")
    add("--notice", dest="notice_s", type=int, default=NOTICE_S, metavar="SECONDS",
        help=f"how long before its limit the job is asked to stop ({NOTICE_S})")  # fmt: skip
    add("--requeue", action="store_true", help="stopped so, and ended with status 0, the job goes back into the queue")
    add("--stop-file", default="", metavar="FILE", help="where a Trainer saves when it is stopped (NAME-JOB.state)")
    add("--queue", "--partition", metavar="NAME", help="the queue or partition; default: the scheduler's choice")
    add("--placement", default="spread", metavar="WORD", help="of the servers, as MPIKV_SERVER_PLACEMENT (spread)")
    add("--distribution", choices=DISTRIBUTIONS, default="block",
        help="ranks fill one host after the other, or each host in turn gets one (block)")  # fmt: skip
    add("--name", default="train", help="the job's name (train)")
    add("--output-dir", default="", metavar="DIR", help="where NAME-JOB.out is written; default: here")
    add("--python-env", default=this_environment(), metavar="DIR",
        help="the Python environment of the job; default: the one of this command")  # fmt: skip
    add("--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="a variable for all ranks; NAME alone has its value from here")  # fmt: skip
    add("--option", dest="options", action="append", default=[], metavar="TEXT",
        help='a line more for the scheduler, as in --option "--account=x" or --option "-P x"')  # fmt: skip
    add("--launch-option", dest="launch_options", action="append", default=[], metavar="TEXT",
        help="a word more for mpirun or srun")  # fmt: skip
    add("--dry-run", action="store_true", help="print the script")
    add("--wait", action="store_true", help="show the job's output and state until it ends; exit with its status")
    add("--nodes", type=int, metavar="N", help="Slurm: on so many nodes")
    add("--tasks-per-node", type=int, metavar="N", help="Slurm: so many ranks on each node")
    add("--cpus-per-task", type=int, default=1, metavar="N", help="Slurm: CPUs, and threads of NumPy, of each rank (1)")
    add("--srun", dest="with_srun", action="store_true", help="Slurm: srun starts the ranks, with Open MPI alone")
    add("--pe", dest="parallel_environment", default="", metavar="NAME",
        help="Grid Engine: the parallel environment (mpi); see qconf -spl")  # fmt: skip
    # Last: it takes all words from the first that is no option.
    add("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="what every rank runs")


def _run(options: argparse.Namespace) -> int:
    options.command = command_words(options.parser, options.command, "mpikv submit slurm -n 2 -- python train.py")

    def job() -> Job:
        options.time_s = None if options.time is None else parse_time(options.time)
        given: dict[str, Any] = {one.name: getattr(options, one.name, one.default) for one in fields(Job)}
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return Job(**{**given, **lists})

    return _guarded(job, options, wait=options.wait, command="mpikv submit")


def launch(options: argparse.Namespace) -> int:
    """`mpikv launch --launcher slurm|sge`: submit and wait. options: those of `mpikv.commands.launch.options`."""
    hosts = "where the scheduler gives hosts that share the current folder"
    role = "where a rank's role is known only when it runs; use --env"

    def job() -> Job:
        for option, given, why in (
            ("--hostfile and --hosts", options.hostfile or options.hosts, hosts),
            ("--sync-dst-dir", options.sync_dst_dir, hosts),
            ("--oversubscribe", options.oversubscribe, hosts),
            ("--env-worker and --env-server", options.env_worker or options.env_server, role),
        ):
            if given:
                raise ConfigError(f"{option}: not with --launcher {options.launcher}, {why}")
        return Job(
            options.launcher,
            workers=options.num_workers,
            servers=options.num_workers if options.num_servers is None else options.num_servers,
            command=tuple(options.command),
            time_s=None if options.timeout is None else max(round(options.timeout), 1),
            notice_s=NOTICE_S if options.timeout is None else min(NOTICE_S, int(options.timeout) // 2),
            output_dir=options.output_dir or "",
            python_env=this_environment(),
            launch_options=tuple(options.mpirun_options),
        )

    return _guarded(job, options, wait=True, command="mpikv launch")


def _guarded(job: Callable[[], Job], options: argparse.Namespace, *, wait: bool, command: str) -> int:
    try:
        variables = environment.read_pairs("--env", options.env, os.environ)
        return submit_and_follow(job(), variables, wait=wait, dry_run=options.dry_run, command=command)
    except ConfigError as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return BAD_INPUT


def submit_and_follow(
    job: Job,
    variables: Mapping[str, str] | None = None,
    *,
    wait: bool,
    dry_run: bool = False,
    command: str = "mpikv submit",
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Submit a job, and with `wait` show its output until it ends. The status to exit with.

    variables: for all ranks. Schedulers may show scripts, and Grid Engine a job's environment, to every user: so their
    values are in neither, but in a file beside the output that its user alone can read; `wait` removes it in the end.
    out: for the job's output, or with `dry_run` its script; err: for what the command says; default this process's.
    Raises ConfigError where the job is wrong or refused, or the scheduler cannot be reached.
    """
    out, variables = out or sys.stdout, variables or {}

    def say(text: str) -> None:
        print(f"{command}: {text}", file=err or sys.stderr, flush=True)

    if variables:
        name = f"{job.name}.env" if dry_run else f".mpikv-{uuid.uuid4().hex[:16]}.env"
        job = replace(job, environ=tuple(variables), environment=os.path.abspath(os.path.join(job.output_dir, name)))
    job = replace(job, passed=tuple(sorted(environment.always(os.environ).keys() - variables.keys())))
    scheduler = SCHEDULERS[job.check().scheduler]
    script = scheduler.script(job)
    if dry_run:
        out.write(script)
        if variables:
            say(f"values of --env are not printed: {job.environment} is to have a line export NAME=VALUE for each of "
                f"{', '.join(variables)}, and mode 600")  # fmt: skip
        return 0
    submitted = False
    try:
        try:
            if job.output_dir:
                Path(job.output_dir).mkdir(parents=True, exist_ok=True)
            if variables:
                write_private(job.environment, environment_file(variables))
            job_id = scheduler.submit(script, variables)
        except OSError as error:
            raise ConfigError(f"--output-dir {job.output_dir or '.'}: {error.strerror}") from None
        except SchedulerError as error:
            raise ConfigError(f"{scheduler.name} did not take the job: {error}") from None
        submitted = True
        path = job.output(job_id)
        say(f"{scheduler.name} job {job_id}: {job.workers} workers, {job.servers} servers; output in {path}")
        if not wait:
            return 0
        follow = Follower(scheduler.name, job_id, job.output, scheduler.state, scheduler.cancel, say, out)
        return follow.run()
    finally:
        if variables and (wait or not submitted):
            with contextlib.suppress(OSError):
                os.remove(job.environment)


def this_environment() -> str:
    """The directory of the Python environment that runs this, "" where the job shall look for one itself."""
    return sys.prefix if (Path(sys.prefix) / "bin" / "python").exists() else ""
