"""The ways that the rounds of a key can go: how workers' values are added, and how the new value comes to all of them.

A key's placement names its way (`WAYS`), so that keys of one store may go different ways, side by side. Each key has an
object of its own, which holds the key's value and what only this way needs. A bucket of several keys counts as one key.

Cost: that of the collective behind each way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.choice import Choices
from mpikv.collectives import device_host, hosted, one_host
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.host_key import TOTALS, HostKey
from mpikv.collectives.labelled import AddingGroup, SharingGroup
from mpikv.collectives.nccl import NcclComm
from mpikv.collectives.parts import HERE, Parts, whole
from mpikv.collectives.select import ALGORITHMS, IN_PARTS
from mpikv.collectives.stages import Span
from mpikv.engine.request import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.members import Path
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import Spaces
from mpikv.strategies.communicators import Communicators
from mpikv.strategies.device_messages import DeviceMessages
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.key_way import KeyWay
from mpikv.strategies.nccl_way import NcclWay
from mpikv.transports.base import Group


class Means(NamedTuple):
    """What the ways of one worker's keys are made with. hosts, communicators: where the store has ways that need them.

    spaces: where values are, by their keys, unless they are in memory that the ranks of a host share. hosts: the keys
    in such memory.
    plain_group: the same ranks for messages of device memory; None: `group` is.
    communicators: those for MPI's own collectives. pages: what keys take of shared memory is of whole pages. nccl: the
    communicator of keys that go by NCCL, whose rounds may take `timeout_s` on the GPU. parts: how what is pushed comes
    to where a way in host memory reads it, and what becomes of the parts of the result. choices: for keys that travel
    encoded or as they are, whichever is faster; None: they always travel encoded.
    """

    group: Group
    spaces: Spaces
    hosts: HostKeys | None = None
    communicators: Communicators | None = None
    pages: bool = False
    nccl: NcclComm | None = None
    timeout_s: float = 60.0
    parts: Parts = HERE
    plain_group: Group | None = None
    choices: Choices | None = None


class Way(Protocol):
    """The way of one key.

    value: the key's value, (n,). shared: ranks of this host read each other's memory: what is pushed is read where it
    is, and `allgather` writes the value to the caller's arrays as it comes. dtype: of what is pushed.
    """

    value: SpaceArray
    shared: bool
    dtype: np.dtype[Any]

    @property
    def updates(self) -> Span:
        """The elements that this worker updates in a round, between its two halves; by default those that it owns."""
        ...

    @property
    def changes(self) -> bool:
        """Whether a round changes what is pushed, even where it is not `changeable`, if it begins now."""
        ...

    @property
    def placement(self) -> Placement:
        """The key's, which named this way."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory of this worker's own that is held for the value, or for what it adds."""
        ...

    def begin(self, *, plain: bool) -> None:
        """A round begins; a `plain` one's values travel as they are, whatever the key's codec."""
        ...

    def cut(self, placement: Placement) -> None:
        """From the next round on the owners own other parts, and labels are compared anew. Not during a round."""
        ...

    def share(self) -> Steps[None]:
        """Bring the value of worker 0 to all. Collective; once, before the first round."""
        ...

    def share_now(self) -> bool:
        """Do what `share` does, where nothing has to be waited for. False: nothing was done."""
        ...

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[HostArray | None]:
        """Combine `values` of all workers. Returns (n,) with the result in what it `updates`; None: it is in `values`.

        values: (n,), in `dtype`; not to be changed by the caller until `allgather` of the same round has
        ended, and by the way only where it is `changeable` or not `shared`. comparison: of the labels that they were
        pushed under, the same one until `cut`; None: there are none to be compared. Collective.
        """
        ...

    def allgather(self, outs: Sequence[HostArray], comparison: Comparison | None) -> Steps[None]:
        """Complete `value`, of which each worker has updated its own part, on all workers. Collective.

        outs: arrays of the caller's, (n,), to write it to; there are none where it is not `shared`.
        """
        ...


class OfKey(KeyWay):
    """What the ways here have in common."""

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(means, info, placement)
        self._parts = means.parts
        self._labelled: tuple[Group, Group] | None = None

    def _own(self) -> tuple[int, int]:
        begin, end = self.placement.bounds[self._group.rank : self._group.rank + 2]
        return begin, end

    def _others(self) -> list[tuple[int, int]]:
        """What the others own, before this worker's part and behind it."""
        begin, end = self._own()
        return [(0, begin), (end, self.placement.bounds[-1])]

    def cut(self, placement: Placement) -> None:
        """From the next round on the owners own other parts."""
        super().cut(placement)
        self._labelled = None

    def _groups(self, comparison: Comparison | None) -> tuple[Group, Group]:
        """For the messages of a reduce-scatter and of an allgather. Made by the first round, which may come late."""
        if self._labelled is None:
            group, bounds = self._group, self.placement.bounds
            self._labelled = group, group
            if comparison is not None:
                owners = frozenset(rank for i, rank in enumerate(group.ranks) if bounds[i] < bounds[i + 1])
                self._labelled = (
                    AddingGroup(group.transport, group.ranks, comparison),
                    SharingGroup(group.transport, group.ranks, comparison, owners),
                )
        return self._labelled


