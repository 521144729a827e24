"""Whether the epochs of all workers have as many batches.

Every worker announces at the begin of an epoch how many rounds it has pushed since the last one began: usually one
for each batch. Workers whose numbers differ are out of step from then on, and nothing shows it before the last one
waits for a worker that has left, epochs later.

Cost: one message to worker 0 per worker and epoch, for which nobody waits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpikv.session.agreement import grouped
from mpikv.session.messages import ControlMessages, Message


class Epochs:
    """Worker 0's side: it learns of every worker's epochs. Pure. labels: of the workers."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._batches: dict[int, dict[int, int]] = {}  # count of the begin -> worker -> batches before it
        self._warned = False

    def begin(self, worker: int, count: int, epoch: int, batches: int) -> str | None:
        """The message to send, once for all epochs. count: of this worker's begins. epoch: the one that it begins."""
        known = self._batches.setdefault(count, {})
        known[worker] = batches
        if len(known) < len(self._labels):
            return None
        del self._batches[count]
        numbers = [known[i] for i in range(len(self._labels))]
        if self._warned or len(set(numbers)) == 1:
            return None
        self._warned = True
        return (
            f"before epoch {epoch} began, workers had different numbers of batches: {grouped(numbers, self._labels)}. "
            "From now on they are out of step, and a worker with more batches will wait for one that has left. "
            "SplitSampler gives all workers equally many examples where it shuffles, or with last='drop'; in "
            "`with trainer.join():` some may have more"
        )


class EpochBegins:
    """One worker's end. Kind of message: `epoch` (to worker 0)."""

    def __init__(self, messages: ControlMessages) -> None:
        self._messages = messages
        messages.acts["epoch"] = self._came
        self._epochs = Epochs(messages.names) if messages.leads else None

    def begin(self, count: int, epoch: int, batches: int) -> None:
        """Tell worker 0 how many batches the last epoch had here. count: of this worker's epochs. Local."""
        message: Message = {"kind": "epoch", "begin": [count, epoch, batches]}
        with self._messages.engine.lock:
            if self._epochs is None:
                self._messages.send_to(0, message)
            else:
                self._came(0, {"worker": self._messages.workers.rank, **message})

    def _came(self, _source: int, message: Message) -> None:
        text = None if self._epochs is None else self._epochs.begin(message["worker"], *message["begin"])
        if text is not None:
            print(f"mpikv: warning: {text}", file=sys.stderr, flush=True)
