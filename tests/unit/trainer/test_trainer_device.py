"""Trainers whose parameters are on a fake GPU: the host's weights to the last bit, and no copy to the host or from it.

The GPU finds mistakes in the order of what the trainer, the store and the model's passes do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import DeviceFabric, cut_as_on_the_host, gpu_of, gpus_of, one_gpu, spaces_of

from mpikv.config import Config
from mpikv.create import worker_device
from mpikv.create.assembly import local_store
from mpikv.create.spec import parse
from mpikv.kvstore import KVStore
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores
from mpikv.trainer.local_updates import LocalUpdates
from mpikv.trainer.parameter import Parameter
from mpikv.trainer.trainer import Trainer
from mpikv.transports.threads import Fabric

SHAPES = {"bias": (7,), "empty": (0,), "scalar": (), "weight": (30, 41)}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def array_on(gpu: Any, values: np.ndarray) -> Any:
    return values.copy() if gpu is None else gpu.cupy.asarray(values)


def on_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


class Model:
    """Parameters on GPUs or, for None, on the host, whose gradients a backward pass overwrites."""

    def __init__(self, gpus: Sequence[Any], dtype: Any = np.float32) -> None:
        self.gpus, self.params = gpus, {}
        self.crossed: list[tuple[int, int]] = []  # copies up and down in each step
        for name, shape in SHAPES.items():
            start = np.random.default_rng(len(name)).standard_normal(shape).astype(dtype)
            self.params[name] = Parameter(start)
            self.params[name]._data = [array_on(gpu, start) for gpu in gpus]

    def backward(self, step: int, rank: int = 0) -> None:
        for name, parameter in self.params.items():
            for place, (gpu, grad) in enumerate(zip(self.gpus, parameter.list_grad(), strict=True)):
                random = np.random.default_rng([len(name), step, 10 * rank + place])
                values = random.standard_normal(SHAPES[name]) * 3
                grad[...] = array_on(gpu, values.astype(parameter.dtype))

    def trainer(self, store: KVStore | None = None, optimizer: str = "adam", **options: Any) -> Trainer:
        return Trainer(self.params, optimizer, {"learning_rate": 0.1, "wd": 0.01}, kvstore=store, **options)

    def train(self, store: KVStore | None = None, **options: Any) -> Trainer:
        """Steps of both kinds, in which copies are counted."""
        trainer, rank = self.trainer(store, **options), 0 if store is None else store.rank
        for step in range(3):
            self.backward(step, rank)
            before = trainer._spaces.stats()
            trainer.step(*[8] * (step == 1))
            after = trainer._spaces.stats()
            up, down = (after.get(way, 0) - before.get(way, 0) for way in ("copies_up", "copies_down"))
            self.crossed.append((up, down))
        return trainer

    def weights(self) -> list[bytes]:
        return [on_host(one).tobytes() for parameter in self.params.values() for one in parameter.list_data()]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = one_gpu(seed=2)[1]
    monkeypatch.setattr(worker_device, "open_gpu", lambda number: made)
    return made


# --- one process


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.float64], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize("kind", ["", "local, updating", "local", "device, updating", "device"])
def test_one_process(monkeypatch: pytest.MonkeyPatch, kind: str, n_devices: int, dtype: Any, seed: int) -> None:
    """Several devices, with a store and without: in gluon's words kvstore=None."""
    cupy = Machine(n_devices, seed=seed).process()
    gpus = [gpu_of(cupy, number) for number in range(n_devices)]
    monkeypatch.setattr(worker_device, "open_gpu", lambda number: gpus[number])
    name, _, updating = kind.partition(", ")
    model, host = Model(gpus, dtype), Model([None] * n_devices, dtype)
    for one, spaces in ((model, spaces_of(gpus[0])), (host, None)):
        store = local_store(name, parse(name), spaces=spaces) if name else None
        one.train(store, update_on_kvstore=bool(updating))
    assert model.weights() == host.weights()
    assert model.crossed == [(0, 0)] * 3


