"""How far it is: a bar on a terminal where tqdm is installed, or a line before each size.

mpirun hands on whole lines only, so ranks under it cannot draw. Where `mpikv bench -n` starts mpirun from a terminal,
its ranks print lines, and the process that started it (`follow`) reads them and draws the bar.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

LINE = re.compile(r"# size (\d+) of (\d+): (.*)")


def can_draw() -> bool:
    """Whether somebody looks, and tqdm is installed."""
    if not sys.stderr.isatty():
        return False
    try:
        import tqdm  # noqa: F401, PLC0415 - an extra
    except ImportError:
        return False
    return True


class Bar:
    """A bar of tqdm's, or nothing. Lines of the table go through `say`, so that they do not tear it apart."""

    def __init__(self, *, drawn: bool) -> None:
        self._bar: Any = None
        if drawn:
            from tqdm import tqdm  # noqa: PLC0415 - an extra

            self._bar = tqdm(unit="size", leave=False, dynamic_ncols=True)

    def say(self, text: str) -> None:
        """Print, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        sys.stdout.write(text)
        sys.stdout.flush()
        if self._bar is not None:
            self._bar.refresh()

    def show(self, done: int, total: int, what: str) -> None:
        """`done` of `total` are done, and `what` is under way."""
        if self._bar is not None:
            self._bar.total, self._bar.n = total, done
            self._bar.set_description_str(what)

    def close(self) -> None:
        """Remove it."""
        if self._bar is not None:
            self._bar.close()


class Progress:
    """What rank 0 prints of `total` sizes; other ranks print nothing. mode: as the option `--progress`."""

    def __init__(self, total: int, rank: int, mode: str = "off") -> None:
        self._rank = rank
        self._total = total
        self._done = 0
        self._lines = mode == "lines"
        self._bar = Bar(drawn=rank == 0 and mode == "bar" and can_draw())

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if self._rank == 0 and lines:
            self._bar.say("".join(f"{line}\n" for line in lines))

    def now(self, what: str) -> None:
        """A size is under way."""
        self._bar.show(self._done, self._total, what)
        if self._lines:
            self.say(f"# size {self._done + 1} of {self._total}: {what}")

    def step(self) -> None:
        """It is done."""
        self._done += 1

    def close(self) -> None:
        """All are done."""
        self._bar.close()


def follow(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `command`, which prints lines of progress, and draw them as a bar. Returns its status."""
    bar = Bar(drawn=True)
    with subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with _forwarding(process):
            for line in process.stdout:
                found = LINE.fullmatch(line.rstrip("\n"))
                if found:
                    bar.show(int(found[1]) - 1, int(found[2]), found[3])
                else:
                    bar.say(line)
            status = process.wait()
    bar.close()
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[str]) -> Iterator[None]:
    """What this process is told goes to `process`. Ctrl-C reaches both; then its end is waited for."""

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
