"""Decides whether all ranks of a host are in the same blocking call, so that they can make it in common.

Ranks that make the same blocking call can make it in common, in memory that they all see. But a rank may be in another
call that pushes the same keys, with other keys beside them or without blocking, and then nobody may wait for it here.
So each call of a rank has a *mark*: a hash of the keys that it has pushed so far, of how often it has pushed each (in
any order), and of how it pushes which keys now. Equal marks mean the same history and the same call.

The first rank decides. It waits until every other rank has written the same mark, and then writes that mark as its
decision. If another rank has counted more pushes, or has another mark, or writes none within `WAIT_S`, the first rank
makes the call by itself, and its own count of pushes shows that to the others. A rank that has itself pushed in another
thread since it began to wait does the same. Each other rank waits until it sees the decision or that count.

A rank that gives up withdraws its mark. Then it checks, after a memory barrier, whether the first rank is about to
decide, while the first rank checks once more, after a barrier, that all marks are still there. So all ranks come to the
same decision (Dekker's algorithm).

Cost of a decision: two cache lines that move between cores; no message.
"""

from __future__ import annotations

from collections.abc import Callable

from mpikv.common.clock import MACHINE_CLOCK, Clock
from mpikv.common.digests import MASK
from mpikv.engine.backoff import Backoff
from mpikv.hostmemory.counters import Counters
from mpikv.hostmemory.segment import ORDERED, fence

# The words of each rank. WANT: its mark. COUNT: how many pushes it has made, a counter. The first rank's INTENT: the
# mark that it is about to decide on, and GO: the mark that it has decided on. Words from FREE on, in a cache line of
# their own, are for the steps of the calls.
WANT, COUNT, INTENT, GO, FREE = 0, 1, 2, 3, 8
FIRST = 0  # the rank that decides

# How long a rank waits for the others before it makes the call by itself, which needs none of them here. The wait lasts
# so long only for a rank that does not make the call at all, and then the call ends in an error. For a rank that is
# late, because it has written a checkpoint or shares its core, waiting is cheaper: a call by itself copies every value,
# into memory that is then kept.
WAIT_S = 2.0


class CommonCalls:
    """One rank's side. counters: a table of at least FREE words.

    step: called between the tests of a longer wait: it moves other transfers on, and returns whether any moved. clock:
    measures that wait. wait_s: its limit. waited: is told how long each longer wait was, in seconds. failed: whether
    no call can be made in common any more, because a rank has died, say.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        step: Callable[[], bool],
        clock: Clock = MACHINE_CLOCK,
        wait_s: float = WAIT_S,
        waited: Callable[[float], None] = lambda _seconds: None,
        failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._words = counters.rank, counters.words
        self._polling, self._polls = counters.polling, counters.polling.polls
        self._me, self._first = counters.rows[counters.rank], counters.rows[FIRST]
        self._peers = [counters.rows[peer] for peer in counters.others]
        self._step = step
        self._clock = clock
        self._wait_s, self._waited, self._failed = wait_s, waited, failed
        self._history = 0
        self._count = 0
        self._begun_at = 0

    # --- what this rank has pushed

    def pushed(self, hash_: int, n_keys: int) -> None:
        """Count pushes that were not made in common. hash_: the sum of the keys' digests."""
        self._history = (self._history + hash_) & MASK
        self._count += n_keys
        if not ORDERED:
            fence()
        self._words[self._me + COUNT] = self._count

    # --- the decision

    def begin(self, call: int) -> bool:
        """Return whether all ranks make this call in common now. If so, `end` must be called after it; else `pushed`.

        call: a digest of the call: its keys in order and how it is made. Blocks until the ranks have decided.
        """
        self._begun_at = self._count
        mark = (self._history + call) & MASK or 1
        if not ORDERED:
            fence()
        self._words[self._me + WANT] = mark
        in_common = self._lead(mark) if self._rank == FIRST else self._follow(mark)
        if not ORDERED:
            fence()
        if not in_common:
            self._words[self._me + WANT] = 0
        return in_common

    def end(self, hash_: int, n_keys: int) -> None:
        """Count the pushes of a call that was made in common and is over."""
        self._words[self._me + WANT] = 0
        self.pushed(hash_, n_keys)

    def _lead(self, mark: int) -> bool:
        words, me = self._words, self._me
        while True:
            for peer in self._peers:
                index = peer + WANT
                for _ in self._polls:
                    if words[index] == mark:
                        break
                else:
                    if not self._await(lambda: self._leading(peer, mark)):  # noqa: B023 - called at once
                        return False
            words[me + INTENT] = mark
            fence()
            for peer in self._peers:
                if words[peer + WANT] != mark:
                    break
            else:
                words[me + GO] = mark
                return True
            words[me + INTENT] = 0

    def _leading(self, peer: int, mark: int) -> bool | None:
        """Return whether another rank has the same mark; None: it has not written one yet."""
        # Its count is read first, because it withdraws its mark before it counts.
        passed = self._words[peer + COUNT]
        want = self._words[peer + WANT]
        if want == mark:
            return True
        # More pushes than ours: it has pushed these keys by itself. As many, and another mark: it is in another call.
        return False if passed > self._count or (passed == self._count and want != 0) else None

    def _follow(self, mark: int) -> bool:
        words, intent, go = self._words, self._first + INTENT, self._first + GO
        for _ in self._polls:
            if words[go] == mark:
                return True
        if self._await(lambda: self._following(mark)):
            return True
        words[self._me + WANT] = 0
        fence()
        while words[intent] == mark and words[go] != mark and not self._failed():
            self._polling.yield_()  # the first rank is between its two checks: some instructions, unless it has died
            self._step()
        return words[go] == mark

    def _following(self, mark: int) -> bool | None:
        """Return what the first rank has decided; None: nothing yet. It counts its pushes after its decision."""
        passed = self._words[self._first + COUNT]
        if self._words[self._first + GO] == mark:
            return True
        return False if passed > self._count else None

    def _await(self, decided: Callable[[], bool | None]) -> bool:
        """Yield, then move other transfers on and sleep. False where no decision was made in time."""
        found: bool | None = None

        def known() -> bool:
            nonlocal found
            # Where another thread has pushed meanwhile, no other rank can write this mark any more.
            found = decided() if self._count == self._begun_at and not self._failed() else False
            return found is not None

        if not self._polling.yielded(known):
            begun_s = self._clock.now_s()
            deadline_s = begun_s + self._wait_s
            backoff = Backoff(clock=self._clock)
            while not known() and self._clock.now_s() < deadline_s:
                if self._step():
                    backoff.reset()
                else:
                    backoff.pause()
            self._waited(self._clock.now_s() - begun_s)
        return bool(found)
