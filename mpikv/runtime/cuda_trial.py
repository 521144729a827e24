"""The child that tries MPI with device memory: `python -m mpikv.runtime.cuda_trial LIBRARY DEVICE SOURCE LIMIT_S`.

It is a job of one rank. It sends itself messages from host memory to a device's, within it, and back: a few bytes, some
and many, since libraries send messages of different sizes in different ways. What has arrived, and what a copy reads on
the device, is compared with what was sent, which is something else for each size: so bytes that an earlier message has
left somewhere are noticed. The last line of output is the answer, in JSON. A library that takes a device's pointer for
one to host memory ends this process with a signal: who started it sees that, and lives on (cuda_aware.py).

Device memory is CuPy's, or that of another SOURCE, MODULE:CLASS, of the same methods: so the trial itself can be tested
without a GPU. Blocks until the messages have arrived, at most LIMIT_S, for then the kernel ends this process. Cost: the
start of an interpreter, of MPI and of CUDA, about two seconds; 16 MiB and a context of CUDA's on the GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import signal
import sys
from typing import Any

import numpy as np

from mpikv.runtime import library
from mpikv.runtime.loaded import loaded_path, mapped_files

CUPY = "mpikv.runtime.cuda_trial:CupyMemory"
SIZES_BYTES = (4, 64 << 10, 8 << 20)
SEGMENTS = "/dev/shm/mpich_shm_"  # how the paths of MPICH's segments begin
PERIOD = 251  # of the bytes that are sent; a prime number, so that a part that lands at another's place is noticed
UNSENT = 0xFF  # what is received into holds at first: no byte that is sent


class CupyMemory:
    """CuPy's arrays on GPU number `device` of those that are visible."""

    def __init__(self, device: int) -> None:
        import cupy  # noqa: PLC0415 - only this source needs it

        self._cupy = cupy
        cupy.cuda.Device(device).use()

    def put(self, data: np.ndarray) -> Any:
        """Return an array on the device that holds `data`, (n,) uint8, and that mpi4py takes. Blocks until it does."""
        array = self._cupy.asarray(data)
        self._cupy.cuda.runtime.deviceSynchronize()
        return array

    def get(self, array: Any) -> np.ndarray:
        """Copy to the host, after all that the library may have put into its own streams. Blocks."""
        self._cupy.cuda.runtime.deviceSynchronize()
        return np.asarray(self._cupy.asnumpy(array))


def pattern(n_bytes: int) -> np.ndarray:
    """The bytes of a message, (n_bytes,) uint8: at each place another one than in messages of the other sizes."""
    first = 1 + SIZES_BYTES.index(n_bytes)
    return np.resize(np.roll(np.arange(PERIOD, dtype=np.uint8), -first), n_bytes)


def try_sizes(memory: CupyMemory) -> tuple[bool, str]:
    """Send messages to this process itself. Returns whether they have arrived, and what to say of it. Blocks."""
    from mpi4py import MPI  # noqa: PLC0415 - `main` has chosen the library

    for n_bytes in SIZES_BYTES:
        data, landed = pattern(n_bytes), np.full(n_bytes, UNSENT, np.uint8)
        first, second = memory.put(landed), memory.put(landed)
        for sent, received in ((data, first), (first, second), (second, landed)):
            MPI.Request.Waitall([MPI.COMM_SELF.Irecv(received, source=0), MPI.COMM_SELF.Isend(sent, dest=0)])
        if not all(np.array_equal(found, data) for found in (memory.get(second), landed)):
            return False, f"of {n_bytes} bytes that were sent, others arrived"
    return True, f"tried with {SIZES_BYTES[-1] >> 20} MiB"


def remove_segments() -> None:
    """Remove the name of the memory that MPICH has made for the ranks of this host, of which there is only this one.

    It removes it in MPI_Finalize, which a process that crashes does not come to.
    """
    for path in mapped_files():
        if path.startswith(SEGMENTS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def trial(path: str, device: int, source: str) -> tuple[bool, str]:
    """Try the library that is to be loaded from `path`. Returns whether it works, and what to say of it. Blocks."""
    try:
        library.prepare()
        remove_segments()
        loaded = loaded_path()
        if os.path.realpath(loaded) != os.path.realpath(path):
            return False, f"the trial failed: it loaded {loaded or 'an unknown library'} instead of {path}"
        module, _, name = source.partition(":")
        return try_sizes(getattr(importlib.import_module(module), name)(device))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the result
        return False, f"the trial failed: {type(error).__name__}: {error}"


def main() -> None:
    path, device, source, limit_s = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is a result, of which nobody wants a file
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process also while it is inside of MPI
    signal.alarm(math.ceil(float(limit_s)))
    aware, why = trial(path, int(device), source)
    print("\n" + json.dumps({"aware": aware, "why": " ".join(why.split())}), flush=True)


if __name__ == "__main__":
    main()
