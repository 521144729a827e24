"""Arrays of any library as NumPy arrays: views where memory can be shared, errors that say what is wrong."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import frameworks
import numpy as np
import pytest
from foreign_arrays import ForeignDevice, Tensor

from mpikv.arrays import tensors
from mpikv.arrays.as_numpy import (
    BFLOAT16,
    SUPPORTED_DTYPES,
    check_writable,
    dtype_of,
    flat_copy,
    host_view,
    is_array,
    is_device,
    is_writable,
    shape_and_dtype,
    sum_devices,
    write,
)
from mpikv.arrays.tensors import new_like
from mpikv.errors import UnsupportedError

# Whether NumPy lets what another library shares by DLPack be written to: an older one does not know whether it may be.
DLPACK_IS_WRITABLE = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class Far(Tensor):
    dtype = "float32"

    def __dlpack__(self, **kwargs):
        raise BufferError("lies on a GPU")

    def __dlpack_device__(self):
        return (2, 0)


class Kind(NamedTuple):
    """Arrays of a library. values: as NumPy has them. shares: whether a view on the host is the memory itself.

    begets: whether there can be new ones like them.
    """

    make: Callable[[Any], Any]
    values: Callable[[Any], Any]
    shares: bool = True
    writable: bool = True
    begets: bool = True


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


def values_of(tensor):
    return np.array(tensor.double().tolist()).reshape(tuple(tensor.shape)).astype(str(tensor.dtype)[len("torch.") :])


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


@pytest.fixture
def kind(request):
    if request.param == "torch":
        torch = request.getfixturevalue("torch")
        return Kind(lambda array: tensor_of(torch, array), values_of)
    if request.param == "torch on a GPU":
        torch, make = request.getfixturevalue("torch"), request.getfixturevalue("on_a_gpu")
        return Kind(make, lambda tensor: values_of(tensor.as_subclass(torch.Tensor)), False, begets=False)
    if request.param == "jax":
        return Kind(request.getfixturevalue("jax").numpy.asarray, np.asarray, shares=False, writable=False)
    return {
        "numpy": Kind(lambda array: array, lambda array: array),
        "device": Kind(ForeignDevice().asarray, lambda array: array.memory, shares=False),
        "dlpack": Kind(Tensor, lambda array: array.memory, writable=DLPACK_IS_WRITABLE, begets=False),
    }[request.param]


def numbers(shape, dtype):
    return (np.arange(np.prod(shape, dtype=int)) % 5 + 1).astype(dtype).reshape(shape)


def refused(text, calls, *arguments):
    for call in calls:
        with pytest.raises(UnsupportedError, match=text):
            call(*arguments)


KINDS = ("numpy", "device", "dlpack", "torch", "torch on a GPU", "jax")
FORMS = [*((one, (2, 3)) for one in SUPPORTED_DTYPES), *((np.dtype("f4"), one) for one in ((), (0,), (3,), (0, 2)))]


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),  # together: every run makes all
    [(name, *form) for name in KINDS for form in FORMS if (name, form[0]) != ("dlpack", BFLOAT16)],
    indirect=["kind"],
    ids=str,
)
def test_reading_and_writing(kind, dtype, shape):
    values = numbers(shape, dtype)
    array = kind.make(values.copy())
    assert is_array(array)
    assert shape_and_dtype(array, "x") == (shape, dtype)
    view, copy = host_view(array, "x"), flat_copy(array, "x")
    assert view.dtype == dtype
    np.testing.assert_array_equal(view, values)
    np.testing.assert_array_equal(copy, values.reshape(-1))
    assert copy.flags.c_contiguous
    assert copy.flags.owndata or copy.base.flags.owndata
    assert is_writable(array, "x") == kind.writable
    if kind.writable:
        check_writable(array, "x")
        write(array, np.arange(values.size, dtype=np.float64) + 5, "x")
        written = (np.arange(values.size) + 5).astype(dtype).reshape(shape)
        np.testing.assert_array_equal(kind.values(array), written)
        np.testing.assert_array_equal(view, written if kind.shares else values)
        np.testing.assert_array_equal(copy, values.reshape(-1))
    else:
        refused("x is read-only", [check_writable], array, "x")
    if kind.begets:
        made = new_like(values.copy(), array, "x")
        assert shape_and_dtype(made, "x") == (shape, dtype)
        np.testing.assert_array_equal(host_view(made, "x"), values)
        assert isinstance(made, type(array))


def test_kinds():
    array, device = np.zeros(2), ForeignDevice().asarray(np.zeros(2))
    assert is_array(np.float32(1))
    assert not any(is_array(value) for value in (1.0, [array], None, "x", (array,), {"a": array}))
    assert [is_device(value) for value in (device, array, Tensor(array))] == [True, False, False]


def test_views_share_memory():
    array, device = np.zeros((4, 6), np.float32), ForeignDevice().asarray(np.zeros((4, 6), np.float32))
    for part in (array, array[::2, 1::2], array.T):
        host_view(part, "x")[...] += 1
        host_view(Tensor(part) if DLPACK_IS_WRITABLE else part, "x")[...] += 1
    assert (array.min(), array.max()) == (4, 6)
    write(device[::2, 1::2], np.arange(6, dtype=np.int64), "x")
    assert host_view(device, "x")[:, 1::2].tolist() == [[0, 1, 2], [0] * 3, [3, 4, 5], [0] * 3]


def test_shape_and_dtype_of_a_device_array_move_nothing(on_a_gpu):
    device = ForeignDevice()
    arrays = device.asarray(np.zeros((2, 3), np.float16)), on_a_gpu(np.zeros((2, 3), np.float16))
    for array in arrays:
        shape_and_dtype(array, "x")
        check_writable(array, "x")
    assert device.gets == device.sets == type(arrays[1]).copies == 0
    view = host_view(arrays[1], "x")
    assert type(arrays[1]).copies == 1
    assert not view.flags.writeable  # what is written into a copy would be lost


@pytest.mark.parametrize(
    "dtype", [bool, np.int16, np.uint32, complex, object, "S2", ">f4", ">i8", "M8[s]", np.longdouble]
)
def test_other_dtypes(dtype):
    if np.dtype(dtype) in SUPPORTED_DTYPES:
        pytest.skip("long double is double here")
    calls = host_view, shape_and_dtype, flat_copy
    refused(r"the thing has dtype .*float16, float32.*bfloat16", calls, np.zeros(2, dtype), "the thing")


def test_what_is_no_array_or_cannot_be_read_or_written_to():
    refused(r"the thing: cannot read a Far .*lies on a GPU", [host_view], Far(np.zeros(2, np.float32)), "the thing")
    refused(r"x: no way to make a new .*Far; give an array to write into", [new_like], np.zeros(2), Far(0), "x")
    refused("read-only", [check_writable], np.broadcast_to(np.float32(1), 3), "x")
    for wrong in (1, [1.0], "text", None):
        with pytest.raises(TypeError, match=r"the thing is an array .*, not"):
            host_view(wrong, "the thing")
    for wrong in (1, [1.0], "text", None, np.float32(1)):
        with pytest.raises(TypeError, match="the thing is an array to write into"):
            check_writable(wrong, "the thing")


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", KINDS[: 2 + DLPACK_IS_WRITABLE], indirect=True)
def test_sum_of_devices(kind, on_device):
    values = [np.full((2, 3), v, np.float16) for v in (2048, 1, 1, -2)]
    for n in (1, 2, 3, 4):
        arrays = [kind.make(value.copy()) for value in values[:n]]
        total = sum_devices(arrays, "x", on_device=on_device)
        assert (total.shape, total.dtype) == ((6,), np.float16)
        assert total.tolist() == [[2048, 2048, 2050, 2048][n - 1]] * 6  # 2049 is no float16; added in float32
        total[...] = 0
        assert [kind.values(array)[0, 0] for array in arrays] == [2048, 1, 1, -2][:n]


def test_sum_on_the_device_is_one_transfer():
    device = ForeignDevice()
    arrays = [device.asarray(np.ones(3, np.float32)) for _ in range(4)]
    assert sum_devices(arrays, "x", on_device=True).tolist() == [4] * 3
    assert device.gets == 1
    assert sum_devices([*arrays, np.ones(3, np.float32)], "x", on_device=True).tolist() == [5] * 3


# --- PyTorch


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_parts_of_tensors(torch, dtype):
    whole = tensor_of(torch, numbers((4, 6), dtype))
    several = whole[1:3, ::2], whole.t(), whole[:, 5], whole[2], whole[1, 1], whole.reshape(2, 2, 6).permute(2, 0, 1)
    for part in several:
        expected = values_of(part)
        np.testing.assert_array_equal(host_view(part, "x"), expected)
        np.testing.assert_array_equal(flat_copy(part, "x"), expected.reshape(-1))
        check_writable(part, "x")
        before = whole.count_nonzero() - part.count_nonzero()
        write(part, np.zeros(expected.size), "x")
        assert (part.count_nonzero(), whole.count_nonzero()) == (0, before)
        whole.copy_(tensor_of(torch, numbers((4, 6), dtype)))


def test_tensors_that_require_gradients(torch):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    assert host_view(parameter, "x").tolist() == [[1, 1], [1, 1]]
    write(parameter, np.arange(4), "x")
    assert parameter.tolist() == [[0, 1], [2, 3]]
    assert host_view(parameter * 2, "x").tolist() == [[0, 2], [4, 6]]
    assert not new_like(np.zeros(2), parameter, "x").requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_can_be_resized_afterwards(torch, dtype):
    """FSDP frees the memory of parameters in between. `Tensor.numpy` would forbid it for good."""
    tensor = torch.arange(6, dtype=getattr(torch, dtype)).reshape(2, 3).t()
    kept, storage = host_view(tensor[1:], "x"), tensor.untyped_storage()
    assert kept.tolist() == [[1, 4], [2, 5]]
    assert kept.ctypes.data == tensor[1:].data_ptr()
    storage.resize_(0)
    refused("x: a Tensor without memory: its storage was freed", [host_view], tensor, "x")
    storage.resize_(6 * tensor.element_size())
    write(tensor, np.arange(6).reshape(3, 2), "x")
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_another_library_becomes_an_array_of_jax(dtype, monkeypatch):
    """As results for JAX's arrays on a GPU are, in CuPy's; also of the dtype that its DLPack may not know."""
    jnp = frameworks.need("jax").numpy
    values, like = np.arange(6).reshape(2, 3).astype(dtype_of(dtype)), jnp.zeros(2)
    made = tensors.adopted(values, like)
    assert (made.dtype, made.tolist()) == (jnp.dtype(dtype), [[0, 1, 2], [3, 4, 5]])
    assert tensors.is_jax(made)
    assert tensors.adopted(made, like) is made
    cupy = mock.Mock()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(tensors, "is_jax", lambda array: isinstance(array, mock.Mock))
    like = mock.Mock(devices=lambda: {mock.Mock(local_hardware_id=1)})
    on_gpu = tensors.empty_like((2, 3), dtype_of(dtype), like, contextlib.nullcontext)
    cupy.empty.assert_called_once_with((2, 3), dtype_of(dtype))
    assert on_gpu is cupy.empty.return_value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_whose_negation_is_still_to_be_made(torch, dtype):
    """Its memory holds the other signs, which DLPack does not say."""
    found = torch._neg_view(torch.tensor([1.0, -2.0], dtype=getattr(torch, dtype)))
    assert host_view(found, "x").tolist() == [-1, 2]
    refused("x is read-only", [check_writable], found, "x")


def test_tensors_that_hold_no_values_of_ours(torch):
    for tensor, words in (
        (torch.ones(2, dtype=torch.complex64).conj(), "x has dtype complex64; a store holds"),
        (torch.zeros(3).to_sparse(), "Sparse|sparse"),
        (torch.zeros(2, dtype=torch.bool), "x has dtype bool; a store holds"),
        (torch.zeros(2, dtype=torch.int16), "x has dtype int16; a store holds"),
        (torch.zeros(2, dtype=torch.complex64), "x has dtype complex64; a store holds"),
        (torch.zeros(2, device="meta"), "x: the tensor is on the device 'meta' and has no values"),
    ):
        refused(words, (host_view, shape_and_dtype, check_writable), tensor, "x")
    refused("on the device 'meta'", [flat_copy], torch.zeros(2, device="meta"), "x")


# --- JAX, and libraries that nobody knows


def test_what_jax_traces_has_no_values(jax):
    def function(x):
        refused(r"x: JAX traces this function .*io_callback", [host_view], x, "x")
        refused("JAX traces this function", [new_like], np.zeros(3), x, "x")
        return x.sum()

    for transformed in (jax.jit(function), jax.vmap(function), jax.grad(lambda x: function(x[0]))):
        transformed(jax.numpy.ones((2, 3)))


def test_new_arrays_lie_where_the_old_one_does(jax):
    placed, device = jax.device_put(np.ones(3), jax.devices()[0]), ForeignDevice()
    assert new_like(np.zeros(3), placed, "x").sharding == placed.sharding
    assert new_like(np.zeros(3), device.asarray(np.zeros(1)), "x").fake is device
    values = np.zeros(3)
    assert new_like(values, np.float32(1), "x") is values


def test_jax_without_64_bits():
    like = frameworks.need("jax").numpy.zeros(2)
    for dtype in ("float64", "int64"):
        text = rf"x: .*holds no {dtype}.*: set jax_enable_x64"
        refused(text, [new_like], np.zeros(2, dtype), like, "x")
    assert new_like(np.zeros(2, BFLOAT16), like, "x").dtype == BFLOAT16
