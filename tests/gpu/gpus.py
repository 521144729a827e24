"""The GPU that tests run on: a fake one, or this machine's through CuPy. For tests and the programs of their jobs.

    gpus.use("fake")          # all stores of this process use one fake GPU, and so do the benchmarks
    gpu = gpus.of(store)      # a user's arrays on it
    array = gpu.array(values)
    values = gpu.values(array)

Where a store gets its GPU from is changed in this one place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

<<<<<<< HEAD

def missing() -> str:
    """Why the tests that need a GPU cannot run, "" where they can."""
    from mpikv.runtime import cuda_driver

    problem = cuda_driver.ask().problem
    if problem:
        return problem
    return "" if cuda_driver.has_cupy() else cuda_driver.NO_CUPY
=======
KINDS = ("fake", "cuda")
>>>>>>> main


def use(kind: str, **settings: Any) -> Any:
    """Let all stores of this process use a GPU of this kind; returns a fake one, made with these settings."""
    if kind == "cuda":
        return None
    from mpikv import kv
    from mpikv.device_paths import Told, choose
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.named import Spaces
    from mpikv.testing.fake_gpu import FakeGpu

    gpu = FakeGpu(**settings)
    assemble, local_store = kv.assemble, kv.local_store

    def assembled(name: Any, spec: Any, transport: Any, members: Any, **more: Any) -> Any:
        told = [Told(gpu.number, gpu.uuid, gpu.name)] * len(members.workers)
        choice = choose(told, members, {"mpi": "not tried"} if members.config.device_path == "auto" else {})
        members = replace(members, device_path=choice.path, device_reasons=choice.reasons)
        return assemble(name, spec, transport, members, spaces=Spaces(device=DeviceSpace(gpu)), **more)

    def local(*arguments: Any, **more: Any) -> Any:
        return local_store(*arguments, spaces=Spaces(device=DeviceSpace(gpu)), **more)

    kv.assemble, kv.local_store = assembled, local
    return gpu
