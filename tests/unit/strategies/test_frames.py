"""How deep the call stack is: the library's frames between a user's call and the transport, for every path of a key.

A call that waits lets the engine make steps. Messages sent by a step are limited to as many frames, counted from the
step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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
PATHS = {
    "naive": (2, 0, ("a", "a"), Config(timeout_s=20, algorithm="naive")),
    "ring": (3, 0, ("a", "b", "c"), Config(timeout_s=20, algorithm="ring")),
    "halving": (4, 0, ("a",) * 4, Config(timeout_s=20, algorithm="halving_doubling")),
    "hierarchical": (4, 0, ("a", "a", "b", "b"), Config(timeout_s=20, algorithm="hierarchical")),
    "hosted": (4, 0, ("a", "a", "b", "b"), Config(timeout_s=20)),
    "servers": (2, 1, ("a",) * 3, Config(timeout_s=20, shared_memory="off")),
}
KEYS = {"w": 4000, "long": 70_000, "short": 3}


def values() -> list[Any]:
    return [np.ones(n, np.float32) for n in KEYS.values()]


def push(store: mpikv.KVStore) -> None:
    store.push("w", np.ones(KEYS["w"], np.float32))
    store.push([*KEYS], values())


def pull(store: mpikv.KVStore) -> None:
    store.pull("w")
    store.pull([*KEYS])


def pushpull(store: mpikv.KVStore) -> None:
    """In place and into other arrays, for one key and for lists, by new calls and by prepared ones."""
    one, some = np.ones(KEYS["w"], np.float32), values()
    for _ in range(3):
        store.pushpull("w", one)
        store.pushpull("w", one, np.empty_like(one))
        store.pushpull([*KEYS], some)
    store.pushpull("short", np.ones(KEYS["short"], np.float32))


def pushpull_async(store: mpikv.KVStore) -> None:
    one = np.ones(KEYS["w"], np.float32)
    store.pushpull_async("w", one).wait()
    store.pushpull_async("w", one, np.empty_like(one)).wait()
    store.pushpull_async([*KEYS], values()).wait()


CALLS = (push, pull, pushpull, pushpull_async)
# Only with servers does a pull send messages; else it waits for a round that a push has begun.
CASES = [(path, call) for path in PATHS for call in CALLS if call is not pull or path == "servers"]


# The files with the store's functions that a user, or PyTorch's hook, calls.
ENTRANCES = ("mpikv/kvstore.py", "mpikv/calls/request.py", "mpikv/torch/gradients.py")


def frames(frame: FrameType | None, outermost: str) -> list[str] | None:
    """The library's functions on the stack, innermost first, up to the store's `outermost`; None if that is missing.

    If the engine makes a step, functions outside of that are left out.
    """
    found: list[str] = []
    stepped = False
    while frame is not None:
        name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        if frame.f_code.co_filename.startswith(OURS) and not stepped:
            found.append(name)
            stepped = frame.f_code.co_name == "step" and frame.f_code.co_filename.endswith("engine.py")
        if frame.f_code.co_name == outermost and frame.f_code.co_filename.endswith(ENTRANCES):
            return found
        frame = frame.f_back
    return None


def longest_of(path: str, outermost: str, body: Callable[[mpikv.KVStore], None], monkeypatch: Any) -> list[str]:
    """The longest chain of the library's functions from the store's `outermost` to a message."""
    found: list[list[str]] = []
    before = ThreadTransport.isend

    def isend(self: ThreadTransport, *arguments: Any) -> Any:
        led = frames(sys._getframe(1), outermost)
        if led is not None:
            found.append(led)
        return before(self, *arguments)

    monkeypatch.setattr(ThreadTransport, "isend", isend)
    workers, servers, hosts, config = PATHS[path]
    spawn_stores("dist_sync", workers, body, num_servers=servers, config=config, hosts=hosts)
    assert found
    return max(found, key=len)


@pytest.mark.parametrize(("path", "call"), CASES, ids=[f"{path}-{call.__name__}" for path, call in CASES])
def test_from_a_call_to_the_transport(path: str, call: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def body(store: mpikv.KVStore) -> None:
        store.init([*KEYS], values())
        store.barrier()
        call(store)
        store.pull("w")

    longest = longest_of(path, call.__name__, body, monkeypatch)
    assert len(longest) <= MOST, longest


@pytest.mark.parametrize("path", ["naive", "ring", "servers"])
def test_from_the_gradient_hook_to_the_transport(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch calls the hook in the backward pass; frames are counted from the hook's call of the store."""
    torch = pytest.importorskip("torch")
    from mpikv.torch import DistributedModel

    def body(store: mpikv.KVStore) -> None:
        net = torch.nn.Linear(40, 30)
        model = DistributedModel(net, store=store)
        for _ in range(3):
            model(torch.ones(2, 40)).sum().backward()

    longest = longest_of(path, "_send", body, monkeypatch)
    assert len(longest) <= MOST, longest


@pytest.mark.parametrize("path", PATHS)
def test_from_wait_to_what_is_tested(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait steps the engine until its own request is done."""
    workers, servers, hosts, config = PATHS[path]
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
        before = type(store.strategy).prepare

        def prepare(*arguments: Any, **named: Any) -> Any:
            call = before(store.strategy, *arguments, **named)
            start = call.start
            call.start = lambda priority: [one._replace(request=Noted(one.request)) for one in start(priority)]
            return call

        monkeypatch.setattr(store.strategy, "prepare", prepare)
        store.pull_async("w").wait()

    spawn_stores("dist_sync", workers, body, num_servers=servers, config=config, hosts=hosts)
    assert found
    longest = max(found, key=len)
    assert len(longest) <= MOST, longest
