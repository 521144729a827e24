"""Trainers whose parameters are on a fake GPU: the host's weights to the last bit, and no copy to the host or from it.

The GPU finds mistakes in the order of what the trainer, the store and the model's passes do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import DeviceFabric, gpu_of, one_gpu, spaces_of
from fake_gpus import gpus_of as gpus_of_machine

from mpikv import worker_device
from mpikv.assembly import local_store
from mpikv.config import Config
from mpikv.kvstore import KVStore
from mpikv.parameter import Parameter
from mpikv.spec import parse
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores
from mpikv.trainer import Trainer
from mpikv.transports.threads import Fabric

SHAPES = {"bias": (7,), "empty": (0,), "scalar": (), "weight": (30, 41)}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def crossings(trainer: Trainer) -> tuple[int, int]:
    found = trainer._spaces.stats()
    return found["copies_up"], found["copies_down"]


def start(name: str, dtype: Any) -> np.ndarray:
    return (np.random.default_rng(len(name)).standard_normal(SHAPES[name])).astype(dtype)


def gradient(name: str, step: int, place: int) -> np.ndarray:
    return np.random.default_rng([len(name), step, place]).standard_normal(SHAPES[name]) * 3


class Model:
    """Parameters whose gradients a backward pass overwrites, on the host or on GPUs."""

    def __init__(self, gpus: list[Any], dtype: Any) -> None:
        self.gpus = gpus
        self.params = {}
        for name in SHAPES:
            parameter = Parameter(start(name, dtype))
            parameter._data = [
                start(name, dtype) if gpu is None else gpu.cupy.asarray(start(name, dtype)) for gpu in self.gpus
            ]
            self.params[name] = parameter

    def backward(self, step: int, rank: int) -> None:
        for name, parameter in self.params.items():
            for place, grad in enumerate(parameter.list_grad()):
                values = gradient(name, step, 10 * rank + place).astype(parameter.dtype)
                gpu = self.gpus[place]
                grad[...] = values if gpu is None else gpu.cupy.asarray(values)

    def weights(self) -> list[bytes]:
        return [
            (one if isinstance(one, np.ndarray) else one.get()).tobytes()
            for parameter in self.params.values()
            for one in parameter.list_data()
        ]


def train(
    model: Model, store: KVStore | None, rank: int = 0, *, steps: int = 3, optimizer: str = "adam", **options: Any
) -> tuple[Trainer, list[bytes]]:
    """Steps of several kinds. No copy between host and GPU after the first step."""
    trainer = Trainer(model.params, optimizer, {"learning_rate": 0.1, "wd": 0.01}, kvstore=store, **options)
    gpu = model.gpus[0]
    counted: list[tuple[int, int]] = []
    for step in range(steps):
        model.backward(step, rank)
        before = None if gpu is None else crossings(trainer)
        if step == 1:
            trainer.step(8)
        else:
            trainer.step()
        if gpu is not None and before is not None:
            after = crossings(trainer)
            counted.append((after[0] - before[0], after[1] - before[1]))
    model.crossed = counted  # type: ignore[attr-defined]
    return trainer, model.weights()


DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.float64], ids=str)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], None]:
    """Let trainers without a store find these GPUs."""

    def use(gpus: list[Any]) -> None:
        monkeypatch.setattr(worker_device, "open_gpu", lambda number: gpus[number])

    return use


@pytest.mark.grid
@DTYPES
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_devices", [1, 2, 3])
def test_without_a_store(alone: Any, dtype: Any, n_devices: int, seed: int) -> None:
    """Several devices without a store: in gluon's words kvstore=None."""
    cupy = Machine(n_devices, seed=seed).process()
    gpus = [gpu_of(cupy, number) for number in range(n_devices)]
    alone(gpus)
    model, host = Model(list(gpus), dtype), Model([None] * n_devices, dtype)
    assert train(model, None)[1] == train(host, None)[1]
    assert model.crossed == [(0, 0)] * 3


def test_without_a_store_the_weights_stay_where_they_are(alone: Any) -> None:
    _, gpu = one_gpu()
    alone([gpu])
    model = Model([gpu], np.float32)
    before = {name: (id(p.data), p.data.data.ptr) for name, p in model.params.items()}
    trainer, _ = train(model, None, optimizer="sgd")
    assert {name: (id(p.data), p.data.data.ptr) for name, p in model.params.items()} == before
    copies = trainer._spaces.stats()["copies_device"]
    trainer.step()
    assert trainer._spaces.stats()["copies_device"] == copies  # gradients are read where they are


