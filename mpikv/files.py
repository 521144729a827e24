"""Files that are written whole or not at all: beside their place first, then renamed.

So a reader finds the old file or the new one, whenever the writer is killed. A rename puts a regular file in the place
of whatever is there, so a device, a pipe, a socket or a folder is refused and stays as it is.

Another user may have put a symbolic link where a file is to be written, which could make the writer replace any of its
own files. So only links of this user and of root are followed, and the file beside the place is made anew under a
random name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from typing import IO

MOST_LINKS = 40  # as Linux has it
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def check_regular(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return what the system knows of the file at `path`, None where there is none. Follows symbolic links.

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
    """Open a regular file for reading bytes. OSError for anything else: a pipe would wait for somebody who writes."""
    check_regular(path)
    return open(path, "rb")


def replace_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> None:
    """Put a file that `write` fills at `path`, whole or not at all: beside its place first, then renamed.

    Local, blocks. The file that a symbolic link points to is replaced, not the link; a file that is there already keeps
    its mode. Raises what `write` raises, and OSError, also where `path` is no regular file or another user's symbolic
    link; what is there then stays as it was.
    """
    with replacing(path) as file:
        write(file)


def place_of(path: str | os.PathLike[str]) -> str:
    """Return where a file that is written to `path` comes to lie: at the end of the symbolic links, if it is one.

    Raises PermissionError for a link that neither this user nor root has made.
    """
    place = os.path.abspath(os.fsdecode(path))
    for _ in range(MOST_LINKS):
        folder, name = os.path.split(place)
        place = os.path.join(os.path.realpath(folder), name)
        try:
            status = os.lstat(place)
        except FileNotFoundError:
            return place
        if not stat.S_ISLNK(status.st_mode):
            return place
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, "is a symbolic link that another user has made", os.fsdecode(path))
        place = os.path.join(folder, os.readlink(place))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(path))


def open_log(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file that is written bit by bit, empty at first, not buffered.

    Raises OSError for a link or no regular file.
    """
    # Not blocking, for opening a pipe waits for its reader; emptied only once it is known to be a file.
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", os.fsdecode(path))
        os.ftruncate(number, 0)
        return open(number, "wb", buffering=0)
    except BaseException:
        os.close(number)
        raise


def write_private(path: str | os.PathLike[str], text: str) -> None:
    """Make a new file that only this user can read (mode 600). Raises FileExistsError where something is there."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(number, "wb") as file:
        file.write(os.fsencode(text))  # a variable of the environment need not be UTF-8


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` if the block ends without an error; see `replace_file`."""
    target = place_of(path)
    before = check_regular(path)
    mode = 0o666 if before is None else stat.S_IMODE(before.st_mode)
    # Not made of the file's name, which may be as long as names can be.
    beside = os.path.join(os.path.dirname(target), f".mpikv-{uuid.uuid4().hex[:16]}.tmp")
    try:
        # With the mode that it will have, less what umask takes away: nobody reads it meanwhile who may not later.
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if before is not None:
                os.fchmod(file.fileno(), mode)
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
