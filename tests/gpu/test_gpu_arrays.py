"""Arrays of every library in stores of one process: streams, results, updates on the device, what cannot be done."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import Any

import gpus
import numpy as np
import pytest
from kinds import FULL

from mpikv import kv, optimizers
from mpikv.arrays import BFLOAT16
from mpikv.config import Config
from mpikv.errors import MpikvError

TYPES = ["local", "device"]
N = 100_003
DEVICE = Config(local_device="0")  # asks for the GPU, whatever is imported


@pytest.fixture
def gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    return gpus.use(kind, monkeypatch.setattr)


@pytest.mark.parametrize("type_", TYPES)
def test_reading_behind_a_slow_producer(gpu: Any, type_: str) -> None:
    """What a stream is still writing is pushed, and read on another stream, and nobody waits in between."""
    with kv.create(type_, config=DEVICE) as store:
        store.init("w", gpu.array(np.zeros(N, np.float32)))
        found = []
        for turn in range(4):
            with gpu.stream():
                array = gpu.array(np.zeros(N, np.float32))
                gpu.slow()
                array += turn
                store.push("w", array)
                array[...] = -1  # the push has been of what was there
            with gpu.stream():
                out = gpu.array(np.zeros(N, np.float32))
                store.pull("w", out)
                out += 1
                found.append(out)
        gpu.finish()
        for turn, out in enumerate(found):
            assert (out.get() == turn + 1).all()


@pytest.mark.parametrize("type_", TYPES)
def test_writing_behind_a_slow_reader(gpu: Any, type_: str) -> None:
    """A pull into an array that the caller's stream is still reading."""
    with kv.create(type_, config=DEVICE) as store:
        store.init("w", gpu.array(np.full(N, 2, np.float32)))
        with gpu.stream():
            out = gpu.array(np.full(N, 1, np.float32))
            gpu.slow()
            copy = out.copy()
            store.pull("w", out)
            assert (copy.get() == 1).all()
            assert (out.get() == 2).all()


@pytest.mark.parametrize(
    "name", ["sgd", "nag", "adam", "adamw", "adagrad", "rmsprop", "ftrl", "signum", "lamb", "lars"]
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_optimizers_have_the_bits_of_the_host(gpu: Any, name: str, dtype: str) -> None:
    real = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    if not gpu.holds(real):
        pytest.skip("this CuPy has no bfloat16: 14 has")
    generator = np.random.default_rng(7)
    first, *grads = [generator.standard_normal(1003).astype(real) for _ in range(5)]

    def trained(config: Config, array: Any) -> bytes:
        with kv.create("device", config=config) as store:
            store.set_optimizer(optimizers.create(name, learning_rate=0.01, wd=0.1))
            store.init("w", array(first))
            for grad in grads:
                store.push("w", array(grad))
            store.pull("w", out := array(first))
            return (out if isinstance(out, np.ndarray) else out.get()).tobytes()

    assert trained(DEVICE, gpu.array) == trained(Config(device_path="host"), np.copy)


def test_layouts_and_mixtures(gpu: Any) -> None:
    """Arrays with strides, keys of the host pushed from the device and the other way round, several in one call."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with kv.create("local", config=DEVICE) as store:
        store.init("host", values)
        store.init("gpu", gpu.array(values))
        for key in ("host", "gpu"):
            store.push(key, gpu.array(values.T.copy()).T)
            store.pull(key, out := np.zeros_like(values))
            assert out.tobytes() == values.tobytes()
            store.push(key, values * 2)
            outs = [np.zeros_like(values), gpu.array(np.zeros((4, 3), np.float32)).T]
            store.pull(key, outs)
            assert outs[0].tobytes() == outs[1].get().tobytes() == (values * 2).tobytes()
            store.push(key, [gpu.array(values), values])
            store.pull(key, out)
            assert out.tobytes() == (values * 2).tobytes()


def test_an_array_of_another_gpu(gpu: Any) -> None:
    array = gpu.elsewhere(np.full(N, 3, np.float32))
    if array is None:
        pytest.skip("this machine has one GPU")
    with kv.create("local", config=DEVICE) as store:
        store.init("w", gpu.array(np.zeros(N, np.float32)))
        store.push("w", array)
        store.pull("w", out := gpu.array(np.zeros(N, np.float32)))
        assert (out.get() == 3).all()


def test_memory_is_given_back(gpu: Any) -> None:
    before = gpu.used_bytes()
    with kv.create("device", config=DEVICE) as store:
        store.init("w", np.zeros(1 << 24, np.float32))
        store.push("w", gpu.array(np.ones(1 << 24, np.float32)))
        assert gpu.used_bytes() >= before + (64 << 20)
        with pytest.raises(MemoryError, match="GPU"):
            store.zeros(1 << 46, "uint8", device="gpu")
        store.pull("w", out := np.zeros(1 << 24, np.float32))
        assert (out == 1).all()
    del store
    gc.collect()
    gpu.finish()
    assert gpu.used_bytes() < before + (32 << 20)  # CUDA keeps the kernels


# --- libraries whose arrays no fake GPU makes


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
    weight, ones = (make(N, device="cuda", dtype=torch.bfloat16) for make in (torch.zeros, torch.ones))
    with kv.create("device", config=DEVICE) as store:
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0))
        store.init("w", weight)
        store.push("w", ones)
        store.pull("w", weight)
        assert bool((weight == -1).all())


@pytest.mark.gpu
def test_horovods_calls_on_tensors() -> None:
    torch = library("torch", lambda torch: torch.cuda.is_available())
    mt = importlib.import_module("mpikv.torch")
    with kv.create("device", config=DEVICE) as store:
        for tensor in (
            torch.arange(N, device="cuda"),
            torch.rand(3, 4, device="cuda").T,
            torch.tensor([True], device="cuda"),
        ):
            for found in (mt.broadcast(tensor, 0, store=store), mt.allgather(tensor, store=store)):
                assert found.device == tensor.device
                assert torch.equal(found, tensor)
            assert torch.equal(mt.alltoall(tensor, store=store), tensor)
        assert torch.equal(mt.allreduce(torch.ones(N, device="cuda"), store=store), torch.ones(N, device="cuda"))


@pytest.mark.gpu
def test_arrays_of_jax() -> None:
    jax = library("jax", lambda jax: jax.default_backend() in ("gpu", "cuda"))
    exchange(jax.numpy.asarray, np.asarray, writes=False)


@pytest.mark.gpu
def test_arrays_of_numba() -> None:
    cuda = library("numba.cuda", lambda cuda: cuda.is_available())
    exchange(cuda.to_device, lambda array: array.copy_to_host())


@FULL
def test_many_streams_at_once(gpu: Any) -> None:
    """Keys of different streams, each behind its own slow work, in one call."""
    with kv.create("device", config=DEVICE) as store:
        keys = list(range(8))
        store.init(keys, [np.zeros(N, np.float32)] * len(keys))
        for turn in range(3):
            arrays = []
            for key in keys:
                with gpu.stream():
                    array = gpu.array(np.full(N, key, np.float32))
                    gpu.slow()
                    array += turn
                    arrays.append(array)
                    store.push(key, array)
            outs = [gpu.array(np.zeros(N, np.float32)) for _ in keys]
            store.pull(keys, outs)
            assert [float(out.get()[-1]) for out in outs] == [key + turn for key in keys]


def test_a_gpu_that_is_not_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.use(kind, monkeypatch.setattr)
    with pytest.raises(MpikvError, match="MPIKV_LOCAL_DEVICE=64, but this process sees"):
        kv.create("device", config=Config(local_device="64"))
