"""`mpikv launch` from its options to its status: which hosts, which line, the watch over the job, and what is left."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpikv.commands.launch import channel, hosts, line, remote
from mpikv.commands.launch.command import GRACE_S, NOT_FOUND
from mpikv.commands.launch.hosts import Host
from mpikv.commands.launch.output import Output
from mpikv.commands.launch.processes import JOB, woken_by
from mpikv.commands.launch.rank import LAUNCH
from mpikv.commands.launch.ranks import FAILED, LaunchedRank, RankBlock, place, workers_that_fit
from mpikv.commands.launch.restarts import Restarts
from mpikv.commands.launch.watch import ENDING, JobWatch, Limits
from mpikv.commands.mpirun import AS_ROOT, find_mpirun, identify
from mpikv.common import checks
from mpikv.common.snapshot_names import in_folder
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.runtime.interface import mpirun_variables
from mpikv.runtime.launcher import OPEN_MPI

BAD_INPUT = 2
NOT_SHOWN = "***"  # by --dry-run, for a value of --env
SNAPSHOTS, RESTART = "MPIKV_SNAPSHOT_DIR", "MPIKV_RESTART"
PYTHON = re.compile(r"python(\d(\.\d+)?)?")


class LaunchedJob(NamedTuple):
    """What is to be started. shell: what runs a command on another host, () where there is none."""

    hosts: list[Host]
    blocks: list[RankBlock]
    words: list[str]
    variables: dict[str, str]  # of mpirun beyond this environment
    shell: tuple[str, ...]
    given: dict[str, str]  # variables for all ranks
    addresses: list[str]  # of this machine
    limits: Limits
    patience_s: float | None  # how long ranks wait for each other, where they go on when one dies; else None


class NoCommandError(ConfigError):
    """The command is not on this machine."""


def run(options: argparse.Namespace) -> int:
    """Start the job and watch it to its end. Its status, BAD_INPUT where nothing was started."""
    try:
        job = prepare(options, os.environ)
        if options.dry_run:
            _show(job, options)
            return 0
        output = Output(Path(options.output_dir) if options.output_dir else None)
    except (ConfigError, ValueError) as error:
        print(f"mpikv launch: error: {error}", file=sys.stderr, flush=True)
        return NOT_FOUND if isinstance(error, NoCommandError) else BAD_INPUT
    try:
        _check_hosts(job, options)
        return _run(job, options, output)
    except ConfigError as error:
        output.say(f"error: {error}")
        return FAILED
    finally:
        output.close()


def _run(job: LaunchedJob, options: argparse.Namespace, output: Output) -> int:
    """Run the job, and after a failure again as often as it may be. The status of the last run."""
    restarts, begun_s = Restarts(options.restarts), time.monotonic()
    folder = ""  # of the snapshots, where it is ours
    if options.restarts and not {**os.environ, **job.given}.get(SNAPSHOTS):
        # Not where Grid Engine tells: it empties a job's own directory whenever a task ends there.
        place = "/tmp" if hosts.in_allocation(os.environ) else tempfile.gettempdir()
        folder = os.path.join(place, f"mpikv-{secrets.token_hex(8)}-snapshots")
    without: set[str] = set()  # hosts that are gone
    with woken_by(ENDING) as wakeup:  # between two runs; in a run they are its own
        while True:
            if options.restarts:
                job.given.update({RESTART: str(restarts.made)} | ({SNAPSHOTS: folder} if folder else {}))
            ended = _start(job, output, restarts, folder)
            if not ended.again:
                return ended.status
            if job.shell:  # a host that is shut down ends its ranks, which say so, before it goes away
                without |= remote.silent(job.hosts, job.shell).keys()
            try:
                job = prepare(options, os.environ, without)
            except ConfigError as error:
                return _not_again(str(error), ended.status, output, folder, ended.state)
            if job.shell == hosts.SRUN:
                job.variables.update(hosts.OVERLAP)
            with contextlib.suppress(BlockingIOError):
                signum = wakeup.recv(1)[0]
                return _not_again(f"ended by {signal.Signals(signum).name}", 128 + signum, output, folder, ended.state)
            if options.timeout is not None:
                left_s = max(1.0, begun_s + options.timeout - time.monotonic())
                job = job._replace(limits=job.limits._replace(job=left_s))


def _not_again(why: str, status: int, output: Output, folder: str, state: str) -> int:
    output.say(f"not started again: {why}")
    _say_where(output, folder, state)
    return status


def prepare(options: argparse.Namespace, environ: Mapping[str, str], without: Collection[str] = ()) -> LaunchedJob:
    """Check everything that can be checked without starting anything. Raises ConfigError.

    without: hosts that are not used, for which there may be fewer workers.
    """
    config = Config.from_environ(environ)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder, in which the ranks would run, was removed: change to another") from None
    servers = options.num_workers if options.num_servers is None else options.num_servers
    named = hosts.read(options.hostfile) if options.hostfile else []
    if options.launcher == "local" and named:
        raise ConfigError("--launcher local is this machine alone: leave the hosts out, or take --launcher ssh or mpi")
    if options.launcher == "ssh" and not named:
        raise ConfigError("--launcher ssh needs hosts: -H FILE with one a line, or -H h1,h2")
    scheduled = not named and options.launcher == "mpi" and hosts.in_allocation(environ)
    chosen = [host for host in named or _of_allocation(options, environ) if host.name not in without]
    workers = options.num_workers
    if without and not options.oversubscribe:
        workers = workers_that_fit(chosen, workers, servers, options.min_workers)
    elsewhere = scheduled or not all(hosts.is_here(host.name) for host in chosen)
    _check_command(options.command, here=not elsewhere)
    mpirun = identify(find_mpirun(environ, who="mpikv launch"))
    blocks = place(chosen, workers, servers, oversubscribe=options.oversubscribe)
    shell: tuple[str, ...] = ()
    if chosen and elsewhere:
        shell = hosts.allocated_shell(environ) if scheduled and not options.ssh else ()
        shell = shell or remote.shell(options.ssh or "ssh", chosen)
    # mpirun starts its daemons through Slurm itself. Open MPI 5 does not know Grid Engine; hydra gives it all values.
    mpiruns_shell = () if scheduled and not options.ssh and "PE_HOSTFILE" not in environ else shell
    given = line.read_pairs("--env", options.env, environ)
    settings = Config.from_environ({**environ, **given})
    continues = (options.on_failure or settings.on_failure) == "continue"
    given = {
        **({"OMPI_MCA_coll": "^han"} if continues and elsewhere else {}),  # whose sums are wrong after a death
        **(line.always(environ) if elsewhere else {}),
        **line.package_path(environ),
        **(dict.fromkeys(given, NOT_SHOWN) if options.dry_run else given),
        **({"MPIKV_ON_FAILURE": options.on_failure} if options.on_failure else {}),
        "MPIKV_NUM_SERVERS": str(servers),  # else a variable set here would make servers of workers
    }
    words = line.build(
        mpirun,
        blocks,
        options.command,
        remote_shell=mpiruns_shell,
        oversubscribe=options.oversubscribe or not (chosen or scheduled),
        more=options.mpirun_options,
        continues=continues,
        to_type=(sorted(given) if elsewhere else []) if options.dry_run else None,
    )
    variables, addresses = mpirun.environment(mpiruns_shell), ["127.0.0.1"]
    if elsewhere:
        variables |= mpirun_variables(OPEN_MPI if mpirun.is_open_mpi else mpirun.family, config.interface)
        addresses = remote.addresses(config.interface)
    limits, patience_s = _limits(options, settings), settings.timeout_s if continues else None
    return LaunchedJob(chosen, blocks, words, variables, shell, given, addresses, limits, patience_s)


def _limits(options: argparse.Namespace, workers: Config) -> Limits:
    grace_s = GRACE_S if options.grace is None else options.grace
    save_s = workers.timeout_s if options.grace is None else options.grace  # as long as workers wait for each other
    saves = "TERM" in workers.stop_signals.split(",")
    return Limits(options.timeout, grace_s, save_s, saves)


def _of_allocation(options: argparse.Namespace, environ: Mapping[str, str]) -> list[Host]:
    """Those of an allocation; [] where it is mpirun's choice."""
    if options.launcher == "local" and hosts.in_allocation(environ):
        return [Host(socket.gethostname())]  # which has to be said, for mpirun sees the allocation as well
    return hosts.allocated(environ)


