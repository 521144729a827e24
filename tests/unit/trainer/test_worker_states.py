"""What each worker keeps for itself is in a Trainer's checkpoint, and comes back to the worker that kept it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpikv import Parameter, StatesFileError, Trainer, UnsupportedError
from mpikv.optimizers.archive import write_archive
from mpikv.testing.stores import spawn_stores

Body = Callable[[Any], Any]


class Kept:
    """Some arrays of a worker."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def of_worker(rank: int) -> dict[str, Any]:
    """Another number of arrays on each, of many dtypes and shapes."""
    several = {f"velocity {i}": np.full((2, i), rank + i / 8, np.float32) for i in range(rank + 1)}
    return {
        **several,
        "bfloat16": np.array([1.5, rank], ml_dtypes.bfloat16),
        "flags": np.array([rank == 0, True]),
        "generator": np.arange(rank, rank + 9, dtype=np.uint8),
        "steps": np.array(1 << 40 | rank),
    }


def trainer_of(store: Any, kept: Any, *, on_store: bool | None = None) -> Trainer:
    return Trainer([Parameter(np.ones(5))], "sgd", kvstore=store, update_on_kvstore=on_store, worker_state=kept)


def saved(path: Path, kept: Callable[[int], Any], *, on_store: bool | None = None) -> Body:
    def body(store: Any) -> None:
        trainer = trainer_of(store, kept(store.rank), on_store=on_store)
        trainer.step(1)
        trainer.save(path)

    return body


def resumed(path: Path, *, on_store: bool | None = None) -> Body:
    def body(store: Any) -> Any:
        kept = Kept()
        assert trainer_of(store, kept, on_store=on_store).resume(path) == 1
        return kept.state

    return body


