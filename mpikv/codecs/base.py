"""What a codec is: how a push travels to whoever adds it.

A worker encodes each piece of a push that travels by itself, and whoever adds it decodes it. All ranks agree on a key's
codec when the key is initialised, so that a step sends no lengths: both sides ask `wire_bytes`.

A codec is a value: a frozen dataclass whose fields are its configuration, so that `repr` makes it again and two that
are configured alike are equal. What it has to remember from push to push is a `State`, which its caller keeps for each
piece of each key: named arrays, so that it can be saved, cut and sent like an optimizer's.

`decode` writes in the dtype that the key is added in. So a push that comes in fewer bits is widened by the same pass
that decodes it, and one that comes in that dtype is added where it lies, without a copy and without `decode`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from mpikv.arrays import HostArray
from mpikv.codecs.on_device import OnDevice
from mpikv.errors import MpikvError

State = dict[str, HostArray]
"""What a codec remembers of a piece, by name. "residual": (n,) float32, what earlier pushes of the piece still owe."""


class Codec(ABC):
    """One way to encode floating point numbers: float16, bfloat16, float32 or float64. Others are never encoded."""

    name: ClassVar[str]  # the 'type' that a user asks for
    exact: ClassVar[bool] = False  # what is decoded is what was encoded: nothing has to be made up for
    rounds: ClassVar[bool] = False  # without a state, and each value comes out near what it was: weights may go so

    has_residual: ClassVar[bool] = False  # whether its own state keeps what it has lost, as error feedback does

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """What values of `dtype` travel as: one number of this dtype for each. None: bytes that mean nothing alone."""
        return None

    @abstractmethod
    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """How many bytes n values of `dtype` are on their way."""

    @property
    def separate_elems(self) -> int | None:
        """If the bytes of so many values do not depend on others: how many that are, a step. None: there are no steps.

        Then the bytes of a piece are those of its steps, one after the other, and error feedback encodes a few steps at
        a time; the state has no part in them.
        """
        return None

    @property
    def row_elems(self) -> int:
        """Owners' parts of a key and the pieces that travel begin at multiples of so many elements, where they can."""
        return 1

    def for_shape(self, shape: tuple[int, ...]) -> Codec:
        """The codec of keys of this shape; itself, where that makes no difference."""
        return self

    def on_device(self, dtype: np.dtype[Any]) -> OnDevice | None:
        """How it works in device memory, for keys of this dtype; None: those are encoded on the host."""
        return None

    def init(self, n_elems: int) -> State:
        """The state before the first push of a piece of n values."""
        return {}

    @abstractmethod
    def encode(self, values: HostArray, state: State) -> HostArray:
        """What travels of (n,) contiguous values: a contiguous array of `wire_bytes` bytes; it may be `values`.

        state: that of the piece, changed in place.
        """

    @abstractmethod
    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write the values into `out`, (n,) in the dtype they are added in. data: of the wire's dtype, or uint8.

        Raises MpikvError where `data` is not as long as n values are, or cannot come from `encode`.
        """

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

    def check_bytes(self, data: HostArray, n_elems: int) -> None:
        """Raise MpikvError where `data` is not as long as n values are on their way."""
        expected = self.wire_bytes(n_elems, self.wire_dtype(data.dtype) or np.dtype(np.float32))
        if data.nbytes != expected:
            raise MpikvError(f"{self!r}: {n_elems} values travel as {expected} bytes, and {data.nbytes} bytes are here")
