"""The path "encoded": each worker sends its values, as the key's codec encodes them, straight to whoever adds them.

Home: each worker has the whole value in memory of its own, on the host or on its GPU.

Who adds, and in which order. What is encoded cannot be added on its way, as a ring adds. So each worker encodes its
values piece by piece and sends each piece to the piece's owner, who decodes those of all workers and adds them in
float32 (float64 for float64), in the order of the workers, its own one through the codec like the others: bits do not
depend on who owns what, and are those of a server. Then the owner updates its part, and sends it to all: as it is, or
encoded by the codec for the way back; then the owner, too, goes on with what the others decode, and keeps the exact
values for its next update. (`owners`)

Where few workers send few bytes and nothing updates the key, each sends its pieces to all others instead, and every
worker adds all of them in the same order: nothing has to be sent back. (`gather`)

Rounds that travel as they are go the path of a key without compression, with the same owners, where the placement names
one (`Placement.plain`); else this one, by the owners. Keys of half precision go this path without a codec: two bytes
for each element, added in float32, rounded once.

What is sent. Sending, receiving and adding run side by side, with a limited number of messages under way; a piece is
encoded when it is its turn to be sent, and added when those of all workers before have been. Labels are compared as
those of other paths are (collectives/labelled.py).

On a GPU the messages are the same; but pieces are encoded, decoded and added there (device_pieces.py). So n bytes of
values do not cross to the host, only what travels of them.

Cost per worker of W, of n elements that are w bytes encoded, b bytes on the way back: `owners` (W-1)/W (w + b) bytes,
each element encoded once and decoded once; `gather` (W-1) w bytes, decoded W times. Memory: the codec's states, the sum
of what is owned (of all for `gather`), a window of messages; with a codec for the way back a copy of what is owned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.parts import whole
from mpikv.collectives.stages import LINK_WINDOW, Receiver, Sender, Span, drive
from mpikv.engine.operation import Done, Operation, Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.key_codec import KeyCodec
from mpikv.strategies.key_path import KeyPath, Means
from mpikv.strategies.pieces import Encoding, Pieces
from mpikv.strategies.staging import Staging
from mpikv.transports.base import Group

_BYTES = np.dtype(np.uint8)


class _AndOwn:
    """A group in whose order of receives a rank's own turn comes, too."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        return self._group.isend(buf, dest, tag)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Operation:
        return Done() if source == self._group.rank else self._group.irecv(buf, source, tag)


