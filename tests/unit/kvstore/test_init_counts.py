"""What starting and ending costs in messages: nothing may grow with the square of the workers.

Thread ranks make a store, initialise keys and close; every rank's messages and bytes are counted. The agreement of W
workers goes through worker 0: a proposal from each other worker for all keys of a call, and the verdicts on them back.
The first values travel down a binomial tree (W-1 messages for each key), or from worker 0 to the servers.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import pytest

from mpikv.config import Config
from mpikv.kvstore import KVStore
from mpikv.session.leaving import FIRST_S, LAST_S, Departures, Fewest
from mpikv.testing.stores import spawn_stores

KEYS = 3
SIZES = (4, 8, 16, 32, pytest.param(64, marks=pytest.mark.full))
CONFIG = Config(timeout_s=60, shared_memory="off", progress="calls", bigarray_bound_elems=100, server_placement="last")


class Counts(NamedTuple):
    """Of one worker, in all: after `create`, `init` and `close`."""

    created: tuple[int, int]
    initialised: tuple[int, int]
    closed: tuple[int, int]


def counted(name: str, workers: int, servers: int = 0, n_elems: int = 10) -> list[Counts]:
    """Messages and bytes of every worker."""

    all_have_counted = threading.Barrier(workers)  # whoever leaves before makes worker 0 tell the others

    def body(store: KVStore) -> tuple[KVStore, tuple[int, int], tuple[int, int]]:
        before = sent(store)
        store.init([f"key {i}" for i in range(KEYS)], [np.ones(n_elems, np.float32)] * KEYS)
        after = sent(store)
        all_have_counted.wait(CONFIG.timeout_s)
        return store, before, after

    found = spawn_stores(name, workers, body, num_servers=servers, config=CONFIG)
    return [Counts(before, after, sent(store)) for store, before, after in found]


def sent(store: KVStore) -> tuple[int, int]:
    stats = store.stats()
    return stats["messages_sent"], stats["bytes_sent"]


@pytest.mark.parametrize("workers", SIZES)
def test_allreduce(workers: int) -> None:
    found = counted("dist_sync", workers)
    assert all(one.created == (0, 0) for one in found)
    proposals, verdicts, values = workers - 1, workers - 1, (workers - 1) * KEYS
    assert sum(one.initialised[0] for one in found) == proposals + verdicts + values
    # Worker 0's share: all verdicts, and the first values to the top of the tree.
    assert found[0].initialised[0] == verdicts + KEYS * (workers - 1).bit_length()
    assert max(one.initialised[0] for one in found[1:]) <= 1 + KEYS * (workers - 1).bit_length()


@pytest.mark.parametrize("workers", SIZES)
def test_servers(workers: int) -> None:
    """As many servers as workers; every key is cut over all of them."""
    found = counted("dist_sync", workers, workers, n_elems=100 * workers)
    assert all(one.created == (0, 0) for one in found)
    proposals, verdicts, values = workers - 1, workers - 1, workers * KEYS
    assert sum(one.initialised[0] for one in found) == proposals + verdicts + values
    assert all(one.initialised[0] == 1 for one in found[1:])


def test_bytes_of_agreement_do_not_depend_on_the_number_of_servers() -> None:
    """A verdict says how a key is cut, not where each of its shards lies."""
    found = [counted("dist_sync", 4, servers, n_elems=3200) for servers in (4, 32)]
    values = 3 * 4 * 3200
    few, many = (sum(one.initialised[1] for one in one_store) - values for one_store in found)
    # Worker 0's messages to the servers have a header and a description each; their number is that of the servers.
    descriptions = KEYS * (32 - 4) * 200
    assert many - few < descriptions


@pytest.mark.parametrize("workers", SIZES)
def test_closing(workers: int) -> None:
    """Each worker tells worker 0 that it has left, and agrees to close. Nobody has to be told, since all leave."""
    found = counted("dist_sync", workers)
    ended = sum(one.closed[0] - one.initialised[0] for one in found)
    # Where the machine is so slow that some leave long after others, those are told: once, and not by everybody.
    assert 3 * (workers - 1) <= ended <= 4 * (workers - 1)


# --- who has left


def test_nobody_is_told_where_all_leave_at_once() -> None:
    departures = Departures(100)
    for worker in range(100):
        departures.add(worker, {0: 5}, now_s=10.0 + worker * 1e-4)
        assert departures.due(10.0 + worker * 1e-4) == []
    assert departures.due(11.0) == []


def test_who_works_on_is_told_the_fewest_pushes() -> None:
    departures = Departures(4)
    departures.add(2, {0: 5, 1: 5}, now_s=1.0)
    departures.add(0, {0: 4, 1: 6, 7: 1}, now_s=1.01)
    assert departures.due(1.0 + 0.9 * FIRST_S) == []
    fewest = [Fewest(0, 4, 0), Fewest(1, 5, 2), Fewest(7, 1, 0)]
    assert departures.due(1.0 + 1.1 * FIRST_S) == [(1, fewest), (3, fewest)]
    assert departures.due(2.0) == []


def test_nobody_is_told_twice_what_has_not_changed() -> None:
    departures = Departures(5)
    departures.add(2, {0: 5}, now_s=1.0)
    assert len(departures.due(2.0)) == 3
    departures.add(3, {0: 5}, now_s=3.0)
    departures.add(1, {0: 6}, now_s=3.0)
    assert departures.due(9.0) == []
    departures.add(0, {0: 2}, now_s=10.0)
    assert departures.due(12.0) == [(4, [Fewest(0, 2, 0)])]


def test_a_key_that_a_worker_never_had_was_never_pushed_by_it() -> None:
    departures = Departures(3)
    departures.add(1, {3: 2}, now_s=0.0)
    departures.add(0, {}, now_s=0.0)
    assert departures.due(1.0) == [(2, [Fewest(3, 0, 0)])]


def test_intervals_grow_to_a_limit() -> None:
    departures = Departures(1000)
    now_s, told = 0.0, 0
    for worker in range(1, 600):
        departures.add(worker, {0: 1000 - worker}, now_s)
        now_s += 0.01
        told += bool(departures.due(now_s))
    assert told <= 5 + now_s / LAST_S
    assert departures.due(now_s + LAST_S)  # nobody waits for longer
