"""A worker's calls with keys whose arrays are on its GPU, and whose values live with servers.

Servers receive into host memory, also those that keep the key on a GPU; but not from the worker that they are in. Each
shard of such a key goes one of three paths (`DeviceCalls.direct`, `DeviceCalls.handed`):

- *Directly*, where the workers have settled on the path "mpi": MPI sends it from device memory and receives the answer
  there. Only a shard that travels by itself, uncompressed, to a server that is not reached through the host's memory.
- *Handed over*, to the server inside this worker, where the answer is not for an array in host memory: a copy on the
  GPU each (transports/loopback.py). Only a shard that travels by itself, uncompressed.
- *Staged*: it is copied to page-locked memory and sent from there; the answer comes into the same memory and is copied
  up. Where the shard goes through the memory that a host's ranks share, the page-locked memory is part of that. A
  push that a codec encodes on the GPU (device_pieces.py) is copied down as its messages; an answer for arrays on the
  GPU alone that a codec decodes there is copied up as its messages.

Nobody waits for a copy. A call begins its copies when what it pushes is there, and its messages leave when the store's
stream has come so far. Until then the call stands in a line, and so does every call that is made after it, also of keys
in host memory: servers must see the calls of a worker in their order. The messages themselves are those of
`Client.exchange`, which sees host memory, or device memory that nothing is under way in.

An array of the caller's in host memory takes an answer as for a key in host memory, without the GPU.

Cost of a call with n elements: staged, n down for a push, n up for an answer; direct, none. An event of the stream for
each call. Memory: page-locked, of each length as many arrays as calls were under way at one time, which are kept; on
the GPU the pushed total, which the answer overwrites.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Completion, Operation, Predicate, Steps
from mpikv.hostmemory.allocator import Segment
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import DEVICE, HOST
from mpikv.strategies.base import Sink
from mpikv.strategies.client_key import ClientKey, PieceMessages, Route
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.exchange import Client, Item
from mpikv.strategies.pieces import Pieces
from mpikv.transports import wire

LEAST_BYTES, MOST_ALIKE_BYTES = 4096, 8 << 20  # lengths between them that differ little share memory


class CallBuffers:
    """Page-locked memory that calls use again. segment: of what a host's ranks share, where they do.

    It may be given back while the store's stream still copies from it: whoever takes it uses it in that stream, or when
    that has come as far as it was then.
    """

    def __init__(self, space: DeviceSpace, segment: Segment | None) -> None:
        self._space, self._segment = space, segment
        self._free: dict[tuple[int, bool], list[HostArray]] = {}  # by length, and whether others are to read it

    def take(self, n_bytes: int, *, shared: bool) -> HostArray:
        """(n_bytes or more,) of uint8. shared: in memory that other ranks of the host read, while some is left."""
        length = max(LEAST_BYTES, 1 << (n_bytes - 1).bit_length()) if n_bytes <= MOST_ALIKE_BYTES else n_bytes
        kept = self._free.get((length, shared))
        if kept:
            return kept.pop()
        memory = self._segment.take(length, pages=True) if shared and self._segment is not None else None
        return self._space.pinned.take(length) if memory is None else self._space.pinned.lock(memory)

    def give(self, memory: HostArray, *, shared: bool) -> None:
        """Take back what `take` returned."""
        self._free.setdefault((memory.size, shared), []).append(memory)


class DeviceCalls:
    """The calls of one worker. Everything here is called under the engine's lock.

    direct: whether MPI takes device memory. lost: told why a call was never sent, which other ranks count on.
    """

    def __init__(
        self,
        client: Client,
        space: DeviceSpace,
        segment: Segment | None,
        *,
        direct: bool,
        lost: Callable[[BaseException], None],
    ) -> None:
        self._client, self.space, self._direct, self._lost = client, space, direct, lost
        self.staging = CallBuffers(space, segment)
        self._line: deque[Completion] = deque()

    @property
    def waiting(self) -> bool:
        """Whether there are calls that have not been sent: none may overtake them."""
        return bool(self._line)

    def concerns(self, items: Sequence[Item]) -> bool:
        """Whether a call is to be made by `exchange`, and not by that of the client."""
        return bool(self._line) or any(item.key.info.space == DEVICE for item in items)

    def direct(self, key: ClientKey, route: Route) -> bool:
        """Whether MPI sends a shard from device memory and receives it there."""
        by_mpi = self._direct and not self._client.through_memory[route.owner]
        return by_mpi and not route.inline and key.compression.plain

    def handed(self, key: ClientKey, route: Route, places: set[str]) -> bool:
        """Whether a shard is handed over to the server in this process, and the answer by it. places: of the answer."""
        return route.owner == self._client.own and not route.inline and key.compression.plain and HOST not in places

    def shared(self, routes: Sequence[Route]) -> bool:
        """Whether a server reads some of these shards where they are, in memory of the host."""
        return any(self._client.through_memory[route.owner] and not route.inline for route in routes)

    def exchange(self, kind: int, items: Sequence[Item], priority: int) -> Steps[None]:
        """As `Client.exchange`. The items' totals are in the spaces of their keys."""
        turn = Completion()
        self._line.append(turn)
        if len(self._line) == 1:
            turn.finish()
        try:
            for item in items:  # so that the store's stream does not wait for that
                if item.total is not None and item.key.info.space == DEVICE:
                    yield self.space.written(item.total)
            keys = [_KeyCall(self, item) for item in items if item.key.info.space == DEVICE]
            sent = [item for item in items if item.key.info.space != DEVICE]
            sent += [item for key in keys for item in key.items]
            ready = [request for key in keys for request in key.arrivals]
            if keys:
                ready.append(self.space.stream_event())
            yield turn
            yield from ready
            needed = self._client.tags_needed(sent)
            if not self._client.allows(*needed):
                yield Predicate(lambda: self._client.allows(*needed))
        except Exception as error:
            if kind != wire.PULL:
                self._lost(error)
            raise
        finally:
            self._line.remove(turn)
            if self._line:
                self._line[0].finish()
        yield from self._client.exchange(kind, sent, priority)  # which sends everything before it waits
        for key in keys:
            key.deliver()


