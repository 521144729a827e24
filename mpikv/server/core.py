"""The server as a pure state machine: requests in, replies out. No MPI, no clock, no environment.

It holds shards of values, applies what the policy releases, and answers pulls when the version they need exists. A
request for a key that has not arrived yet waits for it, since worker 0 sends a key's first value while others may
already push.

Cost: one copy of a shard for each version that is pulled, shared by all workers that pull it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from mpikv import wire
from mpikv.arrays import HostArray, dtype_of, sum_dtype
from mpikv.errors import MpikvError
from mpikv.keys import KeyInfo
from mpikv.optimizers.owner import Owner
from mpikv.optimizers.states import Part, parts_from_bytes, parts_to_bytes
from mpikv.server.policy import Policy


class Reply(NamedTuple):
    """Send `data` to `worker` with `tag`. The array never changes afterwards."""

    worker: int
    tag: int
    data: HostArray


class _Pull(NamedTuple):
    worker: int
    tag: int
    version: int


class _Shard:
    def __init__(self, info: KeyInfo, begin: int, values: HostArray, version: int, policy: Policy) -> None:
        self.info = info
        self.begin = begin
        self.values = values
        self.policy = policy
        self.version = version
        self.pulls: list[_Pull] = []
        self._snapshot: HostArray | None = None

    def snapshot(self) -> HostArray:
        """The values as they are now, in memory that no update touches."""
        if self._snapshot is None:
            self._snapshot = self.values.copy()
        return self._snapshot

    def changed(self) -> None:
        self.version += 1
        self._snapshot = None


class ServerCore:
    """All that one server owns.

    labels: the workers' names in errors. policy(workers, version): makes the policy of a new shard.
    """

    def __init__(self, labels: list[str], policy: Callable[[int, int], Policy]) -> None:
        self.owner = Owner()
        self._labels = labels
        self._policy = policy
        self._shards: dict[int, _Shard] = {}
        self._early: dict[int, list[tuple[int, wire.Header, HostArray]]] = {}
        self._gone: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether every worker has said goodbye."""
        return len(self._gone) == len(self._labels)

    def handle(self, worker: int, header: wire.Header, payload: HostArray) -> list[Reply]:
        """One request of one worker. payload: uint8, becomes the server's own. Raises what the optimizer raises."""
        if header.kind in (wire.PUSH, wire.PULL, wire.PUSHPULL):
            shard = self._shards.get(header.key_id)
            if shard is None:
                self._early.setdefault(header.key_id, []).append((worker, header, payload))
                return []
            return self._data(shard, worker, header, payload)
        handlers: dict[int, Callable[[int, wire.Header, HostArray], list[Reply]]] = {
            wire.INIT: self._init,
            wire.ATTRIBUTES: self._set_attributes,
            wire.OPTIMIZER: self._set_optimizer,
            wire.FLUSH: self._flush,
            wire.SAVE: self._save,
            wire.LOAD: self._load,
            wire.REMOVE: self._remove,
            wire.BYE: self._bye,
        }
        handler = handlers.get(header.kind)
        if handler is None:
            raise MpikvError(f"a request of unknown kind {header.kind} from {self._labels[worker]}")
        return handler(worker, header, payload)

    # --- data

    def _data(self, shard: _Shard, worker: int, header: wire.Header, payload: HostArray) -> list[Reply]:
        replies: list[Reply] = []
        if header.kind in (wire.PUSH, wire.PUSHPULL):
            replies += self._push(shard, worker, header, payload)
        if header.kind in (wire.PULL, wire.PUSHPULL):
            shard.pulls.append(_Pull(worker, header.reply_tag, header.round if shard.policy.counts else 0))
            replies += self._answer(shard)
        return replies

    def _push(self, shard: _Shard, worker: int, header: wire.Header, payload: HostArray) -> list[Reply]:
        gradient = payload.view(shard.info.dtype)
        if gradient.size != shard.values.size:
            raise MpikvError(
                f"{self._labels[worker]} pushed {gradient.size} elements of key {shard.info.key!r}, "
                f"of which {shard.values.size} live here"
            )
        attributes = (worker, header.attributes_id)
        updates = shard.policy.push(worker, gradient.astype(sum_dtype(shard.info.dtype), copy=False), attributes)
        for update in updates:
            self.owner.apply(shard.info, shard.values, update.total, update.attributes)
            shard.changed()
        return self._answer(shard) if updates else []

    def _answer(self, shard: _Shard) -> list[Reply]:
        """Answer every pull whose version exists."""
        ready = [pull for pull in shard.pulls if pull.version <= shard.version]
        shard.pulls = [pull for pull in shard.pulls if pull.version > shard.version]
        return [Reply(pull.worker, pull.tag, shard.snapshot()) for pull in ready]

    # --- keys

    def _init(self, _worker: int, header: wire.Header, payload: HostArray) -> list[Reply]:
        text, data = wire.split_text(payload)
        info = KeyInfo(text["key"], header.key_id, tuple(text["shape"]), dtype_of(text["dtype"]))
        values = np.frombuffer(data.tobytes(), info.dtype).copy()
        # A key that moves here from other servers goes on with the rounds it has seen there.
        version = text["version"]
        shard = _Shard(info, text["begin"], values, version, self._policy(len(self._labels), version))
        self._shards[info.id] = shard
        replies: list[Reply] = []
        for request in self._early.pop(info.id, []):
            replies += self._data(shard, *request)
        return replies

    def _remove(self, _worker: int, header: wire.Header, _payload: HostArray) -> list[Reply]:
        self._shards.pop(header.key_id, None)
        self.owner.states.pop(header.key_id, None)
        return []

    # --- optimizers and their states

    def _set_attributes(self, worker: int, header: wire.Header, payload: HostArray) -> list[Reply]:
        slot, attributes = json.loads(payload.tobytes())
        self.owner.add_attributes(slot, worker, header.attributes_id, attributes)
        return []

    def _set_optimizer(self, worker: int, header: wire.Header, payload: HostArray) -> list[Reply]:
        try:
            slot, optimizer, key_ids = cloudpickle.loads(payload.tobytes())
        except Exception as error:  # noqa: BLE001 - unpickling runs code of the user's; worker 0 tells him
            return [self._acknowledge(worker, header, f"a server cannot unpickle the optimizer: {error!r}")]
        self.owner.set_optimizer(slot, optimizer, key_ids)
        return [self._acknowledge(worker, header)]

    def _save(self, worker: int, header: wire.Header, _payload: HostArray) -> list[Reply]:
        parts = [
            Part(shard.info.key, shard.begin, shard.begin + shard.values.size, state)
            for key_id, shard in self._shards.items()
            if (state := self.owner.states.get(key_id)) is not None
        ]
        return [Reply(worker, header.reply_tag, np.frombuffer(parts_to_bytes(parts), np.uint8))]

    def _load(self, worker: int, header: wire.Header, payload: HostArray) -> list[Reply]:
        by_key: dict[Any, _Shard] = {shard.info.key: shard for shard in self._shards.values()}
        replaced, data = wire.split_text(payload)
        for key_id in replaced:
            self.owner.states.pop(key_id, None)
        for part in parts_from_bytes(data.tobytes()):
            self.owner.states[by_key[part.key].info.id] = part.state
        return [self._acknowledge(worker, header)]

    # --- order and end

    @staticmethod
    def _acknowledge(worker: int, header: wire.Header, text: str = "") -> Reply:
        return Reply(worker, header.reply_tag, np.frombuffer(b"\0" + text.encode(), np.uint8))

    def _flush(self, worker: int, header: wire.Header, _payload: HostArray) -> list[Reply]:
        # Messages of one worker arrive in order, and each is applied when it is handled.
        return [self._acknowledge(worker, header)]

    def _bye(self, worker: int, _header: wire.Header, _payload: HostArray) -> list[Reply]:
        self._gone.add(worker)
        return []
