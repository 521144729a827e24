"""What this process has printed and its launcher has not read yet.

Ranks print into pipes. A launcher that is told to end the job reads nothing more: MPICH's forgets what is in them. On a
busy machine it may take longer to read than any fixed pause lasts, so the kernel is asked how much is unread.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios
import time

LIMIT_S = 5.0  # for a launcher that reads nothing: it is stopped, or the reader of its own output is
STEP_S = 0.01
STREAMS = (1, 2)


def wait_until_read(pause_s: float) -> None:
    """Block until the launcher has read what is printed, at most `LIMIT_S`, and then `pause_s` for it to pass it on."""
    deadline = time.monotonic() + LIMIT_S
    while any(unread_bytes(fd) for fd in STREAMS) and time.monotonic() < deadline:
        time.sleep(STEP_S)
    time.sleep(pause_s)


def unread_bytes(fd: int) -> int:
    """Return how many bytes written to the pipe, socket or terminal `fd` are still there; 0 where none or unknown."""
    try:
        # A pipe has one buffer, known at both ends; the others have one for each direction (tty_ioctl(2), unix(7)).
        request = termios.FIONREAD if stat.S_ISFIFO(os.fstat(fd).st_mode) else termios.TIOCOUTQ
        return int(struct.unpack("i", fcntl.ioctl(fd, request, bytes(4)))[0])
    except OSError:
        return 0