class Alone(OfKey):
    """A way with the value in this worker's own memory."""

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(means, info, placement, place)
        self._space = means.spaces.of(info)
        self.value = self._space.empty(info.n_elems, info.dtype)

    @property
    def held_bytes(self) -> int:
        """The value."""
        return int(self.value.nbytes)


class _InMemory(OfKey):
    """A way with the value in memory that the ranks of this host share. place: where all ranks know it to be."""

    shared = True
    changes = False

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(means, info, placement, place)
        assert means.hosts is not None
        self._hosts, self._info, self._place, self._pages = means.hosts, info, place, means.pages
        self._shared_key: HostKey | None = None
        self.value = means.hosts.value(place, info.n_elems, info.dtype)

    @property
    def _key(self) -> HostKey:
        """What its rounds need. Made by the first one, which may come late."""
        if self._shared_key is None:
            info = self._info
            self._shared_key = self._hosts.key(self._place, info.n_elems, info.dtype, pages=self._pages)
        return self._shared_key

    @property
    def held_bytes(self) -> int:
        """Where it copies its values to, for the others to add."""
        return 0 if self._shared_key is None else self._shared_key.held_bytes


# Where a way has nothing to add to a collective, it returns the generator: one more in the chain would be one more
# frame between every message and its call.


class Messages(Alone):
    """By messages, with the algorithm that the placement names. They say under which labels values were pushed."""

    def share(self) -> Steps[None]:
        """By a tree."""
        return broadcast(self._group, self.value, 0, self._tag(0))

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[HostArray | None]:
        """In place."""
        algorithm: Any = ALGORITHMS[self.placement.algorithm]
        arguments = self._groups(comparison)[0], values, self.placement.bounds, self._tag(1), combine
        if self.placement.algorithm in IN_PARTS:
            steps: Steps[None] = algorithm.reduce_scatter(*arguments, parts=self._parts)
            return steps
        return whole(
            self._parts, algorithm.reduce_scatter(*arguments), values, needed=(0, values.size), completed=[self._own()]
        )

    def allgather(self, outs: Sequence[HostArray], comparison: Comparison | None) -> Steps[None]:
        """In place."""
        algorithm: Any = ALGORITHMS[self.placement.algorithm]
        arguments = self._groups(comparison)[1], self.value, self.placement.bounds, self._tag(2)
        if self.placement.algorithm in IN_PARTS:
            steps: Steps[None] = algorithm.allgather(*arguments, parts=self._parts)
            return steps
        return whole(
            self._parts, algorithm.allgather(*arguments), self.value, needed=self._own(), completed=self._others()
        )


class Native(Alone):
    """By MPI's own collectives, on a communicator of the key's own."""

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(means, info, placement, place)
        assert means.communicators is not None
        self._communicators = means.communicators
        self._comm: Any = None

    def share(self) -> Steps[None]:
        """By a tree of messages of ours; then the key waits for its communicator."""
        yield from broadcast(self._group, self.value, 0, self._tag(0))
        self._comm = yield from self._communicators.of(self._key_id)

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[HostArray | None]:
        """In place, with the workers' labels compared before."""
        steps = self._reduce_scatter(values, combine, comparison)
        return whole(self._parts, steps, values, needed=(0, values.size), completed=[self._own()])

    def _reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None
    ) -> Steps[HostArray | None]:
        native = self._communicators.native
        if comparison is not None:
            yield from native.compare(self._comm, comparison)
        yield from native.reduce_scatter(self._comm, values, self.placement.bounds, combine)
        return None

    def allgather(self, outs: Sequence[HostArray], comparison: Comparison | None) -> Steps[None]:
        """In place."""
        steps: Steps[None] = self._communicators.native.allgather(self._comm, self.value, self.placement.bounds)
        return whole(self._parts, steps, self.value, needed=self._own(), completed=self._others())


