"""Whether a codec is worth its time: by links and by what the codec costs, the same in the model and in a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpikv.codecs import worth
from mpikv.codecs.compression import make
from mpikv.codecs.speed import FREE, Speed, quick_speed_of
from mpikv.codecs.worth import MARGIN, Worth, worth_of
from mpikv.placement.keys import KeyInfo
from mpikv.placement.links import given
from mpikv.placement.members import Members

N = 1 << 20


def compared(params: Any, hosts: str, link: str, servers: int = 0, *, updated: bool = True, **more: Any) -> Any:
    workers = len(hosts) - servers
    ranks = tuple(range(workers)), tuple(range(workers, len(hosts)))
    settings = {name: more.pop(name) for name in ("synchronous", "memory") if name in more}
    members = Members(tuple(hosts), *ranks, link=given(link), **settings)  # type: ignore[arg-type]
    return worth_of(members, KeyInfo("w", 0, (N,), np.dtype(np.float32), make(params).text, **more), updated=updated)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs and messages cost nothing: links alone count."""
    monkeypatch.setattr(worth, "quick_speed_of", lambda *_: FREE)
    monkeypatch.setattr(worth, "Costs", type("Nothing", (), {"byte_s": 0.0, "add_byte_s": 0.0}))
    monkeypatch.setattr(worth, "HANDLING_S", 0.0)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("w", [2, 3, 4, 8])
def test_bytes_among_workers(w: int) -> None:
    """2 (w-1)/w S as they are; a half of that both ways, three quarters one way."""
    hosts = "abcdefgh"[:w]
    for params, share in (("fp16", 0.75), ({"type": "fp16", "pull": "fp16"}, 0.5)):
        found = compared(params, hosts, "8gbit")
        assert found.plain_s == pytest.approx(2 * (w - 1) / w * 4 * N / 1e9)
        assert found.encoded_s == pytest.approx(share * found.plain_s)
        assert found.encodes
    gathered = compared("2bit", hosts, "8gbit", updated=False)
    assert gathered.encoded_s == pytest.approx((w - 1) * N / 4 / 1e9)


@pytest.mark.usefixtures("free")
def test_bytes_with_servers() -> None:
    """Pushes and answers go in opposite directions of the same links."""
    for synchronous in (True, False):
        hosts = "aaaA" if synchronous else "abcA"  # with all workers on one host no key is divided
        settings = {"synchronous": synchronous, "memory": False}
        plain = compared("fp16", hosts, "8gbit", 1, **settings)
        both = compared({"type": "fp16", "pull": "fp16"}, hosts, "8gbit", 1, **settings)
        assert both.encoded_s == pytest.approx(both.plain_s / 2)
        assert plain.encoded_s == pytest.approx(plain.plain_s * (1 + worth.APART / 2) / (1 + worth.APART))


@pytest.mark.usefixtures("free")
def test_workers_of_a_host_who_add_first_send_less_without_a_codec() -> None:
    found = compared({"type": "int8", "pull": "int8"}, "aaaA", "8gbit", 1)
    each = compared({"type": "int8", "pull": "int8"}, "aaaA", "8gbit", 1, memory=False)
    assert found.encoded_s == each.encoded_s
    assert found.plain_s == pytest.approx(each.plain_s / 3, rel=0.1)


def test_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that takes as long as the link saves is not worth it."""
    monkeypatch.setattr(worth, "HANDLING_S", 0.0)
    for encode_s, encodes in ((0.0, True), (0.8e-9, True), (2e-9, False)):
        cost = Speed(encode_s, 0.0, 0.0)
        monkeypatch.setattr(worth, "quick_speed_of", lambda codec, _, s=cost: s if codec.name != "none" else FREE)
        # On the host it saves 1 ns of link and some of MPI's copies.
        assert [compared("fp16", "ab", "8gbit", space=space).encodes for space in ("host", "device")] == [encodes, True]


def test_noise_decides_nothing() -> None:
    assert compared("none", "ab", "1gbit") is None
    assert compared({"type": "2bit", "force": True}, "ab", "1gbit") is None
    assert not Worth(1.0, MARGIN).encodes
    assert Worth(1.0, MARGIN + 1e-9).encodes


def test_a_speed_is_measured_once() -> None:
    codec = make("2bit").push
    found = quick_speed_of(codec, 1000)
    assert found is quick_speed_of(codec, 1023)
    assert min(found) >= 0
    assert quick_speed_of(make("none").push, 1000) == FREE
