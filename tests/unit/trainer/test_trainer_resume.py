"""Checkpoints of a Trainer: a run that was stopped and resumed has the same bits as one that was not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpikv import ConfigError, Parameter, StatesFileError, Trainer
from mpikv.config import Config
from mpikv.errors import MpikvError
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores

STEPS, STOP = 6, 3
SHAPES = {"a": (3, 4), "bias": (4,), "one": (), "z": (2, 5)}


def model(dtype: str = "float32") -> dict[str, Parameter]:
    random = np.random.default_rng(7)
    parameters = {name: Parameter(random.standard_normal(shape).astype(dtype)) for name, shape in SHAPES.items()}
    parameters["a"].data[0, 0] = -0.0
    parameters["fixed"] = Parameter(random.standard_normal(3).astype(dtype), grad_req="null")
    return parameters


def train(trainer: Trainer, parameters: dict[str, Parameter], worker: int, first: int, last: int) -> None:
    for step in range(first, last):
        random = np.random.default_rng([worker, step])
        for name, shape in SHAPES.items():
            grad = random.standard_normal(shape)
            if name == "a":
                grad[0, 0] = 0.0  # its weight stays -0.0 under plain momentum
            parameters[name].grad[...] = grad
        trainer.step(4)


def values(parameters: dict[str, Parameter]) -> list[bytes]:
    return [parameter.data.tobytes() for _, parameter in sorted(parameters.items())]


def run(
    kind: str,
    workers: int,
    servers: int,
    first: int,
    last: int,
    *,
    optimizer: tuple[str, dict] = ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    dtype: str = "float32",
    on_store: bool | None = None,
    stop: bool = False,
    file: Path | None = None,
    shared_memory: str = "auto",
) -> list[tuple[int, list[bytes]]]:
    """Each worker's steps done before, and its weights at the end. file: saved to after the last step."""

    def body(store):
        parameters = model(dtype)
        for parameter in parameters.values() if first else ():
            parameter.data[...] += 100  # what a resumed run begins with does not count
        if first == 0:
            parameters["fixed"].data[...] += store.rank  # worker 0's counts
        trainer = Trainer(parameters, *optimizer, kvstore=store, update_on_kvstore=on_store)
        done = trainer.resume(file) if file is not None else 0
        train(trainer, parameters, store.rank, max(first, done), last)
        if stop:
            trainer.save(file)
        return done, values(parameters)

    config = Config(timeout_s=20, shared_memory=shared_memory)
    return spawn_stores(kind, workers, body, num_servers=servers, config=config)


OPTIMIZERS = [
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    ("adam", {"learning_rate": 0.01}),
    ("lamb", {"learning_rate": 0.01}),
    ("adadelta", {}),
]


@pytest.mark.grid
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer[0])
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 0), (3, 0), (2, 1), (3, 2)])
def test_same_bits(workers, servers, on_store, optimizer, tmp_path):
    more = {"optimizer": optimizer, "on_store": on_store}
    whole = run("dist_sync", workers, servers, 0, STEPS, **more)
    file = tmp_path / "file"
    run("dist_sync", workers, servers, 0, STOP, stop=True, file=file, **more)
    assert os.listdir(tmp_path) == ["file"]  # nothing beside it
    resumed = run("dist_sync", workers, servers, STOP, STEPS, file=file, **more)
    assert [done for done, _ in resumed] == [STOP] * workers
    assert [weights for _, weights in resumed] == [weights for _, weights in whole]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_dtypes(dtype, shared_memory, tmp_path):
    optimizer = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": dtype == "float16"})
    more = {"optimizer": optimizer, "dtype": dtype, "shared_memory": shared_memory}
    whole = run("dist_sync", 3, 0, 0, STEPS, **more)
    run("dist_sync", 3, 0, 0, STOP, stop=True, file=tmp_path / "file", **more)
    resumed = run("dist_sync", 3, 0, STOP, STEPS, file=tmp_path / "file", **more)
    assert [weights for _, weights in resumed] == [weights for _, weights in whole]


@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (3, 2), (4, 0)])
def test_other_numbers_of_workers_and_servers(workers, servers, tmp_path):
    """The weights at the start are those of the file."""
    file = tmp_path / "file"
    saved = run("dist_sync", 2, 1, 0, STOP, stop=True, file=file)
    resumed = run("dist_sync", workers, servers, STOP, STOP, file=file)
    assert [weights for _, weights in resumed] == [saved[0][1]] * workers


@pytest.mark.parametrize("servers", [0, 1])
def test_asynchronous(servers, tmp_path):
    """No order to compare, but weights and states are those that were saved: one worker trains on as if alone."""
    file = tmp_path / "file"
    saved = run("dist_async", 2, servers, 0, STOP, stop=True, file=file)
    assert saved[0][1] == saved[1][1]
    resumed = run("dist_async", 3, servers, STOP, STOP, file=file)
    assert [weights for _, weights in resumed] == [saved[0][1]] * 3
    alone = [run("dist_async", 1, servers, STOP, STEPS, file=file) for _ in range(2)]
    assert alone[0] == alone[1]
    assert alone[0] == run("dist_sync", 1, servers, STOP, STEPS, file=file)


