"""Results as new arrays: `pull(like=)`, and `pushpull` of arrays that cannot be written to, in every mode."""

from __future__ import annotations

import frameworks
import ml_dtypes
import numpy as np
import pytest
from foreign_arrays import ForeignArray, ForeignDevice
from on_workers import on
from store_modes import DTYPES, FEW, FEW_DIST_SYNC, Mode

from mpikv import UnsupportedError, optimizers
from mpikv.errors import ShapeMismatch

F32 = np.float32
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SYNC = (Mode("local", 1), Mode("dist_sync", 2), Mode("dist_sync", 2, memory="off"), *FEW_DIST_SYNC)
EVERY_KIND = on(*FEW, Mode("dist_sync", 2))
SYNC_KINDS = on(*SYNC)


def frozen(values, dtype=F32):
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


@pytest.fixture(scope="module")
def torch():
    return frameworks.need("torch")


@pytest.fixture(scope="module")
def jax():
    return frameworks.need("jax")


@SYNC_KINDS
def test_arrays_of_jax(store, W, jax):
    xp = jax.numpy
    mine = store.rank + 1
    every = W * (W + 1) / 2
    store.init(["a", "b", "h"], [xp.zeros(3), xp.zeros((2, 2)), xp.zeros(5, xp.bfloat16)])
    value = xp.full(3, mine, F32)
    for _ in range(3):
        result = store.pushpull("a", value)
        assert isinstance(result, jax.Array)
        assert result.tolist() == [every] * 3
    assert value.tolist() == [mine] * 3
    half = store.pushpull("h", xp.full(5, mine, xp.bfloat16))
    assert (half.dtype, half.tolist()) == (xp.bfloat16, [every] * 5)
    a, b = store.pushpull(["a", "b"], [value, xp.full((2, 2), 2 * mine, F32)])
    assert (a.tolist(), b.tolist()) == ([every] * 3, [[2 * every] * 2] * 2)
    (devices,) = store.pushpull(["b"], [[xp.ones((2, 2)), xp.full((2, 2), mine, F32)]])
    assert [isinstance(one, jax.Array) for one in devices] == [True, True]
    assert [one.tolist() for one in devices] == [[[every + W] * 2] * 2] * 2
    request = store.pushpull_async("a", value)
    assert request.wait().tolist() == [every] * 3
    assert request.wait() is request.wait()
    out = np.zeros(3)
    assert store.pushpull("a", value, out) is None
    assert out.tolist() == [every] * 3
    assert isinstance(store.pull("a", like=value), jax.Array)


@SYNC_KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@SYNC_KINDS
def test_arrays_that_can_be_written_to_are_where_others_cannot(store, W):
    store.init(["a", "b", "c"], [np.zeros(2, F32)] * 3)
    read_only, plain, device = frozen([1, 2]), np.ones(2, F32), ForeignDevice().asarray(np.ones(2, F32))
    for _ in range(3):
        plain[:] = 1
        device.set(np.ones(2, F32))
        found = store.pushpull(["a", "b", "c"], [read_only, plain, device])
        assert found[1] is plain
        assert found[2] is device
        assert read_only.tolist() == [1, 2]
        assert type(found[0]) is np.ndarray
        assert [one.tolist() for one in (*found[:2], device.get())] == [[W, 2 * W], [W, W], [W, W]]
        assert store.pushpull(["b", "c"], [plain, device]) is None
    # A key with several arrays, in two places of the list.
    found = store.pushpull(["a", "b", "a"], [[read_only, np.ones(2, F32)], np.ones(2, F32), read_only])
    a = [3 * W, 5 * W]
    assert [one.tolist() for one in (*found[0], found[1], found[2])] == [a, a, [W, W], a]
    assert store.pushpull([], []) is None
    assert store.pushpull("a", np.float32([1, 2])[::1]) is None


