"""The hooks of a rank."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mpikv.runtime.abort import Guard
from mpikv.runtime.printed import unread_bytes


def test_only_the_main_threads_exit_is_remembered():
    guard = Guard(0, 2)

    def leave() -> None:
        with pytest.raises(SystemExit):
            guard._remember_exit(3)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert guard.exit_status == 0
    for status, remembered in ((3, 3), (256 + 4, 4), ("a text", 1), (None, 0), (-1, 255)):
        with pytest.raises(SystemExit):
            guard._remember_exit(status)
        assert guard.exit_status == remembered


def test_the_ways_to_end_a_program():
    code = """if True:
        from mpikv.runtime import abort
        words = [repr(exit), repr(quit)]
        guard = abort.install(0, 2)
        assert [repr(exit), repr(quit)] == words
        for end in (exit, quit):
            for status in (3, None):
                try:
                    end(status)
                except SystemExit as error:
                    assert error.code == status
                    assert guard.exit_status == (status or 0)
                else:
                    raise AssertionError
        import sys
        sys.exit(0)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_last_words_are_one_write(monkeypatch):
    """Line by line they would be mixed with other ranks', and cut where another one ends the job."""

    class Descriptor(io.RawIOBase):
        def __init__(self) -> None:
            self.written: list[bytes] = []

        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            self.written.append(bytes(data))
            return len(data)

    raw = Descriptor()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True))
    guard = Guard(1, 3)
    guard.say("Traceback\n  one\nRuntimeError: two\n", 4)
    lines = ["Traceback", "  one", "RuntimeError: two", "ends the job with status 4"]
    assert raw.written == ["".join(f"[{guard.label}] {line}\n" for line in lines).encode()]


ENDS = """
import os, sys
from mpikv.runtime import printed
from mpikv.runtime.abort import abort
limit_s, stream, sign = sys.argv[1:]
printed.LIMIT_S = float(limit_s)
os.write(int(stream), b"x" * 50000)
open(sign, "w").close()
abort(3)
"""


def ending(limit_s: float, stream: int, sign: Path) -> subprocess.Popen[bytes]:
    """A process that has printed something and then ends its job: to be read and waited for."""
    words = [sys.executable, "-c", ENDS, str(limit_s), str(stream), str(sign)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not sign.exists():
        assert process.poll() is None
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("stream", [1, 2])
def test_ends_the_job_when_what_it_printed_was_read(stream, tmp_path):
    with ending(60, stream, tmp_path / "sign") as process:
        time.sleep(1)  # longer than it waits for what was read
        assert process.poll() is None
        assert sum(map(len, process.communicate())) == 50000
        assert process.returncode == 3


def test_ends_the_job_though_nobody_reads(tmp_path):
    with ending(0.1, 1, tmp_path / "sign") as process:
        assert process.wait() == 3
        assert unread_bytes(process.stdout.fileno()) == 50000


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
