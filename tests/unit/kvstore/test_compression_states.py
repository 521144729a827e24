"""What codecs remember is saved and loaded with the states of optimizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_workers import on
from store_modes import Mode
from test_compression import PART_BYTES

from mpikv import MpikvError, Parameter, StatesFileError, Trainer
from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import registry
from mpikv.codecs.compression import make
from mpikv.codecs.residuals import cut_anew
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import load_states
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.codec_states import shares
from mpikv.transports.faulty import Deaths, Faults

REST = {"type": "2bit", "threshold": 2.0, "force": True}
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


SERVER = Mode("dist_sync", 2, 1)
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


def save(store: Any, path: Path, rounds: int, optimizer: bool = True) -> None:
    begun(store, optimizer)
    push_rounds(store, range(rounds))
    store.barrier()
    store.save_optimizer_states(path)


@on(*MODES)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(mode: Mode, tmp_path: Path) -> None:
    path = tmp_path / "states"

    def body(store: Any, *, resumes: bool) -> Any:
        if resumes:
            begun(store)
            push_rounds(store, range(2))  # forgotten
            store.barrier()
            store.load_optimizer_states(path)
        else:
            save(store, path, 3)
        before = store.pull(KEYS)
        store.barrier()
        push_rounds(store, range(3, 6))
        store.barrier()
        return [(b - a).tobytes() for a, b in zip(before, store.pull(KEYS), strict=True)]

    cut = {"compression": make(REST), "partition_bytes": PART_BYTES}
    found, resumed = (mode.run(partial(body, resumes=resumes), **cut) for resumes in (False, True))
    assert resumed == found


@on(Mode("dist_sync", 1, 1), Mode("dist_sync", 4, 3), Mode("dist_async", 3, 0))
def test_other_workers_owe_the_same_together(mode: Mode, tmp_path: Path) -> None:
    """Also where the key is cut into other pieces."""
    path = tmp_path / "states"

    def second(store: Any) -> Any:
        begun(store)
        store.load_optimizer_states(path)
        return owed(store)

    cut = Mode("dist_sync", 2, 2, part_bytes=PART_BYTES)
    before = cut.run(lambda store: (save(store, path, 3), owed(store))[1], compression=make(REST))
    after = mode.run(second, compression=make(REST), partition_bytes=4096)
    for i in range(len(SIZES)):
        together = sum(worker[i] for worker in before)
        assert together.any()
        for worker in after:
            assert np.array_equal(worker[i], (together.astype(np.float64) / mode.workers).astype(np.float32))


def test_without_an_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "states"

    def body(store: Any) -> None:
        save(store, path, 2, optimizer=False)
        before = owed(store)
        push_rounds(store, range(1))
        store.load_optimizer_states(path)
        assert [array.tobytes() for array in before] == [array.tobytes() for array in owed(store)]

    SERVER.run(body, compression=make(REST))
    assert {part.worker for part in load_states(path).codecs} == {0, 1}

    def plain(store: Any) -> None:
        begun(store, optimizer=False)
        with pytest.raises(MpikvError, match="no optimizer was set"):
            store.save_optimizer_states(path)
        with pytest.raises(MpikvError, match="set the optimizer first"):
            store.load_optimizer_states(path)

    SERVER.run(plain)


def test_files_with_and_without_codecs_fit_stores_with_and_without(tmp_path: Path) -> None:
    compressed, plain = tmp_path / "compressed", tmp_path / "plain"
    SERVER.run(partial(save, path=compressed, rounds=2), compression=make(REST))
    SERVER.run(partial(save, path=plain, rounds=2))
    for path, compression, owes in ((plain, REST, False), (compressed, None, False), (compressed, REST, True)):

        def load(store: Any, path: Path = path, owes: bool = owes) -> None:
            begun(store)
            push_rounds(store, range(1))
            store.barrier()
            store.load_optimizer_states(path)
            assert any(array.any() for array in owed(store)) == owes

        SERVER.run(load, compression=make(compression))

    def other(store: Any) -> None:
        store.set_optimizer("test")
        store.init(KEYS, [np.zeros((n, 2), np.float32) for n in SIZES])
        with pytest.raises(StatesFileError, match="key '1' is float32"):
            store.load_optimizer_states(compressed)

    SERVER.run(other, compression=make(REST))


@pytest.mark.parametrize("on_store", [True, False])
def test_a_trainer_resumes_with_the_same_bits(on_store: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def body(store: Any, rounds: range) -> bytes:
        weight = Parameter(np.zeros(67, np.float32))
        options = {"learning_rate": 0.25, "momentum": 0.5}
        trainer = Trainer([weight], "sgd", options, store, REST, update_on_kvstore=on_store)
        assert rounds.start == 0 or trainer.resume(path) == rounds.start
        for round_ in rounds:
            weight.grad[...] = gradient(67, store.rank, round_)
            trainer.step(1)
            if round_ == 2:
                trainer.save(path)
        return weight.data.tobytes()

    whole, resumed = (SERVER.run(partial(body, rounds=rounds)) for rounds in (range(6), range(3, 6)))
    assert resumed == whole


def test_a_damaged_residual_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the states of the optimizer nor what codecs remember."""
    path = tmp_path / "states"
    with monkeypatch.context() as patch:
        longer = {"residual": np.zeros(99, np.float32)}
        patch.setattr(ClientKey, "codec_states", lambda key: [(0, key.info.n_elems, longer)])
        SERVER.run(partial(save, path=path, rounds=1), compression=make(REST))

    def load(store: Any) -> None:
        save(store, tmp_path / "before", 2)
        with pytest.raises(StatesFileError, match="states is damaged: the residual of key '1' at worker 0"):
            store.load_optimizer_states(path)
        store.save_optimizer_states(tmp_path / "after")

    Mode("dist_sync", 3, 1).run(load, compression=make(REST))
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


