"""Arguments, results and mistakes that not every mode has to be asked about; test_store_paths.py has the others."""

from __future__ import annotations

import contextlib

import frameworks
import ml_dtypes
import numpy as np
import pytest
from foreign_arrays import ForeignArray, ForeignDevice
from on_workers import limit, on
from store_modes import DTYPES, FEW_ASYNC, FEW_ON_DEVICE, HYBRID, LOCAL, MESSAGES, ONE_HOST, SERVED, TWO_HOSTS, Mode

from mpikv import KVStore, MpikvError, ShapeMismatch, UnsupportedError, kv, optimizers
from mpikv.testing.ranks import RankError

F32 = np.float32
SYNC_KINDS = on(LOCAL[0], ONE_HOST, MESSAGES, TWO_HOSTS, SERVED, HYBRID[0], FEW_ON_DEVICE[0])
EVERY_KIND = on(LOCAL[0], ONE_HOST, MESSAGES, SERVED, *FEW_ASYNC[:2], FEW_ON_DEVICE[0])


def ones(*shape):
    return np.ones(shape, F32)


# --- keys


@on(LOCAL[0], ONE_HOST, SERVED)
@pytest.mark.parametrize("keys", [(0, -1), (2**63 - 1, -(2**63)), (np.int64(3), np.uint8(4)), ("", "ü\0\ud7ff" * 50)])
def test_kinds_of_keys(store, W, keys):
    """A store has one kind, that of the first call that succeeds."""
    other = 1 if isinstance(keys[0], str) else "a"
    with pytest.raises(TypeError, match="does not mix"):
        store.init([other, keys[0]], [ones(1), ones(1)])
    with pytest.raises(TypeError):
        store.init(other, 1.0)
    store.init(list(keys), [ones(2), ones(3)])
    store.push(list(keys), [ones(2), ones(3)])
    assert [array.tolist() for array in store.pull(list(keys))] == [[W] * 2, [W] * 3]
    if not isinstance(keys[0], str):
        assert store.pull([int(key) for key in keys])[0].tolist() == [W] * 2
    for call in (store.init, store.push, store.pull):
        with pytest.raises(TypeError, match="does not mix"):
            call(other, ones(1))
        for key, error, text in ((None, TypeError, "key"), ({"a"}, TypeError, "key"), (2**63, ValueError, "64 bits")):
            with pytest.raises(error, match=text):
                call(key, ones(1))


# --- results as new arrays


@pytest.fixture(scope="module")
def torch():
    return frameworks.need("torch")


@pytest.fixture(scope="module")
def jax():
    return frameworks.need("jax")


def frozen(shape, value, dtype):
    array = np.full(shape, value, dtype)
    array.flags.writeable = False
    return array


@pytest.fixture(params=["jax", "numpy"])
def read_only(request):
    """The type of arrays that cannot be written to, and what makes one of a shape, a value and a dtype."""
    if request.param == "numpy":
        return np.ndarray, frozen
    jax = frameworks.need("jax")
    return jax.Array, jax.numpy.full


