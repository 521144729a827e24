"""A worker's calls with keys whose arrays are on its GPU and that servers own.

Servers receive messages in host memory, also where they keep the key on a GPU. Only a server in this worker's own
process can take device memory. Each shard of such a key takes one of two paths:

- *In process* (`DeviceCalls.goes_in_process`), to the server inside this worker, unless the answer is for an array in
  host memory: one copy on the GPU in each direction (transports/loopback.py). Only for a large uncompressed shard.
- *Through host memory*: the shard is copied down to page-locked memory and sent from there; the answer is received in
  the same memory and copied up. A push that is encoded on the GPU (device_pieces.py) is copied down encoded; an answer
  that is only for arrays on the GPU and decoded there is copied up encoded.

No thread blocks for a copy. A call begins its copies when its pushed values have been written, and sends its messages
when the store's stream has done the copies. Until then the call waits in a queue, and so do all later calls, also those
of keys in host memory, because servers must receive a worker's calls in their order. `Client.exchange` sends the
messages.

A caller's array in host memory receives an answer as for a key in host memory, without the GPU.

Cost of a call with n elements: through host memory n copied down for a push and n up for an answer; else none. One
event of the stream for each call. Memory: page-locked arrays of the space; on the GPU the pushed total, which the
answer overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Operation, Predicate, Steps, Turns
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import DEVICE, HOST
from mpikv.strategies.base import Sink
from mpikv.strategies.client_key import ClientKey, PieceMessages, Route
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.exchange import Client, InPlace, Item
from mpikv.strategies.pieces import Pieces
from mpikv.transports import wire


class DeviceCalls:
    """The calls of one worker. Everything here is called under the engine's lock.

    on_lost: called with the error of a push that could not be sent, for which other ranks would wait.
    """

    def __init__(self, client: Client, space: DeviceSpace, on_lost: Callable[[BaseException], None]) -> None:
        self._client, self.space, self._on_lost = client, space, on_lost
        self._turns = Turns()

    @property
    def waiting(self) -> bool:
        return self._turns.taken

    def concerns(self, items: Sequence[Item]) -> bool:
        """Whether a call must use `exchange` of this object instead of the client's."""
        return self._turns.taken or any(item.key.info.space == DEVICE for item in items)

    def goes_in_process(self, key: ClientKey, route: Route, space_names: set[str]) -> bool:
        """Whether a shard is passed on the GPU to the server in this process. space_names: those of the answer."""
        return (
            route.owner == self._client.own
            and not route.inline
            and key.compression.uncompressed
            and HOST not in space_names
        )

    def exchange(self, kind: int, items: Sequence[Item], priority: int) -> Steps[None]:
        """See `Client.exchange`; here the items' totals are in the spaces of their keys."""
        with self._turns.take() as turn:
            try:
                for item in items:  # waits for the caller's stream, so that the store's need not
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
                    self._on_lost(error)
                raise
        yield from self._client.exchange(kind, sent, priority)  # which sends everything before it waits
        for key in keys:
            key.deliver()


class _KeyCall:
    """One key of a call. Its copies down begin in the constructor.

    items: the messages to exchange, one item for each of the two paths that some shard takes. arrivals: requests to
    wait for, in addition to the store's stream, before messages are sent.
    """

    def __init__(self, calls: DeviceCalls, item: Item) -> None:
        self._calls, self._item = calls, item
        info, total = item.key.info, item.total
        assert item.sink is None or isinstance(item.sink, Sink)
        self._sink = item.sink
        self._space_names = set() if self._sink is None else self._sink.space_names
        in_process = [route for route in item.routes if calls.goes_in_process(item.key, route, self._space_names)]
        self._copied = [route for route in item.routes if route not in in_process]
        self._on_host: SpaceArray = None
        self._on_device: SpaceArray = total
        if total is None and DEVICE in self._space_names:
            self._on_device = calls.space.empty(info.n_elems, info.dtype)
        encodes = total is not None and isinstance(item.key.encoded, DevicePieces) and not item.pushes_uncompressed
        decodes = self._space_names == {DEVICE} and isinstance(item.key.returned_in_space, DevicePieces)
        decodes &= not item.answered_uncompressed
        copies_up = DEVICE in self._space_names and (bool(self._copied) or HOST in self._space_names) and not decodes
        if copies_up or (total is not None and self._copied and not encodes):
            self._on_host = calls.space.page_locked(info.n_elems * info.dtype.itemsize).view(info.dtype)
        # Where messages are received: the caller's array or page-locked memory.
        only_host = None if self._sink is None or DEVICE in self._space_names else self._sink.buffer()
        self._result = self._on_host if only_host is None else only_host
        if decodes:
            self._result = PieceMessages(self._memory_of(item.key.returned_in_space))
        self.arrivals: list[Operation] = []
        if total is not None and in_process:
            self.arrivals.append(calls.space.written(total))
        pushed = self._on_host
        if encodes:
            pushed = self._encoded(item.key, total)
        elif total is not None:
            for route in self._copied:
                span = slice(route.begin, route.end)
                calls.space.download(self._on_host[span], total[span])
        self.items = [
            item._replace(
                total=None if total is None else array,
                sink=None if self._sink is None else InPlace(into),
                routes=routes,
                flags=item.flags | flags,
            )
            for array, into, routes, flags in (
                (pushed, self._result, self._copied, 0),
                (self._on_device, self._on_device, in_process, wire.LOOPBACK_PUSH | wire.LOOPBACK_ANSWER),
            )
            if routes
        ]

    def _encoded(self, key: ClientKey, total: SpaceArray) -> PieceMessages:
        """Encode a push on the GPU and start to copy it to the host. Returns its messages."""
        messages = self._memory_of(key.encoded)
        assert isinstance(key.encoded, DevicePieces)
        self._calls.space.wait_for_callers(total)
        for piece, data in key.encoded.encode_all(total, messages).items():
            self._calls.space.download(messages[piece], data)
        return PieceMessages(messages)

    def _memory_of(self, pieces: Pieces) -> dict[Span, HostArray]:
        copied = [piece for route in self._copied for piece in route.pieces]
        return {piece: self._calls.space.page_locked(pieces.wire_bytes(piece)) for piece in copied}

    def deliver(self) -> None:
        space = self._calls.space
        if DEVICE in self._space_names:
            assert self._sink is not None
            if isinstance(self._result, PieceMessages):
                for (begin, end), message in self._result.by_piece.items():
                    self._item.key.returned_in_space.put(message, self._on_device[begin:end])
            elif self._on_host is not None:
                every = HOST in self._space_names
                copied = [(0, self._on_host.size)] if every else [(one.begin, one.end) for one in self._copied]
                for begin, end in copied:
                    space.upload(self._on_device[begin:end], self._on_host[begin:end])
            self._sink.deliver(self._on_device, self._on_host if HOST in self._space_names else None)
        elif self._sink is not None:
            self._sink.deliver(self._result)