def test_a_weight_that_moves_or_has_gaps(alone: Any) -> None:
    _, gpu = one_gpu(seed=2)
    alone([gpu])
    found = []
    for make in (lambda values: values, gpu.cupy.asarray):
        parameter, values = Parameter(np.zeros((4, 6))), np.arange(24.0).reshape(4, 6)
        whole = make(np.zeros((6, 4)))
        whole[...] = make(values.T.copy())
        parameter._data = [whole.T]
        trainer = Trainer([parameter], "sgd", {"learning_rate": 0.5}, kvstore=None)
        for step in range(3):
            if step == 2:
                parameter._data = [make(values)]
            parameter.grad[...] = make(values + step)
            trainer.step()
        found.append(parameter.data if isinstance(parameter.data, np.ndarray) else parameter.data.get())
    assert np.array_equal(*found)


def test_states_are_the_same_file(alone: Any, tmp_path: Path) -> None:
    _, gpu = one_gpu()
    alone([gpu])
    for i, model in enumerate((Model([None], np.float16), Model([gpu], np.float16))):
        trainer, _ = train(model, None)
        trainer.save_states(tmp_path / f"states{i}")
        trainer.save(tmp_path / f"checkpoint{i}")
    for kind in ("states", "checkpoint"):
        assert (tmp_path / f"{kind}0").read_bytes() == (tmp_path / f"{kind}1").read_bytes()
    model = Model([gpu], np.float16)
    trainer = Trainer(model.params, "adam", {"learning_rate": 0.1, "wd": 0.01}, kvstore=None)
    assert trainer.resume(tmp_path / "checkpoint0") == 3
    on_host, again = Model([None], np.float16), []
    other = Trainer(on_host.params, "adam", {"learning_rate": 0.1, "wd": 0.01}, kvstore=None)
    other.resume(tmp_path / "checkpoint1")
    for side, one in ((model, trainer), (on_host, other)):
        side.backward(9, 0)
        one.step()
        again.append(side.weights())
    assert again[0] == again[1]


@pytest.mark.grid
@DTYPES
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize(("kind", "n_devices"), [("local", 1), ("device", 1), ("local", 2), ("device", 3)])
def test_with_a_store_of_one_process(kind: str, n_devices: int, on_store: bool, dtype: Any) -> None:
    cupy = Machine(n_devices).process()
    gpus = [gpu_of(cupy, number) for number in range(n_devices)]
    spaces = spaces_of(gpus[0])
    model, host = Model(list(gpus), dtype), Model([None] * n_devices, dtype)
    found = train(model, local_store(kind, parse(kind), spaces=spaces), update_on_kvstore=on_store)[1]
    assert found == train(host, local_store(kind, parse(kind)), update_on_kvstore=on_store)[1]
    assert model.crossed == [(0, 0)] * 3


def distributed(
    workers: int,
    dtype: Any,
    gpus: list[Any],
    *,
    path: str = "auto",
    hosts: Any = None,
    servers: int = 0,
    **options: Any,
) -> list[list[bytes]]:
    """The weights of all workers after some steps."""
    config = Config(timeout_s=TEST_TIMEOUT_S, device_path=path)
    crossed = []

    def body(store: KVStore) -> list[bytes]:
        model = Model([gpus[store.rank]], dtype)
        found = train(model, store, store.rank, **options)[1]
        crossed.append(model.crossed)
        return found

    drivers = None if None in gpus else gpus
    fabric = DeviceFabric(Fabric(workers, hosts or ["localhost"] * workers)) if path == "mpi" else None
    results = spawn_stores(
        "dist_sync",
        workers,
        body,
        num_servers=servers,
        config=config,
        hosts=hosts,
        gpus=None if drivers is None else [*drivers, *[None] * servers],
        fabric=fabric,
    )
    if path in {"ipc", "mpi"}:
        assert crossed == [[(0, 0)] * 3] * workers
    return results


