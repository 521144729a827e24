"""The virtual clock, and waits that are measured by it: no test of a limit takes longer than what it does."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mpikv.common.clock import MACHINE_CLOCK, VirtualClock
from mpikv.config import Config
from mpikv.engine.backoff import LONGEST_TURN, wait_until
from mpikv.errors import StallError
from mpikv.observe.activity import Activity
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores
from mpikv.transports.threads import Fabric

HOUR_S = 3600.0
TURNS = round(2 / LONGEST_TURN)  # of a wait, to its limit


def test_the_machines_time_goes_on():
    before_s = MACHINE_CLOCK.now_s()
    MACHINE_CLOCK.sleep(0.001)
    assert MACHINE_CLOCK.now_s() > before_s


def test_virtual_time_stands_still_until_somebody_lets_it_pass():
    clock = VirtualClock()
    for _ in range(10):
        clock.sleep(HOUR_S)
    assert clock.now_s() == 0
    seen, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            seen.append(clock.now_s())

    thread = threading.Thread(target=look)
    thread.start()
    clock.advance(HOUR_S, turns=4)
    stop.set()
    thread.join()
    assert set(seen) >= {HOUR_S * i / 4 for i in range(1, 5)}
    assert clock.now_s() == HOUR_S


def test_time_that_nobody_looks_at_cannot_pass():
    with pytest.raises(TimeoutError, match="0 threads look at the clock, 1 expected"):
        VirtualClock().advance(1, each_within_s=0.001)


def test_a_limit_of_an_hour_in_no_time():
    clock, failed = VirtualClock(), []

    def wait():
        try:
            wait_until(lambda: False, lambda: False, HOUR_S, lambda: TimeoutError("late"), clock=clock)
        except TimeoutError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    clock.advance(HOUR_S / 2, turns=TURNS)
    assert thread.is_alive()
    clock.advance(HOUR_S, turns=TURNS, until=lambda: not thread.is_alive())
    thread.join(10)
    assert len(failed) == 1


def test_what_a_rank_is_doing_is_told_in_the_same_time():
    clock = VirtualClock()
    activity = Activity(clock)
    clock._now_s = 5.0
    assert activity.text() == "outside the store for 5.0 s, its last call was kv.create"


@pytest.mark.parametrize("servers", [0, 1])
def test_a_stall_report_after_an_hour_of_virtual_time(servers):
    """One worker never pushes; the other one is told, after its limit and not before it. Then a server is, of both."""
    clock = VirtualClock()
    arrived, told = threading.Event(), threading.Event()

    def body(store):
        store.init("w", np.zeros(3, np.float32))
        store.barrier()
        if store.rank == 0:
            request = store.pushpull_async("w", np.ones(3, np.float32))
            arrived.set()
            try:
                request.wait()
            finally:
                told.set()
        arrived.wait(10)
        # Who waits looks, this worker's progress thread, and the server.
        clock.advance(0.5 * HOUR_S, turns=TURNS, lookers=size)
        assert not told.is_set()
        clock.advance(0.5 * HOUR_S + 1, turns=TURNS, lookers=size, until=told.is_set)
        assert told.wait(30)  # the others' answers may take as long as they like: no time passes meanwhile
        store.session.abandon()  # so that it answers no server
        for server in (thread for thread in threading.enumerate() if thread.name in server_names):
            while server.is_alive():  # else it would look at a clock that stands still for as long as Python runs
                clock.advance(HOUR_S + 1, lookers=0)
                server.join(0.01)
        raise ValueError("this worker has had its time")

    size = 2 + servers
    server_names = [f"rank {rank}" for rank in range(2, size)]
    config = Config(timeout_s=HOUR_S, shared_memory="off")
    with pytest.raises(RankError) as raised:
        spawn_stores("dist_sync", 2, body, num_servers=servers, config=config, fabric=Fabric(size, clock=clock))
    stalls = [str(error) for _, error in sorted(raised.value.errors.items()) if isinstance(error, StallError)]
    assert len(stalls) == 1 + servers
    assert "no request and no answer" in stalls[-1] or not servers
    assert "waited 3600 s in pushpull of key 'w', round 1. Not arrived: worker 1 on localhost" in stalls[0]
