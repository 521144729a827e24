"""Error feedback: what a codec has lost of a push is added to the next one.

A codec around a codec. The residual of a piece, float32 and 0 at first, is what earlier pushes still owe:

    total = values + residual
    data = encode(total)
    residual = total - decode(data)

So the sum of all that has been decoded, and the residual, are the sum of all that was pushed, but for the rounding of
float32 in these two lines. `registry.create` puts it around every codec that loses something, unless the parameter
'error_feedback' is False or the codec keeps a residual itself. The codec inside is given float32, of whatever dtype the
key is.

What is not finite in a residual is set to 0: no later push could make up for it.

Wire: that of the codec inside. State: 4 n bytes, and that of the codec inside. Cost: one pass over values and residual
in memory where the codec has `separate_elems`, else three; in the cache one sum, the codec's encoding and decoding, and
the check for what is not finite.
Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import BFLOAT16, HostArray
from mpikv.codecs.base import Codec, State
from mpikv.codecs.blocks import BLOCK_ELEMS, FLOAT32, as_float32, forget_what_is_not_finite, residual_of, spans, step_of
from mpikv.common.checks import shown

STEPS = 2  # of the codec at a time: they still stay in the cache, and Python's own time is spent half as often
_FLOATS = (np.dtype(np.float16), BFLOAT16, FLOAT32, np.dtype(np.float64))


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """A codec, and what it still owes. Its name is that of the codec."""

    codec: Codec

    has_residual = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"ErrorFeedback is put around a codec, not {shown(self.codec)}")
        if not takes_error_feedback(self.codec):
            raise ValueError(f"{self.codec!r} loses nothing, or keeps what it lost itself: leave ErrorFeedback out")
        for name in ("name", "on_device", "host_state"):
            object.__setattr__(self, name, getattr(self.codec, name))

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """That of the codec inside, for what it is given."""
        return self.codec.wire_dtype(_given(dtype))

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        """Those of the codec inside, for what it is given."""
        return self.codec.wire_bytes(n_elems, _given(dtype))

    @property
    def row_elems(self) -> int:
        """Those of the codec inside."""
        return self.codec.row_elems

    def for_shape(self, shape: tuple[int, ...]) -> ErrorFeedback:
        """That of the codec inside."""
        return replace(self, codec=self.codec.for_shape(shape))

    def init(self, n_elems: int) -> State:
        """Nothing is owed. Raises ValueError for a codec that has something called "residual" itself."""
        inner = self.codec.init(n_elems)
        if "residual" in inner:
            raise ValueError(f"{self.codec!r} keeps a residual itself: let its class say `has_residual = True`")
        return {**inner, **residual_of(n_elems)}

    def encode(self, values: HostArray, state: State) -> HostArray:
        """Encode the values and what is owed."""
        if _given(values.dtype) != FLOAT32:
            return self.codec.encode(values, state)
        total = state["residual"]
        with np.errstate(over="ignore", invalid="ignore"):
            if self.codec.separate_elems is None or not isinstance(values, np.ndarray):
                return self._encode_part(values, total, state)
            data = np.empty(self.codec.wire_bytes(total.size, FLOAT32), np.uint8)
            for part in spans(total.size, STEPS * self.codec.separate_elems):
                begin, end = (self.codec.wire_bytes(n, FLOAT32) for n in (part.start, part.stop))
                data[begin:end] = self._encode_part(values[part], total[part], state).view(np.uint8)
        return data.view(self.codec.wire_dtype(FLOAT32) or np.uint8)

    def _encode_part(self, values: HostArray, total: HostArray, state: State) -> HostArray:
        """Encode the values and what is owed of them; `total`, the residual, becomes the new one where it lies."""
        step = step_of(total, total.size, STEPS * BLOCK_ELEMS)
        for part in spans(total.size, step):
            owed = total[part]
            owed += as_float32(values[part])
        data = self.codec.encode(total, state)
        if np.may_share_memory(data, total):
            data = data.copy()
        self.codec.subtract(data, total)
        for part in spans(total.size, step):
            forget_what_is_not_finite(total[part])
        return data

    def check(self, data: HostArray, n_elems: int) -> None:
        """As the codec inside does."""
        self.codec.check(data, n_elems)

    def decode(self, data: HostArray, out: HostArray) -> None:
        """As the codec inside does."""
        self.codec.decode(data, out)

    def add(self, data: HostArray, out: HostArray) -> None:
        """As the codec inside does."""
        self.codec.add(data, out)

    def subtract(self, data: HostArray, out: HostArray) -> None:
        """As the codec inside does."""
        self.codec.subtract(data, out)


def takes_error_feedback(codec: Codec | type[Codec]) -> bool:
    """Return whether there is something to feed back that the codec does not keep itself."""
    return not (codec.exact or codec.has_residual)


def _given(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return what the codec inside is given for values of `dtype`; integers have no residual."""
    return FLOAT32 if dtype in _FLOATS else dtype
