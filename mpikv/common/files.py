"""Files that are written whole or not at all: beside their place first, then renamed.

So a reader finds the old file or the new one, whenever the writer is killed. A rename puts a regular file in the place
of whatever is there, so a device, a pipe, a socket or a folder is refused and stays as it is.

Another user may have put a symbolic link where a file is to be written, which could make the writer replace any of its
own files. So only links of this user and of root are followed, on the way to a folder also those of the folder's owner
that they lie in, who may put there what they like; and the file beside the place is made anew under a random name.
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

    Local, blocks. The file that a symbolic link points to is replaced, not the link. A file that is there already keeps
    its permissions, if it is this user's; of another user's no more than umask allows. Raises what `write` raises, and
    OSError, also where `path` is no regular file or is reached by another user's symbolic link; what is there then
    stays as it was.
    """
    with replacing(path) as file:
        write(file)


def place_of(path: str | os.PathLike[str]) -> str:
    """Return where a file that is written to `path` comes to lie: at the end of all symbolic links on the way.

    Raises PermissionError for a link that is not to be followed, see the top of the file.
    """
    place, links = os.sep, 0
    left = _names(os.path.join(os.getcwd(), os.fsdecode(path)))  # the next one last
    while left:
        folder, place = place, os.path.normpath(os.path.join(place, left.pop()))
        try:
            status = os.lstat(place)
        except OSError:  # what it is, opening says, too
            return os.path.join(place, *reversed(left))
        if not stat.S_ISLNK(status.st_mode):
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(path))
        trusted = {os.geteuid(), 0} | ({os.stat(folder).st_uid} if left else set())
        if status.st_uid not in trusted:
            what = f"is reached through {place}, a symbolic link that another user has made: name the place itself"
            raise PermissionError(errno.EPERM, what, os.fsdecode(path))
        target = os.readlink(place)
        left += _names(target)
        place = os.sep if os.path.isabs(target) else folder
    return place


def _names(path: str) -> list[str]:
    return [name for name in reversed(path.split(os.sep)) if name]


def open_log(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file that is written bit by bit, empty at first, not buffered.

    Raises OSError for a link or no regular file, and for a folder that another user's link leads to or, unless this is
    root, another user's file, who could read what is written.
    """
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    # Not blocking, for opening a pipe waits for its reader; emptied only once it is known to be a file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(os.path.join(place_of(folder), name), flags, 0o666)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", os.fsdecode(path))
        if os.geteuid() not in (status.st_uid, 0):
            raise PermissionError(errno.EPERM, "is another user's file", os.fsdecode(path))
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
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` if the block ends without an error; see `replace_file`.

    durable: whether it is on the disk then, also after a power failure, which may take long.
    """
    target = place_of(path)
    before = check_regular(path)
    mode = 0o666 if before is None else before.st_mode & 0o777
    # Not made of the file's name, which may be as long as names can be.
    beside = os.path.join(os.path.dirname(target), f".mpikv-{uuid.uuid4().hex[:16]}.tmp")
    try:
        # With the mode that it will have, less what umask takes away: nobody reads it meanwhile who may not later.
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if before is not None and before.st_uid == os.geteuid():
                os.fchmod(file.fileno(), mode)
        os.replace(beside, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(beside)
        if isinstance(error, OSError):  # about the file that was asked for, whichever it was in between
            error.filename = os.fsdecode(path)
            del error.filename2  # None would be printed, too
        raise
    if not durable:
        return
    # The new name, too, must survive a power failure; some network file systems cannot be asked for that.
    with contextlib.suppress(OSError):
        directory = os.open(os.path.dirname(target), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
