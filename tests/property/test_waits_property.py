"""Right programs end, with the right values: whatever order each worker pushes in, and whatever it waits for between.

Stores and process groups on thread ranks, of all kinds: hosts, algorithms, servers, divided keys, progress in calls.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import grids
import pytest
import waiting_programs
from waiting_programs import Program

from mpikv.config import Config
from mpikv.strategies import direct
from mpikv.testing.groups import spawn_groups
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores

LIMIT_S = 20.0  # of a wait; all waits of a program together take a fraction of a second


class Way(NamedTuple):
    """Where the stores of a program run. hosts: of each rank, one letter each; the last ranks are servers.

    several: whether the program has several threads, stores and process groups.
    """

    hosts: str
    servers: int = 0
    config: Mapping[str, Any] = MappingProxyType({})
    several: bool = True


CALLS = {"progress": "calls"}  # then a store moves in its own calls alone: with several one would wait for another's
WAYS = {
    "hosts": Way("abc"),
    "two hosts": Way("ab"),
    "ring": Way("abcd", config={"algorithm": "ring"}),
    "owners": Way("aabb", config={"algorithm": "owners"}),
    "mixed": Way("aabc"),
    "one host": Way("aaa"),
    "messages": Way("aaa", config={"shared_memory": "off"}),
    "calls": Way("abc", config=CALLS, several=False),
    "ring in calls": Way("ab", config={**CALLS, "algorithm": "ring"}, several=False),
    "servers": Way("abcd", 2),
    "servers in calls": Way("aabc", 1, CALLS, several=False),
    "divided": Way("abcd", 1, {"servers_take": "0.4"}),
    "divided, some of a host": Way("aabc", 1, {"servers_take": "0.5"}),
    "divided in calls": Way("aabc", 1, {**CALLS, "servers_take": "auto"}, several=False),
}


def run_program(program: Program, way: Way) -> None:
    """Run it: each worker has a thread for each of the program's. Its stores' own ranks only hold them meanwhile."""
    n_stores = sum(map(len, program.stores))
    config = Config(timeout_s=LIMIT_S, bigarray_bound_elems=1000, server_placement="last", **way.config)
    held: list[list[queue.Queue[Any]]] = [[queue.Queue() for _ in range(n_stores + 1)] for _ in range(program.workers)]
    ended = [threading.Event() for _ in range(program.workers)]
    errors: list[BaseException] = []

    def hold(number: int, worker: int, given: Any) -> None:
        held[worker][number].put(given)
        assert ended[worker].wait(4 * LIMIT_S), "the threads have not ended"
        assert not errors

    def store_ranks(number: int) -> None:
        def body(store: Any) -> None:
            hold(number, store.rank, store)

        spawn_stores("dist_sync", program.workers, body, num_servers=way.servers, config=config, hosts=way.hosts)

    def group_ranks() -> None:
        def body(world: Any, first: Any) -> None:
            others = (world.group(range(world.size), number, LIMIT_S) for number in range(2, len(program.stores) + 1))
            hold(n_stores, world.rank, [first, *others])

        spawn_groups(program.workers, body, hosts=way.hosts[: program.workers], config=config)

    def started(call: Callable[..., None], *arguments: Any) -> threading.Thread:
        def body() -> None:
            try:
                call(*arguments)
            except BaseException as error:
                errors.append(error)
                for one in ended:
                    one.set()

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    def worker(number: int) -> None:
        stores = [held[number][i].get(timeout=LIMIT_S) for i in range(n_stores)]
        groups = held[number][-1].get(timeout=LIMIT_S) if way.several else [None]
        waiting_programs.prepare(program, stores)
        for thread in [
            started(waiting_programs.run, program, number, i, stores, groups[i]) for i in range(len(groups))
        ]:
            thread.join()
        ended[number].set()

    makers = [started(store_ranks, number) for number in range(n_stores)]
    makers += [started(group_ranks)] if way.several else []
    for thread in [*(started(worker, number) for number in range(program.workers)), *makers]:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, RankError)), errors[0])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_right_programs_end_with_the_right_values(way: Way) -> None:
    workers = len(way.hosts) - way.servers
    for seed in range(6 if grids.is_thorough() else 3):
        chance = random.Random(f"{way.hosts} {seed}")
        stores = chance.choice([[1], [2], [1, 1], [2, 1]]) if way.several else [1]
        program = waiting_programs.program(seed, workers, stores, groups=way.several)
        try:
            with mock.patch.object(direct, "WAIT_S", 0.01):  # for workers that do not make the same call
                run_program(program, way)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
