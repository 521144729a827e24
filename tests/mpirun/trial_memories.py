"""Sources of memory for the trial of mpikv.runtime.cuda_trial that need no GPU: host memory shown as a device's.

Each does one thing that a real library or GPU may do.
"""

from __future__ import annotations

import os
import signal

import numpy as np

from mpikv.runtime.cuda_trial import SEGMENTS
from mpikv.runtime.loaded import mapped_files

UNMAPPED = 8192  # below where Linux maps anything (vm.mmap_min_addr)


class Array:
    """Memory that only `__cuda_array_interface__` shows, as that of a GPU."""

    def __init__(self, host: np.ndarray, address: int) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": host.shape,
            "typestr": host.dtype.str,
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class Works:
    """A library that takes device memory; the others fail somewhere."""

    def __init__(self, device: int) -> None:
        assert device == 3  # the number that the tests give

    def put(self, data: np.ndarray) -> Array:
        host = data.copy()
        return Array(host, host.ctypes.data)

    def get(self, array: Array) -> np.ndarray:
        return array.host


class WrongByte(Works):
    """The last byte of the largest message is another."""

    def get(self, array: Array) -> np.ndarray:
        if array.host.size > 1 << 20:
            array.host[-1] ^= 1
        return array.host


class DevicePointer(Works):
    """A library that takes the pointer for one to host memory."""

    def put(self, data: np.ndarray) -> Array:
        return Array(data, UNMAPPED)


class Hangs(Works):
    def get(self, array: Array) -> np.ndarray:
        signal.pause()
        return array.host


class Segments(Works):
    """Says how many segments in /dev/shm would be left by a crash."""

    def __init__(self, device: int) -> None:
        named = [path for path in mapped_files() if path.startswith(SEGMENTS) and os.path.exists(path)]
        raise RuntimeError(f"{len(named)} segments")
