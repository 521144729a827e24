"""Following a batch job: its output file while it grows, its state when it changes, its status when it ends.

The file may come late (it is made when the job starts, and network file systems show it seconds after that), and may be
longer than what was read when the scheduler says that the job is over.
"""

from __future__ import annotations

import codecs
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mpikv.commands.launch.scheduler import BatchState, SchedulerError
from mpikv.common.files import open_regular
from mpikv.errors import ConfigError

DECODER = codecs.getincrementaldecoder("utf-8")
POLL_S = 1.0  # of the file; the scheduler is asked less often the longer the job takes
MOST_POLL_S = 15.0
SILENT_S = 300.0  # a controller that does not answer for so long is taken as gone
QUIET_S = 2.0  # for the last lines of a job that has ended to get through the file system between the hosts
ACCOUNTED_S = 20.0  # for the scheduler's accounting of it to be written
CANCEL_S = 30.0  # for a cancelled job to leave
LAST_LINE = re.compile(
    r"^mpikv: job (\S+) ends with status (\d+)(?: and goes (?:back|on as job (\d+)).*)?$", re.MULTILINE
)
UNKNOWN = 1  # status of a job that nobody knows the status of
INTERRUPTED = 128


class GrowingFile:
    """What is new in a file that may not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._decoder = DECODER("replace")  # a letter's bytes may come one by one
        self.last = ""  # the end of what was read, enough for the last line

    def read(self) -> str:
        """What came since the last call, "" if nothing."""
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return ""
        self._offset += len(data)
        text = self._decoder.decode(data).replace("\0", "")  # Open MPI ends some of its messages with one
        self.last = (self.last + text)[-4096:]
        return text

    def ended(self, job_id: str) -> tuple[int | None, str]:
        """What the job's last line shows: its status, and the job that goes on with its work, "" for none.

        The status is None where the line has not come, or not since the job was requeued.
        """
        lines = [match for match in LAST_LINE.finditer(self.last) if match[1] == job_id]
        if not lines:
            return None, ""
        return None if lines[-1][0].endswith("queue") else int(lines[-1][2]), lines[-1][3] or ""


@dataclass
class Follower:
    """One job that is waited for.

    output: the file of a job; ask: its state; cancel: end it, "" or why not; say: one line for the reader; out:
    where its output goes.
    """

    name: str
    job_id: str
    output: Callable[[str], Path]
    ask: Callable[[str], BatchState]
    cancel: Callable[[str], str]
    say: Callable[[str], None]
    out: TextIO
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._file = GrowingFile(self.output(self.job_id))
        self._shown = ""

    def run(self) -> int:
        """Wait for the job; its status. Interrupted (Ctrl-C, SIGTERM) it is cancelled: 128 + the signal's number."""
        with _signals():
            try:
                return self._wait(None)
            except KeyboardInterrupt as interrupted:
                number: int = interrupted.args[0]
            try:
                problem = self.cancel(self.job_id)
                if problem:
                    self.say(f"{self.name} did not cancel job {self.job_id}: {problem}")
                else:
                    self.say(f"{signal.Signals(number).name}: {self.name} was asked to cancel job {self.job_id}")
                    self._wait(self.clock() + CANCEL_S)
            except KeyboardInterrupt:
                self.say(f"job {self.job_id} may still run")
            except (ConfigError, SchedulerError) as error:
                self.say(f"{self.name} does not answer, job {self.job_id} may still run: {error}")
            return INTERRUPTED + number

    def _wait(self, until_s: float | None) -> int:
        began_s = self._answered_s = next_s = self.clock()
        while True:
            self._show()
            now_s = self.clock()
            if until_s is not None and now_s > until_s:
                self.say(f"job {self.job_id} is not gone yet")
                return UNKNOWN
            if now_s >= next_s:
                next_s = now_s + min(max(POLL_S, (now_s - began_s) / 60), MOST_POLL_S)
                state = self._state()
                if state.lost or state.status is not None:
                    status = self._end(state)
                    _, successor = self._file.ended(self.job_id)
                    if not successor:
                        return status
                    self.job_id, self._file, next_s = successor, GrowingFile(self.output(successor)), now_s
                elif state.text not in ("", self._shown):
                    self._shown = state.text
                    self.say(f"job {self.job_id}: {state.text}")
            self.sleep(POLL_S)

    def _state(self) -> BatchState:
        """Where the job is. Raises ConfigError where nobody has answered for long."""
        try:
            state = self.ask(self.job_id)
        except SchedulerError as error:
            if self.clock() - self._answered_s > SILENT_S:
                raise ConfigError(
                    f"{self.name} has not answered for {SILENT_S:.0f} s; job {self.job_id} may still run: {error}"
                ) from None
            return BatchState(f"unknown, {self.name} does not answer: {error}")
        self._answered_s = self.clock()
        return state

    def _show(self) -> None:
        text = self._file.read()
        if text:
            self.out.write(text)
            self.out.flush()

    def _end(self, state: BatchState) -> int:
        """The job is over: the rest of its output, and its status."""
        status, waited_s = state.status, 0.0
        while True:
            self._show()
            shown, successor = self._file.ended(self.job_id)
            if shown is not None and (status is None or state.lost):
                status = shown  # before the accounting, which may have several records of one job
            # A job that the scheduler ended has no last line.
            if shown is not None or waited_s >= (QUIET_S if status is not None else ACCOUNTED_S):
                break
            self.sleep(POLL_S)
            waited_s += POLL_S
            if status is None:
                with suppress(SchedulerError):
                    status = self.ask(self.job_id).status
        if not self._file.last:
            self.say(f"there is no output in {self._file.path}")
        if status is None:
            self.say(f"job {self.job_id} is over, and {self.name} does not know with which status: taken as {UNKNOWN}")
            return UNKNOWN
        goes_on = f", goes on as job {successor}" if successor else ""
        self.say(f"job {self.job_id}: {state.text}, status {status}{goes_on}")
        return status


@contextmanager
def _signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM as KeyboardInterrupt with the number. A closed terminal ends this command, and not the job."""

    def interrupt(number: int, _frame: Any) -> None:
        raise KeyboardInterrupt(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
