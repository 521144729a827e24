"""The GPU that tests run on: a fake one, or this machine's through CuPy. For tests and the programs of their jobs.

    gpu = gpus.use("fake")             # all stores of this process use one fake GPU, and so do the benchmarks
    array = gpu.array(values)          # as a user has it: CuPy's, or the fake GPU's own
    with gpu.stream(): ...             # arrays do their work in a new stream of the user's
    values = array.get()

Where a store gets its GPU from is changed in this one place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpikv.arrays import BFLOAT16

SLOW_CYCLES = 400_000_000  # of a kernel that takes some 0.2 s
SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""


def missing() -> str:
    """Why the tests that need a GPU cannot run, "" where they can."""
    from mpikv.runtime import cuda_driver

    problem = cuda_driver.ask().problem
    if problem:
        return problem
    return "" if cuda_driver.has_cupy() else cuda_driver.NO_CUPY


def use(kind: str, replace: Callable[[Any, str, Any], None] = setattr, **settings: Any) -> Any:
    """Let all stores of this process use a GPU of this kind. settings: of a fake one. replace: sets an attribute."""
    if kind == "cuda":
        return Cuda()
    from mpikv import worker_device
    from mpikv.runtime.cuda_driver import Devices

    fake = Fake(**settings)
    seen = Devices((fake.driver.name,))
    find = partial(worker_device.find, ask=lambda: seen, open_driver=lambda _number: fake.driver)
    replace(worker_device, "find", find)
    return fake


class Fake:
    """A user on a fake GPU."""

    real = False

    def __init__(self, **settings: Any) -> None:
        from mpikv.testing.fake_gpu import FakeGpus

        self._gpus = FakeGpus(2, **{"eager": 0.3, **settings})
        self.driver = self._gpus[0]
        self.stream = self.driver.user_stream

    def array(self, values: Any) -> Any:
        """An array with these values, in the current stream."""
        return self.driver.array(values)

    def elsewhere(self, values: Any) -> Any:
        """The same on another GPU; None where there is none."""
        return self._gpus[1].array(values)

    def holds(self, _dtype: Any) -> bool:
        """Whether arrays can have this dtype."""
        return True

    def slow(self) -> None:
        """Let the current stream take a while. The fake one's work waits until somebody asks for it."""

    def used_bytes(self) -> int:
        """Memory of the GPU that is taken, by this process."""
        return self.driver.device.used_bytes

    def finish(self) -> None:
        """Wait for all work."""
        self.driver.synchronize()


class Cuda:
    """A user of CuPy on GPU 0."""

    real = True

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._spin = cupy.RawKernel(SPIN, "spin")

    @contextlib.contextmanager
    def stream(self) -> Any:
        with self._cupy.cuda.Stream(non_blocking=True):
            yield

    def array(self, values: Any) -> Any:
        return self._cupy.asarray(values)

    def elsewhere(self, values: Any) -> Any:
        if self._cupy.cuda.runtime.getDeviceCount() < 2:
            return None
        with self._cupy.cuda.Device(1):
            return self._cupy.asarray(values)

    def holds(self, dtype: Any) -> bool:
        if dtype != BFLOAT16:
            return True
        with contextlib.suppress(TypeError, ValueError):  # CuPy before 14
            return self._cupy.asarray(np.ones(1, BFLOAT16)).get().dtype == BFLOAT16
        return False

    def slow(self) -> None:
        self._spin((1,), (1,), (np.int64(SLOW_CYCLES),))

    def used_bytes(self) -> int:
        """By all processes."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        free, total = self._cupy.cuda.runtime.memGetInfo()
        return total - free

    def finish(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()
