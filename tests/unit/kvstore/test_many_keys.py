"""What a list of many keys costs, in calls of the package's functions for each key: nothing may creep in unnoticed.

Thread ranks on one host initialise the keys and then add them in one call. How often a rank has to ask whether
something has come depends on the order of the threads: a call that has answered "no" is not counted, nor is what it
called. Left out as well are the engine, the transport, and what is called less than once for each key.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from mpikv.config import Config
from mpikv.kvstore import KVStore
from mpikv.testing.stores import spawn_stores

KEYS = 500
WORKERS = 2


def calls_during(call: Callable[[], None]) -> Counter[CodeType]:
    """How often this thread calls which functions of the package, without the calls that have returned False."""
    ended: list[CodeType] = []
    begun: list[int] = []  # of each call under way: how many had ended before it

    def profile(frame: FrameType, event: str, returned: Any) -> None:
        if event not in ("call", "return") or "/mpikv/" not in frame.f_code.co_filename:
            return
        if event == "call":
            begun.append(len(ended))
        elif begun:
            before = begun.pop()
            if returned is False:
                del ended[before:]
            else:
                ended.append(frame.f_code)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Counter(ended)


def calls_per_key(call: Callable[[], None]) -> Counter[str]:
    """Whole calls for each key, by the function's file and name."""
    found: Counter[str] = Counter()
    for code, count in calls_during(call).items():
        package, file = code.co_filename.split("/")[-2:]
        if count >= KEYS and package not in ("engine", "transports"):
            found[f"{package}/{file}: {code.co_name}"] += count // KEYS
    return found


def counted(shared_memory: str) -> list[tuple[Counter[str], Counter[str]]]:
    """Of each worker: the calls for each key of `init`, and of the first `pushpull`."""

    def body(store: KVStore) -> tuple[Counter[str], Counter[str]]:
        keys, values = [f"key {i}" for i in range(KEYS)], [np.ones(64, np.float32) for _ in range(KEYS)]
        initialised = calls_per_key(lambda: store.init(keys, values))
        pushed = calls_per_key(lambda: store.pushpull(keys, values))
        assert all(np.all(value == WORKERS) for value in values)
        return initialised, pushed

    config = Config(timeout_s=60, shared_memory=shared_memory, progress="calls")
    return spawn_stores("dist_sync", WORKERS, body, config=config)


@pytest.mark.parametrize(("shared_memory", "most"), [("auto", (70, 50)), ("off", (70, 175))])
def test_calls_of_functions_for_each_key(shared_memory: str, most: tuple[int, int]) -> None:
    for found in counted(shared_memory):
        for one, limit in zip(found, most, strict=True):
            assert sum(one.values()) <= limit, one.most_common()
        # What only rounds of single keys need is not made before one comes.
        assert ("placement/labels.py: begin" in found[1]) == (shared_memory == "off")
