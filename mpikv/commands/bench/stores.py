"""The store as a contender: one `pushpull` of one key or of a list of keys.

The arrays are the user's own, in host memory ("ordinary") or on a GPU ("gpu"), or come from `store.zeros` and lie in
memory that the ranks of a host share ("shared"). With an optimizer the gradients change their sign from round to round,
so that the weights, which begin at zero, are minus the sum or zero again: exact in every dtype, however many rounds
there are.

Where every worker has a GPU, arrays on it take part in the same tables: raw MPI in host memory is what has to be
beaten, since its result would have to be copied up yet. A call ends when the stream that the user's work is in has come
so far. `MPIKV_DEVICE_PATH` forces a path.

What a call sends and copies is counted from `store.stats()` in one call more, on the rank with most of each.
Collectives of the MPI library (`MPIKV_ALGORITHM=native`) hide their messages: these and their bytes are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpikv import kv, optimizers
from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import GpuPattern, Pattern
from mpikv.commands.bench.session import BenchRun
from mpikv.config import Config
from mpikv.create import worker_device
from mpikv.create.spec import parse
from mpikv.kvstore import KVStore
from mpikv.placement.topology import topology

GPU = "gpu"
GROWING = {  # by their names in `store.stats()`
    "messages": "messages_sent",
    "bytes_sent": "bytes_sent",
    "control_messages": "control_messages_sent",
    "bytes_copied": "bytes_copied",
}
HELD = ("held_bytes", "shared_bytes")  # in memory beyond the user's arrays; of it, in memory that ranks share


def gpu_everywhere(job: BenchJob) -> bool:
    """Whether every rank has a GPU that a store would use. Collective."""
    found = worker_device.find(parse("dist_sync_device"), job.config, topology(job.hosts).local_rank[job.rank])
    return all(job.comm.allgather(found.gpu is not None))


@dataclass(frozen=True)
class StoreUse:
    """How the store is used. shapes: one per key. type_: the name for `kv.create`."""

    what: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[np.generic]
    config: Config
    shared: bool = False
    out: bool = False
    optimizer: str = ""
    type_: str = "dist_sync"
    on_gpu: bool = False
    single: bool = False  # one key and one array, not lists of one

    def where(self, name: str, **changes: Any) -> StoreUse:
        """Return the same with arrays elsewhere, which its name begins with."""
        return replace(self, what=name if self.what == "ordinary" else f"{name}, {self.what}", **changes)


def store_contender(
    session: BenchRun, use: StoreUse, pattern: Pattern, arrays: Sequence[HostArray], comm: Any = None
) -> Contender:
    """Make the contender that uses the store so. Collective over `comm`, by default the ranks of the job.

    arrays: the user's in host memory, shared between contenders. With servers the job is that of the workers.
    """
    made = _StoreContender(session, use, pattern, arrays, comm or session.job.comm)
    return Contender(use.what, made.run, made.prepare, made.check, made.store.close, made.counts)


class _StoreContender:
    def __init__(
        self, session: BenchRun, use: StoreUse, pattern: Pattern, arrays: Sequence[HostArray], comm: Any
    ) -> None:
        self._job, self._use, self._sign = session.job, use, -1
        self.store = kv.create(use.type_, comm=comm, config=use.config)
        self._arrays: Sequence[Any] = arrays
        if use.on_gpu:
            device = self.store.session.spaces.device
            assert device is not None  # `gpu_everywhere` has said so
            pattern = GpuPattern(device.gpu, use.dtype, session.job.rank, session.job.size)
            path = self.store.stats().get("device_path", "host")
            session.note(f"{GPU}: arrays on {device.gpu.name}, by the path {path}")
            self._arrays = [pattern.zeros(shape) for shape in use.shapes]
        if use.optimizer:
            self.store.set_optimizer(optimizers.create(use.optimizer, learning_rate=1.0))
        if use.shared:
            self._arrays = self.store.zeros(list(use.shapes), dtype=use.dtype)
        self._pattern = pattern
        self._outs = [pattern.zeros(shape) for shape in use.shapes] if use.out else None
        keys: Any = list(range(len(use.shapes)))
        # Not the arrays themselves: with an optimizer the first weights are zero.
        self.store.init(keys, [np.zeros(shape, use.dtype) for shape in use.shapes])
        value: Any = list(self._arrays)
        out: Any = self._outs
        if use.single:
            keys, value, out = keys[0], value[0], out and out[0]
        self._call = (keys, value, out)

    def prepare(self) -> None:
        self._sign = -self._sign if self._use.optimizer else 1
        for array in self._arrays:
            self._pattern.fill(array, self._sign)
        for array in self._outs or ():
            self._pattern.fill(array, 0)
        self._pattern.finish()

    def run(self) -> None:
        self.store.pushpull(*self._call)
        self._pattern.finish()

    def check(self) -> bool:
        results, factor = self._arrays if self._outs is None else self._outs, 1
        if self._use.optimizer:
            factor = -1 if self._sign > 0 else 0
            if self._use.type_.startswith("dist_async"):
                # The answer to one worker may lack the others' pushes: what is exact is the value after all of them.
                self.store.barrier()
                results = self.store.pull(list(range(len(self._use.shapes))))
                self._pattern.finish()
                self.store.barrier()
        return all(self._pattern.is_total(array, factor) for array in results)

    def counts(self) -> dict[str, int | None]:
        self.prepare()
        found = counted(self._job, self.store, self.run)
        return found | dict.fromkeys(("messages", "bytes_sent")) if self._use.config.algorithm == "native" else found


def counted(job: BenchJob, store: KVStore, call: Callable[[], object]) -> dict[str, int | None]:
    """Return what a call does, on the rank with most of each; None: not known. Collective over the job."""
    job.comm.Barrier()  # no control message is on its way any more when all have come out of the last call
    before = store.stats()
    call()
    job.comm.Barrier()
    after = store.stats()
    mine = {name: after[what] - before[what] if what in after else None for name, what in GROWING.items()}
    mine |= {name: after.get(name) for name in HELD}
    everybody = job.comm.allgather(mine)
    return {
        name: None if any(one[name] is None for one in everybody) else max(one[name] for one in everybody)
        for name in mine
    }