@pytest.mark.parametrize("kind", ["local", "device", None])
def test_one_process(kind, tmp_path):
    def trained(first: int, last: int, *, save: bool) -> list[bytes]:
        parameters = {name: Parameter(p.data, devices=["cpu:0", "cpu:1"]) for name, p in model().items()}
        trainer = Trainer(parameters, "adam", kvstore=kind)
        assert trainer.resume(tmp_path / "file") == first
        for step in range(first, last):
            random = np.random.default_rng(step)
            for name, shape in SHAPES.items():
                for grad in parameters[name].list_grad():
                    grad[...] = random.standard_normal(shape)
            trainer.step(4)
        if save:
            trainer.save(tmp_path / "file")
        return [replica.tobytes() for p in parameters.values() for replica in p.list_data()]

    whole = trained(0, STEPS, save=False)
    trained(0, STOP, save=True)
    assert trained(STOP, STEPS, save=False) == whole


def test_no_file_is_a_start(tmp_path):
    assert [done for done, _ in run("dist_sync", 2, 0, 0, 1, file=tmp_path / "none")] == [0, 0]


def test_learning_rate_schedule_goes_on(tmp_path):
    from mpikv.optimizers import FactorScheduler

    def optimizer():
        return "sgd", {"learning_rate": 1.0, "lr_scheduler": FactorScheduler(2, 0.5)}

    def rates(store):
        parameters = model()
        trainer = Trainer(parameters, *optimizer(), kvstore=store)
        done = trainer.resume(tmp_path / "file")
        train(trainer, parameters, store.rank, done, done + STOP)
        trainer.save(tmp_path / "file")
        return trainer.learning_rate, values(parameters)

    first, second = spawn_stores("dist_sync", 2, rates)[0], spawn_stores("dist_sync", 2, rates)[0]
    whole = run("dist_sync", 2, 0, 0, STEPS, optimizer=optimizer())
    assert second[1] == whole[0][1]
    assert second[0] < first[0]


# --- files that are wrong


