"""The base of codecs that send a share of the values: the others decode to 0, and cost nothing to add."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import Codec
from mpikv.common.checks import number


@dataclass(frozen=True)
class Sparse(Codec):
    """A codec that sends some of the values. ratio: which share of them, more than 0 and at most 1."""

    ratio: float = 0.01

    on_device = True

    def __post_init__(self) -> None:
        found = number(f"{self.name}: ratio", self.ratio)
        if not 0 < found <= 1:
            raise ValueError(f"{self.name}: ratio must be more than 0 and at most 1, not {found:g}")
        object.__setattr__(self, "ratio", found)

    @abstractmethod
    def sent(self, data: HostArray, n_elems: int) -> tuple[HostArray, HostArray]:
        """Return distinct positions below n, and the values there. Raises MpikvError for damaged data."""

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write the values that were sent, and zeros elsewhere."""
        positions, values = self.sent(data, out.size)
        out[...] = 0.0
        out[positions] = values

    def add(self, data: HostArray, out: HostArray) -> None:
        """Add the values that were sent."""
        positions, values = self.sent(data, out.size)
        sums = out[positions] + values
        out += 0.0  # `decode` and a sum would add 0.0 to all other elements, too, which turns -0.0 into 0.0
        out[positions] = sums

    def subtract(self, data: HostArray, out: HostArray) -> None:
        """Subtract the values that were sent; to subtract 0.0 from the others would change none of them."""
        positions, values = self.sent(data, out.size)
        out[positions] -= values


@lru_cache(maxsize=1024)
def count(ratio: float, n_elems: int) -> int:
    """How many of n values are sent: max(1, ceil(ratio n)), or 0 if n is 0.

    `ratio` is taken as the decimal number that the user wrote: in floating point 0.07 * 100 is more than 7.
    """
    sent = Fraction(repr(ratio)) * n_elems
    return min(n_elems, max(1, -(-sent.numerator // sent.denominator)))
