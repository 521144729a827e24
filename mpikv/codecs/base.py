"""The interface of a codec, which encodes the values that a worker pushes and decodes them where they are added.

The values of a key are cut into pieces, each of which is encoded and sent by itself. All ranks agree on a key's codec
when the key is initialised, so that no step sends lengths: both sides call `wire_bytes`.

A codec is a frozen dataclass whose fields are its configuration, so that `repr` can make it again and two with the same
configuration are equal. What a codec remembers from push to push is a `State` of each piece of each key, which the
caller keeps: arrays by name, so that it can be saved, cut and sent like an optimizer's.

`decode` writes values in the dtype that the key is added in. A push that arrives in that dtype is added without it.

Arrays are NumPy's or, for a codec with `on_device`, CuPy's on one GPU, by the same formulas: NumPy's functions call
CuPy's. There a codec must not read a value on the host, which would wait for the GPU, and its number of kernel launches
must not grow with the length. Encoded data begins at a multiple of 8 bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.errors import MpikvError

State = dict[str, HostArray]
"""What a codec remembers of a piece: arrays by name. "residual": (n,) float32, the values that no push has sent yet.

The arrays are in the memory of the values (host or GPU).
"""


class Codec(ABC):
    """Encodes and decodes floating point numbers: float16, bfloat16, float32 or float64. Others are never encoded."""

    name: ClassVar[str]  # the 'type' that a user gives
    exact: ClassVar[bool] = False  # whether `decode` returns the very values that were encoded, so that none is lost
    rounds: ClassVar[bool] = False  # whether it has no state and only rounds values, so that weights may be encoded too

    has_residual: ClassVar[bool] = False  # whether its own state keeps what it has lost, as error feedback does
    on_device: ClassVar[bool] = False  # whether its functions work on CuPy's arrays as they do on NumPy's

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """The dtype of the encoded data, if it is one number for each value of `dtype`. None: it is bytes."""
        return None

    @abstractmethod
    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """How many bytes n values of `dtype` are encoded to."""

    @property
    def separate_elems(self) -> int | None:
        """How many values can be encoded without the others and without a state: a step. None: there are no steps.

        The encoded data of a piece is then that of its steps, one after the other, and error feedback encodes a few
        steps at a time.
        """
        return None

    @property
    def row_elems(self) -> int:
        """Shards of a key, and pieces, begin at multiples of this number of elements, if there are enough elements."""
        return 1

    def for_shape(self, shape: tuple[int, ...]) -> Codec:
        """Return the codec of keys of this shape: itself, if the shape makes no difference."""
        return self

    def init(self, n_elems: int) -> State:
        """Return the state before the first push of a piece of n values, in NumPy's arrays."""
        return {}

    @abstractmethod
    def encode(self, values: HostArray, state: State) -> HostArray:
        """Encode (n,) contiguous values into a contiguous array of `wire_bytes` bytes, which may be `values` itself.

        The array is in the memory of the values (host or GPU). state: of the piece, changed in place.
        """

    @abstractmethod
    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write the values into `out`, (n,) in the dtype they are added in. Raises MpikvError by `check`."""

    def add(self, data: HostArray, out: HostArray) -> None:
        """Add the values to `out`, with the same bits as by `decode` and one sum."""
        values = np.empty_like(out)
        self.decode(data, values)
        out += values

    def subtract(self, data: HostArray, out: HostArray) -> None:
        """Subtract the values from `out`, with the same bits as by `decode` and one difference."""
        values = np.empty_like(out)
        self.decode(data, values)
        out -= values

    def check(self, data: HostArray, n_elems: int) -> None:
        """Raise MpikvError if `data` cannot come from `encode` of n values. Its length is checked in any case.

        Of data on a GPU only the length is checked. So a caller checks a message before it copies it there.
        """
        expected = self.wire_bytes(n_elems, self.wire_dtype(data.dtype) or np.dtype(np.float32))
        if data.nbytes != expected:
            raise MpikvError(f"{self!r}: {n_elems} values travel as {expected} bytes, and {data.nbytes} bytes are here")
