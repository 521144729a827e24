"""Error feedback: what a codec has lost of a push is added to the next push.

It is a codec around a codec. The residual of a piece, float32 and 0 at first, is what no push has sent yet:

    total = values + residual
    data = encode(total)
    residual = total - decode(data)

So the sum of all decoded values, plus the residual, is the sum of all pushed values, except for the rounding of float32
in the first and the last line. `registry.create` puts it around every codec that loses something, unless the parameter
'error_feedback' is False or the codec keeps a residual itself. The inner codec gets float32, whatever the key's dtype.

NaN and infinities in a residual are set to 0, since no later push could send them.

Wire: that of the inner codec. State: 4 n bytes, and that of the inner codec. Cost: one pass over values and residual in
memory if the codec has `separate_elems`, else three; in the cache one sum, the codec's encoding and decoding, and the
check for NaN and infinities.
Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import BFLOAT16, HostArray
from mpikv.codecs.base import Codec, State
from mpikv.codecs.blocks import BLOCK_ELEMS, FLOAT32, as_float32, spans, step_of, zero_non_finite
from mpikv.common.checks import shown

STEPS = 2  # how many steps of the codec are encoded at a time: they still fit into the cache, for half the Python calls
_FLOATS = (np.dtype(np.float16), BFLOAT16, FLOAT32, np.dtype(np.float64))


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Wraps a codec and keeps what it has lost. It has the codec's name."""

    codec: Codec

    has_residual = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"ErrorFeedback is put around a codec, not {shown(self.codec)}")
        if not takes_error_feedback(self.codec):
            raise ValueError(f"{self.codec!r} loses nothing, or keeps what it lost itself: leave ErrorFeedback out")
        for name in ("name", "on_device"):
            object.__setattr__(self, name, getattr(self.codec, name))

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        return self.codec.wire_dtype(_inner_dtype(dtype))

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        return self.codec.wire_bytes(n_elems, _inner_dtype(dtype))

    @property
    def row_elems(self) -> int:
        return self.codec.row_elems

    def for_shape(self, shape: tuple[int, ...]) -> ErrorFeedback:
        return replace(self, codec=self.codec.for_shape(shape))

    def init(self, n_elems: int) -> State:
        inner = self.codec.init(n_elems)
        if "residual" in inner:
            raise ValueError(f"{self.codec!r} keeps a residual itself: let its class say `has_residual = True`")
        return {**inner, "residual": np.zeros(n_elems, FLOAT32)}

    def encode(self, values: HostArray, state: State) -> HostArray:
        if _inner_dtype(values.dtype) != FLOAT32:
            return self.codec.encode(values, state)
        total = state["residual"]
        with np.errstate(over="ignore", invalid="ignore"):
            if self.codec.separate_elems is None or not isinstance(values, np.ndarray):
                return self._encode_span(values, total, state)
            data = np.empty(self.codec.wire_bytes(total.size, FLOAT32), np.uint8)
            for span in spans(total.size, STEPS * self.codec.separate_elems):
                begin, end = (self.codec.wire_bytes(n, FLOAT32) for n in (span.start, span.stop))
                data[begin:end] = self._encode_span(values[span], total[span], state).view(np.uint8)
        return data.view(self.codec.wire_dtype(FLOAT32) or np.uint8)

    def _encode_span(self, values: HostArray, total: HostArray, state: State) -> HostArray:
        """Encode values + residual. total: the residual of these values; the new one is written into it."""
        step = step_of(total, total.size, STEPS * BLOCK_ELEMS)
        for span in spans(total.size, step):
            sums = total[span]
            sums += as_float32(values[span])
        data = self.codec.encode(total, state)
        if np.may_share_memory(data, total):
            data = data.copy()
        self.codec.subtract(data, total)
        for span in spans(total.size, step):
            zero_non_finite(total[span])
        return data

    def check(self, data: HostArray, n_elems: int) -> None:
        self.codec.check(data, n_elems)

    def decode(self, data: HostArray, out: HostArray) -> None:
        self.codec.decode(data, out)

    def add(self, data: HostArray, out: HostArray) -> None:
        self.codec.add(data, out)

    def subtract(self, data: HostArray, out: HostArray) -> None:
        self.codec.subtract(data, out)


def takes_error_feedback(codec: Codec | type[Codec]) -> bool:
    """Return whether the codec loses something that it does not keep itself."""
    return not (codec.exact or codec.has_residual)


def _inner_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which the inner codec gets values of `dtype`; integers have no residual."""
    return FLOAT32 if dtype in _FLOATS else dtype
