"""The events of a trace, against the rules of the format: names, rows whose slices lie within each other, arrows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from store_modes import SERVED, Mode
from traced import header, rank, together

from mpikv.commands.trace.clocks import clocks_of
from mpikv.commands.trace.events import CODEC, GPU, MOST_ARROWS, ROWS, SERVER, TRANSFERS, events_of
from mpikv.commands.trace.files import Event, Rank, read_run
from mpikv.commands.trace.rounds import in_common_time, rounds_of

MODES = {
    "direct": Mode("dist_sync", 3),
    "ring": Mode("dist_sync", 3, 0, "ring", "off", hosts="abc"),
    "servers": SERVED,
    "asynchronous": Mode("dist_async", 2),
}


def events(ranks: Any) -> list[dict[str, Any]]:
    return [*events_of(ranks, *together(ranks))]


def check(found: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Check what every trace must keep to. Returns the slices by their rows."""
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in found:
        assert {"ph", "name", "pid", "tid"} <= {*event}
        assert event["ph"] in "MXsf"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {(event["pid"], event["tid"]) for event in found if event["name"] == "thread_name"}
    assert {*rows} <= named
    assert {pid for pid, _ in rows} <= {event["pid"] for event in found if event["name"] == "process_name"}
    for slices in rows.values():
        open_until: list[int] = []
        for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            begin_ns = round(one["ts"] * 1e3)
            end_ns = begin_ns + round(one["dur"] * 1e3)
            while open_until and open_until[-1] <= begin_ns:
                open_until.pop()
            assert not open_until or end_ns <= open_until[-1], one
            open_until.append(end_ns)
    ends: dict[int, list[dict[str, Any]]] = {}
    for event in found:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append(event)
            around = rows[event["pid"], event["tid"]]
            assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in around)
    assert all([event["ph"] for event in pair] == ["s", "f"] for pair in ends.values())
    assert all(source["ts"] < target["ts"] for source, target in ends.values())
    return rows


@pytest.mark.parametrize("name", MODES)
def test_the_trace_of_a_store_keeps_to_the_format_and_has_an_arrow_from_each_contribution(name, tmp_path):
    mode = MODES[name]

    def body(store: Any) -> None:
        with store.timeline(tmp_path):
            store.init(["w", "v"], [np.zeros(12, "f"), np.zeros(5000, "f")])
            if name == "asynchronous":
                store.set_optimizer("sgd")
            for _ in range(3):
                store.pushpull("w", np.ones(12, "f"))
                requests = [store.pushpull_async(key, np.ones(n, "f")) for key, n in (("v", 5000), ("w", 12))]
                for request in requests:
                    request.wait()
            store.barrier()

    mode.run(body)
    ranks = read_run(tmp_path)
    timed = in_common_time(ranks, clocks_of(ranks))
    rounds = rounds_of(ranks, timed)
    found = [*events_of(ranks, timed, rounds)]
    rows = check(found)
    assert {pid for pid, _ in rows} == {ROWS * (i + 1) for i in range(len(ranks))}
    threads = {event["args"]["name"] for event in found if event["name"] == "thread_name"}
    at_servers = {"servers": {"requests"}, "asynchronous": {"server"}}  # of ranks of their own, and within workers
    assert threads & {"requests", "server"} == at_servers.get(name, set())
    sent = [event["name"].split()[0] for event in found if event.get("cat") in ("exchange", "pull")]
    names = Counter(sent)
    assert names["push"] == names["exchange"]
    arrows = Counter((event["name"], event["pid"]) for event in found if event["ph"] == "s")
    workers = [ROWS * (i + 1) for i, one in enumerate(ranks) if one.role[0] == "worker"]
    assert {pid for _, pid in arrows} == {*workers}
    # Three rounds of `v` and six of `w`, of which those in common memory are counted by themselves.
    assert len({name for name, _ in arrows}) == {"direct": 6, "asynchronous": 18}.get(name, 9)


def test_transfers_at_one_time_are_in_rows_of_their_own():
    def round_(begin: float, key: str) -> list[Any]:
        return [
            (kind, begin + i, begin + i + 1, key, 1, 8)
            for i, kind in enumerate(("reduce-scatter", "update", "allgather"))
        ]

    rows = check(events([rank("worker", 0, 1, *round_(0, "a"), *round_(1, "b"), *round_(3, "c"))]))
    names = {row: [one["name"] for one in slices if "round" in one["name"]] for row, slices in rows.items()}
    assert [*names.values()] == [["a, round 1", "c, round 1"], ["b, round 1"]]


def test_what_has_no_row_left_does_not_go_into_another_group():
    """Nor does it cost a look at each of those before."""
    kinds = {"exchange": (TRANSFERS, CODEC), "encode": (CODEC, GPU), "GPU": (GPU, ROWS)}
    for kind, (first, end) in kinds.items():
        some = [(kind, i, 10_000, "k", 1, 8) for i in range(600)]
        rows = {one["tid"] - ROWS for one in events([rank("worker", 0, 1, *some)]) if one["ph"] == "X"}
        assert rows == {*range(first, end)}
    threads = [Event("call", i, i + 1, "push", 0, 0, f"thread {i}") for i in range(60)]
    rows = {one["tid"] - ROWS for one in events([Rank(header("worker", 0, 1), threads)]) if one["ph"] == "X"}
    assert rows == {*range(SERVER)}


def test_of_many_owners_a_contribution_points_to_the_next_ones():
    n = 7
    own = [("push", 0, 1, "w", 1, 8), ("reduce-scatter", 1, 2, "w", 1, 8), ("update", 2, 3, "w", 1, 8)]
    found = events([rank("worker", i, n, *own) for i in range(n)])
    check(found)
    arrows = [event for event in found if event["ph"] in "sf"]
    pairs = {(source["pid"], target["pid"]) for source, target in zip(arrows[::2], arrows[1::2], strict=True)}
    expected = {(i, (i + step) % n) for i in range(n) for step in range(MOST_ARROWS)}
    assert pairs == {(ROWS * (i + 1), ROWS * (j + 1)) for i, j in expected}


def test_an_arrow_does_not_go_back_in_time_where_clocks_differ_a_little():
    first = rank("worker", 0, 1, ("push", 2, 3, "w", 1, 8), ("update", 1, 4, "w", 1, 8), ("push", 5, 6, "v", 1, 8))
    found = events([first, rank("worker", 1, 1, ("update", 1, 4, "v", 1, 8))])
    check(found)
    assert [event["ts"] for event in found if event["ph"] in "sf"] == [1000.0, 1000.001]  # `v` was added before
