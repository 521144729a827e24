"""Row-sparse keys: which owner has which rows, and a worker's messages to and from the owners.

Each owner holds a range of a key's rows (`placement.place_rows`). A push is one message to every owner of the key, with
the ids of its rows and the rows; it may have none, but is sent, since owners count the pushes of a round. It has no
answer. A pull is one message to each owner of the wanted rows, with the round that it needs, and one answer with those
rows. Each message contains the encoding of its ids (row_ids.py): a push of all rows needs no ids, and has as many bytes
as a dense one. So workers and owners need not agree on when a key is sent densely.

Owners are servers, or a service inside each worker, which is the one that servers run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpikv.arrays import row_ids
from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse
from mpikv.common.checks import shown
from mpikv.engine.operation import Operation, Steps
from mpikv.errors import MpikvError
from mpikv.observe.stall import Waiting
from mpikv.placement import described
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import PushLabel, scaled
from mpikv.placement.place import place_rows
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.strategies.exchange import Client, wait_for_tags
from mpikv.transports import wire


def push_label(session: Workers, info: KeyInfo) -> PushLabel:
    """What a push is made under, such as the attributes' number. Changed ones are sent before it."""
    if not session.synchronous and session.optimizer_of(info) is None:
        raise MpikvError(
            f"push of key {shown(info.key)}: an asynchronous store needs set_optimizer before the first push"
        )
    return session.under(info)


class _Key:
    """One key. bounds: owner i has the rows [bounds[i], bounds[i+1])."""

    def __init__(self, info: KeyInfo, bounds: Sequence[int]) -> None:
        self.info, self.bounds, self.pushed = info, bounds, 0
        self.columns = info.n_elems // info.shape[0] if info.shape[0] else 0
        self.owners = [i for i in range(len(bounds) - 1) if bounds[i] < bounds[i + 1]]


class _OwnerRows(NamedTuple):
    """Those of some rows that one owner has: their range, and their encoded ids, counted from the owner's first row."""

    owner: int
    span: slice
    encoded_ids: HostArray


