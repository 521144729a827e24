"""Saving and loading optimizer states: in every mode, and into every other mode."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from on_workers import on
from store_modes import BOUND, FEW, FEW_DIST_SYNC, FEW_ON_DEVICE, Mode, mode_id

from mpikv import MpikvError, StatesFileError, optimizers
from mpikv.optimizers import states_file

SHAPES = {"s": (), "a": (BOUND - 1,), "b": (7, 9), "empty": (0, 3)}
MAKERS = {
    "sgd": lambda: optimizers.create("sgd", learning_rate=0.25, momentum=0.5),
    "adam": lambda: optimizers.create("adam", learning_rate=0.125),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.125),
    "half": lambda: optimizers.create("sgd", learning_rate=0.25, momentum=0.5, multi_precision=True),
}
EVERY_KIND = on(*FEW)
DAMAGE = ("empty", "text", "cut", "flipped", "foreign", "pickle", "length", "kind", "shape", "unknown")


def dtype_of(name):
    return np.float16 if name == "half" else np.float32


def gradient(store, key, round_):
    """Summed over the workers the same integers for any number of them."""
    n = int(np.prod(SHAPES[key], dtype=int))
    total = ((np.arange(n) * 5 + round_) % 7 - 3).reshape(SHAPES[key])
    return total if store.rank == 0 else np.zeros_like(total)


def start(store, name, values=None):
    for key, shape in SHAPES.items():
        store.init(key, np.full(shape, 2, dtype_of(name)) if values is None else values[key])
    store.set_optimizer(MAKERS[name]())


def rounds(store, name, first, last):
    for round_ in range(first, last):
        for key in SHAPES:
            call = store.push if round_ % 3 == 1 else store.pushpull
            call(key, gradient(store, key, round_).astype(dtype_of(name)))
    store.barrier()
    found = {key: store.pull(key) for key in SHAPES}
    store.barrier()
    return found


def bits(values):
    return {key: value.tobytes() for key, value in values.items()}


ON_DEVICE = [FEW_ON_DEVICE[0], FEW_ON_DEVICE[2]]  # of many pairs
SYNC = (
    Mode("local", 1),
    Mode("dist_sync", 3),
    *(mode for mode in FEW_DIST_SYNC if not mode.device or mode in ON_DEVICE),
    Mode("dist_sync", 2, 1),
    Mode("dist_sync", 5, 0, "halving_doubling"),
)
WAYS = [(a, b) for a in SYNC for b in SYNC if (a is SYNC[0]) != (b is SYNC[0]) or a.servers != b.servers]


@pytest.mark.grid
@pytest.mark.parametrize(("saver", "loader"), WAYS, ids=mode_id)
@pytest.mark.parametrize("name", MAKERS)
def test_goes_on_in_another_mode_as_if_never_stopped(name, saver, loader, tmp_path):
    path = str(tmp_path / "states")

    def whole(store):
        start(store, name)
        middle = rounds(store, name, 0, 3)
        store.save_optimizer_states(path)
        return middle, bits(rounds(store, name, 3, 6))

    middle, expected = saver.run(whole)[0]

    def second_half(store):
        start(store, name, middle)
        store.load_optimizer_states(path)
        return bits(rounds(store, name, 3, 6))

    assert loader.run(second_half) == [expected] * loader.workers
    assert os.listdir(tmp_path) == ["states"]


@pytest.mark.parametrize("saver", [Mode("dist_async", 1), Mode("dist_async", 3, 2)], ids=mode_id)
def test_asynchronous_store(saver, tmp_path):
    path = str(tmp_path / "states")

    def save(store):
        start(store, "sgd")
        if store.rank == 0:
            for key, shape in SHAPES.items():
                store.push(key, np.ones(shape, np.float32))
        store.save_optimizer_states(path)

    saver.run(save)
    file = states_file.load_states(path)
    assert set(file.entries) == {"s", "a", "b"}
    assert {key: entry.state["t"] for key, entry in file.entries.items()} == dict.fromkeys("sab", 1)

    def load(store):
        start(store, "sgd")
        store.load_optimizer_states(path)
        store.barrier()
        if store.rank == 0:
            store.push("a", np.zeros(SHAPES["a"], np.float32))
        store.barrier()
        return np.unique(store.pull("a")).tolist()

    for loader in (saver, Mode("dist_async", 2), Mode("local", 1)):
        assert loader.run(load) == [[2 - 0.5 * 0.25]] * loader.workers


@EVERY_KIND
def test_dump_optimizer_brings_back_the_attributes_that_were_set(mode, tmp_path):
    """Also a rate that no push had been made under."""

    def body(store, *, dump):
        path = str(tmp_path / f"states{dump}")
        store.init("w", np.zeros(3, np.float32))
        optimizer = optimizers.create("sgd", learning_rate=1.0)
        store.set_optimizer(optimizer)
        store.push("w", np.ones(3, np.float32))
        store.barrier()
        optimizer.learning_rate = 2.0
        store.save_optimizer_states(path, dump_optimizer=dump)
        optimizer.learning_rate = 64.0
        store.load_optimizer_states(path)
        store.push("w", np.ones(3, np.float32))
        store.barrier()
        return optimizer.learning_rate, np.unique(store.pull("w")).tolist()

    W = mode.workers
    assert mode.run(lambda store: body(store, dump=True)) == [(2.0, [-3.0 * W])] * W
    assert mode.run(lambda store: body(store, dump=False)) == [(64.0, [-65.0 * W])] * W


@EVERY_KIND
def test_keys_without_a_state_in_the_file_have_none_afterwards(store, mode, tmp_path):
    store.init(["a", "b"], [np.zeros(2 * BOUND, np.float32)] * 2)
    store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
    one = np.ones(2 * BOUND, np.float32) if store.rank == 0 else np.zeros(2 * BOUND, np.float32)
    if mode.synchronous or store.rank == 0:
        store.push("a", one)
    store.save_optimizer_states(tmp_path / "states")
    if mode.synchronous or store.rank == 0:
        store.push(["a", "b"], [one, one])
    store.load_optimizer_states(tmp_path / "states")
    before = store.pull(["a", "b"])
    store.barrier()
    if mode.synchronous or store.rank == 0:
        store.push(["a", "b"], [one, one])
    store.barrier()
    assert [np.unique(new - old).tolist() for new, old in zip(store.pull(["a", "b"]), before, strict=True)] == [
        [-1.5],
        [-1.0],
    ]


@EVERY_KIND
def test_optimizers_of_different_kinds_on_one_store(store, tmp_path):
    store.init(["a", "b", "c"], [np.zeros(2 * BOUND, np.float32)] * 3)
    store.strategy.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5), ["a"])
    store.strategy.set_optimizer(optimizers.create("adam"), ["b"])
    one = np.ones(2 * BOUND, np.float32)
    store.push(["a", "b"], [one, one])
    store.barrier()
    store.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    store.load_optimizer_states(tmp_path / "states")
    assert sorted(states_file.load_states(tmp_path / "states").entries) == ["a", "b"]


@EVERY_KIND
def test_without_an_optimizer(mode, tmp_path):
    def body(store):
        store.init("w", np.zeros(3, np.int32))  # whose codec, if it has one, is never used, and remembers nothing
        for call in (store.save_optimizer_states, store.load_optimizer_states):
            with pytest.raises(MpikvError, match="optimizer"):
                call(tmp_path / "never")
        store.barrier()

    mode.run(body)
    assert os.listdir(tmp_path) == []


def damaged_file(directory, damage):
    """A file of states of key 'w' (4 float32, sgd with momentum), spoilt."""

    def body(store):
        store.init("w", np.zeros(4, np.float32))
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
        store.push("w", np.ones(4, np.float32))
        store.save_optimizer_states(directory / "good")

    Mode("local", 1).run(body)
    good = (directory / "good").read_bytes()
    file = states_file.load_states(directory / "good")
    bad = directory / "bad"
    if damage in ("length", "kind", "shape", "unknown"):
        entry = file.entries["w"]
        meta = dict(file.meta)
        if damage == "length":
            entry = entry._replace(state={**entry.state, "momentum": np.zeros(3, np.float32)})
        elif damage == "kind":
            meta = {"optimizers": [["w", "adam"]]}
        elif damage == "shape":
            entry = entry._replace(shape=(2, 2))
        else:
            entry = entry._replace(key="v")
            meta = {"optimizers": [["v", "sgd"]]}
        states_file.save_states(bad, [entry], meta=meta)
        return bad
    middle = len(good) // 2
    contents = {
        "empty": b"",
        "text": b"no states at all\n" * 50,
        "cut": good[:middle],
        "flipped": good[:middle] + bytes([good[middle] ^ 0x55]) + good[middle + 1 :],
        "foreign": (directory / "foreign.npz", np.savez(directory / "foreign.npz", w=np.zeros(4)))[0].read_bytes(),
        "pickle": pickle.dumps({"w": np.zeros(4)}),
    }
    bad.write_bytes(contents[damage])
    return bad


@pytest.mark.grid
@pytest.mark.parametrize("damage", DAMAGE)
@EVERY_KIND
def test_a_file_that_does_not_fit_changes_nothing(mode, damage, tmp_path):
    bad = damaged_file(tmp_path, damage)

    def body(store):
        store.init("w", np.zeros(4, np.float32))
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
        one = np.ones(4, np.float32) if store.rank == 0 else np.zeros(4, np.float32)
        if mode.synchronous or store.rank == 0:
            store.push("w", one)
        with pytest.raises(StatesFileError) as caught:
            store.load_optimizer_states(bad)
        with pytest.raises(FileNotFoundError):
            store.load_optimizer_states(tmp_path / "nowhere" / "states")
        store.barrier()
        if mode.synchronous or store.rank == 0:
            store.push("w", one)
        store.barrier()
        return str(bad) in str(caught.value), np.unique(store.pull("w")).tolist()

    assert mode.run(body) == [(True, [-2.5])] * mode.workers


@EVERY_KIND
def test_a_file_that_cannot_be_written(mode, tmp_path):
    target = tmp_path / "directory"
    target.mkdir()

    def body(store):
        store.init("w", np.zeros(4, np.float32))
        store.set_optimizer(optimizers.create("test"))
        store.push("w", np.ones(4, np.float32))
        for path, error in ((tmp_path / "nowhere" / "states", FileNotFoundError), (target, IsADirectoryError)):
            with pytest.raises(OSError, match=path.name) as caught:
                store.save_optimizer_states(path)
            assert store.rank > 0 or isinstance(caught.value, error)
        store.barrier()
        return np.unique(store.pull("w")).tolist()

    assert mode.run(body) == [[float(mode.workers)]] * mode.workers
    assert os.listdir(tmp_path) == ["directory"]
