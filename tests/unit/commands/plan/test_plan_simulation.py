"""The simulated network of workers and servers: times that can be told on paper, and workers that stand for all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from mpikv.commands.plan import servers
from mpikv.commands.plan.costs import EAGER_BYTES, Costs, Link
from mpikv.commands.plan.ranks import Rank
from mpikv.commands.plan.simulation import LONGEST_TURN_BYTES, SHORTEST_TURN_BYTES, Simulation
from mpikv.commands.plan.waiting import Rhythm
from mpikv.commands.plan.workload import Workload, of_bytes, of_model
from mpikv.engine.backoff import LAST_NAP_S
from mpikv.engine.engine import BUSY_NAP_S
from mpikv.engine.request import Request
from mpikv.errors import MpikvError

POLL_S = 5e-6
FREE = Costs(message_s=0, byte_s=0, add_byte_s=0, copy_byte_s=0, poll_s=POLL_S, nap_s=0)
FAST = Link(1.25e9, 20e-6, 1500)  # on which messages come while a rank still polls
COSTS = Costs()
LINK = Link(25e6, 100e-6, 1500)
PACKET = 1500 - 52


# --- one message


def arrival_s(n_bytes: int, link: Link, hosts: tuple[str, ...] = ("a", "b"), senders: int = 1) -> list[float]:
    """When rank `senders` has received one message from each rank below it."""
    simulation = Simulation(hosts, link, FREE)
    times = []

    def receive(rank: Rank) -> Iterator[Request]:
        for request in [rank.irecv(np.empty(n_bytes, np.uint8), source, 9000) for source in range(senders)]:
            yield request
            times.append(rank.now_s)

    def send(rank: Rank) -> Iterator[Request]:
        yield rank.isend(np.empty(n_bytes, np.uint8), senders, 9000)

    receiver = simulation.ranks[senders]
    simulation.at(0.0, lambda time_s: receiver.work(time_s, lambda: receiver.start(receive(receiver))))
    for rank in simulation.ranks[:senders]:
        simulation.at(0.0, lambda time_s, rank=rank: rank.work(time_s, lambda: rank.start(send(rank))))
    simulation.run()
    return times


def wire_s(n_bytes: int, link: Link) -> float:
    """As costs.py says: MPI's 64 bytes, and 66 + 66 / 4 for each packet."""
    n_bytes += 64
    return (n_bytes + math.ceil(n_bytes / (link.mtu_bytes - 52)) * 82.5) / link.bytes_per_s


def test_a_short_message_takes_its_wire_time_and_the_latency_once() -> None:
    (time_s,) = arrival_s(10_000, FAST)
    least_s = wire_s(10_000, FAST) + FAST.latency_s
    assert least_s <= time_s <= least_s + POLL_S


def test_a_long_message_is_announced_and_agreed_to_first() -> None:
    (time_s,) = arrival_s(EAGER_BYTES + 1, FAST)
    least_s = 2 * wire_s(0, FAST) + wire_s(EAGER_BYTES + 1, FAST) + 3 * FAST.latency_s
    assert least_s <= time_s <= least_s + 3 * POLL_S


def test_two_senders_share_the_link_in_of_one_receiver() -> None:
    times = arrival_s(50_000, FAST, ("a", "b", "c"), 2)
    for count, time_s in enumerate(times, start=1):
        least_s = count * wire_s(50_000, FAST) + FAST.latency_s
        assert least_s <= time_s <= least_s + POLL_S


def test_ranks_of_one_host_need_no_link() -> None:
    (time_s,) = arrival_s(10_000_000, FAST, ("a", "a"))
    assert time_s <= 2 * POLL_S


def test_a_message_that_never_comes_is_an_error() -> None:
    simulation = Simulation(("a", "b"), LINK, FREE)
    rank = simulation.ranks[0]

    def wait() -> Iterator[Request]:
        yield rank.irecv(np.empty(1, np.uint8), 1, 9000)

    simulation.at(0.0, lambda time_s: rank.work(time_s, lambda: rank.start(wait())))
    with pytest.raises(MpikvError, match="rank 0 waits"):
        simulation.run()


# --- waiting


def test_a_rank_that_waits_for_long_sees_what_comes_half_a_nap_later_at_most() -> None:
    rhythm = Rhythm(Costs(poll_s=1e-6, nap_s=0))
    for arrival in (1e-6, 50e-6, 1e-3, 0.123):
        seen_s, _ = rhythm.look(0.0, 0, arrival)
        assert arrival <= seen_s <= arrival + LAST_NAP_S + 1e-6
    assert rhythm.look(0.0, 0, 10e-6)[0] == pytest.approx(10e-6, abs=1.1e-6)  # while it polls


