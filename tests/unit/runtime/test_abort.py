"""The hooks of a rank."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import fresh
import pytest

from mpikv.runtime import printed
from mpikv.runtime.abort import Guard
from mpikv.runtime.printed import unread_bytes


def test_only_the_main_threads_exit_is_remembered():
    guard = Guard(0, 2)

    def leave(status: object = 3) -> None:
        with pytest.raises(SystemExit):
            guard._remember_exit(status)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert guard.exit_status == 0
    for status, remembered in ((3, 3), (256 + 4, 4), ("a text", 1), (None, 0), (-1, 255)):
        leave(status)
        assert guard.exit_status == remembered


ENDS = """
import sys
from mpikv.runtime import abort
words = [repr(exit), repr(quit)]
guard = abort.install(0, 2)
assert [repr(exit), repr(quit)] == words
for end, status in ((exit, 3), (exit, None), (quit, 3)):
    try:
        end(status)
    except SystemExit as error:
        assert (error.code, guard.exit_status) == (status, status or 0)
sys.exit(guard.exit_status - 3)
"""


def test_the_ways_to_end_a_program():
    done = fresh.python(ENDS)
    assert done.returncode == 0, done.stderr


def test_the_last_words_are_one_write(monkeypatch):
    """Line by line they would be mixed with other ranks', and cut where another one ends the job."""

    written: list[bytes] = []

    class Descriptor(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            written.append(bytes(data))
            return len(data)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Descriptor()), line_buffering=True))
    guard = Guard(1, 3)
    guard.say("Traceback\n  one\nRuntimeError: two\n", 4)
    lines = ["Traceback", "  one", "RuntimeError: two", "ends the job with status 4"]
    assert written == ["".join(f"[{guard.label}] {line}\n" for line in lines).encode()]


UNREAD = """
import os
from mpikv.runtime import printed
from mpikv.runtime.abort import abort
printed.LIMIT_S = 0.1
for stream in (1, 2):
    os.write(stream, b"x" * 50000)
abort(3)
"""


def test_ends_the_job_though_nobody_reads() -> None:
    with subprocess.Popen([sys.executable, "-c", UNREAD], stdout=-1, stderr=-1) as process:
        assert process.wait() == 3
        assert [unread_bytes(stream.fileno()) for stream in (process.stdout, process.stderr)] == [50000] * 2


@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("reads", [True, False])
def test_waits_until_what_was_printed_is_read(stream: int, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then for the launcher to pass it on; not for ever."""
    pipes, slept = [os.pipe() for _ in range(2)], list[float]()
    os.write(pipes[stream][1], b"x" * 7)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3 and reads:
            os.read(pipes[stream][0], 7)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept))
    assert printed.STREAMS == (1, 2)
    monkeypatch.setattr(printed, "time", clock)
    monkeypatch.setattr(printed, "STREAMS", [writing for _, writing in pipes])
    printed.wait_until_read(0.25)
    assert slept[-1] == 0.25
    assert sum(slept[:-1]) == pytest.approx(3 * printed.STEP_S if reads else printed.LIMIT_S, abs=1.5 * printed.STEP_S)
    for end in sum(pipes, ()):
        os.close(end)


def test_unread_bytes():
    reading, writing = os.pipe()
    for written in (0, 7):
        os.write(writing, b"x" * written)
        assert unread_bytes(writing) == written
    os.read(reading, 3)
    assert unread_bytes(writing) == 4
    os.close(reading)
    os.close(writing)
    assert unread_bytes(writing) == 0
    with open(os.devnull, "w") as nowhere:
        assert unread_bytes(nowhere.fileno()) == 0
