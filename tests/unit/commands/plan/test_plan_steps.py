"""What `mpikv plan` says of steps: counts, the published costs, and what follows from both."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mpikv.codecs import compression
from mpikv.commands.plan import servers
from mpikv.commands.plan.step import PlannedStep, Speed, StepSettings, Workload, of_bytes, of_model
from mpikv.placement.costs import BOTH_DIRECTIONS, MESSAGE_BYTES, TO_ALL_SHARE, Costs, Link, ring_s, servers_s

FREE = Costs(message_s=0, byte_s=0, add_byte_s=0, copy_byte_s=0)
COSTS = Costs()
LINK = Link(25e6, 100e-6, 1500)
ONE = StepSettings(servers=1, take=1.0)
HEADER_BYTES = 48  # of a small key's request


def wire_s(n_bytes: float, link: Link = LINK) -> float:
    """As costs.py says: MPI's 64 bytes, and 66 + 66 / 4 for each packet."""
    n_bytes += MESSAGE_BYTES
    return (n_bytes + math.ceil(n_bytes / (link.mtu_bytes - 52)) * 82.5) / link.bytes_per_s


def among(workload: Workload, workers: int, link: Link = LINK, costs: Costs = FREE, **settings: Any) -> PlannedStep:
    """A step of workers without servers."""
    return servers.predict(workload, workers, link, costs, StepSettings(**settings))