def test_without_a_store_the_weights_stay_where_they_are(gpu: Any) -> None:
    model = Model([gpu])
    model.backward(0)
    used = gpu.cupy.machine.used
    before = used[0], {name: (id(p.data), p.data.data.ptr) for name, p in model.params.items()}
    trainer = model.train(optimizer="sgd")
    copies = trainer._spaces.stats()["copies_device"]
    trainer.step()
    assert trainer._spaces.stats()["copies_device"] == copies  # gradients are read where they are
    model.train()
    assert used[0] > before[0]
    del trainer
    gc.collect()
    model.backward(0)
    assert (used[0], {name: (id(p.data), p.data.data.ptr) for name, p in model.params.items()}) == before


def test_without_a_store_the_hosts_weights(gpu: Any) -> None:
    """Of parameters one of which is frozen and one moves, in another order; once the gradients are stale."""

    def trained(place: Any) -> list[bytes]:
        model = Model([place])
        model.params["bias"].grad_req = "null"
        weight, values = model.params["weight"], np.arange(30.0 * 41, dtype=np.float32).reshape(30, 41)
        weight._data = [array_on(place, values.T.copy()).T]
        trainer = model.trainer(optimizer="sgd")
        for step in range(3):
            model.backward(step)
            if step == 1:
                trainer.zero_grad()
            if step == 2:
                weight._data = [array_on(place, values)]
            trainer.step(ignore_stale_grad=True)
        return model.weights()

    assert trained(gpu) == trained(None)


# --- workers

Body = Callable[[KVStore, Model], Any]


def of_workers(sides: Sequence[Sequence[Any]], body: Body, *, path: str, dtype: Any = "f4", **options: Any) -> Any:
    """What `body` returns on workers with a model on these GPUs each, or, for None, on the host."""
    # By `mpi` device memory goes round the ring; so do the host's values here.
    algorithm = "ring" if path == "mpi" else "auto"
    n, config = len(sides), Config(timeout_s=TEST_TIMEOUT_S, algorithm=algorithm)
    if sides[0][0] is not None:
        config = Config(timeout_s=TEST_TIMEOUT_S, device_path=path, algorithm=algorithm)
        options["gpus"] = [*(side[0] for side in sides), *[None] * options.get("num_servers", 0)]
        if path == "mpi":
            options["fabric"] = DeviceFabric(Fabric(n, options.get("hosts", ["localhost"] * n)))

    def on_worker(store: KVStore) -> Any:
        return body(store, Model(sides[store.rank], dtype))

    with cut_as_on_the_host():
        return spawn_stores("dist_sync", n, on_worker, config=config, **options)


def check(sides: Sequence[Sequence[Any]], body: Body, **options: Any) -> None:
    host = of_workers([[None] * len(side) for side in sides], body, **options)
    assert of_workers(sides, body, **options) == host


def sides_of(workers: int, seed: int) -> list[list[Any]]:
    return [[gpu] for gpu in gpus_of(Machine(seed=seed), workers)]


def trained(store: KVStore, model: Model, *, on_store: bool | None = None) -> list[bytes]:
    model.train(store, update_on_kvstore=on_store)
    assert store.stats().get("device_path") == "host" or model.crossed == [(0, 0)] * 3
    return model.weights()


def early_and_late(store: KVStore, model: Model, *, on_store: bool) -> list[bytes]:
    trainer = model.trainer(store, "sgd", update_on_kvstore=on_store)
    for step in range(3):
        model.backward(step, store.rank)
        for parameter in reversed(model.params.values()):
            trainer.push_grad(parameter, 4)
        trainer.step(4, wait=not on_store)
    for parameter in model.params.values():
        trainer.wait(parameter)
    return model.weights()


