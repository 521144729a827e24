"""Labels that travel with the messages: what every rank knows after a round, and what the round has sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from test_hosted import host_key, memories_of

from mpikv.collectives import hosted, ring
from mpikv.collectives.labelled import TRAILER_BYTES, AllgatherGroup, ReduceScatterGroup
from mpikv.placement.keys import even_bounds, whole_bounds
from mpikv.placement.labels import Comparison, Label
from mpikv.placement.place import host_bounds
from mpikv.placement.topology import topology
from mpikv.testing.ranks import run_collective

F32 = np.dtype(np.float32)
FIRST = Label("{}")
LONG_ROUNDS = 10  # of long chunks: up to one in which worker 0 alone has another rate or op, and all but it
Round = tuple[Label, ...]


def rounds_of(p: int) -> list[Round]:
    """All alike; then one worker, or all but one, with another rate or op, all different, and alike again."""
    found: list[Round] = [(FIRST,) * p, (FIRST,) * p, (Label('{"lr": 2}'),) * p, (Label('{"lr": 2}'),) * p]
    for odd in range(p):
        for other in (FIRST._replace(text='{"lr": 3}'), FIRST._replace(op="max")):
            found.append(tuple(other if rank == odd else FIRST for rank in range(p)))
            found.append(tuple(FIRST if rank == odd else other for rank in range(p)))
    different = tuple(Label(f'{{"lr": {rank}}}') for rank in range(p))
    return [*found, different, different, (FIRST,) * p, (FIRST,) * p]


def values(rank: int, n: int, round_: int) -> np.ndarray:
    return ((np.arange(n) + rank + round_) % 3).astype(np.float32)


def run(hosts: str, n: int, bounds: Sequence[int], halves, rounds: Sequence[Round]) -> list[list[tuple]]:
    """Of each rank and round: whether it knows that labels differ, its chunk, the messages and bytes it has sent.

    halves(group, comparison): the reduce-scatter, which returns the sums, and the allgather of one round.
    """
    owners = frozenset(rank for rank in range(len(hosts)) if bounds[rank] < bounds[rank + 1])

    def steps(group):
        comparison = Comparison(FIRST)
        adding = ReduceScatterGroup(group.transport, group.ranks, comparison)
        sharing = AllgatherGroup(group.transport, group.ranks, comparison, owners)
        reduce_scatter, allgather = halves(group)
        found = []
        for i, labels in enumerate(rounds):
            ledger = group.transport.ledger
            before = ledger.messages, ledger.bytes
            comparison.begin(labels[group.rank])
            totals = yield from reduce_scatter(adding, values(group.rank, n, i), comparison)
            known = comparison.differ
            result = np.zeros(n, np.float32)
            own = slice(bounds[group.rank], bounds[group.rank + 1])
            result[own] = 7
            result = yield from allgather(sharing, result)
            assert (result == 7).all()
            if group.rank in owners:
                assert comparison.differ == known  # an owner knows before it updates
            sent = ledger.messages - before[0], ledger.bytes - before[1]
            found.append((comparison.differ, totals[own].tolist(), *sent))
        return found

    return run_collective(len(hosts), steps, hosts=list(hosts))


def by_messages(module, bounds):
    def halves(_group):
        def reduce_scatter(group, buf, _comparison):
            yield from module.reduce_scatter(group, buf, bounds, 100)
            return buf

        def allgather(group, result):
            yield from module.allgather(group, result, bounds, 101)
            return result

        return reduce_scatter, allgather

    return halves


def through_memory(hosts: str, n: int, bounds):
    memories = memories_of(hosts)

    def halves(group):
        key = host_key(memories[group.rank], 1 << 12, n, F32, rings=topology(hosts).n_leaders, most=len(hosts))

        def reduce_scatter(adding, buf, comparison):
            return (
                yield from hosted.reduce_scatter(adding, buf, bounds, 100, key, changeable=False, comparison=comparison)
            )

        def allgather(sharing, result):
            own = slice(bounds[group.rank], bounds[group.rank + 1])
            key.value[own] = result[own]
            yield from hosted.allgather(sharing, bounds, 101, key)
            return key.value.copy()

        return reduce_scatter, allgather

    return halves


def check(hosts: str, n: int, bounds: Sequence[int], halves, n_rounds: int | None = None) -> None:
    p = len(hosts)
    rounds = rounds_of(p)[:n_rounds]
    results = run(hosts, n, bounds, halves, rounds)
    for i, labels in enumerate(rounds):
        total = sum(values(rank, n, i) for rank in range(p))
        for rank, found in enumerate(results):
            differ, chunk, messages, n_bytes = found[i]
            assert differ == (len(set(labels)) > 1), (i, rank, labels)
            assert chunk == total[bounds[rank] : bounds[rank + 1]].tolist(), (i, rank)
            assert messages == found[0][2], (i, rank)
            # Where all are as they were, also the bytes; where all change alike, a note to each receiver of values.
            if i in {1, 3} or labels == rounds[i - 1] == (FIRST,) * p:
                assert n_bytes == found[0][3], (i, rank)
            elif i == 2:
                trailers, rest = divmod(n_bytes - found[0][3], TRAILER_BYTES)
                assert rest == 0
                assert trailers <= min(messages, p - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_all_ranks_know_in_the_same_round(p: int) -> None:
    """Also ranks that own nothing: fewer elements than ranks, one owner of everything."""
    for n, bounds in ((1, even_bounds(1, p)), (41, even_bounds(41, p)), (5, whole_bounds(5, p, p - 1))):
        check("a" * p, n, bounds, by_messages(ring, bounds))


def test_long_chunks() -> None:
    bounds = even_bounds(100_003, 3)
    check("abc", 100_003, bounds, by_messages(ring, bounds), LONG_ROUNDS)


@pytest.mark.parametrize("hosts", ["aab", "aabb", "aaabbc"])
def test_several_hosts(hosts: str) -> None:
    for n, n_rounds in ((1, None), (41, None), (100_003, LONG_ROUNDS)):
        bounds = host_bounds(n, hosts) if n != 41 else whole_bounds(n, len(hosts), len(hosts) - 1)
        check(hosts, n, bounds, through_memory(hosts, n, bounds), n_rounds)
