"""Where keys are cut between workers and owners: the optimum of BytePS's model, small keys, links that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpikv.codecs.compression import wire_of
from mpikv.config import Config
from mpikv.placement import cut
from mpikv.placement.cut import GAIN, SHARES, SHORT_BYTES, cut_of, link_s, seconds, servers_share
from mpikv.placement.encoding import Wire
from mpikv.placement.keys import KeyInfo
from mpikv.placement.links import ASSUMED, given
from mpikv.placement.members import Members

LONG = 64 << 20
WIRE = Wire(LONG, LONG)


def members(workers: str, servers: str, rates: tuple[float, ...] = (), **settings: object) -> Members:
    """Of ranks on hosts that are called by one letter each."""
    n, hosts = len(workers), (*workers, *servers)
    ranks = tuple(range(n)), tuple(range(n, n + len(servers)))
    link = given(str(settings.pop("link", "auto"))) or ASSUMED
    link = replace(link, by_host=tuple(zip(hosts, rates, strict=False)))
    return Members(hosts, *ranks, config=Config(**settings), link=link)  # type: ignore[arg-type]


def key(n_elems: int, **more: object) -> KeyInfo:
    return KeyInfo("w", 0, (n_elems,), np.dtype(np.float32), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("k", range(1, 9))
def test_equal_links_end_together(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theorem 1 of the source, but for the grid of shares, where a server's link takes what its bytes take."""
    monkeypatch.setattr(cut, "SERVER_LINK", 1.0)
    store = members("abcdefgh"[:n], "ABCDEFGH"[:k], link="8gbit,1us")
    share = min(1.0, 2 * k * (n - 1) / (n * n + k * n - 2 * k))
    best = max(2 * (n - 1) / n * (1 - share) + share, n * share / k)
    found = min(link_s(store, part / SHARES) for part in range(SHARES + 1)) * 1e9
    assert best - 1e-9 <= found <= best + n / k / SHARES + 1e-9
    ends = [link_s(store, end) * 1e9 for end in (0.0, 1.0)]
    assert ends == pytest.approx([2 * (n - 1) / n, max(1.0, n / k)])


@pytest.mark.parametrize("link", ["200mbit,100us", "10gbit,20us", "100gbit,2us"])
@pytest.mark.parametrize(("workers", "servers"), [("ab", "A"), ("abc", "AB"), ("abcdefg", "AB"), ("aabb", "A")])
def test_no_key_is_slower_than_whole(workers: str, servers: str, link: str) -> None:
    store = members(workers, servers, link=link)
    for n_bytes in (4, 1 << 12, 1 << 16, 1 << 20, LONG):
        share = servers_share(store, n_bytes)
        ends = [seconds(store, n_bytes, end) for end in (0.0, 1.0)]
        assert seconds(store, n_bytes, share) <= min(ends)
        best = float(ends[1] < ends[0])
        assert share in (0.0, 1.0) or seconds(store, n_bytes, share) < GAIN[best] * min(ends)


@pytest.mark.parametrize(("k", "share"), [(1, 0.322), (2, 0.581), (4, 1.0)])
@pytest.mark.parametrize("per_host", [2, 3, 8])
def test_several_workers_of_a_host_count_as_one(k: int, share: float, per_host: int) -> None:
    alone, store = members("abcd", "ABCD"[:k]), members("a" * per_host + "bcd" * per_host, "ABCD"[:k])
    # 1.5 (1 - s) + s = 1.12 * 4 s / k; with 4 servers that would save too little.
    assert servers_share(alone, LONG) == pytest.approx(share, abs=1 / SHARES)
    assert store.is_added_on_hosts(key(LONG))
    assert servers_share(store, LONG, added=True) == pytest.approx(share, abs=1 / SHARES)
    for part in (0.0, 0.3, 1.0):
        assert link_s(store, part, added=True) == link_s(alone, part)
    assert link_s(store, 1.0) == pytest.approx(max(per_host, cut.SERVER_LINK * 4 * per_host / k) / ASSUMED.bytes_per_s)
    assert servers_share(store, LONG) == 0.0  # where each of them pushes by itself, their link has too much to carry


