"""A user's arrays on a fake GPU: what CuPy's arrays show, with work that waits in a stream.

Each operation is work in the stream that is current in the calling thread (`FakeGpu.user_stream`), as with CuPy. So a
library that uses an array's memory before that stream has come so far raises RaceError, and so does the user's next
operation where the library's work is not ordered before it. Memory that is let go may be reused by work of the stream
in which it was made, as CuPy's pool does, so that work of other streams must come before that.

bfloat16 has no name of its own in `__cuda_array_interface__`: its typestr is '<V2', as ml_dtypes' dtype calls itself,
hence CuPy's arrays from 14 on, and PyTorch's tensors. In DLPack it is kDLBfloat.

Sources: CuPy, cupy/_core/core.pyx (ndarray.get, set, __array__, __cuda_array_interface__, whose typestr is the dtype's
`str`) and its upgrade guide (bfloat16); PyTorch, torch/_tensor.py (typestr); the CUDA Array Interface, version 3
(Numba's documents); the array API's `__dlpack__`; dlpack.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpikv.arrays import HostArray
from mpikv.testing.dlpack import CUDA, capsule
from mpikv.testing.gpu_memory import Memory
from mpikv.testing.gpu_work import Use, elements

if TYPE_CHECKING:
    from mpikv.testing.fake_gpu import FakeGpu


class FakeArray:
    """An array on a fake GPU; `FakeGpu.array` makes one. Slices and `reshape` are views of the same memory.

    >>> from mpikv.testing.fake_gpu import FakeGpu
    >>> array = FakeGpu().array(np.arange(6.0).reshape(2, 3))
    >>> array.shape, array.strides, array.dtype, array.size, array.ndim, array.nbytes, array.itemsize
    ((2, 3), (24, 8), dtype('float64'), 6, 2, 48, 8)
    >>> array.device, array.flags.c_contiguous, array.T.flags.c_contiguous
    (<fake GPU 0>, True, False)
    >>> array += 1
    >>> array[:, 1].get()
    array([2., 5.])
    >>> array.view('uint8').shape
    (2, 24)
    >>> array.set(np.ones((2, 3)))
    >>> array[0] = 0
    >>> array.view('int64').shape
    (2, 3)
    >>> array.astype('float32').reshape(-1).copy().get().tolist()
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, gpu: FakeGpu, memory: Memory | None, keep: object, values: HostArray) -> None:
        # memory: None without elements. keep: what the memory lives as long as.
        self._gpu, self._memory, self._keep, self._values = gpu, memory, keep, values

    @classmethod
    def new(cls, gpu: FakeGpu, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int | None = None) -> FakeArray:
        """Return an array of new memory, full of NaN, in C order. stream: whose later work may reuse the memory.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> from mpikv.testing.fake_array import FakeArray
        >>> FakeArray.new(FakeGpu(), (2,), np.dtype('float32')).get()
        array([nan, nan], dtype=float32)
        """
        n_bytes = math.prod(shape) * dtype.itemsize
        memory, keep = gpu._array_memory(n_bytes, gpu.current_stream if stream is None else stream)  # noqa: SLF001
        return cls(gpu, memory, keep, np.ndarray(shape, dtype, memory.data.data if n_bytes else None))

    # --- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """As NumPy's."""
        return self._values.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """As NumPy's."""
        return self._values.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """As NumPy's."""
        return self._values.dtype

    @property
    def size(self) -> int:
        """As NumPy's."""
        return self._values.size

    @property
    def ndim(self) -> int:
        """As NumPy's."""
        return self._values.ndim

    @property
    def nbytes(self) -> int:
        """As NumPy's."""
        return self._values.nbytes

    @property
    def itemsize(self) -> int:
        """As NumPy's."""
        return self._values.itemsize

    @property
    def flags(self) -> Any:
        """As NumPy's; CuPy has `c_contiguous`, `f_contiguous` and `owndata`."""
        return self._values.flags

    @property
    def device(self) -> FakeGpu:
        """Its GPU, which has CuPy's `id` and becomes its number by `int`."""
        return self._gpu

    @property
    def address(self) -> int:
        """Where its first element is; 0 without elements.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> array = FakeGpu().array([1.0, 2.0])
        >>> array[1:].address - array.address
        8
        """
        return self._values.__array_interface__["data"][0] if self.size else 0

    def __len__(self) -> int:
        return len(self._values)

    def __array_namespace__(self) -> Any:
        """As in the array API: where functions of this library are; here the one that is used."""
        return _Namespace

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.address, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": self._gpu.current_stream,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._gpu.number

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of this memory. stream: the consumer's, put behind the current one; None: the default, -1: none."""
        if stream == 0:
            raise ValueError("stream 0 is not allowed in __dlpack__: 1 is the default stream, 2 the thread's")
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("this array is exported as it is, without a copy")
        current, consumer = self._gpu.current_stream, 1 if stream is None else stream
        if consumer not in (-1, current):
            self._gpu._order(current, consumer)  # noqa: SLF001
        return capsule(self, self.__dlpack_device__(), max_version)

    def __array__(self, *args: object, **kwargs: object) -> HostArray:
        """Raise TypeError, as CuPy does."""
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()` for it.")

    # --- copies to and from the host

    def get(self, stream: int | None = None, order: Any = "C", out: HostArray | None = None) -> HostArray:
        """Return a copy in host memory, when the stream has come so far: the current one, or `stream`. Blocks."""
        self._gpu.counts["gets"] += 1
        self._gpu.counts["gets_bytes"] += self.nbytes
        host = np.empty(self.shape, self.dtype, order=order) if out is None else out
        values = self._values  # and not this array, whose memory may be let go before the work is done

        def action() -> None:
            host[...] = values

        self._do("get", (), (self,), action, stream, wait=True)
        return host

    def set(self, arr: HostArray, stream: int | None = None) -> None:
        """Copy a host array of exactly this shape and dtype here, in a stream. `arr` may change afterwards."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        self._gpu.counts["sets"] += 1
        self._gpu.counts["sets_bytes"] += self.nbytes
        self.put_values(arr.copy(), stream)

    def put_values(self, host: HostArray, stream: int | None = None) -> None:
        """Write these values here, in a stream; they do not change any more. Not counted, and no method of CuPy's.

        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> array = FakeGpu().array(np.zeros(2))
        >>> array.put_values(np.ones(2))
        >>> array.get()
        array([1., 1.])
        """
        values = self._values

        def action() -> None:
            values[...] = host

        self._do("values from the host", (self,), (), action, stream)

    # --- views, and work

    @property
    def T(self) -> FakeArray:  # noqa: N802 - as NumPy's
        """As NumPy's."""
        return self._view(self._values.T)

    def reshape(self, *shape: Any) -> FakeArray:
        """As NumPy's; a copy where no view has that shape."""
        view = self._values.reshape(*shape)
        return (
            self._view(view) if not view.size or np.shares_memory(view, self._values) else self.copy().reshape(*shape)
        )

    def view(self, dtype: npt.DTypeLike) -> FakeArray:
        """Return the same bytes as another dtype."""
        return self._view(self._values.view(dtype))

    def astype(self, dtype: npt.DTypeLike) -> FakeArray:
        """Return a copy in another dtype, on the GPU."""
        return self._new(np.dtype(dtype), partial(_copy, self._values), (self,), "astype")

    def copy(self) -> FakeArray:
        """Return a copy in C order on the GPU."""
        return self._new(self.dtype, partial(_copy, self._values), (self,), "copy of an array")

    def __getitem__(self, index: Any) -> FakeArray:
        view = np.asarray(self._values[index])
        if view.size and not np.shares_memory(view, self._values):
            raise TypeError(f"a fake array has slices only, not [{index!r:.80}]")
        return self._view(view)

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self[index]
        out, (values, read) = target._values, self._operand(value)  # noqa: SLF001

        def action() -> None:
            out[...] = values

        self._do("array[...] =", (target,), read, action)

    def __iadd__(self, other: Any) -> FakeArray:
        out, (values, read) = self._values, self._operand(other)

        def action() -> None:
            np.add(out, values, out=out, casting="same_kind")

        self._do("array +=", (self,), (self, *read), action)
        return self

    def __add__(self, other: Any) -> FakeArray:
        values, read = self._operand(other)
        mine, dtype = self._values, np.result_type(self._values, values)
        return self._new(dtype, lambda out: np.add(mine, values, out=out), (self, *read), "array +")

    def _view(self, values: HostArray) -> FakeArray:
        return FakeArray(self._gpu, self._memory, self._keep, values)

    def _new(
        self, dtype: np.dtype[Any], work: Callable[[HostArray], Any], read: tuple[FakeArray, ...], label: str
    ) -> FakeArray:
        new = FakeArray.new(self._gpu, np.broadcast_shapes(*(one.shape for one in read)), dtype)
        values = new._values  # noqa: SLF001
        self._do(label, (new,), read, lambda: work(values))
        return new

    def _operand(self, value: Any) -> tuple[Any, tuple[FakeArray, ...]]:
        if isinstance(value, FakeArray):
            if value._gpu is not self._gpu:  # noqa: SLF001
                raise ValueError(f"the arrays are on two GPUs: {self._gpu} and {value._gpu}")  # noqa: SLF001
            return value._values, (value,)  # noqa: SLF001
        if isinstance(value, np.ndarray) and value.ndim > 0:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        return value, ()

    def _do(
        self,
        label: str,
        written: tuple[FakeArray, ...],
        read: tuple[FakeArray, ...],
        action: Callable[[], None],
        stream: int | None = None,
        *,
        wait: bool = False,
    ) -> None:
        uses = [use for one in (*written, *read) for use in one._uses(writes=one in written)]  # noqa: SLF001
        self._gpu._array_work(label, uses, action, stream, wait=wait)  # noqa: SLF001

    def _uses(self, *, writes: bool) -> list[Use]:
        if self._memory is None or not self.size:
            return []
        span = elements(self.address, self.shape, self.strides, self.itemsize)
        return [Use(self._memory, span.moved(self._memory.offset - self._memory.address), writes)]


def _copy(values: HostArray, out: HostArray) -> None:
    np.copyto(out, values, casting="unsafe")


class _Namespace:
    """The array API's functions, of which there are two."""

    @staticmethod
    def empty(shape: tuple[int, ...], *, dtype: np.dtype[Any], device: FakeGpu) -> FakeArray:
        """New memory on a GPU."""
        return FakeArray.new(device, shape, dtype)

    @staticmethod
    def asarray(obj: HostArray, /, *, device: FakeGpu) -> FakeArray:
        """A copy of a host array on a GPU."""
        return device.array(obj)
