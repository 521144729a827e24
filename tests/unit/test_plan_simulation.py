"""The simulated network: times that can be told on paper, and one host that stands for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from mpikv.collectives.select import ALGORITHMS
from mpikv.engine.backoff import LAST_NAP_S
from mpikv.engine.engine import BUSY_NAP_S
from mpikv.engine.request import Request
from mpikv.errors import ConfigError, MpikvError
from mpikv.plan import allreduce, servers
from mpikv.plan.allreduce import hosts_of, lanes_of
from mpikv.plan.blank import blank
from mpikv.plan.costs import EAGER_BYTES, Costs, Link
from mpikv.plan.ranks import Rank
from mpikv.plan.simulation import LONGEST_TURN_BYTES, SHORTEST_TURN_BYTES, Simulation
from mpikv.plan.waiting import Rhythm
from mpikv.plan.workload import Workload, of_bytes, of_model

POLL_S = 5e-6
FREE = Costs(message_s=0, byte_s=0, add_byte_s=0, copy_byte_s=0, poll_s=POLL_S, nap_s=0)
FAST = Link(1.25e9, 20e-6, 1500)  # on which messages come while a rank still polls
COSTS = Costs()
LINK = Link(25e6, 100e-6, 1500)
PACKET = 1500 - 52


class Counted:
    """A meter."""

    def __init__(self) -> None:
        self.n_added = self.n_copied = 0

    def added(self, n_bytes: int) -> None:
        self.n_added += n_bytes

    def copied(self, n_bytes: int) -> None:
        self.n_copied += n_bytes


# --- blank arrays


def test_a_blank_array_counts_what_a_real_one_would_have_moved() -> None:
    meter = Counted()
    one, other = blank(1000, "float32", meter), np.ones(100, np.float32)
    assert (one.size, one.nbytes, one[10:20].nbytes) == (1000, 4000, 40)
    np.add(one[:100], other, out=one[:100])
    assert (meter.n_added, meter.n_copied) == (400, 0)
    one[5:10] = 3
    np.copyto(one[:20], other[:20])
    assert (meter.n_added, meter.n_copied) == (400, 20 + 80)
    assert np.concatenate([one, one[:10]]).size == 1010
    assert np.empty_like(one[:7]).nbytes == 28
    assert one.view(np.uint8).size == 4000
    assert meter.n_copied == 100 + 4040


def test_a_blank_array_refuses_what_it_would_not_count() -> None:
    with pytest.raises(TypeError, match="multiply"):
        np.multiply(blank(3, "float32"), 2)
    with pytest.raises(TypeError, match=r"np\.sort"):
        np.sort(blank(3, "float32"))


def test_blank_arrays_share_memory_with_their_own_views_alone() -> None:
    one, other = blank(10, "float32"), blank(10, "float32")
    assert np.may_share_memory(one[2:], one[:4])
    assert not np.may_share_memory(one, other)


# --- one message


def arrival_s(n_bytes: int, link: Link, hosts: tuple[str, ...] = ("a", "b"), senders: int = 1) -> list[float]:
    """When rank `senders` has received one message from each rank below it."""
    simulation = Simulation(hosts, link, FREE)
    times = []

    def receive(rank: Rank) -> Iterator[Request]:
        for request in [rank.irecv(blank(n_bytes, np.uint8), source, 9000) for source in range(senders)]:
            yield request
            times.append(rank.now_s)

    def send(rank: Rank) -> Iterator[Request]:
        yield rank.isend(blank(n_bytes, np.uint8), senders, 9000)

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
        yield rank.irecv(blank(1, np.uint8), 1, 9000)

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


# --- allreduce


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_long_ring_takes_the_time_of_its_bytes(workers: int) -> None:
    n_bytes = 16 << 20
    found = allreduce.simulate(of_bytes(n_bytes), workers, LINK, FREE)
    assert found.mode == "allreduce ring"
    assert found.sent_bytes == pytest.approx(2 * (workers - 1) * n_bytes / workers, abs=4 * workers)
    # Segments of 60 KiB are 42.5 packets; the rest is the time of one segment in each of the last steps, about.
    bound_s = found.sent_bytes / 60 / 1024 * wire_s(60 << 10, LINK)
    assert bound_s < found.exchange_s < 1.03 * bound_s + workers * wire_s(60 << 10, LINK)
    assert found.binds[0] == "link out"


@pytest.mark.grid
@pytest.mark.parametrize(
    ("workers", "per_host"), [(4, 1), (8, 1), (16, 1), (3, 1), (5, 1), (7, 1), (8, 2), (16, 4), (12, 4), (16, 2)]
)
@pytest.mark.parametrize("compute_s", [0.0, 0.02])
def test_one_host_stands_for_all(workers: int, per_host: int, compute_s: float) -> None:
    """Long lanes and short ones together: the first host alone gives the times of all, simulated rank by rank.

    Not to the last digit where ranks wait for each other in the order of their numbers.
    """
    workload = Workload("mixed", (300_000, 1000 if workers % 2 == 0 else 40_000, 70_000, 100, 2_000_000))
    link = Link(1.25e9, 20e-6)
    both = [
        allreduce.simulate(
            workload, workers, link, COSTS, per_host=per_host, compute_s=compute_s, every_rank=every_rank
        )
        for every_rank in (True, False)
    ]
    assert both[1].exchange_s == pytest.approx(both[0].exchange_s, rel=0.01)
    if compute_s:
        assert both[1].overlapped_s == pytest.approx(both[0].overlapped_s, rel=0.01)
    assert both[1].messages == both[0].messages
    lanes = len(lanes_of(workload, hosts_of(workers, per_host)))
    assert 0 <= both[1].sent_bytes - both[0].sent_bytes <= 2 * 4 * workers * lanes  # rounded up
    assert both[1].simulated.startswith(f"{per_host} of {workers}")


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_symmetry_is_exact_where_lengths_divide(algorithm: str) -> None:
    for n_elems, workers in itertools.product((1024, 100 * 1024, 1 << 20), (4, 8)):
        both = [
            allreduce.simulate(
                Workload("even", (n_elems,)), workers, LINK, COSTS, algorithm=algorithm, every_rank=every_rank
            )
            for every_rank in (True, False)
        ]
        assert (both[0].messages, both[0].sent_bytes) == (both[1].messages, both[1].sent_bytes)
        assert both[1].exchange_s == pytest.approx(both[0].exchange_s, rel=1e-9)


def test_folded_ranks_are_not_alike() -> None:
    with pytest.raises(ConfigError, match="all must be simulated"):
        allreduce.simulate(Workload("short", (100,)), 12, LINK, COSTS, every_rank=False)
    assert allreduce.simulate(Workload("short", (100,)), 12, LINK, COSTS).simulated == ""


def test_workers_of_one_host_are_refused() -> None:
    with pytest.raises(ConfigError, match="one host"):
        allreduce.simulate(of_bytes(1000), 4, LINK, COSTS, per_host=4)


def test_overlap_hides_the_exchange_behind_computing() -> None:
    found = allreduce.simulate(of_model("resnet18"), 4, Link(1.25e9, 20e-6), COSTS, compute_s=0.5)
    assert found.overlapped_s is not None
    assert 0.5 <= found.overlapped_s < 0.5 + found.exchange_s / 2


def test_lanes_are_those_of_a_trainer() -> None:
    lanes = lanes_of(of_model("resnet18"), hosts_of(4, 1))
    assert sorted(key for lane in lanes for key in lane.keys) == list(range(62))
    assert sum(lane.n_elems for lane in lanes) == 11_689_512
    assert lanes[0].keys == (60,)  # the last layer's weight fills a bucket before its bias does
    assert {lane.algorithm for lane in lanes} <= set(ALGORITHMS)


# --- servers


def test_one_worker_and_one_server_take_out_and_back_in_turn_where_nothing_is_cut() -> None:
    found = servers.simulate(Workload("small", (10_000,)), 1, 1, LINK, FREE)
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
    workload = Workload("mixed", (3_000_000, 1_500_000, *(600_000 + 1000 * i for i in range(12)), 5000, 500, 50))
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
        monkeypatch.setattr("mpikv.plan.simulation.SHORTEST_TURN_BYTES", shortest)
        return servers.simulate(workload, 3, 1, LINK, FREE, synchronous=False).exchange_s

    lenet, long = of_model("lenet"), of_bytes(16 << 20)
    assert exchange_s(SHORTEST_TURN_BYTES, lenet) > 1.1 * exchange_s(LONGEST_TURN_BYTES, lenet)
    assert exchange_s(SHORTEST_TURN_BYTES, long) == exchange_s(LONGEST_TURN_BYTES, long)
