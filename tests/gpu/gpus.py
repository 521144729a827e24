"""The GPU that tests run on: this machine's, or a fake one of this process alone. For tests and their jobs' programs.

    gpu = gpus.use("fake")             # all stores of this process use one fake GPU, and so do the benchmarks
    array = gpu.cupy.asarray(values)   # as a user has it
    with gpu.stream(): ...             # arrays do their work in a new stream of the user's

Each rank of a job has a fake GPU of its own that claims to be the same one: such ranks go the way `host`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for programs of jobs

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


def use(kind: str, replace: Callable[[Any, str, Any], None] = setattr, *, n_gpus: int = 1) -> Any:
    """Let all stores of this process use a GPU of this kind. replace: sets an attribute. n_gpus: fake ones."""
    if kind == "cuda":
        return User(importlib.import_module("cupy"))
    import fake_cupy

    from mpikv.create import worker_device
    from mpikv.runtime.cuda_driver import Devices
    from mpikv.spaces.gpu import Gpu

    machine = fake_cupy.Machine(n_gpus)
    cupy = machine.process()

    seen = Devices(("Fake GPU",) * n_gpus)
    find = partial(worker_device.find, ask=lambda: seen, open_gpu=lambda number: Gpu(number, cupy, lambda _: True))
    replace(worker_device, "find", find)
    return User(cupy, machine)


class User:
    """A user of CuPy on GPU 0. machine: of fake GPUs."""

    def __init__(self, cupy: Any, machine: Any = None) -> None:
        self.cupy, self._machine, self.real = cupy, machine, machine is None
        self._spin = cupy.RawKernel(SPIN, "spin") if self.real else None

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def elsewhere(self, values: Any) -> Any:
        """An array on another GPU; None where there is none."""
        if self.cupy.cuda.runtime.getDeviceCount() < 2:
            return None
        with self.cupy.cuda.Device(1):
            return self.cupy.asarray(values)

    def slow(self) -> None:
        """Let the current stream take a while. A fake one's work is seen done only after it was asked for."""
        if self._spin is not None:
            self._spin((1,), (1,), (np.int64(SLOW_CYCLES),))

    def used_bytes(self) -> int:
        """Memory of the GPU that is taken, by all processes; of a fake one by this one."""
        if self.real:
            self.cupy.get_default_memory_pool().free_all_blocks()
        else:
            self.cupy.pool.free_all_blocks()
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def finish(self) -> None:
        if self.real:
            self.cupy.cuda.runtime.deviceSynchronize()
        else:
            for stream in list(self.cupy.streams.values()):
                stream.synchronize()
