"""The GPU that tests run on: a fake one, or this machine's through CuPy. For tests and the programs of their jobs.

    gpus.use("fake")          # all stores of this process use one fake GPU, and so do the benchmarks
    gpu = gpus.of(store)      # a user's arrays on it
    array = gpu.array(values)
    values = gpu.values(array)

Where a store gets its GPU from is changed in this one place.
"""

from __future__ import annotations

from functools import partial
from typing import Any


def missing() -> str:
    """Why the tests that need a GPU cannot run, "" where they can."""
    from mpikv.runtime import cuda_driver

    problem = cuda_driver.ask().problem
    if problem:
        return problem
    return "" if cuda_driver.has_cupy() else cuda_driver.NO_CUPY


def use(kind: str, **settings: Any) -> Any:
    """Let all stores of this process use a GPU of this kind; returns a fake one, made with these settings."""
    if kind == "cuda":
        return None
    from mpikv import worker_device
    from mpikv.runtime.cuda_driver import Devices
    from mpikv.testing.fake_gpu import FakeGpu

    gpu = FakeGpu(**settings)
    seen = Devices((gpu.name,))
    worker_device.find = partial(worker_device.find, ask=lambda: seen, open_driver=lambda _number: gpu)
    return gpu