@on(*MODES[:3])
def test_saving_has_no_part_in_what_pulls_owe(mode: Mode, tmp_path: Path) -> None:
    """A version that nobody has pulled is not encoded for a file of states."""

    def body(store: Any, *, saves: bool) -> Any:
        begun(store, optimizer=False)
        for round_ in range(3):
            push_rounds(store, range(round_, round_ + 1))
            store.barrier()
            if saves:
                store.save_optimizer_states(tmp_path / "states")
        return [value.tobytes() for value in store.pull(KEYS)]

    both = make({**REST, "pull": {"type": "2bit", "threshold": 0.5}})
    with_states, without = (mode.run(partial(body, saves=saves), compression=both) for saves in (True, False))
    assert with_states == without


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
    (found,) = cut_anew(registry.create("2bit"), {(0, 4): {"residual": owes, "q": owes}}, [(0, 4)]).values()
    assert {name: value.tolist() for name, value in found.items()} == {"residual": owes.tolist()}
    bare = registry.create({"type": "fp16", "error_feedback": False})
    assert cut_anew(bare, {(0, 4): {"residual": owes}}, [(0, 4)]) == {(0, 4): {}}


GOING_ON = Mode("dist_sync", 3, 0, "owners", memory="off"), Mode("dist_sync", 3, 1), Mode("dist_async", 3, 2)


@on(*GOING_ON)
def test_stores_that_go_on_after_a_death(mode: Mode, tmp_path: Path) -> None:
    """Without one they owe after reading what they owed before; after it, equal parts of what all had owed."""
    path, deaths, before = tmp_path / "states", Deaths(), {}

    def body(store: Any) -> None:
        me = store.rank
        store.set_gradient_compression(REST)
        save(store, path, 3)
        before[me] = owed(store)
        assert any(one.any() for one in before[me])
        push_rounds(store, range(1))
        store.load_optimizer_states(path)
        assert [one.tobytes() for one in owed(store)] == [one.tobytes() for one in before[me]]
        store.barrier()
        if me == 2:
            deaths.die_in(store.session.members.workers[2], 1)
        push_rounds(store, range(1))
        store.barrier()
        assert store.num_workers == 2
        store.load_optimizer_states(path)
        for i, mine in enumerate(owed(store)):
            together = sum(of_worker[i].astype(np.float64) for of_worker in before.values())
            assert np.array_equal(mine, (together / 2).astype(np.float32))

    results = mode.run_continued(body, deaths, Faults)
    assert len(results) == 3
