"""A space is where arrays are and how they are worked on: what each does, and that a store asks it in every mode."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from boxed_space import Box, BoxedSpace
from foreign_arrays import ForeignDevice
from store_modes import DTYPES, Mode

from mpikv import optimizers, spec
from mpikv.assembly import local_store
from mpikv.spaces import host
from mpikv.spaces.base import Space
from mpikv.spaces.host import HostSpace
from mpikv.spaces.named import Spaces
from mpikv.testing.stores import spawn_stores

FLOAT32 = np.dtype(np.float32)
SPACES = [HostSpace]
METHODS = (
    *("callers", "total", "write", "empty_for_caller", "in_place", "lies_in", "hand_back", "lend"),
    *("to_host", "from_host", "empty", "zeros", "copy", "cast", "combine", "scale", "together", "update"),
    *("settle", "stats", "close"),
)


@pytest.fixture(params=SPACES, ids=lambda kind: kind.__name__)
def space(request: pytest.FixtureRequest) -> Space:
    return request.param()


# --- what every space does


def test_the_methods_are_those_of_the_contract(space: Space) -> None:
    assert {name for name in vars(Space) if not name.startswith("_")} == {"device", *METHODS}
    assert all(callable(getattr(space, name)) for name in METHODS)


def test_a_callers_array_in_host_memory_is_used_where_it_lies() -> None:
    space, whole = HostSpace(), np.arange(6.0).reshape(2, 3)
    placed = space.in_place(whole, "an array")
    assert placed is not None
    assert placed.shape == (6,)
    assert space.lies_in(placed, whole)
    assert not space.lies_in(placed, whole.copy())
    assert space.in_place(whole.T, "an array with gaps") is None
    with pytest.raises(TypeError, match="a list is an array"):
        space.in_place([1.0], "a list")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_memory_and_copies(space: Space, dtype: np.dtype[Any], n: int) -> None:
    values = (np.arange(n) % 100).astype(dtype)
    array, zeros = space.empty(n, dtype), space.zeros(n, dtype)
    assert array.shape == zeros.shape == (n,)
    assert array.dtype == zeros.dtype == dtype
    assert not zeros.any()
    space.copy(array, values)
    assert np.array_equal(array, values)
    space.copy(array[n // 2 :], 0)
    assert np.array_equal(array, [*values[: n // 2], *[0] * (n - n // 2)])
    wide = space.empty(n, np.dtype(np.float64))
    space.copy(wide, values)
    assert np.array_equal(wide, values.astype(np.float64))
    space.copy(array, wide)
    assert np.array_equal(array, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast(space: Space, dtype: np.dtype[Any]) -> None:
    values = np.arange(5).astype(dtype)
    assert space.cast(values, dtype) is values
    wide = space.cast(values, np.dtype(np.float64))
    assert wide.dtype == np.float64
    assert wide.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", [np.add, np.minimum, np.maximum, np.multiply], ids=lambda how: how.__name__)
def test_combine(space: Space, how: np.ufunc) -> None:
    first, second = np.arange(7, dtype=np.float32), np.arange(7, dtype=np.float32)[::-1].copy()
    expected = how(first, second)
    out = space.empty(7, FLOAT32)
    space.combine(first, second, out, how)
    assert np.array_equal(out, expected)
    space.combine(first, second, first, how)
    assert np.array_equal(first, expected)


def test_scale_keeps_the_dtype(space: Space) -> None:
    values, out = np.arange(5, dtype=np.float32), space.empty(5, FLOAT32)
    space.scale(values, 1 / 3, out)
    assert out.tobytes() == (values * np.float32(1 / 3)).tobytes()
    space.scale(values, 1 / 3, values)
    assert out.tobytes() == values.tobytes()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_callers_arrays(space: Space, on_device: bool) -> None:
    """Of NumPy and of devices, in any order of memory, read when they are ready, added in the order given."""
    device = ForeignDevice()
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = [device.asarray(values), np.asfortranarray(values), device.asarray(values)]
    callers = space.callers(arrays)
    total = space.total(callers, "x", on_device=on_device)
    assert total.shape == (6,)
    assert np.array_equal(total, 3 * values.reshape(-1))
    alone = space.total(callers[1:2], "x", on_device=on_device)
    assert np.array_equal(alone, values.reshape(-1))
    assert not np.may_share_memory(alone, values)
    assert space.total(callers[1:] * 2, "x", on_device=False, combine=np.maximum).tolist() == alone.tolist()
    for out in (np.empty((2, 3)), device.asarray(np.empty((2, 3), np.float16)), np.empty((3, 2), np.int32).T):
        space.write(*space.callers([out]), total, "out")
        result = out.get() if hasattr(out, "get") else out
        assert np.array_equal(result, 3 * values)


def decay(w: np.ndarray, g: np.ndarray, arrays: Any, tmp: list[np.ndarray]) -> None:
    """w = (w - 2 * sum of all gradients so far) / 4, with scratch memory that holds anything."""
    for array in tmp:
        array[...] = np.nan
    arrays["sum"] += g
    np.multiply(arrays["sum"], 2, out=tmp[0])
    w -= tmp[0]
    w /= 4


@pytest.mark.grid
@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize(
    "dtypes",
    [
        (np.float32, np.float32, False),
        (np.float64, np.float64, False),
        (np.float16, np.float32, False),
        (ml_dtypes.bfloat16, np.float32, True),
        (np.int8, np.int8, False),
    ],
    ids=lambda dtypes: np.dtype(dtypes[0]).name,
)
def test_update(space: Space, dtypes: Any, n: int, elementwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or in parts: the sum of the terms, the arithmetic's dtype, one rounding, integers to nearest in range."""
    dtype, term_dtype, master = dtypes
    monkeypatch.setattr(host, "BLOCK_ELEMS", 8)
    work = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    numbers = np.random.default_rng(n)
    weight = (numbers.standard_normal(n) * 50).astype(dtype)
    terms = [(numbers.standard_normal(n) * 40).astype(term_dtype) for _ in range(2)]
    state, copy_ = numbers.standard_normal(n).astype(work), weight.astype(work) if master else None
    w, total = weight.astype(work), state + (terms[0] + terms[1]).astype(work)
    w -= 2 * total
    w /= 4
    if np.dtype(dtype).kind == "i":
        w = np.clip(np.rint(w), -128, 127)
    arrays = {"sum": state}
    space.update(decay, weight, terms, arrays, master=copy_, dtype=work, temporaries=1, elementwise=elementwise)
    assert weight.tobytes() == w.astype(dtype).tobytes()
    assert arrays["sum"].tobytes() == total.tobytes()
    if copy_ is not None:
        assert copy_.tobytes() == w.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_the_host_and_back(space: Space, dtype: np.dtype[Any]) -> None:
    values = np.arange(5).astype(dtype)
    there = space.from_host(values)
    assert (there.shape, there.dtype) == ((5,), dtype)
    assert np.array_equal(space.to_host(there), values)
    mine = space.empty_for_caller((2, 3), dtype)
    assert (mine.shape, mine.dtype) == ((2, 3), dtype)


