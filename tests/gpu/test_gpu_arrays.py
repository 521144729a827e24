"""Arrays of every library in stores of one process: streams, results, updates, contexts, NCCL, what cannot be done."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gpus
import numpy as np
import pytest
from jobs import ROOT

from mpikv import kv, optimizers
from mpikv.config import Config
from mpikv.errors import MpikvError

N = 100_003
DEVICE = Config(local_device="0")  # asks for the GPU, whatever is imported


@pytest.fixture
def gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    return gpus.use(kind, monkeypatch.setattr)


@pytest.mark.parametrize("type_", ["local", "device"])
def test_many_streams_behind_slow_kernels(gpu: Any, type_: str) -> None:
    """What a stream is still writing is pushed, and read on another stream, and nobody waits in between."""
    cupy, found = gpu.cupy, []
    with kv.create(type_, config=DEVICE) as store:
        keys = list(range(6))
        store.init(keys, [np.zeros(N, np.float32)] * len(keys))
        for key in keys:
            with gpu.stream():
                array = cupy.zeros(N, np.float32)
                gpu.slow()
                array += key + 1
                store.push(key, array)
                array[...] = -1  # the push has been of what was there
            with gpu.stream():
                out = cupy.zeros(N, np.float32)
                gpu.slow()
                copy = out.copy()
                store.pull(key, out)  # into what the stream is still reading
                out += 1
                found.append((copy, out, key + 2))
        gpu.finish()
        assert all((copy.get() == 0).all() and (out.get() == expected).all() for copy, out, expected in found)


def test_layouts_and_mixtures(gpu: Any) -> None:
    """Arrays with strides, keys of the host pushed from the device and the other way round, several in one call."""
    values, array = np.arange(12, dtype=np.float32).reshape(3, 4), gpu.cupy.asarray
    with kv.create("local", config=DEVICE) as store:
        store.init("host", values)
        store.init("gpu", array(values))
        for key in ("host", "gpu"):
            store.push(key, array(values.T.copy()).T)
            store.pull(key, out := np.zeros_like(values))
            assert out.tobytes() == values.tobytes()
            store.push(key, [array(values), values])
            outs = [np.zeros_like(values), array(np.zeros((4, 3), np.float32)).T]
            store.pull(key, outs)
            assert outs[0].tobytes() == outs[1].get().tobytes() == (values * 2).tobytes()
        assert type(store.zeros(3, device="gpu")) is gpu.cupy.ndarray


def test_an_array_of_another_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpus.use(kind, monkeypatch.setattr, n_gpus=2)
    if (array := gpu.elsewhere(np.full(N, 3, np.float32))) is None:
        pytest.skip("this machine has one GPU")
    with kv.create("local", config=DEVICE) as store:
        store.init("w", gpu.cupy.zeros(N, np.float32))
        store.push("w", array)
        store.pull("w", out := gpu.cupy.zeros(N, np.float32))
        assert (out.get() == 3).all()


def test_memory_is_given_back(gpu: Any) -> None:
    before = gpu.used_bytes()
    with kv.create("device", config=DEVICE) as store:
        store.init("w", np.zeros(1 << 24, np.float32))
        store.push("w", gpu.cupy.asarray(np.ones(1 << 24, np.float32)))
        assert gpu.used_bytes() >= before + (64 << 20)
        with pytest.raises(MemoryError, match="GPU"):
            store.zeros(1 << 46, "uint8", device="gpu")
        store.pull("w", out := np.zeros(1 << 24, np.float32))
        assert (out == 1).all()
    del store
    gc.collect()
    gpu.finish()
    assert gpu.used_bytes() < before + (32 << 20)  # CUDA keeps the kernels


def test_a_gpu_that_is_not_there(gpu: Any) -> None:
    with pytest.raises(MpikvError, match="MPIKV_LOCAL_DEVICE=64, but this process sees"):
        kv.create("device", config=Config(local_device="64"))


# --- what no fake GPU has

CONTEXTS = """
import numpy as np
from mpikv import kv
from mpikv.arrays.devices import has_context
with kv.create("device") as store:
    store.init("w", np.zeros(1000, np.float32))
    store.pushpull("w", np.ones(1000, np.float32))
    print(store.device, [has_context(number) for number in range(2)])
