"""Adding in the hosts' memory and round rings between them, on thread ranks: the bits, and the links' bytes; and labels
that travel with the messages: what every rank knows after a round, and what the round has sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.collectives import hosted, one_host, ring
from mpikv.collectives.host_key import GATHERED, HostKey, Place, counters_bytes
from mpikv.collectives.labelled import TRAILER_BYTES, AllgatherGroup, ReduceScatterGroup
from mpikv.collectives.stages import HOST_SEGMENT_BYTES, LINK_WINDOW
from mpikv.engine.operation import wakes
from mpikv.hostmemory.allocator import Allocator
from mpikv.hostmemory.segment import HostMemory, private_memory
from mpikv.placement.keys import even_bounds, whole_bounds
from mpikv.placement.labels import Comparison, Label
from mpikv.placement.links import LINK_SEGMENT_BYTES
from mpikv.placement.place import host_bounds
from mpikv.placement.topology import topology
from mpikv.strategies.host_keys import LOG_ENTRIES, HostKeys
from mpikv.testing.ranks import run_collective
from mpikv.testing.reference import add
from mpikv.transports.threads import Fabric

LAYOUTS = ("aab", "abb", "aba", "aabb", "abab", "aaab", "aabbc", "abcab", "aabbcc", "aaabbc", "aaaabbb", "abbbbbbb")
HOSTS = pytest.mark.parametrize("hosts", LAYOUTS)
SOME = pytest.mark.parametrize("hosts", ["aab", "abab", "aabbc", "aaaabbb"])
ROUNDS = 2
BEGIN = 1 << 12  # of the keys, in memory
F32 = np.dtype(np.float32)


def memories_of(hosts: str) -> list[HostMemory]:
    found: dict[int, HostMemory] = {}
    for ranks in topology(hosts).hosts:
        found |= zip(ranks, private_memory(len(ranks)), strict=True)
    return [found[rank] for rank in range(len(hosts))]


def host_key(memory: HostMemory, n: int, dtype: np.dtype, *, rings: int, most: int) -> HostKey:
    place = Place(BEGIN + counters_bytes(most), BEGIN)
    room = Allocator(memory, memory.n_bytes // 2).take
    return HostKey(memory, place, n, (dtype, sum_dtype(dtype)), rings, allocate=room)


def parts(rank: int, n: int, round_: int, dtype: np.dtype = F32) -> np.ndarray:
    """Values whose sum depends on the order of adding."""
    return values_of(rank, n, round_, dtype).copy()


@functools.lru_cache(maxsize=64)
def values_of(rank: int, n: int, round_: int, dtype: np.dtype) -> np.ndarray:
    random = np.random.default_rng([rank, n, round_])
    return (random.integers(-1000, 1000, n) * (0.37 ** np.arange(5))[random.integers(0, 5, n)]).astype(dtype)


def in_order(hosts: str, n: int, bounds: tuple[int, ...], dtype: np.dtype = F32) -> list[bytes]:
    """The sums in the order that collectives/host_rings fixes; on one host in that of the ranks."""
    found, sums = topology(hosts), []
    for round_ in range(ROUNDS):
        each, total = [values_of(rank, n, round_, dtype) for rank in range(len(hosts))], np.empty(n, dtype)
        for rank, host in enumerate(found.host_of):
            own, leader = slice(bounds[rank], bounds[rank + 1]), found.local_rank[rank] % found.n_leaders
            leader *= len(found.hosts) > 1
            others = [*found.hosts[host + 1 :], *found.hosts[: host + 1]]
            of_hosts = [add([each[one][own] for one in (*ranks[leader:], *ranks[:leader])]) for ranks in others]
            total[own] = add(of_hosts)
        sums.append(total.tobytes())
    return sums


def through_memory(hosts: str, n: int, bounds: tuple[int, ...], *, dtype: np.dtype = F32, lent: str = "private"):
    """lent: where the values are: `private`, in `shared` memory, either `changed` in place, or both in turn `mixed`."""
    fabric, memories = Fabric(len(hosts), hosts), memories_of(hosts)
    found = topology(hosts)
    most = max(len(ranks) for ranks in found.hosts)

    def steps(group):
        me = group.rank
        key = host_key(memories[me], n, dtype, rings=found.n_leaders, most=most)
        behind = 1 << 28
        results = []
        for round_ in range(ROUNDS):
            values = parts(me, n, round_, dtype)
            if lent == "shared" or (lent in {"mixed", "changed"} and (me + round_) % 2):
                own = memories[me].array(behind + memories[me].rank * (n + 64) * 8 // 64 * 64, n, dtype)
                own[...] = values
                values = own
            before = values.copy()
            changeable = lent == "changed"
            own = slice(bounds[me], bounds[me + 1])
            outs = [values] if changeable else [np.full(n, 99, dtype), np.full(n, 98, dtype)]
            if len(found.hosts) == 1:
                totals = yield from one_host.reduce_scatter(me, values, bounds, key)
                key.value[own] = totals[own]
                yield from one_host.allgather(me, bounds, key, outs)
            else:
                totals = yield from hosted.reduce_scatter(group, values, bounds, 100, key, changeable=changeable)
                key.value[own] = totals[own]
                yield from hosted.allgather(group, bounds, 101, key, outs)
            if not changeable:
                assert before.tobytes() == values.tobytes()
            assert all(out.tobytes() == key.value.tobytes() for out in outs)
            results.append(outs[0].tobytes())
        return results

    return run_collective(len(hosts), steps, fabric=fabric), fabric


def crossing(fabric: Fabric, hosts: str) -> dict[tuple[int, int], int]:
    return {pair: n for pair, n in fabric.bytes_between.items() if hosts[pair[0]] != hosts[pair[1]]}


def check(hosts: str, n: int, bounds: tuple[int, ...], **how) -> None:
    found, fabric = through_memory(hosts, n, bounds, **how)
    dtype, links = how.get("dtype", F32), len(set(hosts)) - 1
    assert found == [in_order(hosts, n, bounds, dtype)] * len(hosts)
    assert sum(crossing(fabric, hosts).values()) == ROUNDS * 2 * links * n * dtype.itemsize
    assert sum(crossing(fabric, hosts).values()) == fabric.sent_bytes, "a message within a host"


@HOSTS
@pytest.mark.parametrize("n", [0, 1, 7, 1001])
def test_sizes(hosts: str, n: int) -> None:
    check(hosts, n, host_bounds(n, hosts), dtype=np.dtype("int8" if n == 7 else "float64"))
    check(hosts, n, even_bounds(n, len(hosts)), lent="changed")


@SOME
@pytest.mark.parametrize("lent", ["private", "shared", "mixed", "changed"])
def test_long_values(hosts: str, lent: str) -> None:
    n = (LINK_WINDOW + 3) * LINK_SEGMENT_BYTES // 4 * topology(hosts).n_leaders + 5
    check(hosts, n, host_bounds(n, hosts), lent=lent)


@pytest.mark.parametrize("hosts", ["aab", "aabb", "aaab", "aaaabbb"])
@pytest.mark.parametrize("n", [13, 100_003])
def test_one_owner_of_everything(hosts: str, n: int) -> None:
    for owner in range(len(hosts)):
        check(hosts, n, whole_bounds(n, len(hosts), owner), lent="mixed")


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("n", [0, 1, 7, 1001, 3 * HOST_SEGMENT_BYTES + 5])
def test_on_one_host(size: int, n: int) -> None:
    check("a" * size, n, even_bounds(n, size), dtype=np.dtype("int8"), lent="changed")
    check("a" * size, n, whole_bounds(n, size, size - 1), lent="mixed")


def test_counters_that_are_behind_or_ahead() -> None:
    first, second = private_memory(2)
    keys = [host_key(memory, 10, F32, rings=2, most=2) for memory in (first, second)]
    keys[0].begin(keys[0].own, keys[0].own)
    keys[0].count(3, 5)
    assert keys[1].counted(0, 3) == (1 << 32) - 1  # this rank has not begun: the other is ahead, as far as can be
    keys[1].begin(keys[1].own, keys[1].own)
    assert keys[1].counted(0, 3) == 5
    keys[1].begin(keys[1].own, keys[1].own)
    assert keys[1].counted(0, 3) == 0


def test_who_waits_for_a_key_is_woken_by_its_counts_and_its_first_value_alone() -> None:
    ranks = [HostKeys(memory, "aaa") for memory in private_memory(3)]
    places = [ranks[0].reserve_key(40) for _ in range(6)]
    keys = [[one.key(place, 10, F32) for place in places] for one in ranks]
    woken = [mock.Mock() for _ in places]
    for key, waiter in zip(keys[2][:5], woken, strict=False):
        assert key.wakes(waiter)
    first = keys[2][5].awaited([0], GATHERED, 1)
    assert not first.test()
    assert wakes(first, woken[5])

    def counts() -> list[int]:
        ranks[2].test()
        return [waiter.wake.call_count for waiter in woken]

    keys[1][3].count(3, 1)
    keys[0][1].count(3, 1)
    keys[2][0].count(3, 1)  # its own counts wake nobody
    assert counts() == [0, 1, 0, 1, 0, 0]
    ranks[0].value(places[5], 10, F32)[...] = 3
    ranks[0].publish(places[5])
    assert (counts(), first.test()) == ([0, 1, 0, 1, 0, 1], True)
    assert [one.is_published(places[5]) for one in ranks] == [True] * 3
    assert not ranks[1].is_published(places[4])
    assert list(ranks[2].value(places[5], 10, F32)) == [3] * 10
    keys[1][3].count(3, 2)
    assert counts()[3] == 1  # it has not said that it waits again
    for _ in range(3 * LOG_ENTRIES):  # the log has been written over: whoever waits had better look
        keys[1][4].count(3, 3)
    assert counts() == [1] * 6


# --- labels of each rank


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


def check_labels(hosts: str, n: int, bounds: Sequence[int], *, memory: bool, n_rounds: int | None = None) -> None:
    """What each rank learns of a round, adds up and sends. memory: through that of the hosts, not by messages alone."""
    p, rounds, memories = len(hosts), rounds_of(len(hosts))[:n_rounds], memories_of(hosts)
    owners = frozenset(rank for rank in range(p) if bounds[rank] < bounds[rank + 1])

    def steps(group):
        me, ledger, comparison = group.rank, group.transport.ledger, Comparison(FIRST)
        adding = ReduceScatterGroup(group.transport, group.ranks, comparison)
        sharing = AllgatherGroup(group.transport, group.ranks, comparison, owners)
        key = host_key(memories[me], n, F32, rings=topology(hosts).n_leaders, most=p) if memory else None
        result = np.empty(n, np.float32) if key is None else key.value
        own, found = slice(bounds[me], bounds[me + 1]), []
        for i, labels in enumerate(rounds):
            before, totals = (ledger.messages, ledger.bytes), values(me, n, i)
            comparison.begin(labels[me])
            if key is None:
                yield from ring.reduce_scatter(adding, totals, bounds, 100)
            else:
                how = {"changeable": False, "comparison": comparison}
                totals = yield from hosted.reduce_scatter(adding, totals, bounds, 100, key, **how)
            known, chunk, result[own] = comparison.differ, totals[own].tolist(), i
            if key is None:
                yield from ring.allgather(sharing, result, bounds, 101)
            else:
                yield from hosted.allgather(sharing, bounds, 101, key)
            assert (result == i).all()
            assert me not in owners or comparison.differ == known  # an owner knows before it updates
            found.append((comparison.differ, chunk, ledger.messages - before[0], ledger.bytes - before[1]))
        return found

    results = run_collective(p, steps, hosts=list(hosts))
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


@pytest.mark.parametrize("p", [2, 3, *(pytest.param(p, marks=pytest.mark.thorough) for p in (4, 5))])
def test_all_ranks_know_in_the_same_round(p: int) -> None:
    """Also ranks that own nothing: fewer elements than ranks, one owner of everything."""
    for n, bounds in ((1, even_bounds(1, p)), (41, even_bounds(41, p)), (5, whole_bounds(5, p, p - 1))):
        check_labels("a" * p, n, bounds, memory=False)


def test_long_chunks() -> None:
    check_labels("abc", 100_003, even_bounds(100_003, 3), memory=False, n_rounds=LONG_ROUNDS)


@pytest.mark.parametrize("hosts", ["aab", "aabb", pytest.param("aaabbc", marks=pytest.mark.thorough)])
def test_several_hosts(hosts: str) -> None:
    for n, n_rounds in ((1, None), (41, None), (100_003, LONG_ROUNDS)):
        bounds = host_bounds(n, hosts) if n != 41 else whole_bounds(n, len(hosts), len(hosts) - 1)
        check_labels(hosts, n, bounds, memory=True, n_rounds=n_rounds)
