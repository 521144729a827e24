"""What `mpikv plan` says of steps: counts, the published costs, and what follows from both."""

from __future__ import annotations

import math

import pytest

from mpikv.codecs import compression
from mpikv.collectives.select import ALGORITHMS
from mpikv.commands.plan import allreduce, servers
from mpikv.commands.plan.allreduce import buckets_of, hosts_of
from mpikv.commands.plan.step import Speed, StepSettings, Workload, of_bytes, of_model
from mpikv.errors import ConfigError
from mpikv.placement.algorithms import LINK_SEGMENT_BYTES
from mpikv.placement.costs import MESSAGE_BYTES, TO_ALL_SHARE, Costs, Link, allreduce_s, servers_s

FREE = Costs(message_s=0, byte_s=0, add_byte_s=0, copy_byte_s=0)
COSTS = Costs()
LINK = Link(25e6, 100e-6, 1500)
ONE = StepSettings(servers=1, take=1.0)
HEADER_BYTES = 48  # of a small key's request


def wire_s(n_bytes: float, link: Link = LINK) -> float:
    """As costs.py says: MPI's 64 bytes, and 66 + 66 / 4 for each packet."""
    n_bytes += MESSAGE_BYTES
    return (n_bytes + math.ceil(n_bytes / (link.mtu_bytes - 52)) * 82.5) / link.bytes_per_s


def alone_s(algorithm: str, n_bytes: int, workers: int) -> float:
    return allreduce_s(algorithm, n_bytes, workers, LINK, FREE, hosts=workers, segment_bytes=LINK_SEGMENT_BYTES)


@pytest.mark.parametrize("workers", [2, 3, 64])
def test_a_long_ring_takes_the_time_of_its_bytes(workers: int) -> None:
    n_bytes = 16 << 20
    found = allreduce.predict(of_bytes(n_bytes), workers, LINK, FREE)
    assert found.mode == "allreduce ring"
    assert found.sent_bytes == pytest.approx(2 * (workers - 1) * n_bytes / workers, abs=4 * workers)
    assert found.exchange_s == pytest.approx(found.sent_bytes / 60 / 1024 * wire_s(60 << 10), rel=0.02)
    assert found.binds[0].startswith("link")


@pytest.mark.parametrize(
    ("algorithm", "workers", "steps"),
    [
        ("naive", 4, [(0.25, 3)] * 2),
        ("ring", 5, [(0.2, 1)] * 8),
        ("halving_doubling", 8, [(part, 1) for part in (0.5, 0.25, 0.125) for _ in "ab"]),
        ("halving_doubling", 5, [(1, 1)] * 2 + [(0.5, 1), (0.25, 1)] * 2),
        ("hierarchical", 4, [(0.25, 1)] * 6),
    ],
)
def test_a_short_exchange_takes_its_published_steps(
    algorithm: str, workers: int, steps: list[tuple[float, int]]
) -> None:
    """steps: the part of the bytes, and the messages of one rank, in each of the steps that follow each other."""
    n_bytes = 40_000
    expected_s = sum(LINK.latency_s + messages * wire_s(int(part * n_bytes)) for part, messages in steps)
    assert alone_s(algorithm, n_bytes, workers) == pytest.approx(expected_s)


def test_a_long_message_is_announced_and_agreed_to_first() -> None:
    assert alone_s("naive", 1 << 20, 2) == pytest.approx(2 * (3 * LINK.latency_s + wire_s(1 << 19)))


def test_a_core_that_has_more_to_do_than_the_link_binds() -> None:
    fast = Link(12.5e9, 1e-6)
    found = allreduce.predict(of_model("resnet18"), 4, fast, COSTS)
    assert found.binds == ("core", 1.0)
    n_bytes = of_model("resnet18").n_bytes
    # Sent, received and added once each, or twice; a quarter of it updated; all of it copied in and out.
    bytes_s = 2 * 2 * 0.75 * COSTS.byte_s + COSTS.add_byte_s + 2 * COSTS.copy_byte_s
    assert found.exchange_s == pytest.approx(n_bytes * bytes_s + 2 * found.messages * COSTS.message_s, rel=0.01)


