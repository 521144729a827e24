"""What starting and ending costs in messages: but for a word to each owner at the end, no more than the workers do.

Thread ranks make a store, initialise keys and close; every rank's messages and bytes are counted. The agreement of W
workers goes through worker 0: a proposal from each other worker for all keys of a call, and the verdicts on them back.
The first values travel down a binomial tree (W-1 messages for each key), or from worker 0 to the owners.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from mpikv.config import Config
from mpikv.kvstore import KVStore
from mpikv.placement.cut import SHORT_BYTES
from mpikv.session.waits import FIRST_S, Departures, Fewest
from mpikv.testing.stores import spawn_stores

KEYS = 3
LONG = SHORT_BYTES["ring"] // 4  # elements of a key that goes round the ring
SIZES = (4, 8, 16, 32, pytest.param(64, marks=pytest.mark.full))
CONFIG = Config(timeout_s=60, shared_memory="off", progress="calls", bigarray_bound_elems=100, server_placement="last")


def counted(workers: int, servers: int = 0, n_elems: int = 10) -> Any:
    """Messages of every worker after `init`, and those of `close`: (2, workers)."""
    all_have_counted = threading.Barrier(workers)  # whoever leaves before makes worker 0 tell the others

    def body(store: KVStore) -> tuple[KVStore, int]:
        assert sent(store) == 0
        store.init([f"key {i}" for i in range(KEYS)], [np.ones(n_elems, np.float32)] * KEYS)
        after = sent(store)
        all_have_counted.wait(CONFIG.timeout_s)
        return store, after

    found = spawn_stores("dist_sync", workers, body, num_servers=servers, config=CONFIG)
    return np.array([[after, sent(store) - after] for store, after in found]).T


def sent(store: KVStore) -> int:
    return store.stats()["messages_sent"]


@pytest.mark.parametrize("workers", SIZES)
def test_ring(workers: int) -> None:
    initialised, closing = counted(workers, n_elems=LONG)
    proposals, verdicts, values = workers - 1, workers - 1, (workers - 1) * KEYS
    assert initialised.sum() == proposals + verdicts + values
    # Worker 0's share: all verdicts, and the first values to the top of the tree.
    assert initialised[0] == verdicts + KEYS * (workers - 1).bit_length()
    assert initialised[1:].max() <= 1 + KEYS * (workers - 1).bit_length()
    # Each worker agrees to close, which tells worker 0 that it has left. Nobody has to be told, since all leave. Where
    # the machine is so slow that some leave long after others, those are told: once, and not by everybody.
    assert 2 * (workers - 1) <= closing.sum() <= 3 * (workers - 1)


@pytest.mark.parametrize("workers", SIZES)
def test_owners_in_workers(workers: int) -> None:
    """A short key has one owner, the first key worker 0. At the end each worker tells all others that it is done."""
    initialised, closing = counted(workers)
    assert initialised.tolist() == [workers - 1 + KEYS - 1] + [1] * (workers - 1)
    assert 2 * (workers - 1) <= closing.sum() - workers * (workers - 1) <= 3 * (workers - 1)


@pytest.mark.parametrize("workers", SIZES)
def test_servers(workers: int) -> None:
    """As many servers as workers; every key is cut over all of them."""
    initialised, _ = counted(workers, workers, n_elems=100 * workers)
    assert initialised.tolist() == [workers - 1 + workers * KEYS] + [1] * (workers - 1)


# --- who has left


FEWEST = [Fewest(0, 4, 0), Fewest(1, 5, 2), Fewest(7, 1, 0)]


@pytest.mark.parametrize(
    ("workers", "events"),
    [  # who leaves when, after how many pushes of which keys; and who is told what at which time
        (100, [*itertools.chain(*([(w, {0: 5}, 1e-4 * w), (1e-4 * w, [])] for w in range(100))), (1.0, [])]),
        (
            4,
            [
                *((2, {0: 5, 1: 5}, 1.0), (0, {0: 4, 1: 6, 7: 1}, 1.01), (1.0 + 0.9 * FIRST_S, [])),
                *((1.0 + 1.1 * FIRST_S, [(1, FEWEST), (3, FEWEST)]), (2.0, [])),
            ],
        ),
        (  # nobody is told twice what has not changed
            5,
            [
                *((2, {0: 5}, 1.0), (2.0, [(worker, [Fewest(0, 5, 2)]) for worker in (1, 3, 4)])),
                *((3, {0: 5}, 3.0), (1, {0: 6}, 3.0), (9.0, []), (0, {0: 2}, 10.0), (12.0, [(4, [Fewest(0, 2, 0)])])),
            ],
        ),
        (3, [(1, {3: 2}, 0.0), (0, {}, 0.0), (1.0, [(2, [Fewest(3, 0, 0)])])]),  # a key that worker 0 never had
    ],
    ids=["all at once", "the fewest pushes", "once", "never pushed"],
)
def test_who_works_on_is_told_who_has_left(workers: int, events: list[Any]) -> None:
    departures = Departures(workers)
    for event in events:
        if len(event) == 3:
            departures.add(event[0], event[1], now_s=event[2])
        else:
            assert departures.due(event[0]) == event[1]
