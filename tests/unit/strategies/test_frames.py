"""How deep the call stack is: the library's frames between a user's call and the transport, for every path of a key.

A call that waits lets the engine make steps. Messages sent by a step are limited to as many frames, counted from the
step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from store_modes import Mode

import mpikv
from mpikv.transports.threads import ThreadTransport

MOST = 8
OURS = str(Path(mpikv.__file__).parent)
PATHS = {
    "owners": Mode("dist_sync", 2, algorithm="owners"),
    "both": Mode("dist_sync", 2, hosts="ab"),  # a call has keys of both kinds
    "ring": Mode("dist_sync", 3, algorithm="ring", hosts="abc"),
    "hosted": Mode("dist_sync", 4, hosts="aabb"),
    "servers": Mode("dist_sync", 2, 1, memory="off"),
    "divided": Mode("dist_sync", 3, 1, hosts="abcd", take="0.5"),
    "divided, added on hosts": Mode("dist_sync", 4, 1, hosts="aabbc", take="0.5"),
}
# The files with the store's functions that a user, or PyTorch's hook, calls.
ENTRANCES = ("mpikv/kvstore.py", "mpikv/calls/request.py", "mpikv/torch/gradients.py")
KEYS = {"w": 4000, "long": 70_000, "short": 3}


def values() -> list[Any]:
    return [np.ones(n, np.float32) for n in KEYS.values()]


def calls(store: mpikv.KVStore) -> None:
    """In place and into other arrays, for one key and for lists, by new calls and by prepared ones."""
    one, some = np.ones(KEYS["w"], np.float32), values()
    store.push("w", one)
    store.push([*KEYS], some)
    store.pull("w")
    store.pull([*KEYS])
    for _ in range(3):
        store.pushpull("w", one)
        store.pushpull("w", one, np.empty_like(one))
        store.pushpull([*KEYS], some)
    store.pushpull_async("w", one, np.empty_like(one)).wait()
    store.pushpull_async([*KEYS], some).wait()


def frames(frame: FrameType | None, outermost: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """Which of the store's `outermost` was called, and the library's functions on the stack up to it, innermost first.

    None if there is none. If the engine makes a step, functions outside of that are left out.
    """
    found: list[str] = []
    stepped = False
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(OURS) and not stepped:
            found.append(name)
            stepped = name == "step" and frame.f_code.co_filename.endswith("engine.py")
        if name in outermost and frame.f_code.co_filename.endswith(ENTRANCES):
            return name, found
        frame = frame.f_back
    return None


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Of each function that a user calls, the longest chain of the library's functions to a message, or to a test."""
    found: dict[str, list[str]] = {}

    def note(frame: FrameType, *outermost: str) -> None:
        led = frames(frame, outermost)
        if led is not None and len(led[1]) > len(found.get(led[0], ())):
            found[led[0]] = led[1]

    before = ThreadTransport.isend

    def isend(self: ThreadTransport, *arguments: Any) -> Any:
        note(sys._getframe(1), "push", "pull", "pushpull", "pushpull_async", "wait", "_send")
        return before(self, *arguments)

    monkeypatch.setattr(ThreadTransport, "isend", isend)
    return found


@pytest.mark.parametrize("path", PATHS)
def test_from_a_call_to_the_transport(path: str, longest: dict[str, list[str]]) -> None:
    def body(store: mpikv.KVStore) -> None:
        store.init([*KEYS], values())
        store.barrier()
        calls(store)

    PATHS[path].run(body, bigarray_bound_elems=10**6)
    # Only with servers does a pull send messages; else it waits for a round that a push has begun.
    assert {"push", "pushpull", "pushpull_async", *(["pull"] if path == "servers" else [])} <= longest.keys()
    assert {name: found for name, found in longest.items() if len(found) > MOST} == {}


@pytest.mark.parametrize("path", ["owners", "ring", "servers", "divided", "divided, added on hosts"])
def test_from_the_gradient_hook_to_the_transport(path: str, longest: dict[str, list[str]]) -> None:
    """PyTorch calls the hook in the backward pass; frames are counted from the hook's call of the store."""
    torch = pytest.importorskip("torch")
    from mpikv.torch import DistributedModel

    def body(store: mpikv.KVStore) -> None:
        model = DistributedModel(torch.nn.Linear(40, 30), store=store)
        for _ in range(3):
            model(torch.ones(2, 40)).sum().backward()

    PATHS[path].run(body)
    assert 0 < len(longest["_send"]) <= MOST, longest
