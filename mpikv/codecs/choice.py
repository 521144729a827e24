"""Chooses whether the values of a key are sent encoded or uncompressed: the form in which rounds have been faster.

Keys that are pushed side by side share the link and the cores: encoding one of them may make it end sooner and all
others later. So the keys of one codec are timed together (`RoundTimes`): the time of a round is how long any of them
was under way in it. Each key decides by itself, but after the same rounds and by the same times, so they decide alike.

The first `TRIAL_ROUNDS` rounds are sent encoded: some warm-up rounds that are not measured, `SAMPLES` that are, and one
in which other keys may still be in the last measured round. Then a trial of the other form begins. It ends after
`SHORT_TRIAL_ROUNDS`, of which one is measured, if that one took `CLEARLY_SLOWER` times as long, else after
`TRIAL_ROUNDS`. Then all workers exchange their times (`exchange_due`, `agree`), so that all decide alike; with servers
each worker decides by its own times. From then on they compare times every `CHECK_ROUNDS`. If a round takes `CHANGED`
times as long as when they decided, or as much less, the link has changed and the next trial begins at once. Otherwise
it begins when the time that a trial costs is at most `TRIAL_SHARE` of the time since the last one; that number of
rounds at least doubles after each trial that found no faster form.

A round's time is the least that any worker has measured, since the worker that begins a round last has not waited for
others. Of several rounds the median counts. After the first trial values stay encoded only if that is faster by more
than `MARGIN`, which is more than noise; after later ones the form changes only if the other is faster by as much.

This module has no clock and sends no messages: times are passed in, and the same decision follows from them on every
worker. Cost: a few numbers for each key.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.observe.log import StoreLog
from mpikv.placement.described import key
from mpikv.placement.keys import KeyInfo

WARMUP_ROUNDS = 2  # after a change of form: memory is new, and other keys may still be in the round before
SAMPLES = 5
TRIAL_ROUNDS = WARMUP_ROUNDS + SAMPLES + 1
SHORT_TRIAL_ROUNDS = WARMUP_ROUNDS + 2
CLEARLY_SLOWER = 2.0
MARGIN = 1.03
CHECK_ROUNDS = 32
CHANGED = 1.5
TRIAL_SHARE = 0.03
LONGEST_INTERVAL_ROUNDS = 1 << 14
KEPT_ROUNDS = 32  # keys that are further apart are not timed together


class RoundTimes:
    """How long any key of one codec was under way, on this worker, in each of the newest rounds.

    seconds: by the number of the round, as each key counts its own.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._under_way, self._last_event_s = 0, 0.0

    def begin(self, round_: int, now_s: float) -> None:
        """A key begins its round of this number."""
        self._add_elapsed(round_, now_s)
        self._under_way += 1

    def end(self, round_: int, now_s: float) -> None:
        """A key ends its round of this number."""
        self._add_elapsed(round_, now_s)
        self._under_way -= 1

    def _add_elapsed(self, round_: int, now_s: float) -> None:
        """Add the time since the last begin or end to this round, if any key was under way."""
        elapsed_s = now_s - self._last_event_s if self._under_way else 0.0
        self.seconds[round_] = self.seconds.get(round_, 0.0) + elapsed_s
        self._last_event_s = now_s
        if len(self.seconds) > KEPT_ROUNDS:
            del self.seconds[next(iter(self.seconds))]


class Choices:
    """Makes the choices of one worker's keys: keys of one codec that begin in the same round are timed together.

    log: of what is chosen.
    """

    def __init__(self, log: StoreLog | None = None) -> None:
        self._newest: dict[str, RoundTimes] = {}
        self._log = log

    def of(self, codec: str, info: KeyInfo | None = None) -> CodecChoice:
        """Make the choice of a key whose next round is the first to be timed. codec: the name of its codec.

        info: the key's, for the log.
        """
        times = self._newest.get(codec)
        if times is None or times.seconds:  # the keys of those times have begun already
            times = self._newest[codec] = RoundTimes()
        return CodecChoice(times, self._log, info)


