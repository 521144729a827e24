"""The server as a pure state machine: requests and partitions in, replies and fetches out. No MPI, no clock.

It holds shards of values (shard.py), applies the updates that the policy returns, and answers pulls when the version
that they need exists. Worker 0 sends a key's first value while others may already push the key, so requests for a key
that does not exist yet wait for it. A change of the optimizer waits until no partition is on its way from a worker.

Cost: no copy of a value for a pull, unless an update comes before the last reply has been sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np

from mpikv.arrays.as_numpy import HostArray, dtype_of
from mpikv.codecs import compression
from mpikv.codecs.identity import IDENTITY
from mpikv.errors import MpikvError
from mpikv.hostmemory.allocator import Allocator
from mpikv.observe.recorder import Recorder
from mpikv.optimizers.owner import Owner
from mpikv.optimizers.states_file import records_from_bytes, records_to_bytes
from mpikv.placement.keys import KeyInfo
from mpikv.server.device_copies import DeviceCopies
from mpikv.server.events import Batch, Event, Fetch, PendingPull, Refusal, ServerReply
from mpikv.server.kept import Held
from mpikv.server.memory import Pool
from mpikv.server.policy import Policy
from mpikv.server.rows import RowCore
from mpikv.server.shard import ServedShard
from mpikv.spaces.base import Space
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import DEVICE, HOST, Spaces
from mpikv.transports import wire

Waiting = tuple[int, wire.Header, HostArray]
_Data = tuple[int, wire.Header, HostArray, Batch | None, int]  # the last: the index of its answer in the batch
_DATA = (wire.PUSH, wire.PULL, wire.PUSHPULL)


class ServerCore:
    """All keys of one server, and the requests that wait.

    labels: the workers' names in errors. policy(workers): makes the policy of a new unit. memory: allocates the memory
    of values. space: that of these arrays. device: the space of the worker that an asynchronous server runs in: keys in
    that space are kept and updated there. timeline: answers requests about it; kept: those about what was here before a
    rank died. counts_rounds: see `Policy`.
    """

    def __init__(
        self,
        labels: Sequence[str],
        policy: Callable[[int], Policy],
        memory: Allocator | None = None,
        space: Space | None = None,
        device: DeviceSpace | None = None,
        *,
        recorder: Recorder | None = None,
        timeline: Callable[[HostArray], bytes] = lambda _request: b"",
        kept: Callable[[HostArray], bytes] = lambda _request: b"",
    ) -> None:
        self.recorder = Recorder() if recorder is None else recorder
        self._answers = {wire.TIMELINE: timeline, wire.KEPT: kept}
        self.space = Space() if space is None else space
        self.owner = Owner(Spaces(self.space, device))
        self._copies = None if device is None else DeviceCopies(device)
        self.pool = Pool(memory, self.space)
        self._labels = labels
        self._policy, self.counts_rounds = policy, policy(len(labels)).counts
        self.rows = RowCore(labels, policy, self.owner)
        self._shards: dict[int, ServedShard] = {}
        self._early: dict[int, list[_Data]] = {}
        self._expected = [0] * len(labels)  # for each worker: partitions that are fetched and have not arrived
        self._flushes: list[Waiting] = []
        self._changes: list[Waiting] = []
        self._closed: set[int] = set()  # workers that have closed the store
        self._drained = False
        self.requests = 0

    @property
    def finished(self) -> bool:
        return self._drained and not any(self._expected)

    @property
    def n_keys(self) -> int:
        return len(self._shards) + self.rows.n_keys

    def held(self) -> Iterator[Held]:
        """Each key that this owner has all of."""
        for shard in self._shards.values():
            yield shard.held()
        yield from self.rows.held()

    # --- events

    def handle(self, worker: int, requests: Sequence[tuple[wire.Header, HostArray]]) -> list[Event]:
        """Handle one message of one worker. Payloads: uint8, not kept. Raises what the optimizer raises."""
        batch = self._batch(worker, requests) if len(requests) > 1 else None
        events: list[Event] = []
        self.requests += len(requests)
        index = 0
        for header, payload in requests:
            if header.kind in _DATA:
                shard = self._shards.get(header.key_id)
                request = (worker, header, payload, batch, index)
                if shard is None:
                    self._early.setdefault(header.key_id, []).append(request)
                else:
                    events += self._data(shard, request)
                index += header.kind != wire.PUSH
            elif header.kind in wire.ROWS:
                events += self.rows.handle(worker, header, payload)
            elif (answer := self._answers.get(header.kind)) is not None:
                events.append(ServerReply(worker, header.reply_tag, np.frombuffer(answer(payload), np.uint8)))
            elif header.kind == wire.FLUSH:
                self._flushes.append((worker, header, payload))
            elif header.kind in (wire.OPTIMIZER, wire.SAVE, wire.LOAD):
                self._changes.append((worker, header, payload))
            else:
                events += self._control(worker, header, payload)
        return self._after(events)

    def arrived(self, fetch: Fetch, data: HostArray) -> list[Event]:
        """Handle a partition that was fetched. data: what `target` returned, or an array for `Pool.refer`."""
        self._expected[fetch.push.worker] -= 1
        if fetch.shard is None:
            return []
        return self._after(fetch.shard.arrived(fetch.push, fetch.partition, data))

    @staticmethod
    def target(fetch: Fetch) -> HostArray:
        if fetch.shard is None:
            return np.empty(fetch.n_bytes, np.uint8)
        return fetch.shard.target(fetch.push, fetch.partition)

    def _after(self, events: list[Event]) -> list[Event]:
        """Count the partitions to be fetched; where none is on its way, handle what waited for that."""
        self._count_fetches(events)
        if self._flushes:
            ready = [waiting for waiting in self._flushes if not self._expected[waiting[0]]]
            self._flushes = [waiting for waiting in self._flushes if self._expected[waiting[0]]]
            events += [self._acknowledge(worker, header) for worker, header, _ in ready]
        while self._changes and not any(self._expected):
            worker, header, payload = self._changes.pop(0)
            change = {wire.OPTIMIZER: self._set_optimizer, wire.SAVE: self._save, wire.LOAD: self._load}[header.kind]
            events.append(change(worker, header, payload))
        if len(self._closed) == len(self._labels) and not self._drained and not any(self._expected):
            self._drained = True
            events += self._count_fetches([event for shard in self._shards.values() for event in shard.drain()])
        return events

    def _count_fetches(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Fetch):
                self._expected[event.push.worker] += 1
        return events

    # --- data

    def _batch(self, worker: int, requests: Sequence[tuple[wire.Header, HostArray]]) -> Batch | None:
        """The common reply to the pulls of one message, which have one reply tag; None for fewer than two."""
        pulls = [header for header, _ in requests if header.kind in (wire.PULL, wire.PUSHPULL)]
        return Batch(worker, pulls[0].reply_tag, pulls[0].priority, len(pulls)) if len(pulls) > 1 else None

    @staticmethod
    def _data(shard: ServedShard, request: _Data) -> list[Event]:
        worker, header, payload, batch, index = request
        events: list[Event] = []
        if header.kind != wire.PULL:
            events = shard.push(worker, header, None if header.payload_tag else payload)
        if header.kind != wire.PUSH:
            uncompressed = bool(header.flags & wire.UNCOMPRESSED_ANSWER)
            by_loopback = bool(header.flags & wire.LOOPBACK_ANSWER)
            tag, version, priority = header.reply_tag, header.round, header.priority
            events += shard.pull(PendingPull(worker, tag, version, priority, batch, index, uncompressed, by_loopback))
        return events

    # --- keys

    def _control(self, worker: int, header: wire.Header, payload: HostArray) -> list[Event]:
        if header.kind == wire.INIT:
            return self._init(header, payload)
        if header.kind == wire.ATTRIBUTES:
            slot, attributes = json.loads(payload.tobytes())
            self.owner.add_attributes(slot, worker, header.attributes_id, attributes)
            return []
        if header.kind == wire.REMOVE:
            shard = self._shards.pop(header.key_id, None)
            return [] if shard is None else shard.remove()
        if header.kind == wire.REFUSE:
            return [Refusal(header.key_id, header.round, "")]
        if header.kind == wire.BYE:
            self._closed.add(worker)
            return []
        raise MpikvError(f"a request of unknown kind {header.kind} from {self._labels[worker]}")

    def _init(self, header: wire.Header, payload: HostArray) -> list[Event]:
        text, data = wire.split_text(payload)
        info = KeyInfo(text["key"], header.key_id, tuple(text["shape"]), dtype_of(text["dtype"]), text["codec"])
        codecs = compression.of_text(info.codec)
        on_device = self._copies is not None and text["space"] == DEVICE and codecs.pull == IDENTITY
        info = info._replace(space=DEVICE if on_device else HOST)
        values = np.frombuffer(data.tobytes(), info.dtype)
        # A key that is moved here from other servers keeps the count of its rounds.
        shard = ServedShard(
            info,
            values,
            begin=text["begin"],
            partition_elems=text["part"],
            whole=text["whole"],
            compression=codecs,
            version=text["version"],
            owner=self.owner,
            pool=self.pool,
            copies=self._copies if on_device else None,
            pushers=text["pushers"] or range(len(self._labels)),
            policy=self._policy,
            labels=self._labels,
            recorder=self.recorder,
        )
        shard.answers = text["answers"]
        self._shards[info.id] = shard
        events: list[Event] = []
        for request in self._early.pop(info.id, []):
            events += self._data(shard, request)
        return events

    # --- optimizers and their states

    def _set_optimizer(self, worker: int, header: wire.Header, payload: HostArray) -> ServerReply:
        try:
            slot, optimizer, key_ids = cloudpickle.loads(payload.tobytes())
        except Exception as error:  # noqa: BLE001 - unpickling runs the user's code; worker 0 raises the error
            return self._acknowledge(worker, header, f"a server cannot unpickle the optimizer: {error!r}")
        self.owner.set_optimizer(slot, optimizer, key_ids)
        for shard in self._shards.values():
            if self.owner.slot_of(shard.info.id) == slot:
                shard.forget_states()
        return self._acknowledge(worker, header)

    def _save(self, worker: int, header: wire.Header, _payload: HostArray) -> ServerReply:
        parts = [part for shard in self._shards.values() for part in shard.states()] + self.rows.states()
        return ServerReply(worker, header.reply_tag, np.frombuffer(records_to_bytes(parts), np.uint8))

    def _load(self, worker: int, header: wire.Header, payload: HostArray) -> ServerReply:
        replaced, data = wire.split_text(payload)
        pieces: dict[Any, list[Any]] = {}
        parts = records_from_bytes(data.tobytes())
        self.rows.load(parts, replaced)
        for part in parts:
            pieces.setdefault(part.key, []).append(part)
        for shard in self._shards.values():
            mine = [(p.begin - shard.begin, p.end - shard.begin, p.state) for p in pieces.get(shard.info.key, [])]
            if mine or shard.info.id in replaced:
                shard.set_states(mine)
        return self._acknowledge(worker, header)

    @staticmethod
    def _acknowledge(worker: int, header: wire.Header, text: str = "") -> ServerReply:
        return ServerReply(worker, header.reply_tag, np.frombuffer(b"\0" + text.encode(), np.uint8))
