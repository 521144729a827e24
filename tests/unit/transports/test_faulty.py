"""The transport on which messages are late, overtake each other and ranks die, as a script says."""

from __future__ import annotations

import numpy as np
import pytest
from on_workers import limit

from mpikv.config import Config
from mpikv.engine.backoff import wait_until
from mpikv.errors import StallError
from mpikv.session import waits
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores
from mpikv.transports.faulty import Death, Faults, FaultyFabric, KilledError


def pair(*faults: Faults):
    """The transports of two ranks; the second one's script first."""
    fabric = FaultyFabric(2, lambda rank: faults[0] if rank == 1 else (*faults, Faults())[1])
    return fabric.rank(0), fabric.rank(1)


def late():
    return TimeoutError("a message did not come")


def received(transport, request):
    wait_until(request.test, lambda: False, 20, late)


def one(value):
    return np.array([value], np.int64)


def orders(seed: int | None) -> list[tuple[int, int]]:
    """In which order a rank finds three messages of each of two senders."""
    fabric = FaultyFabric(3, lambda rank: Faults(seed))
    for i in range(3):
        for sender in (0, 1):
            fabric.rank(sender).isend(one(i), 2, 7)
    transport, found = fabric.rank(2), []
    while len(found) < 6:
        incoming = transport.probe(7)
        if incoming is not None:
            value = one(0)
            received(transport, incoming.receive(value))
            found.append((incoming.source, int(value[0])))
    return found


def test_those_of_different_senders_overtake_each_other_as_the_seed_says():
    assert orders(None) == [(sender, i) for i in range(3) for sender in (0, 1)]
    found = [orders(seed) for seed in range(20)]
    assert found == [orders(seed) for seed in range(20)]
    assert len({tuple(order) for order in found}) > 5
    for order in found:
        for sender in (0, 1):
            assert [i for source, i in order if source == sender] == [0, 1, 2]


def test_a_rank_is_killed_after_so_many_messages():
    me, other = pair(Faults(), Faults(death=Death(2)))
    me.isend(one(1), 1, 1)
    me.isend(one(2), 1, 1)
    me.poll()
    for call in (lambda: me.isend(one(3), 1, 1), lambda: me.irecv(one(0), 1, 1), lambda: me.probe(1)):
        with pytest.raises(KilledError, match="rank 0 of 2 was killed after 2 messages"):
            call()
    values = np.zeros(2, np.int64)
    for i in range(2):
        received(other, other.irecv(values[i : i + 1], 0, 1))
    assert values.tolist() == [1, 2]


def test_a_rank_that_has_gone_silent_neither_sends_nor_receives():
    me, other = pair(Faults(), Faults(death=Death(1, silent=True)))
    before = me.irecv(one(0), 1, 1)
    me.isend(one(1), 1, 1)
    requests = [before, me.isend(one(2), 1, 1), me.irecv(one(0), 1, 1)]
    other.isend(one(3), 0, 1)
    me.poll()
    assert not any(request.test() for request in requests)
    assert me.probe(1) is None
    received(other, other.irecv(one(0), 0, 1))
    assert not other.irecv(one(0), 0, 1).test()


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_when_a_worker_dies_the_others_say_who_is_missing(name, monkeypatch):
    """Without servers, those of them that depend on it; the dead one's own error is told, too."""

    def body(store):
        store.init("w", np.zeros(4, np.float32))
        store.set_optimizer("test")
        with limit(store, 3.0 if store.rank else 0.5):  # so that the other one does not end by a limit first
            for _ in range(1000):
                store.pushpull("w", np.ones(4, np.float32))
            store.close()

    monkeypatch.setattr(waits, "ANSWER_S", 0.1)
    config = Config(timeout_s=60.0, shared_memory="off")
    faults = [Faults(), Faults(death=Death(20))]
    with pytest.raises(RankError) as raised:
        spawn_stores(name, 2, body, config=config, fabric=FaultyFabric(2, lambda rank: faults[rank]))
    errors = raised.value.errors
    assert isinstance(errors[1], KilledError)
    assert name == "dist_async" or isinstance(errors[0], StallError)
    if isinstance(errors.get(0), StallError):
        assert "worker 1 on localhost" in str(errors[0])