def test_host_memory_crosses_nothing() -> None:
    space, values = HostSpace(), np.ones(3)
    assert space.device is None
    assert space.to_host(values) is space.from_host(values) is values
    assert space.callers([values])[0] is values


def test_an_optimizer_that_travels_works_in_host_memory() -> None:
    optimizer = optimizers.create("sgd", momentum=0.9)
    for made in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        weight = np.ones(20000, np.float32)
        state = made.update("w", weight, weight.copy(), made.init(weight))
        assert (state["t"], weight[0]) == (1, np.float32(0.99))


# --- that a store asks it


class Recording(HostSpace):
    """Counts the calls of each method."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def taken(self) -> dict[str, int]:
        """What has been counted since the last time."""
        calls, self.calls = dict(self.calls), Counter()
        return calls


def _counting(name: str) -> Any:
    def method(self: Recording, *args: Any, **kwargs: Any) -> Any:
        self.calls[name] += 1
        return getattr(HostSpace, name)(self, *args, **kwargs)

    return method


for _name in METHODS:
    setattr(Recording, _name, _counting(_name))

N = 24


def steps(store: Any, space: Recording, dtype: Any = np.float32) -> list[dict[str, int]]:
    """What the space was asked for: init; push; pull; pull into another dtype; pushpull in place."""
    found = []
    value, wide = np.ones(N, dtype), np.empty(N, np.float64)
    for call in (
        lambda: store.init("w", value),
        lambda: store.push("w", value),
        lambda: store.pull("w", value),
        lambda: store.pull("w", wide),
        lambda: store.pushpull("w", value),
    ):
        call()
        store.barrier()
        found.append(space.taken())
        store.barrier()
    return found


READ, WRITE = {"callers": 1, "total": 1}, {"callers": 1, "write": 1}


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_one_process(dtype: Any) -> None:
    space = Recording()
    store = local_store("local", spec.parse("local"), spaces=Spaces(space))
    push = READ | {"cast": 1, "copy": 1}
    assert steps(store, space, dtype) == [READ, push, WRITE, WRITE, push | WRITE | {"callers": 2}]


def test_an_update_is_made_in_the_space_of_the_weight() -> None:
    """An array of another space says which; for NumPy's an optimizer has a space of its own, whoever uses it."""
    host_space, boxed = Recording(), BoxedSpace()
    optimizer = optimizers.create("sgd", momentum=0.9, multi_precision=True)
    store = local_store("local", spec.parse("local"), spaces=Spaces(host_space, boxed))
    store.set_optimizer(optimizer)
    store.init("h", np.ones(N, np.float16))
    store.init("d", boxed.array(np.ones(N, np.float16)))
    host_space.taken()
    for _ in range(2):
        store.push(["h", "d"], [np.ones(N, np.float16), boxed.array(np.ones(N, np.float16))])
    assert host_space.taken() == {"total": 2, "cast": 2}
    assert boxed.crossings() == (0, 0)
    states = store.strategy._owner.states
    for key, kind in (("h", np.ndarray), ("d", Box)):
        state = states[store.session.infos[key].id]
        assert {type(array) for name, array in state.items() if name != "t"} == {kind}
    assert store.pull("h").tobytes() == store.pull("d").tobytes()


