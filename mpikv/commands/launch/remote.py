"""Other hosts: the remote shell, whether they answer, what is left on them, and where they reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpikv.commands.launch.hosts import Host, is_here
from mpikv.commands.launch.line import QUICK
from mpikv.commands.launch.processes import end_job
from mpikv.commands.launch.sweep import KILL_S, TERMINATE_S
from mpikv.config import AUTO_INTERFACE
from mpikv.errors import ConfigError
from mpikv.runtime.interface import choose, host_interfaces
from mpikv.runtime.launcher import OPEN_MPI

CONNECT_S = 5
ANSWER_S = 15.0  # after it has connected: a host under load
AT_ONCE = 32
SWEEP_S = 8.0
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


def check(hosts: Sequence[Host], words: Sequence[str]) -> None:
    """Ask every host for a sign of life, all at the same time. Raises ConfigError that says what each one said."""

    def ask(host: Host) -> str:
        status, _, said = run([*words, host.name, "true"], CONNECT_S + ANSWER_S)
        last = said.strip().splitlines()[-1] if said.strip() else f"status {status}"
        return "" if status == 0 else f"{host.name}: {last}"

    others = [host for host in hosts if not is_here(host.name)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(filter(None, pool.map(ask, others)))
    if wrong:
        raise ConfigError(f"{len(wrong)} of {len(hosts)} hosts cannot be used:\n  " + "\n  ".join(wrong))


def clean_up(job: str, hosts: Sequence[str], words: Sequence[str]) -> dict[str, str]:
    """End what the job has left here and on these hosts. What is wrong, by host: {} where nothing is left."""

    def sweep(host: str) -> str:
        status, printed, said = run([*words, host, sys.executable, "-I", "-S", str(QUICK), "sweep", job], SWEEP_S)
        with contextlib.suppress(ValueError):
            left = json.loads(printed)["left"]
            return f"processes {left} are left" if left else ""
        last = said.strip().splitlines()[-1] if said.strip() else f"status {status}"
        return f"it could not be looked at whether something is left: {last}"

    _, left = end_job(job, TERMINATE_S, KILL_S)
    wrong = {"this machine": f"processes {left} are left"} if left else {}
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


def run(words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command that may hang."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s,
            check=False, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {limit_s:g} s"
    except OSError as error:
        return 1, "", f"{words[0]}: {error.strerror}"
    return done.returncode, done.stdout, done.stderr
