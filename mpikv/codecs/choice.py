"""Whether the values of keys travel encoded or as they are: whichever has been faster, by the times of their rounds.

Keys that are pushed side by side share the link and the cores: one that is encoded may end sooner and all others later.
So those of one codec are timed together (`RoundTimes`): a round's time is how long any of them was under way in it.
Each key decides by itself, after the same rounds by the same times, and so they decide alike.

The first rounds travel encoded, for `PERIOD_ROUNDS`: some do not count, then come `SAMPLES` that do, and one in which
others may still be under way. Then the other form is tried: for as many rounds, or for `GLANCE_ROUNDS`, of which one
counts, where that one took `CLEAR` times as long. Then all workers tell each other their times (`asks`, `agree`), so
that all decide alike; with servers each decides by its own times alone. From then on they compare times every
`CHECK_ROUNDS`. Where a round takes `MOVED` times as long as when they decided, or so much less, the link has changed,
and the other form is tried again; else it is tried once the time that a try loses is a small part of the time since
the last one (`LOST`), and after twice as many rounds at least each time that it was no faster.

A round's time is the least that any worker has seen: whoever begins it last has not waited for others. Of several
rounds it is the median. At first values stay encoded only where that is faster by more than `MARGIN`, which is more
than noise; from then on the form changes only for one that is faster by as much.

No clock and no messages here: times come in, and what follows from them is the same on every worker. Cost: a few
numbers for each key.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray

SETTLING_ROUNDS = 2  # after a change of form: memory is new, and others may still be at the round before
SAMPLES = 5
PERIOD_ROUNDS = SETTLING_ROUNDS + SAMPLES + 1
GLANCE_ROUNDS = SETTLING_ROUNDS + 2
CLEAR = 2.0
MARGIN = 1.03
CHECK_ROUNDS = 32
MOVED = 1.5
LOST = 0.03
LONGEST_STRETCH_ROUNDS = 1 << 14
KEPT_ROUNDS = 32  # keys that are further apart are not timed together


class RoundTimes:
    """How long some key of one codec was under way, on this worker, in each of their newest rounds.

    seconds: by the number of the round, as each key counts its own.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._under_way, self._seen_s = 0, 0.0

    def begin(self, round_: int, now_s: float) -> None:
        """A key begins its round of this number."""
        self._see(round_, now_s)
        self._under_way += 1

    def end(self, round_: int, now_s: float) -> None:
        """It ends."""
        self._see(round_, now_s)
        self._under_way -= 1

    def _see(self, round_: int, now_s: float) -> None:
        """The time since somebody looked last belongs to this round, if anything was under way."""
        passed_s = now_s - self._seen_s if self._under_way else 0.0
        self.seconds[round_] = self.seconds.get(round_, 0.0) + passed_s
        self._seen_s = now_s
        if len(self.seconds) > KEPT_ROUNDS:
            del self.seconds[next(iter(self.seconds))]


class Choices:
    """Makes those of one worker's keys: keys of one codec that begin with the same round are timed together."""

    def __init__(self) -> None:
        self._newest: dict[str, RoundTimes] = {}

    def of(self, codec: str) -> CodecChoice:
        """Of a key whose next round is the first one to be timed. codec: its name."""
        together = self._newest.get(codec)
        if together is None or together.seconds:  # those keys are under way already
            together = self._newest[codec] = RoundTimes()
        return CodecChoice(together)


