"""How all workers agree to stop at the same place, as pure state machines: messages in, messages out.

A program reads `stop_requested` once per step. Somebody wishes to stop: a rank got a signal, or asked by a call. Worker
0, the leader, then asks every worker how far it is; the answers decide where all of them stop.

- Synchronous stores: a worker answers at once with the number of reads that it has made, and holds its next read until
  the decision comes. All stop at read S = 1 + the largest of these numbers: nobody can have passed it, as whoever
  answered last made no read since. A worker answers from the progress engine, also while it waits in a call for
  workers that are held; so an answer never waits for another worker, and the decision comes.
- Asynchronous stores: steps of different workers have nothing to do with each other, so each stops at a read of its
  own. A worker answers when it comes to its next read, and is held there; when all are held, all stop. But one may wait
  in a call that all must make (`barrier`, or `close` after its last step), perhaps for those that are held. Then they
  go on, for one read, and are asked anew.

So in both, either every worker's read returns True, all at the same step, or none does.

Cost: nothing but a counter until somebody wishes to stop; then three messages per worker (asynchronous: two more for
each time that they had to go on). No clock, no MPI.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ASK, GO, STOP = "ask", "go", "stop"


class Order(NamedTuple):
    """From the leader to `worker`: ASK how far it is, GO on from the read that is held, STOP at read number `value`.

    value of ASK and GO: the number of the question.
    """

    worker: int
    kind: str
    value: int


class StopAnswer(NamedTuple):
    """From a worker to the leader: `reads` were made before question number `question`."""

    question: int
    reads: int


class StopReader:
    """A worker's side. common: whether all workers stop at the same number of reads (synchronous stores)."""

    def __init__(self, *, common: bool) -> None:
        self.reads = 0  # that have returned
        self.stop_at: int | None = None  # the first read that returns True
        self._common = common
        self._question: int | None = None  # that has no decision yet
        self._held = False  # inside a read that waits for the decision
        self._passes = False  # the held read returns, whatever has been asked since

    def read(self) -> tuple[bool | None, StopAnswer | None]:
        """Count one read. Returns what it says (None: it is held; call again when something has come), and an answer to
        send.
        """
        if self._passes or self.stop_at is not None or self._question is None:
            self._passes = self._held = False
            self.reads += 1
            return self.stop_at is not None and self.reads >= self.stop_at, None
        if self._held:
            return None, None
        self._held = True
        return None, None if self._common else StopAnswer(self._question, self.reads)

    def obey(self, kind: str, value: int) -> StopAnswer | None:
        """Act on an order of the leader's; the answer to send."""
        if kind == STOP:
            self.stop_at, self._question = value, None
        elif kind == GO:
            if self._held:
                self._passes = True
            self._question = None
        else:
            self._question = value
            # Held already: its answer to the last question crossed the decision to ask anew.
            if self._common or (self._held and not self._passes):
                return StopAnswer(value, self.reads)
        return None


class Leader:
    """Worker 0's side. size: of how many workers. common: as in `StopReader`."""

    def __init__(self, size: int, *, common: bool) -> None:
        self._workers = range(size)
        self._common = common
        self._question = 0  # the number of the last one
        self._answers: dict[int, int] = {}
        self._blocked: set[int] = set()
        self._ended = False
        self.asking = False
        self.decided = False

    @property
    def settled(self) -> bool:
        """Whether every answer that must come without any further read has come."""
        return not (self.asking and self._common)

    def wish(self) -> list[Order]:
        """Note that somebody wishes to stop. Only the first wish counts."""
        if self.asking or self.decided or self._ended:
            return []
        return self._ask()

    def answer(self, worker: int, answer: StopAnswer) -> list[Order]:
        """Take an answer, and return the orders that follow from it."""
        if not self.asking or answer.question != self._question:
            return []
        self._answers[worker] = answer.reads
        return self._decide()

    def blocked(self, workers: Iterable[int]) -> list[Order]:
        """Note that these workers, and no others, wait in calls that all must make."""
        self._blocked = set(workers)
        return self._decide()

    def end(self) -> None:
        """Note that all workers have closed the store: nobody reads any more, and nothing is sent any more."""
        self._ended = True

    def _ask(self) -> list[Order]:
        self._question += 1
        self._answers = {}
        self.asking = True
        return [Order(worker, ASK, self._question) for worker in self._workers]

    def _decide(self) -> list[Order]:
        if not self.asking:
            return []
        if len(self._answers) == len(self._workers):
            self.asking, self.decided = False, True
            if self._ended:
                return []
            last = max(self._answers.values())
            return [
                Order(worker, STOP, 1 + (last if self._common else self._answers[worker])) for worker in self._workers
            ]
        held = set() if self._common or self._ended else set(self._answers)
        if held and held | self._blocked >= set(self._workers):
            return [*(Order(worker, GO, self._question) for worker in sorted(held)), *self._ask()]
        return []
