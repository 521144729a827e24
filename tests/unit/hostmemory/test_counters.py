"""Counters in shared memory: what was written before a count is seen after it, and how ranks wait for counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import Interleaving

from mpikv.collectives.host_key import FILLED, GATHERED, HostKey, Place
from mpikv.hostmemory.counters import Counters, row_words
from mpikv.hostmemory.polling import Polling
from mpikv.hostmemory.segment import private_memory
from mpikv.placement.labels import NO_ATTRIBUTES, Comparison, Label

F32 = np.dtype(np.float32)


class Sleeper:
    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def tables(size: int, n_words: int = 4, **how) -> list[Counters]:
    return [Counters(memory, 0, n_words, **how) for memory in private_memory(size)]


@pytest.mark.parametrize("polls", [0, 3])
def test_a_wait_ends_at_once_while_the_core_is_given_away_or_becomes_a_request(polls):
    yields = []
    patience = Polling(range(polls), range(5), lambda: yields.append(len(yields)))
    ranks = tables(3, polling=patience)
    ranks[1].count(2, 9)
    ranks[2].count(2, 4)
    assert ranks[0].awaited(2, 4) is None
    assert yields == []
    request = ranks[0].awaited(2, 5)
    assert request is not None
    assert len(yields) == 5
    assert not request.test()
    assert not request.wakes(Sleeper()), "nobody would wake it"
    ranks[2].count(2, 5)
    assert request.test()
    assert ranks[0].awaited(2, 5) is None
    late = Polling(range(polls), range(5), lambda: ranks[2].count(2, 6))
    assert Counters(private_memory(1)[0], 0, 4, polling=late).awaited(2, 6) is None, "nobody else"
    ranks[0].polling = late
    assert ranks[0].awaited(2, 6) is None
    yields.clear()
    assert ranks[1].awaited(2, 7, soon=False) is not None
    assert yields == []


# --- what ranks know of the labels of a round, with a key's counters, on interleaved words


ALIKE, MESSAGE, OTHER = range(3)  # its label is everybody's; a message says that labels differ; its label is another


def key_on(world: Interleaving, rank: int) -> HostKey:
    memory = world.host_memory(rank)
    memory.array = lambda begin, n, dtype: np.zeros(n, dtype)
    memory.offset_of = lambda array: 0
    return HostKey(memory, Place(0, 0), 1, (F32, F32), 1, allocate=lambda n_bytes: np.zeros(n_bytes, np.uint8))


def rounds(world: Interleaving, found: list[list[int]], known: list[list[int]]) -> None:
    """found: what a rank has or learns, by round and rank. known: whether labels differ, at the end, likewise."""

    def body(rank: int) -> None:
        key, comparison = key_on(world, rank), Comparison(NO_ATTRIBUTES)
        others = [other for other in range(world.size) if other != rank]
        for number, one in enumerate(found):
            comparison.begin(Label(f"of {rank}") if one[rank] == OTHER else NO_ATTRIBUTES)
            key.begin(np.zeros(1, F32), np.zeros(1, F32), comparison)
            comparison.differ |= one[rank] == MESSAGE
            key.count(FILLED, 1)
            for word in (FILLED, GATHERED):  # values are there; every part is complete
                if word == GATHERED:
                    key.count(GATHERED, 1)
                waiting = key.awaited(others, word, 1)
                while not waiting.test():
                    world.point(rank)
            known[number][rank] = comparison.differ

    world.run(body)


FOUND = st.sampled_from([ALIKE, ALIKE, ALIKE, MESSAGE, OTHER])


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 2**32), size=st.integers(2, 4), n_rounds=st.integers(1, 5))
def test_all_know_what_one_rank_has_found_in_this_round_and_nothing_of_another(data, seed, size, n_rounds):
    found = [[data.draw(FOUND) for _ in range(size)] for _ in range(n_rounds)]
    known = [[-1] * size for _ in found]
    world = Interleaving(size, size * row_words(FILLED + 1), seed)
    with pytest.MonkeyPatch.context() as patch:
        world.flushing(patch)
        rounds(world, found, known)
    assert known == [[any(one)] * size for one in found]
