"""A worker as the client of servers for its host, whose workers add in memory what they push (divided_path.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import Reduction
from mpikv.engine.operation import Operation, Predicate, Steps, Waiter, Waking, wakes
from mpikv.engine.running import Running
from mpikv.placement.keys import KeyInfo
from mpikv.session.messages import Message
from mpikv.session.workers import Workers
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.exchange import Client, InPlace, Item
from mpikv.transports import wire


class Pushed(Protocol):
    """A round as servers must know it (`queues.Round`). under: the label of the push."""

    @property
    def under(self) -> Any: ...

    @property
    def op(self) -> Reduction: ...

    @property
    def priority(self) -> int: ...


class Speaker:
    """One worker, the first of its host or not.

    added: the numbers of keys that hosts add. keys: all keys of servers, by their numbers. labels: the servers' names.
    exchange(items, priority): the steps of a pushpull.
    """

    def __init__(
        self,
        session: Workers,
        client: Client,
        keys: Mapping[int, ClientKey],
        labels: Sequence[str],
        exchange: Callable[[Sequence[Item], int], Steps[None]],
    ) -> None:
        self.added: set[int] = set()
        self._session, self._client, self._keys, self._labels = session, client, keys, labels
        self._exchange = exchange
        self._refusals: dict[int, int] = {}  # the round of each key that was refused
        self._waiters: dict[int, Waiter] = {}
        self._tell_waits = session.messages.acts["refused"]
        session.messages.acts["refused"] = self._refused

    def owners_of(self, info: KeyInfo) -> tuple[str, ...]:
        return tuple(self._labels[route.owner] for route in self._keys[info.id].routes)

    def apart(self, steps: Steps[None], name: str) -> Operation:
        """Let the engine run steps by themselves. Returns a request that is done when they have ended."""
        return self._session.engine.take(Running(steps, name))

    def begin(self, info: KeyInfo) -> None:
        self._keys[info.id].pushed += 1

    def exchange_sum(self, info: KeyInfo, total: HostArray, value: HostArray, pushed: Pushed) -> Steps[None]:
        """Push what servers have of `total`, and receive their part of `value`. Both: (n,), of the whole key."""
        key, client = self._keys[info.id], self._client
        flags = wire.UNCOMPRESSED_PUSH | wire.UNCOMPRESSED_ANSWER
        item = Item(key, total, InPlace(value), key.routes, key.pushed, pushed.under.number, pushed.op, flags)
        needed = client.tags_needed([item])
        if not client.allows(*needed):
            yield Predicate(lambda: client.allows(*needed))
        yield from self._exchange([item], pushed.priority)

    # --- rounds that are refused

    def refuse(self, info: KeyInfo) -> None:
        key = self._keys[info.id]
        self._client.send(key.routes[0].owner, [(wire.Header(wire.REFUSE, info.id, round=key.pushed), None)])

    def is_refused(self, info: KeyInfo) -> bool:
        return self._refusals.get(info.id) == self._keys[info.id].pushed

    def or_refused(self, info: KeyInfo, request: Operation) -> Operation:
        """Return a request that is done when another one is, or when a server has refused this round of a key."""
        return _OrRefused(self, info, request)

    def wake_where_refused(self, info: KeyInfo, waiter: Waiter) -> None:
        self._waiters[info.id] = waiter

    def _refused(self, source: int, message: Message) -> None:
        """Of a key that hosts add, the workers find out by themselves who has pushed what."""
        if (key_id := message["key_id"]) not in self.added:
            self._tell_waits(source, message)
            return
        self._refusals[key_id] = message["round"]
        if (waiter := self._waiters.pop(key_id, None)) is not None:
            waiter.wake()


class _OrRefused(Waking):
    def __init__(self, speaker: Speaker, info: KeyInfo, request: Operation) -> None:
        self._speaker, self._info, self._request = speaker, info, request

    def test(self) -> bool:
        return self._request.test() or self._speaker.is_refused(self._info)

    def wakes(self, waiter: Waiter) -> bool:
        self._speaker.wake_where_refused(self._info, waiter)
        return wakes(self._request, waiter)
