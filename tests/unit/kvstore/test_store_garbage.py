"""What a step leaves, and a store that is closed, goes with the last reference to it. Python may look for cycles of
objects much later, and these hold arrays of any length.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from store_modes import FEW, THREE_HOSTS, TWO_HOSTS, Mode, modes

STEPS = 5
ON_HOST = (*(mode for mode in FEW if not mode.device), TWO_HOSTS, THREE_HOSTS)


@pytest.fixture(autouse=True)
def nobody_looks() -> Iterator[None]:
    """Nobody looks for cycles, but those who call `gc.collect`."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def step(store) -> None:
    value = np.ones(40, np.float32)
    store.pushpull("w", value, np.empty_like(value))
    store.push(["w", "v"], [value, value])
    store.pull("v", value)
    store.pushpull_async(["w", "v"], [value, value]).wait()
    store.barrier()


def begin(store) -> None:
    store.set_optimizer("adam")
    store.init(["w", "v"], [np.ones(40, np.float32)] * 2)
    step(store)


@modes(*ON_HOST)
def test_steps_leave_no_cycles(mode: Mode) -> None:
    def body(store) -> int:
        begin(store)
        step(store)
        if store.rank == 0:
            gc.collect()
        for _ in range(STEPS):
            step(store)
        found = gc.collect() if store.rank == 0 else 0
        store.barrier()
        return found

    assert mode.run(body)[0] == 0


@modes(*ON_HOST)
def test_a_closed_store_goes_with_its_last_reference(mode: Mode) -> None:
    def body(store) -> list[weakref.ref]:
        begin(store)
        return [weakref.ref(store), weakref.ref(store.strategy)]

    assert [ref() for refs in mode.run(body) for ref in refs] == [None] * 2 * mode.workers
