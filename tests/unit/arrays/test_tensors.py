"""PyTorch's and JAX's arrays: seen, written to where that is allowed, and made; with old and with new versions."""

from __future__ import annotations

import frameworks
import numpy as np
import pytest
from foreign_arrays import ForeignDevice
from store_modes import Mode

from mpikv.arrays.as_numpy import (
    BFLOAT16,
    SUPPORTED_DTYPES,
    check_writable,
    flat_copy,
    host_view,
    is_writable,
    shape_and_dtype,
    write,
)
from mpikv.arrays.tensors import new_like
from mpikv.errors import UnsupportedError

DTYPES = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
ARRAYS = pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, (2, 3)) for dtype in SUPPORTED_DTYPES), *((np.dtype("f4"), one) for one in ((), (0,), (3,), (0, 2)))],
    ids=str,
)


@pytest.fixture(scope="module")
def torch():
    return frameworks.need("torch")


@pytest.fixture
def jax():
    jax = frameworks.need("jax")
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", False)


def tensor_of(torch, values):
    """Made by PyTorch itself, not by what is tested."""
    dtype = getattr(torch, values.dtype.name)
    return torch.tensor(values.astype(np.float64).tolist(), dtype=torch.float64).to(dtype).reshape(values.shape)


def numbers(shape, dtype):
    return (np.arange(np.prod(shape, dtype=int)) % 5 + 1).astype(dtype).reshape(shape)


@ARRAYS
def test_a_tensor_is_read_and_written_to_where_it_is(torch, dtype, shape):
    values = numbers(shape, dtype)
    tensor = tensor_of(torch, values)
    view = host_view(tensor, "x")
    assert shape_and_dtype(tensor, "x") == (shape, dtype)
    np.testing.assert_array_equal(view, values)
    assert not view.size or view.__array_interface__["data"][0] == tensor.data_ptr()
    check_writable(tensor, "x")
    write(tensor, np.full(values.size, 7), "x")
    assert tensor.double().flatten().tolist() == [7] * values.size
    np.testing.assert_array_equal(view, np.full(shape, 7, dtype))


@DTYPES
def test_parts_of_tensors(torch, dtype):
    whole = tensor_of(torch, numbers((4, 6), dtype))
    for part in (
        whole[1:3, ::2],
        whole.t(),
        whole[:, 5],
        whole[2],
        whole[1, 1],
        whole.reshape(2, 2, 6).permute(2, 0, 1),
    ):
        expected = np.array(part.double().tolist()).astype(dtype)
        np.testing.assert_array_equal(host_view(part, "x"), expected)
        np.testing.assert_array_equal(flat_copy(part, "x"), expected.reshape(-1))
        check_writable(part, "x")
        write(part, np.zeros(expected.size), "x")
        assert part.double().abs().sum() == 0
    assert whole.double().sum() == 0 or whole.count_nonzero() < whole.numel()


