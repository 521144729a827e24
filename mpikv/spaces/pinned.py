"""Page-locked host memory of one store, for copies to and from a GPU, and counts of these copies.

A copy between device and host is asynchronous only if the host's pages are locked, and locking takes far longer than
most copies. So memory for a short time comes from CuPy's pool of locked memory (`take`), and memory that ranks share is
locked once (`lock`). CUDA locks whole pages, none of them twice, and refuses to copy a range that was locked in two
calls. So a range is widened to whole pages, and locked anew as one with the locked ranges that it touches.

Cost: CuPy's pool keeps as much memory as was in use at one time.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import Counter
from typing import NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.spaces.gpu import Gpu

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all GPUs


class Pinned:
    """The page-locked memory for one GPU. Threads may share it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._locked: list[_Locked] = []

    def take(self, n_bytes: int) -> HostArray:
        """Return (n_bytes,) of uint8, uninitialised. The memory returns to the pool with the last reference to it.

        No copy may be under way in it then.
        """
        if not n_bytes:
            return np.empty(0, np.uint8)
        with self._gpu.current(f"makes {n_bytes} bytes of page-locked host memory"):
            memory = self._gpu.cupy.cuda.alloc_pinned_memory(n_bytes)
        array: HostArray = np.frombuffer(memory, np.uint8, n_bytes)
        return array

    def lock(self, array: HostArray) -> HostArray:
        """Lock the pages of a contiguous array, unless they are locked already. Returns the array.

        No copy may be under way in these pages. Other memory in the same pages is locked, too.
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
                    self._unlock(one)
                    self._locked.remove(one)
                    begin, end = min(begin, one.begin), max(end, one.end)
                with self._gpu.current(f"locks {end - begin} bytes of host memory (`ulimit -l` may limit that)"):
                    self._gpu.cupy.cuda.runtime.hostRegister(begin, end - begin, PORTABLE)
                # `owners` keeps the pages mapped here, even if another process unmaps them.
                pages = np.frombuffer((ctypes.c_uint8 * (end - begin)).from_address(begin), np.uint8)
                self._locked.append(_Locked(begin, end, pages, [array, *(one.owners for one in touched)]))
        return array

    def _unlock(self, one: _Locked) -> None:
        with self._gpu.current("unlocks host memory"):
            self._gpu.cupy.cuda.runtime.hostUnregister(one.begin)

    def close(self) -> None:
        """Unlock all that `lock` has locked. No copy may be under way."""
        with self._lock:
            locked, self._locked = self._locked, []
        for one in locked:
            self._unlock(one)


class _Locked(NamedTuple):
    """Locked pages from `begin` to `end`. owners: objects that keep them mapped."""

    begin: int
    end: int
    pages: HostArray
    owners: list[object]


class CopyCounts:
    """How many copies were begun, and of how many bytes: `down` to the host, `up` from it, on the `device`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, kind: str, n_bytes: int) -> None:
        """Count a copy. A lock is needed, since callers' threads and the progress thread count."""
        with self._lock:
            self._counts[kind] += 1
            self._counts[kind + "_bytes"] += n_bytes

    def stats(self) -> dict[str, int]:
        """As `store.stats()` names them."""
        kinds = [kind + suffix for kind in ("down", "up", "device") for suffix in ("", "_bytes")]
        return {f"copies_{kind}": self._counts[kind] for kind in kinds}
