"""Waking a rank of the same host that sleeps.

A rank that waits for long sleeps between its polls, and would see what others write meanwhile only afterwards. So a
rank that shares memory with others sleeps on a pipe, and sets a word in that memory while it sleeps. Whoever has
written something for this rank into the memory reads the word, and writes a byte to the pipe where the word is set. The
others open the pipe through `/proc/PID/fd`, as they do the memory (segment.py), so it has no name either. Every sleep
also has a time limit, since messages of MPI wake nobody.

Cost: reading a word for each write to another rank, and a system call only where that rank sleeps. Waking takes some
tens of microseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable

from mpikv.hostmemory.segment import ALIGN_BYTES, WORD_BYTES, HostMemory, fence

SELECT_LIMIT = 1024  # select(2) takes no larger file descriptors, and poll(2) no times below a millisecond
WAKER_WORDS = ALIGN_BYTES // WORD_BYTES  # per rank: a cache line, whose first word is 1 while that rank sleeps


def waker_bytes(size: int) -> int:
    """Return how many bytes the words of `size` ranks take, at the beginning of the memory."""
    return size * ALIGN_BYTES


class Waker:
    """One rank's pipe, and the pipes of the others. waiting: returns whether this rank has something to handle."""

    def __init__(self, memory: HostMemory) -> None:
        self._words = memory.words(0, memory.size * WAKER_WORDS)
        self._rank = memory.rank
        self._own = -1
        self._others: dict[int, int] = {}  # rank -> the pipe to write to
        self.waiting: Callable[[], bool] = lambda: False

    def connect(self, allgather: Callable[[bytes], list[bytes]]) -> None:
        """Open the pipes of all. Collective over the host. Who cannot be woken sleeps up to the time limit."""
        mine = -1
        with contextlib.suppress(OSError):
            self._own, mine = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pipes = allgather(json.dumps([os.getpid(), mine, _inode(mine)]).encode())
        for rank, text in enumerate(pipes):
            pid, fd, inode = json.loads(text)
            if rank == self._rank or fd < 0:
                continue
            with contextlib.suppress(OSError):
                pipe = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                if _inode(pipe) == inode:
                    self._others[rank] = pipe
                else:
                    os.close(pipe)
        if mine >= 0:
            self._others[self._rank] = mine
        if self._own >= SELECT_LIMIT:
            os.close(self._own)
            self._own = -1
        allgather(b"")  # nobody closes a pipe before all have opened it

    def wake_sleeper(self, rank: int) -> None:
        """Wake a rank if it sleeps. To be called after what it waits for has been written to the memory."""
        # It sets its word and then looks for work, we write work and then read its word: one of us sees the other's.
        fence()
        if self._words[rank * WAKER_WORDS]:
            self.wake(rank)

    def wake(self, rank: int) -> None:
        pipe = self._others.get(rank)
        if pipe is not None:
            with contextlib.suppress(OSError):  # a full pipe: that rank has been woken; a closed one: it is ending
                os.write(pipe, b"\0")

    def wake_self(self) -> None:
        if self._words[self._rank * WAKER_WORDS]:
            self.wake(self._rank)

    def sleep(self, timeout_s: float) -> None:
        """Sleep until another rank wakes this one, at most `timeout_s`; not at all where `waiting()` is True."""
        if self._own < 0:
            time.sleep(timeout_s)
            return
        index = self._rank * WAKER_WORDS
        self._words[index] = 1
        fence()
        try:
            if not self.waiting() and select.select([self._own], [], [], timeout_s)[0]:
                os.read(self._own, 4096)
        except BlockingIOError:
            pass  # another thread of this rank has read it
        finally:
            self._words[index] = 0

    def close(self) -> None:
        for pipe in (self._own, *self._others.values()):
            if pipe >= 0:
                os.close(pipe)
        self._own, self._others = -1, {}
        self.waiting = lambda: False


def stand_by(allgather: Callable[[bytes], list[bytes]]) -> None:
    """Take part in the calls of `Waker.connect`, for a rank that has no `Waker` where ranks of other hosts have."""
    allgather(json.dumps([0, -1, []]).encode())
    allgather(b"")


def _inode(fd: int) -> list[int]:
    if fd < 0:
        return []
    found = os.fstat(fd)
    return [found.st_dev, found.st_ino]