class EncodedPath(KeyPath):
    """See `KeyPath`."""

    changes = False
    codec: KeyCodec

    def __init__(
        self, means: Means, info: KeyInfo, placement: Placement, place: Any, staging: Staging | None = None
    ) -> None:
        super().__init__(means, info, placement, place, staging)
        self._sum_dtype = self.dtype
        if staging is None:
            self.dtype = info.dtype
        self._device = self._space if isinstance(self._space, DeviceSpace) else None
        self.value = self._space.empty(info.n_elems, info.dtype)
        self.codec = KeyCodec(info, self._space, means.group, means.choices)

    @property
    def _gathers(self) -> bool:
        return self.placement.algorithm == "gather" and not self.codec.plain

    @property
    def updates(self) -> Span:
        """All elements, where every worker adds all."""
        return (0, self.value.size) if self._gathers else self.owned

    def share(self) -> Steps[None]:
        """By a tree, as it is; from and to a GPU through page-locked memory."""
        if (space := self._device) is None:
            yield from broadcast(self._group, self.value, 0, self._tag(0))
            return
        values = space.pinned.take(self.value.nbytes).view(self.value.dtype)
        if self._group.rank == 0:
            space.download(values, self.value)
            yield space.stream_event()
        yield from broadcast(self._group, values, 0, self._tag(0))
        if self._group.rank != 0:
            space.upload(self.value, values)
            yield space.stream_event()  # `values` is in use until then

    # --- a round

    @property
    def _peers(self) -> list[int]:
        """All other workers, from the next one on, so that not all send to worker 0 first."""
        return [(self._group.rank + step) % self._group.size for step in range(1, self._group.size)]

    def _of_owners(self, pieces: Pieces) -> list[tuple[int, Span]]:
        """Owners and their pieces: the first one of each owner, the second of each, and so on; this worker's last."""
        bounds, ranks = self.placement.bounds, [*self._peers, self._group.rank]
        of_each = [[(rank, piece) for piece in pieces.of((bounds[rank], bounds[rank + 1]))] for rank in ranks]
        return [one for row in zip_longest(*of_each) for one in row if one is not None]

    def begin(
        self, values: SpaceArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[SpaceArray | None]:
        """In new memory; for values that come from a GPU, in `values`, which it copies from."""
        if self.staging is None:
            return self._add(values, combine, comparison)
        steps = self._add_in_place(values, combine, comparison)
        return whole(self._parts, steps, values, needed=(0, values.size), completed=[self.updates])

    def _add_in_place(self, values: HostArray, combine: np.ufunc, comparison: Comparison | None) -> Steps[None]:
        totals = yield from self._add(values, combine, comparison)
        own = slice(*self.updates)
        values[own] = totals[own]

    def _add(self, values: HostArray, combine: np.ufunc, comparison: Comparison | None) -> Steps[HostArray]:
        group, codec = self._groups(comparison)[0], self.codec
        pieces = codec.pushed
        if codec.plain:
            pieces, values = codec.as_it_is, codec.with_owed(values)
        mine = pieces.of(self.updates)
        codec.restore(self.value, self.updates)
        if self._gathers:
            encoding = pieces.encoding(values, [(rank, one) for one in mine for rank in self._peers], group.size)
        else:
            encoding = pieces.encoding(values, [one for one in self._of_owners(pieces) if one[0] != group.rank], 1)
        # Of this memory only what this worker updates is ever touched; on the host the rest of a long array takes none.
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

    def end(self, outs: Sequence[SpaceArray], comparison: Comparison | None) -> Steps[None]:
        """Nothing has to be sent, where every worker has added all."""
        (begin, end), n = self.updates, self.value.size
        steps = self._end_alone() if self._gathers else self._send_back(comparison)
        return whole(self._parts, steps, self.value, needed=(begin, end), completed=[(0, begin), (end, n)])

    @staticmethod
    def _end_alone() -> Steps[None]:
        yield from ()

    def _send_back(self, comparison: Comparison | None) -> Steps[None]:
        group, codec = self._groups(comparison)[1], self.codec
        sends_encoded = codec.returns_encoded and not codec.plain
        pieces = codec.returned if sends_encoded else codec.as_it_is
        outgoing = [(rank, piece) for piece in pieces.of(self.updates) for rank in self._peers]
        encoding = pieces.encoding(self.value, outgoing, group.size if sends_encoded else group.size - 1)
        incoming = [one for one in self._of_owners(pieces) if one[0] != group.rank or sends_encoded]
        if not sends_encoded:
            codec.exact = None  # it is in the value
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
        """Send what is encoded, and receive, in this order, pieces from ranks, of which this one may be one.

        use: of the tag. take: called with each piece that has come, and its data; where they come as they are, they are
        received `into` an array instead.
        """
        tag, window = self._tag(use), max(LINK_WINDOW, 2 * group.size)
        yield from encoding.begin()
        if take is None:
            assert into is not None
            receiver = Receiver(group, [(source, into[slice(*piece)]) for source, piece in incoming], tag, window)
        else:
            call, room = take, group.room(_BYTES)
            sizes = [encoding.pieces.wire_bytes(piece) for _, piece in incoming]
            rooms = encoding.pieces.rooms([n + room for n in sizes], window)

            def take_one(i: int) -> None:
                source, piece = incoming[i]
                call(source, piece, encoding.data(piece) if source == group.rank else rooms[i][: sizes[i]])

            targets = [(source, rooms[i]) for i, (source, _) in enumerate(incoming)]
            receiver = Receiver(_AndOwn(group), targets, tag, window, take=take_one)
        sender = Sender(group, encoding, tag, window, lambda: len(encoding))
        yield from drive(receiver, sender)
        yield from encoding.pieces.end()
