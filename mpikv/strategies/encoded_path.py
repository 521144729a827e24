"""The path "encoded": each worker encodes its values by the key's codec and sends them directly to whoever adds them.

A ring would have to decode and encode again at every rank, because encoded values cannot be added. So each worker
encodes its values piece by piece and sends each piece to the piece's owner. The owner decodes the pieces of all
workers, also its own, and adds them in float32 (float64 for float64) in the order of the workers. So the bits do not
depend on who owns what, and are those of a server. Then the owner updates its shard and sends it to all, uncompressed
or encoded by the codec for answers. If it is encoded, the owner also uses the decoded values, and keeps the exact
values for its next update. This is the algorithm `owners`.

Where few workers send few bytes and nothing updates the key, each sends its pieces to all others instead. Every worker
adds all of them in the same order, so that nothing has to be sent back. This is the algorithm `gather`.

Uncompressed rounds of a key with a codec use the path of a key without one, with the same owners, if the placement
names such a path (`Placement.uncompressed`); else this one, with `owners`. Keys of half precision use this path without
a codec: they are sent in two bytes for each element, added in float32 and rounded once.

Sending, receiving and adding run side by side, with a limited number of messages in flight. A piece is encoded just
before it is sent, and added when the pieces of all workers of lower rank have been. On a GPU pieces are encoded,
decoded and added there (device_pieces.py), so that only encoded bytes are copied to the host and back.

Cost per worker of W, for n elements that are w bytes encoded and b bytes as an answer: `owners` sends (W-1)/W (w + b)
bytes and encodes and decodes each element once; `gather` sends (W-1) w bytes and decodes each element W times. Memory:
the codec's states, the sums of the owned shard (of all elements for `gather`), and a window of messages; with a codec
for answers also a copy of the owned shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import compression
from mpikv.codecs.base import Codec, State
from mpikv.codecs.identity import IDENTITY
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.stages import LINK_WINDOW, Receiver, Sender, Span, drive
from mpikv.engine.operation import Done, Operation, Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import Space, SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.host_copies import broadcast_first
from mpikv.strategies.key_path import KeyPath, PathResources
from mpikv.strategies.pieces import Encoding, Pieces
from mpikv.transports.base import Group

_BYTES = np.dtype(np.uint8)


class _WithOwnRank:
    """A group in which a rank can also receive from itself: that is done at once, without a message."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        return self._group.isend(buf, dest, tag)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Operation:
        return Done() if source == self._group.rank else self._group.irecv(buf, source, tag)


class KeyCodec:
    """The codec of one key, and its state from one round to the next, on whichever path each round is done.

    pushed, returned: encode values that are sent to the owners, and back from them. uncompressed_pieces: in place of
    these in rounds that are `uncompressed`. exact: this worker's shard before it was sent back encoded, for its next
    update; None: the value itself is exact.
    """

    def __init__(self, info: KeyInfo, space: Space, group: Group) -> None:
        codecs, recorder = compression.of_text(info.codec), group.transport.recorder

        def pieces(codec: Codec) -> Pieces:
            if isinstance(space, DeviceSpace):
                return DevicePieces(info, codec, space, recorder)
            return Pieces(info, codec, recorder)

        self.pushed, self.returned = pieces(codecs.push), pieces(codecs.pull)
        self.uncompressed_pieces = pieces(IDENTITY)
        self.returns_encoded = codecs.pull != IDENTITY
        self._n_elems, self.uncompressed = info.n_elems, False
        self.exact: SpaceArray | None = None

    @property
    def held_bytes(self) -> int:
        exact = 0 if self.exact is None else int(self.exact.nbytes)
        return self.pushed.held_bytes + self.returned.held_bytes + exact

    def reshard(self, before: Placement, placement: Placement) -> None:
        if before.bounds != placement.bounds:
            self.exact = None
            self.returned.states = {}  # other workers own those elements now
        self.set_states(self.pushed.states, placement)

    def set_states(self, states: Mapping[Span, State], placement: Placement) -> None:
        """Replace the states of the codec of this worker's pushes. states: by pieces, which may have other bounds."""
        gathers = placement.algorithm == "gather"  # also if the last round was uncompressed and had owners
        spans = [(0, self._n_elems)] if gathers else pairwise(placement.bounds)
        self.pushed.recut(states, [piece for span in spans for piece in self.pushed.of(span)])

    # --- a round

    def restore_exact(self, value: SpaceArray, updates: Span) -> None:
        """Copy the exact values of the elements `updates` into `value`, before they are updated."""
        if self.exact is not None:
            value[slice(*updates)] = self.exact