def _check_command(command: Sequence[str], *, here: bool) -> None:
    """Raise NoCommandError for a command that this machine, where it is to run, does not have."""
    first = command[0]
    found = shutil.which(first)
    if first.endswith(".py") and found is None:
        raise NoCommandError(f"{first} is a Python script and no program: write `python {first}`")
    if here and found is None:
        reason = "is not executable" if os.path.isfile(first) else "no such command on this machine"
        raise NoCommandError(f"{first}: {reason}")
    script = command[1] if command[1:] and PYTHON.fullmatch(os.path.basename(first)) else ""
    if here and script.endswith(".py") and not os.path.exists(script):  # else every rank's Python would say so
        near = checks.meant(os.path.basename(script), sorted(path.name for path in Path(script).parent.glob("*.py")))
        raise ConfigError(f"{script}: no such file in {os.getcwd()}.{near}")


def _show(job: LaunchedJob, options: argparse.Namespace) -> None:
    """Print the lines that start the same by hand."""
    needed = {**job.variables, **job.given}
    as_root = AS_ROOT if os.geteuid() else ()
    needed = {name: text for name, text in needed.items() if os.environ.get(name) != text and name not in as_root}
    print(line.shown(job.words, needed))
    if NOT_SHOWN in job.given.values():
        print(f"mpikv launch: values of --env are not printed: put them in the places of {NOT_SHOWN}", file=sys.stderr)


