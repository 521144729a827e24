"""Parts of optimizer states on their way between owners and worker 0.

A part is the state of the elements `[begin, end)` of one key. Parts travel pickled: only ranks of one job send them to
each other, which run the same program anyway. Files are another matter, see `states`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import NamedTuple

from mpikv.keys import Key
from mpikv.optimizers.base import State


class Part(NamedTuple):
    """The state of elements `[begin, end)` of a key."""

    key: Key
    begin: int
    end: int
    state: State


def parts_to_bytes(parts: Sequence[Part]) -> bytes:
    """Parts as bytes for another rank."""
    return pickle.dumps(list(parts), protocol=pickle.HIGHEST_PROTOCOL)


def parts_from_bytes(data: bytes) -> list[Part]:
    """The inverse."""
    parts: list[Part] = pickle.loads(data)
    return parts
