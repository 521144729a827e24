"""What a training step exchanges, and how: the arrays of a network, and when the backward pass has made each gradient.

Gradients become ready from the last layer to the first, evenly by their bytes, in the last two thirds of the computing:
a backward pass takes about twice as long as a forward pass, since it has two products of matrices where that has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from mpikv.codecs import compression as compressions
from mpikv.codecs.compression import KeyCompression
from mpikv.commands import models
from mpikv.commands.plan.priced import NO_SPEEDS, Speeds

FORWARD_SHARE = 1 / 3
ITEM_BYTES = 4
DTYPE = "float32"


@dataclass(frozen=True)
class Workload:
    """What a step exchanges. shapes: of each key, float32, in the order of the forward pass."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each key."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def n_bytes(self) -> int:
        """The bytes of all keys together."""
        return ITEM_BYTES * sum(self.sizes)

    def ready_s(self, compute_s: float) -> list[float]:
        """Return for each key when its gradient is there, in seconds from the start of the step."""
        done = list(accumulate(reversed(self.sizes)))[::-1]
        begin_s = FORWARD_SHARE * compute_s
        return [begin_s + (compute_s - begin_s) * part / max(1, done[0]) for part in done]


class StepSettings(NamedTuple):
    """How a step is made.

    compression: of all keys, by codecs of these speeds. compute_s: how long a step computes; 0 leaves the step itself
    out. per_host: workers on each host. Of an allreduce: bucketed: several keys travel together, as a `Trainer` lets
    them; updated: an optimizer is in its middle; algorithm. Of servers: how many, 0 for one inside every worker;
    synchronous; shared: they are on the workers' hosts; take: their share of each key, as in
    MPIKV_SERVERS_TAKE.
    """

    compression: KeyCompression = compressions.NONE
    speeds: Speeds = NO_SPEEDS
    compute_s: float = 0.0
    per_host: int = 1
    bucketed: bool = True
    updated: bool = True
    algorithm: str = "auto"
    servers: int = 0
    synchronous: bool = True
    shared: bool = False
    take: float | str = "auto"


DEFAULTS = StepSettings()


def of_model(name: str) -> Workload:
    """Make the workload of a network of `models`. Raises ValueError for an unknown one."""
    return Workload(name, tuple(models.shapes(name)))


def of_bytes(n_bytes: int) -> Workload:
    """Make a workload of one key of so many bytes, rounded up to whole elements."""
    return Workload(f"{n_bytes} bytes", ((-(-n_bytes // ITEM_BYTES),),))