def test_after_a_long_wait_a_worker_naps_at_once() -> None:
    rhythm = Rhythm(Costs(poll_s=1e-6, nap_s=0))
    _, turn = rhythm.look(0.0, 0, 0.1)
    assert turn > 0
    assert rhythm.look(1.0, turn, 1.0 + 5e-6)[0] >= 1.0 + 20e-6
    assert rhythm.look(0.0, 0, 10e-6)[1] == 0


def test_beside_a_computing_program_looks_are_rare() -> None:
    rhythm = Rhythm(Costs(poll_s=0, nap_s=0))
    assert rhythm.look_beside(0.0, 0.1 * BUSY_NAP_S) == BUSY_NAP_S
    assert rhythm.look_beside(0.0, 2.5 * BUSY_NAP_S) == pytest.approx(3 * BUSY_NAP_S)


# --- servers


def test_one_worker_and_one_server_take_out_and_back_in_turn_where_nothing_is_cut() -> None:
    found = servers.simulate(Workload("small", ((10_000,),)), 1, 1, LINK, FREE)
    there_and_back_s = wire_s(40_000 + 48, LINK) + wire_s(40_000, LINK) + 2 * LINK.latency_s
    # A server that naps sees it up to half a millisecond later.
    assert there_and_back_s <= found.exchange_s <= there_and_back_s + 2 * LAST_NAP_S
    assert (found.messages, found.sent_bytes) == (1, 40_048)


def test_a_server_for_many_workers_takes_the_time_of_all_their_bytes() -> None:
    n_bytes = 4 << 20
    for workers in (2, 4, 8):
        found = servers.simulate(of_bytes(n_bytes), workers, 1, LINK, FREE)
        in_s = workers * 4 * wire_s(1 << 20, LINK)
        assert in_s < found.exchange_s < 2 * in_s + 4 * wire_s(1 << 20, LINK)
        assert found.busy_s["server link in"] == pytest.approx(in_s, rel=0.01)
        assert found.busy_s["server link out"] == pytest.approx(in_s, rel=0.01)
        assert found.busy_s["worker link out"] == pytest.approx(in_s / workers, rel=0.01)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize(("workers", "n_servers", "within"), [(12, 2, 0.25), (12, 6, 0.25), (12, 0, 0.2)])
def test_some_workers_stand_for_all(workers: int, n_servers: int, synchronous: bool, within: float) -> None:
    """Every link carries the bytes of all, and the time is about that of all.

    Where few servers have many workers, it depends on who comes first, and that is not the same.
    """
    sizes = (3_000_000, 1_500_000, *(600_000 + 1000 * i for i in range(12)), 5000, 500, 50)
    workload = Workload("mixed", tuple((n,) for n in sizes))
    both = [
        servers.simulate(workload, workers, n_servers, LINK, COSTS, synchronous=synchronous, standing=standing)
        for standing in (workers, 4)
    ]
    for what in both[0].busy_s:
        if "link" in what and n_servers:
            assert both[1].busy_s[what] == pytest.approx(both[0].busy_s[what], rel=0.01), what
    assert (both[1].messages, both[1].sent_bytes) == (both[0].messages, both[0].sent_bytes)
    assert both[1].exchange_s == pytest.approx(both[0].exchange_s, rel=within)


def test_servers_inside_the_workers() -> None:
    found = servers.simulate(of_bytes(4 << 20), 2, 0, LINK, COSTS, synchronous=False)
    assert found.mode == "in workers, async"
    # Half of each worker's bytes go to the other one, and as many come back: each link carries both.
    assert found.busy_s["worker link out"] == pytest.approx(4 * wire_s(1 << 20, LINK), rel=0.02)


def test_one_sender_keeps_a_link_for_its_turn() -> None:
    """What is known of TCP goes into two numbers; they must not change what one sender gets."""
    assert SHORTEST_TURN_BYTES < 1 << 20 <= LONGEST_TURN_BYTES
    found = servers.simulate(of_bytes(16 << 20), 1, 1, LINK, FREE)
    assert found.exchange_s < 1.3 * 16 * wire_s(1 << 20, LINK)


def test_turns_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short values share a link in evenly, so that the last part of each comes late; long ones come one by one."""

    def exchange_s(shortest: int, workload: Workload) -> float:
        monkeypatch.setattr("mpikv.commands.plan.simulation.SHORTEST_TURN_BYTES", shortest)
        return servers.simulate(workload, 3, 1, LINK, FREE, synchronous=False).exchange_s

    lenet, long = of_model("lenet"), of_bytes(16 << 20)
    assert exchange_s(SHORTEST_TURN_BYTES, lenet) > 1.1 * exchange_s(LONGEST_TURN_BYTES, lenet)
    assert exchange_s(SHORTEST_TURN_BYTES, long) == exchange_s(LONGEST_TURN_BYTES, long)
