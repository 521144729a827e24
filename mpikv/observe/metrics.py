"""The file of a rank's metrics for Prometheus, in the text format that node_exporter's textfile collector reads.

A thread of its own writes it, every INTERVAL_S: also while the program computes, hangs, or waits for a file system, and
where the store has no progress thread. A reader finds the old file or the new one, never a part of it.

The package prometheus_client would make no more of it than `text` does: what the metrics are, the thread, the names of
files and what is said of a full disk are ours either way.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mpikv.common import files
from mpikv.common.checks import shown
from mpikv.errors import ConfigError
from mpikv.observe.stall import say

INTERVAL_S = 15.0  # as often as Prometheus asks, unless it is told otherwise
END_S = 5.0  # how long the thread may take to end: a file system may not answer

Labels = Mapping[str, str]

_lock = threading.Lock()
_open: set[str] = set()  # the files that stores of this process write


class Metric(NamedTuple):
    """One metric: `mpikv_NAME`, with a sample for each of its labels. counter: it only grows; else a gauge."""

    name: str
    help: str
    samples: Sequence[tuple[Labels, float]]
    counter: bool = False


def text(metrics: Iterable[Metric], labels: Labels) -> str:
    """The text of a file. labels: of every sample."""

    def escaped(found: str) -> str:
        return found.replace("\\", r"\\").replace("\n", r"\n")

    lines = []
    for metric in metrics:
        name = f"mpikv_{metric.name}{'_total' * metric.counter}"
        lines.append(f"# HELP {name} {escaped(metric.help)}")
        lines.append(f"# TYPE {name} {'counter' if metric.counter else 'gauge'}")
        for own, value in metric.samples:
            quoted = ((label, escaped(one).replace('"', r"\"")) for label, one in {**labels, **own}.items())
            named = ",".join(f'{label}="{one}"' for label, one in quoted)
            lines.append(f"{name}{{{named}}} {value}")
    return "\n".join([*lines, ""])


def check(folder: str) -> None:
    """Make the folder where it is not there. Raises ConfigError where this process cannot write files in it."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"MPIKV_METRICS={shown(folder)}: no file can be written there ({error.strerror or error}); "
            "name a folder that this process may write to, or unset it"
        ) from None


class MetricsFile:
    """The file of one rank in one store. It is written at once, from time to time, and by `close`.

    folder: MPIKV_METRICS, as it was checked. name: of the file, as in `mpikv-worker-0`; stores that a process has open
    at the same time are numbered from 0, and all but the first have that number in the name. labels: of all samples;
    `store`, that number, comes to them. read: what is written.
    """

    def __init__(self, folder: str, name: str, labels: Labels, read: Callable[[], list[Metric]]) -> None:
        base = os.path.join(os.path.abspath(folder), name)
        with _lock:
            paths = (f"{base}-{i}.prom" if i else f"{base}.prom" for i in itertools.count())
            number, self.path = next((i, path) for i, path in enumerate(paths) if path not in _open)
            _open.add(self.path)
        self._labels = {**labels, "store": str(number)}
        self._read, self._interval_s = read, INTERVAL_S
        self._warned = self._closed = False
        self._ended = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._work, name="mpikv-metrics", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._write()

    def _write(self, *, up: bool = True) -> None:
        try:
            metrics = self._read()
        except Exception:  # noqa: BLE001 - what is read changes meanwhile: next time
            return
        metrics = [Metric("up", "1 while the store is open, 0 once it is closed", [({}, int(up))]), *metrics]
        try:
            with files.replacing(self.path, durable=False) as file:
                file.write(text(metrics, self._labels).encode())
        except OSError as error:
            if not self._warned:
                self._warned = True
                again = f"tried again every {self._interval_s:g} s"
                say(f"mpikv: warning: no metrics in {self.path}: {error.strerror or error} (told once, {again})")

    def stop(self) -> None:
        """End the thread; nothing more is written. Idempotent."""
        self._ended.set()
        self._thread.join(END_S)

    def close(self) -> None:
        """End the thread, and write for the last time. Idempotent."""
        self.stop()
        if not self._closed:
            self._closed = True
            self._write(up=False)
            with _lock:
                _open.discard(self.path)
