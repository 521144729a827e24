"""The virtual clock, and waits that are measured by it: no test of a limit takes longer than what it does."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mpikv.common.clock import VirtualClock
from mpikv.config import Config
from mpikv.engine.backoff import LONGEST_TURN
from mpikv.errors import StallError
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores
from mpikv.transports.threads import Fabric

HOUR_S = 3600.0
TURNS = round(2 / LONGEST_TURN)  # of a wait, to its limit


@pytest.mark.parametrize("servers", [0, 1])
def test_a_stall_report_after_an_hour_of_virtual_time(servers):
    """One worker never pushes; the other one fails after its limit and not before it, then the server does."""
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
        # Who waits looks, and the server.
        clock.advance(0.5 * HOUR_S, turns=TURNS, lookers=1 + servers)
        assert not told.is_set()
        clock.advance(0.5 * HOUR_S + 1, turns=TURNS, lookers=1 + servers, until=told.is_set)
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
