"""SplitSampler.for_store where workers die, over thread ranks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from mpikv.config import Config
from mpikv.data import DataLoader, SplitSampler
from mpikv.testing.continued import spawn_continued
from mpikv.transports.faulty import Deaths


def run(body: Any) -> list[list[int]]:
    """What the two workers that are left return; worker 1 dies where it calls `die`."""
    deaths = Deaths()

    def of_worker(store: Any) -> Any:
        def die() -> None:
            if store.session.number == 1:
                deaths.die_in(1, calls=1)
            store.barrier()

        return body(store, die)

    first, dead, last = spawn_continued("dist_sync", 3, of_worker, config=Config(timeout_s=20), deaths=deaths)
    assert dead is None
    return [first, last]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_death_between_two_iterations(shuffle: bool) -> None:
    """The next one has everything, be it of the same epoch, as an evaluation's, or of one that was chosen already."""

    def body(store: Any, die: Any) -> tuple[list[int], list[int]]:
        evaluation = SplitSampler.for_store(12, store, shuffle=False)
        training = SplitSampler.for_store(12, store, shuffle=shuffle)
        assert len(list(evaluation)) == len(list(training)) == 4
        training.set_epoch(1)
        die()
        assert (training.epoch, training.start) == (1, 0)
        return list(evaluation), list(training)

    found = run(body)
    for i in range(2):
        assert sorted(found[0][i] + found[1][i]) == list(range(12))  # type: ignore[operator]


def test_a_worker_that_is_an_iteration_behind() -> None:
    """It draws its old part of the next one as far as the others have drawn theirs."""
    lock, seen = threading.Lock(), Counter[int]()

    def body(store: Any, die: Any) -> int:
        sampler = SplitSampler.for_store(24, store, seed=5)
        list(sampler)
        sampler.set_epoch(1)
        drawing, n = iter(sampler), 2 * (store.rank != 2)
        mine = [next(drawing) for _ in range(n)]
        die()
        mine += list(drawing) if n else list(sampler)
        with lock:
            seen.update(mine)
        return len(mine)

    assert run(body) == [11, 11]
    assert set(seen.values()) == {1}, "none twice"
    assert len(seen) == 22, "all but the two that the dead has had"


def place(loader: DataLoader, sampler: SplitSampler) -> int:
    """How many examples of the epoch all workers have had, or passed over, when a loop has come so far."""
    state = loader.state()
    return int(state["start"] + state["batches"] * loader.batch_size * sampler.num_parts)


def test_loops_that_have_had_equally_many_batches_are_in_the_same_place() -> None:
    """Also where one has seen the death a batch before the other; and the next epoch begins at its beginning."""

    def body(store: Any, die: Any) -> list[int]:
        sampler = SplitSampler.for_store(26, store, seed=5, last="drop")
        loader = DataLoader(np.arange(26), 2, sampler=sampler, prefetch=0)
        places, batches = list[int](), iter(loader)
        for _ in range(2 - (store.rank == 2)):
            next(batches)
            places.append(place(loader, sampler))
        die()
        places += [place(loader, sampler) for _ in batches]
        loader.set_epoch(1)
        return [*places, place(loader, sampler)]

    assert run(body) == [[6, 12, 16, 20, 24, 26, 0]] * 2


@pytest.mark.parametrize("again", [False, True])
def test_a_spare_takes_a_place(again: bool) -> None:
    """It draws nothing that the worker has drawn whose place it takes; also where another one dies meanwhile."""
    deaths, lock, seen = Deaths(), threading.Lock(), Counter[int]()

    def body(store: Any) -> tuple[int, int]:
        session, sampler = store.session, SplitSampler.for_store(40, store, seed=5)
        is_spare, loader = session.alone, DataLoader(np.arange(40), 1, sampler=sampler, prefetch=0)

        def give() -> bytes:
            if again:
                deaths.die_in(3, calls=1)
            return b""

        store.init("w", np.zeros(1))
        if is_spare:
            session.take_place(give, lambda _: None)
            loader.set_epoch(0, start=8)
        for n, (example,) in enumerate(loader):
            with lock:
                seen[int(example)] += 1
            if n == 2 and session.number == 1 and not is_spare:
                deaths.die_in(1, calls=1)
                store.barrier()
            store.pushpull("w", np.ones(1))
            while len(session.coming) > store.num_workers and not session.has_news():
                if any(seat.ready for seat in session.now.seats):
                    break
                time.sleep(0.001)
            session.between_steps(give, lambda _: None)
        return int(store.num_workers), place(loader, sampler)

    found = spawn_continued("dist_sync", 5, body, config=Config(spares=1, timeout_s=20), deaths=deaths)
    end = (3, 39) if again else (4, 40)
    assert found == [end, None, end, None if again else end, end]
    assert set(seen.values()) == {1}
