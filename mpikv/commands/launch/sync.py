"""`--sync-dst-dir`: the current folder, copied to every host before the job starts, with rsync, all at the same time.

Files that are gone here are not removed there, as in MXNet's launcher: results of earlier jobs survive. What is never
needed there is left out: version control, caches of Python, and the folder of `--output-dir`. What is copied can be
read by its user alone, as the folder (see `folder`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mpikv.commands.launch.folder import own
from mpikv.commands.launch.hosts import Host, is_here
from mpikv.commands.launch.line import QUICK
from mpikv.commands.launch.remote import AT_ONCE, run
from mpikv.errors import ConfigError

LEFT_OUT = (".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".venv", "venv")
LIMIT_S = 3600.0
NOT_FOUND = 127  # rsync's status for a command that the other host does not have
MEBI = 1 << 20


def command(host: Host, folder: str, target: str, shell: Sequence[str], left_out: Sequence[str] = ()) -> list[str]:
    """The rsync line for one host. target: an absolute folder there, which is made with its parents."""
    here = is_here(host.name)
    options = ["--chmod=go-rwx", *(f"--exclude={one}" for one in (*LEFT_OUT, *left_out))]
    if not here:
        made = shlex.join([sys.executable, "-I", "-S", str(QUICK), "folder", target])
        options += ["--rsh", shlex.join(shell), "--rsync-path", f"{made} && rsync"]
    there = target if here else f"{host.name}:{target}"
    return ["rsync", "-a", "-z", "--stats", *options, folder.rstrip("/") + "/", there.rstrip("/") + "/"]


def check(target: str, folder: str) -> None:
    """Raise ConfigError where `target` cannot be meant."""
    if not os.path.isabs(target):
        raise ConfigError(f"--sync-dst-dir {target}: give an absolute path, it is the same on every host")
    if Path(target).resolve() == Path(folder).resolve():
        raise ConfigError(f"--sync-dst-dir {target} is the current folder: leave it out where hosts share their files")
    if shutil.which("rsync") is None:
        raise ConfigError("--sync-dst-dir needs rsync, here and on every host (apt-get install rsync)")


def copy(
    hosts: Sequence[Host],
    folder: str,
    target: str,
    shell: Sequence[str],
    *,
    say: Callable[[str], None],
    left_out: Sequence[str] = (),
) -> None:
    """Copy `folder` to all hosts; one line each. Raises ConfigError that says what each failing one said."""

    def one(host: Host) -> str:
        begun = time.monotonic()
        if is_here(host.name):
            try:
                own(target)
            except OSError as error:
                return f"{host.name}: {target} {error.strerror}"
        status, printed, said = run(command(host, folder, target, shell, left_out), LIMIT_S)
        if status != 0:
            reason = next((line for line in said.splitlines() if line.strip()), f"status {status}")
            reason += " (rsync is needed there, too)" if status == NOT_FOUND else ""
            return f"{host.name}: {reason}"
        files, size = statistics(printed)
        seconds = time.monotonic() - begun
        say(f"{host.name}:{target} is up to date: {files} files, {size / MEBI:.1f} MiB sent in {seconds:.1f} s")
        return ""

    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(filter(None, pool.map(one, hosts)))
    if wrong:
        raise ConfigError("the current folder could not be copied:\n  " + "\n  ".join(wrong))


def statistics(printed: str) -> tuple[int, int]:
    """Files that were transferred and bytes that were sent, out of what `rsync --stats` printed."""
    found = {"Number of regular files transferred": 0, "Total bytes sent": 0}
    for line in printed.splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int("".join(filter(str.isdigit, value)) or 0)
    files, size = found.values()
    return files, size