class RowClient:
    """Sends one worker's messages to owners and receives the answers. labels: the owners' names in errors."""

    def __init__(self, session: Workers, client: Client, labels: Sequence[str]) -> None:
        self._session, self._client, self._labels = session, client, labels
        self._keys: dict[int, _Key] = {}

    # --- keys

    def begin(self, info: KeyInfo, first: RowSparse | None) -> None:
        """Add a key. first: the rows that worker 0 sends to the owners; None elsewhere. Under the engine's lock."""
        key = self._keys[info.id] = _Key(info, place_rows(self._session.members, info))
        self._session.log.detail(lambda: described.rows(self._session.members, info))
        if first is None:
            return
        for rows in self._by_owner(key, first.indices, key.owners):
            begin, end = key.bounds[rows.owner : rows.owner + 2]
            text = {"key": info.key, "shape": info.shape, "dtype": str(info.dtype), "begin": begin, "end": end}
            head = np.frombuffer(wire.with_text(json.dumps(text).encode(), b""), np.uint8)
            payload = np.concatenate([head, rows.encoded_ids, _bytes_of(first.values[rows.span])])
            self._client.send(rows.owner, [(wire.Header(wire.ROWS_INIT, info.id), payload)])

    def forget(self, info: KeyInfo) -> None:
        self._keys.pop(info.id, None)

    def pushes(self) -> dict[int, int]:
        return {key_id: key.pushed for key_id, key in self._keys.items()}

    def owned(self, owner: int) -> list[tuple[KeyInfo, int, int]]:
        """The elements that an owner has of each key, as in `strategies.states`."""
        return [
            (key.info, key.bounds[owner] * key.columns, key.bounds[owner + 1] * key.columns)
            for key in self._keys.values()
        ]

    @staticmethod
    def _by_owner(key: _Key, ids: Ids, owners: Sequence[int]) -> list[_OwnerRows]:
        cuts = np.searchsorted(ids, key.bounds).tolist()
        by_owner = []
        for owner in owners:
            span, first = slice(cuts[owner], cuts[owner + 1]), key.bounds[owner]
            by_owner.append(_OwnerRows(owner, span, row_ids.encode(ids[span] - first, key.bounds[owner + 1] - first)))
        return by_owner

    # --- messages

    def push(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        """Send each owner its rows, or a message without rows. `total` is kept, and may be changed."""
        with self._session.engine.lock:
            self._send(info, total, push_label(self._session, info), priority)
        self._session.activity.note(f"push of key {shown(info.key)}")

    def _send(self, info: KeyInfo, total: RowSparse, under: PushLabel, priority: int) -> None:
        key, shape = self._keys[info.id], total.values.shape
        values = scaled(self._session.spaces.host, total.values.reshape(-1), under.ratio).reshape(shape)
        key.pushed += 1
        header = wire.Header(wire.ROWS_PUSH, info.id, 0, under.number, key.pushed, priority=wire.clamped(priority))
        for rows in self._by_owner(key, total.indices, key.owners):
            payload = np.concatenate([rows.encoded_ids, _bytes_of(values[rows.span])])
            self._client.send(rows.owner, [(header, payload)])

    def pull(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        key = self._keys[info.id]
        cuts = np.searchsorted(ids, key.bounds).tolist()
        return self._ask(key, ids, [owner for owner in key.owners if cuts[owner] < cuts[owner + 1]], priority, call)

    def _ask(
        self, key: _Key, ids: Ids, owners: Sequence[int], priority: int, call: str
    ) -> tuple[HostArray, list[Pending]]:
        values: HostArray = np.empty((ids.size, key.columns), key.info.dtype)
        if not owners:
            return values, []
        session = self._session
        wait_for_tags(session, self._client, len(owners))
        header = wire.Header(wire.ROWS_PULL, key.info.id, 0, 0, key.pushed, priority=wire.clamped(priority))
        steps = self._request(header, self._by_owner(key, ids, owners), values)
        running = session.engine.start(steps, f"{call} of key {shown(key.info.key)}")
        labels = tuple(self._labels[owner] for owner in owners)
        waiting = Waiting(call, key.info.key, key.info.id, key.pushed if session.synchronous else None, labels)
        return values, [Pending(running, waiting)]

    def _request(self, header: wire.Header, by_owner: Sequence[_OwnerRows], values: HostArray) -> Steps[None]:
        client = self._client
        tags, receives = [], list[Operation]()
        for rows in by_owner:
            tag = client.reply_tags.take()
            tags.append(tag)
            # The receive is posted before the request is sent, so that MPI need not buffer the answer.
            receives.append(client.irecv(values[rows.span].reshape(-1), rows.owner, tag))
            client.send(rows.owner, [(header._replace(reply_tag=tag), rows.encoded_ids)])
            client.count(rows.owner, header.kind, header.key_id, values[rows.span].nbytes)
        yield from receives
        client.reply_tags.give(tags)

    def there(self, info: KeyInfo) -> tuple[list[Pending], Callable[[], RowSparse]]:
        """As `changed`: all rows that exist."""
        return self.changed(info, 0, wire.ROWS_THERE)

    def changed(
        self, info: KeyInfo, priority: int, kind: int = wire.ROWS_CHANGED
    ) -> tuple[list[Pending], Callable[[], RowSparse]]:
        """See `Strategy.changed_rows`. Answers may have any length."""
        key, session, client = self._keys[info.id], self._session, self._client
        header = wire.Header(kind, info.id, 0, 0, key.pushed, priority=wire.clamped(priority))
        wait_for_tags(session, client, len(key.owners))
        name = f"changed rows of key {shown(info.key)}"
        answers = [session.engine.start(client.ask(owner, header, None), name) for owner in key.owners]
        round_ = key.pushed if session.synchronous else None
        pending = [
            Pending(answer, Waiting("pull", info.key, info.id, round_, (self._labels[owner],)))
            for owner, answer in zip(key.owners, answers, strict=True)
        ]

        def finish() -> RowSparse:
            ids, rows = [np.empty(0, np.int64)], [np.empty(0, info.dtype)]
            for owner, answer in zip(key.owners, answers, strict=True):
                begin, end = key.bounds[owner : owner + 2]
                found, data = row_ids.decode(np.frombuffer(answer.result or b"", np.uint8), end - begin)
                ids.append(found + begin)
                rows.append(data.view(info.dtype))
            all_ids = np.concatenate(ids)
            return RowSparse(all_ids, np.concatenate(rows).reshape(all_ids.size, *info.shape[1:]), info.shape)

        return pending, finish

    def settle(self, call: str) -> None:
        """Wait until every owner has applied this worker's last push of each key. Synchronous stores only."""
        none = np.empty(0, np.int64)
        for key in tuple(self._keys.values()):
            for pending in self._ask(key, none, key.owners, 0, call)[1]:
                self._session.wait(pending)


def _bytes_of(rows: HostArray) -> HostArray:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
