"""The folder of `--sync-dst-dir` on this host; run there through the remote shell, before rsync writes into it.

The job runs what lies in it. So it must be this user's, and nobody else may write to it: in /tmp another user could
have made it before, and put a program there. Nor may others write to a folder above it, where they could rename it and
put their own in its place; sshd asks the same of the files that it trusts (StrictModes). In a sticky folder, as /tmp is
one, nobody renames what is another's.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder. Status 1, and a line that says why, where it cannot be used."""
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
    parents = [str(parent) for parent in reversed(Path(folder).parents)]
    for one in (*parents, folder):
        try:
            if not os.path.lexists(one):
                os.mkdir(one, 0o700 if one == folder else 0o755)  # whatever the umask lets a group do
        except FileExistsError:  # another host has made it just now, on a disk that they share
            pass
        except OSError as error:
            raise type(error)(error.errno, f"cannot be made: {error.strerror}") from None
    if not os.path.isdir(folder):
        raise NotADirectoryError(0, "is no folder")
    *above, last = _way(folder)
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


def _way(path: str) -> Iterator[str]:
    """Every folder and symbolic link on the way to a folder, itself last."""
    parent = os.path.dirname(path)
    if parent != path:
        yield from _way(parent)
    yield path
    if os.path.islink(path):
        yield from _way(os.path.join(parent, os.readlink(path)))
