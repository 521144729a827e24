"""Counters of a host's ranks in shared memory: whether all are in the same call, and how far each has come in it.

Ranks that make the same blocking call can do it together, in memory that they all see. But a rank may well be in
another call that pushes the same keys, with another grouping or without waiting, and then nobody may wait for it here.
So each call of a rank has a *mark*: a hash of which keys it has pushed so far, how often each (in any order), and which
it pushes now, how. Equal marks mean: the same history, the same call.

The first rank decides. It waits until every other rank wants its mark, and says go; or it sees that one of them has
gone past, or wants something else, or does not come for a while, and goes its own way, which its count of pushes
shows. Who waits for the first rank sees one or the other. A rank that withdraws looks, after a memory barrier, whether
the first one is just deciding, and the first looks once more, after a barrier, whether all still want it: so
all decide alike (Dekker's algorithm).

A decision costs two cache lines that travel; no message is sent.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable

from mpikv.engine.backoff import Backoff
from mpikv.hostmemory.segment import ALIGN_BYTES, ORDERED, WORD_BYTES, HostMemory, fence

MASK = (1 << 64) - 1

# Words of each rank: two cache lines, of counters and of steps inside a call.
WANT, COUNT, INTENT, GO = 0, 1, 2, 3
FILLED, SUMMED = 8, 9
WORDS_PER_RANK = 2 * ALIGN_BYTES // WORD_BYTES

# A rank on a core of its own answers within some microseconds; then it was late, and its core may be ours.
POLLS = 1500  # of 40 ns
YIELDS = 60
CROWDED_POLLS = 3  # more ranks than cores: whoever we wait for needs our core
CROWDED_YIELDS = 1500  # a millisecond: whoever naps while others add 4 MiB comes late to the next step
# How long a rank waits for the others before it goes its own way, for which nobody waits. Only ranks that are in
# different calls need this to end, so it may be long; but each such call costs it.
PATIENCE_S = 0.25


def digest(*parts: object) -> int:
    """64 bits that differ for different parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class CallCounters:
    """One rank's side.

    step: what to do between polls once it takes long (the progress engine's step). yield_: gives up the core.
    """

    def __init__(
        self,
        memory: HostMemory,
        *,
        step: Callable[[], bool],
        crowded: bool,
        yield_: Callable[[], None] = os.sched_yield,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.words = memory.words(0, memory.size * WORDS_PER_RANK)
        self.rank = memory.rank
        self.size = memory.size
        self._me = memory.rank * WORDS_PER_RANK
        self._peers = [rank * WORDS_PER_RANK for rank in range(memory.size) if rank != memory.rank]
        self._step = step
        self._yield = yield_
        self._patience_s = patience_s
        self._polls = range(CROWDED_POLLS if crowded else POLLS)
        self._yields = range(CROWDED_YIELDS if crowded else YIELDS)
        self._history = 0
        self._count = 0

    # --- what this rank has pushed

    def pushed(self, hash_: int, n_keys: int) -> None:
        """Note pushes that were not made in a counters. hash_: the sum of the keys' digests."""
        self._history = (self._history + hash_) & MASK
        self._count += n_keys
        self.words[self._me + COUNT] = self._count

    # --- the decision

    def together(self, call: int) -> bool:
        """Whether all ranks make this call together now. If so, `end` ends it; if not, push otherwise.

        call: a digest of the call: its keys in order and how it is made. Blocks until that is decided.
        """
        words = self.words
        mark = (self._history + call) & MASK or 1
        if not ORDERED:
            fence()
        words[self._me + WANT] = mark
        together = self._lead(mark) if self.rank == 0 else self._follow(mark)
        if not ORDERED:
            fence()
        if not together:
            words[self._me + WANT] = 0
        return together

    def end(self, hash_: int, n_keys: int) -> None:
        """The call is over: note its pushes."""
        self.words[self._me + WANT] = 0
        self.pushed(hash_, n_keys)

    def _lead(self, mark: int) -> bool:
        words, me = self.words, self._me
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
        """Whether another rank wants the same; None: it has not come yet."""
        # Its count first: it takes back what it wanted before it counts.
        passed = self.words[peer + COUNT]
        want = self.words[peer + WANT]
        if want == mark:
            return True
        # More pushes than ours: it has pushed these keys otherwise. As many, and another call: it does not do what we
        # do.
        return False if passed > self._count or (passed == self._count and want != 0) else None

    def _follow(self, mark: int) -> bool:
        words = self.words
        for _ in self._polls:
            if words[GO] == mark:
                return True
        if self._await(lambda: self._following(mark)):
            return True
        words[self._me + WANT] = 0
        fence()
        while words[INTENT] == mark and words[GO] != mark:
            self._yield()  # the first rank is between its two looks: some instructions
        return words[GO] == mark

    def _following(self, mark: int) -> bool | None:
        """What the first rank has decided. It says go first, and counts the pushes afterwards."""
        passed = self.words[COUNT]
        if self.words[GO] == mark:
            return True
        return False if passed > self._count else None

    def _await(self, decided: Callable[[], bool | None]) -> bool:
        """A decision that takes longer: yield, then move other transfers on and sleep; False if it takes too long."""
        for _ in self._yields:
            self._yield()
            if (result := decided()) is not None:
                return result
        deadline = time.monotonic() + self._patience_s
        backoff = Backoff()
        while (result := decided()) is None and time.monotonic() < deadline:
            if self._step():
                backoff.reset()
            else:
                backoff.pause()
        return bool(result)

    # --- steps inside a call

    def reach(self, word: int, value: int) -> None:
        """Say that this rank has come to step `value`."""
        if not ORDERED:
            fence()
        self.words[self._me + word] = value

    def wait_all(self, word: int, value: int, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Until every rank has come to step `value`. wait: waits for a test that takes long, with a limit."""
        words = self.words
        for peer in self._peers:
            index = peer + word
            if words[index] >= value:
                continue
            for _ in self._polls:
                if words[index] >= value:
                    break
            else:
                for _ in self._yields:
                    self._yield()
                    if words[index] >= value:
                        break
                else:
                    wait(lambda: words[index] >= value)  # noqa: B023 - is called before the loop goes on
        if not ORDERED:
            fence()


def history_hash(digests: Iterable[int]) -> int:
    """The sum of keys' digests: the same in whatever order they are pushed."""
    return sum(digests) & MASK
