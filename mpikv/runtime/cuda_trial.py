"""The child process that tries whether MPI takes device memory: `python -m mpikv.runtime.cuda_trial`.

It is a job of one rank. It sends device memory to itself, a few bytes, some and many, since libraries send messages of
different sizes in different ways, and compares what has arrived. Its last line of output is the verdict, in JSON. A
library that takes a device's pointer for one to host memory ends this process with a signal: who started it sees that,
and lives on (cuda_aware.py).

Device memory comes from CuPy, or from another source of the same two methods, which is named on the command line: so
the trial itself can be tested without a GPU. Blocks until the messages have arrived, at most `--limit-s`, for then the
kernel ends this process. Cost: the start of an interpreter, of MPI and of CUDA, about two seconds; 16 MiB and
a context of CUDA's on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import resource
import signal
import sys
from typing import Any, Protocol

import numpy as np

from mpikv.runtime import library
from mpikv.runtime.cuda_driver import NO_CUPY
from mpikv.runtime.loaded import loaded_path, mapped_files

CUPY = "mpikv.runtime.cuda_trial:CupyMemory"
SIZES_BYTES = (4, 64 << 10, 8 << 20)
SEGMENTS = "/dev/shm/mpich_shm_"  # how the paths of MPICH's segments begin
PERIOD = 251  # of the bytes that are sent; a prime number, so that a part that lands at another's place is noticed
YES, NO, FAILED = "yes", "no", "failed"  # failed: the trial could not be made, which says nothing about the library


class Memory(Protocol):
    """A source of device memory."""

    def put(self, data: np.ndarray) -> Any:
        """Return an array on the device that holds `data`, (n,) uint8, and that mpi4py takes. Blocks until it does."""

    def get(self, array: Any) -> np.ndarray:
        """Return what such an array holds now, in host memory. Blocks."""


class CupyMemory:
    """Memory of a GPU, by CuPy."""

    def __init__(self, device: int) -> None:
        """Use GPU number `device` of those that are visible."""
        try:
            import cupy  # noqa: PLC0415 - only this source needs it
        except ModuleNotFoundError:
            raise ModuleNotFoundError(NO_CUPY) from None
        self._cupy = cupy
        cupy.cuda.Device(device).use()

    def put(self, data: np.ndarray) -> Any:
        """Copy to the GPU."""
        array = self._cupy.asarray(data)
        self._cupy.cuda.runtime.deviceSynchronize()
        return array

    def get(self, array: Any) -> np.ndarray:
        """Copy to the host, after all that the library may have put into its own streams."""
        self._cupy.cuda.runtime.deviceSynchronize()
        return np.asarray(self._cupy.asnumpy(array))


def try_sizes(memory: Memory) -> tuple[str, str]:
    """Send device memory to this process itself. Returns the verdict and its reason. Blocks."""
    from mpi4py import MPI  # noqa: PLC0415 - `main` has chosen the library

    for n_bytes in SIZES_BYTES:
        data = np.resize(np.arange(PERIOD, dtype=np.uint8), n_bytes)
        sent, received = memory.put(data), memory.put(np.full(n_bytes, 0xFF, np.uint8))
        MPI.Request.Waitall([MPI.COMM_SELF.Irecv(received, source=0), MPI.COMM_SELF.Isend(sent, dest=0)])
        if not np.array_equal(memory.get(received), data):
            return NO, f"of {n_bytes} bytes that were sent, others arrived"
    return YES, f"tried with {SIZES_BYTES[-1] >> 20} MiB"


def remove_segments() -> None:
    """Remove the name of the memory that MPICH has made for the ranks of this host, of which there is only this one.

    It removes it in MPI_Finalize, which a process that crashes does not come to.
    """
    for path in mapped_files():
        if path.startswith(SEGMENTS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def trial(path: str, device: int, source: str) -> tuple[str, str]:
    """Try the library that is to be loaded from `path`. Returns the verdict and its reason. Blocks."""
    try:
        library.prepare()
        remove_segments()
        loaded = loaded_path()
        if os.path.realpath(loaded) != os.path.realpath(path):
            return FAILED, f"the trial loaded {loaded or 'an unknown library'} instead of {path}"
        module, _, name = source.partition(":")
        return try_sizes(getattr(importlib.import_module(module), name)(device))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the result
        return FAILED, f"{type(error).__name__}: {error}"


def main() -> None:
    """Make the trial that the command line describes, and print the verdict."""
    parser = argparse.ArgumentParser(prog="python -m mpikv.runtime.cuda_trial", description=__doc__)
    parser.add_argument("--library", required=True, help="the file of the MPI library that is to be tried")
    parser.add_argument("--device", type=int, default=0, help="the number of the GPU among the visible ones")
    parser.add_argument("--source", default=CUPY, help="where device memory comes from, MODULE:CLASS")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds after which the kernel ends this process")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is a result, of which nobody wants a file
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process also while it is inside of MPI
    signal.alarm(math.ceil(options.limit_s))
    verdict, why = trial(options.library, options.device, options.source)
    print("\n" + json.dumps({"verdict": verdict, "why": " ".join(why.split())}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
