"""Writes what a recorder has into a file, each second, until it is ended: the timeline of one rank.

The file has lines of JSON. The first says whose timeline it is; one like it follows where another part of the same
program's run begins. All others hold the records of one thread: `{"thread": name, "records": [...], "lost": n}`, with
times as whole nanoseconds. `mpikv trace` puts the files of all ranks together.

A thread of its own writes, so that a program's steps do not wait for a disk. What was written stays if the process is
killed. Where the file cannot be written any more, or has MOST_BYTES, that is printed once, and recording ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from mpikv.common import files, proc
from mpikv.common.checks import shown
from mpikv.observe.program import this_process
from mpikv.observe.recorder import Record, Recorder, Ring
from mpikv.observe.stall import say

FORMAT = 1
EVERY_S = 1.0
JOIN_S = 10.0  # for the last write to a slow disk
MOST_BYTES = 1 << 30  # of a file: more than `mpikv trace` can hold in the memory of a usual machine


def machine() -> str:
    """What tells this machine's clock from those of others: processes with the same text read the same clock."""
    return proc.boot_id() or socket.gethostname()


def path_of(directory: str, about: Mapping[str, Any]) -> str:
    """The file of one rank's timeline in a folder. about: whose: its `store`, `role` and `number`."""
    return os.path.join(directory, f"{about['store'][:12]}-{about['role']}-{about['number']}.jsonl")


class TimelineFile:
    """The timeline of one rank in one store. It is written from its making until `end`. One at a time for a recorder.

    path: the file, which is appended to; its folder is made. about: what its first line says besides. Raises OSError
    where it cannot be written.
    """

    def __init__(self, path: str, recorder: Recorder, about: Mapping[str, Any]) -> None:
        self.path, self._recorder = path, recorder
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        process = this_process()
        mine = {"host": process.host, "pid": process.pid, "machine": machine()}
        clocks = {"begun_ns": _ns(recorder.now_s()), "date_s": time.time()}
        self._file = files.open_log(path, keep=True)
        try:
            self._line({"format": FORMAT, **mine, **clocks, **about})
        except OSError:
            self._file.close()
            raise
        for ring in recorder.rings():  # of an earlier part, after it had ended
            ring.take()
        self._lost = {id(ring): ring.added - ring.taken for ring in recorder.rings()}
        self._ended = threading.Event()
        self._writing = threading.Thread(target=self._write_on, name="mpikv-timeline", daemon=True)
        recorder.on = True
        self._writing.start()

    def end(self) -> None:
        """Stop recording, and write what is left. Blocks for the disk. Idempotent."""
        self._recorder.on = False
        self._ended.set()
        if self._writing is not threading.current_thread():
            self._writing.join(JOIN_S)

    def _write_on(self) -> None:
        try:
            while not self._ended.wait(EVERY_S):
                self._write()
            self._write()
            self._file.close()
        except OSError as error:
            self._recorder.on = False
            say(f"mpikv: warning: {self.path}: {error.strerror or error}: the timeline ends here")
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self) -> None:
        for ring in self._recorder.rings():
            records = ring.take()
            if records:
                self._line({"thread": ring.thread, "records": [*map(_row, records)], "lost": self._newly_lost(ring)})

    def _newly_lost(self, ring: Ring) -> int:
        lost = max(0, ring.added - ring.taken - len(ring.records))
        before = self._lost.get(id(ring), 0)
        self._lost[id(ring)] = max(lost, before)
        return max(0, lost - before)

    def _line(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":"), default=shown).encode() + b"\n"
        if self._file.tell() + len(line) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"has {self._file.tell()} bytes, and may have {MOST_BYTES}")
        self._file.write(line)
        self._file.flush()


def _row(record: Record) -> list[Any]:
    kind, begun_s, ended_s, what, round_, n_bytes = record
    text = what if what is None or type(what) in (str, int, list) else str(what)
    return [kind, _ns(begun_s), _ns(ended_s), text, round_, n_bytes]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
