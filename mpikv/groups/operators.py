"""The reductions that a process group knows, each a NumPy function of two arrays.

float16 and bfloat16 are combined in float32 and rounded once. The mean of whole numbers is their sum divided and cut
towards zero, as NCCL and Horovod have it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import BFLOAT16, HostArray
from mpikv.errors import UnsupportedError
from mpikv.hostmemory.sums import Adder, adder_of


class Operator(NamedTuple):
    """A reduction. combine: of two arrays, in any order. mean: divide by the number of ranks in the end."""

    name: str
    combine: np.ufunc
    kinds: str  # of NumPy's dtypes: b bool, i and u whole numbers, f floating point, c complex
    mean: bool = False

    def check(self, dtype: np.dtype[Any]) -> None:
        """Raise UnsupportedError where the operator is undefined for this dtype."""
        kind = "f" if dtype == BFLOAT16 else dtype.kind
        if kind not in self.kinds:
            raise UnsupportedError(f"{self.name} of {dtype}: it is defined for NumPy's kinds {', '.join(self.kinds)}")

    def adder(self, dtype: np.dtype[Any]) -> Adder:
        return adder_of(dtype, self.combine, self.finish if self.mean else None)

    def finish(self, total: HostArray, size: int) -> None:
        """Turn the combination of all ranks' arrays into the result: a mean divides it by `size`."""
        if self.mean and total.dtype.kind in "iu":
            # np.fmod has the sign of `total`. The divisor is a wide one: 200 ranks do not fit into an int8.
            divisor = np.array(size, np.int64 if total.dtype.kind == "i" else np.uint64)
            total[...] = (total - np.fmod(total, divisor)) // divisor
        elif self.mean:
            np.divide(total, total.dtype.type(size), out=total)


OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("sum", np.add, "biufc"),
        Operator("mean", np.add, "iufc", mean=True),
        Operator("prod", np.multiply, "biufc"),
        Operator("min", np.minimum, "biuf"),
        Operator("max", np.maximum, "biuf"),
        Operator("band", np.bitwise_and, "biu"),
        Operator("bor", np.bitwise_or, "biu"),
        Operator("bxor", np.bitwise_xor, "biu"),
    )
}