class CodecChoice:
    """Of one key. plain: whether its next round travels as it is. looks: how often both forms have been compared."""

    def __init__(self, together: RoundTimes) -> None:
        self.plain = False
        self.looks = 0
        self.seconds: list[float | None] = [None, None]  # of a round, encoded and plain, as last agreed on
        self._together, self._round = together, 0
        self._recent = [deque[float](maxlen=SAMPLES), deque[float](maxlen=SAMPLES)]
        self._begin(trying=False)
        self._rounds_left = PERIOD_ROUNDS  # of the form that is there at first
        self._stretch = self._stretch_left = 0

    def _begin(self, *, trying: bool) -> None:
        self._trying = self._glance = trying
        self._settling = SETTLING_ROUNDS + 1
        self._rounds_left = GLANCE_ROUNDS if trying else CHECK_ROUNDS

    def begin(self, now_s: float) -> None:
        """A round begins on this worker."""
        self._together.begin(self._round, now_s)

    def end(self, now_s: float) -> None:
        """It has ended. The round before has, by now, of all keys that are pushed in step."""
        self._together.end(self._round, now_s)
        self._rounds_left -= 1
        if self._settling:
            self._settling -= 1
        elif (seconds := self._together.seconds.get(self._round - 1)) is not None:
            self._recent[self.plain].append(seconds)
        self._round += 1
        if not self.looks and not self._trying and self._rounds_left == 0:
            self._try_other()

    def _try_other(self) -> None:
        self.plain = not self.plain
        self._recent[self.plain].clear()
        self._begin(trying=True)

    def told(self, codec: str) -> dict[str, Any]:
        """What `store.stats()` says of the key."""
        return {
            "codec": codec,
            "travels": "as it is" if self.plain else "encoded",
            "encoded_s": self.seconds[0],
            "plain_s": self.seconds[1],
            "looks": self.looks,
        }

    @property
    def asks(self) -> bool:
        """Whether the workers tell each other their times before the next round."""
        return self._rounds_left == 0

    @property
    def times(self) -> HostArray:
        """This worker's: float64 (2, SAMPLES), seconds of the newest rounds, encoded and plain; 0: there are none."""
        found: HostArray = np.zeros((2, SAMPLES))
        for row, times in zip(found, self._recent, strict=True):
            row[: len(times)] = times
        return found

    def agree(self, times: Sequence[HostArray]) -> None:
        """Decide. times: those of all workers, in any order."""
        least = np.min(times, axis=0)
        newest = [float(np.median(row[row > 0])) if row.any() else 0.0 for row in least]
        if self._trying:
            self._compare(newest)
            return
        now_s, then_s = newest[self.plain], self.seconds[self.plain] or 0.0
        moved = now_s > MOVED * then_s or then_s > MOVED * now_s
        self._stretch_left -= CHECK_ROUNDS
        if moved:
            self._stretch = 0
        if moved or self._stretch_left <= 0:
            self._try_other()
        else:
            self._rounds_left = CHECK_ROUNDS

    def _compare(self, seconds: list[float]) -> None:
        """Decide, or go on trying: at the first glance only where the form that is tried is clearly slower."""
        if self._glance and seconds[self.plain] <= CLEAR * seconds[not self.plain]:
            self._glance, self._rounds_left = False, PERIOD_ROUNDS - GLANCE_ROUNDS
        else:
            self._decide(seconds)

    def _decide(self, seconds: list[float]) -> None:
        """The form that was tried stays where it is faster; else the one before comes back."""
        tried, before, first = self.plain, not self.plain, not self.looks
        faster = seconds[tried] < seconds[before] * MARGIN if first else seconds[tried] * MARGIN < seconds[before]
        self.plain = tried if faster else before
        stretch = max(CHECK_ROUNDS, 0 if faster else 2 * self._stretch, math.ceil(_lost_rounds(*seconds) / LOST))
        self._stretch = self._stretch_left = min(stretch, LONGEST_STRETCH_ROUNDS)
        self.looks, self.seconds = self.looks + 1, [*seconds]
        self._begin(trying=False)


def _lost_rounds(a_s: float, b_s: float) -> float:
    """How many rounds of the faster form pass while the slower one is tried, more than would be had of it."""
    faster_s, slower_s = sorted([a_s, b_s])
    if not faster_s:
        return 0.0
    return (GLANCE_ROUNDS if slower_s > CLEAR * faster_s else PERIOD_ROUNDS) * (slower_s / faster_s - 1)
