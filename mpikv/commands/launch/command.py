"""A rank's command while it runs: its output, its signals, its end, and the end of what it leaves running.

One loop waits for the command's two pipes, the launcher, the stand-in (see rank.py) and signals at the same time. Only
the standard library is imported: see quick.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from mpikv.commands.launch import channel
from mpikv.commands.launch.processes import (
    addressed,
    adopt_orphans,
    descendants,
    die_with_parent,
    is_rank,
    segments,
    send,
)
from mpikv.common import snapshot_names
from mpikv.common.suspended import Suspended, given_up_text, interval_s

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGKILL)
TICK_S = 0.5
GRACE_S = 4.0  # from SIGTERM to SIGKILL, unless the launcher gives another time
LINGER_S = 2.0  # what the command leaves running has so long to end by itself, as services of loggers do
HOLD_S = 4.0  # a failed rank stays so much longer, unless dismissed: `mpirun` kills the others when it ends
DRAIN_S = 0.5
SEND_S = 5.0  # for the launcher to take the last words
READ_BYTES = 1 << 16
LONGEST_BYTES = 1 << 20  # of a line; a longer one is cut
BACKLOG_BYTES = 1 << 20  # towards a launcher that does not read; then the command has to wait
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell has them
MOST_SNAPSHOTS = 4096  # files that are reported, the newest


class Command:
    def __init__(
        self,
        launcher: channel.ToLauncher,
        wakeup: socket.socket,
        stand_in_ended: int,
        grace_s: float,
        patience_s: float | None = None,
    ) -> None:
        """wakeup: has the numbers of signals that come. stand_in_ended: a pipe that ends with the stand-in.

        patience_s: how long the others wait for this rank, where they go on without one that dies; else None.
        """
        self._launcher = launcher
        self._wakeup = wakeup
        self._stand_in_ended = stand_in_ended
        self._grace_s = grace_s
        self._disowned = False  # mpirun does not count with the rank any more
        self._pid = 0
        self._status: int | None = None  # as subprocess has it: negative for a signal
        self._asked = False  # it got a signal to end
        self.abandoned = False  # nobody is left to report to
        self._dismissed = False
        self._segments: set[str] = set()  # files that nobody may be left to remove
        self._snapshots = ""  # the folder of the command's
        self._kill_at = float("inf")
        self._patience_s, self._suspended = patience_s or 0.0, Suspended()
        self._look_at = float("inf") if patience_s is None else 0.0
        self._streams: dict[int, int] = {}  # the kind of frame for each pipe
        self._lines: dict[int, bytearray] = {}  # unfinished line of each pipe
        self._shown: dict[int, bytes] = {}  # what the launcher has of it
        self._show_at = 0.0
        self._paused = False
        self._frames = channel.Frames()
        self._selector = selectors.DefaultSelector()
        for source in (wakeup, stand_in_ended, launcher.socket):
            self._selector.register(source, selectors.EVENT_READ)
        adopt_orphans()

    def run(self, command: Sequence[str], env: dict[str, str], folder: str | None) -> int:
        """Start it and stay until it is gone. Its status, negative for a signal."""
        self._snapshots = env.get("MPIKV_SNAPSHOT_DIR", "")
        error, status = self._start(command, env, folder)
        if error:
            self._report(status, error)
        while self._status is None:
            self._step(TICK_S)
        self._end_rest()
        for path in self._segments:
            with contextlib.suppress(OSError):  # mpirun has removed it, or another rank's process
                os.unlink(path)
        held = time.monotonic() + (self._grace_s + HOLD_S if self._status != 0 else SEND_S)
        while not self.abandoned and time.monotonic() < held:
            if self._dismissed or ((self._status == 0 or self._disowned) and not self._launcher.pending):
                break
            self._step(TICK_S)
        return self._status

    def _start(self, command: Sequence[str], env: dict[str, str], folder: str | None) -> tuple[str, int]:
        """Why it could not be started, with a status; or "" and 0."""
        host = socket.gethostname()
        if folder is not None and not os.path.isdir(folder):
            return f"the folder {folder} does not exist on {host}: all hosts must share it, or have a copy", NOT_FOUND
        ask = die_with_parent(os.getpid(), signal.SIGKILL)

        def before() -> None:
            os.setpgid(0, 0)
            ask()

        try:
            child = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1,
                close_fds=False, preexec_fn=before,  # noqa: PLW1509 - there is no other thread
            )  # fmt: skip
        except FileNotFoundError:
            return f"{command[0]}: no such command on {host}", NOT_FOUND
        except (OSError, subprocess.SubprocessError) as error:
            return f"{command[0]} cannot be started on {host}: {error}", NOT_EXECUTABLE
        self._pid = child.pid
        child.returncode = 0  # this process waits for all its children itself
        self._pipes = (child.stdout, child.stderr)  # kept open
        for pipe, kind in zip(self._pipes, (channel.OUT, channel.ERR), strict=True):
            assert pipe is not None
            fd = pipe.fileno()
            os.set_blocking(fd, False)
            self._streams[fd], self._lines[fd] = kind, bytearray()
            self._selector.register(fd, selectors.EVENT_READ)
        return "", 0

    def _step(self, timeout_s: float) -> None:
        self._watch_backlog()
        next_at = min(self._kill_at, self._look_at)
        for key, events in self._selector.select(min(timeout_s, max(0.0, next_at - time.monotonic()))):
            if key.fd == self._stand_in_ended:
                self._selector.unregister(self._stand_in_ended)
                self._disowned = True
                self._pass_on(signal.SIGTERM)  # at once: MPICH's MPI_Abort returns, and counts on being killed
            elif key.fd in self._lines:
                self._read(key.fd)
            elif key.fileobj is self._wakeup:
                for signum in set(self._wakeup.recv(4096)):
                    self._pass_on(signum)
            elif events & selectors.EVENT_READ:
                self._obey()
        if time.monotonic() >= self._show_at:
            self._show_bars()
        if not self._launcher.flush():
            self._abandon()
        if time.monotonic() >= self._kill_at:
            self._kill_at = float("inf")
            send(descendants(os.getpid()), signal.SIGKILL)
        self._reap()
        if self._status is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + interval_s(self._patience_s)
            for pid in self._suspended.given_up(filter(is_rank, addressed(self._pid))):
                self._launcher.write(channel.frame(channel.ERR, f"{given_up_text(pid, self._patience_s)}\n".encode()))
                send([pid], signal.SIGKILL)

    def _watch_backlog(self) -> None:
        """Read on only while the launcher takes what is read."""
        full = len(self._launcher.pending) > BACKLOG_BYTES
        if full != self._paused:
            self._paused = full
            for fd in self._lines:
                if full:
                    self._selector.unregister(fd)
                else:
                    self._selector.register(fd, selectors.EVENT_READ)
        if not self.abandoned:
            writes = selectors.EVENT_WRITE if self._launcher.pending else 0
            self._selector.modify(self._launcher.socket, selectors.EVENT_READ | writes)

    def _read(self, fd: int) -> bool:
        """Pass on what the command has printed. False where there is nothing to read now."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        line = self._lines[fd]
        line += data
        whole = line.rfind(b"\n") + 1
        if line and (not data or len(line) - whole > LONGEST_BYTES):
            line += b"" if line.endswith(b"\n") else b"\n"
            whole = len(line)
        if whole:
            self._launcher.write(channel.frame(self._streams[fd], bytes(line[:whole])))
            del line[:whole]
        if not data:
            if not self._paused:
                self._selector.unregister(fd)
            del self._lines[fd]
        return bool(data)

    def _show_bars(self) -> None:
        """Pass on the last state of lines that the command goes on rewriting, each ended by a carriage return."""
        self._show_at = time.monotonic() + TICK_S
        for fd, line in self._lines.items():
            text = bytes(line).rstrip(b"\r").rpartition(b"\r")[2]
            if b"\r" in line and text not in (b"", self._shown.get(fd)) and not self._paused:
                self._launcher.write(channel.frame(self._streams[fd], text + b"\r"))
                self._shown[fd] = text
                line[:] = b"\r" + text + b"\r" * line.endswith(b"\r")

    def _obey(self) -> None:
        try:
            data = self._launcher.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._abandon()
            return
        for kind, body in self._frames.add(data):
            if kind == channel.SIGNAL:
                self._pass_on(json.loads(body)["signal"], patient=True)
            elif kind == channel.BYE:
                self._dismissed = True

    def _pass_on(self, signum: int, *, patient: bool = False) -> None:
        """A signal for the command. patient: whoever sent it will say when it is to be killed."""
        if signum == signal.SIGCHLD or signum not in (*FORWARDED, signal.SIGKILL):
            return
        self._reap()  # a command that has ended before has not ended because it was asked to
        if self._status is not None:
            self._dismissed = self._dismissed or signum in ENDING
            return
        self._asked = self._asked or signum in ENDING
        if signum == signal.SIGTERM:
            self._segments |= segments(descendants(os.getpid()))
        if signum == signal.SIGTERM and not patient:  # mpirun ends the job, or was killed, or the launcher was
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
        if signum == signal.SIGKILL:
            self._kill_at = 0.0
        elif self._pid:
            send(addressed(self._pid), signum)

    def _abandon(self) -> None:
        """The launcher is gone: the command has no business any more."""
        if self.abandoned:
            return
        self.abandoned = True
        self._selector.unregister(self._launcher.socket)
        self._pass_on(signal.SIGTERM)

    def _reap(self) -> None:
        """Ask for the status of everything that has ended: this process is the parent of orphans, too."""
        while True:
            try:
                pid, state = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid and self._status is None:
                self._drain()
                self._report(os.waitstatus_to_exitcode(state))

    def _drain(self) -> None:
        """Read what the command printed before it ended, and what others print into the same pipes, for a while."""
        until = time.monotonic() + DRAIN_S
        for fd in list(self._lines):
            while self._read(fd) and time.monotonic() < until:
                pass

    def _report(self, status: int, error: str = "") -> None:
        self._status = status
        names = [str(name) for name in snapshot_names.in_folder(self._snapshots)] if self._snapshots else []
        ended = {"status": status, "asked": self._asked, "error": error, "snapshots": names[-MOST_SNAPSHOTS:]}
        self._launcher.write(channel.message(channel.ENDED, **ended))

    def _end_rest(self) -> None:
        gentle, hard = time.monotonic() + LINGER_S, time.monotonic() + LINGER_S + 1.0
        if self._asked or self.abandoned:
            gentle, hard = time.monotonic(), time.monotonic() + 1.0
        while rest := descendants(os.getpid()):
            if self._dismissed:
                gentle, hard = min(gentle, time.monotonic()), min(hard, time.monotonic() + 1.0)
            if time.monotonic() > gentle:
                send(rest, signal.SIGKILL if time.monotonic() > hard else signal.SIGTERM)
                gentle = time.monotonic() + 0.2
            self._step(0.05)
        self._drain()
