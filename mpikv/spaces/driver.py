"""What is asked of a GPU: memory, copies, streams, events and kernels. One object for each GPU that a store uses.

Two kinds exist: the one over CuPy (cupy_driver.py), and one without a GPU, which finds mistakes in the order of what is
done (mpikv.testing.fake_gpu). Everything that a store does on a GPU goes through this; so the part that only a GPU can
test is short.

Addresses are plain numbers, those of device memory and of page-locked host memory in one space (CUDA's unified virtual
addresses). A stream is a number, too, as in `__cuda_array_interface__`: 1 is CUDA's legacy default stream. Calls put
work into a stream and return; nothing here waits, and nothing waits for the whole device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from mpikv.arrays import HostArray
from mpikv.errors import MpikvError
from mpikv.spaces.program import Entry, Program
from mpikv.spaces.routine import Routine

Event = Any
"""A point in a stream's work, of the driver's own type."""


class OutOfDeviceMemory(MpikvError, MemoryError):  # noqa: N818 - reads like its siblings
    """A GPU has no room for what was asked for."""


class Driver(Protocol):
    """One GPU of this process. Calls may come from any thread.

    number: which of the GPUs that the process sees. name: what it is called. uuid: the same for the same GPU in every
    process of a host, whatever their numbers for it.
    """

    number: int
    name: str
    uuid: str

    # --- memory

    def allocate(self, n_bytes: int) -> int:
        """New memory of an allocation of its own, which other processes can open. Raises OutOfDeviceMemory."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` returned. Nothing may be under way in it."""
        ...

    def pinned(self, n_bytes: int) -> HostArray:
        """New page-locked host memory, (n_bytes,) of uint8, that copies of any stream can read and write."""
        ...

    def register(self, memory: HostArray) -> None:
        """Lock the pages of host memory that is there already, so that it is as good as `pinned` for copies."""
        ...

    def unregister(self, memory: HostArray) -> None:
        """Undo `register`."""
        ...

    def export(self, address: int) -> bytes:
        """What another process of this host passes to `open`. address: what `allocate` returned."""
        ...

    def open(self, exported: bytes) -> int:
        """The address here of what another process has exported. Once for each of its allocations."""
        ...

    def close(self, address: int) -> None:
        """Undo `open`."""
        ...

    # --- order

    def current(self) -> AbstractContextManager[None]:
        """A context in which this GPU is the calling thread's current one, for a library that is given its memory."""
        ...

    def stream(self) -> int:
        """A new stream, which does not wait for the default one."""
        ...

    def record(self, stream: int, number: int | None = None) -> Event:
        """An event that is done when all that is in the stream by now is. number: of the stream's GPU; None: this."""
        ...

    def wait(self, stream: int, event: Event, number: int | None = None) -> None:
        """What comes into the stream from now on is done after the event. number: as above."""
        ...

    def done(self, event: Event) -> bool:
        """Whether it is done. Raises MpikvError where the GPU has failed."""
        ...

    def as_caller(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object) -> Any:
        """An array of the library that callers of this driver use (CuPy), in memory that is there. owner: kept alive.

        Raises UnsupportedError where the library has no such dtype.
        """
        ...

    # --- work

    def copy(self, to: int, source: int, n_bytes: int, stream: int) -> None:
        """Copy bytes, from and to device memory of any GPU or page-locked host memory."""
        ...

    def copy_strided(
        self,
        to: tuple[int, Sequence[int]],
        source: tuple[int, Sequence[int]],
        shape: Sequence[int],
        itemsize: int,
        stream: int,
    ) -> None:
        """Copy elements between arrays of one shape, each an address and its strides in bytes."""
        ...

    def launch(
        self, program: Program | Routine, n_elems: int, addresses: Sequence[int], numbers: Sequence[Any], stream: int
    ) -> None:
        """Run a program, or a routine, on n elements of the arrays at these addresses."""
        ...

    def launch_many(self, program: Program | Routine, entries: Sequence[Entry], stream: int) -> None:
        """Run a program on several lists of arrays, in as few launches as the driver can. Nothing orders them."""
        ...
