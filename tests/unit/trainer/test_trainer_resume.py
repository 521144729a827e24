"""Checkpoints and snapshots of a Trainer: a run that was stopped and resumed has the same bits as one that was not.

What each worker keeps for itself is in them, and comes back to the worker that kept it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from on_workers import on
from store_modes import HYBRID, MESSAGES, ONE_HOST, SERVED, TWO_HOSTS, Mode, modes

from mpikv import Parameter, StatesFileError, Trainer, UnsupportedError
from mpikv.common.snapshot_names import in_folder
from mpikv.common.snapshot_names import whole as whole_ones
from mpikv.errors import MpikvError
from mpikv.optimizers import FactorScheduler, archive
from mpikv.optimizers.states_file import packed
from mpikv.testing.ranks import RankError
from mpikv.trainer import checkpoint

STEPS, STOP = 6, 3
SHAPES = {"a": (3, 4), "bias": (4,), "one": (), "z": (2, 5)}
MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
ALONE, THREE, SERVERS = Mode("dist_sync", 1), Mode("dist_sync", 3), Mode("dist_sync", 3, 2)
EACH_STEP_S = 1e-6  # from one snapshot to the next
ON_STORE = pytest.mark.parametrize("on_store", [True, False])


def model(dtype: str = "float32") -> dict[str, Parameter]:
    random = np.random.default_rng(7)
    parameters = {name: Parameter(random.standard_normal(shape).astype(dtype)) for name, shape in SHAPES.items()}
    parameters["a"].data[0, 0] = -0.0
    parameters["fixed"] = Parameter(random.standard_normal(3).astype(dtype), grad_req="null")
    return parameters


def train(trainer, parameters, worker, first, last, *, share=1.0):
    for step in range(first, last):
        random = np.random.default_rng([worker, step])
        for name, shape in SHAPES.items():
            grad = random.standard_normal(shape) * share
            if name == "a":
                grad[0, 0] = 0.0  # its weight stays -0.0 under plain momentum
            parameters[name].grad[...] = grad
        trainer.step(4)


def values(parameters: dict[str, Parameter]) -> list[bytes]:
    return [parameter.data.tobytes() for _, parameter in sorted(parameters.items())]


class Kept:
    """Some arrays of a worker."""

    def __init__(self, **state: Any) -> None:
        self.load_state_dict(state)

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def of_worker(rank: int) -> Kept:
    """Another number of arrays on each, of many dtypes and shapes."""
    several = {f"velocity {i}": np.full((2, i), rank + i / 8, np.float32) for i in range(rank + 1)}
    key = np.array([1.5, rank], ml_dtypes.bfloat16)
    return Kept(**several, key=key, flags=np.array([rank == 0, True]), steps=np.array(1 << 40 | rank))


def begun(store, *, optimizer=MOMENTUM, dtype="float32", on_store=None, kept=None):
    parameters = model(dtype)
    return parameters, Trainer(parameters, *optimizer, kvstore=store, update_on_kvstore=on_store, worker_state=kept)


def run(
    mode: Mode,
    first: int,
    last: int,
    file: Path | None = None,
    *,
    stop: bool = False,
    by_itself: bool = False,
    **options,
) -> list:
    """Each worker's steps done before, and its weights, learning rate and own state at the end.

    stop: save after the last step. by_itself: in snapshots after each step, in the folder `file`.
    """

    def body(store):
        kept = Kept() if first else of_worker(store.rank)
        parameters, trainer = begun(store, kept=kept, **options)
        for parameter in parameters.values() if first else ():
            parameter.data[...] += 100  # what a resumed run begins with does not count
        done = trainer.resume(None if by_itself else file) if file is not None else 0
        train(trainer, parameters, store.rank, max(first, done), last)
        if stop and not by_itself:
            trainer.save(file)
        own = {name: (type(one), one.dtype, one.shape, one.tobytes()) for name, one in kept.state.items()}
        return done, values(parameters), trainer.learning_rate, own

    return mode.run(body, **({"snapshot_dir": str(file), "snapshot_s": EACH_STEP_S} if by_itself else {}))


SCHEDULED = "sgd", {"momentum": 0.9, "lr_scheduler": FactorScheduler(2, 0.5, base_lr=0.1)}
OPTIMIZERS = (
    *((SCHEDULED, dtype) for dtype in ("float32", "float64")),
    (("sgd", {**MOMENTUM[1], "multi_precision": True}), "float16"),
    *(((name, {"learning_rate": 0.01}), "float32") for name in ("adam", "lamb")),
    (("adadelta", {}), "float32"),
)


@pytest.mark.parametrize(("optimizer", "dtype"), OPTIMIZERS, ids=lambda one: one if isinstance(one, str) else one[0])
@ON_STORE
@pytest.mark.parametrize("by_itself", [True, False])
@modes(ALONE, ONE_HOST, THREE, MESSAGES, SERVED, SERVERS, HYBRID[3])
def test_same_bits(mode, by_itself, on_store, optimizer, dtype, tmp_path):  # noqa: PLR0917 - fixtures
    """In a file whose name is as long as names can be, or a folder of snapshots, which has two in the end."""
    file, options = tmp_path / ("x" * 255), {"optimizer": optimizer, "dtype": dtype, "on_store": on_store}
    whole = run(mode, 0, STEPS, **options)
    options["by_itself"] = by_itself
    run(mode, 0, STOP, file, stop=True, **options)
    assert os.listdir(tmp_path) == [file.name]  # nothing beside it
    assert not by_itself or [one.step for one in whole_ones(in_folder(str(file)))] == [STOP, STOP - 1]
    assert run(mode, STOP, STEPS, file, **options) == [(STOP, *found) for _, *found in whole]


@pytest.mark.parametrize("by_itself", [True, False])
def test_other_numbers_of_workers_and_servers_go_on(by_itself, tmp_path):
    """As one worker would have: other workers' gradients are 0. Their weights at the start are worker 0's."""
    changes = {"snapshot_dir": str(tmp_path / "file"), "snapshot_s": EACH_STEP_S} if by_itself else {}

    def body(store, first, last):
        parameters = model()
        for parameter in parameters.values():
            parameter.data[...] -= store.rank
        trainer = Trainer(parameters, *MOMENTUM, kvstore=store)
        assert values(parameters) == values(model())
        assert trainer.resume(None if by_itself else tmp_path / "file") == first
        train(trainer, parameters, 0, first, last, share=float(store.rank == 0))
        if not by_itself:
            trainer.save(tmp_path / "file")
        return values(parameters)

    for first, last, mode in ((0, 2, TWO_HOSTS), (2, 3, SERVERS), (3, 4, ALONE), (4, STEPS, Mode("dist_sync", 4))):
        found = mode.run(partial(body, first=first, last=last), **changes)
        assert found == [found[0]] * mode.workers
    assert found[0] == run(ALONE, 0, STEPS)[0][1]


@pytest.mark.parametrize("servers", [0, 1])
def test_asynchronous(servers, tmp_path):
    """No order to compare, but weights and states are those that were saved: one worker trains on as if alone."""
    file, two = tmp_path / "file", Mode("dist_async", 2, servers)
    saved = run(two, 0, STOP, file, stop=True)
    assert saved[0][1] == saved[1][1]
    assert run(two, STOP, STOP, file) == [(STOP, *found) for _, *found in saved]
    assert [found[:2] for found in run(two._replace(workers=3), STOP, STOP, file)] == [(STOP, saved[0][1])] * 3
    alone = [run(Mode(name, 1, servers), STOP, STEPS, file) for name in ("dist_async", "dist_async", "dist_sync")]
    assert alone[0] == alone[1] == alone[2]


# --- files that are wrong


@pytest.mark.parametrize(
    ("fault", "mode", "on_store"),
    [
        *((fault, ONE_HOST, None) for fault in ("damaged", "other shape", "other model", "states")),
        *(("other optimizer", mode, on_store) for mode in (ONE_HOST, SERVED) for on_store in (True, False)),
        ("other optimizer", Mode("dist_async", 2, 1), True),
    ],
)
def test_wrong_files_change_nothing(fault, mode, on_store, tmp_path):
    """Not the weights either, and the error names the file that was asked for."""
    file = tmp_path / "file"
    optimizer = ("adam", {}) if fault == "other optimizer" else MOMENTUM
    run(mode, 0, STOP, file, stop=True, optimizer=optimizer, on_store=on_store)
    if fault == "damaged":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "states":
        Trainer({"x": Parameter(np.zeros(2))}, "sgd").save_states(file)

    def body(store):
        parameters = model()
        if fault in ("other shape", "other model"):
            parameters["bias" if fault == "other shape" else "more"] = Parameter(np.zeros(7, np.float32))
        trainer = Trainer(parameters, *MOMENTUM, kvstore=store, update_on_kvstore=on_store)
        before = values(parameters)
        with pytest.raises(StatesFileError) as raised:
            trainer.resume(file)
        assert str(file) in str(raised.value)
        assert trainer.resume(tmp_path / "none") == 0
        assert values(parameters) == before

    mode.run(body)


@ON_STORE
@on(ONE_HOST)
def test_a_save_that_fails_fails_everywhere(store, on_store, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*no folder/file'$"):
        begun(store, on_store=on_store)[1].save(tmp_path / "no folder" / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user")
def test_another_users_file_at_the_place_of_the_stop_file_is_told_of(tmp_path, capfd):
    """In a shared folder somebody may have put it there; a file that the program names is meant."""
    file = tmp_path / "file"
    run(ONE_HOST, 0, STOP, file, stop=True, on_store=True)
    os.chown(file, 12345, -1)

    def body(store):
        return [begun(store)[1].resume(*name) for name in ((), (file,))]

    assert ONE_HOST.run(body, stop_file=str(file)) == [[STOP, STOP]] * ONE_HOST.workers
    told = "(MPIKV_STOP_FILE), from which this run goes on, is of user 12345"
    assert capfd.readouterr().err.count(told) == 1


# --- what each worker keeps for itself


@ON_STORE
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_who_gets_back_what_was_kept(workers, on_store, tmp_path, capfd):
    """Each worker, but one that kept nothing; other numbers of workers nothing, which is said once.

    Nothing is said to a trainer that keeps nothing, nor of one that kept nothing.
    """
    path, mode = tmp_path / "run", Mode("dist_sync", workers)

    def save(*kept: Any) -> None:
        THREE.run(lambda store: begun(store, kept=kept[store.rank], on_store=on_store)[1].save(path))

    def resume(store: Any) -> Any:
        kept = Kept(old=np.zeros(1))
        begun(store, kept=kept, on_store=on_store)[1].resume(path)
        return list(kept.state)

    save(None, Kept(), Kept(a=np.ones(2)))
    assert mode.run(resume) == ([["old"], [], ["a"]] if workers == 3 else [["old"]] * workers)
    said = f"mpikv: {path} has what each of 3 workers kept (worker_state), and {workers} go on: they begin with none of"
    assert capfd.readouterr().err.count(said) == (workers != 3)
    mode.run(lambda store: begun(store, on_store=on_store)[1].resume(path))
    save(None, None, None)
    assert mode.run(resume) == [["old"]] * workers
    assert capfd.readouterr().err == ""


def test_what_keeps_no_state() -> None:
    for wrong, words in ((7, "7 has no method state_dict"), (type("Half", (), {"state_dict": dict})(), "load_state_")):
        with pytest.raises(TypeError, match=f"worker_state: .*{words}"):
            begun(None, kept=wrong)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        *(({"b": wrong}, "kept/b ") for wrong in (1j, np.array(["text"]), np.ones(2, np.complex64))),
        (RuntimeError("no generator"), "state_dict of worker_state raised RuntimeError: no generator$"),
        (None, "state_dict of worker_state gave None, no dict$"),
    ],
    ids=str,
)
@ON_STORE
def test_what_cannot_be_saved(on_store, state, words, tmp_path):
    """Every worker hears of it, who catches the error goes on, and the file is as it was."""

    def body(store: Any) -> None:
        kept = Kept(a=np.ones(2))
        trainer = begun(store, kept=kept, on_store=on_store)[1]
        trainer.save(tmp_path / "run")
        if store.rank == 1:
            kept.state = state
        with pytest.raises(UnsupportedError, match=f"worker 1: {words}"):
            trainer.save(tmp_path / "run")
        trainer.step(1)
        assert trainer.steps == 1

    ONE_HOST.run(body)
    assert os.listdir(tmp_path) == ["run"]
    assert begun(None)[1].resume(tmp_path / "run") == 0


def test_contents_that_are_none_of_a_checkpoint(tmp_path: Path) -> None:
    content = packed([], {"optimizers": [], "configs": []})
    content |= {"steps": 4, "examples": 8, "agreed": [], "weights": {"0": np.zeros(5)}, "workers": []}

    def resumed_from(**changes: Any) -> int:
        archive.save(tmp_path / "run", checkpoint.KIND, {**content, **changes})
        return Trainer([Parameter(np.ones(5))], "sgd", worker_state=Kept()).resume(tmp_path / "run")

    absent = {"array": "x", "scalar": False}
    assert resumed_from() == resumed_from(workers=[None]) == resumed_from(workers=[{"a": np.ones(2)}]) == 4
    wrong = [{"weights": one} for one in (None, "a", ["w"], {"0": 3}, {"0": absent}, {"0": np.float64(1)})]
    wrong += [{"workers": one} for one in (None, "x", 1, [3], [["w"]])]
    for changes in (*wrong, {"steps": -1}, {"steps": 1.5}, {"examples": "x"}, {"agreed": [1]}, {"agreed": ["x", 1]}):
        with pytest.raises(StatesFileError, match=f"^{tmp_path}/run: damaged: .*$"):  # one line
            resumed_from(**changes)


# --- stopping by itself


def stopping(file: str, *, trainers: int = 1, mode: Mode = ONE_HOST):
    """The last worker asks in step 3; per worker the steps of its trainers when told so, or its exit status."""

    def body(store):
        several = [begun(store) for _ in range(trainers)]
        store.barrier()
        try:
            for step in range(5000):
                if store.rank == mode.workers - 1 and step == 3:
                    store.request_stop()
                for parameters, trainer in several:
                    train(trainer, parameters, store.rank, step, step + 1)
                if several[-1][1].stop_requested:
                    return step + 1, values(several[0][0])
        except SystemExit as end:
            return f"exit {end.code}", values(several[0][0])
        return None

    return mode.run(body, stop_file=file)


@modes(*(Mode(kind, 3, servers) for kind in ("dist_sync", "dist_async") for servers in (0, 1)))
def test_saves_and_ends(mode, tmp_path, capfd):
    file = str(tmp_path / "file")
    found = stopping(file, mode=mode)
    assert [one[0] for one in found] == ["exit 0"] * 3
    assert found[0][1] == found[1][1] == found[2][1] or not mode.synchronous
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("mpikv: stopped")]

    def body(store):
        parameters, trainer = begun(store)
        return trainer.resume(), values(parameters)

    resumed = mode.run(body, stop_file=file)
    assert lines == [f"mpikv: stopped after step {resumed[0][0]}: weights and optimizer states are in {file}"]
    assert [one[1] for one in resumed] == [found[0][1]] * 3


@pytest.mark.parametrize("trainers", [1, 2])
def test_the_program_decides_without_a_file_and_with_two_trainers(trainers, tmp_path, capfd):
    found = stopping(str(tmp_path / "file") if trainers > 1 else "", trainers=trainers)
    assert found[0] == found[1]
    assert found[0][0] >= 4
    assert os.listdir(tmp_path) == []
    said = capfd.readouterr().out.count("is not written, as several trainers share the store")
    assert said == trainers - 1


@pytest.mark.parametrize("path", ["no folder/file", ""])
def test_stop_file_that_cannot_be_written(path, tmp_path):
    with pytest.raises(RankError, match="ConfigError: MPIKV_STOP_FILE="):
        stopping(str(tmp_path / path), mode=ALONE)


@ON_STORE
@pytest.mark.parametrize("batch_size", [4, np.int64(4), 4.0, 2.5])
def test_examples_are_counted(on_store, batch_size, tmp_path):
    """By every worker, saved, and read by another number of workers; whole numbers stay whole."""

    def body(store):
        _, trainer = begun(store, on_store=on_store)
        for _ in range(trainer.resume(tmp_path / "file"), 3):
            trainer.zero_grad()
            if on_store:
                trainer.step(batch_size)
            else:
                trainer.allreduce_grads()
                trainer.update(batch_size)
        trainer.save(tmp_path / "file")
        return trainer.steps, trainer.examples

    wanted = 3 * float(batch_size)
    for found in ONE_HOST.run(body) + THREE.run(body):
        assert found == (3, wanted)
        assert type(found[1]) is (int if wanted.is_integer() else float)


def test_mistakes():
    parameters, trainer = begun(None)
    trainer.examples = 7
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"examples must be (at least 0|finite)"):
            trainer.examples = wrong
    assert trainer.examples == 7
    train(trainer, parameters, 0, 0, 1)
    with pytest.raises(MpikvError, match="resume after a step: it comes before the first one"):
        trainer.resume("file")
