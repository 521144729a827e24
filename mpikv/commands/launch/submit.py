"""`mpikv submit slurm|sge`: a batch script for a training, given to the scheduler, and followed with --wait.

The script is that of `scripts/`, with the options' values at its top.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
import uuid
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mpikv.commands.launch import line
from mpikv.commands.launch.batch import SYSTEMS, environment_file, script
from mpikv.commands.launch.follow import Follower
from mpikv.commands.launch.scheduler import BatchJob, SchedulerError, parse_time
from mpikv.common.files import write_private
from mpikv.errors import ConfigError

BAD_INPUT = 2


def submit(options: argparse.Namespace) -> int:
    """`mpikv submit`. options: each has the name of the field of `BatchJob` that it sets."""
    try:
        options.time_s = None if options.time is None else parse_time(options.time)
        given: dict[str, Any] = {one.name: getattr(options, one.name, one.default) for one in fields(BatchJob)}
        given["python_env"] = sys.prefix if (Path(sys.prefix) / "bin" / "python").exists() else ""
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return _run(BatchJob(**{**given, **lists}), options)
    except ConfigError as error:
        print(f"mpikv submit: error: {error}", file=sys.stderr)
        return BAD_INPUT


def _say(text: str) -> None:
    print(f"mpikv submit: {text}", file=sys.stderr, flush=True)


def _run(job: BatchJob, options: argparse.Namespace) -> int:
    """Submit a job, and with --wait show its output until it ends. The status to exit with.

    Schedulers may show scripts, and Grid Engine a job's environment, to every user: so the values of --env are in
    neither, but in a file beside the output that its user alone can read; --wait removes it in the end. Raises
    ConfigError where the job is wrong or refused, or the scheduler cannot be reached.
    """

    variables = line.read_pairs("--env", options.env, os.environ)
    if variables:
        name = f"{job.name}.env" if options.dry_run else f".mpikv-{uuid.uuid4().hex[:16]}.env"
        folder = job.output_dir if options.dry_run else _folder_of_variables(job)
        job = replace(job, environ=tuple(variables), environment=os.path.abspath(os.path.join(folder, name)))
    job = replace(job, passed=tuple(sorted(line.always(os.environ).keys() - variables.keys())))
    text = script(job)
    if options.dry_run:
        sys.stdout.write(text)
        if variables:
            _say(f"values of --env are not printed: {job.environment} is to have a line export NAME=VALUE for each of "
                f"{', '.join(variables)}, and mode 600")  # fmt: skip
        return 0
    system, submitted = SYSTEMS[job.scheduler], False
    try:
        job_id = _submit(job, text, variables)
        submitted = True
        _say(
            f"{system.name} job {job_id}: {job.workers} workers, {job.servers} servers; output in {job.output(job_id)}"
        )
        if not options.wait:
            return 0
        return Follower(system.name, job_id, job.output, system.state, system.cancel, _say, sys.stdout).run()
    finally:
        if variables and (options.wait or not submitted):
            with contextlib.suppress(OSError):
                os.remove(job.environment)


def _folder_of_variables(job: BatchJob) -> str:
    """Where the file of --env lies: beside the output, or at home if others could replace there what is run."""
    folder = job.output_dir or "."
    os.makedirs(folder, exist_ok=True)
    place = Path(folder).resolve()
    # In a folder with the sticky bit, such as /tmp, nobody renames what is another's.
    above = [one.stat() for one in place.parents]
    ours = _only_ours(place.stat()) and all(_only_ours(one, 0) or one.st_mode & stat.S_ISVTX for one in above)
    return folder if ours else os.path.expanduser("~")


def _only_ours(status: os.stat_result, *others: int) -> bool:
    """Whether this user, or one of these others, owns a folder that nobody else may write to."""
    return status.st_uid in (os.geteuid(), *others) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _submit(job: BatchJob, text: str, variables: Mapping[str, str]) -> str:
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