def test_what_is_added_on_hosts() -> None:
    store = members("abab", "AB")
    assert store.speakers == (0, 1)
    assert store.is_added_on_hosts(key(1 << 14))
    assert store.is_added_on_hosts(key(1 << 14)._replace(dtype=np.dtype(np.int32)))
    for other in (
        key((1 << 14) - 1),  # it shares messages
        key(LONG, sparse=True),
        key(LONG, space="device"),
        key(LONG, codec="fp16"),
        key(LONG)._replace(dtype=np.dtype(np.float16)),
    ):
        assert not store.is_added_on_hosts(other)
    for none in (
        members("ab", "AB"),
        members("aabb", ""),
        members("aabb", "Ab"),  # there workers and servers share the memory
        members("aabb", "AB", shared_memory="off"),
        members("aabb", "AB", algorithm="ring"),
        replace(members("aabb", "AB"), memory=False),
        replace(members("aabb", "AB"), synchronous=False),
    ):
        assert not none.is_added_on_hosts(key(LONG))


def test_which_stores_divide_keys() -> None:
    assert members("ab", "AB").divides
    assert not members("ab", "Ab").divides  # by itself only where servers have hosts of their own
    assert not members("aa", "AB", shared_memory="off").divides  # and workers have several, whose links are busy
    assert members("ab", "Ab", servers_take=0.5).divides
    assert not members("ab", "AB", servers_take="all").divides
    assert not members("ab", "").divides
    assert not Members(("a", "A"), (0,), (1,), synchronous=False).divides


def test_the_share_that_is_asked_for() -> None:
    store = members("ab", "ab", servers_take=0.25)
    assert cut_of(store, key(100), WIRE, whole=False) == 75
    assert cut_of(store, key(100), WIRE._replace(step=8), whole=False) == 72  # whole rows of a codec
    assert cut_of(store, key(1), WIRE, whole=False) == 1
    assert cut_of(store, key(0), WIRE, whole=False) == 0
    assert cut_of(store, key(100), WIRE, whole=True) == 0  # an optimizer that needs all of it
    assert cut_of(store, key(100, sparse=True), WIRE, whole=False) == 0
    assert cut_of(store, key(100, space="device"), WIRE, whole=False) == 0
    nothing = members("ab", "ab", servers_take=0.0)
    assert cut_of(nothing, key(100), WIRE, whole=True) == 100


SHORT, SHORT_OF_HOSTS = (SHORT_BYTES[path] // 4 - 1 for path in ("ring", "hosted"))
HALF, TWO_BIT = np.dtype(np.float16), '{"type": "2bit"}'
# Hosts of workers, elements, of the key, settings, whether its owners are services in the workers.
WITHOUT_SERVERS: list[tuple[str, int, dict[str, Any], dict[str, Any], bool]] = [
    ("ab", SHORT, {}, {}, True),
    ("ab", SHORT + 1, {}, {}, False),
    ("aab", SHORT_OF_HOSTS, {}, {}, True),
    ("aab", SHORT_OF_HOSTS + 1, {}, {}, False),
    ("aa", SHORT, {}, {}, False),
    ("aa", SHORT, {}, {"shared_memory": "off"}, True),
    *(("ab", SHORT, {}, {"algorithm": name}, name == "owners") for name in ("ring", "native", "owners")),
    ("aa", LONG, {}, {"algorithm": "owners"}, True),
    ("ab", LONG, {"dtype": HALF}, {}, True),  # round a ring they would be float32
    ("ab", LONG, {"dtype": HALF}, {"algorithm": "ring"}, False),
    ("aa", LONG, {"sparse": True}, {}, True),
    *(("ab", LONG, {"codec": TWO_BIT}, {"algorithm": name}, True) for name in ("auto", "ring")),
    ("aaabbb", LONG, {"codec": TWO_BIT}, {}, False),  # in plain values a host sends its sum alone
    ("aa", SHORT, {"codec": TWO_BIT}, {}, False),
    ("aa", SHORT, {"codec": '{"force": true, "type": "2bit"}'}, {}, True),
    *(("ab", SHORT, {"space": "device"}, {"device_path": name}, name == "host") for name in ("nccl", "mpi", "host")),
]


@pytest.mark.parametrize(("workers", "n", "more", "settings", "owners"), WITHOUT_SERVERS)
def test_the_way_of_a_key_without_servers(
    workers: str, n: int, more: dict[str, Any], settings: dict[str, Any], owners: bool
) -> None:
    device_path: Any = settings.get("device_path", "none")
    store = replace(members(workers, "", **settings), device_path=device_path)
    info = key(n)._replace(**more)
    assert cut_of(store, info, wire_of(info), updated=True) == (0 if owners else n)
