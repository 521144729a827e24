"""The GPU that tests run on: a fake one, or this machine's through CuPy. For tests and the programs of their jobs.

    gpus.use("fake")          # all stores of this process use one fake GPU, and so do the benchmarks
    gpu = gpus.of(store)      # a user's arrays on it
    array = gpu.array(values)
    values = gpu.values(array)

Where a store gets its GPU from is changed in this one place.
"""

from __future__ import annotations

from typing import Any


KINDS = ("fake", "cuda")


def use(kind: str, **settings: Any) -> Any:
    """Let all stores of this process use a GPU of this kind; returns a fake one, made with these settings."""
    if kind == "cuda":
        return None
    from mpikv import assembly
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.named import Spaces
    from mpikv.testing.fake_gpu import FakeGpu

    gpu = FakeGpu(**settings)
    make = assembly._spaces

    def with_device(_spaces: Any, *rest: Any, **named: Any) -> Any:
        return make(Spaces(device=DeviceSpace(gpu)), *rest, **named)

    assembly._spaces = with_device
    return gpu
