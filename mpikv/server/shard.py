"""One key's shard on one server: takes pushes, adds and updates, and answers pulls.

A *partition* is the elements that are sent in one message, a *unit* those that are added and updated at one time: one
partition, or, for an optimizer whose formula needs the whole value, all of them. The pushes of a worker are taken in
their order, a partition at a time, and only those of the round under way: a push that is a round ahead waits in its
worker's memory. So a shard needs memory for its values, their states and at most one gradient per worker, usually much
less, since the memory of an added gradient is used again.

A partition that arrives in another dtype than the sum's, or as bytes of a codec, is decoded into other memory; any
other is added in the memory that it is in, or copied to the GPU if the key is kept there (`copies`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.reductions import BY_CODE
from mpikv.codecs.base import Codec
from mpikv.codecs.base import State as CodecState
from mpikv.codecs.compression import KeyCompression
from mpikv.codecs.identity import IDENTITY
from mpikv.common.checks import shown
from mpikv.errors import MpikvError
from mpikv.observe.recorder import Recorder
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import AS_SET, AttributesId, Owner
from mpikv.optimizers.states import StateRecord, in_space, on_host, record_of
from mpikv.optimizers.step import State
from mpikv.placement.keys import KeyInfo, partitions
from mpikv.server.device_copies import DeviceCopies
from mpikv.server.events import Event, Fetch, PendingPull, Refusal, ServerReply
from mpikv.server.kept import Held
from mpikv.server.memory import Pool, ReadableMemory
from mpikv.server.policy import Contribution, Policy, RoundUpdate
from mpikv.session.rules import refusal
from mpikv.spaces.base import Space
from mpikv.transports.wire import LOOPBACK_PUSH, UNCOMPRESSED_PUSH, Header

_BYTES = np.dtype(np.uint8)


class PartitionFormat(NamedTuple):
    """How partitions are sent. dtype: of a partition then. decodes: whether they are decoded before they are added."""

    codec: Codec
    dtype: np.dtype[Any]
    decodes: bool


def _format_of(codec: Codec, dtype: np.dtype[Any]) -> PartitionFormat:
    wire_dtype = codec.wire_dtype(dtype)
    if wire_dtype is None:
        return PartitionFormat(codec, _BYTES, decodes=True)
    return PartitionFormat(codec, wire_dtype, wire_dtype != sum_dtype(dtype))


class Push:
    """One worker's push of a shard that has not arrived in full or waits for its round.

    inline: the whole payload, if that came with the header; else the partitions are fetched under `tag`. fetched,
    arrived: how many partitions have been requested, and have arrived. joined: the array for all partitions, if the
    unit consists of several.
    """

    def __init__(
        self, worker: int, round_: int, header: Header, inline: HostArray | None, format_: PartitionFormat
    ) -> None:
        self.worker, self.round, self.inline, self.format = worker, round_, inline, format_
        self.attributes: AttributesId = (worker, header.attributes_id) if header.attributes_id else AS_SET
        self.tag, self.priority, self.op = header.payload_tag, header.priority, BY_CODE[header.op]
        self.by_loopback = bool(header.flags & LOOPBACK_PUSH)
        self.fetched = self.arrived = 0
        self.joined: HostArray | None = None


@dataclass(slots=True, eq=False)
class Unit:
    """Elements `[begin, end)` of the shard that are updated at one time.

    seen: for each worker, how many of its pushes the policy has taken. encoded: partitions of this version, encoded for
    pulls, by their first elements. pull_states: the states of their codec, by the same.
    """

    begin: int
    end: int
    block: ReadableMemory
    policy: Policy
    version: int
    seen: list[int]
    state: State | None = None
    encoded: dict[int, HostArray] = field(default_factory=dict)
    pull_states: dict[int, CodecState] = field(default_factory=dict)


class ServedShard:
    """A key's shard on this server.

    begin: its first element in the key. whole: whether its optimizer needs all of it. labels: the workers' names in
    errors. pushers: the workers that push it, in the order in which their gradients are added. policy(n): makes the
    policy of a new unit with so many pushers. answers: whether pulls are asked here.
    """

    answers = True

    def __init__(
        self,
        info: KeyInfo,
        values: HostArray,
        *,
        begin: int,
        partition_elems: int,
        whole: bool,
        compression: KeyCompression,
        version: int,
        owner: Owner,
        pool: Pool,
        copies: DeviceCopies | None,
        pushers: Sequence[int],
        policy: Callable[[int], Policy],
        labels: Sequence[str],
        recorder: Recorder,
    ) -> None:
        self.info, self.begin, self._n, self._recorder = info, begin, values.size, recorder
        self.partitions = partitions(0, values.size, partition_elems)
        self._owner, self._pool, self._copies = owner, pool, copies
        self._incoming = pool if copies is None else copies  # memory that gradients are received into
        self._values = pool if copies is None else copies.values  # memory for sums and values
        self._labels, self._order = labels, {worker: i for i, worker in enumerate(pushers)}
        self._sum_dtype = sum_dtype(info.dtype)
        self._encoded, self._uncompressed = _format_of(compression.push, info.dtype), _format_of(IDENTITY, info.dtype)
        self._pull_codec = compression.pull
        self._pushed = [version] * len(labels)
        self.turn = (version, 0)  # the last round that was begun to be fetched, and its place among those of other keys
        self._waiting: list[deque[Push]] = [deque() for _ in labels]
        self._pulls: list[PendingPull] = []
        self.units = [
            Unit(first, end, self._readable(values[first:end]), policy(len(pushers)), version, [version] * len(labels))
            for first, end in ([(0, self._n)] if whole else self.partitions)
        ]
        self._counts = self.units[0].policy.counts

    def _readable(self, values: HostArray) -> ReadableMemory:
        return ReadableMemory(self._values.copy(values), self._values.give)

    def _unit(self, partition: int) -> Unit:
        return self.units[partition if len(self.units) > 1 else 0]

    # --- states

    def states(self) -> list[StateRecord]:
        return [
            record_of(self.info, self.begin + unit.begin, self.begin + unit.end, on_host(unit.state))
            for unit in self.units
            if unit.state is not None
        ]

    def set_states(self, pieces: Sequence[tuple[int, int, State]]) -> None:
        """Replace the states. pieces: (begin, end, state) of the shard's units; others get no state."""
        for unit in self.units:
            mine = [state for begin, end, state in pieces if (begin, end) == (unit.begin, unit.end)]
            unit.state = mine[0] if mine else None
            if self._copies is not None and unit.state is not None:
                unit.state = in_space(unit.state, self._copies.space)

    def held(self) -> Held:
        """All of a key that is whole here, and updated as a whole."""
        (unit,) = self.units

        def read() -> dict[str, Any]:
            space = Space() if self._copies is None else self._copies.space
            state = None if unit.state is None else on_host(unit.state)
            return {"value": space.to_host(unit.block.array), "state": state}

        return Held(self.info.key, unit.seen, self.answers, read)

    def forget_states(self) -> None:
        for unit in self.units:
            unit.state = None

    def remove(self) -> list[Event]:
        """Give the memory of the values back, which will hardly be used again: the key goes on elsewhere."""
        for unit in self.units:
            unit.block.retire()
        self._pool.trim()
        return self.drain()

    # --- pushes

    def push(self, worker: int, header: Header, inline: HostArray | None) -> list[Event]:
        """Take a worker's next push now, or, where it is of a later round, when that round begins."""
        format_ = self._uncompressed if header.flags & UNCOMPRESSED_PUSH else self._encoded
        if inline is not None and inline.size != (n_bytes := format_.codec.wire_bytes(self._n, self.info.dtype)):
            raise MpikvError(
                f"{self._labels[worker]} pushed {inline.size} bytes of key {shown(self.info.key)}, "
                f"of which {n_bytes} live here"
            )
        self._pushed[worker] += 1
        self._waiting[worker].append(Push(worker, self._pushed[worker], header, inline, format_))
        return self._advance(worker)

    def _advance(self, worker: int) -> list[Event]:
        """Take, or fetch, those pushes of this worker that belong to the round under way."""
        events: list[Event] = []
        queue = self._waiting[worker]
        while queue:
            push = queue[0]
            if push.inline is not None:
                if self._counts and self.units[0].version != push.round - 1:
                    break
                queue.popleft()
                data = push.inline.view(push.format.dtype)  # a shard whose pushes are inline has one partition
                gradient = self._incoming.take(self._n, self._sum_dtype)
                if push.format.decodes:
                    push.format.codec.decode(data, gradient)
                else:
                    gradient[...] = data
                events += self._contribute(self.units[0], push, gradient)
                continue
            while push.fetched < len(self.partitions):
                if self._counts and self._unit(push.fetched).version != push.round - 1:
                    break
                events.append(Fetch(self, push, push.fetched))
                push.fetched += 1
            break
        return events

    def borrows(self, push: Push) -> bool:
        """Whether partitions can stay in their workers' memory: not where they are joined without decoding."""
        return push.format.decodes or (self._apart and self._copies is None)

    @property
    def _apart(self) -> bool:
        return len(self.units) > 1 or len(self.partitions) == 1

    def partition_bytes(self, push: Push, partition: int) -> int:
        begin, end = self.partitions[partition]
        return push.format.codec.wire_bytes(end - begin, self.info.dtype)

    def target(self, push: Push, partition: int) -> HostArray:
        """Return memory to receive a partition into, as it is sent; by loopback in the dtype of the sum."""
        if self.borrows(push) and not push.by_loopback:
            dtype = push.format.dtype
            return self._pool.take(self.partition_bytes(push, partition) // dtype.itemsize, dtype)
        return self._array_for(push, partition)

    def _array_for(self, push: Push, partition: int) -> HostArray:
        """Memory for a partition in the dtype of the sum: its own, or a range of the push's `joined` array."""
        begin, end = self.partitions[partition]
        memory = self._values if push.by_loopback else self._incoming
        if self._apart:
            return memory.take(end - begin, self._sum_dtype)
        if push.joined is None:
            push.joined = memory.take(self._n, self._sum_dtype)
        return push.joined[begin:end]

    def arrived(self, push: Push, partition: int, data: HostArray) -> list[Event]:
        """Handle a partition that has arrived. data: see `ServerCore.arrived`."""
        push.arrived += 1
        if push.format.decodes and not push.by_loopback:
            wide = self._array_for(push, partition)
            push.format.codec.decode(data, wide)
            self._pool.give(data)
            data = wide
        last = push.arrived == len(self.partitions)
        if last:
            self._waiting[push.worker].popleft()
        events: list[Event] = []
        if push.joined is None:
            events = self._contribute(self._unit(partition), push, data)
        elif last:
            events = self._contribute(self.units[0], push, push.joined)
        if last:
            events += self._advance(push.worker)
        return events

    def drain(self) -> list[Event]:
        """Fetch all that workers still hold for rounds that will never be complete, so that their sends end."""
        events: list[Event] = []
        for queue in self._waiting:
            for push in queue:
                if push.inline is None:
                    rest = range(push.fetched, len(self.partitions))
                    events += [Fetch(None, push, i, self.partition_bytes(push, i)) for i in rest]
            queue.clear()
        return events

    def _contribute(self, unit: Unit, push: Push, gradient: HostArray) -> list[Event]:
        if self._copies is not None and not push.by_loopback:
            gradient = self._copies.up(gradient)
        recorder = self._recorder
        part = None
        if recorder.on:
            part = recorder.begin([self.info.key, push.worker], push.round, gradient.nbytes)
            part.done("arrived")
        unit.seen[push.worker] += 1
        update = unit.policy.push(
            self._order[push.worker], Contribution(gradient, push.attributes, push.op), self._values
        )
        if update is None:
            return []
        if labels := self._owner.different(self.info.id, update.pushed):
            # The version does not change, so no pull is answered and no further push is taken.
            for term in update.terms:
                self._values.give(term)
            names = [self._labels[worker] for worker in self._order]
            round_ = unit.version + 1
            return [Refusal(self.info.id, round_, refusal(self.info.key, round_, labels, names))]
        self._apply(unit, update)
        unit.version += 1
        if part is not None:
            part.done("update")
        unit.encoded = {}
        events = self._answer()
        if self._counts:
            for worker, queue in enumerate(self._waiting):
                if queue:
                    events += self._advance(worker)
        return events

    def _apply(self, unit: Unit, update: RoundUpdate) -> None:
        optimizer, terms = self._owner.optimizer_of(self.info.id), update.terms
        if optimizer is None or not optimizer.sums:
            terms = (functools.reduce(lambda one, other: self._values.combine(one, other, update.op.combine), terms),)
            update.op.finish(terms[0], len(self._labels))
        if optimizer is None and terms[0].dtype == unit.block.array.dtype:
            unit.block.retire()
            unit.block = ReadableMemory(self._values.own(terms[0]), self._values.give)
            return
        if unit.block.readers:
            block = self._readable(unit.block.array)
            unit.block.retire()
            unit.block = block
        given = terms
        if self._copies is None and optimizer is not None and type(optimizer).update is not Optimizer.update:
            given = (terms[0].copy(),)  # a user's function may keep the array as its state, or write to it
        unit.state = self._owner.update(self.info, unit.block.array, given, update.attributes, unit.state)
        for term in terms:
            self._values.give(term)

    # --- pulls

    def pull(self, pull: PendingPull) -> list[Event]:
        if not self._counts:
            pull.version = self._pushed[pull.worker]
        events: list[Event] = []
        if not self._serve(pull, events):
            self._pulls.append(pull)
        return events

    def _answer(self) -> list[Event]:
        events: list[Event] = []
        if self._pulls:
            self._pulls = [pull for pull in self._pulls if not self._serve(pull, events)]
        return events

    def _encode(self, unit: Unit, begin: int, values: HostArray) -> HostArray:
        """A partition as it is sent, encoded once for all workers that pull this version."""
        found = unit.encoded.get(begin)
        if found is None:
            if (state := unit.pull_states.get(begin)) is None:
                state = unit.pull_states[begin] = self._pull_codec.init(values.size)
            found = self._pull_codec.encode(values, state)
            if np.may_share_memory(found, values):  # the next update changes `values`
                found = found.copy()
            found = unit.encoded[begin] = found.view(_BYTES)
        return found

    def _serve(self, pull: PendingPull, events: list[Event]) -> bool:
        """Answer the partitions of one pull whose version exists, in order. Returns whether it is complete."""
        while pull.partition < len(self.partitions):
            unit = self._unit(pull.partition)
            if (unit.version if self._counts else unit.seen[pull.worker]) < pull.version:
                return False
            begin, end = self.partitions[pull.partition]
            values = unit.block.array[begin - unit.begin : end - unit.begin]
            pull.partition += 1
            if not pull.uncompressed and self._pull_codec != IDENTITY:
                values = self._encode(unit, begin, values)
                if pull.batch is None:
                    events.append(ServerReply(pull.worker, pull.tag, values, pull.priority))
                    continue
            if self._copies is not None and not pull.by_loopback:
                block, ready = self._copies.down(values)
                if pull.batch is None:
                    events.append(ServerReply(pull.worker, pull.tag, block.array, pull.priority, block, ready))
                else:
                    pull.batch.expect(pull.index, block, ready)
            elif pull.batch is None:
                unit.block.readers += 1
                events.append(ServerReply(pull.worker, pull.tag, values, pull.priority, unit.block))
            else:
                pull.batch.add(pull.index, values)
        reply = None if pull.batch is None else pull.batch.done()
        if reply is not None:
            events.append(reply)
        return True
