"""Row-sparse keys at an owner of ranges of their rows: takes pushes, adds and updates rows, and answers pulls.

A pure state machine, like the core from which it gets requests. Every worker's push of a round is sent to every owner,
with the rows that the owner has; often there are none. The policies are those of dense keys: rows are added in the
order of the workers, and updated when all have pushed (synchronous) or at each push. A push that is a round ahead waits
here. A pull is answered when the round that it needs is done.

Memory: the rows that exist (optimizers/row_table.py), and the pushes of rounds that are not complete.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import row_ids
from mpikv.arrays.as_numpy import HostArray, dtype_of, sum_dtype
from mpikv.arrays.row_ids import Ids
from mpikv.common.checks import shown
from mpikv.errors import MpikvError
from mpikv.optimizers.owner import AS_SET, AttributesId, Owner
from mpikv.optimizers.row_table import RowTable
from mpikv.optimizers.states import StateRecord
from mpikv.placement.keys import Key, KeyInfo
from mpikv.server.events import Event, Refusal, ServerReply
from mpikv.server.kept import Held
from mpikv.server.policy import Contribution, Policy
from mpikv.session.rules import refusal
from mpikv.transports import wire
from mpikv.transports.wire import Header


class PushedRows(NamedTuple):
    """Rows of one worker or of several, in the dtype of the sum. Policies handle it as they handle an array."""

    ids: Ids
    rows: HostArray


class _RowSums:
    """Adds rows for a policy: see `policy.Memory`."""

    @staticmethod
    def combine(total: PushedRows, other: PushedRows, how: np.ufunc) -> PushedRows:
        del how
        return PushedRows(*row_ids.add(*total, *other))


_ROW_SUMS: Any = _RowSums()


class RowShard:
    """The rows [begin, end) of a key that this owner has. answers: whether pulls are asked here."""

    answers = True

    def __init__(
        self, info: KeyInfo, begin: int, end: int, *, owner: Owner, policy: Policy, labels: Sequence[str]
    ) -> None:
        self.info = info
        self.table = RowTable(info, begin, end)
        self._begin, self._n_rows = begin, end - begin
        self._owner, self._policy, self._labels = owner, policy, labels
        self._version = 0
        self._pushed = [0] * len(labels)
        self._waiting: list[deque[tuple[AttributesId, PushedRows]]] = [deque() for _ in labels]
        self._pulls: list[tuple[int, Header, Ids | None]] = []

    def held(self) -> Held:
        """All of a key, of which all rows are here."""

        def read() -> dict[str, Any]:
            ids, states = self.table.ids(), self.table.states(self._owner)
            return {"value": [ids, self.table.rows(ids)], "state": None if states is None else states.state}

        return Held(self.info.key, self._pushed, self.answers, read)

    def begin(self, written: HostArray) -> None:
        """Take the key's first values. written: ids and rows, as in a message."""
        pushed = self._rows_in(written, self.info.dtype)
        self.table.replace(*pushed)

    def _rows_in(self, written: HostArray, dtype: np.dtype[Any]) -> PushedRows:
        ids, data = row_ids.decode(written, self._n_rows)
        columns, item_bytes = self.table.columns, self.info.dtype.itemsize
        if data.size != ids.size * columns * item_bytes:
            raise MpikvError(
                f"{data.size} bytes came for {ids.size} rows of key {shown(self.info.key)}, each of "
                f"{columns * item_bytes} bytes"
            )
        rows = data.view(self.info.dtype).reshape(ids.size, columns)
        return PushedRows(ids + self._begin, rows.astype(dtype))

    # --- pushes

    def push(self, worker: int, header: Header, written: HostArray) -> list[Event]:
        """Take a worker's next push now, or, where it is of a later round, when that round begins."""
        self._pushed[worker] += 1
        attributes: AttributesId = (worker, header.attributes_id) if header.attributes_id else AS_SET
        self._waiting[worker].append((attributes, self._rows_in(written, sum_dtype(self.info.dtype))))
        return self._advance(worker)

    def _advance(self, worker: int) -> list[Event]:
        queue, events = self._waiting[worker], []
        while queue:
            taken = self._pushed[worker] - len(queue)  # how many of its pushes have been taken
            if self._policy.counts and taken != self._version:
                break
            events += self._contribute(worker, *queue.popleft())
        return events

    def _contribute(self, worker: int, attributes: AttributesId, pushed: Any) -> list[Event]:
        update = self._policy.push(worker, Contribution(pushed, attributes), _ROW_SUMS)
        if update is None:
            return []
        if labels := self._owner.different(self.info.id, update.pushed):
            # The version does not change, so no pull is answered and no further push is taken.
            round_ = self._version + 1
            return [Refusal(self.info.id, round_, refusal(self.info.key, round_, labels, self._labels))]
        terms: Any = update.terms
        total: PushedRows = functools.reduce(lambda one, other: PushedRows(*row_ids.add(*one, *other)), terms)
        self.table.update(self._owner, total.ids, total.rows, update.attributes)
        self._version += 1
        events = self._answer()
        if self._policy.counts:
            for other in range(len(self._labels)):
                if other != worker:  # `_advance` of this worker is under way
                    events += self._advance(other)
        return events

    # --- pulls

    def pull(self, worker: int, header: Header, written: HostArray) -> list[Event]:
        """Answer a pull now, or when the round that it needs is done: with given rows, those that have changed, or all
        that exist.
        """
        given = header.kind == wire.ROWS_PULL
        self._pulls.append((worker, header, row_ids.decode(written, self._n_rows)[0] + self._begin if given else None))
        return self._answer()

    def _answer(self) -> list[Event]:
        counts, events, later = self._policy.counts, list[Event](), []
        for worker, header, ids in self._pulls:
            if counts and self._version < header.round:
                later.append((worker, header, ids))
            else:
                data = self._found(worker, header.kind) if ids is None else self.table.rows(ids).reshape(-1)
                events.append(ServerReply(worker, header.reply_tag, data, header.priority))
        self._pulls = later
        return events

    def _found(self, worker: int, kind: int) -> HostArray:
        ids = self.table.changed(worker) if kind == wire.ROWS_CHANGED else self.table.ids()
        rows = self.table.rows(ids).reshape(-1).view(np.uint8)
        return np.concatenate([row_ids.encode(ids - self._begin, self._n_rows), rows])