def gpus_of(workers: int, seed: int) -> list[Any]:
    return list(gpus_of_machine(Machine(seed=seed), workers))


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("path", ["ipc", "staged", "mpi"])
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_of_one_host(workers: int, path: str, on_store: bool, seed: int) -> None:
    gpus = gpus_of(workers, seed)
    options = {"update_on_kvstore": on_store}
    expected = distributed(workers, np.float32, [None] * workers, **options)
    assert distributed(workers, np.float32, gpus, path=path, **options) == expected


@pytest.mark.parametrize("on_store", [True, False])
def test_with_servers(on_store: bool) -> None:
    options = {"update_on_kvstore": on_store, "servers": 2}
    expected = distributed(2, np.float16, [None] * 2, **options)
    assert distributed(2, np.float16, gpus_of(2, 3), path="staged", **options) == expected


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=str)
def test_short_floats_of_workers(dtype: Any) -> None:
    expected = distributed(2, dtype, [None] * 2)
    assert distributed(2, dtype, gpus_of(2, 1), path="ipc") == expected


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("path", ["staged", "mpi"])
def test_workers_of_several_hosts(on_store: bool, path: str) -> None:
    options = {"hosts": "aab", "update_on_kvstore": on_store}
    expected = distributed(3, np.float32, [None] * 3, **options)
    assert distributed(3, np.float32, gpus_of(3, 4), path=path, **options) == expected


def test_examples_and_clipping() -> None:
    """Gradients are scaled and measured on the device."""
    found = []
    for gpus in ([None] * 2, gpus_of(2, 5)):

        def body(store: KVStore, gpus: Any = gpus) -> Any:
            model = Model([gpus[store.rank]], np.float32)
            trainer = Trainer(model.params, "sgd", {"learning_rate": 0.1}, kvstore=store, clip_global_norm=0.5)
            norms = []
            for step in range(3):
                model.backward(step, store.rank)
                trainer.step(examples=3 + 2 * store.rank)
                norms.append(trainer.last_global_norm)
            return norms, model.weights()

        config = Config(timeout_s=TEST_TIMEOUT_S, device_path="auto" if gpus[0] is None else "ipc")
        drivers = None if gpus[0] is None else gpus
        found.append(spawn_stores("dist_sync", 2, body, config=config, gpus=drivers))
    assert found[0] == found[1]


def test_stale_gradients_and_frozen_parameters(alone: Any) -> None:
    _, gpu = one_gpu()
    alone([gpu])
    found = []
    for gpus in ([None], [gpu]):
        model = Model(gpus, np.float32)
        model.params["bias"].grad_req = "null"
        trainer = Trainer(model.params, "sgd", {"learning_rate": 0.1}, kvstore=None)
        model.backward(0, 0)
        trainer.step(ignore_stale_grad=True)
        trainer.zero_grad()
        trainer.step(ignore_stale_grad=True)
        found.append(model.weights())
    assert found[0] == found[1]


@pytest.mark.parametrize("on_store", [True, False])
def test_gradients_that_leave_early_and_weights_that_come_late(on_store: bool) -> None:
    found = []
    for gpus in ([None] * 2, gpus_of(2, 3)):

        def body(store: KVStore, gpus: Any = gpus) -> list[bytes]:
            model = Model([gpus[store.rank]], np.float32)
            trainer = Trainer(model.params, "sgd", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=on_store)
            for step in range(3):
                model.backward(step, store.rank)
                for parameter in reversed(model.params.values()):
                    trainer.push_grad(parameter, 4)
                trainer.step(4, wait=not on_store)
            for parameter in model.params.values():
                trainer.wait(parameter)
            return model.weights()

        config = Config(timeout_s=TEST_TIMEOUT_S, device_path="auto" if gpus[0] is None else "staged")
        drivers = None if gpus[0] is None else gpus
        found.append(spawn_stores("dist_sync", 2, body, config=config, gpus=drivers, hosts="ab"))
    assert found[0] == found[1]


