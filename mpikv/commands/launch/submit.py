"""`mpikv submit slurm|sge`: a batch script for a training, given to the scheduler, and followed with --wait.

The script is that of `scripts/`, with the options' values at its top. `mpikv launch --launcher slurm|sge` does the same
and always waits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mpikv.commands.launch import environment
from mpikv.commands.launch.batch import SYSTEMS, environment_file, script
from mpikv.commands.launch.follow import Follower
from mpikv.commands.launch.scheduler import NOTICE_S, BatchJob, SchedulerError, parse_time
from mpikv.commands.launch.sync import own
from mpikv.common.files import write_private
from mpikv.errors import ConfigError

BAD_INPUT = 2


def submit(options: argparse.Namespace) -> int:
    """`mpikv submit`. options: each has the name of the field of `BatchJob` that it sets."""
    try:
        options.time_s = None if options.time is None else parse_time(options.time)
        given: dict[str, Any] = {one.name: getattr(options, one.name, one.default) for one in fields(BatchJob)}
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return _run(BatchJob(**{**given, **lists}), options, "mpikv submit", wait=options.wait)
    except ConfigError as error:
        print(f"mpikv submit: error: {error}", file=sys.stderr)
        return BAD_INPUT


def launch(options: argparse.Namespace) -> int:
    """`mpikv launch --launcher slurm|sge`: submit and wait. options: those of launch, and python_env."""
    hosts = "where the scheduler gives hosts that share the current folder"
    role = "where a rank's role is known only when it runs; use --env"
    try:
        for option, given, why in (
            ("--hostfile and --hosts", options.hostfile or options.hosts, hosts),
            ("--sync-dst-dir", options.sync_dst_dir, hosts),
            ("--oversubscribe", options.oversubscribe, hosts),
            ("--env-worker and --env-server", options.env_worker or options.env_server, role),
        ):
            if given:
                raise ConfigError(f"{option}: not with --launcher {options.launcher}, {why}")
        job = BatchJob(
            options.launcher,
            workers=options.num_workers,
            servers=options.num_workers if options.num_servers is None else options.num_servers,
            command=tuple(options.command),
            time_s=None if options.timeout is None else max(round(options.timeout), 1),
            notice_s=NOTICE_S if options.timeout is None else min(NOTICE_S, int(options.timeout) // 2),
            output_dir=options.output_dir or "",
            python_env=options.python_env,
            launch_options=tuple(options.mpirun_options),
        )
        return _run(job, options, "mpikv launch", wait=True)
    except ConfigError as error:
        print(f"mpikv launch: error: {error}", file=sys.stderr)
        return BAD_INPUT


def _run(job: BatchJob, options: argparse.Namespace, command: str, *, wait: bool) -> int:
    """Submit a job, and with `wait` show its output until it ends. The status to exit with.

    Schedulers may show scripts, and Grid Engine a job's environment, to every user: so the values of --env are in
    neither, but in a file beside the output that its user alone can read; `wait` removes it in the end. Raises
    ConfigError where the job is wrong or refused, or the scheduler cannot be reached.
    """

    def say(text: str) -> None:
        print(f"{command}: {text}", file=sys.stderr, flush=True)

    variables = environment.read_pairs("--env", options.env, os.environ)
    if variables:
        name = f"{job.name}.env" if options.dry_run else f".mpikv-{uuid.uuid4().hex[:16]}.env"
        folder = job.output_dir if options.dry_run else _folder_of_variables(job)
        job = replace(job, environ=tuple(variables), environment=os.path.abspath(os.path.join(folder, name)))
    job = replace(job, passed=tuple(sorted(environment.always(os.environ).keys() - variables.keys())))
    text = script(job)
    if options.dry_run:
        sys.stdout.write(text)
        if variables:
            say(f"values of --env are not printed: {job.environment} is to have a line export NAME=VALUE for each of "
                f"{', '.join(variables)}, and mode 600")  # fmt: skip
        return 0
    system, submitted = SYSTEMS[job.scheduler], False
    try:
        job_id = _submit(job, text, variables)
        submitted = True
        say(f"{system.name} job {job_id}: {job.workers} workers, {job.servers} servers; output in {job.output(job_id)}")
        if not wait:
            return 0
        return Follower(system.name, job_id, job.output, system.state, system.cancel, say, sys.stdout).run()
    finally:
        if variables and (wait or not submitted):
            with contextlib.suppress(OSError):
                os.remove(job.environment)


def _folder_of_variables(job: BatchJob) -> str:
    """Return where the file of --env lies: beside the output, or at home if others could replace there what is run."""
    try:
        os.makedirs(job.output_dir or ".", exist_ok=True)  # `own` would let nobody else read the output
        own(job.output_dir or ".")
    except OSError:
        return os.path.expanduser("~")
    return job.output_dir


def _submit(job: BatchJob, text: str, variables: Mapping[str, str]) -> str:
    """Submit the script; the job's number."""
    system = SYSTEMS[job.scheduler]
    try:
        if job.output_dir:
            Path(job.output_dir).mkdir(parents=True, exist_ok=True)
        if variables:
            write_private(job.environment, environment_file(variables))
        return system.submit(text, variables)
    except OSError as error:
        raise ConfigError(f"--output-dir {job.output_dir or '.'}: {error.strerror}") from None
    except SchedulerError as error:
        raise ConfigError(f"{system.name} did not take the job: {error}") from None