@pytest.mark.parametrize(
    ("kind", "workers", "servers", "on_store"),
    [
        ("local", 1, 0, True),
        ("dist_sync", 1, 0, True),
        ("dist_sync", 3, 0, True),
        ("dist_sync", 3, 0, False),
        ("dist_sync", 3, 2, True),
        ("dist_async", 2, 1, True),
        ("dist_async", 3, 0, True),
    ],
)
def test_each_worker_gets_its_own(kind: str, workers: int, servers: int, on_store: bool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    keeps = saved(path, lambda rank: Kept(**of_worker(rank)), on_store=on_store)
    spawn_stores(kind, workers, keeps, num_servers=servers)
    found = spawn_stores(kind, workers, resumed(path, on_store=on_store), num_servers=servers)
    for rank, state in enumerate(found):
        assert state.keys() == of_worker(rank).keys()
        for name, expected in of_worker(rank).items():
            assert type(state[name]) is np.ndarray
            assert (state[name].dtype, state[name].shape) == (expected.dtype, expected.shape)
            assert state[name].tobytes() == expected.tobytes()


def test_without_a_store(tmp_path: Path) -> None:
    trainer = trainer_of(None, Kept(**of_worker(0)))
    trainer.save(tmp_path / "run")
    kept = Kept()
    trainer_of(None, kept).resume(tmp_path / "run")
    assert kept.state.keys() == of_worker(0).keys()


def test_some_workers_keep_nothing(tmp_path: Path) -> None:
    """Those are not asked to load anything; one that kept an empty state is."""
    given = [None, Kept(), Kept(a=np.ones(2))]
    spawn_stores("dist_sync", 3, saved(tmp_path / "run", lambda rank: given[rank]))

    def body(store: Any) -> Any:
        kept = Kept(old=np.zeros(1))
        trainer_of(store, kept).resume(tmp_path / "run")
        return list(kept.state)

    assert spawn_stores("dist_sync", 3, body) == [["old"], [], ["a"]]


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_other_numbers_of_workers_begin_with_none(
    workers: int, on_store: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which is said once; and nothing is said to a trainer that keeps nothing, nor of one that kept nothing."""
    path = tmp_path / "run"
    spawn_stores("dist_sync", 3, saved(path, lambda rank: Kept(a=np.ones(rank)), on_store=on_store))
    assert spawn_stores("dist_sync", workers, resumed(path, on_store=on_store)) == [{}] * workers
    said = f"mpikv: {path} has what each of 3 workers kept (worker_state), and {workers} go on: they begin with none of"
    assert capfd.readouterr().err.count(said) == 1
    spawn_stores("dist_sync", workers, lambda store: trainer_of(store, None, on_store=on_store).resume(path))
    spawn_stores("dist_sync", 3, saved(path, lambda rank: None, on_store=on_store))
    assert spawn_stores("dist_sync", workers, resumed(path, on_store=on_store)) == [{}] * workers
    assert capfd.readouterr().err == ""


def test_what_is_none() -> None:
    with pytest.raises(TypeError, match="worker_state: 7 has no method state_dict"):
        trainer_of(None, 7)
    with pytest.raises(TypeError, match="has no method load_state_dict"):
        trainer_of(None, type("Half", (), {"state_dict": dict})())


@pytest.mark.parametrize("wrong", ["text", np.array(["text"]), np.ones(2, np.complex64)], ids=str)
@pytest.mark.parametrize("on_store", [True, False])
def test_what_cannot_be_saved(on_store: bool, wrong: Any, tmp_path: Path) -> None:
    """Every worker hears of it, goes on, and the file is as it was."""
    path = tmp_path / "run"

    def body(store: Any) -> int:
        kept = Kept(a=np.ones(2))
        trainer = trainer_of(store, kept, on_store=on_store)
        trainer.save(path)
        if store.rank == 1:
            kept.state["b"] = wrong
        with pytest.raises(UnsupportedError, match="worker 1: save: 'b' of worker_state"):
            trainer.save(path)
        trainer.step(1)
        return trainer.steps

    assert spawn_stores("dist_sync", 3, body) == [1] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["run"]
    assert trainer_of(None, None).resume(path) == 0


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (Kept(), "save: state_dict of worker_state raised RuntimeError: no generator"),
        (None, "save: state_dict of worker_state gave None, no arrays by their names"),
        (
            Kept(a=np.ones(2)),
            r"save: worker_state has the names \['a', \('b', 1\)\]; a checkpoint holds str alone",
        ),
    ],
)
def test_what_one_worker_fails_in_all_hear_of(kept: Kept | None, words: str, tmp_path: Path) -> None:
    """Nobody waits for it: who catches the error can go on."""

    def fail() -> dict[str, Any]:
        raise RuntimeError("no generator")

    if kept is None:
        kept = Kept()
        kept.state = None  # type: ignore[assignment]
    elif kept.state:
        kept.state["b", 1] = np.ones(2)  # type: ignore[index]
    else:
        kept.state_dict = fail  # type: ignore[method-assign]

    def body(store: Any) -> int:
        trainer = trainer_of(store, kept if store.rank == 1 else Kept(a=np.ones(2)))
        with pytest.raises(UnsupportedError, match=f"worker 1: {words}$"):
            trainer.save(tmp_path / "run")
        trainer.step(1)
        return trainer.steps

    assert spawn_stores("dist_sync", 2, body) == [1] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [[["a", 1]], [{}], [3], ["a", "a"], "a", None])
def test_names_that_are_no_strings(names: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    trainer_of(None, None).save_states(tmp_path / "states")
    states = np.frombuffer((tmp_path / "states").read_bytes(), np.uint8)
    arrays = [np.zeros(5)] * (len(names) if isinstance(names, list) else 1)
    of_worker = io.BytesIO()
    write_archive(of_worker, "mpikv state of a worker", {"names": names}, arrays)
    kept = np.frombuffer(of_worker.getvalue(), np.uint8)
    header = {"steps": 4, "examples": 8}
    for more, values in (
        ({"names": names}, [*arrays, states]),
        ({"names": ["0"], "workers": 1}, [np.zeros(5), states, kept]),
    ):
        with path.open("wb") as file:
            write_archive(file, "mpikv checkpoint", {**header, **more}, values)
        with pytest.raises(StatesFileError, match=f"{path}: damaged: "):
            trainer_of(None, Kept()).resume(path)


def test_checkpoints_of_no_workers_and_damaged_ones(tmp_path: Path) -> None:
    """Those that were written before there was any such state have no number of workers."""
    path = tmp_path / "run"
    states = io.BytesIO()
    trainer_of(None, None).save_states(tmp_path / "states")
    states.write((tmp_path / "states").read_bytes())
    values = [np.zeros(5), np.frombuffer(states.getvalue(), np.uint8)]
    header = {"steps": 4, "examples": 8, "names": ["0"]}
    for more, found in (({}, 4), ({"workers": 0}, 4), ({"workers": 1}, None), ({"workers": "x"}, None)):
        with path.open("wb") as file:
            write_archive(file, "mpikv checkpoint", {**header, **more}, values)
        if found:
            assert trainer_of(None, Kept()).resume(path) == found
        else:
            with pytest.raises(StatesFileError, match="workers"):
                trainer_of(None, Kept()).resume(path)
