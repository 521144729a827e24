"""Codecs in device memory: encoded and decoded there, by programs of the space.

A codec that can do so says how (`Codec.on_device`). Most say what becomes of one element, in operations on whole arrays
that `spaces.tracing` understands (`Elements`); `int8`, `topk`, `randomk` and `powersgd` have forms of their own. They
do what the codec does with arrays of NumPy, bit for bit (`powersgd` but for the order of sums), error feedback and the
check for what is not finite included; but a NaN that is sent may have another sign and payload.

Cost: a program reads and writes each array once, for all pieces of a push in one launch. Each is traced once for a key,
in some 0.1 ms, and compiled once for a codec and a dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from mpikv.arrays import HostArray, sum_dtype
from mpikv.spaces.program import Layout, Numbers, Program
from mpikv.spaces.tracing import trace, where_positive

if TYPE_CHECKING:
    from mpikv.spaces.device import DeviceSpace
    from mpikv.spaces.device_array import DeviceArray

FLOAT32 = np.dtype(np.float32)
BYTE = np.dtype(np.uint8)

Made = tuple[Program, Numbers]


class Pushed(NamedTuple):
    """A piece that is encoded. values: (n,) of the key's dtype. data: bytes, written.

    state: what the codec remembers: what it `kept` in device memory, anything else on the host.
    """

    values: DeviceArray
    data: DeviceArray
    state: Mapping[str, Any]

    @property
    def residual(self) -> DeviceArray:
        """Where there is one."""
        residual: DeviceArray = self.state["residual"]
        return residual

    @property
    def owed(self) -> list[DeviceArray]:
        """The residual, where there is one."""
        return [self.residual] if "residual" in self.state else []


@dataclass(frozen=True)
class OnDevice(ABC):
    """A codec in device memory, for keys of one dtype. remembers: whether what is lost is added to the next push.

    kept: names of what it remembers in device memory, in float32.
    """

    dtype: np.dtype[Any]
    remembers: bool
    kept: ClassVar[tuple[str, ...]] = ("residual",)

    @abstractmethod
    def encode(self, space: DeviceSpace, pieces: Sequence[Pushed]) -> None:
        """Write what travels of these pieces, in as few launches as of one."""

    @abstractmethod
    def decode(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, *, add: bool) -> None:
        """Write the values into `out`, in the dtype of sums, or add them to it."""

    def check(self, data: HostArray, n_elems: int) -> None:
        """Raise MpikvError for a message, in host memory, that cannot come from `encode` of n values."""
        return


@dataclass(frozen=True)
class Elements(OnDevice):
    """A codec that treats each element by itself.

    wire: what is sent for each, a number of this dtype; or, of uint8, so many `bits`, if that is not 0. code: from
    float32, or from the key's dtype where nothing is remembered, to `wire`; value: from there to a number.
    """

    wire: np.dtype[Any]
    code: Callable[[Any], Any]
    value: Callable[[Any], Any]
    bits: int = 0

    @cached_property
    def encoding(self) -> Made:
        """values, data; and the residual, where the codec remembers what it loses."""

        def alone(values: Any, data: Any) -> None:
            data[...] = self.code(values)

        def with_residual(values: Any, data: Any, residual: Any) -> None:
            total = residual + values.astype(FLOAT32, copy=False)
            code = self.code(total)
            data[...] = code
            residual[...] = finite(total - self.value(code))

        dtypes, layouts = [self.dtype, self.wire], {1: Layout(bits=self.bits)}
        return trace(with_residual, [*dtypes, FLOAT32], layouts) if self.remembers else trace(alone, dtypes, layouts)

    @cached_property
    def decodings(self) -> tuple[Made, Made]:
        """out, data: the values are written to `out`; and they are added to it."""
        wide = sum_dtype(self.dtype)

        def write(out: Any, data: Any) -> None:
            out[...] = self.value(data).astype(wide, copy=False)

        def add(out: Any, data: Any) -> None:
            out += self.value(data).astype(wide, copy=False)

        dtypes, layouts = [wide, self.wire], {1: Layout(bits=self.bits)}
        return trace(write, dtypes, layouts), trace(add, dtypes, layouts)

    def encode(self, space: DeviceSpace, pieces: Sequence[Pushed]) -> None:
        """See `OnDevice`."""
        program, numbers = self.encoding
        space.launch_many(program, [([one.values, one.data.view(self.wire), *one.owed], numbers) for one in pieces])

    def decode(self, space: DeviceSpace, data: DeviceArray, out: DeviceArray, *, add: bool) -> None:
        """See `OnDevice`."""
        program, numbers = self.decodings[add]
        space.launch(program, [out, data.view(self.wire)], numbers)


@lru_cache(16)
def totals(dtype: np.dtype[Any]) -> Made:
    """residual, values of this dtype: what is owed becomes what is pushed."""

    def add(residual: Any, values: Any) -> None:
        residual += values.astype(FLOAT32, copy=False)

    return trace(add, [FLOAT32, dtype])


@lru_cache(16)
def paying(dtype: np.dtype[Any]) -> Made:
    """values, of this dtype, residual: what is owed is added to the values; what their dtype cannot say stays owed."""
    wide = sum_dtype(dtype)

    def pay(values: Any, residual: Any) -> None:
        total = values.astype(wide, copy=False) + residual.astype(wide, copy=False)
        paid = total.astype(dtype, copy=False)
        values[...] = paid
        residual[...] = finite(total - paid.astype(wide)) if dtype != wide else FLOAT32.type(0)

    return trace(pay, [dtype, FLOAT32])


def finite(values: Any) -> Any:
    """The values, and 0 where they are NaN or infinite; of arrays in a trace."""
    return where_positive(1.0 - np.absolute(values - values), values, 0.0)