class RowCore:
    """All row-sparse keys of an owner. policy(workers): makes the policy of a new key."""

    def __init__(self, labels: Sequence[str], policy: Callable[[int], Policy], owner: Owner) -> None:
        self.owner = owner
        self._labels, self._policy = labels, policy
        self._shards: dict[int, RowShard] = {}
        self._early: dict[int, list[tuple[int, Header, HostArray]]] = {}

    def handle(self, worker: int, header: Header, payload: HostArray) -> list[Event]:
        """Handle a request for a key's rows. Until the key's first values have arrived, other requests wait."""
        if header.kind == wire.ROWS_INIT:
            return self._init(header, payload)
        shard = self._shards.get(header.key_id)
        if shard is None:
            self._early.setdefault(header.key_id, []).append((worker, header, payload.copy()))
            return []
        return (shard.push if header.kind == wire.ROWS_PUSH else shard.pull)(worker, header, payload)

    def _init(self, header: Header, payload: HostArray) -> list[Event]:
        text, data = wire.split_text(payload)
        info = KeyInfo(text["key"], header.key_id, tuple(text["shape"]), dtype_of(text["dtype"]), sparse=True)
        policy = self._policy(len(self._labels))
        shard = RowShard(info, text["begin"], text["end"], owner=self.owner, policy=policy, labels=self._labels)
        shard.answers = text["answers"]
        shard.begin(data)
        self._shards[info.id] = shard
        events: list[Event] = []
        for early in self._early.pop(info.id, []):
            events += self.handle(*early)
        return events

    def held(self) -> list[Held]:
        return [shard.held() for shard in self._shards.values()]

    def states(self) -> list[StateRecord]:
        parts = [shard.table.states(self.owner) for shard in self._shards.values()]
        return [part for part in parts if part is not None]

    def load(self, parts: Sequence[StateRecord], replaced: Collection[int]) -> None:
        """Replace states by these. replaced: the ids of keys whose states are dropped where `parts` has none."""
        mine: dict[Key, StateRecord] = {part.key: part for part in parts}
        for shard in self._shards.values():
            part = mine.get(shard.info.key)
            if part is not None or shard.info.id in replaced:
                shard.table.set_states(self.owner, None if part is None else part.state)

    @property
    def n_keys(self) -> int:
        return len(self._shards)

    @property
    def held_bytes(self) -> int:
        return sum(shard.table.held_bytes for shard in self._shards.values())
