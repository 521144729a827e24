"""What codecs have in common that send some of the values: the others decode to 0, and cost nothing to add."""

from __future__ import annotations

from abc import abstractmethod

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import Codec


class Sparse(Codec):
    """A codec that sends some of the values."""

    on_device = True

    @abstractmethod
    def sent(self, data: HostArray, n_elems: int) -> tuple[HostArray, HostArray]:
        """Return different positions below n, and the values there. Raises MpikvError for data that cannot be."""

    def decode(self, data: HostArray, out: HostArray) -> None:
        """Write zeros, and the values that were sent."""
        positions, values = self.sent(data, out.size)
        out[...] = 0.0
        out[positions] = values

    def add(self, data: HostArray, out: HostArray) -> None:
        """Add the values that were sent."""
        positions, values = self.sent(data, out.size)
        sums = out[positions] + values
        out += 0.0  # as to everything that was not sent: it makes -0.0 0.0
        out[positions] = sums

    def subtract(self, data: HostArray, out: HostArray) -> None:
        """Subtract the values that were sent; a difference with 0 changes nothing."""
        positions, values = self.sent(data, out.size)
        out[positions] -= values
