"""What the ranks print, merged: every line with its rank in front, in colour on a terminal, and a file per rank.

Lines are written by a thread of their own, so that a reader who has stopped (`| less`) stops the job's output and not
the watch over it. Cost: one copy of each line.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import IO

from mpikv.common.files import open_log
from mpikv.errors import ConfigError

COLOURS = (36, 33, 32, 35, 34, 31)  # of ANSI X3.64: cyan, yellow, green, magenta, blue, red
SERVER_STYLE = "2;"  # faint
ERASE = b"\033[K"  # the rest of the line: a longer progress bar may stand there
# A tag by which mpikv itself names the rank: one is enough.
RANK = re.compile(rb"^(mpikv: error: )?\[rank \d+ of \d+ on \S+\] ", re.MULTILINE)
OUT, ERR = 1, 2
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_BYTES = 1 << 24  # waiting to be written; then no more is read from the ranks


class Output:
    """stdout and stderr of the launcher. colours: per stream, whether it is a terminal that wants them."""

    def __init__(self, folder: Path | None = None, *, colours: tuple[bool, bool] | None = None) -> None:
        """folder: of the files, made if need be. Raises ConfigError where it cannot be."""
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._files["launch.log"] = open_log(folder / "launch.log")
            except OSError as error:
                raise ConfigError(f"--output-dir {folder}: {error}") from None
        wanted = "NO_COLOR" not in os.environ  # no-color.org
        self._colours = colours or (wanted and os.isatty(OUT), wanted and os.isatty(ERR))
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._losing = False  # lines, for which the disk is too full
        self.broken = False  # nobody reads stdout or stderr any more
        self._thread = threading.Thread(target=self._write, daemon=True, name="mpikv-launch-output")
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should come."""
        return self._bytes > FULL_BYTES

    def lines(self, stream: int, role: str, number: int, host: str, data: bytes) -> None:
        """Whole lines of a rank, or a state of a progress bar, ended by a carriage return. stream: OUT or ERR."""
        tag = f"[{role} {number} @ {host}]"
        if self._colours[stream - 1]:
            style = SERVER_STYLE if role == "server" else ""
            tag = f"\033[{style}{COLOURS[number % len(COLOURS)]}m{tag}\033[0m"
        self._tagged(stream, tag, RANK.sub(rb"\1", data), f"{role}-{number}.log")

    def of_mpirun(self, data: bytes) -> None:
        self._tagged(ERR, "[mpirun]", data, "launch.log")

    def say(self, text: str) -> None:
        data = f"mpikv launch: {text}\n".encode(errors="backslashreplace")
        self._log("launch.log", data)
        self._put(ERR, data)

    def close(self, limit_s: float = 5.0) -> None:
        """Write the rest, unless nobody takes it within `limit_s`."""
        for name, file in self._files.items():
            try:
                file.close()
            except OSError as error:  # a network file system may notice only now that the disk is full
                self._stop_logging(name, error)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(limit_s)

    def _tagged(self, stream: int, tag: str, data: bytes, log: str) -> None:
        if not data.endswith(b"\r"):  # a file gets the whole line in the end
            self._log(log, data)
        start = (ERASE if self._colours[stream - 1] else b"") + tag.encode() + b" "
        self._put(stream, b"".join(start + line for line in data.splitlines(keepends=True) if line != b"\r"))

    def _log(self, name: str, data: bytes) -> None:
        if self._folder is None:
            return
        try:
            if name not in self._files:
                self._files[name] = open_log(self._folder / name)
            rest = memoryview(data)
            while rest:
                rest = rest[self._files[name].write(rest) :]
        except OSError as error:  # the disk is full: no reason to end a job
            self._stop_logging(name, error)

    def _stop_logging(self, name: str, error: OSError) -> None:
        if self._folder is not None:
            path, self._folder = self._folder / name, None  # before the line about it
            self.say(f"warning: {path}: {error.strerror}; nothing more is written to --output-dir")

    def _put(self, stream: int, data: bytes) -> None:
        if data and not self.broken:
            with self._changed:
                self._waiting.append((stream, data))
                self._bytes += len(data)
                self._changed.notify()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                stream, data = self._waiting.popleft()
                self._bytes -= len(data)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(stream, rest) :]
            except OSError as error:
                if error.errno in DISK_FULL:  # under `mpikv launch ... >log`
                    self._lose(stream, error)
                    continue
                self.broken = True
                with self._changed:
                    self._waiting.clear()
                    self._bytes = 0
                return

    def _lose(self, stream: int, error: OSError) -> None:
        """Go on without what cannot be written."""
        if not self._losing:
            self._losing = True
            name = "stdout" if stream == OUT else "stderr"
            self._put(ERR, f"mpikv launch: warning: {name}: {error.strerror}; lines are lost\n".encode())
