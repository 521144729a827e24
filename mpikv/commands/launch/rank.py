"""The process above each rank: `quick.py rank ROLE FIRST-NUMBER FIRST-RANK -- COMMAND...`.

It starts the command in a process group of its own and answers for it. Lines that the command prints go to the launcher
whole, so that those of different ranks never mix; signals from `mpirun` or from the launcher go to the command, and not
to what a rank has started; its end is reported with its status, and what it leaves running is ended. Where the launcher
or `mpirun` is gone, it ends the command. The command gets this process's environment and open files: MPICH's ranks
speak to their daemon through an inherited one.

`mpirun` may kill what it has started without a word, MPICH's when any rank aborts. So its own child is only a stand-in,
which passes signals on and copies the status; the process that does the above is the stand-in's child, and has time to
let the command end and to report how it did.

Only the standard library is imported: see quick.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpikv.commands.launch import channel
from mpikv.commands.launch.command import FORWARDED, GRACE_S, Command
from mpikv.commands.launch.processes import JOB, die_with_parent, woken_by
from mpikv.common import proc
from mpikv.runtime.launcher import said_rank

LAUNCH = "_MPIKV_LAUNCH"  # JSON: job, secret, addresses, network, folder, env, grace_s, patience_s
COLON = re.compile(r"\\*:")
DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
DAEMON_S = 1.0  # to end by itself
NO_LAUNCHER = 125  # as timeout(1) has it for failures of its own


def main(arguments: Sequence[str]) -> int:
    """Run the command to its end. Returns its status; a signal that ended it ends this process, too."""
    parent = os.getppid()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(read_end)
        return stand_in(child, parent)
    os.close(write_end)
    os.setpgid(0, 0)
    status = 128
    try:
        status = answer(arguments, read_end, daemon=parent)
    finally:
        os._exit(status)  # nothing to clean up that the kernel does not


def stand_in(child: int, parent: int) -> int:
    """Be what mpirun has started: pass signals on to `child`, and end as it does."""
    awaited = {*FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # a handler would not see what comes just before a wait begins
    die_with_parent(parent, signal.SIGTERM)()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        signum = signal.sigwait(awaited)
        if signum != signal.SIGCHLD:
            os.kill(child, signum)
    status = os.waitstatus_to_exitcode(ended[1])
    if status < 0:
        return 128 - status
    return die_of(status - 128) if status - 128 in signal.valid_signals() else status


def die_of(signum: int) -> int:
    """End this process by a signal, so that mpirun sees how the command ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its own core file
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    return 128 + signum  # a signal that ends nothing


def guarded(word: str) -> str:
    """A word of the command in a form that mpirun does not take for the `:` between programs."""
    return f"\\{word}" if COLON.fullmatch(word) else word


def unguarded(word: str) -> str:
    return word[1:] if word[:1] == "\\" and COLON.fullmatch(word) else word


def answer(arguments: Sequence[str], stand_in_ended: int, daemon: int) -> int:
    """Run the command, report on it, and return its status; 128 + N for signal N. daemon: mpirun's process here."""
    role, first_number, first_rank, dashes, *command = arguments
    assert dashes == "--", dashes
    rank, host = said_rank(os.environ), socket.gethostname()
    number = int(first_number) + rank - int(first_rank)
    plan = json.loads(os.environ.pop(LAUNCH))
    addresses, patience_s = [(address, port) for address, port in plan["addresses"]], plan.get("patience_s")
    try:
        launcher = channel.ToLauncher(addresses, plan["network"], plan["secret"])
    except ConnectionError as error:
        print(
            f"mpikv launch: {role} {number} @ {host} cannot reach the launcher ({error}): the hosts of a job must "
            "reach each other on any port, as mpirun itself needs it; MPIKV_INTERFACE names the network to use",
            file=sys.stderr,
            flush=True,
        )
        return NO_LAUNCHER
    # Now: this process may be killed as soon as it has started the command.
    launcher.write(channel.message(channel.HELLO, rank=rank, host=host))
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # mpirun waits for all who hold its pipes
        os.dup2(nothing, stream)
    with woken_by((*FORWARDED, signal.SIGCHLD)) as wakeup:
        above = Command(launcher, wakeup, stand_in_ended, plan.get("grace_s", GRACE_S), patience_s)
        words = [unguarded(word) for word in command]
        status = above.run(words, environment(os.environ, plan, role, number), plan.get("folder"))
        if above.abandoned:
            end_daemon(daemon)
    if status and patience_s:
        status = -signal.SIGKILL  # Open MPI tells the others of no other end
    return 128 - status if status < 0 else status


def end_daemon(pid: int) -> None:
    """End mpirun's daemon on this host. Cut off from mpirun it would wait for minutes, with nothing to run."""
    if proc.text(f"{pid}/comm").strip() in DAEMONS:
        time.sleep(DAEMON_S)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)


def environment(environ: Mapping[str, str], plan: Mapping[str, Any], role: str, number: int) -> dict[str, str]:
    job = {JOB: f"{plan['job']}/{role}-{number}"}
    # A pipe is no terminal, so Python would keep what it prints until it has 8 KiB of it.
    return {"PYTHONUNBUFFERED": "1", **environ, **plan.get("env", {}), **job}