"""


@pytest.mark.gpu
def test_a_process_uses_its_own_gpu_alone() -> None:
    if importlib.import_module("cupy").cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this machine has one GPU")
    line = ["env", "MPIKV_LOCAL_DEVICE=1", f"PYTHONPATH={ROOT}", sys.executable, "-c", CONTEXTS]
    assert subprocess.check_output(line, text=True, timeout=100) == "1 [False, True]\n"


@pytest.mark.gpu
def test_nccl_of_one_rank() -> None:
    """Its calls leave the only contribution as it is; what comes after an abort is refused."""
    from mpikv.collectives.nccl import Nccl
    from mpikv.spaces.gpu import Gpu

    one = Gpu(0)
    if not pytest.importorskip("cupy.cuda.nccl").available:  # `import cupy` does not bring it
        pytest.skip("this CuPy finds no NCCL")
    nccl, stream = Nccl(one), one.cupy.cuda.Stream(non_blocking=True)
    comm = nccl.init(1, nccl.unique_id(), 0)
    with stream:
        array = one.cupy.arange(1024, dtype=np.float32)
        comm.all_reduce(array, np.add, stream)
        comm.reduce_scatter(array, np.maximum, stream)
        comm.all_gather(array, stream)
        comm.reduce(array, 0, np.minimum, stream)
        comm.broadcast(array, 0, stream)
        comm.check()
        assert (array.get() == np.arange(1024)).all()
    comm.give_up()
    with pytest.raises(MpikvError, match="given up"):
        comm.all_reduce(array, np.add, stream)


def library(name: str, sees: Callable[[Any], bool]) -> Any:
    """The library, where it sees the GPU; the test is skipped, and counted, where it does not."""
    module = pytest.importorskip(name, reason=f"{name} is not installed")
    if not sees(module):
        pytest.skip(f"{name} sees no GPU: it was built for another CUDA, or for none")
    return module


def exchange(make: Callable[[Any], Any], values: Callable[[Any], Any], *, writes: bool = True) -> None:
    """Two arrays of one worker are added; the sum comes as a new array of this library, and into one."""
    with kv.create("device", config=DEVICE) as store:
        store.init("w", make(np.zeros(N, np.float32)))
        arrays = [make(np.full(N, value, np.float32)) for value in (1, 2)]
        store.push("w", arrays)
        found = store.pull("w", like=arrays[0])
        assert type(found) is type(arrays[0])
        assert (values(found) == 3).all()
        if writes:
            store.pull("w", out := make(np.zeros(N, np.float32)))
            assert (values(out) == 3).all()


@pytest.mark.gpu
def test_tensors_of_pytorch() -> None:
    torch = library("torch", lambda torch: torch.cuda.is_available())
    with torch.cuda.stream(torch.cuda.Stream()):
        exchange(lambda values: torch.tensor(values, device="cuda"), lambda tensor: tensor.cpu().numpy())
        a = torch.ones(4096, 4096, device="cuda")
        with kv.create("device", config=DEVICE) as store:
            store.set_optimizer(optimizers.create("sgd", learning_rate=1.0))
            store.init("w", weight := torch.zeros(N, device="cuda", dtype=torch.bfloat16))
            for _ in range(20):
                a = a @ a / 4096  # stays one, and takes a while
            store.push("w", a.flatten()[:N].to(torch.bfloat16))
            store.pull("w", weight)
            assert bool((weight == -1).all())


@pytest.mark.gpu
def test_horovods_calls_on_tensors() -> None:
    torch = library("torch", lambda torch: torch.cuda.is_available())
    mt = importlib.import_module("mpikv.torch")
    with kv.create("device", config=DEVICE) as store:
        for tensor in (torch.arange(N, device="cuda"), torch.rand(3, 4, device="cuda").T, torch.ones(9, device="cuda")):
            calls = mt.broadcast(tensor, 0, store=store), mt.allgather(tensor, store=store)
            assert all(found.device == tensor.device and torch.equal(found, tensor) for found in calls)
            assert torch.equal(mt.alltoall(tensor, store=store), tensor)
            assert torch.equal(mt.allreduce(tensor.clone(), store=store).to(tensor.dtype), tensor)


@pytest.mark.gpu
def test_arrays_of_jax() -> None:
    jax = library("jax", lambda jax: jax.default_backend() in ("gpu", "cuda"))
    exchange(jax.numpy.asarray, np.asarray, writes=False)


@pytest.mark.gpu
def test_arrays_of_numba() -> None:
    cuda = library("numba.cuda", lambda cuda: cuda.is_available())
    exchange(cuda.to_device, lambda array: array.copy_to_host())
