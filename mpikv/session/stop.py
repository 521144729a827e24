"""Stopping together: who wishes it, how all workers agree where they stop, and what `stop_requested` says.

A program reads `stop_requested` once per step. Somebody wishes to stop: a rank, also a server, got a signal or found a
batch script's file (runtime/signals.py), or the program asked by a call. The wish goes to worker 0, and from there to
all workers (message `wish`). Each of them then proposes to the agreement (agreement.py) where it can stop:

- Synchronous stores: under STOP, at once, the number of reads that it has made; its next read is held until the verdict
  is there. All stop at read S = 1 + the largest of these numbers: nobody can have passed it, as whoever proposed last
  made no read since. The progress engine proposes, also while the program waits in a call for workers that are held;
  so no proposal waits for another worker, and the verdict comes.
- Asynchronous stores: steps of different workers have nothing to do with each other, so each stops at a read of its
  own. A worker proposes under HELD when it comes to its next read, and is held there; when all are, all stop. But one
  may wait in a call that all must make (`barrier`, or `close` after its last step), perhaps for those that are held.
  Then the agreement lets these go on, and each proposes anew at its next read.

So in both, either every worker's read returns True, all at the same step, or none does. A `Trainer` then saves, and
ends the program (trainer/files.py); any other program does so itself.

Cost: nothing but a counter until somebody wishes to stop; then three messages per worker (asynchronous: two more for
each time that they had to go on).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpikv.engine.operation import Predicate, Steps
from mpikv.observe.stall import Waiting, say
from mpikv.session.agreeing import Agreeing
from mpikv.session.agreement import HELD, STOP, Proposal
from mpikv.session.messages import ControlMessages
from mpikv.session.waits import Waits


class Stopping:
    """One worker's end. common_steps: whether all workers make the same steps (synchronous stores)."""

    def __init__(self, messages: ControlMessages, waits: Waits, agreeing: Agreeing, *, common_steps: bool) -> None:
        self._messages, self._waits, self._agreeing = messages, waits, agreeing
        self._common = common_steps
        self._asked: Callable[[], str | None] = lambda: None
        self._told = ""  # this worker's own wish, which has been sent
        self._wished = ""  # somebody's wish that has come here by way of worker 0
        self._stop_at: int | None = None  # a read on which workers had agreed before one of them died
        self._reads = 0  # that have returned
        self._proposal: Proposal | None = None
        messages.acts["wish"] = lambda _source, message: self._wish(message["text"])

    def wish(self, why: str) -> None:
        """Ask all workers to stop. Local. why: who or what asked, for the one line that worker 0 prints."""
        messages = self._messages
        with messages.engine.lock:
            if self._told or self._agreeing.closed:
                return
            self._told = f"{why} at {messages.names[messages.workers.rank]}"
            messages.send_to(0, {"kind": "wish", "text": self._told})

    def wish_when(self, asked: Callable[[], str | None]) -> Steps[None]:
        self._asked = asked
        yield Predicate(lambda: asked() is not None)
        self.wish(asked() or "")

    def _wish(self, text: str) -> None:
        """A wish has come: to worker 0 from anybody, of which the first one counts, and from there to all others."""
        if self._wished or self._agreeing.closed:
            return
        self._wished = text
        if self._messages.leads:
            say(f"mpikv: {text}: all workers stop after their step")
            for worker in range(1, self._messages.workers.size):
                self._messages.send_to(worker, {"kind": "wish", "text": text})
        if self._common:
            self._proposal = self._agreeing.propose([(*STOP, self._reads)])

    def told(self) -> tuple[str, int | None]:
        """What workers have to know that go on without this generation: a wish to stop, and where all stop. Local."""
        if self._common and self._proposal is not None and self._proposal.test():
            (verdict,) = self._proposal.verdicts.values()
            return self._wished, verdict.result
        return self._wished or self._told, self._stop_at

    def count_on(self, before: Stopping) -> None:
        """Count reads on from those of an earlier generation. Local."""
        self._reads, self._told = before._reads, before._told

    @property
    def reads(self) -> int:
        return self._reads

    def read_as(self, reads: int) -> None:
        """Count on from as many reads as the others have made, at a new worker. Local."""
        self._reads = reads

    def go_on(self, told: Sequence[tuple[str, int | None]]) -> None:
        """Go on where workers, which all count by now, had stopped or wished to. told: by all of them. Local."""
        self._stop_at = next((read for _, read in told if read is not None), None)
        wished = next((text for text, _ in told if text), "")
        if wished and self._stop_at is None and self._messages.leads:
            with self._messages.engine.lock:
                self._wish(wished)

    def read(self) -> bool | None:
        """Count one read, under the engine's lock. Returns what it says; None: it is held until the verdict."""
        if self._stop_at is not None:
            self._reads += 1
            return self._reads >= self._stop_at
        if self._wished and self._proposal is None:
            self._proposal = self._agreeing.propose([(*HELD, 0)])
        if self._proposal is not None and not self._proposal.test():
            return None
        self._reads += 1
        if self._proposal is None:
            return False
        (verdict,) = self._proposal.verdicts.values()
        if verdict.result is None:  # those that are held go on
            self._proposal = None
            return False
        return bool(self._reads >= verdict.result)

    def stop_requested(self) -> bool:
        """One read. Blocks while workers agree. Raises StallError where they do not come to it."""
        if (why := self._asked()) is not None:
            self.wish(why)
        with self._messages.engine.lock:
            said = self.read()
        if said is None and self._proposal is not None:
            self._waits.wait(self._proposal, Waiting("stop_requested"))
            with self._messages.engine.lock:
                said = self.read()
        return bool(said)
