"""Saving and loading optimizer states: in every mode, and into every other mode."""

from __future__ import annotations

import os
from itertools import pairwise

import grids
import numpy as np
import pytest
from on_workers import on, uniform
from store_modes import BOUND, FEW_DIST_SYNC, FEW_ON_DEVICE, KINDS, Mode, mode_id

from mpikv import MpikvError, RowSparse, StatesFileError, kv, optimizers
from mpikv.optimizers import states_file

SHAPES = {"s": (), "a": (BOUND - 1,), "b": (7, 9), "empty": (0, 3), "rows": (11, 2)}  # the last one is row-sparse
DENSE = ("s", "a", "b", "empty")
MAKERS = {
    "sgd": lambda: optimizers.create("sgd", learning_rate=0.25, momentum=0.5),
    "adam": lambda: optimizers.create("adam", learning_rate=0.125),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.125),
    "half": lambda: optimizers.create("sgd", learning_rate=0.25, momentum=0.5, multi_precision=True),
}
EVERY_KIND = on(*KINDS)


def keys_of(name):
    return [key for key in SHAPES if (key, name) != ("rows", "lamb")]  # which needs all rows


def dtype_of(name):
    return np.float16 if name == "half" else np.float32


def gradient(store, key, round_):
    """Summed over the workers the same integers for any number of them; of the rows some."""
    shape = SHAPES[key]
    total = ((np.arange(int(np.prod(shape, dtype=int))) * 5 + round_) % 7 - 3).reshape(shape)
    if key == "rows":
        total[np.arange(11) % 3 == round_ % 3] = 0
    return total if store.rank == 0 else np.zeros_like(total)


def start(store, name, values=None):
    for key in keys_of(name):
        value = np.full(SHAPES[key], 2, dtype_of(name)) if values is None else values[key]
        store.init(key, RowSparse.of(value) if key == "rows" else value)
    store.set_optimizer(MAKERS[name]())


def rounds(store, name, first, last):
    keys = keys_of(name)
    for round_ in range(first, last):
        for key in keys:
            value = gradient(store, key, round_).astype(dtype_of(name))
            if key == "rows":
                store.push(key, RowSparse.of(value))
            else:
                call = store.push if round_ % 3 == 1 else store.pushpull
                call(key, value)
    store.barrier()
    found = dict(zip(keys, store.pull(keys, ignore_sparse=False), strict=True))
    store.barrier()
    return found


def bits(values):
    return {key: value.tobytes() for key, value in values.items()}


@pytest.mark.parametrize(
    ("saver", "loader", "told"), [("0.4", "0.4", False), ("0.4", "0.7", True), ("0.4", "all", False)]
)
def test_where_keys_are_divided_is_saved(saver, loader, told, tmp_path, capsys):
    """As many workers that divide keys elsewhere would get other bits: they are told."""
    path = str(tmp_path / "states")

    def save(store):
        start(store, "sgd")
        rounds(store, "sgd", 0, 1)
        store.save_optimizer_states(path)

    def load(store):
        start(store, "sgd")
        store.load_optimizer_states(path)

    mode = Mode("dist_sync", 3, 2)
    mode._replace(take=saver).run(save)
    mode._replace(take=loader).run(load)
    error = capsys.readouterr().err
    assert ("divided between workers and servers at other places than when" in error) == told
    assert error.count("warning") == told


SYNC = (
    Mode("local", 1),
    Mode("dist_sync", 3),
    *(mode for mode in FEW_DIST_SYNC if not mode.device or mode in FEW_ON_DEVICE[:3]),
    Mode("dist_sync", 2, 1, part_bytes=32),  # states are those of whole values, their count of updates above all
    Mode("dist_sync", 2, 3, part_bytes=80),
    Mode("dist_sync", 5, 0, "owners"),
)
WAYS = [*pairwise((*SYNC, SYNC[0], SYNC[1]))]
if grids.is_thorough():
    WAYS = [(a, b) for a in SYNC for b in SYNC if (a is SYNC[0]) != (b is SYNC[0]) or a.servers != b.servers]


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
        for _ in range(2):  # also in place of states
            store.load_optimizer_states(path)
        return bits(rounds(store, name, 3, 6))

    assert loader.run(second_half) == [expected] * loader.workers
    assert os.listdir(tmp_path) == ["states"]


@on(Mode("dist_async", 1), Mode("dist_async", 3, 2))
def test_asynchronous_store(mode, tmp_path):
    def save(store):
        start(store, "sgd")
        if store.rank == 0:
            store.push([*DENSE], [np.ones(SHAPES[key], np.float32) for key in DENSE])
            store.push("rows", RowSparse([1, 8], np.ones((2, 2), np.float32), SHAPES["rows"]))
        store.save_optimizer_states(tmp_path / "states")

    mode.run(save)
    entries = states_file.load_states(tmp_path / "states").entries
    assert {key: entry.state["t"] for key, entry in entries.items()} == dict.fromkeys(["s", "a", "b", "rows"], 1)

    def load(store):
        start(store, "sgd")
        store.load_optimizer_states(tmp_path / "states")
        store.barrier()
        if store.rank == 0:
            store.push("a", np.zeros(SHAPES["a"], np.float32))
        store.barrier()
        assert uniform(store.pull("a")) == 2 - 0.5 * 0.25

    for loader in (mode, Mode("dist_async", 2), Mode("local", 1)):
        loader.run(load)


