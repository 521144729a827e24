"""Arrays of any library as NumPy arrays: views where memory can be shared, errors that say what is wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from foreign_arrays import ForeignArray, ForeignDevice

from mpikv.arrays.as_numpy import (
    SUPPORTED_DTYPES,
    check_writable,
    dtype_of,
    flat_copy,
    host_view,
    is_array,
    is_device,
    shape_and_dtype,
    sum_devices,
    sum_dtype,
    write,
)
from mpikv.errors import UnsupportedError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Tensor:
    """DLPack and nothing else."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **kwargs):
        return self.memory.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


class Far(Tensor):
    """An array in memory of another device."""

    dtype = "float32"

    def __dlpack__(self, **kwargs):
        raise BufferError("lies on a GPU")

    def __dlpack_device__(self):
        return (2, 0)


def make(kind, array):
    return {"numpy": lambda: array, "device": lambda: ForeignDevice().asarray(array), "dlpack": lambda: Tensor(array)}[
        kind
    ]()


def memory(array):
    return array if isinstance(array, np.ndarray) else array.memory


# Whether NumPy lets what another library shares by DLPack be written to: an older one does not know whether it may be.
DLPACK_IS_WRITABLE = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
KINDS = pytest.mark.parametrize("kind", ["numpy", "device", *(["dlpack"] if DLPACK_IS_WRITABLE else [])])


def test_kinds():
    array = np.zeros(2)
    assert [is_array(value) for value in (array, np.float32(1), Tensor(array), ForeignDevice().asarray(array))] == [
        True
    ] * 4
    assert [is_array(value) for value in (1.0, [array], None, "x", (array,), {"a": array})] == [False] * 6
    assert is_device(ForeignDevice().asarray(array))
    assert not is_device(array)
    assert not is_device(Tensor(array))


@KINDS
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((d, (2, 3)) for d in SUPPORTED_DTYPES if d != BFLOAT16), *((np.dtype("f4"), one) for one in ((), (0,), (3,)))],
    ids=str,
)
def test_reading_and_writing(kind, dtype, shape):
    n = int(np.prod(shape, dtype=int))
    values = np.arange(n, dtype=dtype).reshape(shape)
    array = make(kind, values.copy())
    view = host_view(array, "x")
    np.testing.assert_array_equal(view, values)
    assert view.dtype == dtype
    assert shape_and_dtype(array, "x") == (shape, dtype)
    check_writable(array, "x")
    write(array, np.arange(n, dtype=np.float64) + 5, "x")
    np.testing.assert_array_equal(memory(array), values + np.array(5, dtype))
    copy = flat_copy(array, "x")
    assert copy.shape == (n,)
    assert copy.flags.c_contiguous
    assert copy.flags.owndata or copy.base.flags.owndata
    write(array, np.zeros(n), "x")
    np.testing.assert_array_equal(copy, (values + np.array(5, dtype)).reshape(-1))


def test_views_share_memory():
    array = np.zeros((4, 6), np.float32)
    for part in (array, array[::2, 1::2], array.T):
        host_view(part, "x")[...] += 1
        host_view(Tensor(part) if DLPACK_IS_WRITABLE else part, "x")[...] += 1
    assert array.min() == 4
    assert array.max() == 6


@pytest.mark.skipif(DLPACK_IS_WRITABLE, reason="for NumPy before 2.1")
def test_other_libraries_are_read_only_for_an_old_numpy():
    array = np.arange(3.0)
    assert host_view(Tensor(array), "x").tolist() == [0, 1, 2]
    with pytest.raises(UnsupportedError, match="x is read-only"):
        check_writable(Tensor(array), "x")


def test_bfloat16():
    values = np.arange(4).astype(BFLOAT16)
    for array in (values, ForeignDevice().asarray(values)):
        assert host_view(array, "x").dtype == BFLOAT16
        assert shape_and_dtype(array, "x") == ((4,), BFLOAT16)
        assert flat_copy(array, "x").tolist() == [0, 1, 2, 3]
    assert dtype_of("bfloat16") == BFLOAT16
    assert dtype_of(str(BFLOAT16)) == BFLOAT16


def test_shape_and_dtype_of_a_device_array_move_nothing():
    device = ForeignDevice()
    shape_and_dtype(device.asarray(np.zeros((2, 3), np.float16)), "x")
    check_writable(device.asarray(np.zeros(2)), "x")
    assert device.gets == device.sets == 0


