"""How deep a call goes: the frames of ours between what a user calls and the transport, for every way of a gradient."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.config import Config
from mpikv.testing.stores import spawn_stores
from mpikv.transports.threads import ThreadTransport

MOST = 8
OURS = str(Path(mpikv.__file__).parent)
WAYS = {
    "naive": (2, 0, ("a", "a"), Config(timeout_s=20, algorithm="naive")),
    "ring": (3, 0, ("a", "b", "c"), Config(timeout_s=20, algorithm="ring")),
    "halving": (4, 0, ("a",) * 4, Config(timeout_s=20, algorithm="halving_doubling")),
    "hierarchical": (4, 0, ("a", "a", "b", "b"), Config(timeout_s=20, algorithm="hierarchical")),
    "servers": (2, 1, ("a",) * 3, Config(timeout_s=20, shared_memory="off")),
}


def frames(frame: FrameType | None, outermost: str) -> list[str] | None:
    """Our functions from the store's `outermost` on, the innermost first; None where it is not among them."""
    found = []
    while frame is not None:
        name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        if frame.f_code.co_filename.startswith(OURS):
            found.append(name)
        if frame.f_code.co_name == outermost and frame.f_code.co_filename.endswith("kvstore.py"):
            return found
        frame = frame.f_back
    return None


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of each message that left inside a `push`: our functions that led to it."""
    found: list[list[str]] = []
    before = ThreadTransport.isend

    def isend(self: ThreadTransport, *arguments: Any) -> Any:
        led = frames(sys._getframe(1), "push")
        if led is not None:
            found.append(led)
        return before(self, *arguments)

    monkeypatch.setattr(ThreadTransport, "isend", isend)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_from_push_to_the_transport(way: str, sent: list[list[str]]) -> None:
    workers, servers, hosts, config = WAYS[way]

    def body(store: mpikv.KVStore) -> None:
        store.init("w", np.zeros(4000, np.float32))
        store.barrier()
        store.push("w", np.ones(4000, np.float32))
        store.pull("w")

    spawn_stores("dist_sync", workers, body, num_servers=servers, config=config, hosts=hosts)
    assert sent
    longest = max(sent, key=len)
    assert len(longest) <= MOST, longest


@pytest.mark.parametrize("way", WAYS)
def test_from_wait_to_what_is_tested(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait steps the engine until its own request is done."""
    workers, servers, hosts, config = WAYS[way]
    found: list[list[str]] = []

    class Noted:
        def __init__(self, request: Any) -> None:
            self._request = request

        def test(self) -> bool:
            led = frames(sys._getframe(1), "wait")
            if led is not None:
                found.append(led)
            return bool(self._request.test())

    def body(store: mpikv.KVStore) -> None:
        store.init("w", np.zeros(4000, np.float32))
        store.push("w", np.ones(4000, np.float32))
        before = type(store.strategy).exchange

        def exchange(*arguments: Any) -> Any:
            return [one._replace(request=Noted(one.request)) for one in before(store.strategy, *arguments)]

        monkeypatch.setattr(store.strategy, "exchange", exchange)
        store.pull_async("w").wait()

    spawn_stores("dist_sync", workers, body, num_servers=servers, config=config, hosts=hosts)
    assert found
    longest = max(found, key=len)
    assert len(longest) <= MOST, longest