def test_tensors_that_require_gradients(torch):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    assert host_view(parameter, "x").tolist() == [[1, 1], [1, 1]]
    write(parameter, np.arange(4), "x")
    assert parameter.tolist() == [[0, 1], [2, 3]]
    inner = parameter * 2
    assert host_view(inner, "x").tolist() == [[0, 2], [4, 6]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_whose_negation_is_still_to_be_made(torch, dtype):
    """Its memory holds the other signs, which DLPack does not say."""
    kind = getattr(torch, dtype)
    found = torch._neg_view(torch.tensor([1.0, -2.0], dtype=kind))
    assert found.is_neg()
    assert host_view(found, "x").tolist() == [-1, 2]
    assert not is_writable(found, "x")
    with pytest.raises(UnsupportedError, match="x is read-only"):
        check_writable(found, "x")


def test_tensors_that_hold_no_values_of_ours(torch):
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    for tensor, words in (
        (conjugate, "conjugate bit"),
        (torch.zeros(3).to_sparse(), "Sparse|sparse"),
        (torch.zeros(2, dtype=torch.bool), "x has dtype bool; a store holds"),
        (torch.zeros(2, dtype=torch.int16), "x has dtype int16; a store holds"),
        (torch.zeros(2, dtype=torch.complex64), "x has dtype complex64; a store holds"),
    ):
        for call in (host_view, shape_and_dtype, check_writable):
            with pytest.raises(UnsupportedError, match=words):
                call(tensor, "x")


def test_a_tensor_without_values(torch):
    for call in (host_view, shape_and_dtype, check_writable, flat_copy):
        with pytest.raises(UnsupportedError, match="x: the tensor is on the device 'meta' and has no values"):
            call(torch.zeros(2, device="meta"), "x")


@pytest.fixture
def on_a_gpu(torch):
    """Makes tensors that stand for those on a GPU: their values come to the host by `cpu` alone, which counts."""

    class Standing(torch.Tensor):
        copies = 0

        @property
        def device(self):
            return torch.device("cuda", 0)

        def cpu(self):
            Standing.copies += 1
            return self.as_subclass(torch.Tensor).clone()

        def numpy(self, *args, **kwargs):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def made(values):
        Standing.copies = 0
        return tensor_of(torch, values).as_subclass(Standing)

    return made


@ARRAYS
def test_a_tensor_on_a_gpu(on_a_gpu, dtype, shape):
    """It is copied to the host to be read, and copied into to be written to; what it is like is known without."""
    values = numbers(shape, dtype)
    tensor = on_a_gpu(values)
    assert shape_and_dtype(tensor, "x") == (shape, dtype)
    check_writable(tensor, "x")
    assert type(tensor).copies == 0
    view = host_view(tensor, "x")
    assert type(tensor).copies == 1
    np.testing.assert_array_equal(view, values)
    assert not view.flags.writeable  # what is written into a copy would be lost
    np.testing.assert_array_equal(flat_copy(tensor, "x"), values.reshape(-1))
    write(tensor, np.full(values.size, 7), "x")
    np.testing.assert_array_equal(host_view(tensor, "x"), np.full(shape, 7, dtype))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("memory", ["auto", "off"])
@pytest.mark.parametrize("servers", [0, 1])
def test_stores_take_tensors_on_a_gpu(on_a_gpu, workers, servers, memory):
    """The result lands in the tensor, also in a blocking call, and in one that was made before."""
    values = numbers((2, 3), "float32")

    def body(store):
        store.broadcast("w", on_a_gpu(values), out=(tensor := on_a_gpu(np.zeros((2, 3), np.float32))))
        np.testing.assert_array_equal(host_view(tensor, "x"), values)
        for i in range(1, 4):
            store.pushpull("w", tensor)
            np.testing.assert_array_equal(host_view(tensor, "x"), values * workers**i)
        store.push("w", [on_a_gpu(values), on_a_gpu(values)])
        store.pull("w", tensor)
        np.testing.assert_array_equal(host_view(tensor, "x"), values * 2 * workers)

    mode = Mode("dist_sync", workers, servers, memory=memory)
    mode.run(body)


@ARRAYS
def test_jax_arrays_are_read_and_never_written_to(jax, dtype, shape):
    values = numbers(shape, dtype)
    array = jax.numpy.asarray(values)
    assert array.dtype == dtype
    assert shape_and_dtype(array, "x") == (shape, dtype)
    np.testing.assert_array_equal(host_view(array, "x"), values)
    assert not is_writable(array, "x")
    with pytest.raises(UnsupportedError, match=r"x is read-only \(JAX's arrays cannot be changed; with out=None"):
        check_writable(array, "x")


@pytest.mark.parametrize("transformation", ["jit", "vmap", "grad"])
def test_what_jax_traces_has_no_values(jax, transformation):
    def function(x):
        with pytest.raises(UnsupportedError, match=r"x: JAX traces this function .*io_callback"):
            host_view(x, "x")
        with pytest.raises(UnsupportedError, match="JAX traces this function"):
            new_like(np.zeros(3), x, "x")
        return x.sum()

    getattr(jax, transformation)(function)(jax.numpy.ones((2, 3)) if transformation == "vmap" else jax.numpy.ones(3))


@ARRAYS
@pytest.mark.parametrize("library", ["torch", "jax", "numpy", "device"])
def test_new_arrays(request, library, dtype, shape):
    values = numbers(shape, dtype)
    if library == "torch":
        torch = request.getfixturevalue("torch")
        found = new_like(values.copy(), torch.zeros(5, requires_grad=True), "x")
        assert isinstance(found, torch.Tensor)
        assert not found.requires_grad
        assert found.dtype == getattr(torch, dtype.name)
        assert torch.equal(found, tensor_of(torch, values))
    elif library == "jax":
        jax = request.getfixturevalue("jax")
        found = new_like(values.copy(), jax.numpy.zeros(2), "x")
        assert isinstance(found, jax.Array)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), values)
    elif library == "numpy":
        found = new_like(values, np.float32(1), "x")
        assert found is values
    else:
        device = ForeignDevice()
        found = new_like(values, device.asarray(np.zeros(1)), "x")
        assert found.fake is device
        np.testing.assert_array_equal(found.get(), values)
    assert tuple(found.shape) == shape


def test_new_arrays_lie_where_the_old_one_does(jax):
    device = jax.devices()[0]
    placed = jax.device_put(np.ones(3), device)
    found = new_like(np.zeros(3), placed, "x")
    assert found.sharding == placed.sharding


def test_jax_without_64_bits():
    jax = frameworks.need("jax")
    like = jax.numpy.zeros(2)
    for dtype in ("float64", "int64"):
        with pytest.raises(UnsupportedError, match=rf"x: .*holds no {dtype}.*: set jax_enable_x64"):
            new_like(np.zeros(2, dtype), like, "x")
    assert new_like(np.zeros(2, BFLOAT16), like, "x").dtype == BFLOAT16


def test_a_library_that_says_no_way():
    class Other:
        def __dlpack__(self):
            raise AssertionError

    with pytest.raises(UnsupportedError, match=r"x: no way to make a new .*Other; give an array to write into"):
        new_like(np.zeros(2), Other(), "x")