@SYNC_KINDS
def test_arrays_that_cannot_be_written_to(store, W, read_only):
    """Their results are new arrays of their library, the caller's alone; others are written to where they stand."""
    kind, full = read_only
    half = ml_dtypes.bfloat16
    store.init(["a", "b", "h", "c"], [full(3, 0, F32), full((2, 2), 0, F32), full(5, 0, half), np.zeros(2, F32)])
    mine, every = store.rank + 1, W * (W + 1) / 2
    value, plain, device = full(3, mine, F32), np.zeros(2, F32), ForeignDevice().asarray(np.ones(2, F32))
    for _ in range(3):
        first = store.pushpull("a", value)
        assert isinstance(first, kind)
        assert (first.tolist(), value.tolist()) == ([every] * 3, [mine] * 3)
        plain[:] = 1
        device.set(np.ones(2, F32))
        found = store.pushpull(["b", "c"], [full((2, 2), 2 * mine, F32), plain])
        assert found[1] is plain
        assert (found[0].tolist(), plain.tolist()) == ([[2 * every] * 2] * 2, [W] * 2)
        assert store.pushpull(["a", "c"], [value, device])[1] is device
        assert device.get().tolist() == [W] * 2
        assert store.pushpull("c", plain) is None
    found = store.pushpull("h", full(5, mine, half))
    assert (found.dtype, found.tolist()) == (half, [every] * 5)
    # A key with several arrays, in two places of the list.
    found = store.pushpull(["b", "c", "b"], [[full((2, 2), 1, F32), np.ones((2, 2), F32)], plain, full((2, 2), 1, F32)])
    assert isinstance(found[0][0], kind)
    assert [one.tolist() for one in (*found[0], found[2])] == [[[3 * W] * 2] * 2] * 3
    request = store.pushpull_async("a", value)
    assert request.wait().tolist() == [every] * 3
    assert request.wait() is request.wait()
    assert store.pushpull("a", value, out := np.zeros(3)) is None
    assert out.tolist() == [every] * 3
    assert isinstance(store.pull("a", like=value), kind)
    store.pushpull("a", full(3, 7, F32))
    assert first.tolist() == [every] * 3
    assert store.pushpull([], []) is None
    with pytest.raises(ShapeMismatch):
        store.pushpull("a", full(4, 1, F32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on(ONE_HOST)
def test_tensors_are_written_to(store, W, torch, dtype):
    """Every kind of tensor, and NumPy's views, in place and as `out`, twice."""
    kind = getattr(torch, dtype.name)
    tensors = [torch.ones(3, dtype=kind), torch.ones(6, dtype=kind)[::2], torch.ones(3, 3, dtype=kind).t()[1]]
    if dtype.kind not in "iu":
        tensors.append(torch.nn.Parameter(torch.ones(3, dtype=kind)))
    store.init(["a", "scalar", "empty"], [np.zeros(3, dtype), np.zeros((), dtype), np.zeros((0, 2), dtype)])
    for array in (*tensors, np.ones(3, dtype)[::-1], np.ones((2, 3), dtype)[1]):
        assert store.pushpull("a", array) is None
        assert array.tolist() == [W] * 3
        array[:1].fill(2) if isinstance(array, np.ndarray) else array.data[:1].fill_(2)
        for call in (lambda: store.pushpull("a", array, array), lambda: store.pull("a", array)):  # noqa: B023 - at once
            assert call() is None
            assert array.tolist() == [2 * W, W * W, W * W]
    scalar, empty = torch.ones((), dtype=kind), torch.ones((0, 2), dtype=kind)
    store.pushpull(["scalar", "empty"], [scalar, empty])
    assert scalar.item() == W


@EVERY_KIND
def test_results_in_the_library_of_another_array(store, torch, jax):
    store.set_optimizer(optimizers.create("test"))
    values = [np.arange(4, dtype=F32).reshape(2, 2), np.arange(3).astype(ml_dtypes.bfloat16), np.array(5, np.int32)]
    store.init(["w", "h", "n", "wide"], [*values, np.zeros(2)])
    tensor, array, device = torch.zeros(1), jax.numpy.zeros(1), ForeignDevice().asarray(np.zeros(1))
    for key, value in zip(["w", "h", "n"], values, strict=True):
        found = store.pull(key, like=tensor)
        assert (found.dtype, tuple(found.shape)) == (getattr(torch, value.dtype.name), value.shape)
        assert found.tolist() == value.tolist()
        found = store.pull_async(key, like=array).wait()
        assert isinstance(found, jax.Array)
        assert (found.dtype, found.shape, found.tolist()) == (value.dtype, value.shape, value.tolist())
    mixed = store.pull(["w", "w", "n"], like=[tensor, [array, device], np.zeros(())])
    assert [type(one) for one in (mixed[0], mixed[1][1], mixed[2])] == [torch.Tensor, ForeignArray, np.ndarray]
    assert isinstance(mixed[1][0], jax.Array)
    assert mixed[1][1].fake is device.fake
    one_key = store.pull("w", like=[tensor, tensor])
    one_key[0].zero_()
    assert one_key[1].tolist() == values[0].tolist()
    assert type(store.pull("w")) is np.ndarray
    assert store.pull([], like=tensor) == []

    def traced(x):
        for call in (store.push, store.pushpull, store.pushpull_async, lambda key, x: store.pull(key, like=x)):
            with pytest.raises(UnsupportedError, match=r"of key 'w': JAX traces this function"):
                call("w", x)
        with pytest.raises(UnsupportedError, match="JAX traces this function"):
            store.init("b", x)
        return x

    jax.jit(traced)(array)
    for error, text, key, out, like in (
        (ValueError, "`out` is what results .* `like` what new ones", "w", np.zeros(2), array),
        (UnsupportedError, "pull: like of key 'wide': ArrayImpl holds no float64", "wide", None, array),
        (ValueError, "2 keys but 1 values", ["w", "w"], None, [array]),
        *((TypeError, "not an array", "w", None, wrong) for wrong in ("torch", 1.0, np)),
        (UnsupportedError, "out of key 'w' is read-only .JAX's arrays cannot be changed", "w", array, None),
    ):
        with pytest.raises(error, match=text):
            store.pull(key, out, like=like)
    store.barrier()
    assert store.pull("w", like=tensor).tolist() == [[0, 1], [2, 3]]


# --- the store itself


def test_what_a_store_says_of_itself():
    store = kv.create("Local_Update_CPU")
    assert isinstance(store, KVStore)
    assert (store.type, store.rank, store.num_workers) == ("local_update_cpu", 0, 1)
    assert store.is_capable("optimizer") is True
    assert store.is_capable("OPTIMIZER") is True
    with pytest.raises(ValueError, match="optimizer"):
        store.is_capable("speed")
    assert "worker 0 of 1" in repr(store)
    with store as same:
        assert same is store
    assert "closed" in repr(store)
    with pytest.raises(MpikvError, match="closed"):
        store.pull("a")
    with pytest.raises(ZeroDivisionError), kv.create("local"):
        raise ZeroDivisionError


@pytest.mark.parametrize("mode", [LOCAL[0], Mode("dist_sync", 1), Mode("dist_async", 1), Mode("dist_sync", 1, 1)])
def test_an_exception_in_the_optimizer_reaches_the_only_worker(mode):
    def fails(weight, grad, state):
        raise ZeroDivisionError("of the user's")

    def body(store):
        store.init("a", ones(2))
        store.set_optimizer(fails)
        store.push("a", ones(2))
        with limit(store) if mode.servers else contextlib.nullcontext():
            store.pull("a")

    with pytest.raises((ZeroDivisionError, RankError), match="of the user's") as caught:
        mode.run(body)
    if mode.servers:
        (error,) = (error for error in caught.value.errors.values() if isinstance(error, ZeroDivisionError))
        assert "'a'" in "".join([*map(str, error.args), *getattr(error, "__notes__", [])])


# --- arrays of one call that overlap: the result is that of the arrays as they were when the call began


SIZES = (10, 5000, 100_000)  # alone in a cache line, some partitions, several chunks
SHIFT = 7


@on(*[mode._replace(part_bytes=4096) for mode in (ONE_HOST, MESSAGES, SERVED)])
@pytest.mark.parametrize("own", [True, False], ids=["own arrays", "arrays of the store"])
def test_overlapping_arrays(store: KVStore, W: int, own: bool) -> None:
    for n, form in (
        (n, form) for n in SIZES for form in ("one for two", "swapped", "shifted", "moved up", "moved down")
    ):
        keys = [f"{form} {n}", f"{form} {n} too"]
        store.init(keys, [np.zeros(n, np.int64)] * 2)
        whole = np.zeros(2 * n, np.int64) if own else store.zeros(2 * n, "int64")
        x, y = whole[:n], whole[n:] if form in {"swapped", "one for two"} else whole[SHIFT : SHIFT + n]
        if form == "moved down":
            x, y = y, x
        factor = W * (W + 1) // 2
        for _ in range(3):  # the third time the call is known
            whole[:] = np.arange(2 * n)
            sums = [x * factor, y * factor]
            whole *= store.rank + 1
            if form == "swapped":
                store.pushpull(keys, [x, y], out=[y, x])
                results = [y, x]
            elif form == "shifted":
                store.pushpull(keys, [x, y])
                results = []  # each has elements of the other
            elif form == "one for two":
                store.pushpull(keys, [x, x])
                sums = sums[:1] * 2
                results = [x]
            else:
                store.pushpull(keys[0], x, out=y)
                sums[1] = np.zeros(n)
                results = [y]
            for found, expected in [*zip(results, sums, strict=False), *zip(store.pull(keys), sums, strict=True)]:
                np.testing.assert_array_equal(found, expected)
            store.barrier()
