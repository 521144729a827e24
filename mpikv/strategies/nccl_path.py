"""The path "nccl": a key's value is on a GPU, and NCCL adds it over all workers, each of which has a GPU of its own.

Value: each worker has a copy in its device memory. Who adds, in which order, and what is sent: NCCL decides.

One communicator serves all keys on this path, of all stores of the process, and NCCL needs its calls in the same order
on all workers (docs/adr/0021). But workers push keys in any order. So a round of a key begins with short messages in
host memory. By the first of them each worker learns that all have pushed the key, and with which labels
(`labelled.compare`). Then worker 0 gives the round the next number and sends it to all. All workers start rounds on the
GPU in the order of their numbers, each as a whole, while no other generator runs. A round is a reduce-scatter, update
and allgather, in arrays whose shards are padded to equal lengths; or an allreduce, where nothing updates the key and it
is not of halves; or a reduction and a broadcast, where one worker updates all of it.

A round that cannot end, because a worker has died after it had sent its first messages, is aborted after the store's
time limit. Whoever waits for the key gets StallError, and the store cannot be used any more.

Cost for p workers: NCCL's, a copy of the values, and ceil(log2(p)) + 1 short messages one after another in each round,
p-1 more at worker 0. The first value is broadcast through host memory. Memory: the value, and the buffer that is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpikv.collectives import labelled
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.nccl import NcclComm, padded
from mpikv.collectives.stages import Span
from mpikv.common.checks import shown
from mpikv.engine.operation import Operation, Predicate, Steps, wakes
from mpikv.errors import MpikvError, StallError
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.key_path import KeyPath, PathResources
from mpikv.transports.base import Group

LONGEST_TURN = 0.05  # of the limit, counted between two tests: time in which the process was stopped is no wait


class NcclPath(KeyPath):
    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        self._device = cast(DeviceSpace, self._space)
        self._info, self._timeout_s = info, resources.timeout_s
        # NCCL is not needed where there is no other worker, or no element.
        self._comm = resources.nccl if resources.group.size > 1 and info.n_elems else None
        self._whole = self._device.zeros(padded(info.n_elems, resources.group.size, info.dtype), info.dtype)
        self.value = self._whole[: info.n_elems]
        self._added: SpaceArray = None  # the buffer that NCCL adds in; made by the first round

    @property
    def _all_have_all(self) -> bool:
        """Whether nothing updates the key, so that an allreduce gives all workers the sum."""
        return self.placement.replicated

    @property
    def _root(self) -> int | None:
        """The one worker that updates all of the key; None where each updates a shard."""
        bounds, n = self.placement.bounds, self._info.n_elems
        owners = [rank for rank in range(self._group.size) if bounds[rank + 1] - bounds[rank] == n]
        return owners[0] if owners and n > self._whole.size // self._group.size else None

    @property
    def updates(self) -> Span:
        """All elements, if all workers get the sum; else this worker's shard."""
        return (0, self._info.n_elems) if self._all_have_all else super().updates

    def broadcast(self) -> Steps[None]:
        """By messages, through host memory."""
        if self._comm is None:
            return
        space, value = self._device, self.value
        on_host = space.page_locked(value.nbytes).view(value.dtype)
        if self._group.rank == 0:
            space.download(on_host, value)
            yield space.stream_event()
        yield from broadcast(self._group, on_host, 0, self._tag(0))
        if self._group.rank:
            space.upload(value, on_host)

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Wait until it is this round's turn; the turn ends with the first request that `allgather` yields."""
        comm, space = self._comm, self._device
        if comm is None:
            return None
        # It ends only when all have pushed the key.
        yield from labelled.compare(self._group, comparison, self._tag(1))
        number = yield from self._number(comm)
        yield Predicate(lambda: comm.failure is not None or comm.begun == number)
        if self._all_have_all:
            self._call(comm.all_reduce, values, combine, space.stream)
            return None
        if self._added is None:
            self._added = space.zeros(self._whole.size, values.dtype)
        space.copy(self._added[: values.size], values)
        if (root := self._root) is not None:
            self._call(comm.reduce, self._added[: values.size], root, combine, space.stream)
        else:
            self._call(comm.reduce_scatter, self._added, combine, space.stream)
        return self._added[: values.size]

    def _number(self, comm: NcclComm) -> Steps[int]:
        """The round's number, which worker 0 assigns once all workers have pushed the key."""
        group, number = self._group, np.zeros(1, np.int64)
        if group.rank:
            yield group.irecv(number, 0, self._tag(0))
        else:
            number[0] = next(comm.numbers)
            sends = [group.isend(number, rank, self._tag(0)) for rank in range(1, group.size)]
            yield from sends
        return int(number[0])

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        comm = self._comm
        if comm is None:
            return
        if (root := self._root) is not None and not self._all_have_all:
            self._call(comm.broadcast, self.value, root, self._device.stream)
        elif not self._all_have_all:
            self._call(comm.all_gather, self._whole, self._device.stream)
        comm.begun += 1
        yield _Ended(self._device.stream_event(), comm, self._group, self._info, self._timeout_s)

    def _call(self, call: Any, *arguments: Any) -> None:
        assert self._comm is not None
        try:
            call(*arguments)
        except MpikvError as error:
            raise self._comm.fail(error) from None


class _Ended:
    """Done when the GPU has done a round. It has to be asked again and again: a failure or timeout aborts NCCL."""

    def __init__(self, done: Operation, comm: NcclComm, group: Group, info: KeyInfo, timeout_s: float) -> None:
        self._done, self._comm, self._group, self._info, self._timeout_s = done, comm, group, info, timeout_s
        self._clock = group.transport.clock
        self._waited_s, self._tested_s = 0.0, self._clock.now_s()
        wakes(done, self)

    def wake(self) -> None:
        """Do nothing: the engine asks by itself."""

    def test(self) -> bool:
        """Whether it is done. Raises StallError after the time limit, MpikvError where NCCL has failed."""
        comm = self._comm
        if comm.failure is not None:
            raise comm.failure
        if self._done.test():
            return True
        try:
            comm.check()
        except MpikvError as error:
            raise comm.fail(error) from None
        now_s = self._clock.now_s()
        self._waited_s += min(now_s - self._tested_s, LONGEST_TURN * self._timeout_s)
        self._tested_s = now_s
        if self._waited_s >= self._timeout_s:
            group = self._group
            raise comm.fail(
                StallError(
                    f"key {shown(self._info.key)}, worker {group.rank} of {group.size} on {group.hosts[group.rank]}: "
                    f"NCCL has not ended within {self._timeout_s:g} s, though all workers had pushed the key. One of "
                    "them has died or its GPU hangs: see what the others print. This store can be used no more"
                )
            )
        return False
