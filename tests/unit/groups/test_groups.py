"""The collectives of process groups on thread ranks, through memory and by messages, against NumPy."""

from __future__ import annotations

import functools
import inspect
import random
import re
import threading
import time
from collections.abc import Sequence
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from on_workers import taken_of, until
from virtual_clock import VirtualClock

from mpikv.arrays.reductions import OF_GROUPS
from mpikv.collectives import shared
from mpikv.common.clock import MACHINE_CLOCK
from mpikv.config import Config
from mpikv.engine.backoff import wait_until
from mpikv.engine.operation import Predicate
from mpikv.errors import MpikvError, PeerError, ShapeMismatch, StallError, UnsupportedError
from mpikv.groups import messages
from mpikv.groups.call import Options
from mpikv.groups.collective import allgather, allreduce, barrier, broadcast, exchange, reduce, reduce_scatter
from mpikv.groups.group import WINDOW_BITS, GroupTags, RankGroup
from mpikv.groups.shared import CHUNK_BYTES, TINY_BYTES, MismatchError
from mpikv.groups.world import World
from mpikv.testing.groups import spawn_groups
from mpikv.transports import wire
from mpikv.transports.threads import Fabric

SUM = OF_GROUPS["sum"]
# On one host through memory and by messages; one rank on each host; several ranks on some hosts.
WAYS = {
    "memory": (None, {}),
    "messages": (None, {"shared_memory": "off"}),
    "hosts": ("abcdefgh", {}),
    "mixed": ("aabbbccc", {}),
}
# Around one chunk, and what every rank combines for itself.
SIZES = (0, 1, 5, TINY_BYTES // 4 + 3, CHUNK_BYTES // 4 + 1, 2 * CHUNK_BYTES // 4 + 77)

SOON = Options(timeout_s=0.5)  # of a call that is to wait in vain


def run(way: str, size: int, body, *, clock=MACHINE_CLOCK, **config):
    hosts, settings = WAYS[way]
    settings = Config(timeout_s=20, **settings, **config)
    fabric = Fabric(size, hosts and tuple(hosts[:size]), clock)
    return spawn_groups(size, body, hosts=fabric.hosts, config=settings, fabric=fabric)


def each_rank(sizes: Sequence[int], *ways: str):
    """The test is what each rank of a group does, of these sizes and in these ways. It may take its world, too."""

    def decorate(test):
        takes_world = "world" in inspect.signature(test).parameters

        def ranks(worker, given) -> None:
            more = {"world": None} if takes_world else {}
            run(given["way"], given["size"], lambda world, group: worker(group, **dict.fromkeys(more, world)))

        made = taken_of(test, ranks, "way", "size", brings=["world"])
        return pytest.mark.parametrize("way", ways)(pytest.mark.parametrize("size", sizes)(made))

    return decorate


def run_while_time_passes(way: str, size: int, body, *, lookers: int, until: int = 1, begin=lambda: True) -> list:
    """`body(told, world, group)` on all ranks; time goes on until `told` is so long.

    lookers: how many threads wait meanwhile, and so look at the clock. begin: True when time may begin to pass.
    """
    clock, told = VirtualClock(), []

    def let_it_pass() -> None:
        wait_until(begin, lambda: False, 60, lambda: StallError("time may not begin to pass"))
        clock.advance(20, turns=400, lookers=lookers, until=lambda: len(told) >= until)

    driver = threading.Thread(target=let_it_pass, daemon=True)
    driver.start()
    found = run(way, size, partial(body, told), clock=clock)
    driver.join(60)
    return found


def values(rank: int, n: int, dtype="float32") -> np.ndarray:
    """Small whole numbers other than 0, so that every order gives the same bits."""
    return np.tile((np.arange(3) + 1 + rank % 2).astype(dtype), n // 3 + 1)[:n].copy()


@each_rank([1, 2, 3, 5], *WAYS)
def test_allreduce_of_all_sizes(group: RankGroup, size: int) -> None:
    arrays, together = ([values(group.rank, n) for n in SIZES] for _ in range(2))
    for array in arrays:
        group.start(allreduce([array], SUM)).wait()
    group.start(allreduce(together, SUM)).wait()
    for n, one, other in zip(SIZES, arrays, together, strict=True):
        expected = sum(values(rank, n) for rank in range(size))
        np.testing.assert_array_equal(one, expected)
        np.testing.assert_array_equal(other, expected)


@pytest.mark.parametrize("way", ["memory", "messages", "long messages", "mixed"])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_operators_and_dtypes(way: str, name: str, monkeypatch) -> None:
    if way == "long messages":
        way = "messages"
        monkeypatch.setattr(messages, "DIRECT_BYTES", 0)
    operator = OF_GROUPS[name]
    dtypes = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    dtypes = [np.dtype(getattr(ml_dtypes, one, one)) for one in [*dtypes, "complex64"]]
    length, size = 700, 3

    def own(rank: int, dtype: np.dtype) -> np.ndarray:
        array = values(rank, length, dtype)
        return -array if dtype.kind == "i" else array

    def fits(dtype: np.dtype) -> bool:
        return ("f" if dtype == ml_dtypes.bfloat16 else dtype.kind) in operator.kinds

    def body(world: World, group: RankGroup):
        for dtype in dtypes:
            array = own(group.rank, dtype)
            if not fits(dtype):
                with pytest.raises(UnsupportedError, match=name):
                    group.start(allreduce([array], operator))
                continue
            group.start(allreduce([array], operator)).wait()
            exact = "float32" if dtype in (np.float16, ml_dtypes.bfloat16) else dtype
            expected = functools.reduce(operator.combine, [own(rank, dtype).astype(exact) for rank in range(size)])
            # astype cuts the means of whole numbers towards zero.
            expected = (expected / size if operator.is_mean else expected).astype(dtype)
            np.testing.assert_allclose(array.astype("complex128"), expected.astype("complex128"), rtol=1e-6)
            assert array.dtype == dtype

    run(way, size, body)


@each_rank([1, 2, 3], "memory", "messages", "hosts", "mixed")
def test_what_moves_and_what_is_combined_at_one_rank(group: RankGroup, size: int) -> None:
    me, root = group.rank, (size - 1) // 2
    for n in SIZES:
        array, total = values(me, n), sum(values(rank, n) for rank in range(size))
        group.start(broadcast([array], root)).wait()
        np.testing.assert_array_equal(array, values(root, n))
        array = values(me, n)
        group.start(reduce(array, array, SUM, root)).wait()
        np.testing.assert_array_equal(array, total if me == root else values(me, n))
        group.start(reduce(values(me, n), mean := np.zeros(n, "float32"), OF_GROUPS["mean"], root)).wait()
        np.testing.assert_array_equal(mean, total / np.float32(size) * (me == root))
        outs = [np.zeros(n, "float32") for _ in range(size)]
        group.start(allgather([(values(me, n), outs)])).wait()
        parts, out = [values(me + dest, n) for dest in range(size)], np.zeros(n, "float32")
        group.start(reduce_scatter([(parts, out)], SUM)).wait()
        np.testing.assert_array_equal(out, sum(values(rank + me, n) for rank in range(size)))
        for rank in range(size):
            np.testing.assert_array_equal(outs[rank], values(rank, n))
            np.testing.assert_array_equal(parts[rank], values(me + rank, n))  # as they were
        group.start(barrier()).wait()


@each_rank([3], "memory", "hosts")
def test_parts_of_different_lengths(group: RankGroup, size: int) -> None:
    me, lengths = group.rank, (5, 0, CHUNK_BYTES)
    outs = [np.zeros(n, "float32") for n in lengths]
    group.start(allgather([(values(me, lengths[me]), outs)])).wait()
    for rank in range(size):
        np.testing.assert_array_equal(outs[rank], values(rank, lengths[rank]))
    parts, out = [values(me, n) for n in lengths], np.zeros(lengths[me], "float32")
    group.start(reduce_scatter([(parts, out)], SUM)).wait()
    np.testing.assert_array_equal(out, sum(values(rank, lengths[me]) for rank in range(size)))
    sent = {rank: values(10 * me + rank, me + rank) for rank in range(size)}
    got = {rank: np.zeros(me + rank, "float32") for rank in range(size)}
    group.start(exchange("all_to_all", sent, got, "")).wait()
    for rank in range(size):
        np.testing.assert_array_equal(got[rank], values(10 * rank + me, me + rank))


def test_slots_are_not_filled_again_while_a_slow_rank_still_reads(monkeypatch) -> None:
    """One rank sleeps before its copies and sums, the others run ahead as far as they may."""
    numbers = random.Random(1)
    for step in ("copy_all", "add_all"):
        original = getattr(shared, step)

        def slowly(entries, original=original) -> None:
            if threading.current_thread().name == "rank 1" and numbers.random() < 0.2:
                time.sleep(0.002)
            original(entries)

        monkeypatch.setattr(shared, step, slowly)

    def body(world: World, group: RankGroup):
        long = 3 * CHUNK_BYTES // 4 + 5
        for i, n in enumerate((9, long, 9, 9, 5000, 9, long)):
            array, other = np.full(n, float(i + group.rank)), np.full(n, -1.0 - group.rank)
            outs = [np.zeros(n) for _ in range(3)]
            calls = [
                group.start(broadcast([array], i % 3)),
                group.start(allgather([(other, outs)])),
                group.start(allreduce([array], SUM)),
            ]
            for call in calls:
                call.wait()
            assert set(array) == {3.0 * (i + i % 3)}
            assert [set(out) for out in outs] == [{-1.0}, {-2.0}, {-3.0}]

    run("memory", 3, body)


@each_rank([2], "memory", "messages")
def test_many_calls_under_way_in_any_order_of_groups(group: RankGroup, world: World) -> None:
    """Rank 0 starts the calls of two groups one after another, rank 1 the other way round; nobody waits before."""
    other = world.group(range(2), 2, 20)
    groups = (group, other) if group.rank == 0 else (other, group)
    arrays = {one.number: [np.full(9, 1.0 + i) for i in range(80)] for one in groups}
    calls = [one.start(allreduce([array], SUM)) for one in groups for array in arrays[one.number]]
    for call in reversed(calls):
        call.wait()
    for one in groups:
        assert [array[0] for array in arrays[one.number]] == [2.0 + 2 * i for i in range(80)]


def test_groups_of_some_ranks() -> None:
    def body(world: World, group: RankGroup):
        mine = [0, 3] if world.rank in (0, 3) else [2, 1]
        part = world.group(mine, 2 if 0 in mine else 3, 20)
        array = np.full(5, float(world.rank))
        part.start(allreduce([array], SUM)).wait()
        group.start(barrier()).wait()
        world.drop(part)
        assert [*world.groups] == [group.number]
        return array[0], part.rank

    for way in ("memory", "mixed"):
        assert run(way, 4, body) == [(3, 0), (3, 1), (3, 0), (3, 1)]


@each_rank([3], "memory")
def test_messages_between_two_ranks(group: RankGroup) -> None:
    if group.rank == 0:
        for tag, number in ((1, 10.0), (2, 20.0), (1, 11.0)):
            group.send(np.full(2, number), 1, tag).wait()
        group.send(np.full(70_000, 30.0), 1, 3).wait()
        got = np.zeros(1)
        assert sorted(group.receive(got, None, 4).wait() for _ in range(2)) == [1, 2]
    else:
        if group.rank == 1:
            got = [np.zeros(2) for _ in range(3)]
            calls = [group.receive(array, 0, tag) for array, tag in zip(got, (2, 1, 1), strict=True)]
            long = np.zeros(70_000)
            group.receive(long, None, 3).wait()
            assert long[-1] == 30
            for call in reversed(calls):
                assert call.wait() == 0
            assert [array[1] for array in got] == [20, 10, 11]
        group.send(np.zeros(1), 0, 4).wait()


@each_rank([2], "memory")
def test_messages_with_ever_new_tags_are_counted_no_more(group: RankGroup, monkeypatch) -> None:
    monkeypatch.setattr("mpikv.groups.group.MOST_COUNTED", 3)
    for tag in range(5):
        call = group.send(np.zeros(1), 1, tag) if group.rank == 0 else group.receive(np.zeros(1), 0, tag)
        assert (call.need is None) == (group.rank == 0 or tag > 2)
        call.wait()
    assert [group.has_sent(1, 0, 1), group.has_sent(1, 4, 9)] == [group.rank == 0] * 2


@each_rank([2], "memory")
def test_a_message_of_another_length_is_an_error_of_who_receives_it(group: RankGroup) -> None:
    for n in (3, 70_000):
        if group.rank == 0:
            group.send(np.zeros(n), 1, 0).wait()
        else:
            with pytest.raises(ShapeMismatch, match=rf"rank 0 of the group has {8 * n} bytes, .* has 16"):
                group.receive(np.zeros(2), 0, 0).wait()


DIFFERENT = {  # what the last rank calls, where the others add eight float32
    "length": lambda: allreduce([np.ones(7, "float32")], SUM),
    "dtype": lambda: allreduce([np.ones(8)], SUM),
    "operator": lambda: allreduce([np.ones(8, "float32")], OF_GROUPS["max"]),
    "call": lambda: broadcast([np.ones(8, "float32")], 0),
}


@pytest.mark.parametrize("way", ["memory", "messages"])
@pytest.mark.parametrize("different", DIFFERENT)
def test_different_calls_are_an_error_on_all_ranks(way: str, different: str) -> None:
    def body(told: list, world: World, group: RankGroup):
        made = DIFFERENT[different]() if group.rank == 2 else allreduce([np.ones(8, "float32")], SUM)
        with pytest.raises((MismatchError, PeerError), match="same calls in the same order"):
            group.start(made).wait()
        told.append(group.rank)
        with pytest.raises(MpikvError, match="not in step any more"):
            group.start(barrier())

    run_while_time_passes(way, 3, body, lookers=3, until=3)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_who_is_missing_is_named(way: str) -> None:
    def body(told: list, world: World, group: RankGroup):
        group.start(barrier()).wait()
        if group.rank != 1:
            with pytest.raises(
                StallError,
                match=r"rank \d of 3 on localhost waited 0.5 s, its timeout in all_reduce \(sum\) of float32 4 \(call"
                r" 2\) .* missing: rank 1 of 3 on localhost has made 1 calls",
            ):
                group.start(allreduce([np.ones(4, "float32")], SUM), SOON).wait()
            told.append(group.rank)
        world.group(range(3), 2, 20).start(barrier()).wait()  # all are there until both have asked

    run_while_time_passes(way, 3, body, lookers=3, until=2)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_who_is_late_is_told_as_in_a_store(way: str, printed: list[str]) -> None:
    def body(world: World, group: RankGroup):
        group.start(barrier()).wait()
        if group.rank == 1:
            until(lambda: any(" for rank 1 on localhost" in text for text in printed))
        group.start(allreduce([np.ones(4, "float32")], SUM)).wait()
        if group.rank == 0:
            until(lambda: any("going on, after a stall of" in text for text in printed))
        group.start(barrier()).wait()

    run(way, 3, body, stall_warn_s=0.5)
    table = next(text for text in printed if " for rank 1 on localhost" in text)
    assert re.search(r"\n  rank 1 on localhost \(pid \d+\): outside the store for .* at on_workers.py:\d+ in ", table)
    assert re.search(
        r"\n  rank 0(, 2)? on localhost \(pid [\d, ]+\): in all_reduce \(sum\) of float32 4, call 2 of process group 1 "
        r"for \d\.\d s; at test_groups.py:\d+ in body",
        table,
    )


# What ranks 0, 1 and 2 call: a barrier of group 1, 2 or 3, or a receive from the next rank, "<". Group 3 lacks rank 0.
CIRCLES = ["12 21 21", "12 12 21", "<1 1 1", "< < <", "<1 31 13"]


@pytest.mark.parametrize("way", ["memory", "messages"])
@pytest.mark.parametrize("program", CIRCLES)
def test_ranks_that_wait_for_each_other_learn_of_it_at_once(way: str, program: str, printed: list[str]) -> None:
    def body(world: World, group: RankGroup):
        groups = {"1": group, "2": world.group(range(3), 2, 60)}
        if group.rank:
            groups["3"] = world.group((1, 2), 3, 60)

        def calls() -> None:
            after = (group.rank + 1) % 3
            for one in program.split()[group.rank]:
                (group.receive(np.zeros(2), after, 0) if one == "<" else groups[one].start(barrier())).wait()

        with pytest.raises(StallError) as raised:
            calls()
        all_know.wait()
        return str(raised.value)

    all_know = threading.Barrier(3, timeout=60)
    for rank, text in enumerate(run(way, 3, body, stall_warn_s=0.2)):
        assert re.match(rf"rank {rank} of 3 on localhost waits in .*\. Deadlock: rank . of 3 on localhost in ", text)


def test_messages_that_are_under_way_are_no_circle(printed: list[str]) -> None:
    """Ranks that receive from each other after they have sent, one of them late."""

    def body(world: World, group: RankGroup):
        if group.rank == 0:
            until(lambda: any("stalled" in text for text in printed))
        group.send(np.full(2, float(group.rank)), 1 - group.rank, 0).wait()
        for got in (np.zeros(2), np.zeros(2)):
            group.send(got, 1 - group.rank, 1)
            group.receive(got, 1 - group.rank, 1).wait()
        group.receive(got, 1 - group.rank, 0).wait()
        return got.tolist()

    assert run("memory", 2, body, stall_warn_s=0.2) == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("way", ["memory", "messages"])
@pytest.mark.parametrize("leaver", [0, 1], ids=["the holder of the board", "another rank"])
def test_who_has_left_the_job_is_waited_for_no_longer(way: str, leaver: int) -> None:
    """As by `raise SystemExit(3)`, which ends a program as if it were done."""
    holders: list[World] = []

    def body(told: list, world: World, group: RankGroup):
        if group.rank == 0:
            holders.append(world)
        group.start(barrier()).wait()
        if group.rank != leaver:
            said = rf"call 2 of .*, but rank {leaver} of 3 on localhost has left the job after 1 calls"
            with pytest.raises(PeerError, match=said):
                group.start(allreduce([np.ones(4, "float32")], SUM)).wait()
            told.append(group.rank)
            both = Predicate(lambda: len(told) == 2)  # time goes on as long as two look at the clock
            world.engine.wait(both, 60, lambda: StallError("the other has not heard"))

    has_left = lambda: bool(holders) and leaver in holders[0].service.left  # noqa: E731
    run_while_time_passes(way, 3, body, lookers=2, until=2, begin=has_left)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_the_limit_of_a_call_begins_when_the_calls_before_it_have_ended(way: str) -> None:
    """Of thousands that are begun at once the last ones wait for long, though every rank has made them."""
    n = 1 << WINDOW_BITS  # by messages so many are under way at once

    def body(told: list, world: World, group: RankGroup):
        clock = world.engine.clock
        if group.rank == 1:
            come_s = clock.now_s() + 5
            world.engine.wait(Predicate(lambda: clock.now_s() > come_s), 60, lambda: StallError("time stands still"))
        calls = [group.start(allreduce([np.ones(2)], SUM)) for _ in range(n)]
        last = group.start(allreduce([array := np.ones(2)], SUM), SOON)
        for call in (*calls, last):
            call.wait()
        told.append(group.rank)
        return array.tolist()

    assert run_while_time_passes(way, 2, body, lookers=2, until=2) == [[2, 2]] * 2


def test_the_callers_own_limit_leaves_the_call_under_way() -> None:
    def body(told: list, world: World, group: RankGroup):
        array = np.ones(2)
        if group.rank == 0:
            call = group.start(allreduce([array], SUM))
            with pytest.raises(StallError, match=r"waited 0.05 s, its timeout in all_reduce"):
                call.wait(0.05)
            told.append(0)
            group.send(np.zeros(1), 1, 0).wait()
            call.wait()
        else:
            group.receive(np.zeros(1), 0, 0).wait()
            group.start(allreduce([array], SUM)).wait()
        assert array[0] == 2

    run_while_time_passes("memory", 2, body, lookers=2)


def test_tags_do_not_meet() -> None:
    for max_tag in (2**23 - 1, 2**28 - 1, 2**31 - 1):
        first, second = GroupTags.of(max_tag, 1), GroupTags.of(max_tag, 2047)
        assert first.low_bits >= 11
        tags = [one.of_call(number, 12345) for one in (first, second) for number in range(32)]
        tags += [one.of_user(tag) for one in (first, second) for tag in (0, 1, 2**first.low_bits - 1)]
        assert len(set(tags)) == len(tags)
        assert all(wire.TAG_CALLS + 1 < tag <= max_tag for tag in tags)
        for tag in (-1, 1 << 40):
            with pytest.raises(ValueError, match="tags are 0 to"):
                first.of_user(tag)
    with pytest.raises(UnsupportedError, match="32767"):
        GroupTags.of(32767, 1)
    with pytest.raises(UnsupportedError, match="2047 process groups"):
        GroupTags.of(2**23 - 1, 2048)


@pytest.mark.parametrize("tell", [RankGroup.refuse, RankGroup._failed])
def test_a_failure_that_is_told_before_the_group_is_there(tell) -> None:
    """A rank that is late in making the group hears of it all the same, be it of one call or of all."""

    def body(world, group):
        error = ValueError("no list")
        if world.rank == 1:
            tell(world.group(range(2), 2, timeout_s=20), error)
            world.ask("set", ["after it"], [b""])  # rank 0 answers one after the other
        group.start(barrier()).wait()
        if world.rank == 0:
            with pytest.raises(PeerError, match="has failed on rank 1 of 2 on localhost: ValueError: no list"):
                world.group(range(2), 2, timeout_s=20).start(barrier()).wait()

    run("memory", 2, body)


def test_a_request_that_the_board_cannot_answer_is_the_askers_error() -> None:
    def body(world, group):
        if world.rank == 0:
            world.ask("set", ["word"], [b"no number"])
        group.start(barrier()).wait()
        with pytest.raises(ValueError, match="add to the key 'word': its value is no number, but b'no number'"):
            world.ask("add", ["word"], [b"1"])
        group.start(barrier()).wait()
        assert world.ask("get", ["word"]) == [b"no number"]

    run("memory", 2, body)
