"""How far a benchmark is that runs under an mpirun of this command: rank 0 writes it to a file, this process draws it.

mpirun hands on whole lines only, so that ranks under it cannot draw. Where `mpikv bench -n` starts mpirun from a
terminal, the process that started it stays. It makes an empty file, whose name rank 0 is given as `--progress-file`;
rank 0 keeps one line in it, and this process looks there now and then. What the ranks print is handed on
as it is, above the bar. Where rank 0 runs on another host it finds no such file, and the bar stays empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from mpikv.common.progress import DRAWN_S, Progress

FILE_OPTION = "--progress-file"
RECORD_BYTES = 200  # always as many, so that one write replaces the record before


class Recorded(Progress):
    """Progress that another process draws: the record in `path` says how far it is. Nothing is shown here."""

    def __init__(self, path: str, total: int) -> None:
        super().__init__("", total, "sizes", mode="off")
        self._file: int | None = None
        with contextlib.suppress(OSError):  # this is another host
            self._file = os.open(path, os.O_WRONLY)

    def update(self, n: int = 0, what: str | None = None, **values: float) -> None:
        """Do what `Progress.update` does, in the record."""
        super().update(n, what, **values)
        if self._file is not None:
            record = json.dumps([self.done, self.total, self.what])
            os.pwrite(self._file, record.encode().ljust(RECORD_BYTES), 0)

    def close(self) -> None:
        """End the record."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def follow(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `command`, told the file that its rank 0 writes its progress to, and draw it. Returns its status. Blocks."""
    with tempfile.NamedTemporaryFile("r", prefix="mpikv-bench-") as file, Progress("", 1, "sizes") as progress:
        line = [*command, FILE_OPTION, file.name]
        with subprocess.Popen(line, env=dict(env), stdout=subprocess.PIPE, text=True) as ranks:
            assert ranks.stdout is not None
            with _forwarding(ranks), _drawing(progress, file.fileno()):
                for printed in ranks.stdout:
                    progress.say(printed.rstrip("\n"))
                status = ranks.wait()
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _drawing(progress: Progress, file: int) -> Iterator[None]:
    """Show what the record says, during the block and once at its end."""
    ended = threading.Event()

    def draw() -> None:
        shown, last = b"", False
        while not last:
            last = ended.wait(DRAWN_S)
            record = os.pread(file, RECORD_BYTES, 0)
            if record != shown:  # drawing takes a core for milliseconds, which is missed by what is measured
                shown = record
                done, total, what = json.loads(record)
                progress.to(done, what, total=total)

    thread = threading.Thread(target=draw, name="mpikv-bench-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[str]) -> Iterator[None]:
    """Send the signals that this process gets to `process`. Ctrl-C reaches both; then its end is waited for."""

    def forward(signum: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
        signal.SIGHUP: signal.signal(signal.SIGHUP, forward),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda _signum, _frame: None),
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
