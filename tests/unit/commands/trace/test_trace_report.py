"""Where the time went, and what to do: of timelines whose times are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from traced import Record, analysis_of, rank

from mpikv.commands.trace.advice import advice
from mpikv.commands.trace.files import Rank
from mpikv.commands.trace.report import report


def step(begin: float, computed: float, last: float, sent: float, round_: int = 1) -> list[Record]:
    """A worker computes from `begin`, pushes, waits until the last one has pushed, and then until all is sent."""
    at, end, key = begin + computed, last + sent, "w"
    return [
        ("span", begin, at, "forward"),
        ("call", at, end, "pushpull"),
        ("push", at, at + 0.1, key, round_, 1 << 20),
        ("reduce-scatter", at, last + sent / 2, key, round_, 1 << 20),
        ("update", last + sent / 2, last + sent / 2, key, round_, 1 << 20),
        ("allgather", last + sent / 2, end, key, round_, 1 << 20),
        ("wait", at + 0.1, end, key, round_),
    ]


def late(computed: float = 30, sent: float = 5) -> list[Rank]:
    """Worker 1 computes 30 ms a step, worker 0 10 ms; sending takes 5 ms. Two steps."""
    second = computed + sent
    last = second + computed
    return [
        rank("worker", i, 2, *step(0, own, computed, sent), *step(second, own, last, sent, 2))
        for i, own in enumerate((10, computed))
    ]


def test_time_is_divided_into_computing_waiting_and_sending():
    found = analysis_of(late())
    first, second = found.workers[0], found.workers[1]
    assert found.steps == 2
    assert (first.whole, first.computing) == pytest.approx((60_000, 10_000))  # from its first push on
    assert first.waiting == pytest.approx({1: 2 * 19_900})
    assert first.sending == pytest.approx(2 * 5_000)
    assert first.other == pytest.approx(200)
    assert first.moving == pytest.approx(10_000)
    assert (first.hidden, first.coding) == (0, 0)
    assert (second.whole, second.computing) == pytest.approx((40_000, 30_000))
    assert second.waiting == {}
    assert second.sending == pytest.approx(2 * 4_900)
    (cost,) = found.keys.values()
    assert (cost.rounds, cost.n_bytes, cost.coded) == (2, 1 << 20, False)
    assert cost.waited == pytest.approx(2 * 5_000 + 2 * 4_900)
    assert cost.moving == pytest.approx(2 * 2 * 5_000)


def test_both_parts_of_a_divided_key_are_one_round():
    parts = [record for round_ in (1, 2) for record in step(40 * round_, 10, 40 * round_ + 10, 5, round_)]
    parts += [("exchange", 40 * round_ + 10, 40 * round_ + 16, "w", round_, 1 << 21) for round_ in (1, 2)]
    found = analysis_of([rank("worker", i, 2, *parts) for i in range(2)])
    assert found.steps == 2
    (cost,) = found.keys.values()
    assert (cost.rounds, cost.n_bytes) == (2, 1 << 21)


def test_a_call_in_common_memory_is_waiting_until_all_have_come_and_adding_from_then_on():
    def records(came: float) -> list[Record]:
        own = [("call", came, 24, "pushpull"), ("meet", came, 20, "w", 7, 8), ("add", 20, 24, "w", 7, 8)]
        return [*own, ("wait", 21, 23, "w", 0)]  # within the call, for the steps of others

    found = analysis_of([rank("worker", i, 2, *records(came)) for i, came in enumerate((5, 20))])
    assert found.workers[0].waiting == pytest.approx({1: 15_000})
    assert [worker.sending for worker in found.workers.values()] == pytest.approx([4_000, 4_000])


def test_workers_of_an_asynchronous_store_wait_for_nobody():
    records = [("exchange", 0, 9, "w", 1, 8), ("call", 0, 10, "pushpull"), ("wait", 0, 10, "w", 0)]
    found = analysis_of([rank("worker", i, 2, *records, type="dist_async") for i in range(2)])
    assert [(worker.waiting, worker.sending) for worker in found.workers.values()] == [({}, 10_000)] * 2


def keys(n: int, n_bytes: int, each_ms: float = 1.0, **more: Any) -> list[Rank]:
    """One worker that pushes n keys one after another, and computes for 10 ms after them."""
    records: list[Record] = []
    for i in range(n):
        records.append(("call", i * each_ms, (i + 1) * each_ms, "pushpull"))
        records.append(("push", i * each_ms, i * each_ms, f"k{i}", 1, n_bytes))
        records.append(("reduce-scatter", i * each_ms, (i + 0.9) * each_ms, f"k{i}", 1, n_bytes))
        records.append(("wait", i * each_ms, (i + 1) * each_ms, f"k{i}", 1))
    records.append(("push", n * each_ms + 10, n * each_ms + 10, "last", 1, n_bytes))
    return [rank("worker", 0, 1, *records, **more)]


def coded() -> list[Rank]:
    (found,) = keys(1, 1 << 20)
    others = rank("worker", 0, 1, ("encode", 2, 9, "k0"), ("decode", 9, 10, "k0")).events
    return [Rank(found.header, [*found.events, *others])]


def served(n_bytes: int, *names: str) -> list[Rank]:
    exchanged = [("exchange", 0, 9, name, 1, n_bytes) for name in names]
    worker = [*exchanged, ("call", 0, 9, "pushpull"), ("wait", 0, 9, names[0], 1)]
    return [rank("worker", 0, 1, *worker), rank("server", 0, 1, ("serve", 0, 4), ("serve", 5, 9))]


def hidden() -> list[Rank]:
    moves = [("push", 0, 0, "w", 1, 8), ("reduce-scatter", 0, 10, "w", 1, 8)]
    return [rank("worker", 0, 1, *moves, ("call", 8, 10, "pull"), ("wait", 8, 10, "w", 1))]


def alone(host: str = "a") -> list[Rank]:
    sent = [("push", 0, 0, "w", 1, 1 << 20), ("call", 0, 8, "pushpull"), ("reduce-scatter", 0, 8, "w", 1, 1 << 20)]
    waits = [("wait", 0, 8, "w", 1), ("push", 16, 16, "w", 2, 1 << 20)]
    return [rank("worker", i, 2, *sent, *waits, host=h) for i, h in enumerate(("a", host))]


ANSWERS = "workers wait 100% of theirs for answers"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (late(), "worker 1 on a computes 3.0 times as long as the others, which wait 66% of their time for it"),
        (late(13, 1), "worker 1 on a computes 30% longer than the others, which wait 32% of their time for it"),
        (keys(60, 40), "61 keys of about 40 bytes cost 86% of the time: push them as one list"),
        (coded(), "encoding and decoding take 73% of the time"),
        (served(8, "w", "b"), f"servers are busy for 89% of their time, and {ANSWERS}: more servers"),
        (served(1 << 22, "w"), f"servers are busy for 89% of their time, and {ANSWERS}: more servers"),
        (served(8, "w"), f"servers are busy for 89% of their time, and {ANSWERS}: the keys are too few and too short"),
        (alone("b"), "workers wait 50% of the time for what is sent: w go uncompressed over a link that is full"),
        (alone(), "workers wait 50% of the time for what is sent, and 0% of that goes on while they compute"),
        (hidden(), "workers wait 20% of the time for what is sent, though 80% of that goes on while they compute"),
        (keys(1, 8, 0.1), "computing takes 99% of the time: nothing in the store is worth a change"),
        ([rank("worker", 0, 1, ("call", 0, 1, "init"))], "nothing was pushed while these timelines were written"),
    ],
)
def test_one_sentence_says_what_costs_most_and_what_helps(ranks: Sequence[Rank], text: str):
    assert advice(ranks, analysis_of(ranks)).startswith(text)


def test_the_report_has_a_line_for_each_rank_the_dearest_keys_and_the_advice():
    ranks = [*late(), rank("server", 0, 2, ("serve", 0, 3), ("serve", 8, 10))]
    ranks[0].lost = 7
    lines = [*report(ranks, analysis_of(ranks))]
    expected = "worker 0 on a 0.060 s 16.7% 66.3% worker 1 16.7% 0.3% 0%"
    assert " ".join(lines[2].split()) == expected
    assert "slowest: worker 1 on a; each other worker waits 19.9 ms a round for it" in lines
    assert "server 0 on a: busy for 50% of its time" in lines
    assert [line.split() for line in lines if line.startswith("w ")] == [["w", "1048576", "2", "4.950", "5.000"]]
    assert any("7 records were lost" in line for line in lines)
    assert lines[-1].startswith("advice: worker 1 on a computes 3.0 times as long")
