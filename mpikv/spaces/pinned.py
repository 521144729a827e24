"""Page-locked host memory of one store: what it copies to and from a GPU through, and what copies were made.

A copy between device and host goes on by itself only where the host's pages are locked, and locking them takes far
longer than most copies. So memory that is taken for a moment is kept (`take`, `give`), and memory that ranks share is
locked where it lies, once (`lock`). The driver takes whole pages, which must not be locked twice, and copies nothing
that crosses from one locking into another: what is locked is widened to whole pages, and joined with what it touches.

Cost: the longest use of each length at a time stays locked, at most `KEPT_BYTES` a piece.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import Counter
from typing import NamedTuple

import numpy as np

from mpikv.arrays import HostArray
from mpikv.spaces.driver import Driver

LEAST_BYTES = 4096  # shorter memory shares a length
KEPT_BYTES = 8 << 20  # longer copies to and from the host go in pieces of so many bytes


def length_of(n_bytes: int) -> int:
    """How much memory is taken for so many bytes: lengths that differ little share memory."""
    return max(LEAST_BYTES, 1 << (n_bytes - 1).bit_length() if n_bytes <= KEPT_BYTES else n_bytes)


class Pinned:
    """Of one GPU. Threads may share it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._free: dict[int, list[HostArray]] = {}  # by length
        self._locked: list[_Locked] = []

    def take(self, n_bytes: int) -> HostArray:
        """(n_bytes or more,) of uint8 and any content, which nobody else has until it is given back."""
        length = length_of(n_bytes)
        with self._lock:
            kept = self._free.get(length)
            if kept:
                return kept.pop()
        return self._driver.pinned(length)

    def give(self, memory: HostArray) -> None:
        """Give back what `take` returned; no copy may be under way in it. Long memory is not kept."""
        if memory.size <= KEPT_BYTES:
            with self._lock:
                self._free.setdefault(memory.size, []).append(memory)

    def lock(self, array: HostArray) -> HostArray:
        """Lock the pages that a contiguous array lies in, unless they are. Returns the array.

        No copy may be under way in these pages. What lies in the same pages stays locked with it.
        """
        begin = array.__array_interface__["data"][0]
        end = begin + array.nbytes
        with self._lock:
            touched = [one for one in self._locked if one.begin < end and begin < one.end]
            if array.nbytes and not any(one.begin <= begin and end <= one.end for one in touched):
                page = mmap.PAGESIZE
                begin, end = begin // page * page, -(-end // page) * page
                touched = [one for one in self._locked if one.begin < end and begin < one.end]
                for one in touched:
                    self._driver.unregister(one.pages)
                    self._locked.remove(one)
                    begin, end = min(begin, one.begin), max(end, one.end)
                memory = (ctypes.c_uint8 * (end - begin)).from_address(begin)
                pages = np.frombuffer(memory, np.uint8)
                self._driver.register(pages)
                self._locked.append(_Locked(begin, end, pages, [array, *(one.owners for one in touched)]))
        return array

    def close(self) -> None:
        """Unlock what `lock` has locked, and let all else go. No copy may be under way."""
        with self._lock:
            locked, self._locked = self._locked, []
            self._free.clear()
        for one in locked:
            self._driver.unregister(one.pages)


class _Locked(NamedTuple):
    """Pages from `begin` to `end`. owners: what keeps them mapped."""

    begin: int
    end: int
    pages: HostArray
    owners: list[object]


class Copies:
    """How many copies were begun, and of how many bytes: `down` to the host, `up` from it, on the `device`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, kind: str, n_bytes: int) -> None:
        """One more. A lock, since callers' threads and the progress thread count."""
        with self._lock:
            self._counts[kind] += 1
            self._counts[kind + "_bytes"] += n_bytes

    def stats(self) -> dict[str, int]:
        """As `store.stats()` names them."""
        kinds = [kind + unit for kind in ("down", "up", "device") for unit in ("", "_bytes")]
        return {f"copies_{kind}": self._counts[kind] for kind in kinds}