class _Into:
    """A `Target` for messages alone."""

    def __init__(self, memory: SpaceArray | PieceMessages) -> None:
        self._memory = memory

    def buffer(self) -> SpaceArray | PieceMessages:
        """The memory."""
        return self._memory

    def deliver(self, value: SpaceArray | PieceMessages) -> None:
        """Whoever made the call does, once all of a key is here."""


class _KeyCall:
    """One key of a call. Its copies down begin when it is made.

    items: what is to be sent and received. arrivals: what has to be waited for beside the store's stream.
    """

    def __init__(self, calls: DeviceCalls, item: Item) -> None:
        self._calls, self._item = calls, item
        info, total = item.key.info, item.total
        assert item.sink is None or isinstance(item.sink, Sink)
        self._sink = item.sink
        self._places = set() if self._sink is None else self._sink.places
        handed = [route for route in item.routes if calls.handed(item.key, route, self._places)]
        direct = [route for route in item.routes if route not in handed and calls.direct(item.key, route)]
        self._staged = [route for route in item.routes if route not in handed and route not in direct]
        self._memory: list[HostArray] = []
        self._on_host: SpaceArray = None
        self._on_device: SpaceArray = total
        if total is None and DEVICE in self._places:
            self._on_device = calls.space.empty(info.n_elems, info.dtype)
        encodes = total is not None and item.key.encodes_on_device(plain=item.pushes_plain)
        decodes = self._places == {DEVICE} and item.key.decodes_on_device(plain=item.answered_plain)
        up = DEVICE in self._places and (bool(self._staged) or HOST in self._places) and not decodes
        if up or (total is not None and self._staged and not encodes):
            self._on_host = self._take(info.n_elems * info.dtype.itemsize).view(info.dtype)
        # What a message is received into: this worker's own arrays, the memory for copies, or the GPU's.
        only_host = None if self._sink is None or DEVICE in self._places else self._sink.buffer()
        self._result = self._on_host if only_host is None else only_host
        if decodes:
            self._result = PieceMessages(self._memory_of(item.key.returned_here))
        directly = self._on_device if self._places == {DEVICE} else self._result
        self.arrivals: list[Operation] = []
        if total is not None and (direct or handed):
            self.arrivals.append(calls.space.written(total))
        pushed = self._on_host
        if encodes:
            pushed = self._encoded(item.key, total)
        elif total is not None:
            for begin, end in _runs(self._staged):
                calls.space.download(self._on_host[begin:end], total[begin:end])
        self.items = [
            item._replace(
                total=None if total is None else array,
                sink=None if self._sink is None else _Into(into),
                routes=routes,
                plain=item.plain | flags,
            )
            for array, into, routes, flags in (
                (pushed, self._result, self._staged, 0),
                (self._on_device, directly, direct, 0),
                (self._on_device, self._on_device, handed, wire.HANDED_PUSH | wire.HANDED_ANSWER),
            )
            if routes
        ]

    def _take(self, n_bytes: int) -> HostArray:
        """Page-locked memory, until the call is done."""
        memory = self._calls.staging.take(n_bytes, shared=self._shared)
        self._memory.append(memory)
        return memory[:n_bytes]

    def _encoded(self, key: ClientKey, total: SpaceArray) -> PieceMessages:
        """The messages of a push, which are encoded on the GPU and on their way to the host."""
        messages = self._memory_of(key.encoded)
        assert isinstance(key.encoded, DevicePieces)
        self._calls.space.wait_for_callers(total)
        for part, data in key.encoded.encode_all(total, messages).items():
            self._calls.space.download(messages[part], data)
        return PieceMessages(messages)

    def _memory_of(self, pieces: Pieces) -> dict[Span, HostArray]:
        """For the messages of all pieces that are staged."""
        parts = [part for route in self._staged for part in route.parts]
        return {part: self._take(pieces.wire_bytes(part)) for part in parts}

    @property
    def _shared(self) -> bool:
        return self._calls.shared(self._staged)

    def deliver(self) -> None:
        """All has been sent and is here: bring it to the caller's arrays, and give the memory back."""
        space = self._calls.space
        if DEVICE in self._places:
            assert self._sink is not None
            if isinstance(self._result, PieceMessages):
                for (begin, end), message in self._result.by_piece.items():
                    self._item.key.returned_here.put(message, self._on_device[begin:end])
            elif self._on_host is not None:
                every = HOST in self._places
                for begin, end in [(0, self._on_host.size)] if every else _runs(self._staged):
                    space.upload(self._on_device[begin:end], self._on_host[begin:end])
            self._sink.deliver(self._on_device, self._on_host if HOST in self._places else None)
        elif self._sink is not None:
            self._sink.deliver(self._result)
        for memory in self._memory:
            self._calls.staging.give(memory, shared=self._shared)


def _runs(routes: Sequence[Route]) -> list[tuple[int, int]]:
    """The elements of shards, which are in order: those that lie side by side are copied together."""
    runs: list[tuple[int, int]] = []
    for route in routes:
        if runs and runs[-1][1] == route.begin:
            runs[-1] = runs[-1][0], route.end
        else:
            runs.append((route.begin, route.end))
    return runs
