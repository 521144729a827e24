"""Rows as their owner holds them: lazy updates, the memory that they take, and states that are saved and loaded."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv import optimizers
from mpikv.optimizers.owner import AS_SET, Owner
from mpikv.optimizers.row_table import RowTable
from mpikv.optimizers.states import ROWS, check_rows, join_rows, slice_rows
from mpikv.placement.keys import KeyInfo
from mpikv.spaces.named import Spaces

N_ROWS, COLUMNS = 20, 3
LAZY = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.1, "wd": 0.01},
    "adagrad": {"learning_rate": 0.1, "wd": 0.01, "clip_gradient": 0.5},
    "ftrl": {"learning_rate": 0.1, "lamda1": 0.1},
    "test": {"rescale_grad": 2.0},
}


def info_of(dtype="float32", shape=(N_ROWS, COLUMNS)):
    return KeyInfo("w", 0, shape, np.dtype(dtype), sparse=True)


def owner_with(optimizer):
    owner = Owner(Spaces(), own=False)
    if optimizer is not None:
        owner.set_optimizer(0, optimizer, [])
    return owner


def table_of(info, value):
    table = RowTable(info, 0, info.shape[0])
    rows = np.flatnonzero(value.any(1))
    table.replace(rows, value[rows].copy())
    return table


class Rowwise:
    """The reference: each row is a value of its own, with a state of its own; "t" is that of the key."""

    def __init__(self, optimizer, value):
        self.optimizer, self.value, self.t, self.states = optimizer, value.copy(), 0, {}

    def update(self, ids, total):
        for i, grad in zip(ids, total, strict=True):
            state = self.states.get(i) or self.optimizer.init(self.value[i])
            state["t"] = self.t
            self.states[i] = self.optimizer.update("w", self.value[i], grad, state)
        self.t += 1


def rounds(seed, n=5, dtype="float32"):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        ids = np.sort(rng.choice(N_ROWS, rng.integers(0, 8), replace=False))
        yield ids, rng.normal(size=(ids.size, COLUMNS)).astype(dtype)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", LAZY)
def test_an_update_is_that_of_each_row_by_itself(name, dtype, full):
    precise = {"multi_precision": True} if dtype == "float16" else {}
    wide = "float64" if dtype == "float64" else "float32"
    optimizer = optimizers.create(name, **LAZY[name], **precise)
    value = np.random.default_rng(1).normal(size=(N_ROWS, COLUMNS)).astype(dtype)
    if not full:
        value[5:] = 0
    table, owner, reference = table_of(info_of(dtype), value), owner_with(optimizer), Rowwise(optimizer, value)
    for ids, total in rounds(2, dtype=wide):
        table.update(owner, ids, total.copy(), AS_SET)
        reference.update(ids, total)
        found = table.rows(np.arange(N_ROWS))
        assert found.tobytes() == reference.value.tobytes()
    assert table.states(owner).state[ROWS].tolist() == sorted(reference.states)


def test_without_an_optimizer_the_value_becomes_the_sum():
    table, owner = table_of(info_of(), np.ones((N_ROWS, COLUMNS), "float32")), owner_with(None)
    table.update(owner, np.array([7]), np.full((1, COLUMNS), 5, "float32"), AS_SET)
    assert table.n_rows == 1
    assert table.rows(np.array([6, 7]))[:, 0].tolist() == [0, 5]


@pytest.mark.parametrize(
    ("wanted", "dtype", "value", "later", "expected"),
    [
        # Row 2: -0.5, then -0.5 with a momentum that begins at 0, then -0.5 and half the step before.
        ("momentum", "float32", 0, [9, 2, 2], {2: -0.5 - 0.5 - 0.75, 9: -0.5}),
        ("multi_precision", "float16", 4, [5, 2], {2: 3.0, 5: 3.5}),
    ],
)
def test_what_is_wanted_after_the_first_update(wanted, dtype, value, later, expected):
    """A momentum begins at zero for all rows, master copies begin as the rows."""
    optimizer = optimizers.SGD(learning_rate=0.5)
    table, owner = table_of(info_of(dtype), np.full((N_ROWS, COLUMNS), value, dtype)), owner_with(optimizer)
    for row in (2, *later):
        table.update(owner, np.array([row]), np.ones((1, COLUMNS), "float32"), AS_SET)
        setattr(optimizer, wanted, {"momentum": 0.5, "multi_precision": True}[wanted])
    assert {row: table.rows(np.array([row]))[0, 0] for row in expected} == expected


def test_another_optimizer_begins_with_new_states():
    table, owner = table_of(info_of(), np.zeros((N_ROWS, COLUMNS), "float32")), owner_with(optimizers.Adam())
    table.update(owner, np.array([2]), np.ones((1, COLUMNS), "float32"), AS_SET)
    assert table.states(owner).state["t"] == 1
    owner.set_optimizer(0, optimizers.Adam(), [])
    assert table.states(owner) is None


@pytest.mark.parametrize("begin", [0, 4_000_000])
def test_memory_follows_the_rows_that_are_used(begin):
    """10 million rows of 64 bytes, of which 1000 are used, in ten rounds: 640 MB, if they were all there."""
    info = info_of(shape=(10_000_000, 16))
    table, owner = RowTable(info, begin, info.shape[0]), owner_with(optimizers.Adam())
    ids = np.sort(np.random.default_rng(3).choice(info.shape[0] - begin, 1000, replace=False)) + begin
    for i in range(10):
        table.update(owner, ids[i::10], np.ones((100, 16), "float32"), AS_SET)
    assert (table.n_rows, table.states(owner).state[ROWS].size) == (1000, 1000)
    row_bytes = 3 * 16 * 4 + 2 * 16  # the row, its two means, and its id and place for both
    assert 1000 * row_bytes <= table.held_bytes <= 1500 * row_bytes
    held = table.held_bytes
    table.update(owner, ids, np.ones((1000, 16), "float32"), AS_SET)
    assert table.held_bytes == held
    table.rows(np.arange(begin, begin + 5))  # reading makes no rows
    assert table.held_bytes == held


def test_states_are_cut_and_joined_by_rows():
    optimizer = optimizers.Adam()
    info, owner = info_of(), owner_with(optimizer)
    whole = table_of(info, np.ones((N_ROWS, COLUMNS), "float32"))
    for ids, total in rounds(4):
        whole.update(owner, ids, total, AS_SET)
    part = whole.states(owner)
    assert part.whole
    check_rows(optimizer, info, part.state)
    cuts = [slice_rows(info, part.state, *bounds) for bounds in ((0, 7), (7, 7), (7, 20))]
    assert [(cut.begin, cut.end) for cut in cuts] == [(0, 21), (21, 21), (21, 60)]
    joined = join_rows(info, cuts[::-1])
    assert joined[:5] == part[:5]
    np.testing.assert_equal(joined.state, part.state)
    again = table_of(info, whole.rows(np.arange(N_ROWS)))
    again.set_states(owner, joined.state)
    for ids, total in rounds(5):
        whole.update(owner, ids, total.copy(), AS_SET)
        again.update(owner, ids, total.copy(), AS_SET)
    assert again.rows(np.arange(N_ROWS)).tobytes() == whole.rows(np.arange(N_ROWS)).tobytes()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({ROWS: np.array([3, 2])}, "rows that no array"),
        ({ROWS: np.array([3, 20])}, "rows that no array"),
        ({ROWS: np.array([3.0, 4.0])}, "dense key"),
        ({ROWS: np.array([3])}, "'mean'"),
        ({"mean": np.zeros(5, "float32")}, "'mean'"),
        ({"other": 1}, "other"),
    ],
)
def test_states_that_do_not_fit(changes, text):
    zeros = np.zeros(2 * COLUMNS, "float32")
    state = {"t": 1, "mean": zeros, "var": zeros, ROWS: np.array([3, 4])}
    check_rows(optimizers.Adam(), info_of(), state)
    with pytest.raises(ValueError, match=text):
        check_rows(optimizers.Adam(), info_of(), {**state, **changes})


def test_who_can_update_rows():
    able = {name for name in optimizers.names() if optimizers.create(name).updates_rows}
    assert able == set(LAZY)
    assert not optimizers.SGD(lazy_update=False).updates_rows
    assert not optimizers.Adam(lazy_update=False).updates_rows
    assert not optimizers.create(lambda weight, grad, state: state).updates_rows
