"""Some workers of a store go on without the others: keys, their values and their rounds follow who the workers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from adasum_reference import close
from direct_stores import exchange
from on_workers import on, uniform
from store_modes import Mode

from mpikv import KVStore, optimizers
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.hostmemory.segment import HostMemory
from mpikv.placement.members import Members
from mpikv.testing.ranks import memories_of
from mpikv.transports.faulty import Faults, FaultyFabric

F32 = np.float32
SIZES = (0, 1, 5, 77, 30_001)
KEYS = [f"k{size}" for size in SIZES]
STAGES = [  # who goes on after the first rounds, and then alone
    ((0, 1), 0),
    ((0, 2), 2),
    ((1, 2), 1),
]


def value_of(rank: int, step: int, size: int) -> Any:
    """Whole numbers: sums are exact. rank: among all, at the start."""
    return np.random.default_rng([rank, step, size]).integers(-1000, 1000, size).astype(F32)


def sums(ranks: Sequence[int], step: int) -> list[bytes]:
    return [sum(value_of(rank, step, size) for rank in ranks).astype(F32).tobytes() for size in SIZES]


def members_of(store: KVStore) -> Members:
    return store.session.members  # type: ignore[attr-defined,no-any-return]


def leave(store: KVStore) -> None:
    """As if this worker had died: it says nothing any more."""
    store.session.closed = True
    store.session.abandon()


def regroup(store: KVStore, me: int, ranks: Sequence[int], memories: Sequence[HostMemory | None]) -> bool:
    """Whether this worker goes on."""
    if me not in ranks:
        leave(store)
        return False
    store.strategy.keys.regroup(members_of(store).only(ranks), memories[ranks.index(me)])
    assert (store.rank, store.num_workers) == (ranks.index(me), len(ranks))
    return True


def some_rounds(store: KVStore, me: int, ranks: Sequence[int], steps: range) -> None:
    """In calls of every kind, with arrays that come again."""
    arrays = [np.empty(size, F32) for size in SIZES]
    for step in steps:
        for call in ("push and pull", "list", "list", "async"):
            for array, size in zip(arrays, SIZES, strict=True):
                array[...] = value_of(me, step, size)
            exchange(store, call, KEYS, arrays, [])
            assert [array.tobytes() for array in arrays] == sums(ranks, step)


def adasum_round(store: KVStore, me: int, ranks: Sequence[int]) -> None:
    """A smaller group has a tree of its own."""
    store.pushpull(KEYS, arrays := [value_of(me, 0, size) for size in SIZES], op="adasum")
    for array, size in zip(arrays, SIZES, strict=True):
        close(array, [value_of(rank, 0, size) for rank in ranks])


def on_hosts(hosts: str, memory: str = "auto", algorithm: str = "auto") -> Mode:
    return Mode("dist_sync", len(hosts), 0, algorithm, memory, hosts=hosts)


@pytest.mark.parametrize(("two", "one"), STAGES)
@on(
    *(on_hosts("aaa", "off"), on_hosts("abc", "off", "ring"), on_hosts("abc", "off", "halving_doubling")),
    *(on_hosts("aaa"), on_hosts("aab"), on_hosts("aba")),
)
def test_three_workers_then_two_then_one(mode: Mode, two: tuple[int, ...], one: int) -> None:
    places = [mode.hosts[rank] for rank in two]
    shares = mode.memory == "auto" and len(set(places)) == 1
    shared = memories_of(places) if shares else [None, None]

    def body(store: KVStore) -> int:
        me = store.rank
        store.init(KEYS, [np.full(size, 7, F32) for size in SIZES])
        adasum_round(store, me, range(3))
        some_rounds(store, me, range(3), range(2))
        assert [value.tobytes() for value in store.pull(KEYS)] == sums(range(3), 1)
        if not regroup(store, me, two, shared):
            return 3
        paths = {queue.placement.path for queue in store.strategy._queues.values()}
        assert paths == {"direct" if shares else "messages"}
        assert [value.tobytes() for value in store.pull(KEYS)] == sums(range(3), 1)
        adasum_round(store, me, two)
        some_rounds(store, me, two, range(2, 4))
        store.barrier()
        store.init("new", np.full(9, store.rank, F32))  # worker 0 is another one, maybe, and gives numbers and places
        assert not store.pull("new").any()
        store.pushpull("new", (new := np.full(9, me, F32)))
        assert uniform(new) == sum(two)
        if not regroup(store, me, [one], [None]):
            return 2
        some_rounds(store, me, [one], range(4, 6))
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0))
        store.push("new", np.ones(9, F32))
        assert uniform(store.pull("new")) == sum(two) - 1
        return 1

    assert sorted(mode.run(body)) == [1, 2, 3]


@pytest.mark.parametrize("late", range(3))
def test_what_comes_before_a_worker_has_begun_to_go_on_waits_for_it(late: int) -> None:
    """Each worker in turn hears the others late, and so is the last one to go on."""
    fabric = FaultyFabric(3, lambda rank: Faults(seed=rank, most_looks=60 * (rank == late)))

    def body(store: KVStore) -> None:
        me = store.rank
        store.init(KEYS, [np.zeros(size, F32) for size in SIZES])
        some_rounds(store, me, range(3), range(1))
        if regroup(store, me, (1, 2), [None, None]):
            some_rounds(store, me, (1, 2), range(1, 3))

    Mode("dist_sync", 3, memory="off").run(body, fabric=fabric)


def test_through_the_memory_of_two_hosts() -> None:
    """Four workers of two hosts, of which three go on, in both kinds of calls and in buckets."""
    hosts, stay = "aabb", (0, 2, 3)
    memories = memories_of([hosts[rank] for rank in stay])

    def body(store: KVStore) -> None:
        me = store.rank
        store.init(KEYS, [np.zeros(size, F32) for size in SIZES])
        store.strategy.bucket(KEYS[1:4])
        for step in range(2):
            store.push(KEYS, [value_of(me, step, size) for size in SIZES])
        assert [value.tobytes() for value in store.pull(KEYS)] == sums(range(4), 1)
        if regroup(store, me, stay, memories):
            some_rounds(store, me, stay, range(3))
            assert store.stats()["shared_bytes"] == 4 * sum(SIZES)

    on_hosts(hosts).run(body)


def test_arrays_of_the_former_memory_are_ordinary_ones() -> None:
    """The newest value is in such an array when the workers become fewer."""
    memories, n = memories_of("aa"), SIZES[-1]

    def body(store: KVStore) -> None:
        me = store.rank
        array = store.zeros(n)
        store.init("w", array)
        for step in range(2):
            array[...] = value_of(me, step, n)
            store.pushpull("w", array)
        assert store.stats()["direct_calls"] == 2
        if regroup(store, me, (0, 2), memories):
            assert store.pull("w").tobytes() == sums(range(3), 1)[-1]
            fresh = store.zeros(n)
            for step, memory in enumerate([array, fresh, array, fresh]):
                memory[...] = value_of(me, step, n)
                store.pushpull("w", memory)
                assert memory.tobytes() == store.pull("w").tobytes() == sums((0, 2), step)[-1]
            assert store.stats()["direct_calls"] + store.stats()["declined_calls"] == 4

    on_hosts("aaa").run(body)


@on(on_hosts("abc"), on_hosts("abc", "off"))
def test_labels_are_compared_among_those_that_stay(store: KVStore) -> None:
    """The ops of a call differ, before and after: the error names the workers as they are counted now."""
    me = store.rank
    store.init(["a", "b"], [np.zeros(5, F32)] * 2)
    store.pushpull("a", np.ones(5, F32))
    if regroup(store, me, (1, 2), [None, None]):
        store.pushpull("a", np.ones(5, F32))
        with pytest.raises(MpikvError, match=r"(?s)(?=.*op='sum')(?=.*worker 0 on b)(?=.*worker 1 on c)"):
            store.pushpull("b", np.ones(5, F32), op=("sum", "max")[store.rank])
        leave(store)


@on(on_hosts("aaa", "off"))
def test_workers_that_have_pushed_different_rounds_do_not_go_on(store: KVStore) -> None:
    store.init("w", np.zeros(5, F32))
    me = store.rank
    if me != 2:
        queue = store.strategy._queues[0]
        queue.pushed = queue.done = me  # as if worker 1 had been in one round more
        text = "different rounds: worker 0 on localhost: 0 times key 0; worker 1 on localhost: 1 times key 0"
        with pytest.raises(MpikvError, match=text):
            regroup(store, me, (0, 1), [None, None])
    leave(store)


@on(on_hosts("aaa", "off"))
def test_refused_where_states_would_be_lost(store: KVStore) -> None:
    store.init("w", np.zeros(5, F32))
    store.set_optimizer(optimizers.create("sgd", momentum=0.5, learning_rate=1.0))
    with pytest.raises(UnsupportedError, match="states that other workers own"):
        store.strategy.keys.regroup(members_of(store).only((0, 1)))
    store.push("w", np.ones(5, F32))  # nothing was changed
    assert uniform(store.pull("w")) == -3


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 3), (-1,)])
def test_only_workers_of_the_store(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="of a store whose workers are"):
        Members(("a",) * 3, (0, 1, 2)).only(ranks)
    assert Members(("a", "b", "a"), (0, 1, 2)).only((0, 2)).path == "direct"
    assert Members(("a", "b", "a"), (0, 1, 2)).only((2, 1)).path == "messages"