class EncodedPath(KeyPath):
    """See `KeyPath`."""

    overwrites = False
    codec: KeyCodec

    def __init__(self, resources: PathResources, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(resources, info, placement, place)
        self._sum_dtype, self.dtype = self.dtype, info.dtype
        self._device = self._space if isinstance(self._space, DeviceSpace) else None
        self.codec = KeyCodec(info, self._space, resources.group)

    @property
    def _gathers(self) -> bool:
        return self.placement.algorithm == "gather" and not self.codec.uncompressed

    @property
    def updates(self) -> Span:
        """All elements, if every worker adds all; else this worker's shard."""
        return (0, self.value.size) if self._gathers else self.owned

    def broadcast(self) -> Steps[None]:
        """Broadcast uncompressed by messages along a tree; from and to a GPU through page-locked memory."""
        if self._device is not None:
            return broadcast_first(self._device, self._group, self.value, self._tag(0))
        return broadcast(self._group, self.value, 0, self._tag(0))

    # --- a round

    @property
    def _peers(self) -> list[int]:
        """All other workers, beginning with the next one, so that not all send to worker 0 first."""
        return [(self._group.rank + step) % self._group.size for step in range(1, self._group.size)]

    def _of_owners(self, pieces: Pieces) -> list[tuple[int, Span]]:
        """Owners and their pieces: the first piece of each owner, then the second of each. This worker comes last."""
        bounds, ranks = self.placement.bounds, [*self._peers, self._group.rank]
        of_each = [[(rank, piece) for piece in pieces.of((bounds[rank], bounds[rank + 1]))] for rank in ranks]
        return [one for row in zip_longest(*of_each) for one in row if one is not None]

    def reduce_scatter(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """Add in new memory."""
        group, codec = self._groups(comparison)[0], self.codec
        pieces = codec.pushed
        if codec.uncompressed:
            pieces = codec.uncompressed_pieces
        mine = pieces.of(self.updates)
        codec.restore_exact(self.value, self.updates)
        if self._gathers:
            encoding = pieces.encoding(values, [(rank, one) for one in mine for rank in self._peers], group.size)
        else:
            encoding = pieces.encoding(values, [one for one in self._of_owners(pieces) if one[0] != group.rank], 1)
        # Only the elements that this worker updates are used. On the host, untouched pages of an array take no memory.
        totals = pieces.empty(self.value.size, self._sum_dtype)

        def add(source: int, piece: Span, data: HostArray) -> None:
            total = totals[slice(*piece)]
            if source and combine is np.add:
                pieces.add(data, total)
                return
            term = pieces.empty(total.size, total.dtype) if source else total
            pieces.decode(data, term)
            if source:
                combine(total, term, out=total)

        incoming = [(source, piece) for piece in mine for source in range(group.size)]
        yield from self._move(group, 1, encoding, incoming, take=add)
        return totals

    def allgather(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Send the updated shards back. With `gather` nothing is sent, as every worker has added all elements."""
        if self._gathers:
            return
        group, codec = self._groups(comparison)[1], self.codec
        sends_encoded = codec.returns_encoded and not codec.uncompressed
        pieces = codec.returned if sends_encoded else codec.uncompressed_pieces
        outgoing = [(rank, piece) for piece in pieces.of(self.updates) for rank in self._peers]
        encoding = pieces.encoding(self.value, outgoing, group.size if sends_encoded else group.size - 1)
        incoming = [one for one in self._of_owners(pieces) if one[0] != group.rank or sends_encoded]
        if not sends_encoded:
            codec.exact = None  # the value itself is exact
            if self._device is None:
                yield from self._move(group, 2, encoding, incoming, into=self.value)
                return
        else:
            if codec.exact is None:
                begin, end = self.updates
                codec.exact = pieces.empty(end - begin, self.value.dtype)
            codec.exact[...] = self.value[slice(*self.updates)]

        def put(source: int, piece: Span, data: HostArray) -> None:
            pieces.put(data, self.value[slice(*piece)])

        yield from self._move(group, 2, encoding, incoming, take=put)

    def _move(
        self,
        group: Group,
        use: int,
        encoding: Encoding,
        incoming: Sequence[tuple[int, Span]],
        *,
        take: Callable[[int, Span, HostArray], None] | None = None,
        into: HostArray | None = None,
    ) -> Steps[None]:
        """Send what `encoding` has, and receive the pieces `incoming`, pairs of a source and a piece, in this order.

        use: selects the tag. take: called with the source, the piece and its data for each piece received, also for
        pieces of this rank itself. into: where uncompressed pieces are received instead, if `take` is None.
        """
        tag, window = self._tag(use), max(LINK_WINDOW, 2 * group.size)
        yield from encoding.begin()
        if take is None:
            assert into is not None
            receiver = Receiver(group, [(source, into[slice(*piece)]) for source, piece in incoming], tag, window)
        else:
            call, extra_bytes = take, group.room(_BYTES)
            sizes = [encoding.pieces.wire_bytes(piece) for _, piece in incoming]
            buffers = encoding.pieces.message_buffers([n + extra_bytes for n in sizes], window)

            def take_one(i: int) -> None:
                source, piece = incoming[i]
                call(source, piece, encoding.data(piece) if source == group.rank else buffers[i][: sizes[i]])

            targets = [(source, buffers[i]) for i, (source, _) in enumerate(incoming)]
            receiver = Receiver(_WithOwnRank(group), targets, tag, window, take=take_one)
        sender = Sender(group, encoding, tag, window, lambda: len(encoding))
        yield from drive(receiver, sender)
