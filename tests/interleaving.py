"""Ranks as threads of which one runs at any moment, and words of shared memory that each sees as its processor does.

Interleavings are tried out one word access at a time: a random generator chooses, at every access, who goes on. Stores
wait in a buffer of their rank until they are flushed, as on real processors, so that a missing barrier shows.
"""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest

from mpikv.hostmemory import common_calls, counters

STEPS = 50_000  # far more than any schedule takes that ends


class Interleaving:
    """Runs one body per rank, one word access at a time. n_words: of all ranks together, zeros at the start."""

    def __init__(self, size: int, n_words: int, seed: int) -> None:
        self.size = size
        self.memory = [0] * n_words
        self.buffers: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self._random = random.Random(seed)
        # Long runs of one rank find other mistakes than quick changes.
        self._stay = self._random.choice([0.0, 0.5, 0.9, 0.99])
        self._flush = self._random.choice([0.05, 0.3, 1.0])
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._alive = list(range(size))
        self._steps = 0
        self._over = threading.Event()
        self.errors: list[BaseException] = []
        self.current = 0

    def host_memory(self, rank: int) -> SimpleNamespace:
        """As one rank sees it: words only."""
        return SimpleNamespace(rank=rank, size=self.size, words=lambda offset, count: Words(self, rank))

    def flushing(self, patch: pytest.MonkeyPatch) -> None:
        for module in (counters, common_calls):
            patch.setattr(module, "fence", lambda: self.flush(self.current))

    def flush(self, rank: int, count: int | None = None) -> None:
        buffer = self.buffers[rank]
        for index, value in buffer[:count]:
            self.memory[index] = value
        del buffer[:count]

    def point(self, rank: int) -> None:
        self._steps += 1
        if self._steps > STEPS or self.errors:
            raise AssertionError(f"no end after {STEPS} steps: the ranks wait for each other")
        for other in range(self.size):
            if self.buffers[other] and self._random.random() < self._flush:
                self.flush(other, 1)
        if self._random.random() >= self._stay:
            self._hand_over(rank)

    def _hand_over(self, rank: int) -> None:
        chosen = self._random.choice(self._alive)
        if chosen != rank:
            self.current = chosen
            self._turns[chosen].release()
            self._turns[rank].acquire()

    def run(self, body) -> list:
        results: list = [None] * self.size

        def thread(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = body(rank)
            except BaseException as error:
                self.errors.append(error)
            self.flush(rank)
            self._alive.remove(rank)
            if self._alive:
                self.current = self._random.choice(self._alive)
                self._turns[self.current].release()
            else:
                self._over.set()

        threads = [threading.Thread(target=thread, args=(rank,), daemon=True) for rank in range(self.size)]
        for one in threads:
            one.start()
        self.current = self._random.randrange(self.size)
        self._turns[self.current].release()
        assert self._over.wait(60)
        if self.errors:
            raise self.errors[0]
        return results


class Words:
    def __init__(self, world: Interleaving, rank: int) -> None:
        self._world, self._rank = world, rank

    def __getitem__(self, index: int) -> int:
        self._world.point(self._rank)
        for stored, value in reversed(self._world.buffers[self._rank]):
            if stored == index:
                return value
        return self._world.memory[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._world.point(self._rank)
        self._world.buffers[self._rank].append((index, value))
