"""The pushes of an asynchronous store whose workers go on without those that die.

Each key is at two owners of the present generation (`Members.has_seconds`), which both get every push and apply it when
it comes: the first one answers pulls, and the second one has as much when that dies. A worker keeps what it has pushed
until both have said that it is applied; if a rank dies before that, it pushes it once more, unless it is in what the
survivors go on with (continued_pushes.py).

So a second push of a key waits for the one before. Cost: each push is sent, and applied, twice; a copy of it; one short
message more to each owner, and its answer, for all keys of a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse
from mpikv.observe.stall import Waiting
from mpikv.optimizers.owner import DEFAULT_SLOT
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import AttributeLog
from mpikv.session.base import NewKey, Pending
from mpikv.session.continued import ContinuedSession
from mpikv.strategies.base import Entry, SparseKeys
from mpikv.strategies.continued_rows import all_of
from mpikv.strategies.kept_keys import KeptKeys, KeptTotal, Served, Transfer
from mpikv.strategies.sparse import check_updated


class KeptPush(KeptTotal):
    """A push that has not been said to be applied.

    sent: in which generation, and as which push of the key. applied: what ends when its owners have applied it. found:
    in which generation survivors have begun with it, or without.
    """

    sent: tuple[int, int] | None = None
    applied: Sequence[Pending] | None = None
    found: tuple[int, bool] | None = None

    def is_in(self, last: int, applied: int | None) -> bool:
        """Whether survivors begin with it, who go on from what generation `last` has left. Pure.

        applied: how many of this worker's pushes of the key are in that; None: there is no such key.
        """
        if self.sent is None or self.sent[0] != last:
            return self.found == (last, True)
        return applied is not None and applied >= self.sent[1]


class Pulls:
    """The pulls of one call, which are made anew in another generation as far as they have not ended.

    begin: begins some of them, by their numbers.
    """

    def __init__(
        self, session: ContinuedSession, begin: Callable[[Sequence[int]], Sequence[Pending]], number: int
    ) -> None:
        self._session, self._begin, self._lock = session, begin, threading.RLock()
        self._left = dict[int, Pending | None].fromkeys(range(number))
        self._generation = -1

    def pending(self, i: int) -> Pending | None:
        with self._lock:
            number = self._session.now.number
            if number != self._generation and self._left:
                self._left = dict(zip(self._left, self._begin([*self._left]), strict=True))
                self._generation = number
            under_way = self._left.get(i)
            if under_way is not None and under_way.request.test():
                del self._left[i]
                return None
            return under_way


class KeptPushes(KeptKeys):
    rows: KeptRows
    _open: dict[Key, KeptPush]

    def __init__(self, session: ContinuedSession) -> None:
        super().__init__(session)
        self.rows = KeptRows(self)

    def _fetch(self, keys: Sequence[NewKey]) -> None:
        now = self.session.now
        for new in keys:
            now.strategy.owners.wait_for_owners(now.session.infos[new.key], "init")
            if new.key not in self._known:
                self._add(new)
            del self._early[new.key]

    # --- pushes and pulls

    def start(self, entries: Sequence[Entry], op: Reduction, priority: int, *, waits: bool) -> list[Pending]:
        """Push and pull. Blocks while an earlier push of one of the keys is not applied."""
        self.fetch_early(entries)
        pushed = [entry for entry in entries if entry.total is not None]
        for entry in pushed:
            check_updated(self.session, entry.info)
        self._wait_for_earlier(pushed)
        if pushed:
            self._push([self._opened(entry) for entry in pushed], priority)
        pulled = [entry for entry in entries if entry.sink is not None]

        def begin(numbers: Sequence[int]) -> list[Pending]:
            now = self.session.now
            some = [Entry(now.session.infos[pulled[i].info.key], None, pulled[i].sink) for i in numbers]
            found: list[Pending] = now.strategy.prepare(some).start(priority)
            return found

        return self.pulling(begin, [entry.info for entry in pulled], "pull")

    def pulling(
        self, begin: Callable[[Sequence[int]], Sequence[Pending]], infos: Sequence[KeyInfo], call: str
    ) -> list[Pending]:
        """Start pulls, each of a key. begin: see `Pulls`."""
        pulls = Pulls(self.session, begin, len(infos))
        if infos:
            self.again(lambda: pulls.pending(0))
        return [
            Pending(Transfer(self, partial(pulls.pending, i)), Waiting(call, info.key)) for i, info in enumerate(infos)
        ]

    def _opened(self, entry: Entry) -> KeptPush:
        info = entry.info
        push = KeptPush(info, entry.total, self._attributes(info), self._encodes.owed(info.key))
        with self._lock:
            self._open[entry.info.key] = push
        return push

    def _push(self, pushes: Sequence[KeptPush], priority: int) -> None:
        try:
            self.again(lambda: self._send([one for one in pushes if one.applied is None and not one.done], priority))
        except BaseException:
            for one in pushes:
                if one.applied is None:
                    self._end(one)
            raise

    def _send(self, pushes: Sequence[KeptPush], priority: int = 0) -> None:
        if not pushes:
            return
        now = self.session.now
        infos, counts = [now.session.infos[one.info.key] for one in pushes], now.strategy.owners.pushes()
        for one, info in zip(pushes, infos, strict=True):  # before that, as owners may get it though this call fails
            one.sent = now.number, counts[info.id] + 1
        if pushes[0].info.sparse:
            (one,), (info,) = pushes, infos
            now.strategy.rows.push(info, one.total, priority)
        else:
            entries = [Entry(info, one.total, None) for info, one in zip(infos, pushes, strict=True)]
            now.strategy.prepare(entries).start(priority)
        applied = now.strategy.owners.applied(infos)
        for one in pushes:
            one.applied = applied

    def under_way(self, push: KeptPush) -> Pending | None:
        with self._lock:
            if push.done:
                return None
            assert push.applied is not None
            for pending in push.applied:
                if not pending.request.test():
                    return pending
            self._end(push)
            return None

    def _end(self, push: KeptPush) -> None:
        with self._lock:
            push.done = True
            if self._open.get(push.info.key) is push:
                del self._open[push.info.key]

    # --- optimizers

    def _agree_on(self, served: Served, before: AttributeLog | None = None) -> int:
        now = self.session.now
        now.strategy.set_optimizer(served.as_set, served.keys)
        slot = DEFAULT_SLOT if served.keys is None else now.session.slot_of(now.session.infos[served.keys[0]])
        now.session.attributes.take_over(slot, served.optimizer, before)
        return slot


class KeptRows(SparseKeys):
    """The row-sparse keys, which are at two owners, too."""

    def __init__(self, strategy: KeptPushes) -> None:
        self._strategy = strategy
        self._watched: dict[Key, int] = {}  # in which generation owners have begun to note what this worker lacks

    def push(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        self._strategy.start([Entry(info, total, None)], SUM, priority, waits=False)

    def _now(self, info: KeyInfo) -> tuple[Any, KeyInfo]:
        now = self._strategy.session.now
        return now.strategy.rows, now.session.infos[info.key]

    def pull(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        self._strategy.fetch_early([Entry(info, None, None)])
        values: HostArray = np.empty((ids.size, info.n_elems // max(info.shape[0], 1)), info.dtype)

        def begin(_: Sequence[int]) -> list[Pending]:
            rows, here = self._now(info)
            found, pending = rows.pull(here, ids, priority, call)
            return [all_of(info, pending, lambda: np.copyto(values, found))]

        return values, self._strategy.pulling(begin, [info], call)

    def changed(self, info: KeyInfo, priority: int) -> tuple[list[Pending], Callable[[], RowSparse]]:
        """The first such call after a death gives all rows that exist."""
        self._strategy.fetch_early([Entry(info, None, None)])
        found: list[Callable[[], RowSparse]] = []

        def begin(_: Sequence[int]) -> list[Pending]:
            rows, here = self._now(info)
            number = self._strategy.session.now.number
            pending, finish = rows.changed(here, priority)
            if self._watched.setdefault(info.key, number) != number:
                more, finish = rows.there(here)
                pending = [*pending, *more]
            self._watched[info.key] = number
            found[:] = [finish]
            return [all_of(info, pending)]

        return self._strategy.pulling(begin, [info], "pull"), lambda: found[0]()  # noqa: PLW0108 - of the last begin
