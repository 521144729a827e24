"""Other hosts: the remote shell, whether they answer, what is left on them, and where they reach this one."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpikv.commands.launch import quick
from mpikv.commands.launch.hosts import Host, is_here
from mpikv.commands.launch.processes import end_job, run
from mpikv.config import AUTO_INTERFACE
from mpikv.errors import ConfigError
from mpikv.runtime.interface import choose, host_interfaces
from mpikv.runtime.launcher import OPEN_MPI

AT_ONCE = 32
CONNECT_S = 5
ANSWER_S = 15.0  # after it has connected: a host under load
SWEEP_S = 8.0
HERE = "this machine"
# No questions on the terminal, and no waiting for a host that does not answer.
PATIENCE = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")


def shell(text: str, hosts: Sequence[Host]) -> tuple[str, ...]:
    """The words of the remote shell. text: as `--ssh` gives them. Raises ConfigError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--ssh {text!r}: {error}") from None
    if not words:
        raise ConfigError("--ssh is empty: it is like 'ssh -p 2222'")
    users = {host.user for host in hosts}
    if len(users) > 1:
        raise ConfigError("hosts with different users, or with and without: name them in ~/.ssh/config")
    if os.path.basename(words[0]) == "ssh":
        words += PATIENCE
    return (*words, *(("-l", users.pop()) if users != {""} else ()))


def check_program(words: Sequence[str]) -> None:
    """Raise ConfigError where this machine has no such remote shell."""
    if shutil.which(words[0]) is None:
        how = ": apt-get install openssh-client" if words[0] == "ssh" else ""
        raise ConfigError(f"other hosts are reached by {words[0]}, which is not on this machine{how}")


def silent(hosts: Sequence[Host], words: Sequence[str]) -> dict[str, str]:
    """Ask every host for a sign of life, all at the same time. What is wrong, by host."""

    def ask(host: Host) -> str:
        status, _, errors = run([*words, host.name, "true"], CONNECT_S + ANSWER_S)
        return "" if status == 0 else _last_line(errors, status)

    others = [host for host in hosts if not is_here(host.name)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {host.name: wrong for host, wrong in zip(others, pool.map(ask, others), strict=True) if wrong}


def check(hosts: Sequence[Host], words: Sequence[str]) -> None:
    """Raise ConfigError, with each one's answer, where hosts give no sign of life."""
    wrong = silent(hosts, words)
    if wrong:
        listed = "\n  ".join(f"{host}: {what}" for host, what in wrong.items())
        raise ConfigError(f"{len(wrong)} of {len(hosts)} hosts cannot be used:\n  {listed}")


def clean_up(job: str, hosts: Sequence[str], words: Sequence[str], *folders: str) -> dict[str, str]:
    """End what the job has left here and on these hosts, and remove folders. What is wrong, by host: {} for nothing."""

    def sweep(host: str) -> str:
        status, printed, errors = run([*words, host, *quick.command("sweep", job, *folders)], SWEEP_S)
        try:
            left = json.loads(printed)
        except ValueError:
            return f"it could not be looked at whether something is left: {_last_line(errors, status)}"
        return f"processes {left} are left" if left else ""

    left = end_job(job)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = {HERE: f"processes {left} are left"} if left else {}
    others = [host for host in hosts if not is_here(host)] if words else []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong |= {host: what for host, what in zip(others, pool.map(sweep, others), strict=True) if what}
    return wrong


def addresses(value: str) -> list[str]:
    """This machine's addresses, by one of which another host can reach it. value: MPIKV_INTERFACE.

    Raises ConfigError where no interface here is what it names.
    """
    interfaces = host_interfaces() if value == AUTO_INTERFACE else choose(OPEN_MPI, value, {}).interfaces
    found = [ipaddress.ip_interface(text).ip for interface in interfaces for text in interface.addresses]
    usable = [one for one in found if not one.is_link_local]  # which needs a scope that is each host's own
    return [str(one) for one in sorted(usable, key=lambda one: one.is_loopback)]


def _last_line(text: str, status: int) -> str:
    return text.strip().splitlines()[-1] if text.strip() else f"status {status}"