class OneHost(_InMemory):
    """Through memory that all workers share, without a message."""

    def share(self) -> Steps[None]:
        """The value is in the memory: the others are told that it is."""
        if not self.share_now():
            yield self._hosts.published(self._place)

    def share_now(self) -> bool:
        """The others look whether they have been told."""
        if self._group.rank == 0:
            self._hosts.publish(self._place)
        return self._group.rank == 0 or self._hosts.is_published(self._place)

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[HostArray | None]:
        """From where the values are, if the others can read them there."""
        return one_host.reduce_scatter(
            self._group.rank,
            values,
            self.placement.bounds,
            self._key,
            combine=combine,
            comparison=comparison,
            parts=self._parts,
        )

    def allgather(self, outs: Sequence[HostArray], comparison: Comparison | None) -> Steps[None]:
        """Wait for the other owners, and copy the value out."""
        return one_host.allgather(self._group.rank, self.placement.bounds, self._key, outs, parts=self._parts)


class Hosted(_InMemory):
    """Through memory within each host, and by messages between hosts, which say what those of `Messages` say."""

    def share(self) -> Steps[None]:
        """By a tree over one rank of each host."""
        return hosted.share(self._group, self._key, self._tag(0))

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[HostArray | None]:
        """From where the values are, if the others of the host can read them there."""
        return hosted.reduce_scatter(
            self._groups(comparison)[0],
            values,
            self.placement.bounds,
            self._tag(1),
            self._key,
            changeable=changeable,
            combine=combine,
            comparison=comparison,
            parts=self._parts,
        )

    def allgather(self, outs: Sequence[HostArray], comparison: Comparison | None) -> Steps[None]:
        """The value is completed once for each host, and copied out as it comes."""
        group = self._groups(comparison)[1]
        return hosted.allgather(group, self.placement.bounds, self._tag(2), self._key, outs, parts=self._parts)


class Ipc(Alone):
    """Through the device memory of workers of one host, who read each other's. Each has a copy of the value."""

    shared = True  # `allgather` writes to the caller's arrays

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(means, info, placement, place)
        assert means.hosts is not None
        self._hosts, self._place = means.hosts, place
        self._device = cast(DeviceSpace, self._space)
        self.dtype = info.dtype  # widened by whoever adds
        self.value = self._device.shared_empty(info.n_elems, info.dtype)
        self._room: SpaceArray = None  # for this worker's values, which the others read there; from the first round on
        self._key = means.hosts.key(place, info.n_elems, info.dtype, value=self.value, arrays=means.hosts.peers)

    @property
    def held_bytes(self) -> int:
        """The value, and what the others read."""
        return int(self.value.nbytes) * (1 if self._room is None else 2)

    def share(self) -> Steps[None]:
        """The others copy it from where worker 0 says that it is."""
        if self._group.rank == 0:
            self._key.name(TOTALS, self.value)
            yield self._device.begun()
            self._hosts.publish(self._place)
        else:
            yield self._hosts.published(self._place)
            self._device.copy(self.value, self._key.array_of(0, TOTALS, self.value.dtype))

    def reduce_scatter(
        self, values: Any, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[Any]:
        """From where the others can read them."""
        rank, bounds = self._group.rank, self.placement.bounds
        if self._room is None:
            self._room = self._device.shared_empty(values.size, values.dtype)
        self._device.copy(self._room, values)
        totals = yield from device_host.reduce_scatter(
            rank, self._room, bounds, self._key, self._device, combine=combine, comparison=comparison
        )
        return totals

    def allgather(self, outs: Sequence[Any], comparison: Comparison | None) -> Steps[None]:
        """Wait for the other owners, and copy their parts, and the value out."""
        return device_host.allgather(self._group.rank, self.placement.bounds, self._key, self._device, outs)


Make = Callable[[Means, KeyInfo, Placement, Any], Way]

WAYS: Mapping[Path, Make] = {
    "direct": OneHost,
    "hosted": Hosted,
    "messages": Messages,
    "native": Native,
    "ipc": Ipc,
    "mpi": DeviceMessages,
    "nccl": NcclWay,
}
