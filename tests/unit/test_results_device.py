"""Results that are new arrays on a GPU, and JAX's sums there: no copy to the host."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpikv import tensors
from mpikv.assembly import local_store
from mpikv.config import Config
from mpikv.kvstore import KVStore
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import Spaces
from mpikv.spec import parse
from mpikv.testing.fake_array import FakeArray
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores


def store_on(gpu: FakeGpu) -> KVStore:
    return local_store("local", parse("local"), spaces=Spaces(device=DeviceSpace(gpu)))


def test_pull_makes_arrays_on_the_gpu() -> None:
    gpu = FakeGpu(eager=0.3)
    store, value = store_on(gpu), gpu.array(np.arange(6.0).reshape(2, 3))
    store.init("w", value)
    before = dict(gpu.counts)
    found = store.pull("w", like=gpu.array(np.zeros(0)))
    several = store.pull(["w", "w"], like=[value, [value, np.zeros(())]])
    assert gpu.counts["device_to_host"] == before.get("device_to_host", 0) + 1  # the one of NumPy
    assert isinstance(found, FakeArray)
    assert np.array_equal(found.get(), value.get())
    assert np.array_equal(several[1][0].get(), several[1][1])


def test_arrays_of_jax_are_made_of_memory_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX is handed the memory itself, by DLPack."""

    class OfJax:
        shape, ndim = (2,), 1

        def devices(self) -> list[Any]:
            return [SimpleNamespace(local_hardware_id=0, platform="gpu")]

    gpu = FakeGpu()
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda number: gpu), empty=lambda shape, dtype: FakeArray.new(gpu, shape, dtype)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=lambda x: ("jax", x))))
    monkeypatch.setattr(tensors, "is_jax", lambda array: isinstance(array, OfJax))
    made = tensors.empty_like((2,), np.dtype("f4"), OfJax())
    assert isinstance(made, FakeArray)
    assert tensors.adopted(made, OfJax()) == ("jax", made)
    assert tensors.adopted(made, made) is made
    assert tensors.empty_like((2,), tensors.BFLOAT16, OfJax()) is None
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert tensors.empty_like((2,), np.dtype("f4"), OfJax()) is None


def test_sums_of_jax_on_the_gpu() -> None:
    pytest.importorskip("jax")
    from mpikv.jax.calls import Call, Calls

    gpus = [one.view() for one in [FakeGpu(eager=0.3)] * 2]

    def body(store: KVStore) -> Any:
        gpu, calls = gpus[store.rank], Calls(store)
        call, before = Call(calls, "sum", 0, ("a sum",)), None
        for step in range(3):
            arrays = [gpu.array(np.full(n, store.rank + step + 1.0, "f4")) for n in (3, 70)]
            sums = calls.sums_on_gpu(call, arrays)
            assert sums is not None
            if before is not None:
                assert (gpu.counts["device_to_host"], gpu.counts["host_to_device"]) == before
            before = gpu.counts["device_to_host"], gpu.counts["host_to_device"]
        return [one.get().tolist() for one in sums]

    config = Config(timeout_s=TEST_TIMEOUT_S, device_path="ipc")
    assert spawn_stores("dist_sync", 2, body, config=config, drivers=gpus) == [[[7.0] * 3, [7.0] * 70]] * 2