@pytest.mark.parametrize("on_store", [True, False])
def test_a_checkpoint_is_read_by_either(tmp_path: Path, on_store: bool) -> None:
    """Saved on the host, gone on with on GPUs, and the other way round: the same weights and the same file."""
    path, sides = tmp_path / "checkpoint", {"host": [None] * 2, "gpu": gpus_of(2, 6)}

    def run(side: str, body: Callable[[KVStore, Model, Trainer], Any]) -> Any:
        def rank(store: KVStore) -> Any:
            model = Model([sides[side][store.rank]], np.float32)
            options = {"learning_rate": 0.1}
            trainer = Trainer(model.params, "adam", options, kvstore=store, update_on_kvstore=on_store)
            return body(store, model, trainer)

        config = Config(timeout_s=TEST_TIMEOUT_S, device_path="auto" if side == "host" else "ipc")
        return spawn_stores("dist_sync", 2, rank, config=config, gpus=None if side == "host" else sides[side])

    def begin(store: KVStore, model: Model, trainer: Trainer) -> None:
        for step in range(2):
            model.backward(step, store.rank)
            trainer.step()
        trainer.save(path)

    def go_on(store: KVStore, model: Model, trainer: Trainer) -> list[bytes]:
        assert trainer.resume(path) == 2
        model.backward(5, store.rank)
        trainer.step()
        return model.weights()

    files, found = [], []
    for first, second in (("host", "gpu"), ("gpu", "host")):
        run(first, begin)
        files.append(path.read_bytes())
        found.append(run(second, go_on))
    assert files[0] == files[1]
    assert found[0] == found[1]


def test_assigning_to_a_parameter_on_a_gpu() -> None:
    _, gpu = one_gpu()
    parameter = Parameter(gpu.cupy.asarray(np.ones(3, np.float32)), "w")
    parameter.data = np.full(3, 2.0)
    parameter.grad = gpu.cupy.asarray(np.full(3, 5.0, np.float32))
    assert (parameter.data.get().tolist(), parameter.grad.get().tolist()) == ([2.0] * 3, [5.0] * 3)
    with pytest.raises(ValueError, match=r"must have shape \(3,\)"):
        parameter.data = gpu.cupy.asarray(np.ones(2))


def test_a_gradient_is_placed_on_the_weights_gpu_alone() -> None:
    cupy = Machine(2).process()
    gpu = gpu_of(cupy, 0)
    with cupy.cuda.Device(1):
        elsewhere = cupy.asarray(np.zeros(3))
    for memory, placed in ((cupy.asarray(np.zeros(3)), True), (elsewhere, False), (np.zeros(3), False)):
        parameter = Parameter(gpu.cupy.asarray(np.ones(3)))
        parameter.place_grad(memory)
        assert (parameter.grad is memory) is placed


def test_without_cupy_the_updates_are_made_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_device.cuda_driver, "has_cupy", lambda: False)
    _, gpu = one_gpu()
    parameter = Parameter(gpu.cupy.asarray(np.ones(3)))
    trainer = Trainer([parameter], "sgd", {"learning_rate": 0.5}, kvstore=None)
    parameter.grad[...] = 1.0
    trainer.step()
    assert parameter.data.get().tolist() == [0.5] * 3
    found = worker_device.spaces_for([np.zeros(2), parameter.data])
    assert found.device is None
    assert "pip install" in found.missing


def test_a_trainer_that_is_gone_gives_its_memory_back(alone: Any) -> None:
    _, gpu = one_gpu()
    alone([gpu])
    model = Model([gpu], np.float32)
    model.backward(0, 0)
    used = gpu.cupy.machine.used
    before = used[0]
    trainer, _ = train(model, None)
    assert used[0] > before
    del trainer
    gc.collect()
    model.backward(0, 0)
    assert used[0] == before


@pytest.mark.parametrize("kind", ["dist_sync", "dist_sync_device"])
def test_workers_with_several_gpus_each(kind: str) -> None:
    """The gradients of a worker's devices are added on its first one."""
    machine = Machine(2, seed=7)
    processes = [machine.process(), machine.process()]
    found = []
    for sides in ([[None] * 2] * 2, [[gpu_of(one, 0), gpu_of(one, 1)] for one in processes]):

        def body(store: KVStore, sides: Any = sides) -> list[bytes]:
            model = Model(list(sides[store.rank]), np.float32)
            weights = train(model, store, store.rank)[1]
            assert sides[0][0] is None or model.crossed == [(0, 0)] * 3
            return weights

        on_host = sides[0][0] is None
        config = Config(timeout_s=TEST_TIMEOUT_S, device_path="auto" if on_host else "ipc")
        drivers = None if on_host else [side[0] for side in sides]
        found.append(spawn_stores(kind, 2, body, config=config, gpus=drivers))
    assert found[0] == found[1]