@pytest.mark.parametrize(
    "dtype", [bool, np.int16, np.uint32, complex, object, "S2", ">f4", ">i8", "M8[s]", np.longdouble]
)
def test_other_dtypes(dtype):
    if np.dtype(dtype) in SUPPORTED_DTYPES:
        pytest.skip("long double is double here")
    for call in (host_view, shape_and_dtype, flat_copy):
        with pytest.raises(UnsupportedError, match=r"the thing has dtype .*float16, float32.*bfloat16"):
            call(np.zeros(2, dtype), "the thing")


def test_what_is_no_array():
    for wrong in (1, [1.0], "text", None):
        with pytest.raises(TypeError, match=r"the thing is an array .*, not"):
            host_view(wrong, "the thing")
        with pytest.raises(TypeError, match="the thing is an array to write into"):
            check_writable(wrong, "the thing")
    with pytest.raises(TypeError, match="to write into"):
        check_writable(np.float32(1), "x")


def test_memory_that_cannot_be_read():
    with pytest.raises(UnsupportedError, match=r"the thing: cannot read a Far .*lies on a GPU"):
        host_view(Far(np.zeros(2, np.float32)), "the thing")


def test_read_only_arrays():
    array = np.zeros(2)
    array.flags.writeable = False
    with pytest.raises(UnsupportedError, match="read-only"):
        check_writable(array, "x")
    with pytest.raises(UnsupportedError, match="read-only"):
        check_writable(np.broadcast_to(np.float32(1), 3), "x")
    assert flat_copy(np.broadcast_to(np.float32(1), 3), "x").flags.writeable


def test_write_to_views_in_other_dtypes():
    target = np.zeros((3, 4), np.float32)
    write(target[:, ::2], np.arange(6, dtype=np.float64), "x")
    assert target.tolist() == [[0, 0, 1, 0], [2, 0, 3, 0], [4, 0, 5, 0]]
    device = ForeignDevice().asarray(np.zeros((2, 3), np.float16))
    write(device, np.arange(6, dtype=np.int64), "x")
    assert device.memory.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_write_to_a_strided_device_array():
    whole = ForeignDevice().asarray(np.zeros((2, 4), np.float32))
    write(whole[:, ::2], np.arange(4, dtype=np.float32), "x")
    assert whole.memory.tolist() == [[0, 0, 1, 0], [2, 0, 3, 0]]


@pytest.mark.parametrize("on_device", [False, True])
@KINDS
def test_sum_of_devices(kind, on_device):
    values = [np.full((2, 3), v, np.float16) for v in (2048, 1, 1, -2)]
    for n in (1, 2, 3, 4):
        arrays = [make(kind, value.copy()) for value in values[:n]]
        total = sum_devices(arrays, "x", on_device=on_device)
        assert total.shape == (6,)
        assert total.dtype == np.float16
        assert total.tolist() == [[2048, 2048, 2050, 2048][n - 1]] * 6  # 2049 is no float16; added in float32
        total[...] = 0
        assert [memory(array)[0, 0] for array in arrays] == [2048, 1, 1, -2][:n]


def test_sum_of_integers_wraps_in_their_own_dtype():
    assert sum_devices([np.array([100], np.int8)] * 2, "x", on_device=False).tolist() == [-56]
    assert sum_devices([np.array([2**62], np.int64)] * 2, "x", on_device=False).tolist() == [-(2**63)]


def test_sum_on_the_device_is_one_transfer():
    device = ForeignDevice()
    arrays = [device.asarray(np.ones(3, np.float32)) for _ in range(4)]
    assert sum_devices(arrays, "x", on_device=True).tolist() == [4] * 3
    assert device.gets == 1
    assert sum_devices([*arrays, np.ones(3, np.float32)], "x", on_device=True).tolist() == [5] * 3


def test_sum_dtypes():
    assert sum_dtype(np.dtype(np.float16)) == np.float32
    assert sum_dtype(BFLOAT16) == np.float32
    for dtype in (np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64):
        assert sum_dtype(np.dtype(dtype)) == dtype


def test_the_fake_is_as_strict_as_cupy():
    device = ForeignDevice()
    array = device.asarray(np.zeros((2, 3), np.float32))
    for wrong, error in (
        (np.zeros((2, 3)), TypeError),
        (np.zeros((3, 2), np.float32), ValueError),
        ([[0.0]], TypeError),
    ):
        with pytest.raises(error):
            array.set(wrong)
    with pytest.raises(RuntimeError, match="non-contiguous"):
        array[:, ::2].set(np.zeros((2, 2), np.float32))
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(array)
    assert isinstance(array + array, ForeignArray)
