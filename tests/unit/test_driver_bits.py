"""A driver's kernels have the bits of the programs, on a GPU: each optimizer's update, each operation, each cast.

The driver without a GPU shows that the test itself does what it says; a real one is used where CuPy finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from program_cases import DTYPES, N, Run, same_bits, update_runs
from test_program_source import KINDS, VIEWS

from mpikv.arrays import dtype_of
from mpikv.engine.backoff import wait_until
from mpikv.errors import StallError
from mpikv.spaces import source
from mpikv.spaces.cupy_driver import CupyDriver, devices
from mpikv.spaces.driver import Driver
from mpikv.testing.fake_gpu import FakeGpu

ARRAYS, BYTES = 20, 8 * (N + 1)
LIMIT_S = 60.0


def real_gpu() -> Driver:
    found = devices()
    if not found.n_gpus:
        pytest.skip(f"no kernel is run on a GPU: {found.reason}")
    return CupyDriver(0)


class Bench:
    """Memory for the arrays of a run, on a GPU and page-locked beside it."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.stream = driver, driver.stream()
        self.addresses = [driver.allocate(BYTES) for _ in range(ARRAYS)]
        self.pinned = [driver.pinned(BYTES) for _ in range(ARRAYS)]

    def put(self, arrays: Sequence[np.ndarray], offset: int = 0) -> list[int]:
        """Copy arrays there, each so many elements behind its memory's begin; return their addresses."""
        found = []
        for array, address, pinned in zip(arrays, self.addresses, self.pinned, strict=False):
            pinned[: array.nbytes] = array.reshape(-1).view(np.uint8)
            found.append(address + offset * array.itemsize)
            self.driver.copy(found[-1], pinned.ctypes.data, array.nbytes, self.stream)
        self.settle()
        return found

    def get(self, addresses: Sequence[int], like: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copy them back."""
        for address, array, pinned in zip(addresses, like, self.pinned, strict=False):
            self.driver.copy(pinned.ctypes.data, address, array.nbytes, self.stream)
        self.settle()
        pairs = zip(self.pinned, like, strict=False)
        return [pinned[: array.nbytes].view(array.dtype).reshape(array.shape).copy() for pinned, array in pairs]

    def settle(self) -> None:
        event = self.driver.record(self.stream)
        wait_until(lambda: self.driver.done(event), lambda: False, LIMIT_S, lambda: StallError("the GPU does not end"))


@pytest.fixture(scope="module", params=[FakeGpu, pytest.param(real_gpu, marks=pytest.mark.gpu)], ids=["fake", "real"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param())


def runs_of(kind: str) -> list[Run]:
    with np.errstate(all="ignore"):
        return list(KINDS[kind]()) if kind in KINDS else update_runs(dtype_of(kind))


@pytest.mark.parametrize("kind", [*(str(dtype) for dtype in DTYPES), *KINDS])
def test_a_kernel_on_the_gpu(bench: Bench, kind: str) -> None:
    for run in runs_of(kind):
        for offset in (0, 1):
            addresses = bench.put(run.before, offset)
            bench.driver.launch(run.program, run.before[0].size, addresses, run.numbers, bench.stream)
            found = bench.get(addresses, run.after)
            assert all(map(same_bits, found, run.after)), source.kernel(run.program)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("view", [view for view in VIEWS if view != "the same row again"])
def test_a_strided_copy_on_the_gpu(bench: Bench, view: str, itemsize: int) -> None:
    whole = np.arange(210).reshape(6, 5, 7).astype(f"u{itemsize}")
    seen, packed = VIEWS[view](whole), np.zeros_like(VIEWS[view](whole), order="C")
    at, to = bench.put([whole, packed])
    begin = at + seen.ctypes.data - whole.ctypes.data
    bench.driver.copy_strided((to, packed.strides), (begin, seen.strides), seen.shape, itemsize, bench.stream)
    (found,) = bench.get([to], [packed])
    assert np.array_equal(found, seen)


def test_many_keys_on_the_gpu(bench: Bench) -> None:
    run = runs_of("float16")[0]
    addresses = bench.put(run.before)
    size = [array.itemsize for array in run.before]
    parts = [(i, min(i + 8, N)) for i in range(0, N, 8)]
    entries: list[Any] = [
        (end - begin, [address + begin * one for address, one in zip(addresses, size, strict=True)], run.numbers)
        for begin, end in parts
    ]
    bench.driver.launch_many(run.program, entries, bench.stream)
    assert all(map(same_bits, bench.get(addresses, run.after), run.after))
