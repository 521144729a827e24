"""What travels of one key's values in device memory, piece by piece: encoded and decoded on the GPU.

The codecs are those of the host, whose functions work on CuPy's arrays, too; residuals are in device memory. Messages
are page-locked host memory: so what crosses between the GPU and the host is what travels, and no more. A piece that
this worker owns itself stays on the GPU.

All that a worker sends in one half of a round is encoded and copied down before its first message; that takes a GPU
less time than a network takes for a few of them. What has come is copied up and added as it comes, in the store's
stream, which the host waits for once at the end: until then memory of messages is in use.

Cost: a copy for each piece, and the launches of its codec. Page-locked memory: what is sent and received in half a
round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.codecs.base import Codec, State, state_on_device
from mpikv.codecs.identity import IDENTITY
from mpikv.collectives.stages import Span
from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.spaces.base import Space, SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.pieces import Encoding, Pieces


class DevicePieces(Pieces):
    """See `Pieces`. Values, what is encoded and states are arrays of `space`; messages are page-locked host memory."""

    def __init__(self, info: KeyInfo, codec: Codec, space: DeviceSpace) -> None:
        super().__init__(info, codec)
        self.space = space
        self._lent: list[HostArray] = []  # for messages of the half of a round that is under way

    def _init(self, n_elems: int) -> State:
        return self._brought(self._codec.init(n_elems))

    def _brought(self, state: State) -> State:
        return state_on_device(self._codec, state, self.space.from_host)

    def encode_all(self, values: SpaceArray, pieces: Iterable[Span]) -> dict[Span, SpaceArray]:
        """What travels of some pieces, different ones, as bytes."""
        return {piece: self.encode(values, piece).view(np.uint8) for piece in pieces}

    def _here(self, data: Any, n_elems: int) -> SpaceArray:
        """What was encoded of n values, on the GPU. data: the same, or a message that has come, in use until `end`."""
        if not isinstance(data, np.ndarray):
            return data
        self._codec.check(self._seen(data), n_elems)
        found = self.space.empty(data.nbytes, np.dtype(np.uint8))
        self.space.upload(found, data)
        return found

    def decode(self, data: Any, out: SpaceArray) -> None:
        """See `Pieces`."""
        super().decode(self._here(data, out.size), out)

    def add(self, data: Any, out: SpaceArray) -> None:
        """See `Pieces`."""
        super().add(self._here(data, out.size), out)

    # --- a round

    def empty(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        """See `Pieces`."""
        return self.space.empty(n_elems, dtype)

    def encoding(self, values: SpaceArray, outgoing: Sequence[tuple[int, Span]], uses: int) -> Encoding:
        """See `Pieces`."""
        return DeviceEncoding(self, values, outgoing, uses)

    def rooms(self, n_bytes: Sequence[int], window: int) -> list[HostArray]:
        """See `Pieces`. Each has memory of its own, since copies from it are under way until `end`."""
        return [self.room(n) for n in n_bytes]

    def room(self, n_bytes: int) -> HostArray:
        """Page-locked memory for a message, until `end`."""
        memory = self.space.pinned.take(n_bytes)
        self._lent.append(memory)
        return memory

    def end(self) -> Steps[None]:
        """See `Pieces`."""
        yield self.space.stream_event()
        self._lent.clear()

    # --- states

    def recut(self, states: Mapping[Span, State], pieces: Iterable[Span]) -> None:
        """See `Pieces`. Blocks until they have come to the host, or from there."""
        super().recut(self._on_host(states), pieces)
        self.states = {piece: self._brought(state) for piece, state in self.states.items()}

    def states_on_host(self) -> Mapping[Span, State]:
        """See `Pieces`. Blocks until they have come there."""
        return self._on_host(self.states)

    def _on_host(self, states: Mapping[Span, State]) -> dict[Span, State]:
        return {
            piece: {
                name: array if isinstance(array, np.ndarray) else self.space.to_host(array)
                for name, array in state.items()
            }
            for piece, state in states.items()
        }


def pieces_in(space: Space | None, info: KeyInfo, codec: Codec) -> Pieces:
    """Those of a key whose values are in `space`: encoded there, if it is device memory and the codec can do so."""
    if codec != IDENTITY and isinstance(space, DeviceSpace) and codec.on_device:
        return DevicePieces(info, codec, space)
    return Pieces(info, codec)


class DeviceEncoding(Encoding):
    """See `Encoding`. All that is sent is encoded and copied down at once, when the caller's values are there."""

    pieces: DevicePieces

    def begin(self) -> Steps[None]:
        """See `Encoding`."""
        space = self.pieces.space
        sent = self.pieces.encode_all(self._values, dict.fromkeys(piece for _, piece in self._outgoing))
        self._kept = {piece: (data, 1) for piece, data in sent.items()}
        self._messages = {piece: self.pieces.room(data.nbytes) for piece, data in sent.items()}
        for piece, data in sent.items():
            space.download(self._messages[piece], data)
        yield space.stream_event()

    def __getitem__(self, i: int, /) -> tuple[int, HostArray]:
        dest, piece = self._outgoing[i]
        return dest, self._messages[piece]
