"""How far an epoch is: a bar where somebody looks, a line now and then where the output goes to a file or to `mpirun`.

The bar is tqdm's; without tqdm there are lines, too. Both go to standard error, so that standard output holds results
alone. Worker 0 alone shows something.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TextIO, TypeVar

from mpikv import KVStore

T = TypeVar("T")
LEAST_S, MOST_S = 5.0, 60.0  # between two lines; a short epoch has one for each 5 s, a long one twenty in all
SHARE = 0.05


class Progress:
    """A count of images, or another `unit`, up to `total`, with the values that `update` is told; a context manager.

    title: such as "epoch 1/3". shown: whether this process shows it (worker 0). stream, clock: for tests.
    """

    def __init__(
        self,
        total: int,
        title: str,
        shown: bool,
        *,
        done: int = 0,
        unit: str = "images",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._title, self._shown, self._unit, self._clock = total, title, shown, unit, clock
        self._stream = sys.stderr if stream is None else stream
        self._first = self._done = self._line_done = done
        self._start_s = self._line_s = clock()
        self._bar = self._make_bar() if shown and self._stream.isatty() else None

    def _make_bar(self) -> Any:
        try:
            from tqdm import tqdm  # noqa: PLC0415 - an extra
        except ImportError:
            return None
        options: dict[str, Any] = {"unit": f" {self._unit}", "unit_scale": True, "leave": False, "file": self._stream}
        return tqdm(total=self._total, initial=self._done, desc=self._title, **options)

    def update(self, n: int, **values: float) -> None:
        """`n` more are done. values: to be shown, such as loss=0.61. Local."""
        self._done += n
        if self._bar is not None:
            self._bar.set_postfix({name: f"{value:.4f}" for name, value in values.items()}, refresh=False)
            self._bar.update(n)
        elif self._shown:
            now = self._clock()
            waited_s, share = now - self._line_s, (self._done - self._line_done) / max(self._total, 1)
            if waited_s >= MOST_S or (waited_s >= LEAST_S and share >= SHARE):
                self._line_s, self._line_done = now, self._done
                self._write(now, values)

    def _write(self, now: float, values: dict[str, float]) -> None:
        speed = (self._done - self._first) / max(now - self._start_s, 1e-9)
        known = "".join(f", {name} {value:.4f}" for name, value in values.items())
        left = f", {(self._total - self._done) / speed:.0f} s left" if speed > 0 else ""
        line = f"{self._title}: {self._done} of {self._total} {self._unit}{known}, {speed:.0f} {self._unit}/s{left}"
        print(line, file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def batches(batches: Collection[T], epoch: int, store: KVStore) -> Iterator[T]:
    """The batches themselves, with their progress: for programs that show no loss."""
    with Progress(len(batches), f"epoch {epoch + 1}", store.rank == 0, unit="batches") as progress:
        for batch in batches:
            yield batch
            progress.update(1)
