"""The store as a contender: one `pushpull` of one key or of a list of keys.

The arrays are the user's own ("ordinary"), or come from `store.zeros` and lie in memory that the ranks of a host share
("shared"). Their pattern says where they are: in host memory (`Pattern`), or on a GPU (`DevicePattern`). With an
optimizer the gradients change their sign from round to round, so that the weights, which begin at zero, are minus the
sum or zero again: exact in every dtype, however many rounds there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv import kv, optimizers
from mpikv.commands.bench.counts import Counts, counts_of, most
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import Values
from mpikv.config import Config

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Way:
    """How the store is used. shapes: one per key. type_: the name for `kv.create`."""

    what: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[np.generic]
    config: Config
    shared: bool = False
    out: bool = False
    optimizer: str = ""
    type_: str = "dist_sync"
    device: bool = False  # arrays on a GPU
    single: bool = False  # one key and one array, not lists of one
    compression: Mapping[str, Any] | None = None  # of `set_gradient_compression`


class _Use:
    """One store with its arrays."""

    def __init__(self, comm: Any, pattern: Values, way: Way, arrays: Sequence[Any] | None) -> None:
        self._pattern = pattern
        self._way = way
        self.store = kv.create(way.type_, comm=comm, config=way.config)
        if way.compression:
            self.store.set_gradient_compression(way.compression)
        if way.optimizer:
            self.store.set_optimizer(optimizers.create(way.optimizer, learning_rate=1.0))
        if way.shared:
            where = {"device": self.store.device} if way.device else {}
            arrays = self.store.zeros(list(way.shapes), dtype=way.dtype, **where)
        elif arrays is None:
            arrays = [pattern.zeros(shape) for shape in way.shapes]
        self.arrays: Sequence[Any] = arrays
        self.outs = [pattern.zeros(shape) for shape in way.shapes] if way.out else None
        self._sign = -1
        keys: Any = list(range(len(way.shapes)))
        # Not the arrays themselves: with an optimizer the first weights are zero.
        self.store.init(keys, [np.zeros(shape, way.dtype) for shape in way.shapes])
        value: Any = list(self.arrays)
        out: Any = self.outs
        if way.single:
            keys, value, out = keys[0], value[0], out and out[0]
        self._call = (keys, value, out)
        self._results = self.arrays if self.outs is None else self.outs

    def prepare(self) -> None:
        self._sign = -self._sign if self._way.optimizer else 1
        for array in self.arrays:
            self._pattern.fill(array, self._sign)
        for array in self.outs or ():
            self._pattern.fill(array, 0)
        self._pattern.finish()

    def run(self) -> None:
        self.store.pushpull(*self._call)
        self._pattern.delivered()

    def check(self) -> bool:
        results = self._results
        if not self._way.optimizer:
            factor = 1
        else:
            factor = -1 if self._sign > 0 else 0
            if self._way.type_.startswith("dist_async"):
                # The answer to one worker may lack the others' pushes: what is exact is the value after all of them.
                self.store.barrier()
                results = self.store.pull(list(range(len(self._way.shapes))))
                self._pattern.finish()
                self.store.barrier()
        return all(self._pattern.is_total(array, factor) for array in results)

    def count(self, comm: MPI.Intracomm) -> Counts:
        """Make one call more, and count it; call this when nothing is negotiated any more. Collective over `comm`."""
        self.prepare()
        comm.Barrier()  # no control message is on its way any more when all have come out of the last call
        before = self.store.stats()
        self.run()
        comm.Barrier()
        return counts_of(before, self.store.stats(), hidden=self._way.config.algorithm == "native")

    def close(self) -> None:
        self.store.close()


def store_contender(
    job: Job, pattern: Values, way: Way, arrays: Sequence[Any] | None = None, comm: MPI.Intracomm | None = None
) -> Contender:
    """Make the contender that uses the store in one way. Collective over `comm`, by default the ranks of the job.

    arrays: the user's, shared between contenders; None: own ones. With servers the job is that of the workers.
    """
    use = _Use(job.comm if comm is None else comm, pattern, way, arrays)

    def counts() -> Counts:
        return most(job.comm, use.count(job.comm))

    return Contender(way.what, use.prepare, use.run, use.check, use.close, counts)


def forced(way: Way, algorithm: str) -> Way:
    """Return `way` with one algorithm prescribed."""
    return replace(way, what=algorithm, config=way.config.with_(algorithm=algorithm))
