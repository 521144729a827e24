"""`--sync-dst-dir`: the current folder, copied to every host before the job starts, with rsync, all at the same time.

Files that are gone here are not removed there, as in MXNet's launcher: results of earlier jobs survive. What is never
needed there is left out: version control, caches of Python, and the folder of `--output-dir`.

The job runs what lies in the folder there. So it must be this user's, and nobody else may write to it: in /tmp another
user could have made it before, and put a program there. Nor may others write to a folder above it, where they could
rename it and put their own in its place; sshd asks the same of the files that it trusts (StrictModes). In a sticky
folder, as /tmp is one, nobody renames what is another's. `make_folder` sees to it on each host, before rsync writes;
what is copied can be read by its user alone.

Only the standard library is imported: see quick.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mpikv.commands.launch import quick
from mpikv.commands.launch.hosts import Host, is_here
from mpikv.commands.launch.processes import run
from mpikv.errors import ConfigError

AT_ONCE = 32
LEFT_OUT = (".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".venv", "venv")
LIMIT_S = 3600.0
NOT_FOUND = 127  # rsync's status for a command that the other host does not have
MEBI = 1 << 20
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def command(host: Host, folder: str, target: str, shell: Sequence[str], left_out: Sequence[str] = ()) -> list[str]:
    """The rsync line for one host. target: an absolute folder there, which is made with its parents."""
    here = is_here(host.name)
    options = ["--chmod=go-rwx", *(f"--exclude={one}" for one in (*LEFT_OUT, *left_out))]
    if not here:
        made = shlex.join(quick.command("folder", target))
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
    """Copy `folder` to all hosts; one line each. Raises ConfigError that has what went wrong on each failing one."""

    def one(host: Host) -> str:
        begun = time.monotonic()
        if is_here(host.name):
            try:
                own(target)
            except OSError as error:
                return f"{host.name}: {target} {error.strerror}"
        status, printed, errors = run(command(host, folder, target, shell, left_out), LIMIT_S)
        if status != 0:
            reason = next((line for line in errors.splitlines() if line.strip()), f"status {status}")
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


def make_folder(arguments: Sequence[str]) -> int:
    """`quick.py folder FOLDER`, on another host. Status 1, and a line with the reason, where it cannot be used."""
    (folder,) = arguments
    try:
        own(folder)
    except OSError as error:
        print(f"{folder} {error.strerror}", file=sys.stderr, flush=True)
        return 1
    return 0


def own(folder: str) -> None:
    """Make a folder that this user alone can enter, unless it is there.

    Raises OSError where others made it or may write to it, or may put another folder in its place.
    """
    folder = os.path.abspath(folder)
    for one in (*map(str, reversed(Path(folder).parents)), folder):
        try:
            if not os.path.lexists(one):
                os.mkdir(one, 0o700 if one == folder else 0o755)  # whatever the umask lets a group do
        except FileExistsError:  # another host has made it just now, on a disk that they share
            pass
        except OSError as error:
            raise type(error)(error.errno, f"cannot be made: {error.strerror}") from None
    if not os.path.isdir(folder):
        raise NotADirectoryError(0, "is no folder")
    *above, last = _leading_to(folder)
    for one in above:
        status = os.lstat(one)
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(
                0, f"can be replaced through {one}, which belongs to another user: take another folder"
            )
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(0, f"can be replaced by others, who may write to {one}: `chmod go-w` it first")
    status = os.lstat(last)
    if status.st_uid != os.geteuid():
        raise PermissionError(0, f"belongs to another user (id {status.st_uid}): take a folder of your own")
    if status.st_mode & OTHERS_WRITE:
        raise PermissionError(0, "may be written to by others, and what lies there is run: `chmod go-w` it first")


def _leading_to(path: str) -> Iterator[str]:
    """Every folder and symbolic link that leads to a folder, itself last."""
    parent = os.path.dirname(path)
    if parent != path:
        yield from _leading_to(parent)
    yield path
    if os.path.islink(path):
        yield from _leading_to(os.path.join(parent, os.readlink(path)))
