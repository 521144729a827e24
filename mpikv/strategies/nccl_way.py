"""The way "nccl": a key's value is on a GPU, and NCCL adds it over all workers, each of which has a GPU of its own.

One communicator serves all keys that go this way. NCCL wants its calls in the same order on all workers, and a call
waits on the GPU until all others have made it; workers push keys in any order, and may wait for one before they push
the next. So a round of a key begins with short messages in host memory. First every worker hears from all others
(collectives/notes.py), and then all have pushed the key; the same messages say under which labels. Then worker 0 gives
the round a number, the next one, and tells it to all. Rounds are put into the stream in the order of their numbers,
each as a whole: reduce-scatter, update and allgather, one after another, while no other generator runs. Keys that go
another way have no number and wait for none: docs/adr/0021 says why both can be under way at a time.

What cannot end, because a worker has died after it had told that it is there, is aborted after the store's limit, and
whoever waits for the key gets StallError. The store is of no use then.

The bits are NCCL's: the same on all workers, but not those of the other ways, nor the same with another number of GPUs
or another version of NCCL.

Cost for p workers: NCCL's, and ceil(log2(p)) + 1 short messages one after another in each round, p-1 more at worker 0.
The first value comes through host memory, once. Memory: the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.checks import shown
from mpikv.collectives import notes
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.labelled import Comparison, Said
from mpikv.collectives.nccl import NcclComm
from mpikv.engine.request import Predicate, Request, Steps
from mpikv.errors import MpikvError, StallError
from mpikv.keys import KeyInfo
from mpikv.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.key_way import DeviceWay
from mpikv.transports.base import Group

if TYPE_CHECKING:
    from mpikv.strategies.ways import Means

LONGEST_TURN = 0.05  # of the limit: a process that was stopped for a while has not waited meanwhile
NOTHING = Said(0, 1.0)  # of a round whose labels are not compared


class NcclWorkers:
    """What all keys of one worker have in common: its rank of the communicator, and the order of rounds.

    comm: of all workers; None where there is one alone, which asks nothing of NCCL. timeout_s: how long a round may
    take on the GPU.
    """

    def __init__(self, comm: NcclComm | None, timeout_s: float) -> None:
        self._comm, self.timeout_s = comm, timeout_s
        self._failure: MpikvError | None = None
        self.given = 0  # at worker 0: how many rounds have a number
        self.begun = 0  # how many rounds are in the stream

    @property
    def comm(self) -> NcclComm:
        """The communicator. Raises what has ended it."""
        if self._failure is not None:
            raise self._failure
        assert self._comm is not None
        return self._comm

    def fail(self, error: MpikvError) -> MpikvError:
        """End all that is under way, since it will not end by itself. All rounds from now on raise this error."""
        if self._failure is None:
            self._failure = error
            if self._comm is not None:
                self._comm.abort()
        return self._failure

    def close(self) -> None:
        """Give the communicator back. Collective; nothing may be under way."""
        if self._comm is not None and self._failure is None:
            self._comm.destroy()
        self._comm = None

    def leave(self) -> None:
        """Give the communicator up without the others, some of whom may be gone. Nothing may be under way."""
        if self._comm is not None and self._failure is None:
            self._comm.abort()
        self._comm = None


class NcclWay(DeviceWay):
    """See `Way`. Its arrays are those of a `DeviceSpace`; the workers own parts of any length."""

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(means, info, placement)
        assert means.nccl is not None
        self._info, self._workers = info, means.nccl
        # With nobody to add with, or nothing to add, nothing is asked of NCCL.
        self._alone = means.group.size == 1 or info.n_elems == 0

    def share(self) -> Steps[None]:
        """By a tree, through host memory."""
        if self._alone:
            return
        space, is_root = self._space, self._group.rank == 0
        value = space.to_host(self.value) if is_root else np.empty(self._info.n_elems, self._info.dtype)
        yield from broadcast(self._group, value, 0, self._tag(0))
        if not is_root:
            space.copy(self.value, value)

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """In place. What follows until the first request of `allgather` belongs to the round's turn."""
        if self._alone:
            return None
        yield self._space.arrived(values)
        said = yield from notes.exchange(self._group, NOTHING if comparison is None else comparison.own, self._tag(1))
        ratio = 1.0 if comparison is None else comparison.ratio_of_all(said)
        number = yield from self._number()
        workers = self._workers
        yield Predicate(lambda: workers.comm is not None and workers.begun == number)
        if ratio != 1.0:
            self._space.scale(values, ratio, values)
        self._call(workers.comm.reduce_scatter, values.address, values.dtype, combine)
        return None

    def _number(self) -> Steps[int]:
        """Which of all rounds this is: worker 0 gives it the next number once all workers are there."""
        group, number = self._group, np.zeros(1, np.int64)
        if group.rank:
            yield group.irecv(number, 0, self._tag(0))
        else:
            number[0] = self._workers.given
            self._workers.given += 1
            sends = [group.isend(number, rank, self._tag(0)) for rank in range(1, group.size)]
            yield from sends
        return int(number[0])

    def allgather(self, outs: Sequence[HostArray], comparison: Comparison | None) -> Steps[None]:
        """In place. Ends the round's turn, and waits until the GPU has done it."""
        if self._alone:
            return
        self._call(self._workers.comm.all_gather, self.value.address, self.value.itemsize)
        self._workers.begun += 1
        yield _Ended(self._space.begun(), self._workers, self._group, self._info)

    def _call(self, call: Any, address: int, *what: Any) -> None:
        try:
            call(address, self.placement.bounds, *what, self._space.stream)
        except MpikvError as error:
            raise self._workers.fail(error) from None


class _Ended:
    """A request that is done when the GPU has done a round; where it does not, it ends all that is under way."""

    def __init__(self, done: Request, workers: NcclWorkers, group: Group, info: KeyInfo) -> None:
        self._done, self._workers, self._group, self._info = done, workers, group, info
        self._clock = group.transport.clock
        self._waited_s, self._looked_s = 0.0, self._clock.now_s()

    def test(self) -> bool:
        """Whether it is done. Raises StallError after the limit, MpikvError where NCCL has failed."""
        workers = self._workers
        comm = workers.comm
        if self._done.test():
            return True
        try:
            comm.check()
        except MpikvError as error:
            raise workers.fail(error) from None
        now_s = self._clock.now_s()
        self._waited_s += min(now_s - self._looked_s, LONGEST_TURN * workers.timeout_s)
        self._looked_s = now_s
        if self._waited_s >= workers.timeout_s:
            group = self._group
            raise workers.fail(
                StallError(
                    f"key {shown(self._info.key)}, worker {group.rank} of {group.size} on {group.hosts[group.rank]}: "
                    f"NCCL has not ended within {workers.timeout_s:g} s, though all workers had pushed the key. One of "
                    "them has died or its GPU hangs: see what the others print. This store can be used no more"
                )
            )
        return False
