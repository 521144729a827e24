"""Host files: `host`, `host:slots`, `host slots=4`, `[user@]host`, one host a line, `#` begins a comment.

Both Open MPI's and MPICH's forms are taken. A host that is named twice has the sum of its slots. MXNet's host files
have `host:port` in the place of slots; the port belongs into `--ssh 'ssh -p PORT'` or ~/.ssh/config.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import NamedTuple

from mpikv.commands.launch.channel import is_own
from mpikv.errors import ConfigError

# Both become words of a remote shell's line: neither begins with a dash nor has a character that a shell knows.
USER = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
NAME = re.compile(r"\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
ENTRY = re.compile(rf"(?:(?P<user>{USER.pattern})@)?(?P<host>{NAME.pattern})(?::(?P<slots>\d+))?", re.ASCII)
LIKELY_PORT = 1000  # no host has so many slots; 22, the usual port, cannot be told from a number of slots


class Host(NamedTuple):
    """One host. slots: how many ranks it takes, None where nothing was said. user: "" for this one."""

    name: str
    slots: int | None = None
    user: str = ""


def read(path: str | Path) -> list[Host]:
    """The hosts of a file, each once, in the order of the file. Raises ConfigError that names the file and the line."""
    try:
        lines = Path(path).read_text().splitlines()
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
                raise ConfigError(f"{path}:{number}: {error}; a line is `host`, `host:4` or `host slots=4`") from None
    if not hosts:
        raise ConfigError(f"host file {path} names no host")
    return merged(hosts)


def parse(text: str) -> list[Host]:
    """The hosts of `h1:2,h2`. Raises ConfigError."""
    try:
        return merged([_entry(one.strip(), []) for one in text.split(",")])
    except ValueError as error:
        raise ConfigError(f"--hosts {text}: {error}; it is like h1:2,h2") from None


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


def check_name(name: str) -> str:
    """The name of a host, as somebody else gave it. Raises ValueError where it is none."""
    if NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no host")
    return name


def merged(hosts: list[Host]) -> list[Host]:
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
