"""Two workers that wait for each other: one in a round that the other has not pushed, the other in a call of all.

So it is where an epoch has more batches on one worker, which waits in a step, while another one is in the evaluation
after it. Neither can go on, since a store's calls belong to one thread of a program, and the time limit, minutes later,
would be the first to say so. A worker that waits for long asks the others what they wait for, and looks at the answers.
Pure: no clock, no MPI.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpikv.observe.stall import Waiting

ASK_AFTER_S = 10.0  # and again, every time that this has passed: longer than workers of equal speed ever differ
ALL = "all"  # the call needs every worker


def need(waiting: Waiting | None) -> Any:
    """What a worker sends about its wait: `ALL`, a round as [key id, round], or None where it needs no other worker."""
    if waiting is None:
        return None
    if waiting.round is not None and waiting.key_id is not None:
        return [waiting.key_id, waiting.round]
    # `init` may return before all have called it, so that it may wait for others than the one who asks.
    return None if waiting.owners or waiting.call.startswith("init(") else ALL


def for_ever(waiting: Waiting, pushes: Mapping[int, int], answer: Mapping[str, Any]) -> bool:
    """Whether the worker of `answer` cannot come to what `waiting` waits for before this worker goes on.

    pushes: key id -> how often this worker has pushed that key. answer: `pushes` of the key of `waiting`, and `needs`.
    """
    needs = answer["needs"]
    if waiting.round is None or answer["pushes"] >= waiting.round or needs is None:
        return False
    return bool(needs == ALL or pushes.get(needs[0], 0) < needs[1])