@pytest.mark.parametrize(
    ("workers", "hosts", "segment_bytes", "wait"), [(5, 5, 60 << 10, 1), (8, 2, 5000, 1), (2, 2, 1 << 20, 3)]
)
def test_a_key_alone_takes_the_published_steps_of_a_ring(
    workers: int, hosts: int, segment_bytes: int, wait: int
) -> None:
    """wait: for so many latencies, as a long message is announced and agreed to first."""
    n_bytes = 200_000
    step_s = wait * LINK.latency_s + wire_s(min(n_bytes // workers, segment_bytes))
    found = ring_s(n_bytes, workers, LINK, FREE, hosts=hosts, segment_bytes=segment_bytes)
    assert found == pytest.approx(2 * (hosts - 1) * step_s)


def test_a_core_that_has_more_to_do_than_the_link_binds() -> None:
    n_bytes, fast = 64 << 20, Link(12.5e9, 1e-6)
    found = among(of_bytes(n_bytes), 4, fast, COSTS)
    assert found.binds == ("core", 1.0)
    # Sent, received and added once each, or twice; a quarter of it updated; all of it copied in and out.
    bytes_s = 2 * 2 * 0.75 * COSTS.byte_s + COSTS.add_byte_s + 2 * COSTS.copy_byte_s
    assert found.exchange_s == pytest.approx(n_bytes * bytes_s + 2 * found.messages * COSTS.message_s, rel=0.01)
    both = among(of_model("resnet18"), 4, fast, COSTS)
    assert both.mode == "allreduce ring+owners"
    assert both.binds == ("worker core", 1.0)


def test_ranks_of_a_host_share_its_link() -> None:
    apart, together = (among(of_bytes(16 << 20), 8, per_host=n) for n in (1, 4))
    assert together.exchange_s == pytest.approx(apart.exchange_s * (2 * 1 / 2) / (2 * 7 / 8), rel=0.01)


def test_overlap_hides_the_exchange_behind_computing() -> None:
    found = among(of_model("resnet18"), 4, Link(1.25e9, 20e-6), COSTS, compute_s=0.5)
    assert found.overlapped_s is not None
    assert 0.5 <= found.overlapped_s < 0.5 + found.exchange_s / 2
    slow = among(of_model("resnet18"), 4, LINK, COSTS, compute_s=0.5)
    assert slow.overlapped_s is not None
    assert slow.exchange_s < slow.overlapped_s < slow.exchange_s + 0.5


@pytest.mark.parametrize(("workers", "share"), [(2, 1), (4, TO_ALL_SHARE)])
def test_encoded_keys_take_the_time_of_their_bytes_in_the_link(workers: int, share: float) -> None:
    travels = compression.make("2bit")
    speeds = dict.fromkeys((travels.push, travels.pull), Speed(0, 0, 0))
    found = among(of_bytes(16 << 20), workers, compression=travels, speeds=speeds)
    assert found.mode == "allreduce owners"
    assert found.busy_s["worker link out"] == pytest.approx(found.sent_bytes / LINK.bytes_per_s / share, rel=0.1)
    assert found.exchange_s == pytest.approx(BOTH_DIRECTIONS * found.busy_s["worker link out"], rel=0.02)


# --- servers


@pytest.mark.parametrize("workers", [2, 32])
def test_the_link_of_one_server_carries_the_bytes_of_all(workers: int) -> None:
    n_bytes = 16 << 20
    found = servers.predict(of_bytes(n_bytes), workers, LINK, FREE, ONE)
    in_s = workers * 16 * wire_s(1 << 20)
    assert found.busy_s["server link in"] == pytest.approx(in_s, rel=0.01)
    assert found.busy_s["server link out"] == pytest.approx(in_s, rel=0.01)
    assert found.busy_s["worker link out"] == pytest.approx(in_s / workers, rel=0.01)
    assert in_s < found.exchange_s < 2 * in_s
    asynchronous = servers.predict(of_bytes(n_bytes), workers, LINK, FREE, ONE._replace(synchronous=False))
    assert asynchronous.exchange_s == found.exchange_s


@pytest.mark.parametrize(
    ("n_servers", "more", "busy"),
    [
        # 16 pieces of 1 MiB, of which a server has 4; one of the workers of each host sends all of them.
        (4, {}, {"worker link out": 16, "server link in": 16}),
        (4, {"per_host": 2}, {"worker link out": 16, "server link in": 16}),
        # One beside each worker: it sends three quarters, and answers three workers.
        (0, {"synchronous": False}, {"worker link out": 12 + 12}),
    ],
)
def test_hosts_share_their_link(n_servers: int, more: dict[str, object], busy: dict[str, int]) -> None:
    settings = StepSettings(servers=n_servers, take=1.0, **more)  # type: ignore[arg-type]
    found = servers.predict(of_bytes(16 << 20), 4, LINK, FREE, settings)
    for what, pieces in busy.items():
        assert found.busy_s[what] == pytest.approx(pieces * wire_s(1 << 20), rel=0.01), what


def test_a_server_that_has_more_to_do_than_the_link_binds() -> None:
    found = servers.predict(of_bytes(64 << 20), 8, Link(12.5e9, 1e-6), COSTS, ONE)
    assert found.binds[0] == "server core"
    added_s = 7 * (64 << 20) * COSTS.add_byte_s
    assert found.busy_s["server core"] == pytest.approx(16 * (64 << 20) * COSTS.byte_s + added_s, rel=0.1)


def test_servers_decode_what_workers_encode() -> None:
    """One worker and one server, which has nothing else to do."""
    travels = compression.make("2bit")
    speeds = {travels.push: Speed(2e-6, 3e-6, 0.0), travels.pull: Speed(0.0, 0.0, 0.0)}
    n_elems = 1 << 16
    found = servers.predict(of_bytes(4 * n_elems), 1, LINK, FREE, StepSettings(travels, speeds, servers=1, take=1.0))
    assert found.busy_s["worker core"] == pytest.approx(n_elems * 2e-6)
    assert found.busy_s["server core"] == pytest.approx(n_elems * 3e-6)


@pytest.mark.parametrize("synchronous", [True, False])
def test_overlap_hides_what_is_pushed_behind_computing(synchronous: bool) -> None:
    """What is pulled is not: it comes after the computing."""
    workload = Workload("even", ((1 << 18,),) * 16)
    found = servers.predict(workload, 2, LINK, FREE, ONE._replace(synchronous=synchronous, compute_s=20.0))
    assert found.overlapped_s == pytest.approx(20 + found.busy_s["server link out"], rel=0.01)
    short = servers.predict(workload, 2, LINK, FREE, ONE._replace(synchronous=synchronous, compute_s=0.01))
    assert short.overlapped_s is not None
    assert short.exchange_s <= short.overlapped_s <= short.exchange_s + 0.01


@pytest.mark.parametrize("window_share", [0.1, 1.0])
def test_what_goes_on_beside_each_other(window_share: float) -> None:
    """Pure numbers, as a placement may ask for them."""

    def exchange_s(push_s: float, answer_s: float, core_s: float, link_s: float = 3) -> float:
        return servers_s(push_s, answer_s, link_s, core_s, workers=4, window_share=window_share, wait_s=0.0)

    links_s = exchange_s(3.0, 2.0, 0.0)
    assert 3 <= links_s == exchange_s(2.0, 3.0, 0.0) <= 1.05 * (3 + 2)
    assert max(links_s, 9) <= exchange_s(3.0, 2.0, 9.0) <= links_s + 9
    # A worker beside a server pushes while others push to it: both directions have both.
    assert exchange_s(3.0, 3.0, 0.0, link_s=6) == pytest.approx(6, rel=0.05)
