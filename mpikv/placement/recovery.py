"""What the survivors of a death must give each other, so that all have the same rounds. Pure.

A worker makes one round of a key after the other: it opens round n + 1 only when it has completed round n, which it
has kept the result of. A round can be completed only when all workers of a *generation* (those that are there from one
death to the next) have opened it. So of any two survivors one has completed at most one round of a key more than the
other, which has opened that round, too, and still holds what it brought to it. Therefore:

- where one survivor has completed the round, it gives the others the result, and their round is complete with it;
- where none has, all make it again, with what each of them brought, and without the dead.

So every round of a survivor has one result, to which each of those that are left has contributed once. The same holds
for calls without keys, which are numbered by their topic; but there all have the result before anybody has completed
the call, so that nothing has to be given (session/continued.py).

tests/property/test_recovery_model.py checks every order of events of a few workers against these sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpikv.placement.keys import Key


class Rounds:
    """One worker's rounds of one key. done: how many it has completed. is_open: whether it has opened the next."""

    __slots__ = ("done", "is_open")

    def __init__(self) -> None:
        self.done = 0
        self.is_open = False

    def begin(self) -> int:
        """Open the next round. Returns its number."""
        assert not self.is_open, "a round at a time"
        self.is_open = True
        return self.done + 1

    def complete(self) -> None:
        """The open round has its result."""
        assert self.is_open
        self.done, self.is_open = self.done + 1, False

    def catch_up(self, done: int) -> bool:
        """Take the result of round `done` from another survivor. Returns whether that completes an open round."""
        completes = self.is_open and done > self.done
        assert done == self.done + completes or not self.done, f"round {done} is given where {self.done} are complete"
        self.done, self.is_open = done, self.is_open and not completes
        return completes


ABSENT, EARLY = -2, -1  # in place of a number of rounds: the key is not known; it is, and its first value has not come


class Report(NamedTuple):
    """What one survivor tells the others. rounds: how many it has completed of each key that it knows, or EARLY."""

    rounds: Mapping[Key, int]


def givers(reports: Sequence[Report]) -> dict[Key, int]:
    """Who gives the value of each key that some survivor lacks, or has only of an earlier round.

    reports: by worker. Of those that have completed most rounds of a key, the first gives it; where none has its first
    value, the first that has come to its `init` gives what it has brought there.
    """
    found: dict[Key, int] = {}
    for key in dict.fromkeys(key for report in reports for key in report.rounds):
        done = [report.rounds.get(key, ABSENT) for report in reports]
        if min(done) < max(done) or max(done) == EARLY:
            found[key] = done.index(max(done))
    return found
