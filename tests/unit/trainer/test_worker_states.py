"""What each worker keeps for itself is in a Trainer's checkpoint, and comes back to the worker that kept it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from store_modes import ONE_HOST, Mode

from mpikv import Parameter, StatesFileError, Trainer, UnsupportedError
from mpikv.optimizers import archive
from mpikv.optimizers.states_file import packed
from mpikv.trainer import checkpoint

THREE = Mode("dist_sync", 3)
ON_STORE = pytest.mark.parametrize("on_store", [True, False])


class Kept:
    """Some arrays of a worker."""

    def __init__(self, **state: Any) -> None:
        self.state: Any = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
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


def save(path: Path, mode: Mode, kept: Callable[[int], Any], *, on_store: bool | None = None) -> None:
    def body(store: Any) -> None:
        trainer = trainer_of(store, kept(store.rank), on_store=on_store)
        trainer.step(1)
        trainer.save(path)

    mode.run(body)


def resumed(path: Path, mode: Mode, *, on_store: bool | None = None) -> list[Any]:
    def body(store: Any) -> Any:
        kept = Kept()
        assert trainer_of(store, kept, on_store=on_store).resume(path) == 1
        return kept.state

    return mode.run(body)


@pytest.mark.parametrize(
    ("mode", "on_store"),
    [
        *((mode, True) for mode in (Mode("local", 1), Mode("dist_sync", 1), THREE, Mode("dist_sync", 3, 2))),
        *((THREE, False), (Mode("dist_async", 2, 1), True), (Mode("dist_async", 3), True)),
    ],
)
def test_each_worker_gets_its_own(mode: Mode, on_store: bool, tmp_path: Path) -> None:
    save(tmp_path / "run", mode, lambda rank: Kept(**of_worker(rank)), on_store=on_store)
    for rank, state in enumerate(resumed(tmp_path / "run", mode, on_store=on_store)):
        assert state.keys() == of_worker(rank).keys()
        for name, expected in of_worker(rank).items():
            assert type(state[name]) is np.ndarray
            assert (state[name].dtype, state[name].shape) == (expected.dtype, expected.shape)
            assert state[name].tobytes() == expected.tobytes()


def test_without_a_store(tmp_path: Path) -> None:
    trainer_of(None, Kept(**of_worker(0))).save(tmp_path / "run")
    kept = Kept()
    trainer_of(None, kept).resume(tmp_path / "run")
    assert kept.state.keys() == of_worker(0).keys()


def test_some_workers_keep_nothing(tmp_path: Path) -> None:
    """Those are not asked to load anything; one that kept an empty state is."""
    given = [None, Kept(), Kept(a=np.ones(2))]
    save(tmp_path / "run", THREE, lambda rank: given[rank])

    def body(store: Any) -> Any:
        kept = Kept(old=np.zeros(1))
        trainer_of(store, kept).resume(tmp_path / "run")
        return list(kept.state)

    assert THREE.run(body) == [["old"], [], ["a"]]


@ON_STORE
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_other_numbers_of_workers_begin_with_none(
    workers: int, on_store: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which is said once; and nothing is said to a trainer that keeps nothing, nor of one that kept nothing."""
    path, mode = tmp_path / "run", Mode("dist_sync", workers)
    save(path, THREE, lambda rank: Kept(a=np.ones(rank)), on_store=on_store)
    assert resumed(path, mode, on_store=on_store) == [{}] * workers
    said = f"mpikv: {path} has what each of 3 workers kept (worker_state), and {workers} go on: they begin with none of"
    assert capfd.readouterr().err.count(said) == 1
    mode.run(lambda store: trainer_of(store, None, on_store=on_store).resume(path))
    save(path, THREE, lambda rank: None, on_store=on_store)
    assert resumed(path, mode, on_store=on_store) == [{}] * workers
    assert capfd.readouterr().err == ""


def test_what_is_none() -> None:
    with pytest.raises(TypeError, match="worker_state: 7 has no method state_dict"):
        trainer_of(None, 7)
    with pytest.raises(TypeError, match="has no method load_state_dict"):
        trainer_of(None, type("Half", (), {"state_dict": dict})())


@pytest.mark.parametrize(
    ("state", "words"),
    [
        *(({"b": wrong}, "'b' of worker_state") for wrong in ("text", np.array(["text"]), np.ones(2, np.complex64))),
        (RuntimeError("no generator"), "state_dict of worker_state raised RuntimeError: no generator$"),
        (None, "state_dict of worker_state gave None, no arrays by their names$"),
        ({"a": 1, ("b", 1): 2}, r"worker_state has the names \['a', \('b', 1\)\]; a checkpoint holds str alone$"),
    ],
    ids=str,
)
@ON_STORE
def test_what_cannot_be_saved(on_store: bool, state: Any, words: str, tmp_path: Path) -> None:
    """Every worker hears of it, who catches the error goes on, and the file is as it was."""
    path = tmp_path / "run"

    def body(store: Any) -> None:
        kept = Kept(a=np.ones(2))
        trainer = trainer_of(store, kept, on_store=on_store)
        trainer.save(path)
        if store.rank == 1:
            kept.state = state
        with pytest.raises(UnsupportedError, match=f"worker 1: save: {words}"):
            trainer.save(path)
        trainer.step(1)
        assert trainer.steps == 1

    ONE_HOST.run(body)
    assert [file.name for file in tmp_path.iterdir()] == ["run"]
    assert trainer_of(None, None).resume(path) == 0


def test_what_is_not_the_states_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "run"
    content = packed([], {"optimizers": [], "configs": []})
    content |= {"steps": 4, "examples": 8, "agreed": [], "weights": {"0": np.zeros(5)}, "workers": []}

    def resumed_from(**changes: Any) -> int:
        archive.save(path, checkpoint.KIND, {**content, **changes})
        return trainer_of(None, Kept()).resume(path)

    absent = {"array": "x", "scalar": False}
    assert resumed_from() == resumed_from(workers=[None]) == resumed_from(workers=[{"a": np.ones(2)}]) == 4
    wrong = [{"weights": one} for one in (None, "a", ["w"], {"0": 3}, {"0": absent}, {"0": np.float64(1)})]
    wrong += [{"workers": one} for one in (None, "x", 1, [3], [{"a": absent}], [["w"]])]
    for changes in (*wrong, {"steps": -1}, {"steps": 1.5}, {"examples": "x"}, {"agreed": [1]}, {"agreed": ["x", 1]}):
        with pytest.raises(StatesFileError, match=f"{path}: damaged: "):
            resumed_from(**changes)
