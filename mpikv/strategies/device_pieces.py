"""Pieces (pieces.py) of a key whose values are in device memory: they are encoded and decoded on the GPU.

The codecs are those of the host, whose functions also work on CuPy's arrays; residuals are in device memory. Messages
are in page-locked host memory, so that only encoded bytes are copied between the GPU and the host.

Cost: a copy for each piece, and the kernel launches of its codec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpikv.codecs.base import Codec, State
from mpikv.codecs.identity import IDENTITY
from mpikv.collectives.stages import Span
from mpikv.observe.recorder import Recorder
from mpikv.placement.keys import KeyInfo
from mpikv.spaces.base import Space, SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.pieces import Pieces


class DevicePieces(Pieces):
    """See `Pieces`. Values, encoded pieces and states are arrays of `space`; messages are in page-locked memory."""

    def __init__(self, info: KeyInfo, codec: Codec, space: DeviceSpace, recorder: Recorder | None = None) -> None:
        super().__init__(info, codec, recorder)
        self.space = space

    def _new_state(self, n_elems: int) -> State:
        return self._state_on_device(self._codec.init(n_elems))

    def _state_on_device(self, state: State) -> State:
        return {name: self.space.from_host(array) for name, array in state.items()}

    def encode_all(self, values: SpaceArray, pieces: Iterable[Span]) -> dict[Span, SpaceArray]:
        return {piece: self.encode(values, piece).view(np.uint8) for piece in pieces}

    def _on_device(self, data: Any, n_elems: int) -> SpaceArray:
        """Encoded values in device memory. data: they are there already, or in a message."""
        if not isinstance(data, np.ndarray):
            return data
        self._codec.check(self._as_encoded(data), n_elems)
        on_device = self.space.empty(data.nbytes, np.dtype(np.uint8))
        self.space.upload(on_device, data)
        return on_device

    def decode(self, data: Any, out: SpaceArray) -> None:
        super().decode(self._on_device(data, out.size), out)

    def _empty(self, n_elems: int, dtype: np.dtype[Any]) -> SpaceArray:
        return self.space.empty(n_elems, dtype)

    # --- states

    def recut(self, states: Mapping[Span, State], pieces: Iterable[Span]) -> None:
        """See `Pieces`. Blocks until the states have been copied to the host, or from there."""
        super().recut(self._on_host(states), pieces)
        self.states = {piece: self._state_on_device(state) for piece, state in self.states.items()}

    def states_on_host(self) -> Mapping[Span, State]:
        """See `Pieces`. Blocks until they have been copied."""
        return self._on_host(self.states)

    def _on_host(self, states: Mapping[Span, State]) -> dict[Span, State]:
        return {
            piece: {
                name: array if isinstance(array, np.ndarray) else self.space.to_host(array)
                for name, array in state.items()
            }
            for piece, state in states.items()
        }


def pieces_in(space: Space | None, info: KeyInfo, codec: Codec, recorder: Recorder | None = None) -> Pieces:
    """Make the pieces of a key whose values are in `space`. On a GPU they are encoded there, if the codec can do so."""
    if codec != IDENTITY and isinstance(space, DeviceSpace) and codec.on_device:
        return DevicePieces(info, codec, space, recorder)
    return Pieces(info, codec, recorder)
