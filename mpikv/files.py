"""Files that are written whole or not at all: beside their place first, then renamed.

So a reader finds the old file or the new one, whenever the writer is killed. A rename puts a regular file in the place
of whatever is there, so what is something else (a device, a pipe, a socket, a folder) is refused and stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from typing import IO

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def check_regular(path: str | os.PathLike[str]) -> os.stat_result | None:
    """What is known of the file at `path`, None where there is none. Follows symbolic links.

    Raises OSError for anything but a regular file (IsADirectoryError for a folder).
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        kind = next((text for is_kind, text in KINDS if is_kind(status.st_mode)), "no regular file")
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(number, f"is {kind}; a regular file is expected", os.fsdecode(path))
    return status


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """`open(path, "rb")` of a regular file. OSError for anything else: a pipe would wait for somebody who writes."""
    check_regular(path)
    return open(path, "rb")


def replace_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> None:
    """Make a file of what `write` writes, whole or not at all: beside its place first, then renamed. Local, blocks.

    The file that a symbolic link points to is replaced, not the link; a file that is there already keeps its mode.
    Raises what `write` raises, and OSError, also where `path` is no regular file; what is there then stays as it was.
    """
    with replacing(path) as file:
        write(file)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """The file that takes the place of `path` where the block ends without an error; see `replace_file`."""
    target = os.path.realpath(os.fsdecode(path))
    before = check_regular(path)
    # Not made of the file's name, which may be as long as names can be.
    beside = os.path.join(os.path.dirname(target), f".mpikv-{uuid.uuid4().hex[:16]}.tmp")
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if before is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
        os.replace(beside, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(beside)
        if isinstance(error, OSError):  # about the file that was asked for, whichever it was in between
            error.filename, error.filename2 = os.fsdecode(path), None
        raise
    # The new name, too, must survive a power failure; some network file systems cannot be asked for that.
    with contextlib.suppress(OSError):
        directory = os.open(os.path.dirname(target), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
