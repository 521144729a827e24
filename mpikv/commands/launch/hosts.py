"""The hosts of a job: those of a host file, or those that Slurm or Grid Engine has given to the job around it.

A host file has `host`, `host:slots`, `host slots=4` or `[user@]host`, one host a line, `#` begins a comment: both Open
MPI's and MPICH's forms. A host that is named twice has the sum of its slots. MXNet's host files have `host:port` in the
place of slots; the port belongs into `--ssh 'ssh -p PORT'` or ~/.ssh/config.

Slurm names its hosts in two variables, SLURM_JOB_NODELIST (`n[1-3,7],m2`) and SLURM_TASKS_PER_NODE (`4(x3),2`, see
sbatch(1)); Grid Engine in the file PE_HOSTFILE, a host, its slots, a queue and processors a line (sge_pe(5)). So no
tool of the scheduler has to be called. Other schedulers' hosts are left to `mpirun`, which knows several.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mpikv.commands.launch.channel import is_own
from mpikv.common.checks import plain
from mpikv.common.files import read_text
from mpikv.errors import ConfigError

# Both become words of a remote shell's line: neither begins with a dash nor has a character that a shell knows.
USER = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
NAME = re.compile(r"\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
ENTRY = re.compile(rf"(?:(?P<user>{USER.pattern})@)?(?P<host>{NAME.pattern})(?::(?P<slots>\d+))?", re.ASCII)
LIKELY_PORT = 1000  # no host has so many slots; 22, the usual port, looks like a number of slots
OTHER_SCHEDULERS = ("PBS_NODEFILE", "LSB_HOSTS", "COBALT_NODEFILE")
# Grid Engine's remote shell within a job; the host's name follows. Not -V, which leaves the whole environment, the
# secret of the job with it, in files that every user of that host can read.
QRSH = ("qrsh", "-inherit", "-nostdin", "-v", "PATH,LD_LIBRARY_PATH")
# A step beside those that run, for looking at what is left.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--quiet", "--nodelist")
# The same for the srun by which mpirun starts its daemons: a step of before keeps its slots while a host of it is lost.
OVERLAP = {"SLURM_OVERLAP": "1"}


class Host(NamedTuple):
    """One host. slots: how many ranks it takes, None where nothing says so. user: "" for this one."""

    name: str
    slots: int | None = None
    user: str = ""


def read(path: str | Path) -> list[Host]:
    """The hosts of a file, or of `h1:2,h2`, each once and in order. Raises ConfigError."""
    if not os.path.exists(path) and re.search("[,:]", str(path)) and "/" not in str(path):
        return parse(str(path))
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise ConfigError(f"host file {path}: {reason}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if words:
            try:
                hosts.append(_entry(words[0], words[1:]))
            except ValueError as error:
                what = f"{path}:{number}: {plain(error)}"
                raise ConfigError(f"{what}; a line is `host`, `host:4` or `host slots=4`") from None
    if not hosts:
        raise ConfigError(f"host file {path} names no host")
    try:
        return _merged(hosts)
    except ValueError as error:
        raise ConfigError(f"host file {path}: {plain(error)}") from None


def parse(text: str) -> list[Host]:
    """The hosts of `h1:2,h2`. Raises ConfigError."""
    try:
        return _merged(_entry(one.strip(), []) for one in text.split(","))
    except ValueError as error:
        raise ConfigError(f"-H {plain(text)}: {plain(error)}; it is a file, or like h1:2,h2") from None


def _entry(word: str, options: list[str]) -> Host:
    found = ENTRY.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} is no host")
    slots = None if found["slots"] is None else int(found["slots"])
    user = found["user"] or ""
    for option in options:
        name, equals, value = option.partition("=")
        if name in ("slots", "max_slots", "max-slots") and equals and value.isdigit():
            slots = int(value) if name == "slots" or slots is None else slots
        elif name == "user" and USER.fullmatch(value):  # MPICH's
            user = value
        else:
            raise ValueError(f"{option!r} is none of slots=NUMBER and user=NAME")
    if slots == 0:
        raise ValueError(f"{word!r} has no slots")
    if slots is not None and slots >= LIKELY_PORT:
        raise ValueError(f"{slots} slots on {found['host']}? A port belongs into --ssh 'ssh -p {slots}'")
    return Host(found["host"], slots, user)


def _merged(hosts: Iterable[Host]) -> list[Host]:
    """Each host once. One without slots that is named twice has a slot for each time."""
    found: dict[str, Host] = {}
    for host in hosts:
        other = found.get(host.name)
        if other is None:
            found[host.name] = host
        elif other.user != host.user:
            raise ValueError(f"{host.name} has two users, {other.user or 'none'} and {host.user or 'none'}")
        else:
            found[host.name] = other._replace(slots=(other.slots or 1) + (host.slots or 1))
    return list(found.values())


def is_here(name: str) -> bool:
    """Whether the host is this machine: by name, or an address of it is one that we can bind."""
    here = socket.gethostname()
    if name in ("localhost", here, here.split(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(is_own(str(address[0])) for *_, address in found)


# --- the allocation of a scheduler


def in_allocation(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in ("SLURM_JOB_NODELIST", "PE_HOSTFILE", *OTHER_SCHEDULERS))


def allocated(environ: Mapping[str, str]) -> list[Host]:
    """The hosts of the allocation with their slots; [] outside of one. Raises ConfigError for what cannot be read."""
    if environ.get("SLURM_JOB_NODELIST"):
        names = expand(environ["SLURM_JOB_NODELIST"])
        # Without --ntasks SLURM_TASKS_PER_NODE may be missing, or be that of a step.
        for variable in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"):
            slots = counts(environ.get(variable, ""))
            if len(slots) == len(names):
                return [Host(name, n) for name, n in zip(names, slots, strict=True)]
        return [Host(name) for name in names]
    if environ.get("PE_HOSTFILE"):
        try:
            lines = [line.split() for line in read_text(environ["PE_HOSTFILE"]).splitlines() if line.strip()]
            found: dict[str, int] = {}
            for name, slots_text, *_ in lines:  # a host has a line for each of its queues
                found[_name(name)] = found.get(name, 0) + int(slots_text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"PE_HOSTFILE={environ['PE_HOSTFILE']} cannot be read: {plain(error)}") from None
        return [Host(name, n) for name, n in found.items()]
    return []


def allocated_shell(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What runs a command on another host of the allocation; () where it is ssh."""
    if environ.get("SLURM_JOB_NODELIST"):
        return SRUN
    return QRSH if environ.get("PE_HOSTFILE") else ()


def expand(text: str) -> list[str]:
    """The names in `n[1-3,07],m2`: a number keeps its leading zeros. Raises ConfigError."""
    names: list[str] = []
    try:
        # Commas within brackets belong to one name; there may be several brackets.
        for name in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
            found = [""]
            for start, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", name):
                found = [one + start + number for one in found for number in (_numbers(ranges) if ranges else [""])]
            names += map(_name, found)
    except ValueError as error:
        raise ConfigError(f"SLURM_JOB_NODELIST={plain(text)}: {plain(error)}") from None
    return names


def counts(text: str) -> list[int]:
    """The numbers in `4(x3),2`: 4, 4, 4, 2. [] where it is something else."""
    found: list[int] = []
    for one in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", one)
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise ValueError(f"{one!r} is no range of numbers")
        numbers += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return numbers


def _name(name: str) -> str:
    """The name of a host, as a scheduler gave it. Raises ValueError where it is none."""
    if NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no host")
    return name
