"""What `mpikv plan` says of servers: what each link and core has to do, and the time that follows."""

from __future__ import annotations

import math

import pytest

from mpikv.codecs import compression
from mpikv.commands.plan import servers
from mpikv.commands.plan.step import Speed, StepSettings, Workload, of_bytes
from mpikv.placement.costs import MESSAGE_BYTES, Costs, Link, servers_s

FREE = Costs(message_s=0, byte_s=0, add_byte_s=0, copy_byte_s=0)
COSTS = Costs()
LINK = Link(25e6, 100e-6, 1500)
ONE = StepSettings(servers=1, take=1.0)
HEADER_BYTES = 48  # of a small key's request


def wire_s(n_bytes: float) -> float:
    """As costs.py says: MPI's 64 bytes, and 66 + 66 / 4 for each packet."""
    n_bytes += MESSAGE_BYTES
    return (n_bytes + math.ceil(n_bytes / (LINK.mtu_bytes - 52)) * 82.5) / LINK.bytes_per_s


def test_a_small_key_goes_out_and_comes_back_in_turn() -> None:
    found = servers.predict(Workload("small", ((10_000,),)), 1, LINK, FREE, ONE)
    assert found.mode == "servers, sync"
    assert (found.messages, found.sent_bytes) == (1, 40_000 + HEADER_BYTES)
    there_and_back_s = wire_s(40_000 + HEADER_BYTES) + wire_s(40_000) + 2 * LINK.latency_s
    assert found.exchange_s == pytest.approx(there_and_back_s, rel=0.05)


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


def test_a_core_that_has_more_to_do_than_the_link_binds() -> None:
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
