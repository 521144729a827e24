"""One job from its options to its status: which hosts, which line, the watch over it, and what is left in the end."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpikv.commands.launch import allocation, channel, environment, hosts, line, remote, sync
from mpikv.commands.launch.command import GRACE_S, NOT_FOUND
from mpikv.commands.launch.hosts import Host
from mpikv.commands.launch.output import Output
from mpikv.commands.launch.placement import Block, place
from mpikv.commands.launch.processes import JOB
from mpikv.commands.launch.rank import LAUNCH
from mpikv.commands.launch.ranks import FAILED
from mpikv.commands.launch.watch import Limits, Watch
from mpikv.commands.mpirun import AS_ROOT, find_mpirun, identify
from mpikv.common import checks
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.runtime.interface import mpirun_variables
from mpikv.runtime.launcher import OPEN_MPI

BAD_INPUT = 2
NOT_SHOWN = "***"  # by --dry-run, for a value of --env
PYTHON = re.compile(r"python(\d(\.\d+)?)?")


class Job(NamedTuple):
    """What is to be started. shell: what runs a command on another host, () where there is none."""

    hosts: list[Host]
    blocks: list[Block]
    words: list[str]
    variables: dict[str, str]  # of mpirun beyond this environment
    shell: tuple[str, ...]
    folder: str
    given: dict[str, dict[str, str]]  # environment by role
    secret: str
    id: str
    addresses: list[str]  # of this machine; none where only this machine has ranks
    limits: Limits


def run(options: argparse.Namespace) -> int:
    """Start the job and watch it to its end. Its status, BAD_INPUT where nothing was started."""
    try:
        job = prepare(options, os.environ)
        if options.dry_run:
            if options.sync_dst_dir:
                for host in job.hosts:
                    print(shlex.join(sync.command(host, os.getcwd(), options.sync_dst_dir, job.shell, _own(options))))
            print(line.shown(job.words, _to_type(job, os.environ)))
            if NOT_SHOWN in (value for pairs in job.given.values() for value in pairs.values()):
                print(
                    f"mpikv launch: values of --env are not printed: put them in the places of {NOT_SHOWN}",
                    file=sys.stderr,
                )
            return 0
        output = Output(Path(options.output_dir) if options.output_dir else None)
    except (ConfigError, ValueError) as error:
        print(f"mpikv launch: error: {error}", file=sys.stderr, flush=True)
        return NOT_FOUND if isinstance(error, NoCommandError) else BAD_INPUT
    try:
        return _start(job, options, output)
    except ConfigError as error:
        output.say(f"error: {error}")
        return FAILED
    finally:
        output.close()


class NoCommandError(ConfigError):
    """The command is not on this machine."""


def prepare(options: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """Check everything that can be checked without starting anything. Raises ConfigError."""
    config = Config.from_environ(environ)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder, in which the ranks would run, was removed: change to another") from None
    servers = options.num_workers if options.num_servers is None else options.num_servers
    chosen = _hosts(options, environ)
    scheduled = allocation.inside(environ) and options.launcher == "mpi" and not (options.hostfile or options.hosts)
    if options.sync_dst_dir:
        if scheduled or not chosen:
            raise ConfigError("--sync-dst-dir copies to hosts, and none were given: -H FILE or --hosts h1,h2")
        sync.check(options.sync_dst_dir, os.getcwd())
    elsewhere = scheduled or not all(hosts.is_here(host.name) for host in chosen)
    _check_command(options.command, here=not elsewhere)
    mpirun = identify(find_mpirun(config.mpi, environ, who="mpikv launch"))
    blocks = place(chosen, options.num_workers, servers, oversubscribe=options.oversubscribe)
    shell: tuple[str, ...] = ()
    if chosen and elsewhere:
        shell = allocation.remote_shell(environ) if scheduled and not options.ssh else ()
        shell = shell or remote.shell(options.ssh or "ssh", chosen)
    # mpirun starts its daemons through Slurm itself. Open MPI 5 does not know Grid Engine; hydra gives it all values.
    alone = scheduled and not options.ssh and "PE_HOSTFILE" not in environ
    given = environment.asked(options, environ)
    limits = _limits(options, Config.from_environ({**environ, **given["all"], **given["worker"]}))
    if options.dry_run:
        given = {role: dict.fromkeys(pairs, NOT_SHOWN) for role, pairs in given.items()}
    given["all"] = {
        **(environment.always(environ) if elsewhere else {}),
        **line.package_path(environ),
        **given["all"],
        "MPIKV_NUM_SERVERS": str(servers),  # else a variable set here would make servers of workers
    }
    exported = sorted(given["all"]) if elsewhere else []
    words = line.build(
        mpirun,
        blocks,
        options.command,
        remote_shell=() if alone else shell,
        oversubscribe=options.oversubscribe or not (chosen or scheduled),
        more=options.mpirun_options,
        plain=line.Plain(options.sync_dst_dir or "", given, exported) if options.dry_run else None,
    )
    variables, addresses = mpirun.environment(() if alone else shell), []
    if elsewhere:
        family = OPEN_MPI if mpirun.is_open_mpi else mpirun.family
        variables |= mpirun_variables(family, config.interface)
        addresses = remote.addresses(config.interface)
    return Job(
        chosen, blocks, words, variables, shell,
        options.sync_dst_dir or os.getcwd(), given, secrets.token_hex(16), secrets.token_hex(8),
        addresses, limits,
    )  # fmt: skip


def _limits(options: argparse.Namespace, workers: Config) -> Limits:
    """The time limits. workers: their settings."""
    grace_s = GRACE_S if options.grace is None else options.grace
    save_s = workers.timeout_s if options.grace is None else options.grace  # as long as workers wait for each other
    saves = "TERM" in workers.stop_signals.split(",")
    return Limits(options.timeout, options.start_timeout, grace_s, save_s, saves)


def _hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> list[Host]:
    """The hosts that were named, or those of an allocation; none: then it is mpirun's choice."""
    if options.hostfile is not None and options.hosts is not None:
        raise ConfigError("-H and --hosts both name hosts: give one of them")
    chosen = []
    if options.hostfile is not None:
        chosen = hosts.read(options.hostfile)
    elif options.hosts is not None:
        chosen = hosts.parse(options.hosts)
    if options.launcher == "local" and chosen:
        raise ConfigError("--launcher local is this machine alone: leave the hosts out, or take --launcher ssh or mpi")
    if options.launcher == "ssh" and not chosen:
        raise ConfigError("--launcher ssh needs hosts: -H FILE with one a line, or --hosts h1,h2")
    if not chosen and allocation.inside(environ):  # here alone has to be said, for mpirun sees the allocation as well
        return [Host(socket.gethostname())] if options.launcher == "local" else allocation.hosts(environ)
    return chosen