def damaged(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize("fault", ["damaged", "truncated", "foreign", "other shape", "other model", "states"])
def test_wrong_files_change_nothing(fault, tmp_path):
    file = tmp_path / "file"
    run("dist_sync", 2, 0, 0, STOP, stop=True, file=file)
    if fault == "damaged":
        damaged(file)
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "foreign":
        file.write_bytes(b"no checkpoint")

    def body(store):
        parameters = model()
        if fault == "other shape":
            parameters["bias"] = Parameter(np.zeros(7, np.float32))
        if fault == "other model":
            parameters["more"] = Parameter(np.zeros(7, np.float32))
        if fault == "states" and store.rank == 0:
            Trainer({"x": Parameter(np.zeros(2))}, "sgd").save_states(file)
        store.barrier()
        trainer = Trainer(parameters, "sgd", {"momentum": 0.9}, kvstore=store)
        before = values(parameters)
        with pytest.raises(StatesFileError, match="file"):
            trainer.resume(file)
        assert trainer.resume(tmp_path / "none") == 0
        return values(parameters) == before

    assert spawn_stores("dist_sync", 2, body) == [True, True]


@pytest.mark.parametrize(
    ("kind", "servers", "on_store"),  # asynchronous updates are made by the store
    [
        ("dist_sync", 0, True),
        ("dist_sync", 0, False),
        ("dist_sync", 1, True),
        ("dist_sync", 1, False),
        ("dist_async", 1, True),
    ],
)
def test_states_of_another_optimizer_change_nothing(kind, servers, on_store, tmp_path):
    """Not the weights either, and the error names the file that was asked for."""
    file = tmp_path / "file"
    run(kind, 2, servers, 0, STOP, stop=True, file=file, optimizer=("adam", {}), on_store=on_store)

    def body(store):
        parameters = model()
        trainer = Trainer(
            parameters, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store, update_on_kvstore=on_store
        )
        before = values(parameters)
        with pytest.raises(StatesFileError) as raised:
            trainer.resume(file)
        assert str(file) in str(raised.value)
        return values(parameters) == before

    assert spawn_stores(kind, 2, body, num_servers=servers, config=Config(timeout_s=20)) == [True, True]


def test_a_name_as_long_as_names_can_be(tmp_path):
    file = tmp_path / ("x" * 255)
    run("dist_sync", 2, 0, 0, STOP, stop=True, file=file)
    assert os.listdir(tmp_path) == [file.name]


def test_resume_comes_first():
    def body(store):
        parameters = model()
        trainer = Trainer(parameters, "sgd", kvstore=store)
        train(trainer, parameters, store.rank, 0, 1)
        with pytest.raises(MpikvError, match="resume after a step: it comes before the first one"):
            trainer.resume("file")

    spawn_stores("dist_sync", 1, body)


@pytest.mark.parametrize("on_store", [True, False])
def test_a_save_that_fails_fails_everywhere_and_keeps_the_old_file(on_store, tmp_path):
    file = tmp_path / "file"
    run("dist_sync", 2, 0, 0, STOP, stop=True, file=file, on_store=on_store)
    before = file.read_bytes()

    def body(store):
        trainer = Trainer(model(), "sgd", kvstore=store, update_on_kvstore=on_store)
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*no folder'$"):
            trainer.save(tmp_path / "no folder" / "file")

    spawn_stores("dist_sync", 2, body)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


# --- stopping by itself


def stopping(file: str, *, trainers: int = 1, kind: str = "dist_sync", workers: int = 2, servers: int = 0):
    """Worker 1 asks in step 3; per worker the steps of its trainers when told so, or its exit status."""

    def body(store):
        parameters = [model() for _ in range(trainers)]
        made = [Trainer(one, "sgd", {"momentum": 0.9}, kvstore=store) for one in parameters]
        store.barrier()
        try:
            for step in range(5000):
                if store.rank == workers - 1 and step == 3:
                    store.request_stop()
                for trainer, one in zip(made, parameters, strict=True):
                    train(trainer, one, store.rank, step, step + 1)
                if made[-1].stop_requested:
                    return step + 1, values(parameters[0])
        except SystemExit as end:
            return f"exit {end.code}", values(parameters[0])
        return None

    return spawn_stores(kind, workers, body, num_servers=servers, config=Config(timeout_s=20, stop_file=file))


@pytest.mark.parametrize(
    ("kind", "servers"), [("dist_sync", 0), ("dist_sync", 1), ("dist_async", 0), ("dist_async", 1)]
)
def test_saves_and_ends(kind, servers, tmp_path, capfd):
    file = str(tmp_path / "file")
    found = stopping(file, kind=kind, servers=servers, workers=3)
    assert [one[0] for one in found] == ["exit 0"] * 3
    assert found[0][1] == found[1][1] == found[2][1] or kind == "dist_async"
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("mpikv: stopped")]
    assert len(lines) == 1

    def body(store):
        parameters = model()
        trainer = Trainer(parameters, "sgd", {"momentum": 0.9}, kvstore=store)
        return trainer.resume(), values(parameters)

    resumed = spawn_stores(kind, 3, body, num_servers=servers, config=Config(timeout_s=20, stop_file=file))
    assert lines == [f"mpikv: stopped after step {resumed[0][0]}: weights and optimizer states are in {file}"]
    assert [one[1] for one in resumed] == [found[0][1]] * 3


def test_without_a_file_the_program_decides():
    found = stopping("")
    assert found[0] == found[1]
    assert found[0][0] >= 4


def test_two_trainers_are_left_to_the_program(tmp_path, capfd):
    found = stopping(str(tmp_path / "file"), trainers=2)
    assert found[0] == found[1]
    assert found[0][0] >= 4
    assert os.listdir(tmp_path) == []
    assert capfd.readouterr().out.count("is not written, as several trainers share the store") == 1


@pytest.mark.parametrize("path", ["no folder/file", ""])
def test_stop_file_that_cannot_be_written(path, tmp_path):
    with pytest.raises(RankError) as caught:
        stopping(str(tmp_path / path))
    assert isinstance(caught.value.errors[0], ConfigError)
    assert "MPIKV_STOP_FILE" in str(caught.value.errors[0])
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("batch_size", [4, np.int64(4), 4.0, 2.5])
def test_examples_are_counted(on_store, batch_size, tmp_path):
    """By every worker, saved, and read by another number of workers; whole numbers stay whole."""
    file = tmp_path / "file"

    def body(store, steps):
        parameters = model()
        trainer = Trainer(parameters, "sgd", kvstore=store, update_on_kvstore=on_store)
        trainer.resume(file)
        for parameter in parameters.values():
            parameter.zero_grad()
        for _ in range(steps):
            if on_store:
                trainer.step(batch_size)
            else:
                trainer.allreduce_grads()
                trainer.update(batch_size)
        trainer.save(file)
        return trainer.steps, trainer.examples

    wanted = 3 * float(batch_size)
    for workers, steps in ((2, 3), (3, 0)):
        for found in spawn_stores("dist_sync", workers, lambda store, n=steps: body(store, n)):
            assert found == (3, wanted)
            assert type(found[1]) is (int if wanted.is_integer() else float)


def test_wrong_numbers_of_examples():
    trainer = Trainer(model(), "sgd")
    trainer.examples = 7
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"examples must be (at least 0|finite)"):
            trainer.examples = wrong
    assert trainer.examples == 7
