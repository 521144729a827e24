"""The folder of `--sync-dst-dir` on this host; run there through the remote shell, before rsync writes into it.

The job runs what lies in it. So it must be this user's, and nobody else may write to it: in /tmp another user could
have made it before, and put a program there.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence


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
    """Make a folder that this user alone can enter, unless it is there. OSError where others made it or may write."""
    folder = folder.rstrip("/") or "/"
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise type(error)(error.errno, f"cannot be made: {error.strerror}") from None
    status = os.lstat(folder)
    if stat.S_ISLNK(status.st_mode) and status.st_uid in (os.geteuid(), 0):
        status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(0, "is no folder")
    if status.st_uid != os.geteuid():
        raise PermissionError(0, f"belongs to another user (id {status.st_uid}): take a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, "may be written to by others, and what lies there is run: `chmod go-w` it first")
