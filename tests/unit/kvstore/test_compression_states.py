"""What codecs remember is saved and loaded with the states of optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_modes import Mode, mode_id
from test_compression import PART_BYTES, Rest, run

from mpikv import MpikvError, Parameter, StatesFileError, Trainer
from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import registry
from mpikv.codecs.compression import NONE, make
from mpikv.codecs.residuals import cut_anew
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import load_states
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.codec_states import shares

REST = {"type": Rest.name, "force": True}
SIZES = (1, 9, 67)
KEYS = [str(n) for n in SIZES]


def gradient(n: int, worker: int, round_: int) -> HostArray:
    """Quarters, so that all sums are exact."""
    return (np.arange(n) * 3 + 5 * worker + 7 * round_).astype(np.float32) % 16 / 4


def push_rounds(store: Any, rounds: range) -> None:
    for round_ in rounds:
        store.push(KEYS, [gradient(n, store.rank, round_) for n in SIZES])


def begun(store: Any, optimizer: bool = True) -> None:
    if optimizer:
        store.set_optimizer("test")
    store.init(KEYS, [np.zeros(n, np.float32) for n in SIZES])


MODES = [
    Mode("dist_sync", 1, 1),
    Mode("dist_sync", 3, 2),
    Mode("dist_sync", 2, 1, memory="off"),
    Mode("dist_async", 2, 0),
    Mode("dist_sync", 3, 0),
]


def owed(store: Any) -> list[HostArray]:
    """What is owed of each key on this worker, whole."""
    found = {n: np.zeros(n, np.float32) for n in SIZES}
    for part in store.strategy.codec_states("test"):
        found[int(part.key)][part.begin : part.end] = part.state["residual"]
    return list(found.values())


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(mode: Mode, tmp_path: Path) -> None:
    path = tmp_path / "states"

    def whole(store: Any) -> Any:
        begun(store)
        push_rounds(store, range(3))
        store.barrier()
        store.save_optimizer_states(path)
        before = store.pull(KEYS)
        store.barrier()
        push_rounds(store, range(3, 6))
        store.barrier()
        return [(b - a).tobytes() for a, b in zip(before, store.pull(KEYS), strict=True)]

    def resumed(store: Any) -> Any:
        begun(store)
        push_rounds(store, range(2))  # forgotten
        store.barrier()
        store.load_optimizer_states(path)
        before = store.pull(KEYS)
        store.barrier()
        push_rounds(store, range(3, 6))
        store.barrier()
        return [(b - a).tobytes() for a, b in zip(before, store.pull(KEYS), strict=True)]

    found = run(mode, whole, make(REST), partition_bytes=PART_BYTES, bigarray_bound_elems=8)
    assert run(mode, resumed, make(REST), partition_bytes=PART_BYTES, bigarray_bound_elems=8) == found


@pytest.mark.parametrize(
    "to", [Mode("dist_sync", 1, 1), Mode("dist_sync", 4, 3), Mode("dist_async", 3, 0)], ids=mode_id
)
def test_other_workers_owe_the_same_together(to: Mode, tmp_path: Path) -> None:
    """Also where the key is cut into other pieces."""
    path = tmp_path / "states"

    def first(store: Any) -> Any:
        begun(store)
        push_rounds(store, range(3))
        store.barrier()
        store.save_optimizer_states(path)
        return owed(store)

    def second(store: Any) -> Any:
        begun(store)
        store.load_optimizer_states(path)
        return owed(store)

    before = run(Mode("dist_sync", 2, 2), first, make(REST), partition_bytes=PART_BYTES, bigarray_bound_elems=8)
    after = run(to, second, make(REST), partition_bytes=4096)
    for i in range(len(SIZES)):
        together = sum(worker[i] for worker in before)
        assert together.any()
        for worker in after:
            assert np.array_equal(worker[i], (together.astype(np.float64) / to.workers).astype(np.float32))


def test_without_an_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "states"

    def body(store: Any) -> Any:
        begun(store, optimizer=False)
        push_rounds(store, range(2))
        store.barrier()
        store.save_optimizer_states(path)
        at = [array.tobytes() for array in owed(store)]
        push_rounds(store, range(1))
        store.load_optimizer_states(path)
        return at == [array.tobytes() for array in owed(store)]

    assert run(Mode("dist_sync", 2, 1), body, make(REST)) == [True] * 2
    assert {part.worker for part in load_states(path).codecs} == {0, 1}

    def plain(store: Any) -> None:
        begun(store, optimizer=False)
        with pytest.raises(MpikvError, match="no optimizer was set"):
            store.save_optimizer_states(path)
        with pytest.raises(MpikvError, match="set the optimizer first"):
            store.load_optimizer_states(path)

    run(Mode("dist_sync", 2, 1), plain, NONE)


def test_files_with_and_without_codecs_fit_stores_with_and_without(tmp_path: Path) -> None:
    compressed, plain = tmp_path / "compressed", tmp_path / "plain"

    def save(path: Path) -> Any:
        def body(store: Any) -> None:
            begun(store)
            push_rounds(store, range(2))
            store.barrier()
            store.save_optimizer_states(path)

        return body

    def load(path: Path) -> Any:
        def body(store: Any) -> Any:
            begun(store)
            push_rounds(store, range(1))
            store.barrier()
            store.load_optimizer_states(path)
            return any(array.any() for array in owed(store))

        return body

    mode = Mode("dist_sync", 2, 1)
    run(mode, save(compressed), make(REST))
    run(mode, save(plain), NONE)
    assert run(mode, load(plain), make(REST)) == [False] * 2
    assert run(mode, load(compressed), NONE) == [False] * 2
    assert run(mode, load(compressed), make(REST)) == [True] * 2

    def other(store: Any) -> None:
        store.set_optimizer("test")
        store.init(KEYS, [np.zeros((n, 2), np.float32) for n in SIZES])
        with pytest.raises(StatesFileError, match="key '1' is float32"):
            store.load_optimizer_states(compressed)

    run(mode, other, make(REST))


@pytest.mark.parametrize("on_store", [True, False])
def test_a_trainer_resumes_with_the_same_bits(on_store: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def steps(trainer: Trainer, weight: Parameter, rank: int, rounds: range) -> None:
        for round_ in rounds:
            weight.grad[...] = gradient(67, rank, round_)
            trainer.step(1)

    def trained(store: Any) -> tuple[Trainer, Parameter]:
        weight = Parameter(np.zeros(67, np.float32))
        options = {"learning_rate": 0.25, "momentum": 0.5}
        return Trainer([weight], "sgd", options, store, REST, update_on_kvstore=on_store), weight

    def whole(store: Any) -> Any:
        trainer, weight = trained(store)
        steps(trainer, weight, store.rank, range(3))
        trainer.save(path)
        steps(trainer, weight, store.rank, range(3, 6))
        return weight.data.tobytes()

    def resumed(store: Any) -> Any:
        trainer, weight = trained(store)
        assert trainer.resume(path) == 3
        steps(trainer, weight, store.rank, range(3, 6))
        return weight.data.tobytes()

    mode = Mode("dist_sync", 2, 1)
    found = run(mode, whole, NONE)
    assert run(mode, resumed, NONE) == found


def test_a_damaged_residual_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the states of the optimizer nor what codecs remember."""
    path = tmp_path / "states"

    def save(store: Any) -> None:
        begun(store)
        push_rounds(store, range(1))
        store.barrier()
        store.save_optimizer_states(path)

    with monkeypatch.context() as patch:
        longer = {"residual": np.zeros(99, np.float32)}
        patch.setattr(ClientKey, "codec_states", lambda key: [(0, key.info.n_elems, longer)])
        run(Mode("dist_sync", 2, 1), save, make(REST))

    def load(store: Any) -> Any:
        begun(store)
        push_rounds(store, range(2))
        store.barrier()
        store.save_optimizer_states(tmp_path / "before")
        with pytest.raises(StatesFileError, match="states is damaged: the residual of key '1' at worker 0"):
            store.load_optimizer_states(path)
        store.save_optimizer_states(tmp_path / "after")

    run(Mode("dist_sync", 3, 1), load, make(REST))
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