def _check_hosts(job: LaunchedJob, options: argparse.Namespace) -> None:
    """Raise ConfigError where other hosts cannot be reached."""
    if job.shell:
        remote.check_program(job.shell)
    if options.launcher == "ssh":
        remote.check(job.hosts, job.shell)


class RunEnd(NamedTuple):
    """How one run of the job has ended. again: whether another one is to follow. state: from which one, in words."""

    status: int
    again: bool
    state: str


def _start(job: LaunchedJob, output: Output, restarts: Restarts, folder: str) -> RunEnd:
    """Run the job once. folder: of the snapshots, to be removed where the job has succeeded; "" for none."""
    number, secret = secrets.token_hex(8), secrets.token_hex(16)
    watch = JobWatch(job.blocks, secret, output, job.limits, job.addresses, continues=job.patience_s is not None)
    plan = {
        "job": number,
        "secret": secret,
        "addresses": watch.addresses,
        "network": channel.network(),
        "folder": os.getcwd(),
        "env": job.given,
        "grace_s": job.limits.grace,
        "patience_s": job.patience_s,
    }
    # For the process above each rank, see rank.py.
    variables = {**job.variables, LAUNCH: json.dumps(plan), JOB: f"{number}/mpirun"}
    end = watch.run(job.words, {**os.environ, **variables})
    ranks = list(watch.ranks.values())
    restarts.note(_left(ranks, {**os.environ, **job.given}.get(SNAPSHOTS, "")))
    again, why_not = restarts.again(ranks, end, asked=watch.asked)
    stop_file = {**os.environ, **job.given}.get("MPIKV_STOP_FILE", "")
    state = restarts.goes_on_from(stop_file if os.path.exists(stop_file) else "")
    if again:
        why_not = f"starting again, {restarts.made} of {restarts.most}, {state}"
    if end.text:
        output.say("; ".join(filter(None, (end.text, why_not))))
    begun = {rank.host for rank in ranks} - {""}
    swept = {block.host for block in job.blocks for i in range(block.ranks) if watch.ranks[block.first_rank + i].host}
    goes_on = again or (end.status and restarts.saved)  # now, or by hand
    folders = [] if goes_on or not folder else [folder]
    left = remote.clean_up(number, sorted(swept - {""}) if end.status or folders else [], job.shell, *folders)
    for host, what in left.items():
        output.say(f"{host}: {what}{f'; {folder} may be left there' if folders else ''}")
    if end.status == 0:  # the ranks on other hosts have ended well, whether one can look there any more or not
        left = {host: what for host, what in left.items() if host == remote.HERE}
    if end.status != 0 and not again and not left:
        output.say(f"no process of the job is left on {', '.join(sorted(begun or {socket.gethostname()}))}")
    if goes_on and not again:
        _say_where(output, folder, state)
    return RunEnd(end.status or (FAILED if left else 0), again, state)


def _left(ranks: Sequence[LaunchedRank], folder: str) -> list[str]:
    """The names of the files of snapshots. Who was to report those of this host may have been killed."""
    here = any(rank.lost and hosts.is_here(rank.host) for rank in ranks)
    return [name for rank in ranks for name in rank.snapshots] + [str(name) for name in in_folder(folder) if here]


def _say_where(output: Output, folder: str, state: str) -> None:
    """Say what goes on by hand from the snapshots, where their folder is ours."""
    if folder:
        output.say(f"{SNAPSHOTS}={folder} goes on {state}, on the same hosts")
