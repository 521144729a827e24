"""Row-sparse keys of a synchronous store without servers: each worker owns a range of their rows, and serves it.

The service is the one that servers run (server/rows.py), inside every worker's engine. It begins with the first
row-sparse key of the store, which all workers agree on, and ends when all close. A worker also sends messages to
itself. When the service begins, optimizers that were set before are set in it, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import cloudpickle

from mpikv.arrays.row_sparse import RowSparse
from mpikv.engine.operation import Predicate, Steps
from mpikv.optimizers.owner import Owner
from mpikv.optimizers.states import StateRecord
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import PushLabel
from mpikv.session.base import NewKey
from mpikv.session.workers import Workers
from mpikv.strategies.exchange import Client, check_owners
from mpikv.strategies.sparse import RowClient
from mpikv.transports import wire


class OwnedRows(Protocol):
    """The rows that this worker owns."""

    owner: Owner

    def states(self) -> list[StateRecord]:
        """The states of all rows that have been updated."""
        ...

    def load(self, parts: Sequence[StateRecord], replaced: Collection[int]) -> None:
        """Replace the states of these keys by `parts`. replaced: the keys' numbers; some may have none in `parts`."""
        ...

    @property
    def held_bytes(self) -> int:
        """The memory of the rows and their states."""
        ...


class RowServer(NamedTuple):
    """The rows that this worker owns, and the loop that serves them."""

    rows: OwnedRows
    steps: Steps[None]


class WorkersRows:
    """The row-sparse keys of one worker, as their client and as an owner. serve: makes the service."""

    def __init__(self, session: Workers, serve: Callable[[], RowServer]) -> None:
        self._session, self._serve = session, serve
        members = session.members
        labels = [f"worker {i} on {host}" for i, host in enumerate(members.worker_hosts)]
        self._messages = Client(session.transport, members.workers)
        self.client = RowClient(session, self._messages, labels)
        self._server: OwnedRows | None = None
        self._service: Any = None
        self._optimizers: list[tuple[int, bytes, list[int]]] = []
        self._sent_numbers: dict[int, int] = {}  # by slot, the number of the attributes last sent to owners

    # --- keys

    @property
    def any(self) -> bool:
        """Whether the store has had a row-sparse key."""
        return self._server is not None

    def propose(self, values: Sequence[NewKey]) -> None:
        """See `RowClient.propose`."""
        if any(new.sparse for new in values):
            check_owners(self._session.num_workers, "workers, each with rows")
        self.client.propose(values)

    def begin(self, info: KeyInfo) -> None:
        """Add a key that the workers agreed on. Under the engine's lock."""
        if self._server is None:
            self._server, steps = self._serve()
            for slot, pickled, key_ids in self._optimizers:
                self._server.owner.set_optimizer(slot, cloudpickle.loads(pickled), key_ids)
            self._service = self._session.engine.serve(steps, "rows")
        self.client.begin(info)

    # --- push and pull

    def push(self, info: KeyInfo, total: RowSparse, under: PushLabel, priority: int) -> None:
        """See `RowClient.push`. Changed attributes are sent first."""
        slot, number = self._session.slot_of(info), under.number
        if number != self._sent_numbers.get(slot, 0):
            self._sent_numbers[slot] = number
            text = json.dumps([slot, json.loads(under.label.text)]).encode()
            self._send_all(wire.Header(wire.ATTRIBUTES, attributes_id=number), text)
        self.client.push(info, total, under, priority)

    def _send_all(self, header: wire.Header, payload: bytes | None = None) -> None:
        with self._session.engine.lock:
            for owner in range(self._session.num_workers):
                self._messages.send(owner, [(header, payload)])

    # --- optimizers

    def set_optimizer(self, slot: int, pickled: bytes, key_ids: list[int]) -> None:
        """Set an optimizer that all workers agreed on. Not to be called while rounds are in progress."""
        self._optimizers.append((slot, pickled, key_ids))
        self._sent_numbers.pop(slot, None)
        if self._server is not None:
            with self._session.engine.lock:
                self._server.owner.set_optimizer(slot, cloudpickle.loads(pickled), key_ids)

    def states(self) -> list[StateRecord]:
        """The states of the rows that this worker owns."""
        if self._server is None:
            return []
        with self._session.engine.lock:
            return self._server.states()

    def load(self, parts: Sequence[StateRecord], replaced: Collection[int]) -> None:
        """See `OwnedRows.load`. Under the engine's lock."""
        if self._server is not None:
            self._server.load(parts, replaced)

    @property
    def held_bytes(self) -> int:
        """The memory of the rows that this worker owns, and of their states."""
        return 0 if self._server is None else self._server.held_bytes

    # --- the end

    def close(self) -> None:
        """Send all owners the message that this worker closes, and serve until all others have sent theirs."""
        if self._service is None:
            return
        self._send_all(wire.Header(wire.BYE))
        self._session.wait_for(Predicate(self._all_sent), "close")
        self._session.wait_for(self._service, "close")

    def _all_sent(self) -> bool:
        return self._messages.all_sent()
