"""Clocks of hosts that differ: what ranks record of them is enough to put their times together."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from virtual_clock import VirtualClock

from mpikv.commands.trace.clocks import clocks_of
from mpikv.commands.trace.files import read_run
from mpikv.commands.trace.rounds import complete, in_common_time, rounds_of, too_early
from mpikv.config import Config
from mpikv.observe.recorder import Recorder
from mpikv.session.clocks import EVERY_S, MEET_S, PATIENCE_S, PROBES, ClockProbes
from mpikv.testing.stores import spawn_stores
from mpikv.transports.threads import Fabric

OFFSETS_S = (0.0, 3.7, -250.25, 1e5)  # of the clock of each rank


class SkewedClock:
    sleep = staticmethod(time.sleep)

    def __init__(self, offset_s: float) -> None:
        self._offset_s = offset_s

    def now_s(self) -> float:
        return time.monotonic() + self._offset_s


class SkewedFabric(Fabric):
    def rank(self, rank: int) -> Any:
        transport: Any = super().rank(rank)
        transport.clock = SkewedClock(OFFSETS_S[rank])
        transport.recorder = Recorder(transport.clock)
        return transport


def machines_differ(directory: Path) -> None:
    for path in directory.glob("*.jsonl"):
        first, *others = path.read_text().splitlines()
        header = json.loads(first)
        header["machine"] = f"{header['role']} {header['number']}"
        path.write_text("\n".join([json.dumps(header), *others]) + "\n")


@pytest.mark.parametrize(("hosts", "servers"), [("abc", 0), ("abcd", 2)])
def test_times_of_hosts_are_put_together_within_what_is_claimed(hosts, servers, tmp_path):
    fabric = SkewedFabric(len(hosts), hosts)
    workers = len(hosts) - servers

    def body(store: Any) -> None:
        with store.timeline(tmp_path):
            store.init("w", np.zeros(3000, np.float32))
            for _ in range(5):
                store.pushpull("w", np.ones(3000, np.float32))
        store.barrier()

    config = Config(timeout_s=30, shared_memory="off", algorithm="ring", server_placement="last", servers_take="all")
    spawn_stores("dist_sync", workers, body, num_servers=servers, config=config, fabric=fabric, hosts=hosts)
    machines_differ(tmp_path)
    ranks = read_run(tmp_path)
    clocks = clocks_of(ranks)
    of_rank = [clocks[f"worker {i}" if i < workers else f"server {i - workers}"] for i in range(len(hosts))]
    errors_ns = [1e3 if clock.error_ns is None else clock.error_ns + 1e3 for clock in of_rank]  # and rounding
    for clock, offset_s, error_ns in zip(of_rank, OFFSETS_S, errors_ns, strict=False):
        assert clock.error_ns is not None
        at_s = ranks[0].events[0].begun_ns / 1e9  # by the first clock
        assert abs(clock.common((at_s + offset_s) * 1e9) - at_s * 1e9) <= error_ns
    rounds = rounds_of(ranks, in_common_time(ranks, clocks))
    assert len([*complete(ranks, rounds)]) == 5
    n, _, most_us = too_early(ranks, rounds)
    assert n == 5 * (1 if servers else workers)
    assert most_us <= 2 * max(errors_ns) / 1e3


def probing(rank: int, hosts: str) -> tuple[ClockProbes, Any, VirtualClock]:
    clock = VirtualClock()
    sent: list[Any] = []
    messages = SimpleNamespace(
        acts={},
        due=[],
        sent=sent,
        workers=SimpleNamespace(rank=rank, hosts=tuple(hosts)),
        engine=SimpleNamespace(lock=threading.Lock()),
        send_to=lambda worker, message: sent.append((worker, message)),
    )
    recorder = Recorder(clock)
    recorder.on = True
    return ClockProbes(messages, recorder), messages, clock  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "hosts"), [(0, "ab"), (1, "aa"), (2, "abb")])
def test_nobody_asks_a_worker_of_its_own_host_and_one_of_a_host_asks(rank, hosts):
    probes, messages, _ = probing(rank, hosts)
    probes.begin()
    assert messages.due == []


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_long_for_the_first_answers(rank):
    probes, messages, clock = probing(rank, "ab")
    messages.engine.step = lambda: clock.advance(1e-3, lookers=0) or [due() for due in messages.due]
    probes.begin()
    probes.meet()
    assert clock.now_s() == pytest.approx(MEET_S, abs=2e-3)


def test_a_worker_asks_again_and_again_and_anew_where_an_answer_is_lost():
    probes, messages, clock = probing(1, "ab")
    probes.begin()
    probes.begin()  # another timeline
    (due,) = messages.due

    def answer(number: int) -> None:
        clock.advance(1e-4, lookers=0)
        messages.acts["time is"](0, {"number": number, "time_s": 5.0})

    for i in range(PROBES):
        due()
        due()
        assert messages.sent[-1] == (0, {"kind": "time", "number": i + 1})
        if i != 3:
            answer(i + 1)
        else:
            clock.advance(PATIENCE_S + 0.1, lookers=0)
            due()
        answer(i + 1)  # once more, or too late
    due()
    assert len(messages.sent) == PROBES
    records = probes._recorder.rings()[0].take()
    assert len(records) == PROBES - 1
    assert {(kind, round((ended - begun) * 1e6), *what) for kind, begun, ended, what, *_ in records} == {
        ("clock", 100, "worker", 0, 5 * 10**9)
    }
    clock.advance(EVERY_S, lookers=0)
    due()
    assert len(messages.sent) == PROBES + 1
    answer(PROBES + 1)
    probes._recorder.on = False
    due()
    assert messages.due == []
