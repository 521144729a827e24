"""The path "divided": workers own the elements before a key's cut, servers the others.

Value: whole, in each worker's own memory, or once in the shared memory of each host. The elements before the cut go
round the ring of the workers. Of the others each worker pushes its own to servers; where the workers of a host share
memory, each of them adds some, over all of them in the order of their ranks, and the first one, its speaker, pushes the
sum, and receives the new values into the shared memory. Both parts are under way at the same time. So where hosts add
each byte crosses a host's link once, whatever the number of its workers.

Labels: workers compare theirs in the ring and in the memory of their host, and servers compare those of the workers
that push. Where they differ within a host, its speaker does not push, but lets a server refuse the round, as it does by
itself where those of several differ. All workers are told then, and find out together who has pushed what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives import one_host
from mpikv.collectives.host_key import GATHERED, HostKey
from mpikv.engine.operation import Operation, Predicate, Steps, Waiter, Waking, wakes
from mpikv.engine.running import Running
from mpikv.placement.keys import KeyInfo, even_bounds
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.session.messages import Message
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.exchange import Client, InPlace, Item
from mpikv.strategies.hosted_path import HostedPath
from mpikv.strategies.key_path import KeyPath, PathResources
from mpikv.strategies.message_path import NativePath, RingPath
from mpikv.strategies.owned_calls import OwnedCalls
from mpikv.transports import wire

if TYPE_CHECKING:
    from mpikv.strategies.queues import Round


class Speaker:
    """What a worker asks servers for in rounds of divided keys, for itself or for all workers of its host.

    pushers: of each divided key, by its number, the workers that push it; (): all. keys: all keys of servers.
    """

    def __init__(
        self,
        session: Workers,
        client: Client,
        keys: Mapping[int, ClientKey],
        calls: OwnedCalls,
    ) -> None:
        self.pushers: dict[int, tuple[int, ...]] = {}
        self._session, self._client, self._keys = session, client, keys
        self.owners_of, self.exchange = calls.owners_of, partial(calls.steps, wire.PUSHPULL)
        self._refusals: dict[int, int] = {}  # the round of each key that was refused
        self._waiters: dict[int, Waiter] = {}
        self._tell_waits = session.messages.acts["refused"]
        session.messages.acts["refused"] = self._refused

    def apart(self, steps: Steps[None], name: str) -> Operation:
        """Let the engine run steps by themselves. Returns a request that is done when they have ended."""
        return self._session.engine.take_next(Running(steps, name))

    def begin(self, info: KeyInfo) -> None:
        self._keys[info.id].pushed += 1

    def item(self, info: KeyInfo, total: HostArray, value: HostArray, pushed: Round) -> Item:
        """What servers get of `total`, and their part of `value`. Both: (n,), of the whole key."""
        key, flags = self._keys[info.id], wire.UNCOMPRESSED_PUSH | wire.UNCOMPRESSED_ANSWER
        return Item(key, total, InPlace(value), key.routes, key.pushed, pushed.under.number, pushed.op, flags)

    def allows(self, item: Item) -> bool:
        """Whether there are tags for its messages."""
        return self._client.allows(*self._client.tags_needed([item]))

    # --- rounds that are refused

    def refuse(self, info: KeyInfo) -> None:
        key = self._keys[info.id]
        self._client.send(key.routes[0].owner, [(wire.Header(wire.REFUSE, info.id, round=key.pushed), None)])

    def is_refused(self, info: KeyInfo) -> bool:
        return self._refusals.get(info.id) == self._keys[info.id].pushed

    def wake_where_refused(self, info: KeyInfo, waiter: Waiter) -> None:
        self._waiters[info.id] = waiter

    def _refused(self, source: int, message: Message) -> None:
        """In a round of a divided key the workers find out by themselves who has pushed what."""
        if (key_id := message["key_id"]) not in self.pushers:
            self._tell_waits(source, message)
            return
        self._refusals[key_id] = message["round"]
        if (waiter := self._waiters.pop(key_id, None)) is not None:
            waiter.wake()


class _OrRefused(Waking):
    """A request that is done when another one is, or when a server has refused this round of a key."""

    def __init__(self, speaker: Speaker, info: KeyInfo, request: Operation) -> None:
        self._speaker, self._info, self._request = speaker, info, request

    def test(self) -> bool:
        return self._request.test() or self._speaker.is_refused(self._info)

    def wakes(self, waiter: Waiter) -> bool:
        self._speaker.wake_where_refused(self._info, waiter)
        return wakes(self._request, waiter)


class DividedPath(KeyPath):
    """A key of which workers and servers own a part each.

    place: where the value, the counters of the workers' part, and those of the servers' part are in the memory of a
    host whose workers add the servers' part, too; None: each worker has its own value, and pushes by itself.
    """

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        assert resources.speaker is not None
        self._speaker = resources.speaker
        self.shared = place is not None
        self.overwrites = not self.shared
        self._key: HostKey | None = None  # of the servers' part, where the host adds it
        if place is not None:
            assert resources.hosts is not None
            self._key = resources.hosts.key((place[0], place[2]), info.n_elems, info.dtype)
            self.value = self._key.value
            self._local_rank, self._n_local = resources.hosts.rank, resources.hosts.size
        self._ring: KeyPath | None = None
        self._exchange: Operation | None = None
        self.reshard(placement)

    @property
    def servers(self) -> tuple[str, ...]:
        return self._speaker.owners_of(self._info)

    def reshard(self, placement: Placement) -> None:
        """The cut may move to the first element, no other one."""
        super().reshard(placement)
        if not (cut := placement.bounds[-1]):
            self._ring = None
        elif self._ring is None:
            self._ring = self._ring_path(cut)
        else:
            self._ring.reshard(placement)

    def _ring_path(self, cut: int) -> KeyPath:
        info = self._info._replace(shape=(cut,))
        if self._key is not None:
            return HostedPath(self._resources, info, self.placement, self.place[:2])
        kind = RingPath if self._resources.communicators is None else NativePath
        path = kind(self._resources, info, self.placement, None)
        path.value = self.value[:cut]
        return path

    @property
    def held_bytes(self) -> int:
        parts = (self._key, self._ring)
        return super().held_bytes + sum(part.held_bytes for part in parts if part is not None)

    def broadcast(self) -> Steps[None]:
        if self._key is None:
            return super().broadcast()
        return HostedPath(self._resources, self._info, self.placement, self.place[:2]).broadcast()

    def begin(self, round_: Round) -> None:
        self._round = round_
        self._speaker.begin(self._info)

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        self._exchange = self._speaker.apart(self._of_servers(values, combine, comparison), f"key {self._info.key!r}")
        if (ring := self._ring) is None:
            return None
        cut = self.placement.bounds[-1]
        return (yield from ring.reduce_scatter(values[:cut], combine, comparison, changeable=changeable))

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        assert self._exchange is not None
        cut, key = self.placement.bounds[-1], self._key
        if (ring := self._ring) is not None:
            yield from ring.allgather([out[:cut] for out in outs], comparison)
        if comparison is None:  # there is one worker
            yield self._exchange
            return
        if not comparison.differ:
            yield _OrRefused(self._speaker, self._info, self._exchange)
        if not comparison.differ and key is not None and self._local_rank:
            yield _OrRefused(self._speaker, self._info, key.awaited([0], GATHERED, 1))
        comparison.differ |= self._speaker.is_refused(self._info)
        if comparison.differ:
            for out in outs:  # the old value
                out[cut:] = self.value[cut:]
        elif key is not None:
            bounds = [cut] + [self._info.n_elems] * self._n_local  # the speaker has what servers own
            yield from one_host.allgather(self._local_rank, bounds, key, outs)

    def _of_servers(self, values: HostArray, combine: np.ufunc, comparison: Comparison | None) -> Steps[None]:
        """Ask the servers with this worker's values, or with the sum of its host, if it is the first one there."""
        info, cut, total = self._info, self.placement.bounds[-1], values
        if self._key is not None:
            shards = [cut + bound for bound in even_bounds(info.n_elems - cut, self._n_local)]
            total = yield from one_host.reduce_scatter(
                self._local_rank, values, shards, self._key, combine=combine, comparison=comparison, to_first=True
            )
            if self._local_rank:
                return
        if comparison is None or not comparison.differ:
            item = self._speaker.item(info, total, self.value, self._round)
            yield Predicate(lambda: self._speaker.allows(item))
            yield from self._speaker.exchange([item], self._round.priority)
        elif not cut:  # else the messages of the workers' part tell all of them
            self._speaker.refuse(info)
            yield Predicate(lambda: False)  # until all are told
