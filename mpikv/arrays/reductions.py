"""How the arrays of all workers become one: what `op=` of a `pushpull` names, and what process groups know besides.

A reduction combines two arrays, element by element, in the dtype that a key is added in, so that float16 and bfloat16
are rounded once. In which order the workers' arrays are combined is fixed by the ranks alone, as it is for sums; the
arrays of one worker's devices are combined in the order given, before them. A mean is the sum over workers and devices,
which the owner of an element divides by the number of workers when it is complete.

The mean of whole numbers, which calls without keys have, is their sum divided and cut towards zero, as NCCL and Horovod
have it.

Adasum is the one that is not made element by element: collectives/adasum.py combines whole arrays of workers, and the
arrays of one worker's devices are added before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpikv.arrays.tensors import BFLOAT16
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError


class Reduction(NamedTuple):
    """A way in which two arrays become one: combine(a, b, out=c). code: its number in requests to servers.

    kinds: of NumPy's dtypes that it is defined for: b bool, i and u whole numbers, f floating point, c complex.
    whole: whether what becomes of an element depends on the whole arrays of the workers; `combine` is only of devices.
    """

    name: str
    code: int
    combine: np.ufunc
    kinds: str
    is_mean: bool = False
    whole: bool = False

    @property
    def adds(self) -> bool:
        """Whether it is made of a sum over the workers."""
        return self.combine is np.add and not self.whole

    def check(self, dtype: np.dtype[Any]) -> None:
        """Raise UnsupportedError where it is undefined for this dtype."""
        kind = "f" if dtype == BFLOAT16 else dtype.kind
        if kind not in self.kinds:
            raise UnsupportedError(f"{self.name} of {dtype}: it is defined for NumPy's kinds {', '.join(self.kinds)}")

    def finish(self, total: npt.NDArray[Any], num_workers: int) -> None:
        """Make the result, in place, of `total`: what all workers' arrays have been combined to."""
        if self.is_mean and total.dtype.kind in "iu":
            # np.fmod has the sign of `total`. The divisor is a wide one: 200 workers do not fit into an int8.
            divisor = np.array(num_workers, np.int64 if total.dtype.kind == "i" else np.uint64)
            total[...] = (total - np.fmod(total, divisor)) // divisor
        elif self.is_mean and num_workers > 1:
            np.divide(total, num_workers, out=total)


SUM = Reduction("sum", 0, np.add, "biufc")
ADASUM = Reduction("adasum", 5, np.add, "f", whole=True)  # no server is ever asked for it
REDUCTIONS = {  # those that are made element by element
    one.name: one
    for one in (
        SUM,
        Reduction("mean", 1, np.add, "iufc", is_mean=True),
        Reduction("min", 2, np.minimum, "biuf"),
        Reduction("max", 3, np.maximum, "biuf"),
        Reduction("prod", 4, np.multiply, "biufc"),
    )
}
BY_CODE = {one.code: one for one in REDUCTIONS.values()}
NO_CODE = -1
OF_GROUPS = REDUCTIONS | {
    "band": Reduction("band", NO_CODE, np.bitwise_and, "biu"),
    "bor": Reduction("bor", NO_CODE, np.bitwise_or, "biu"),
    "bxor": Reduction("bxor", NO_CODE, np.bitwise_xor, "biu"),
}
_NAMED = {**REDUCTIONS, ADASUM.name: ADASUM}


def named(op: Any) -> Reduction:
    """Return the reduction of that name. ValueError where there is none."""
    found = _NAMED.get(op) if isinstance(op, str) else None
    if found is None:
        raise ValueError(f"op={shown(op)} is no reduction; there are {', '.join(map(repr, _NAMED))}")
    return found
