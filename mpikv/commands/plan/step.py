"""What `mpikv plan` predicts: a training step of a network, how it is made, and what is found of it.

Gradients become ready from the last layer to the first, evenly by their bytes, in the last two thirds of the computing:
a backward pass takes about twice as long as a forward pass, since it has two products of matrices where that has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mpikv.codecs import compression as compressions
from mpikv.codecs.base import Codec
from mpikv.codecs.compression import KeyCompression
from mpikv.codecs.speed import Speed
from mpikv.commands import models
from mpikv.placement.keys import KeyInfo

FORWARD_SHARE = 1 / 3
BUSY = 0.6  # a resource that works for less than this share of the time is not what the step waits for
ITEM_BYTES = 4
DTYPE = np.dtype("float32")

Speeds = Mapping[Codec, Speed]


@dataclass(frozen=True)
class Workload:
    """What a step exchanges. shapes: of each key, float32, in the order of the forward pass."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def n_bytes(self) -> int:
        return ITEM_BYTES * sum(self.sizes)

    def infos(self, compression: KeyCompression) -> Iterator[KeyInfo]:
        """Yield what a store knows of each key that travels so."""
        for key, shape in enumerate(self.shapes):
            yield KeyInfo(key, key, shape, DTYPE, compression.for_shape(shape).text)

    def ready_s(self, compute_s: float) -> list[float]:
        """Return for each key when its gradient is there, in seconds from the start of the step."""
        done = list(accumulate(reversed(self.sizes)))[::-1]
        begin_s = FORWARD_SHARE * compute_s
        return [begin_s + (compute_s - begin_s) * part / max(1, done[0]) for part in done]


def of_model(name: str) -> Workload:
    """Make the workload of a network of `models`. Raises ValueError for an unknown one."""
    return Workload(name, tuple(models.shapes(name)))


def of_bytes(n_bytes: int) -> Workload:
    """Make a workload of one key of so many bytes, rounded up to whole elements."""
    return Workload(f"{n_bytes} bytes", ((-(-n_bytes // ITEM_BYTES),),))


class StepSettings(NamedTuple):
    """How a step is made.

    compression: of all keys, by codecs of these speeds. compute_s: how long a step computes; 0 leaves the step itself
    out. per_host: workers on each host. servers: how many, on hosts of their own; 0: an allreduce, or asynchronous with
    one inside every worker. take: the servers' share of each key, as in MPIKV_SERVERS_TAKE.
    """

    compression: KeyCompression = compressions.NONE
    speeds: Speeds = MappingProxyType({})
    compute_s: float = 0.0
    per_host: int = 1
    servers: int = 0
    synchronous: bool = True
    take: float | str = "auto"

    def speeds_of(self, workload: Workload) -> Speeds:
        """Return the speeds also of the codecs of keys of their shapes: as fast for each element as without one."""
        return {codec.for_shape(s): speed for s in {(), *workload.shapes} for codec, speed in self.speeds.items()}


DEFAULTS = StepSettings()


class PlannedStep(NamedTuple):
    """A predicted exchange, and the step around it.

    exchange_s: from the end of the computing, in all workers at the same time, to the last worker's last value.
    overlapped_s: a step whose gradients leave as soon as they are there; None where nothing is computed. messages,
    sent_bytes: of the worker with most, in one step. busy_s: seconds at work in the exchange, by resource.
    """

    mode: str
    exchange_s: float
    overlapped_s: float | None
    messages: int
    sent_bytes: int
    busy_s: Mapping[str, float]

    @property
    def binds(self) -> tuple[str, float]:
        """Return what is at work for most of the exchange, and for which share of it; `waiting` where nothing is."""
        if self.exchange_s <= 0:
            return "nothing", 0.0
        what = max(self.busy_s, key=lambda name: self.busy_s[name])
        share = self.busy_s[what] / self.exchange_s
        return (what, share) if share >= BUSY else ("waiting", share)
