"""Row-sparse keys: which owner has which rows, and a worker's messages to and from the owners.

Each owner holds a range of a key's rows (`placement.place_rows`); where workers go on after a death, two of them hold
all of it. A push is one message to every owner of the key, with the ids of its rows and the rows; it may have none, but
is sent, since owners count the pushes of a round. It has no answer. A pull is one message to each owner of the wanted
rows, with the round that it needs, and one answer with those rows. Each message contains the encoding of its ids
(row_ids.py): a push of all rows needs no ids, and has as many bytes as a dense one. So workers and owners need not
agree on when a key is sent densely.

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
from mpikv.placement.keys import KeyInfo, ShardPlan
from mpikv.placement.labels import PushLabel, scaled
from mpikv.placement.place import place_rows
from mpikv.session.base import Pending, Session
from mpikv.session.workers import Workers
from mpikv.strategies.exchange import Client, wait_for_tags
from mpikv.transports import wire


def push_label(session: Workers, info: KeyInfo) -> PushLabel:
    """What a push is made under, such as the attributes' number. Changed ones are sent before it."""
    check_updated(session, info)
    return session.under(info)


def check_updated(session: Session, info: KeyInfo) -> None:
    if not session.synchronous and session.optimizer_of(info) is None:
        raise MpikvError(
            f"push of key {shown(info.key)}: an asynchronous store needs set_optimizer before the first push"
        )


class _Key:
    """One key. shards: the rows of each owner. answering: of owners that are asked."""

    def __init__(self, info: KeyInfo, shards: ShardPlan, *, first_answers: bool) -> None:
        self.info, self.shards, self.pushed = info, shards, 0
        self.answering = shards[:1] if first_answers else shards
        self.columns = info.n_elems // info.shape[0] if info.shape[0] else 0


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
        members = self._session.members
        key = self._keys[info.id] = _Key(info, place_rows(members, info), first_answers=members.has_seconds)
        self._session.log.detail(lambda: described.rows(members, info))
        if first is None:
            return
        for shard, rows in zip(key.shards, self._by_owner(first.indices, key.shards), strict=True):
            _, begin, end = shard
            text = {"key": info.key, "shape": info.shape, "dtype": str(info.dtype), "begin": begin, "end": end}
            text["answers"] = shard in key.answering
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
            (key.info, shard.begin * key.columns, shard.end * key.columns)
            for key in self._keys.values()
            for shard in key.shards
            if shard.owner == owner
        ]

    @staticmethod
    def _by_owner(ids: Ids, shards: ShardPlan, *, all_of_them: bool = True) -> list[_OwnerRows]:
        """all_of_them: also owners that have none of these rows."""
        by_owner = []
        for owner, begin, end in shards:
            span = slice(*np.searchsorted(ids, (begin, end)).tolist())
            if all_of_them or span.start < span.stop:
                by_owner.append(_OwnerRows(owner, span, row_ids.encode(ids[span] - begin, end - begin)))
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
        for rows in self._by_owner(total.indices, key.shards):
            payload = np.concatenate([rows.encoded_ids, _bytes_of(values[rows.span])])
            self._client.send(rows.owner, [(header, payload)])

    def pull(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        key = self._keys[info.id]
        return self._ask(key, ids.size, self._by_owner(ids, key.answering, all_of_them=False), priority, call)

    def _ask(
        self, key: _Key, n_rows: int, by_owner: Sequence[_OwnerRows], priority: int, call: str
    ) -> tuple[HostArray, list[Pending]]:
        values: HostArray = np.empty((n_rows, key.columns), key.info.dtype)
        if not by_owner:
            return values, []
        session = self._session
        wait_for_tags(session, self._client, len(by_owner))
        header = wire.Header(wire.ROWS_PULL, key.info.id, 0, 0, key.pushed, priority=wire.clamped(priority))
        running = session.engine.start(self._request(header, by_owner, values), f"{call} of key {shown(key.info.key)}")
        labels = tuple(self._labels[rows.owner] for rows in by_owner)
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
        wait_for_tags(session, client, len(key.answering))
        name = f"changed rows of key {shown(info.key)}"
        answers = [session.engine.start(client.ask(shard.owner, header, None), name) for shard in key.answering]
        round_ = key.pushed if session.synchronous else None
        pending = [
            Pending(answer, Waiting("pull", info.key, info.id, round_, (self._labels[shard.owner],)))
            for shard, answer in zip(key.answering, answers, strict=True)
        ]

        def finish() -> RowSparse:
            ids, rows = [np.empty(0, np.int64)], [np.empty(0, info.dtype)]
            for (_, begin, end), answer in zip(key.answering, answers, strict=True):
                found, data = row_ids.decode(np.frombuffer(answer.result or b"", np.uint8), end - begin)
                ids.append(found + begin)
                rows.append(data.view(info.dtype))
            all_ids = np.concatenate(ids)
            return RowSparse(all_ids, np.concatenate(rows).reshape(all_ids.size, *info.shape[1:]), info.shape)

        return pending, finish

    def settle(self, call: str) -> None:
        """Wait until every owner has applied this worker's last push of each key. Synchronous stores only."""
        for key in tuple(self._keys.values()):
            self.wait_for_owners(key.info, call)

    def wait_for_owners(self, info: KeyInfo, call: str) -> None:
        """Wait until all owners of a key answer: they have its first rows, and, of a round, the last push. Blocks."""
        key = self._keys[info.id]
        for pending in self._ask(key, 0, self._by_owner(np.empty(0, np.int64), key.shards), 0, call)[1]:
            self._session.wait(pending)

    def owners_of(self, info: KeyInfo) -> list[int]:
        return [shard.owner for shard in self._keys[info.id].shards]


def _bytes_of(rows: HostArray) -> HostArray:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
