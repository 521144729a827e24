"""Parameter servers: the values live with servers, which are ranks of their own or a service inside every worker.

A push is one message per shard, without acknowledgement, since MPI loses nothing. A pull names the version that it
needs (synchronous) or none (asynchronous), and the server answers when it exists. A pushpull is one message out and one
back. Worker 0 sends a key's first value; whatever reaches a server before it waits there.

Cost per push and worker: one message and one copy per shard. The servers are the same code in all modes; what differs
is their policy.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from mpikv import wire
from mpikv.arrays import HostArray
from mpikv.config import Config
from mpikv.errors import ConfigError, MpikvError
from mpikv.keys import Key, KeyInfo, Shard, ShardPlan, add_load, server_plan
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import DEFAULT_SLOT
from mpikv.optimizers.states import parts_from_bytes, parts_to_bytes
from mpikv.strategies.base import Pending, Sink
from mpikv.strategies.distributed import DistributedStrategy
from mpikv.strategies.states import chosen, distribute, read_file, restored, write_file
from mpikv.strategies.workers import Predicate, Workers
from mpikv.transports.base import Arrival, Done, Request, Steps, Transport


class _Key:
    """One key as its client sees it."""

    def __init__(self, info: KeyInfo, plan: ShardPlan) -> None:
        self.info = info
        self.plan = plan
        self.pushed = 0


class PsStrategy(DistributedStrategy):
    """A worker of a store whose values live with servers.

    workers, servers: ranks of the transport. service: a server's loop to run inside this worker, or None.
    """

    def __init__(
        self,
        transport: Transport,
        workers: Sequence[int],
        servers: Sequence[int],
        config: Config,
        *,
        synchronous: bool,
        threaded: bool,
        on_fatal: Callable[[BaseException], None],
        service: Steps[None] | None = None,
    ) -> None:
        self.synchronous = synchronous
        self._config = config
        self._servers = tuple(servers)
        self._labels = [f"server {i} (rank {rank} on {transport.hosts[rank]})" for i, rank in enumerate(servers)]
        self._keys: dict[int, _Key] = {}
        self._first_values: dict[Key, HostArray] = {}  # at worker 0, of keys that are being agreed on
        self._loads = [0] * len(self._servers)
        self._whole = False
        self._free_tags = deque(range(wire.TAG_REPLY, wire.TAG_REPLY + wire.REPLY_TAGS))
        self._sends: deque[Request] = deque()
        self._workers = Workers(transport, workers, config, self, threaded=threaded, on_fatal=on_fatal)
        self._engine = self._workers.engine
        self._service = self._engine.serve(service, "server") if service is not None else None
        self.rank = self._workers.group.rank
        self.num_workers = self._workers.group.size

    # --- placement

    def reserve(self, key_id: int, n_elems: int, itemsize_bytes: int) -> Any:
        """At worker 0: the key's shards, balanced by bytes."""
        plan = server_plan(n_elems, self._loads, self._config.bigarray_bound_elems, whole=self._whole)
        add_load(self._loads, plan, itemsize_bytes)
        return [list(shard) for shard in plan]

    def begin(self, info: KeyInfo, reserved: Any) -> None:
        """Note where the key lives; worker 0 sends its value there."""
        key = _Key(info, tuple(Shard(*shard) for shard in reserved))
        self._keys[info.id] = key
        if self.rank == 0:
            self._send_value(key, self._first_values.pop(info.key))

    def agreed(self, info: KeyInfo) -> None:
        """Nothing to do in the order of the verdicts."""

    def broken(self, info: KeyInfo) -> None:
        """A key that `init` returned for already turned out to differ between workers: forget it."""
        self._keys.pop(info.id, None)

    def pushes(self) -> dict[int, int]:
        """How often this worker has pushed each key."""
        return {key_id: key.pushed for key_id, key in self._keys.items()}

    # --- messages

    def _send(self, server: int, header: wire.Header, payload: HostArray | bytes | None = None) -> None:
        message = wire.request(header, payload)
        with self._engine.lock:
            while self._sends and self._sends[0].test():
                self._sends.popleft()
            self._sends.append(self._workers.transport.isend(message, self._servers[server], wire.TAG_REQUEST))

    def _all_sent(self) -> bool:
        while self._sends and self._sends[0].test():
            self._sends.popleft()
        return not self._sends

    def _reply_tag(self) -> int:
        """A tag that no outstanding reply uses."""
        if not self._free_tags:
            self._workers.wait_for(Predicate(lambda: bool(self._free_tags)), "wait for earlier pulls")
        return self._free_tags.popleft()

    def _ask(self, kind: int, payloads: Sequence[bytes | None], call: str) -> list[bytes]:
        """Send each server a request and return their answers, whatever their length. Blocks."""

        def answer(tag: int) -> Steps[bytes]:
            arrival = Arrival(self._workers.transport, tag)
            yield arrival
            data = np.empty(arrival.incoming.n_bytes, np.uint8)
            yield arrival.incoming.receive(data)
            self._free_tags.append(tag)
            return data.tobytes()

        answers = []
        for server, payload in enumerate(payloads):
            tag = self._reply_tag()
            self._send(server, wire.Header(kind, reply_tag=tag), payload)
            answers.append(self._engine.start(answer(tag), call))
        for server, running in enumerate(answers):
            self._workers.wait_for(running, call, (self._labels[server],))
        return [running.result or b"" for running in answers]

    # --- keys

    def init(self, values: Sequence[tuple[Key, tuple[int, ...], HostArray]]) -> None:
        """Agree; worker 0 sends the values to their servers."""
        if self.rank == 0:
            self._first_values.update((key, value) for key, _, value in values)
        _, error = self._workers.agree_on_keys([(key, shape, str(value.dtype)) for key, shape, value in values])
        for key, _, _ in values:
            self._first_values.pop(key, None)
        if error is not None:
            raise error

    def _send_value(self, key: _Key, value: HostArray) -> None:
        info = key.info
        for shard in key.plan:
            text = {"key": info.key, "shape": info.shape, "dtype": str(info.dtype), "begin": shard.begin}
            text["version"] = key.pushed
            payload = wire.with_text(json.dumps(text).encode(), value[shard.begin : shard.end].tobytes())
            self._send(shard.owner, wire.Header(wire.INIT, info.id), payload)

    # --- data

    def _start_push(self, info: KeyInfo) -> tuple[_Key, int]:
        """Count a push, and send changed attributes ahead of it."""
        key = self._keys[info.id]
        slot = self._workers.slot_of(info)
        if not self.synchronous and self._workers.attributes.optimizer(slot) is None:
            raise MpikvError(
                f"push of key {info.key!r}: an asynchronous store needs set_optimizer before the first push"
            )
        number, attributes = self._workers.attributes.number(slot)
        if attributes is not None:
            text = json.dumps([slot, attributes]).encode()
            for server in range(len(self._servers)):
                self._send(server, wire.Header(wire.ATTRIBUTES, attributes_id=number), text)
        key.pushed += 1
        self._workers.control.activity.note(f"push of key {info.key!r}")
        return key, number

    def push(self, info: KeyInfo, total: HostArray, priority: int) -> Pending:
        """One message per shard."""
        key, number = self._start_push(info)
        for shard in key.plan:
            header = wire.Header(wire.PUSH, info.id, 0, number, key.pushed)
            self._send(shard.owner, header, total[shard.begin : shard.end])
        return Pending(Done(), Waiting("push", info.key, info.id))

    def pull(self, info: KeyInfo, sink: Sink, priority: int) -> Pending:
        """One question and one answer per shard."""
        key = self._keys[info.id]
        return self._receive(key, "pull", wire.Header(wire.PULL, info.id), None, sink)

    def pushpull(self, info: KeyInfo, total: HostArray, sink: Sink, priority: int) -> Pending:
        """One message out and one back per shard."""
        key, number = self._start_push(info)
        header = wire.Header(wire.PUSHPULL, info.id, attributes_id=number)
        return self._receive(key, "pushpull", header, total, sink)

    def _receive(self, key: _Key, call: str, header: wire.Header, total: HostArray | None, sink: Sink) -> Pending:
        info, transport = key.info, self._workers.transport
        tags = [self._reply_tag() for _ in key.plan]

        def steps() -> Steps[None]:
            value = sink.buffer()
            receives = []
            for shard, tag in zip(key.plan, tags, strict=True):
                # The receive is there before the question leaves, so that the answer needs no copy on its way.
                receives.append(transport.irecv(value[shard.begin : shard.end], self._servers[shard.owner], tag))
                part = None if total is None else total[shard.begin : shard.end]
                self._send(shard.owner, header._replace(reply_tag=tag, round=key.pushed), part)
            yield from receives
            self._free_tags.extend(tags)
            sink.deliver(value)

        owners = tuple(self._labels[shard.owner] for shard in key.plan)
        waiting = Waiting(call, info.key, info.id, key.pushed if self.synchronous else None, owners)
        return Pending(self._engine.start(steps(), str(waiting)), waiting)

    # --- optimizers

    def _flush(self, call: str) -> None:
        """Wait until every server has handled all that this worker sent; rounds may still lack other workers."""
        self._ask(wire.FLUSH, [None] * len(self._servers), call)

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Worker 0 sends it to the servers; keys that it needs whole are moved together first."""
        self._flush("set_optimizer")
        slot, key_ids, pickled = self._workers.agree_on_optimizer(optimizer, keys)
        if slot == DEFAULT_SLOT:
            self._whole = not optimizer.elementwise
        if not optimizer.elementwise:
            self._gather_cut_keys(slot)

        def send() -> None:
            payload = cloudpickle.dumps((slot, cloudpickle.loads(pickled), key_ids))
            for answer in self._ask(wire.OPTIMIZER, [payload] * len(self._servers), "set_optimizer"):
                if answer[1:]:
                    raise ConfigError(answer[1:].decode())

        self._workers.outcome("set_optimizer in place", send)

    def _gather_cut_keys(self, slot: int) -> None:
        """Move keys that are cut into shards to one server each. Collective."""
        for info in self.infos():
            key = self._keys[info.id]
            if self._workers.slot_of(info) != slot or len(key.plan) < 2:
                continue
            plan = (Shard(info.id % len(self._servers), 0, info.n_elems),)
            if self.rank == 0:
                value: HostArray = np.empty(info.n_elems, info.dtype)
                self.wait(self.pull(info, Sink(info, [value]), 0))
                for shard in key.plan:
                    self._send(shard.owner, wire.Header(wire.REMOVE, info.id))
                key.plan = plan
                self._send_value(key, value)
            key.plan = plan

    def _owned(self, server: int) -> list[tuple[KeyInfo, int, int]]:
        shards = [(key.info, shard) for key in self._keys.values() for shard in key.plan]
        return [(info, shard.begin, shard.end) for info, shard in shards if shard.owner == server]

    def save_states(self, path: str, keys: Sequence[Key] | None = None, *, dump_optimizer: bool) -> None:
        """Worker 0 asks every server for its states and writes the file."""
        self._settle("save_optimizer_states")

        def write() -> None:
            answers = self._ask(wire.SAVE, [None] * len(self._servers), "save_optimizer_states")
            parts = [parts_from_bytes(answer) for answer in answers]
            write_file(
                path, parts, chosen(self.infos(), keys), self._workers.optimizers(), dump_optimizer=dump_optimizer
            )

        self._workers.outcome("save_optimizer_states", write)

    def load_states(self, path: str) -> None:
        """Worker 0 reads and checks the file, then gives each server its part."""
        self._settle("load_optimizer_states")

        def read() -> Any:
            file = read_file(path, self._workers.infos, self._workers.optimizers())
            forget = json.dumps([self._workers.infos[key].id for key in restored(file)[0]]).encode()
            owned = [self._owned(server) for server in range(len(self._servers))]
            blobs = [wire.with_text(forget, parts_to_bytes(distribute(file, shards))) for shards in owned]
            self._ask(wire.LOAD, blobs, "load_optimizer_states")
            return restored(file)

        self._workers.restore(self._workers.outcome("load_optimizer_states", read))

    def _settle(self, call: str) -> None:
        """Wait until everything that all workers pushed so far has been applied. Collective."""
        if self.synchronous:
            for key in tuple(self._keys.values()):
                header = wire.Header(wire.PULL, key.info.id)
                self.wait(self._receive(key, call, header, None, Sink(key.info, [])))
        else:
            self._flush(call)
            self._workers.agree(call, None, call)

    # --- barrier and end

    def barrier(self) -> None:
        """Wait for all workers; then every push that came before it on any worker has been applied or counted."""
        self._flush("barrier")
        self._workers.agree("barrier", None, "barrier")

    def close(self) -> None:
        """Wait until all workers close, then say goodbye to the servers."""
        self._flush("close")
        _, error = self._workers.leave(matched=self.synchronous)
        for server in range(len(self._servers)):
            self._send(server, wire.Header(wire.BYE))
        self._workers.wait_for(Predicate(self._all_sent), "close")
        if self._service is not None:
            self._workers.wait_for(self._service, "close")
        if error is not None:
            raise error
        self._workers.stop()
        self._workers.transport.close()
