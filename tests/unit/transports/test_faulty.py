"""The transport on which messages are late and overtake each other, as a script says."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.engine.backoff import wait_until
from mpikv.transports.faulty import Death, Deaths, Faults, FaultyFabric, PeerGone


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


def looks_until(ends, transport) -> int:
    """How many looks a rank makes until what `ends` does raises PeerGone."""
    for n in range(100):
        try:
            ends()
        except PeerGone:
            return n
        transport.poll()
    raise AssertionError("nothing has ended")


def test_a_dead_rank_does_nothing_more_and_the_others_learn_of_it_some_looks_later():
    deaths = Deaths({1: 3})
    fabric = FaultyFabric(3, lambda rank: Faults(seed=rank, most_looks=20), deaths=deaths)
    first, dead, last = map(fabric.rank, range(3))
    dead.isend(one(5), 0, 7)
    came, waits = first.irecv(value := one(0), 1, 7), first.irecv(one(0), 1, 7)
    wait_until(came.test, lambda: False, 20, lambda: TimeoutError("what was sent before did not come"))
    assert value[0] == 5
    dead.poll()
    with pytest.raises(Death):
        dead.isend(one(6), 0, 7)
    assert deaths.dead == {1}
    for call in (lambda: dead.probe(7), lambda: dead.irecv(one(0), 0, 7), lambda: dead.isend(one(0), 0, 7)):
        with pytest.raises(Death):
            call()
    learnt = [looks_until(waits.test, first), looks_until(lambda: last.probe(7), last)]
    assert learnt[0] != learnt[1]
    with pytest.raises(PeerGone):
        first.isend(one(0), 1, 7)


def test_what_is_under_way_between_the_living_ends_when_the_fabric_is_given_up():
    fabric = FaultyFabric(3, lambda rank: Faults(seed=rank), deaths=Deaths({1: 1}), ranks=(0, 2, 5))
    assert fabric.ended() == frozenset()
    first, last = fabric.rank(0), fabric.rank(2)
    waits, long = first.irecv(one(0), 2, 7), last.isend(np.zeros(10_000), 0, 8)
    fabric.give_up()
    assert looks_until(waits.test, first) < 10
    assert looks_until(long.test, last) < 10