def test_of_many_workers_those_of_one_host_are_counted() -> None:
    """All others send as much, up to an element."""
    workload = Workload("even", ((1 << 16,), (1 << 20,)))
    few, many = (allreduce.predict(workload, workers, LINK, COSTS) for workers in (16, 32))
    assert few.sent_bytes == 2 * 15 * workload.n_bytes // 16
    assert many.sent_bytes == 2 * 31 * workload.n_bytes // 32


def test_workers_of_one_host_are_refused() -> None:
    with pytest.raises(ConfigError, match="one host"):
        allreduce.predict(of_bytes(1000), 4, LINK, COSTS, StepSettings(per_host=4))


def test_ranks_of_a_host_share_its_link() -> None:
    apart, together = (allreduce.predict(of_bytes(16 << 20), 8, LINK, FREE, StepSettings(per_host=n)) for n in (1, 4))
    assert together.mode == "allreduce hierarchical"
    assert together.exchange_s == pytest.approx(apart.exchange_s * (2 * 1 / 2) / (2 * 7 / 8), rel=0.01)


def test_overlap_hides_the_exchange_behind_computing() -> None:
    found = allreduce.predict(of_model("resnet18"), 4, Link(1.25e9, 20e-6), COSTS, StepSettings(compute_s=0.5))
    assert found.overlapped_s is not None
    assert 0.5 <= found.overlapped_s < 0.5 + found.exchange_s / 2
    slow = allreduce.predict(of_model("resnet18"), 4, LINK, COSTS, StepSettings(compute_s=0.5))
    assert slow.overlapped_s is not None
    assert slow.exchange_s < slow.overlapped_s < slow.exchange_s + 0.5


@pytest.mark.parametrize("rate", [25e6, 125e9])
def test_one_bucket_has_nothing_to_overlap_with(rate: float) -> None:
    """Whatever binds: it leaves at the end of the computing, and takes as long as then."""
    found = allreduce.predict(of_bytes(16 << 20), 2, Link(rate, 20e-6), COSTS, StepSettings(compute_s=0.003))
    assert found.overlapped_s == pytest.approx(0.003 + found.exchange_s)


def test_buckets_are_those_of_a_trainer() -> None:
    found = buckets_of(of_model("resnet18"), hosts_of(4, 1))
    assert sorted(key for bucket in found for key in bucket.keys) == list(range(62))
    assert sum(bucket.info.n_elems for bucket in found) == 11_689_512
    assert found[0].keys == (60,)  # the last layer's weight fills a bucket before its bias does
    assert {bucket.placement.algorithm for bucket in found} <= set(ALGORITHMS)


@pytest.mark.parametrize(
    ("n_bytes", "algorithm", "workers", "share"),
    [
        (30_000, "naive", 2, 1),
        (30_000, "naive", 4, TO_ALL_SHARE),
        (30_000, "halving_doubling", 5, 1),
        (16 << 20, "ring", 5, 1),
    ],
)
def test_a_link_is_not_filled_where_all_send_to_all(n_bytes: int, algorithm: str, workers: int, share: float) -> None:
    """But by two hosts it is, and where hosts send to one other at a time."""
    found = allreduce.predict(of_bytes(n_bytes), workers, LINK, FREE)
    assert found.mode == f"allreduce {algorithm}"
    (bucket,) = buckets_of(of_bytes(n_bytes), hosts_of(workers, 1))
    counts = [allreduce.counted(bucket, rank, hosts_of(workers, 1), {}) for rank in range(workers)]
    filled_s = max(sum(half.link_s(LINK)[0] for half in halves) for halves in counts)
    assert found.busy_s["link out"] == pytest.approx(filled_s / share)


@pytest.mark.parametrize(("workers", "share"), [(2, 1), (4, TO_ALL_SHARE)])
def test_neither_is_it_by_encoded_keys(workers: int, share: float) -> None:
    """Nothing but the link costs time here: exactly its bytes, and the latencies of one way out and back."""
    travels = compression.make("2bit")
    step = StepSettings(travels, speeds=dict.fromkeys((travels.push, travels.pull), Speed(0, 0, 0)))
    found = allreduce.predict(of_bytes(16 << 20), workers, LINK, FREE, step)
    assert found.mode == "allreduce owners"
    assert found.exchange_s == pytest.approx(found.busy_s["link out"] + 2 * LINK.latency_s)
    assert found.busy_s["link out"] == pytest.approx(found.sent_bytes / LINK.bytes_per_s / share, rel=0.1)


# --- servers


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