def _check_command(command: Sequence[str], *, here: bool) -> None:
    """Raise NoCommandError for a command that this machine, where it is to run, does not have."""
    first = command[0]
    found = shutil.which(first)
    if first.endswith(".py") and found is None:
        raise NoCommandError(f"{first} is a Python script and no program: write `python {first}`")
    if here and found is None:
        reason = "is not executable" if os.path.isfile(first) else "no such command on this machine"
        raise NoCommandError(f"{first}: {reason}")
    if here and PYTHON.fullmatch(os.path.basename(first)) and command[1:2] and command[1].endswith(".py"):
        check_script(command[1])


def check_script(script: str) -> None:
    """Raise ConfigError where it is not there: else every rank's Python would say so."""
    if not os.path.exists(script):
        near = checks.meant(os.path.basename(script), sorted(path.name for path in Path(script).parent.glob("*.py")))
        raise ConfigError(f"{script}: no such file in {os.getcwd()}.{near}")


def _told(job: Job, addresses: Sequence[tuple[str, int]]) -> dict[str, str]:
    """The variables that tell the process above each rank what to do."""
    plan = {"job": job.id, "folder": job.folder, "env": job.given, "grace_s": job.limits.grace}
    plan |= {"addresses": list(addresses), "secret": job.secret, "network": channel.network()}
    return {LAUNCH: json.dumps(plan), JOB: f"{job.id}/mpirun"}


def _to_type(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go in front of a line that is typed here."""
    needed = {**job.variables, **job.given["all"]}
    as_root = AS_ROOT if os.geteuid() else ()
    return {name: value for name, value in needed.items() if environ.get(name) != value and name not in as_root}


def _own(options: argparse.Namespace) -> list[str]:
    """What the launcher itself writes into the current folder, and nobody needs elsewhere."""
    return [f"/{os.path.relpath(options.output_dir)}"] if options.output_dir else []


def _start(job: Job, options: argparse.Namespace, output: Output) -> int:
    if job.shell:
        remote.check_program(job.shell)
    if options.launcher == "ssh":
        remote.check(job.hosts, job.shell)
    if options.sync_dst_dir:
        sync.copy(job.hosts, os.getcwd(), options.sync_dst_dir, job.shell, say=output.say, left_out=_own(options))
    watch = Watch(
        job.blocks,
        job.secret,
        output,
        job.limits,
        job.addresses or ["127.0.0.1"],
    )
    verdict = watch.run(job.words, {**os.environ, **job.variables, **_told(job, watch.addresses)})
    if verdict.text:
        output.say(verdict.text)
    begun = {block.host for block in job.blocks if watch.ranks[block.first_rank].host}
    seen = sorted({rank.host for rank in watch.ranks.values() if rank.host} or {socket.gethostname()})
    left = remote.clean_up(job.id, sorted(begun - {""}) if verdict.status else [], job.shell)
    for host, what in left.items():
        output.say(f"{host}: {what}")
    if verdict.status != 0 and not left:
        output.say(f"no process of the job is left on {', '.join(seen)}")
    return verdict.status or (FAILED if left else 0)
