"""Whether the epochs of all workers have as many batches, told where they end. Pure: no clock, no MPI.

Every worker says at the begin of an epoch how many rounds it has pushed since the last one began: as a rule one for
each batch. Workers whose numbers differ are out of step from then on, and nothing shows it before the last one waits
for a worker that has left, epochs later.

Cost: one message to worker 0 per worker and epoch, for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpikv.session.agreement import grouped


class Epochs:
    """Worker 0's side: it hears of every worker's epochs. labels: of the workers."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._batches: dict[int, dict[int, int]] = {}  # count of the begin -> worker -> batches before it
        self._told = False

    def begin(self, worker: int, count: int, epoch: int, batches: int) -> str | None:
        """What is to be said, once for all epochs. count: of this worker's begins. epoch: the one that it begins."""
        known = self._batches.setdefault(count, {})
        known[worker] = batches
        if len(known) < len(self._labels):
            return None
        del self._batches[count]
        numbers = [known[i] for i in range(len(self._labels))]
        if self._told or len(set(numbers)) == 1:
            return None
        self._told = True
        return (
            f"before epoch {epoch} began, workers had different numbers of batches: {grouped(numbers, self._labels)}. "
            "From now on they are out of step, and a worker with more batches will wait for one that has left. "
            "SplitSampler gives all workers equally many examples where it shuffles, or with last='drop'; in "
            "`with trainer.join():` some may have more"
        )