def recorded(mode: Mode, dtype: Any = np.float32, body: Any = steps) -> tuple[list[Any], list[Recording]]:
    """What each worker's space was asked for in each step; and the spaces of all ranks."""
    spaces = [Recording() for _ in range(mode.workers + mode.servers)]
    found = spawn_stores(
        mode.name,
        mode.workers,
        lambda store: body(store, spaces[store.rank], dtype),
        num_servers=mode.servers,
        config=mode.config(),
        spaces=[Spaces(space) for space in spaces],
    )
    return found, spaces


@pytest.mark.parametrize("algorithm", ["naive", "ring"])
def test_workers_alone_by_messages(algorithm: str) -> None:
    """The value's memory at init; the owned part becomes the sum; a call in place adds in the caller's array."""
    found, _ = recorded(Mode("dist_sync", 2, 0, algorithm, "off"))
    apply, pull = {"copy": 1}, WRITE
    rest = [READ | apply, pull, pull, apply | pull]
    assert found == [[READ | {"empty": 1, "copy": 1}, *rest], [READ | {"empty": 1}, *rest]]
    wide, _ = recorded(Mode("dist_sync", 2, 0, algorithm, "off"), np.float16)
    push = READ | apply | {"cast": 1}  # what is added in float32
    assert wide[0][1:] == [push, pull, pull, {"cast": 1} | apply | pull]


def test_workers_alone_in_shared_memory() -> None:
    """The value's own memory is the host's; a call that all make together copies in that memory, by its own means."""
    found, _ = recorded(Mode("dist_sync", 2))
    apply, pull = {"copy": 1}, WRITE
    for worker in found:
        assert worker[1:4] == [READ | apply, pull, pull]
        assert worker[4] in ({}, READ | apply | pull | {"callers": 2})  # the latter where a round has not ended yet


def test_keys_that_travel_together() -> None:
    """A push is packed into the bucket's memory, which is there again in the next round."""

    def body(store: Any, space: Recording, dtype: Any) -> list[dict[str, int]]:
        store.init(["v", "w"], [np.zeros(N, dtype)] * 2)
        store.strategy.bucket(["v", "w"])
        store.barrier()
        space.taken()
        found = []
        for _ in range(2):
            store.push(["v", "w"], [np.ones(N, dtype)] * 2)
            store.pull(["v", "w"])
            store.barrier()
            found.append(space.taken())
        return found

    found, _ = recorded(Mode("dist_sync", 2, 0, "naive", "off"), body=body)
    step = {"callers": 1 + 2, "total": 2, "copy": 2 + 1, "together": 1, "write": 2}  # two are packed, one updated
    assert found == [[step | {"empty": 1}, step]] * 2


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_servers(name: str) -> None:
    """A worker's value is received into the caller's array, or new memory; the server adds in memory used before."""

    def body(store: Any, space: Recording, dtype: Any) -> Any:
        store.set_optimizer(optimizers.create("test"))
        return steps(store, space, dtype) if store.num_workers == 1 else None

    found, (_, server) = recorded(Mode(name, 1, 1, memory="off"), body=body)
    made = {"callers": 1}
    assert found == [[READ, READ, made, WRITE | {"empty": 1}, made]]  # the last straight from the caller's array
    assert server.taken() == {"empty": 2, "copy": 1}


def test_a_server_adds_in_its_space() -> None:
    def body(store: Any, space: Recording, dtype: Any) -> None:
        store.init("w", np.zeros(N, dtype))
        for _ in range(3):
            store.push("w", np.ones(N, dtype))
        store.barrier()

    _, spaces = recorded(Mode("dist_sync", 3, 1, memory="off"), body=body)
    taken = spaces[3].taken()
    assert taken["combine"] == 3 * 2
    assert taken["copy"] == 1  # the first value
    assert taken["empty"] <= 1 + 3 + 1