def counted_and_clipped(store: KVStore, model: Model, **_: Any) -> Any:
    trainer, norms = model.trainer(store, "sgd", clip_global_norm=0.5), []
    for step in range(3):
        model.backward(step, store.rank)
        trainer.step(examples=3 + 2 * store.rank)
        norms.append(trainer.last_global_norm)
    return norms, model.weights()


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize(
    ("workers", "path", "scenario", "options"),
    [
        (3, "host", trained, {}),
        (2, "mpi", trained, {}),
        (2, "host", trained, {"num_servers": 2, "dtype": np.float16}),
        (2, "mpi", trained, {"dtype": np.float16}),
        (2, "mpi", trained, {"dtype": BFLOAT16}),
        (3, "host", trained, {"hosts": "aab"}),
        (3, "mpi", trained, {"hosts": "aab"}),
        (2, "host", early_and_late, {"hosts": "ab"}),
        (2, "mpi", counted_and_clipped, {}),
    ],
)
def test_workers(workers: int, path: str, scenario: Any, options: Any, on_store: bool) -> None:
    check(sides_of(workers, 4), partial(scenario, on_store=on_store), path=path, **options)


@pytest.mark.parametrize("on_store", [None, True, False])
def test_a_checkpoint_is_read_by_either(gpu: Any, tmp_path: Path, on_store: bool | None) -> None:
    """Saved on the host, gone on with on GPUs, and the other way round: the same weights and the same files.

    on_store: None: without a store.
    """
    path, states = tmp_path / "checkpoint", tmp_path / "states"
    host, gpus = ([[None]] * 2, sides_of(2, 6)) if on_store is not None else ([[None]], [[gpu]])

    def begin(store: KVStore | None, model: Model) -> None:
        trainer = model.train(store, update_on_kvstore=on_store)
        trainer.save(path)
        if store is None:
            trainer.save_states(states)

    def go_on(store: KVStore | None, model: Model) -> list[bytes]:
        trainer = model.trainer(store, update_on_kvstore=on_store)
        assert trainer.resume(path) == 3
        model.backward(9, 0 if store is None else store.rank)
        trainer.step()
        return model.weights()

    def run(sides: list[list[Any]], body: Any) -> Any:
        return body(None, Model(sides[0], np.float16)) if on_store is None else of_workers(sides, body, path="mpi")

    files, found = [], []
    for first, second in ((host, gpus), (gpus, host)):
        run(first, begin)
        files.append([file.read_bytes() for file in (path, states) if file.exists()])
        found.append(run(second, go_on))
    assert files[0] == files[1]
    assert len(files[0]) == (2 if on_store is None else 1)
    assert found[0] == found[1]


# --- parameters


def test_without_cupy_the_updates_are_made_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_device.cuda_driver, "has_cupy", lambda: False)
    gpu = one_gpu()[1]
    parameter = Parameter(gpu.cupy.asarray(np.ones(3)))
    trainer = Trainer([parameter], "sgd", {"learning_rate": 0.5}, kvstore=None)
    parameter.grad[...] = 1.0
    trainer.step()
    assert parameter.data.get().tolist() == [0.5] * 3
    found = worker_device.spaces_for([np.zeros(2), parameter.data])
    assert found.device is None
    assert "pip install" in found.missing


@pytest.mark.parametrize("mixing", [None, 0.5])
@pytest.mark.parametrize(
    ("path", "options"), [("host", {}), ("host", {"num_servers": 1}), ("mpi", {"hosts": ["a", "b"]})]
)
def test_local_updates(path: str, options: Any, mixing: float | None, tmp_path: Path) -> None:
    def body(store: KVStore, model: Model) -> list[bytes]:
        def made() -> LocalUpdates:
            return LocalUpdates(model.params, store, every=4, parts=2, delay=1, outer="nesterov", mixing=mixing)

        local = made()
        for step in range(9):
            model.backward(step, store.rank)
            for parameter in model.params.values():
                weight = parameter.data
                weight -= parameter.grad
            local.step()
            if step == 5:
                local.save(tmp_path / "saved")
                local = made()
                assert local.resume(tmp_path / "saved") == 3
        return model.weights()

    check(sides_of(2, seed=5), body, path=path, **options)
