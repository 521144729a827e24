"""Some workers of a store go on without the others: keys, their values and their rounds follow who the workers are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mpikv import KVStore, optimizers
from mpikv.config import Config
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.hostmemory.segment import HostMemory
from mpikv.placement.members import Members
from mpikv.testing.ranks import memories_of
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores
from mpikv.transports.faulty import Faults, FaultyFabric
from mpikv.transports.threads import Fabric

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
        store.push(KEYS, [value_of(me, step, size) for size in SIZES])
        assert [value.tobytes() for value in store.pull(KEYS)] == sums(ranks, step)
        for i in range(2):
            for array, size in zip(arrays, SIZES, strict=True):
                array[...] = value_of(me, step + i, size)
            store.pushpull(KEYS, arrays)
            assert [array.tobytes() for array in arrays] == sums(ranks, step + i)
        requests = [store.pushpull_async(key, value_of(me, step, size)) for key, size in zip(KEYS, SIZES, strict=True)]
        for request in requests:
            request.wait()


def run(
    hosts: Sequence[str],
    body: Callable[[KVStore], Any],
    *,
    memory: str,
    algorithm: str = "auto",
    fabric: Fabric | None = None,
) -> list[Any]:
    config = Config(timeout_s=TEST_TIMEOUT_S, shared_memory=memory, algorithm=algorithm)
    return spawn_stores("dist_sync", len(hosts), body, hosts=hosts, config=config, fabric=fabric)


@pytest.mark.parametrize(("two", "one"), STAGES)
@pytest.mark.parametrize(
    ("hosts", "memory", "algorithm"),
    [
        ("aaa", "off", "auto"),
        ("abc", "off", "ring"),
        ("abc", "off", "halving_doubling"),
        ("aaa", "auto", "auto"),
        ("aab", "auto", "auto"),
        ("aba", "auto", "auto"),
    ],
)
def test_three_workers_then_two_then_one(
    hosts: str, memory: str, algorithm: str, two: tuple[int, ...], one: int
) -> None:
    places = [hosts[rank] for rank in two]
    shared: Sequence[HostMemory | None] = [None, None]
    if memory == "auto" and len(set(places)) == 1:
        shared = memories_of(places)

    def body(store: KVStore) -> tuple[int, list[bytes]]:
        me = store.rank
        store.init(KEYS, [np.full(size, 7, F32) for size in SIZES])
        some_rounds(store, me, range(3), range(2))
        before = [value.tobytes() for value in store.pull(KEYS)]
        if not regroup(store, me, two, shared):
            return 3, before
        assert {queue.placement.path for queue in store.strategy._queues.values()} == {
            "messages" if shared[0] is None else "direct"
        }
        assert [value.tobytes() for value in store.pull(KEYS)] == before
        some_rounds(store, me, two, range(2, 4))
        store.barrier()
        store.init("new", np.full(9, store.rank, F32))  # worker 0 is another one, maybe, and gives numbers and places
        assert not store.pull("new").any()
        store.pushpull("new", (new := np.full(9, me, F32)))
        assert new.tolist() == [sum(two)] * 9
        if not regroup(store, me, [one], [None]):
            return 2, before
        some_rounds(store, me, [one], range(4, 6))
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0))
        store.push("new", np.ones(9, F32))
        assert store.pull("new").tolist() == [sum(two) - 1] * 9
        return 1, before

    found = run(hosts, body, memory=memory, algorithm=algorithm)
    assert sorted(left for left, _ in found) == [1, 2, 3]
    assert [before for _, before in found] == [sums(range(3), 1)] * 3


def test_what_comes_before_a_worker_has_begun_to_go_on_waits_for_it() -> None:
    """Each worker in turn hears the others late, and so is the last one to go on."""
    for late in range(3):
        fabric = FaultyFabric(3, lambda rank, late=late: Faults(seed=rank, most_looks=60 * (rank == late)))

        def body(store: KVStore) -> None:
            me = store.rank
            store.init(KEYS, [np.zeros(size, F32) for size in SIZES])
            some_rounds(store, me, range(3), range(1))
            if regroup(store, me, (1, 2), [None, None]):
                some_rounds(store, me, (1, 2), range(1, 3))

        run(["localhost"] * 3, body, memory="off", fabric=fabric)


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

    run(hosts, body, memory="auto")


def test_arrays_of_the_former_memory_are_ordinary_ones() -> None:
    """The newest value is in such an array when the workers become fewer."""
    memories = memories_of("aa")

    def body(store: KVStore) -> None:
        me = store.rank
        array = store.zeros(1001)
        store.init("w", array)
        for step in range(2):
            array[...] = value_of(me, step, 1001)
            store.pushpull("w", array)
        assert store.stats()["direct_calls"] == 2
        if regroup(store, me, (0, 2), memories):
            assert store.pull("w").tobytes() == sum(value_of(rank, 1, 1001) for rank in range(3)).tobytes()
            fresh = store.zeros(1001)
            for step, memory in enumerate([array, fresh, array, fresh]):
                memory[...] = value_of(me, step, 1001)
                store.pushpull("w", memory)
                expected = sum(value_of(rank, step, 1001) for rank in (0, 2)).tobytes()
                assert memory.tobytes() == store.pull("w").tobytes() == expected
            assert store.stats()["direct_calls"] + store.stats()["declined_calls"] == 4

    run("aaa", body, memory="auto")


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_labels_are_compared_among_those_that_stay(memory: str) -> None:
    """The ops of a call differ, before and after: the error names the workers as they are counted now."""

    def body(store: KVStore) -> str:
        me = store.rank
        store.init(["a", "b"], [np.zeros(5, F32)] * 2)
        store.pushpull("a", np.ones(5, F32))
        if not regroup(store, me, (1, 2), [None, None]):
            return ""
        store.pushpull("a", np.ones(5, F32))
        with pytest.raises(MpikvError) as caught:
            store.pushpull("b", np.ones(5, F32), op=("sum", "max")[store.rank])
        leave(store)
        return str(caught.value)

    texts = run("abc", body, memory=memory)
    assert texts[0] == ""
    for text in texts[1:]:
        assert "op='sum'" in text
        assert "worker 0 on b" in text
        assert "worker 1 on c" in text


def test_workers_that_have_pushed_different_rounds_do_not_go_on() -> None:
    def body(store: KVStore) -> str:
        store.init("w", np.zeros(5, F32))
        me = store.rank
        if me == 2:
            leave(store)
            return ""
        queue = store.strategy._queues[0]
        queue.pushed = queue.done = me  # as if worker 1 had been in one round more
        with pytest.raises(MpikvError) as caught:
            regroup(store, me, (0, 1), [None, None])
        leave(store)
        return str(caught.value)

    texts = run("aaa", body, memory="off")
    assert texts[0] == texts[1]
    assert "different rounds: worker 0 on a: 0 times key 0; worker 1 on a: 1 times key 0" in texts[0]


def test_refused_where_states_would_be_lost() -> None:
    def body(store: KVStore) -> None:
        store.init("w", np.zeros(5, F32))
        store.set_optimizer(optimizers.create("sgd", momentum=0.5, learning_rate=1.0))
        with pytest.raises(UnsupportedError, match="states that other workers own"):
            store.strategy.keys.regroup(members_of(store).only((0, 1)))
        store.push("w", np.ones(5, F32))  # nothing was changed
        assert store.pull("w").tolist() == [-3.0] * 5

    run("aaa", body, memory="off")


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 3), (-1,)])
def test_only_workers_of_the_store(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="of a store whose workers are"):
        Members(("a",) * 3, (0, 1, 2)).only(ranks)
    assert Members(("a", "b", "a"), (0, 1, 2)).only((0, 2)).path == "direct"
    assert Members(("a", "b", "a"), (0, 1, 2)).only((2, 1)).path == "messages"
