"""Agreeing: how this worker's proposals and worker 0's verdicts travel (agreement.py decides).

Kinds of messages: `propose` (to worker 0) and `verdicts` (from worker 0). Final verdicts come in the same order on
every worker.

Cost: two messages per worker and proposal; verdicts that follow from one proposal share messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mpikv.errors import StallError
from mpikv.observe.stall import Waiting
from mpikv.session.agreement import Agreement, Name, Proposal, Verdict
from mpikv.session.messages import ControlMessages, Message
from mpikv.session.waits import Waits

BLOCK = 100  # verdicts in one message: a worker acts on as many in some milliseconds


class Agreeing:
    """One worker's end. agreement: makes the state machine, at worker 0. on_verdict: called for every verdict.

    closed: all workers have agreed to close the store, and none listens any more.
    """

    def __init__(
        self,
        messages: ControlMessages,
        waits: Waits,
        *,
        agreement: Callable[[Sequence[str]], Agreement],
        on_verdict: Callable[[Verdict], None],
    ) -> None:
        self._messages, self._waits = messages, waits
        self.closed = False
        self._on_verdict = on_verdict
        self._proposals: list[Proposal] = []
        if messages.leads:
            self._agreement = agreement(messages.names)
            messages.acts["propose"] = lambda _source, message: self._take(message["worker"], message["items"])
        messages.acts["verdicts"] = self._verdicts_came

    def propose(self, items: Sequence[tuple[str, Name, Any]]) -> Proposal:
        """Propose to worker 0. Local; wait for the result with `agree`, or for the proposal, which is a request."""
        proposal = Proposal([(topic, name) for topic, name, _ in items])
        with self._messages.engine.lock:
            self._proposals.append(proposal)
            self._messages.send_to(0, {"kind": "propose", "items": items})
        return proposal

    def agree(self, topic: str, name: Name, payload: Any, waiting: Waiting, *, patient: bool = False) -> Any:
        """Propose and wait. Collective over the workers. Raises what they agreed to raise.

        patient: past the time limit go on waiting as long as every other worker answers that it is alive.
        """
        proposal, waits = self.propose([(topic, name, payload)]), self._waits
        while True:
            try:
                waits.wait(proposal, waiting)
                break
            except StallError as stall:
                if not patient or stall.deadlock or not waits.all_answered:
                    raise
                print(f"mpikv: {stall} Still waiting.", file=sys.stderr, flush=True)
        return proposal.verdicts[topic, name].unwrap()

    def _take(self, worker: int, items: Sequence[tuple[str, Name, Any]]) -> None:
        """At worker 0: take proposals, and deliver the verdicts that follow."""
        for topic, _, payload in items:
            if topic == "close":
                self._waits.left(worker, dict(payload[0]))
        by_worker: dict[int, list[Verdict]] = {}
        for verdict in self._agreement.propose(worker, items):
            by_worker.setdefault(verdict.worker, []).append(verdict)
        # In blocks, on which all act side by side. This worker first: then the first value of a key is there.
        for begin in range(0, max(map(len, by_worker.values()), default=0), BLOCK):
            for one in sorted(by_worker):
                if block := by_worker[one][begin : begin + BLOCK]:
                    self._messages.send_to(one, {"kind": "verdicts", "verdicts": block})

    def _verdicts_came(self, _source: int, message: Message) -> None:
        for verdict in (Verdict(*fields) for fields in message["verdicts"]):
            self._on_verdict(verdict)
            proposal = next((one for one in self._proposals if one.take(verdict)), None)
            if proposal is not None and proposal.test():
                self._proposals.remove(proposal)
            self.closed |= verdict.topic == "close" and verdict.error is None
