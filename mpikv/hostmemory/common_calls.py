"""Whether all ranks of a host are in the same blocking call, so that they can make it in common.

Ranks that make the same blocking call can make it in common, in memory that they all see. But a rank may be in another
call that pushes the same keys, with other keys beside them or without waiting, and then nobody may wait for it here. So
each call of a rank has a *mark*: a hash of the keys that it has pushed so far, of how often it has pushed each (in any
order), and of how it pushes which keys now. Equal marks mean the same history and the same call.

The first rank decides. It waits until every other rank has written the same mark, and then writes it as its decision.
Or it sees that another rank has counted more pushes, or has another mark, or does not come for a while; then it makes
the call by itself, and its own count of pushes shows that. So does a rank that has itself pushed in another thread
since it began to wait. A rank that waits for the first one sees either of the two. A rank that withdraws its mark
looks, after a memory barrier, whether the first one is just deciding, and the first one looks once more, after a
barrier, whether all marks are still there: so all decide alike (Dekker's algorithm).

Cost of a decision: two cache lines that move between cores; no message.
"""

from __future__ import annotations

from collections.abc import Callable

from mpikv.common.clock import MACHINE_CLOCK, Clock
from mpikv.common.digests import MASK
from mpikv.engine.backoff import Backoff
from mpikv.hostmemory.counters import Counters
from mpikv.hostmemory.segment import ORDERED, fence

# Of each rank's words; COUNT is a counter. Those from FREE on, in a cache line of their own, are for the calls' steps.
WANT, COUNT, INTENT, GO, FREE = 0, 1, 2, 3, 8
FIRST = 0  # the rank that decides

# How long a rank waits for the others before it makes the call by itself, which needs none of them here. Only a rank
# that does not come at all makes it last so long, and then the call ends in an error. One that comes late, since it has
# written a checkpoint or has to share its core, is worth the wait: a call by itself copies every value, into memory
# that is then kept.
WAIT_S = 2.0


class CommonCalls:
    """One rank's side. counters: a table of at least FREE words.

    step: what to do between looks once it takes long (the progress engine's step). clock: what that is measured by.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        step: Callable[[], bool],
        clock: Clock = MACHINE_CLOCK,
        wait_s: float = WAIT_S,
    ) -> None:
        self._rank, self._words = counters.rank, counters.words
        self._polling, self._polls = counters.polling, counters.polling.polls
        self._me, self._first = counters.rows[counters.rank], counters.rows[FIRST]
        self._peers = [counters.rows[peer] for peer in counters.others]
        self._step = step
        self._clock = clock
        self._wait_s = wait_s
        self._history = 0
        self._count = 0
        self._begun_at = 0

    # --- what this rank has pushed

    def pushed(self, hash_: int, n_keys: int) -> None:
        """Note pushes that were not made in common. hash_: the sum of the keys' digests."""
        self._history = (self._history + hash_) & MASK
        self._count += n_keys
        if not ORDERED:
            fence()
        self._words[self._me + COUNT] = self._count

    # --- the decision

    def begin(self, call: int) -> bool:
        """Whether all ranks make this call in common now. If so, `end` ends it; if not, push in another way.

        call: a digest of the call: its keys in order and how it is made. Blocks until that is decided.
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
        """The call is over: note its pushes."""
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
        """Whether another rank has the same mark; None: it has not come yet."""
        # Its count first: it takes its mark back before it counts.
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
        while words[intent] == mark and words[go] != mark:
            self._polling.yield_()  # the first rank is between its two looks: some instructions
        return words[go] == mark

    def _following(self, mark: int) -> bool | None:
        """What the first rank has decided. It writes its decision first, and counts the pushes afterwards."""
        passed = self._words[self._first + COUNT]
        if self._words[self._first + GO] == mark:
            return True
        return False if passed > self._count else None

    def _await(self, decided: Callable[[], bool | None]) -> bool:
        """Wait for a decision that takes longer: yield, then move other transfers on and sleep. False: none came."""
        found: bool | None = None

        def known() -> bool:
            nonlocal found
            found = decided() if self._count == self._begun_at else False  # nobody can want this mark any more
            return found is not None

        if not self._polling.yielded(known):
            deadline_s = self._clock.now_s() + self._wait_s
            backoff = Backoff(clock=self._clock)
            while not known() and self._clock.now_s() < deadline_s:
                if self._step():
                    backoff.reset()
                else:
                    backoff.pause()
        return bool(found)