@pytest.mark.parametrize("mode", MODES[:3], ids=mode_id)
def test_saving_has_no_part_in_what_pulls_owe(mode: Mode, tmp_path: Path) -> None:
    """A version that nobody has pulled is not encoded for a file of states."""
    params = {**REST, "pull": {"type": "2bit", "threshold": 0.5}}

    def body(store: Any, *, saves: bool) -> Any:
        begun(store, optimizer=False)
        for round_ in range(3):
            push_rounds(store, range(round_, round_ + 1))
            store.barrier()
            if saves:
                store.save_optimizer_states(tmp_path / "states")
        return [value.tobytes() for value in store.pull(KEYS)]

    def with_states(store: Any) -> Any:
        return body(store, saves=True)

    def without(store: Any) -> Any:
        return body(store, saves=False)

    assert run(mode, with_states, make(params)) == run(mode, without, make(params))


# --- by themselves


def part(worker: int, begin: int, end: int, **state: Any) -> StateRecord:
    return StateRecord("w", (10,), np.dtype(np.float32), begin, end, state, worker)


def test_shares_of_workers_that_owe_nothing() -> None:
    """A worker whose codec has no residual, since it pushed as it is, say, owes nothing."""
    saved = [part(0, 0, 2, count=np.array(0)), part(1, 0, 2, residual=np.array([3, 6], np.float32))]
    for given in (shares(saved, 3), shares(saved[::-1], 3)):
        assert [one.state["residual"].tolist() for some in given for one in some] == [[1, 2]] * 3


def test_what_another_codec_remembered() -> None:
    """A file may have been written under it: what was owed is owed, and nothing is missing."""
    owes = np.arange(4, dtype=np.float32)
    powersgd = registry.create("powersgd")
    (found,) = cut_anew(powersgd, {(0, 4): {"residual": owes}}, [(0, 4)]).values()
    assert found["residual"].tolist() == owes.tolist()
    assert found.keys() == powersgd.init(4).keys()
    (found,) = cut_anew(Rest(), {(0, 4): {"residual": owes, "q": owes}}, [(0, 4)]).values()
    assert {name: value.tolist() for name, value in found.items()} == {"residual": owes.tolist()}
    bare = registry.create({"type": "fp16", "error_feedback": False})
    assert cut_anew(bare, {(0, 4): {"residual": owes}}, [(0, 4)]) == {(0, 4): {}}