@EVERY_KIND
def test_results_in_the_library_of_another_array(store, torch, jax):
    store.set_optimizer(optimizers.create("test"))
    values = [np.arange(4, dtype=F32).reshape(2, 2), np.arange(3).astype(BFLOAT16), np.array(5, np.int32)]
    store.init(["w", "h", "n"], values)
    tensor, array, device = torch.zeros(1), jax.numpy.zeros(1), ForeignDevice().asarray(np.zeros(1))
    for key, value in zip(["w", "h", "n"], values, strict=True):
        found = store.pull(key, like=tensor)
        assert (found.dtype, tuple(found.shape)) == (getattr(torch, value.dtype.name), value.shape)
        assert found.tolist() == value.tolist()
        found = store.pull_async(key, like=array).wait()
        assert isinstance(found, jax.Array)
        assert (found.dtype, found.shape, found.tolist()) == (value.dtype, value.shape, value.tolist())
    both = store.pull(["w", "n"], like=tensor)
    assert [one.tolist() for one in both] == [values[0].tolist(), 5]
    mixed = store.pull(["w", "w", "n"], like=[tensor, [array, device], np.zeros(())])
    assert [type(one) for one in (mixed[0], mixed[1][1], mixed[2])] == [torch.Tensor, ForeignArray, np.ndarray]
    assert isinstance(mixed[1][0], jax.Array)
    assert mixed[1][1].fake is device.fake
    one_key = store.pull("w", like=[tensor, tensor])
    assert one_key[0].data_ptr() != one_key[1].data_ptr()
    one_key[0].zero_()
    assert one_key[1].tolist() == values[0].tolist()
    assert type(store.pull("w")) is np.ndarray
    assert store.pull([], like=tensor) == []
    assert store.pull("w", like=tensor).tolist() == [[0, 1], [2, 3]]


@EVERY_KIND
def test_what_cannot_be(store, jax):
    store.set_optimizer(optimizers.create("test"))
    store.init(["a", "wide"], [np.zeros(2, F32), np.zeros(2, np.float64)])
    array = jax.numpy.zeros(2)
    with pytest.raises(ValueError, match="`out` is what results are written to, `like` what new ones are like"):
        store.pull("a", np.zeros(2), like=array)
    with pytest.raises(UnsupportedError, match=r"pull: like of key 'wide': ArrayImpl holds no float64"):
        store.pull("wide", like=array)
    with pytest.raises(ValueError, match="2 keys but 1 values"):
        store.pull(["a", "a"], like=[array])
    for wrong in ("torch", 1.0, np):
        with pytest.raises(TypeError, match="not an array"):
            store.pull("a", like=wrong)
    with pytest.raises(ShapeMismatch):
        store.pushpull("a", frozen([1, 2, 3]))
    with pytest.raises(UnsupportedError, match=r"out of key 'a' is read-only \(JAX's arrays cannot be changed"):
        store.pull("a", array)

    def traced(x):
        for call in (store.push, store.pushpull, store.pushpull_async):
            with pytest.raises(UnsupportedError, match=r"of key 'a': JAX traces this function"):
                call("a", x)
        with pytest.raises(UnsupportedError, match=r"of key 'a': JAX traces this function"):
            store.pull("a", like=x)
        with pytest.raises(UnsupportedError, match="JAX traces this function"):
            store.init("b", x)
        return x

    jax.jit(traced)(array)
    store.barrier()
    assert store.pull("a").tolist() == [0.0, 0.0]


@SYNC_KINDS
def test_results_stay_as_they_are(store, jax):
    """A result is the caller's alone: a later round does not change it."""
    store.init("a", np.zeros(4, F32))
    first = store.pushpull("a", jax.numpy.ones(4))
    before = np.asarray(first).copy()
    for _ in range(3):
        store.pushpull("a", jax.numpy.full(4, 7.0))
        store.pushpull("a", np.full(4, 3, F32))
    assert np.array_equal(before, np.asarray(first))
