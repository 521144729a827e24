"""What a codec is: how a push travels to whoever adds it.

A worker encodes each piece of a push that travels by itself, and whoever adds it decodes it. All ranks agree on a key's
codec when the key is initialised, so that a step sends no lengths: both sides ask `wire_bytes`.

A codec is a value: a frozen dataclass whose fields are its configuration, so that `repr` makes it again and two that
are configured alike are equal. What it has to remember from push to push is a `State`, which its caller keeps for each
piece of each key: named arrays, so that it can be saved, cut and sent like an optimizer's.

`decode` writes in the dtype that the key is added in. So a push that comes in fewer bits is widened by the same pass
that decodes it, and one that comes in that dtype is added where it lies, without a copy and without `decode`.

Arrays are NumPy's; or CuPy's, on one GPU, where a codec says `on_device`. Its formulas are the same: NumPy's functions
call CuPy's. There nothing may ask for a value on the host, which would wait for the GPU, and no number of launches may
grow with the length. What travels begins at a multiple of 8 bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.errors import MpikvError

State = dict[str, HostArray]
"""What a codec remembers of a piece, by name. "residual": (n,) float32, what earlier pushes of the piece still owe.

Arrays are of the kind of the values, but for those that are named in `host_state`.
"""


class Codec(ABC):
    """One way to encode floating point numbers: float16, bfloat16, float32 or float64. Others are never encoded."""

    name: ClassVar[str]  # the 'type' that a user asks for
    exact: ClassVar[bool] = False  # what is decoded is what was encoded: nothing has to be made up for
    rounds: ClassVar[bool] = False  # without a state, and each value comes out near what it was: weights may go so

    has_residual: ClassVar[bool] = False  # whether its own state keeps what it has lost, as error feedback does
    on_device: ClassVar[bool] = False  # whether its functions work on CuPy's arrays as they do on NumPy's
    host_state: ClassVar[tuple[str, ...]] = ()  # what stays NumPy's of the state, wherever the values are

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

    def init(self, n_elems: int) -> State:
        """The state before the first push of a piece of n values, in NumPy's arrays; see `state_brought`."""
        return {}

    @abstractmethod
    def encode(self, values: HostArray, state: State) -> HostArray:
        """What travels of (n,) contiguous values: a contiguous array of `wire_bytes` bytes; it may be `values`.

        It is where the values are. state: that of the piece, changed in place.
        """

    @abstractmethod
    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write the values into `out`, (n,) in the dtype they are added in. data: of the wire's dtype, or uint8.

        Raises MpikvError by `check`.
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

    def check(self, data: HostArray, n_elems: int) -> None:
        """Raise MpikvError where `data` cannot come from `encode` of n values: by its length, if by nothing else.

        Of data on a GPU nothing but the length is known. So who brings a message there asks before that.
        """
        expected = self.wire_bytes(n_elems, self.wire_dtype(data.dtype) or np.dtype(np.float32))
        if data.nbytes != expected:
            raise MpikvError(f"{self!r}: {n_elems} values travel as {expected} bytes, and {data.nbytes} bytes are here")


def state_brought(codec: Codec, state: State, bring: Callable[[HostArray], Any]) -> State:
    """Return the state for values on a GPU. bring: copies an array there; what is in `host_state` stays as it is."""
    return {name: array if name in codec.host_state else bring(array) for name, array in state.items()}