class CodecChoice:
    """The choice of one key.

    uncompressed: whether its next round is sent so. comparisons: how often both forms have been compared. seconds: of a
    round, encoded and uncompressed, at the last comparison.
    """

    def __init__(self, round_times: RoundTimes, log: StoreLog | None = None, info: KeyInfo | None = None) -> None:
        self._log, self._info = log, info
        self.uncompressed = False
        self.comparisons = 0
        self.seconds: list[float | None] = [None, None]
        self._round_times, self._round = round_times, 0
        self._recent = [deque[float](maxlen=SAMPLES), deque[float](maxlen=SAMPLES)]
        self._begin_period(trial=False)
        self._rounds_left = TRIAL_ROUNDS  # the first form is measured for as long as the other one will be
        self._interval = self._interval_left = 0  # rounds between two trials

    def _begin_period(self, *, trial: bool) -> None:
        self._in_trial = self._in_short_trial = trial
        self._warmup_left = WARMUP_ROUNDS + 1
        self._rounds_left = SHORT_TRIAL_ROUNDS if trial else CHECK_ROUNDS

    def begin(self, now_s: float) -> None:
        """A round of the key begins on this worker."""
        self._round_times.begin(self._round, now_s)

    def end(self, now_s: float) -> None:
        """A round of the key ends. By now the round before has ended for all keys that are pushed in step."""
        self._round_times.end(self._round, now_s)
        self._rounds_left -= 1
        if self._warmup_left:
            self._warmup_left -= 1
        elif (seconds := self._round_times.seconds.get(self._round - 1)) is not None:
            self._recent[self.uncompressed].append(seconds)
        self._round += 1
        if not self.comparisons and not self._in_trial and self._rounds_left == 0:
            self._begin_trial()

    def _begin_trial(self) -> None:
        self.uncompressed = not self.uncompressed
        self._recent[self.uncompressed].clear()
        self._begin_period(trial=True)

    def stats(self, codec: str) -> dict[str, Any]:
        """Return the key's entry in `store.stats()`."""
        return {
            "codec": codec,
            "travels": "as it is" if self.uncompressed else "encoded",
            "encoded_s": self.seconds[0],
            "plain_s": self.seconds[1],
            "looks": self.comparisons,
        }

    @property
    def exchange_due(self) -> bool:
        """Whether the workers exchange their times before the next round."""
        return self._rounds_left == 0

    @property
    def times(self) -> HostArray:
        """This worker's times: float64 (2, SAMPLES), seconds of the newest rounds, encoded and not; 0: none."""
        found: HostArray = np.zeros((2, SAMPLES))
        for row, times in zip(found, self._recent, strict=True):
            row[: len(times)] = times
        return found

    def agree(self, times: Sequence[HostArray]) -> None:
        """Decide which form the next rounds have. times: the `times` of all workers, in any order."""
        least = np.min(times, axis=0)
        newest = [float(np.median(row[row > 0])) if row.any() else 0.0 for row in least]
        if self._in_trial:
            self._compare(newest)
            return
        now_s, then_s = newest[self.uncompressed], self.seconds[self.uncompressed] or 0.0
        changed = now_s > CHANGED * then_s or then_s > CHANGED * now_s
        self._interval_left -= CHECK_ROUNDS
        if changed:
            self._interval = 0
        if changed or self._interval_left <= 0:
            self._begin_trial()
        else:
            self._rounds_left = CHECK_ROUNDS

    def _compare(self, seconds: list[float]) -> None:
        """Decide; but prolong a short trial, if its form is not clearly slower."""
        if self._in_short_trial and seconds[self.uncompressed] <= CLEARLY_SLOWER * seconds[not self.uncompressed]:
            self._in_short_trial, self._rounds_left = False, TRIAL_ROUNDS - SHORT_TRIAL_ROUNDS
        else:
            self._decide(seconds)

    def _decide(self, seconds: list[float]) -> None:
        """Keep the form of the trial if it is faster; else return to the one before."""
        tried, before, first = self.uncompressed, not self.uncompressed, not self.comparisons
        faster = seconds[tried] < seconds[before] * MARGIN if first else seconds[tried] * MARGIN < seconds[before]
        self.uncompressed = tried if faster else before
        rounds = max(CHECK_ROUNDS, 0 if faster else 2 * self._interval, math.ceil(_trial_cost(*seconds) / TRIAL_SHARE))
        self._interval = self._interval_left = min(rounds, LONGEST_INTERVAL_ROUNDS)
        self.comparisons, self.seconds = self.comparisons + 1, [*seconds]
        self._begin_period(trial=False)
        if self._log is not None and self._info is not None:
            self._log.detail(self._described)

    def _described(self) -> str:
        assert self._info is not None
        form, (encoded_s, plain_s) = "as they are" if self.uncompressed else "encoded", self.seconds
        return (
            f"{key(self._info)}: its values travel {form} from now on: "
            f"a round took {encoded_s:.2g} s encoded, and {plain_s:.2g} s as they are"
        )


def _trial_cost(a_s: float, b_s: float) -> float:
    """How much longer a trial of the slower form takes than as many rounds of the faster one, in rounds of that."""
    faster_s, slower_s = sorted([a_s, b_s])
    if not faster_s:
        return 0.0
    rounds = SHORT_TRIAL_ROUNDS if slower_s > CLEARLY_SLOWER * faster_s else TRIAL_ROUNDS
    return rounds * (slower_s / faster_s - 1)
