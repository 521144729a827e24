"""The way of keys whose values travel encoded: each worker sends pieces straight to whoever adds them.

What is encoded cannot be added on its way, as a ring adds. So each worker encodes its values piece by piece and sends
each piece to the piece's owner, who decodes those of all workers and adds them in float32 (float64 for float64), in the
order of the workers, its own one through the codec like the others: bits do not depend on who owns what, and are those
of a server. Then the owner updates its part, and sends it to all: as it is, or encoded by the codec for the way back;
then the owner, too, goes on with what the others decode, and keeps the exact values for its next update. (`owners`)

Where few workers send few bytes and nothing updates the key, each sends its pieces to all others instead, and every
worker adds all of them in the same order: nothing has to come back. (`gather`)

Values that are compressed, and not by force, travel as they are in rounds where that is faster (codecs/choice). The
first of such rounds adds what the codec owes. They go the way of a key without compression, with the same owners, where
the placement names one (`Placement.plain`).

Keys of half precision go this way without a codec: two bytes for each element, added in float32, rounded once.

Sending, receiving and adding run side by side, with a limited number of messages under way; a piece is encoded when it
is its turn to be sent, and added when those of all workers before have been. Labels are compared as those
of other ways are (collectives/labelled).

Cost per worker of W, of n elements that are w bytes encoded, b bytes on the way back: `owners` (W-1)/W (w + b) bytes,
each element encoded once and decoded once; `gather` (W-1) w bytes, decoded W times. Memory: the codec's states, the sum
of what is owned (of all for `gather`), a window of messages; with a codec for the way back a copy of what is owned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs import compression
from mpikv.codecs.base import Codec, State
from mpikv.codecs.choice import CodecChoice
from mpikv.codecs.identity import IDENTITY
from mpikv.collectives.broadcast import broadcast
from mpikv.collectives.parts import whole
from mpikv.collectives.stages import LINK_WINDOW, Receiver, Sender, Span, drive
from mpikv.engine.request import Done, Request, Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison
from mpikv.placement.placement import Placement
from mpikv.strategies.pieces import Encoding, Pieces
from mpikv.strategies.ways import WAYS, Alone, Means, Way
from mpikv.transports.base import Group

_BYTES = np.dtype(np.uint8)


class _AndOwn:
    """A group in whose order of receives a rank's own turn comes, too."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def isend(self, buf: HostArray, dest: int, tag: int) -> Request:
        return self._group.isend(buf, dest, tag)

    def irecv(self, buf: HostArray, source: int, tag: int) -> Request:
        return Done() if source == self._group.rank else self._group.irecv(buf, source, tag)


