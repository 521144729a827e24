"""How fast a codec is on one core of this machine, which depends on its parameters and on whether there is Numba."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpikv.codecs.base import Codec
from mpikv.codecs.identity import IDENTITY

MOST_QUICK_ELEMS, QUICK_TURNS = 1 << 15, 5


class Speed(NamedTuple):
    """What a codec costs a core for each element, in seconds: to encode it, to decode it, to decode it into a sum."""

    encode_s: float
    decode_s: float
    add_s: float


FREE = Speed(0.0, 0.0, 0.0)


def speed_of(codec: Codec, piece_elems: int, pieces: int, turns: int) -> Speed:
    """Measure a codec: that many pieces of float32 one after the other, with what it remembers of each."""
    values = np.random.default_rng(0).standard_normal((pieces, piece_elems), np.float32)
    states, sums = [codec.init(piece_elems) for _ in range(pieces)], np.zeros_like(values)
    data = [codec.encode(value, state) for value, state in zip(values, states, strict=True)]

    def elem_s(act: Callable[[int], object]) -> float:
        return processor_s(lambda: list(map(act, range(pieces))), turns) / values.size

    return Speed(
        elem_s(lambda i: codec.encode(values[i], states[i])),
        elem_s(lambda i: codec.decode(data[i], sums[i])),
        elem_s(lambda i: codec.add(data[i], sums[i])),
    )


def quick_speed_of(codec: Codec, n_elems: int) -> Speed:
    """Return that of a codec for a value of so many elements, since a short one costs more each. Measured once."""
    return FREE if codec == IDENTITY else _quick_speed_of(codec, min(1 << n_elems.bit_length(), MOST_QUICK_ELEMS))


@lru_cache(maxsize=256)  # of matrices of other shapes a codec is another one
def _quick_speed_of(codec: Codec, n_elems: int) -> Speed:
    return speed_of(codec, max(1, n_elems // codec.row_elems) * codec.row_elems, 1, QUICK_TURNS)


def processor_s(what: Callable[[], object], turns: int) -> float:
    """Return the seconds of one call, the median of some: of this thread's processor time, which nobody disturbs."""
    found = []
    for _ in range(turns):
        begin_s = time.thread_time()
        what()
        found.append(time.thread_time() - begin_s)
    return statistics.median(found)