@EVERY_KIND
@pytest.mark.parametrize(("dump", "rate"), [(True, 2.0), (False, 64.0)])
def test_dump_optimizer_brings_back_the_attributes_that_were_set(store, W, tmp_path, dump, rate):
    """Also a rate that no push had been made under."""
    store.init("w", np.zeros(3, np.float32))
    optimizer = optimizers.create("sgd", learning_rate=1.0)
    store.set_optimizer(optimizer)
    store.push("w", np.ones(3, np.float32))
    store.barrier()
    optimizer.learning_rate = 2.0
    store.save_optimizer_states(tmp_path / "states", dump_optimizer=dump)
    optimizer.learning_rate = 64.0
    store.load_optimizer_states(tmp_path / "states")
    store.push("w", np.ones(3, np.float32))
    store.barrier()
    assert (optimizer.learning_rate, uniform(store.pull("w"))) == (rate, -(1 + rate) * W)


def push_once(store, keys, n):
    """Ones, of worker 0 alone, also where every push is applied."""
    if store.session.synchronous or store.rank == 0:
        store.push(keys, [np.full(n, store.rank == 0, np.float32) for _ in keys])


def momentum():
    return optimizers.create("sgd", learning_rate=1.0, momentum=0.5)


@EVERY_KIND
def test_keys_without_a_state_in_the_file_have_none_afterwards(store, tmp_path):
    n = 2 * BOUND
    store.init(["a", "b"], [np.zeros(n, np.float32)] * 2)
    store.set_optimizer(momentum())
    push_once(store, ["a"], n)
    store.save_optimizer_states(tmp_path / "states")
    push_once(store, ["a", "b"], n)
    store.load_optimizer_states(tmp_path / "states")
    before = store.pull(["a", "b"])
    store.barrier()
    push_once(store, ["a", "b"], n)
    store.barrier()
    after = store.pull(["a", "b"])
    assert [uniform(new - old) for new, old in zip(after, before, strict=True)] == [-1.5, -1.0]


@EVERY_KIND
def test_without_an_optimizer(store, tmp_path):
    store.init("w", np.zeros(3, np.int32))  # whose codec, if it has one, is never used, and remembers nothing
    for call in (store.save_optimizer_states, store.load_optimizer_states):
        with pytest.raises(MpikvError, match="optimizer"):
            call(tmp_path / "never")
    store.barrier()
    assert os.listdir(tmp_path) == []


# What is damaged, foreign or a pickle, byte by byte: tests/unit/optimizers/test_states.py
DAMAGE = {
    "length": lambda entry: entry._replace(state={**entry.state, "momentum": np.zeros(3, np.float32)}),
    "kind": lambda entry: entry,
    "shape": lambda entry: entry._replace(shape=(2, 2)),
    "unknown": lambda entry: entry._replace(key="v"),
    "cut": lambda entry: entry,
}


@pytest.fixture(params=DAMAGE)
def bad(request, tmp_path):
    """A file of states of key 'w' (4 float32, sgd with momentum), spoilt."""
    with kv.create("local") as store:
        store.init("w", np.zeros(4, np.float32))
        store.set_optimizer(momentum())
        store.push("w", np.ones(4, np.float32))
        store.save_optimizer_states(tmp_path / "good")
    if request.param == "cut":
        good = (tmp_path / "good").read_bytes()
        (tmp_path / "bad").write_bytes(good[: len(good) // 2])
    else:
        entry = DAMAGE[request.param](states_file.load_states(tmp_path / "good").entries["w"])
        kind = "adam" if request.param == "kind" else "sgd"
        meta = {"optimizers": [[entry.key, kind]]}
        states_file.save_content(tmp_path / "bad", states_file.packed([entry], meta))
    return tmp_path / "bad"


@EVERY_KIND
def test_a_file_that_does_not_fit_changes_nothing(store, bad):
    store.init("w", np.zeros(4, np.float32))
    store.set_optimizer(momentum())
    push_once(store, ["w"], 4)
    with pytest.raises(StatesFileError) as caught:
        store.load_optimizer_states(bad)
    assert str(bad) in str(caught.value)
    with pytest.raises(FileNotFoundError):
        store.load_optimizer_states(bad.parent / "nowhere" / "states")
    store.barrier()
    push_once(store, ["w"], 4)
    store.barrier()
    assert uniform(store.pull("w")) == -2.5


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
        assert uniform(store.pull("w")) == mode.workers

    mode.run(body)
    assert os.listdir(tmp_path) == ["directory"]
