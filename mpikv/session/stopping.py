"""Stopping together: how this worker's reads of `stop_requested` and the leader's orders travel (stop.py decides).

Kinds of messages: `wish` (to worker 0, also from a server: somebody asks for a stop), `stop` (worker 0's orders),
`reads` (the answers: how far a worker is).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from mpikv.engine.operation import Predicate, Steps
from mpikv.observe.stall import Waiting
from mpikv.session.messages import ControlMessages, Message
from mpikv.session.stop import Leader, Order, StopAnswer, StopReader
from mpikv.session.waits import Waits


class Stopping:
    """One worker's end. common_steps: whether all workers make the same steps (synchronous stores)."""

    def __init__(self, messages: ControlMessages, waits: Waits, *, common_steps: bool) -> None:
        self._messages, self._waits = messages, waits
        self._reader = StopReader(common=common_steps)
        self._asked: Callable[[], str | None] = lambda: None
        self._wished = False
        self._ended = False  # all workers have closed the store
        messages.acts |= {"wish": self._wish_came, "stop": self._order_came, "reads": self._answer_came}
        self._leader = Leader(messages.workers.size, common=common_steps) if messages.leads else None

    @property
    def settled(self) -> bool:
        """Whether nothing more comes in answer to what this worker has sent."""
        return self._leader is None or self._leader.settled

    def wish(self, why: str) -> None:
        """Ask all workers to stop. Local. why: who or what asked, for the one line that worker 0 prints."""
        with self._messages.engine.lock:
            if not self._wished and not self._ended:
                self._wished = True
                self._wish(f"{why} at {self._messages.names[self._messages.workers.rank]}")

    def _wish(self, text: str) -> None:
        if self._leader is None:
            self._messages.send_to(0, {"kind": "wish", "text": text})
        elif orders := self._leader.wish():
            print(f"mpikv: {text}: all workers stop after their step", file=sys.stderr, flush=True)
            self._order(orders)

    def _wish_came(self, _source: int, message: Message) -> None:
        self._wish(message["text"])

    def wish_when(self, asked: Callable[[], str | None]) -> Steps[None]:
        self._asked = asked
        yield Predicate(lambda: asked() is not None)
        self.wish(asked() or "")

    def _order(self, orders: Sequence[Order]) -> None:
        for worker, kind, value in orders:
            if worker == self._messages.workers.rank:
                self._answer(self._reader.obey(kind, value))
            else:
                self._messages.send_to(worker, {"kind": "stop", "order": kind, "value": value})

    def _order_came(self, _source: int, message: Message) -> None:
        self._answer(self._reader.obey(message["order"], message["value"]))

    def _answer(self, answer: StopAnswer | None) -> None:
        if answer is None:
            return
        if self._leader is None:
            self._messages.send_to(0, {"kind": "reads", "answer": list(answer)})
        else:
            self._order(self._leader.answer(self._messages.workers.rank, answer))

    def _answer_came(self, _source: int, message: Message) -> None:
        if self._leader is not None:
            self._order(self._leader.answer(message["worker"], StopAnswer(*message["answer"])))

    def blocked(self, workers: Iterable[int]) -> None:
        if self._leader is not None:
            self._order(self._leader.blocked(workers))

    def end(self) -> None:
        self._ended = True
        if self._leader is not None:
            self._leader.end()

    def stop_requested(self) -> bool:
        """One read, see stop.py. Blocks while workers agree. Raises StallError where they do not come to it."""
        why = self._asked()
        if why is not None:
            self.wish(why)
        with self._messages.engine.lock:
            says, answer = self._reader.read()
            self._answer(answer)
            if says is None:
                says, _ = self._reader.read()  # the answer may have been the last one that was missing
        said = [says]

        def decided() -> bool:
            if said[0] is None:
                said[0], _ = self._reader.read()
            return said[0] is not None

        if says is None:
            self._waits.wait(Predicate(decided), Waiting("stop_requested"))
        return bool(said[0])
