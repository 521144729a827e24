"""Device memory as a space, on a GPU that finds mistakes in the order of work."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from program_cases import CASES, case_id, same_bits
from store_modes import DTYPES

from mpikv import optimizers, spec
from mpikv.assembly import local_store
from mpikv.errors import MpikvError, StallError
from mpikv.kvstore import KVStore
from mpikv.spaces import device, pool
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.driver import OutOfDeviceMemory
from mpikv.spaces.named import Spaces
from mpikv.testing.fake_gpu import FakeGpu, FakeGpus

FLOAT32 = np.dtype(np.float32)
SEEDS = range(8)


@pytest.fixture(params=SEEDS)
def gpu(request: pytest.FixtureRequest) -> FakeGpu:
    return FakeGpu(seed=request.param, eager=0.3 if request.param % 2 else 0.0)


@pytest.fixture
def space(gpu: FakeGpu) -> DeviceSpace:
    return DeviceSpace(gpu)


def crossings(gpu: FakeGpu) -> tuple[int, int]:
    return gpu.counts["host_to_device"], gpu.counts["device_to_host"]


# --- memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_memory_and_copies(dtype: np.dtype[Any], n: int) -> None:
    space = DeviceSpace(FakeGpu())
    values = (np.arange(n) % 100).astype(dtype)
    array, zeros = space.empty(n, dtype), space.zeros(n, dtype)
    assert array.shape == zeros.shape == (n,)
    assert array.dtype == zeros.dtype == dtype
    assert not space.to_host(zeros).any()
    space.copy(array, space.from_host(values))
    assert space.to_host(array).tobytes() == values.tobytes()
    space.copy(array[n // 2 :], 0)
    assert np.array_equal(space.to_host(array), [*values[: n // 2], *[0] * (n - n // 2)])
    wide = space.empty(n, np.dtype(np.float64))
    space.copy(wide, values)
    assert np.array_equal(space.to_host(wide), values.astype(np.float64))
    space.copy(array, wide)
    assert np.array_equal(space.to_host(array), values)
    assert space.cast(array, dtype) is array
    assert np.array_equal(space.to_host(space.cast(array, np.dtype(np.float64))), values)


@pytest.mark.parametrize("how", [np.add, np.minimum, np.maximum, np.multiply], ids=lambda how: how.__name__)
def test_numpys_functions_and_those_of_the_space(space: DeviceSpace, how: np.ufunc) -> None:
    a, b = np.arange(7, dtype=np.float32), np.arange(7, dtype=np.float32)[::-1].copy()
    first, second = space.from_host(a), space.from_host(b)
    out = space.empty(7, FLOAT32)
    assert how(first, second, out=out) is out
    space.combine(first, second, first, how)
    assert np.array_equal(space.to_host(out), how(a, b))
    assert np.array_equal(space.to_host(first), how(a, b))
    space.scale(second, 1 / 3, out)
    np.divide(second, 3, out=second)
    assert space.to_host(out).tobytes() == (b * np.float32(1 / 3)).tobytes()
    assert space.to_host(second).tobytes() == (b / np.float32(3)).tobytes()


def test_what_an_array_refuses(space: DeviceSpace) -> None:
    array = space.zeros(6, FLOAT32)
    for wrong in (
        lambda: np.asarray(array),
        lambda: np.add(array, array),
        lambda: array + np.ones(6),
        lambda: array[0],
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError):
        np.add(np.ones(6, np.float32), array, out=np.ones(6, np.float32))
    for wrong in (lambda: array.reshape(4), lambda: array[:1].view(np.float64), lambda: array.reshape(2, 3).view("i4")):
        with pytest.raises(ValueError, match=r"cannot"):
            wrong()
    assert array.reshape(2, -1).shape == (2, 3)
    assert (array.nbytes, array.itemsize, array.ndim, len(array), array.view("u1").size) == (24, 4, 1, 6, 24)


def test_memory_is_used_again_and_chunks_are_given_back(gpu: FakeGpu) -> None:
    space = DeviceSpace(gpu)
    addresses = set()
    for _ in range(50):
        array = space.from_host(np.arange(1000, dtype=np.float32))
        addresses.add(array.address)
        del array
    assert len(addresses) == 1
    assert gpu.counts["allocations"] == 1
    long = space.empty(pool.CHUNK_BYTES // 4 + 1, FLOAT32)
    assert gpu.counts["allocations"] == 2
    assert space.pool.find(long.address, long.nbytes) == space.pool.chunks[1]
    assert space.pool.find(long.address, long.nbytes + pool.CHUNK_BYTES) is None
    left = gpu.left_bytes
    space.settle()
    held = space.pool.held_bytes
    space.pool.close()
    space.pool.close()
    assert gpu.left_bytes == left + held


def test_out_of_memory_says_how_much() -> None:
    space = DeviceSpace(FakeGpu(memory_bytes=pool.CHUNK_BYTES))
    space.empty(10, FLOAT32)
    with pytest.raises(OutOfDeviceMemory, match=r"\d+"):
        space.empty(pool.CHUNK_BYTES, FLOAT32)


# --- a caller's arrays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_callers_arrays_in_streams_of_his_own(dtype: np.dtype[Any]) -> None:
    """Read while he is still writing them, changed by him at once, added in the order given; in any layout."""
    for seed in SEEDS:
        gpu = FakeGpu(seed=seed)
        space = DeviceSpace(gpu)
        values = np.arange(6).reshape(2, 3).astype(dtype)
        with gpu.user_stream():
            plain, turned = gpu.array(values), gpu.array(values.T.copy()).T
            plain += plain
            callers = space.callers([plain, turned])
        with gpu.user_stream():
            other = gpu.array(values)
            before = crossings(gpu)
            callers += space.callers([other])
            total = space.total(callers, "x", on_device=False)
            largest = space.total(callers[:2], "x", on_device=True, combine=np.maximum)
            other[...] = 0  # the next thing that the caller does
        assert crossings(gpu) == before
        assert total.shape == (6,)
        assert np.array_equal(space.to_host(total), 4 * values.reshape(-1))
        assert np.array_equal(space.to_host(largest), 2 * values.reshape(-1))
        gpu.synchronize()
        assert np.array_equal(other.get(), 0 * values)


def test_results_are_there_for_whatever_the_caller_does_next(gpu: FakeGpu, space: DeviceSpace) -> None:
    total = space.from_host(np.arange(6, dtype=np.float32))
    with gpu.user_stream():
        outs = [gpu.array(np.zeros((2, 3), np.float16)), gpu.array(np.zeros((3, 2), np.float64)).T]
        outs[0] += 1  # not to be written over
        outs[1] += 1
        host = np.zeros((2, 3), np.int32)
        for caller in space.callers([*outs, host]):
            space.write(caller, total, "out")
        outs[0] += 1
        outs[1] += 1
    gpu.synchronize()
    assert np.array_equal(outs[0].get(), np.arange(6).reshape(2, 3) + 1)
    assert np.array_equal(outs[1].get(), np.arange(6).reshape(2, 3) + 1)
    assert np.array_equal(host, np.arange(6).reshape(2, 3))


def test_an_array_of_another_gpu_and_one_of_the_host() -> None:
    gpus = FakeGpus(2)
    space = DeviceSpace(gpus[0])
    values = np.arange(4, dtype=np.float32)
    total = space.total(space.callers([gpus[0].array(values), gpus[1].array(values), values]), "x", on_device=True)
    assert np.array_equal(space.to_host(total), 3 * values)
    (out,) = space.callers([far := gpus[1].array(values)])
    space.write(out, total, "out")
    assert np.array_equal(far.get(), 3 * values)


def test_what_the_caller_is_still_writing_does_not_hold_the_stores_stream(gpu: FakeGpu, space: DeviceSpace) -> None:
    with gpu.user_stream():
        late = space.total(space.callers([gpu.array(np.ones(3, np.float32))]), "x", on_device=True)
    assert late.memory.written is not None
    other = space.zeros(3, FLOAT32)
    assert np.array_equal(space.to_host(other), np.zeros(3))
    assert late.memory.written is not None  # nobody has asked for it
    arrived = space.arrived(late)
    while not arrived.test():
        pass
    assert np.array_equal(space.to_host(late), np.ones(3))


def test_memory_of_the_store_for_a_caller(gpu: FakeGpu, space: DeviceSpace) -> None:
    array = space.empty_for_caller((2, 3), FLOAT32)
    with gpu.user_stream():
        array.set(np.ones((2, 3), np.float32))
        (caller,) = space.callers([array])
    inside = space.inside(caller)
    assert inside is not None
    assert (inside.address, inside.shape) == (array.address, (2, 3))
    assert space.inside(space.callers([gpu.array(np.ones(3))])[0]) is None
    assert space.inside(np.ones(3)) is None


# --- updates


@pytest.mark.parametrize("case", [*CASES[2::5], ("lars", {}), ("lamb", {})], ids=case_id)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_an_update_has_the_hosts_bits(case: tuple[str, dict[str, Any]], dtype: str) -> None:
    gpu = FakeGpu()
    space = DeviceSpace(gpu)
    name, options = case
    on_host, on_device = (optimizers.create(name, multi_precision=True, **options) for _ in range(2))
    rng = np.random.default_rng(0)
    weight = rng.normal(size=100).astype(dtype)
    held = space.from_host(weight)
    state, device_state = on_host.init(weight), on_device.init(held)
    for _ in range(3):
        grad = rng.normal(size=100).astype(dtype)
        state = on_host.update("w", weight, grad, state)
        pushed = space.from_host(grad)
        before, launches = crossings(gpu), gpu.counts["launches"]
        device_state = on_device.update("w", held, pushed, device_state)
        assert crossings(gpu) == before
        if on_device.elementwise:
            assert gpu.counts["launches"] == launches + 1
    assert same_bits(space.to_host(held), weight)
    assert state.keys() == device_state.keys()
    for part, value in state.items():
        found = device_state[part]
        assert same_bits(space.to_host(found), value) if isinstance(value, np.ndarray) else found == value, part


def test_updates_of_many_keys_are_one_launch(gpu: FakeGpu, space: DeviceSpace) -> None:
    """Of those that are the same program; states are made on the way."""
    optimizer = optimizers.Adam()
    optimizer.set_lr_mult({"c": 2.0})
    values = {name: np.arange(n, dtype=np.float32) for name, n in zip("abcd", (5, 0, 1000, 3), strict=True)}
    held = {name: space.from_host(value) for name, value in values.items()}
    grads = {name: space.from_host(value + 1) for name, value in values.items()}
    states = {name: optimizer.init(value) for name, value in held.items()}
    launches = gpu.counts["launches"]
    with space.together():
        for name, value in held.items():
            states[name] = optimizer.update(name, value, grads[name], states[name])
    assert gpu.counts["launches"] == launches + 1
    with space.together():
        for name, value in held.items():
            states[name] = optimizer.update(name, value, grads[name], states[name])
    assert gpu.counts["launches"] == launches + 2
    for name, value in values.items():
        state = optimizer.init(value)
        for _ in range(2):
            state = optimizer.update(name, value, np.arange(value.size, dtype=np.float32) + 1, state)
        assert space.to_host(held[name]).tobytes() == value.tobytes()


# --- a user's functions


def test_what_a_users_function_does_comes_in_between(gpu: FakeGpu, space: DeviceSpace) -> None:
    weight, grad = space.from_host(np.ones(4, np.float32)), space.zeros(4, FLOAT32)
    space.copy(grad, 3)
    with space.lend([weight, grad.reshape(2, 2)]) as lent, gpu.user_stream(1):
        assert lent[1].shape == (2, 2)
        lent[0] += lent[1].reshape(-1)
    np.add(weight, grad, out=weight)
    assert np.array_equal(space.to_host(weight), np.full(4, 7))


def test_an_optimizer_that_is_a_function_works_with_the_callers_library(gpu: FakeGpu, space: DeviceSpace) -> None:
    def momentum(weight: Any, grad: Any, state: Any) -> Any:
        step = grad.copy()
        if state is not None:
            step += state["step"]
        weight += step
        return {"step": step}

    optimizer, weight = optimizers.create(momentum), space.zeros(3, FLOAT32)
    state = optimizer.init(weight)
    for _ in range(3):
        state = optimizer.update("w", weight, space.from_host(np.ones(3, np.float32)), state)
    assert np.array_equal(space.to_host(weight), np.full(3, 6))
    assert np.array_equal(space.to_host(state["dict:step"]), np.full(3, 3))


def test_an_array_of_the_store_outlives_it(gpu: FakeGpu) -> None:
    left = gpu.left_bytes
    with store_of(gpu) as store:
        kept = store.zeros(3, device="gpu")
        store.init("w", kept)
    kept += 1
    gpu.synchronize()
    assert np.array_equal(kept.get(), np.ones(3))
    del kept, store
    gc.collect()
    assert gpu.left_bytes == left


# --- stores


def store_of(gpu: FakeGpu, name: str = "device") -> KVStore:
    return local_store(name, spec.parse(name), spaces=Spaces(device=DeviceSpace(gpu)))


@pytest.mark.parametrize("name", ["local", "device"])
def test_a_store_of_one_process(gpu: FakeGpu, name: str) -> None:
    with store_of(gpu, name) as store:
        with gpu.user_stream():
            store.init("w", gpu.array(np.zeros((2, 3), np.float32)))
            store.set_optimizer(optimizers.SGD(learning_rate=0.5, momentum=0.5))
            before = crossings(gpu)
            grads = [gpu.array(np.ones((2, 3), np.float32)) for _ in range(2)]
            filled = crossings(gpu)[0]
            out = gpu.array(np.zeros((2, 3), np.float32))
            filled = crossings(gpu)[0]
            for _ in range(3):
                store.push("w", grads)
                grads[0] += 0
                store.pull("w", out)
        assert crossings(gpu) == (filled, before[1])
        gpu.synchronize()
        assert np.array_equal(out.get(), np.full((2, 3), -4.25))
        assert np.array_equal(store.pull("w"), np.full((2, 3), -4.25))
        assert store.device == 0


def test_a_gpu_that_fails_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    space = DeviceSpace(gpu)
    array = space.zeros(3, FLOAT32)
    gpu.fail("done", 1, MpikvError("GPU 0 has failed: an illegal address"))
    with pytest.raises(MpikvError, match="illegal address"):
        space.to_host(array)
    monkeypatch.setattr(device, "SLOW_S", 0.0)
    monkeypatch.setattr(gpu, "done", lambda _event: False)
    with pytest.raises(StallError, match="GPU 0 has not"):
        space.settle()
