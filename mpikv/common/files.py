"""Every file that a setting, an argument or another user names is opened here: to be read, replaced, or appended to.

Only regular files are: opening a pipe waits for somebody who writes, and a device never ends. What is written whole
lies beside its place first and is renamed then, so a reader finds the old file or the new one, whenever the writer is
killed; and a device, a pipe, a socket or a folder, in whose place a rename would put a file, is refused and stays.

Another user may have put a symbolic link where a file is to be written, which could make the writer change any of its
own files. So only links of this user and of root are followed, on the way to a folder also those of the folder's owner
that they lie in, who may put there what they like; and the file beside the place is made anew under a random name. The
way is gone from one open folder to the next, so that a link that comes meanwhile leads nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from typing import IO

MOST_LINKS = 40  # as Linux has it
MOST_TEXT_BYTES = 1 << 20  # of a file that somebody has typed, or with some numbers for each host
# To go through it need not be readable. As a folder, for else nothing would mount it on demand.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
StrPath = str | os.PathLike[str]


def _regular(status: os.stat_result, path: StrPath) -> os.stat_result:
    """Return it. Raises OSError for anything but a regular file (IsADirectoryError for a folder)."""
    if not stat.S_ISREG(status.st_mode):
        folder = stat.S_ISDIR(status.st_mode)
        what = f"is a {'folder' if folder else 'pipe, device or link'}; a regular file is expected"
        raise OSError(errno.EISDIR if folder else errno.EINVAL, what, os.fsdecode(path))
    return status


def open_regular(path: StrPath, most_bytes: int | None = None) -> IO[bytes]:
    """Open a regular file for reading bytes; every symbolic link is followed.

    Raises OSError for anything else (IsADirectoryError for a folder), and for a file larger than `most_bytes`.
    """
    _regular(os.stat(path), path)  # opening a device may do something to it
    # Not blocking, for meanwhile there may be a pipe.
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)))
        n_bytes = _regular(os.fstat(file.fileno()), path).st_size
        if most_bytes is not None and n_bytes > most_bytes:
            raise OSError(errno.EFBIG, f"has {n_bytes} bytes, and may have {most_bytes}", os.fsdecode(path))
        on_error.pop_all()
    return file


def read_text(path: StrPath) -> str:
    """Return the text of a short file. Raises OSError as `open_regular`, UnicodeDecodeError where it is not UTF-8."""
    with open_regular(path, MOST_TEXT_BYTES) as file:
        return file.read(MOST_TEXT_BYTES).decode()


def place_of(path: StrPath) -> str:
    """Return where a file that is written to `path` comes to lie: at the end of all symbolic links on the way.

    Raises OSError where there is no such folder, where anything but a regular file is there, and PermissionError for a
    link that is not to be followed, see the top of the file.
    """
    with _folder_of(path) as (folder, name, place):
        _there(name, folder, path)
        return place


@contextlib.contextmanager
def _folder_of(path: StrPath, *, follow: bool = True) -> Iterator[tuple[int, str, str]]:
    """Yield the folder in which a file at `path` comes to lie, open, and the file's name there and place.

    follow: also a link at the end. An OSError within the block is about `path`, whichever file it was in between.
    """
    place, links = os.sep, 0
    left = _names(os.path.join(os.getcwd(), os.fsdecode(path)))  # the next one last
    folder = os.open(os.sep, _FOLDER)
    try:
        while True:
            name, status = left.pop(), None
            with contextlib.suppress(OSError):  # what it is, opening says, too
                status = os.lstat(name, dir_fd=folder) if left or follow else None
            entered, inside = name, os.path.normpath(os.path.join(place, name))
            if status is not None and stat.S_ISLNK(status.st_mode):
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if status.st_uid not in {os.geteuid(), 0, os.fstat(folder).st_uid if left else 0}:
                    what = f"is reached through {inside}, a symbolic link that another user has made"
                    raise PermissionError(errno.EPERM, f"{what}: name the place itself")
                target = os.readlink(name, dir_fd=folder)
                left += _names(target)
                entered, inside = (os.sep, os.sep) if os.path.isabs(target) else (".", place)
            elif not left:
                yield folder, name, inside
                return
            before, folder, place = folder, os.open(entered, _FOLDER, dir_fd=folder), inside
            os.close(before)
    except OSError as error:
        error.filename = os.fsdecode(path)
        del error.filename2  # None would be printed, too
        raise
    finally:
        os.close(folder)


def _names(path: str) -> list[str]:
    return [name for name in reversed(path.split(os.sep)) if name] or ["."]


def _there(name: str, folder: int, path: StrPath) -> os.stat_result | None:
    """What the system knows of the file that is to be replaced; None where there is none. OSError if it is no file."""
    try:
        return _regular(os.lstat(name, dir_fd=folder), path)
    except FileNotFoundError:
        return None


def open_log(path: StrPath, *, keep: bool = False) -> IO[bytes]:
    """Open a file that is written bit by bit: empty at first and not buffered; keep: after what is there, buffered.

    Raises OSError for a link or no regular file, and for a folder that another user's link leads to or, unless this is
    root, another user's file, who could read what is written.
    """
    # Not blocking, for opening a pipe waits for its reader; emptied only once it is known to be a file.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_APPEND * keep
    with _folder_of(path, follow=False) as (folder, name, _), contextlib.ExitStack() as on_error:
        number = os.open(name, flags, 0o666, dir_fd=folder)
        on_error.callback(os.close, number)
        if os.geteuid() not in (_regular(os.fstat(number), path).st_uid, 0):
            raise PermissionError(errno.EPERM, "is another user's file")
        if not keep:
            os.ftruncate(number, 0)
        on_error.pop_all()
    return open(number, "ab" if keep else "wb", buffering=-1 if keep else 0)


def write_private(path: StrPath, text: str) -> None:
    """Make a new file that only this user can read (mode 600). Raises FileExistsError where something is there."""
    with _folder_of(path, follow=False) as (folder, name, _):
        number = os.open(name, _NEW, 0o600, dir_fd=folder)
    with open(number, "wb") as file:
        file.write(os.fsencode(text))  # a variable of the environment need not be UTF-8


@contextlib.contextmanager
def replacing(path: StrPath, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path`, whole, if the block ends without an error. Local, blocks.

    The file that a symbolic link points to is replaced, not the link. A file that is there already keeps its
    permissions, if it is this user's; of another user's no more than umask allows. Raises OSError, also where `path` is
    no regular file or is reached by another user's symbolic link; what is there then stays as it was.
    durable: whether it is on the disk then, also after a power failure, which may take long.
    """
    with _folder_of(path) as (folder, name, _):
        before = _there(name, folder, path)
        mode = 0o666 if before is None else before.st_mode & 0o777
        # Not made of the file's name, which may be as long as names can be.
        beside = f".mpikv-{uuid.uuid4().hex[:16]}.tmp"
        try:
            # With the mode that it will have, less what umask takes away: nobody reads it meanwhile who may not later.
            with open(os.open(beside, _NEW, mode, dir_fd=folder), "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                if before is not None and before.st_uid == os.geteuid():
                    os.fchmod(file.fileno(), mode)
            os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(beside, dir_fd=folder)
            raise
        if durable:
            # The new name, too, must survive a power failure; some network file systems cannot be asked for that.
            with contextlib.suppress(OSError):
                directory = os.open(".", os.O_RDONLY, dir_fd=folder)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
