"""How far a piece of work is: a bar on a terminal, elsewhere a line now and then; and the lines that it prints besides.

Everything that shows progress uses this class, the commands and the examples. The bar is rich's. Where nobody looks (a
file, a pipe, under mpirun or Slurm) a line is due when `LEAST_S` have passed and another `SHARE` of the work is
done, and after `MOST_S` in any case: a short piece of work has a line for each 5 s, a long one about twenty in all, and
none is silent for longer than a minute. Bar and lines go to standard error, so that standard output holds results.

No thread: the bar is drawn again when somebody calls, at most every `DRAWN_S`. So it disturbs nothing that is timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import rich.progress

T = TypeVar("T")
LEAST_S, MOST_S, SHARE = 5.0, 60.0, 0.05
DRAWN_S = 0.1


class Progress:
    """Shows how many of `total` are done. A context manager, which removes the bar at its end. Local, never blocks.

    title: what is done, such as "epoch 1/3". unit: what is counted, in the plural; "bytes" have KiB and MiB in the bar.
    done: how many are done already. shown: False prints nothing at all, for all ranks but one. clock: for tests.
    """

    def __init__(
        self,
        title: str,
        total: int,
        unit: str,
        *,
        done: int = 0,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self.total, self._unit, self._clock = title, total, unit, clock
        self._shown = shown
        self.what, self._values = "", ""
        self._first = self.done = self._line_done = done
        self._start_s = self._line_s = self._drawn_s = clock()
        self._bar = _bar(title, total, unit, done) if shown else None

    def update(self, n: int = 0, what: str | None = None, **values: float) -> None:
        """Count `n` more as done. what: is under way from now on.

        values: shown besides, such as loss=0.61.
        """
        self.done += n
        changed = what is not None and what != self.what
        self.what = self.what if what is None else what
        self._values = ", ".join(f"{name} {value:.4f}" for name, value in values.items()) or self._values
        if not self._shown:
            return
        now_s = self._clock()
        if self._bar is not None:
            if changed or self.done >= self.total or now_s - self._drawn_s >= DRAWN_S:
                self._drawn_s = now_s
                text = ", ".join(filter(None, (self.what, self._values)))
                (task,) = self._bar.task_ids
                self._bar.update(task, completed=self.done, total=self.total, text=text, refresh=True)
            return
        waited_s, share = now_s - self._line_s, (self.done - self._line_done) / max(self.total, 1)
        if waited_s >= MOST_S or (waited_s >= LEAST_S and share >= SHARE):
            self._line_s, self._line_done = now_s, self.done
            print(self._line(now_s), file=sys.stderr, flush=True)

    def say(self, *lines: str) -> None:
        """Print whole lines on standard output, above the bar where both are on a terminal."""
        if not self._shown or not lines:
            return
        if self._bar is not None and sys.stdout.isatty():
            self._bar.console.out(*lines, sep="\n", highlight=False)
        else:
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()

    def close(self) -> None:
        """Remove the bar. May be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, now_s: float) -> str:
        speed = (self.done - self._first) / max(now_s - self._start_s, 1e-9)
        parts = [f"{self._title}: {self.done} of {self.total} {self._unit}", self.what, self._values]
        if speed > 0:
            shown = f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"
            parts += [f"{shown} {self._unit}/s", f"{(self.total - self.done) / speed:.0f} s left"]
        return ", ".join(filter(None, parts))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shown(batches: Collection[T], title: str, *, here: bool = True) -> Iterator[T]:
    """Yield the batches themselves, and show their progress. here: whether this process does: `store.rank == 0`."""
    with Progress(title, len(batches), "batches", shown=here) as progress:
        for batch in batches:
            yield batch
            progress.update(1)


def _bar(title: str, total: int, unit: str, done: int) -> rich.progress.Progress | None:
    """Make a bar on standard error, drawn for the first time. None where nothing can be drawn."""
    if not sys.stderr.isatty():
        return None
    from rich import progress as rich_progress  # noqa: PLC0415 - needed on a terminal alone
    from rich.console import Console  # noqa: PLC0415

    console = Console(file=sys.stderr)
    if console.is_dumb_terminal:
        return None
    count: rich_progress.ProgressColumn = rich_progress.MofNCompleteColumn()
    if unit == "bytes":
        count = rich_progress.DownloadColumn(binary_units=True)
    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        count,
        rich_progress.TextColumn("{task.fields[text]}", markup=False),
        rich_progress.TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,  # it would send results that go to a file to standard error
        redirect_stderr=False,
    )
    bar.add_task(title, total=total, completed=done, text="")
    bar.start()
    console.show_cursor(True)  # rich hides it, and a process that a signal ends cannot bring it back
    return bar