class Encoded(Alone):
    """See `Way`. pushed, returned: what travels to the owners and back."""

    _ways = WAYS  # those of rounds as they are
    _receives_in_place = True  # what comes as it is, in the value

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        super().__init__(means, info, placement, place)
        self._sum_dtype, self.dtype = self.dtype, info.dtype
        travels = compression.of_text(info.codec)
        self.pushed, self.returned = self._pieces(info, travels.push), self._pieces(info, travels.pull)
        self._sends_back_encoded = travels.pull != IDENTITY
        self._as_it_is, self._plain = self._pieces(info, IDENTITY), False
        self._clock = means.group.transport.clock
        measures = travels.chosen and info.n_elems > 0 and means.group.size > 1
        self._choices, self._codec = means.choices if measures else None, travels.push.name
        self.choice = self._new_choice()
        self._measured = False  # whether the choice says how the round travels
        # The way of rounds as they are, which has this value; None: they go as encoded ones do.
        self._ordinary: Way | None = None
        if (plain := placement.as_it_is) is not None:
            self._ordinary = self._ways[plain.path](means, info, plain, place)
            if not self._ordinary.shared:
                self._ordinary.value = self.value
        self._exact: HostArray | None = None  # what is owned, as it was before it was sent back encoded

    def _pieces(self, info: KeyInfo, codec: Codec) -> Pieces:
        return Pieces(info, codec)

    def begin(self, *, plain: bool) -> None:
        """A plain round goes the ordinary way; where there is none, by the owners: it is long."""
        choice = None if plain else self.choice
        self._measured = choice is not None
        self._plain = plain or (choice is not None and choice.plain)
        if choice is not None:
            choice.begin(self._clock.now_s())
        if self._plain and self._ordinary is not None:
            self._ordinary.begin(plain=True)

    def _new_choice(self) -> CodecChoice | None:
        return None if self._choices is None else self._choices.of(self._codec)

    @property
    def changes(self) -> bool:
        """As the ordinary way does: then a caller's result is a better place for a copy than memory of its own."""
        plain = self._ordinary is not None and self._ordinary.changes
        return plain and self.choice is not None and self.choice.plain

    @property
    def _gathers(self) -> bool:
        return self.placement.algorithm == "gather" and not self._plain

    @property
    def updates(self) -> Span:
        """All elements, where every worker adds all."""
        return (0, self.value.size) if self._gathers else super().updates

    @property
    def held_bytes(self) -> int:
        """The value, what the codecs remember, and exact values."""
        exact = 0 if self._exact is None else self._exact.nbytes
        ordinary = 0
        if self._ordinary is not None:  # which counts the value, too, unless it is shared memory's
            ordinary = self._ordinary.held_bytes - (0 if self._ordinary.shared else self.value.nbytes)
        return super().held_bytes + self.pushed.held_bytes + self.returned.held_bytes + exact + ordinary

    def cut(self, placement: Placement) -> None:
        """From the next round on the owners own other parts, or there are owners at last."""
        if self.placement.bounds != placement.bounds:
            self._exact = None
            self.returned.states = {}  # of parts that are others' now
        super().cut(placement)
        if self._ordinary is not None and placement.as_it_is is not None:
            self._ordinary.cut(placement.as_it_is)
        self.choice = self._new_choice()  # other messages take another time
        self.remember(self.pushed.states)

    def remember(self, states: Mapping[Span, State]) -> None:
        """Of what this worker pushes, in place of what its codec remembers. states: of these pieces or others."""
        gathers = self.placement.algorithm == "gather"  # whatever the last round was
        whole = [(0, self.value.size)] if gathers else pairwise(self.placement.bounds)
        self.pushed.recut(states, [piece for span in whole for piece in self.pushed.of(span)])

    def share(self) -> Steps[None]:
        """By a tree, as it is."""
        return broadcast(self._group, self.value, 0, self._tag(0))

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

    def reduce_scatter(
        self, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[HostArray | None]:
        """In new memory; for values that come from a GPU, in `values`, which it copies from."""
        if self._plain and self._ordinary is not None:
            return self._add_as_they_are(self._ordinary, values, combine, comparison, changeable=changeable)
        if self._parts.landed is None:
            return self._add(values, combine, comparison)
        steps = self._add_in_place(values, combine, comparison)
        return whole(self._parts, steps, values, needed=(0, values.size), completed=[self.updates])

    def _add_as_they_are(
        self, ordinary: Way, values: HostArray, combine: np.ufunc, comparison: Comparison | None, *, changeable: bool
    ) -> Steps[HostArray]:
        """The ordinary way, with what the codec owes; `values` stay as they are, unless they are `changeable`."""
        given = self.pushed.with_owed(values) if self._measured else values
        mine = changeable or given is not values
        if ordinary.changes and not mine:
            given, mine = values.copy(), True
        if self._exact is not None:
            self.value[slice(*self.updates)] = self._exact
        totals = yield from ordinary.reduce_scatter(given, combine, comparison, changeable=mine)
        return given if totals is None else totals

    def _complete_as_it_is(self, ordinary: Way, comparison: Comparison | None) -> Steps[None]:
        """The value is this worker's own; through the memory of its host it is completed there, and copied."""
        if ordinary.shared:
            ordinary.value[slice(*self.updates)] = self.value[slice(*self.updates)]
        yield from ordinary.allgather([self.value] if ordinary.shared else [], comparison)
        self._exact = None  # it is in the value

    def _add_in_place(self, values: HostArray, combine: np.ufunc, comparison: Comparison | None) -> Steps[None]:
        totals = yield from self._add(values, combine, comparison)
        own = slice(*self.updates)
        values[own] = totals[own]

    def _add(self, values: HostArray, combine: np.ufunc, comparison: Comparison | None) -> Steps[HostArray]:
        group, pieces = self._groups(comparison)[0], self._as_it_is if self._plain else self.pushed
        if self._plain and self._measured:
            values = self.pushed.with_owed(values)
        mine = pieces.of(self.updates)
        if self._exact is not None:
            self.value[slice(*self.updates)] = self._exact
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

    def allgather(self, outs: Sequence[HostArray], comparison: Comparison | None) -> Steps[None]:
        """Nothing has to be sent, where every worker has added all."""
        (begin, end), n = self.updates, self.value.size
        return whole(
            self._parts, self._complete(comparison), self.value, needed=(begin, end), completed=[(0, begin), (end, n)]
        )

    def _complete(self, comparison: Comparison | None) -> Steps[None]:
        if self._plain and self._ordinary is not None:
            yield from self._complete_as_it_is(self._ordinary, comparison)
        elif not self._gathers:
            yield from self._send_back(comparison)
        if self._measured and self.choice is not None:
            self.choice.end(self._clock.now_s())
            if self.choice.asks:
                yield from self._agree(self.choice)

    def _agree(self, choice: CodecChoice) -> Steps[None]:
        """All workers do so after the same round: each sends its times to all others."""
        tag, times = self._tag(0), [choice.times for _ in range(self._group.size)]
        mine = times[self._group.rank]
        receives = [self._group.irecv(times[rank], rank, tag) for rank in self._peers]
        sends = [self._group.isend(mine, rank, tag) for rank in self._peers]
        yield from (*receives, *sends)
        choice.agree(times)

    def _send_back(self, comparison: Comparison | None) -> Steps[None]:
        group, sends_encoded = self._groups(comparison)[1], self._sends_back_encoded and not self._plain
        pieces = self.returned if sends_encoded else self._as_it_is
        outgoing = [(rank, piece) for piece in pieces.of(self.updates) for rank in self._peers]
        encoding = pieces.encoding(self.value, outgoing, group.size if sends_encoded else group.size - 1)
        incoming = [one for one in self._of_owners(pieces) if one[0] != group.rank or sends_encoded]
        if not sends_encoded:
            self._exact = None  # it is in the value
            if self._receives_in_place:
                yield from self._move(group, 2, encoding, incoming, into=self.value)
                return
        else:
            if self._exact is None:
                begin, end = self.updates
                self._exact = pieces.empty(end - begin, self.value.dtype)
            self._exact[...] = self.value[slice(*self.updates)]

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
