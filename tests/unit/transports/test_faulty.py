"""The transport on which messages are late and overtake each other, as a script says."""

from __future__ import annotations

import numpy as np

from mpikv.engine.backoff import wait_until
from mpikv.transports.faulty import Faults, FaultyFabric


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
            receiving = incoming.receive(value := one(0))
            wait_until(receiving.test, lambda: False, 20, lambda: TimeoutError("a message did not come"))
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
