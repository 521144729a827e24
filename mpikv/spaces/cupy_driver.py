"""GPUs by way of CuPy: its bindings of CUDA's runtime, and its compiler of kernels. The one driver of real GPUs.

Written for CuPy 13.4 to 14, whose functions here are the same. Addresses, streams and events go to CUDA as the numbers
that they are; none of CuPy's memory pools and streams takes part, but arrays for callers are CuPy's. Each call makes
its GPU the current one of the calling thread, where it is not, and puts back the one that was.

Kernels are compiled when they are first launched, some 0.1 s each, and kept; CuPy keeps them in files, too, for later
processes (CUPY_CACHE_DIR).

Cost: 5 to 10 us of Python for a call, most of it CuPy's and CUDA's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import BFLOAT16, HostArray
from mpikv.devices import import_cupy
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.spaces import source as kernels
from mpikv.spaces.driver import Event, OutOfDeviceMemory
from mpikv.spaces.program import Entry, Program
from mpikv.spaces.routine import Routine

ALLOCATION_BYTES = 2 << 20
"""Allocations are multiples of it, since CUDA may take shorter ones out of one block, and another process that opens
one of them would see them all (CUDA C++ Programming Guide, interprocess communication)."""

BLOCKS_PER_PROCESSOR = 8  # of 256 threads: as many threads as a multiprocessor holds

# CUDA's numbers, where CuPy has no names for them (driver_types.h).
PORTABLE = 1  # cudaHostAllocPortable, cudaHostRegisterPortable: page-locked for all GPUs
OUT_OF_MEMORY, NO_DRIVER, NOT_READY = 2, 35, 600
LOST = (700, 702, 709, 710, 714, 715, 716, 717, 718, 719)  # errors after which a process cannot use its GPU any more


WHICH = "nvidia-smi and CUDA_VISIBLE_DEVICES say which there are"


class Found(NamedTuple):
    """How many GPUs this process can use, counted from 0. reason: why there are none, else ""."""

    n_gpus: int
    reason: str


def devices() -> Found:
    """The GPUs that this process sees; none where CuPy or the driver of NVIDIA is missing. Local; imports CuPy."""
    try:
        cupy = import_cupy("a GPU")
    except UnsupportedError as error:
        return Found(0, str(error))
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # noqa: BLE001 - CUDA's own, or a library that cannot be loaded
        hint = "the driver of NVIDIA is missing or too old" if getattr(error, "status", 0) == NO_DRIVER else WHICH
        return Found(0, f"CUDA finds no GPU ({_text(error)}): {hint}")
    return Found(count, "" if count else f"CUDA finds no GPU: {WHICH}")


class _Stream(NamedTuple):
    """All that CuPy's `Function` wants of a stream. (`ExternalStream` would do; CuPy 14 warns of it.)"""

    ptr: int


class CupyDriver:
    """One GPU, by its number among those that this process sees. See `Driver`.

    Raises UnsupportedError where there is no such GPU, or no CuPy.
    """

    def __init__(self, number: int) -> None:
        found = devices()
        if not 0 <= number < found.n_gpus:
            raise UnsupportedError(
                f"GPU {number} cannot be used: "
                + (found.reason or f"this process sees {found.n_gpus}, counted from 0 (CUDA_VISIBLE_DEVICES)")
            )
        self._cupy: Any = import_cupy(f"GPU {number}")
        self._runtime: Any = self._cupy.cuda.runtime
        self._errors = (
            self._runtime.CUDARuntimeError,
            self._cupy.cuda.driver.CUDADriverError,
            self._cupy.cuda.compiler.CompileException,
            self._cupy.cuda.nvrtc.NVRTCError,
        )
        self.number, self.name = number, ""
        with self._current("is asked for its properties"):
            told, bus = self._runtime.getDeviceProperties(number), self._runtime.deviceGetPCIBusId(number)
        self.name = told["name"].decode() if isinstance(told["name"], bytes) else str(told["name"])
        # CuPy reads CUDA's uuid as a text, which ends at a zero byte (runtime.pyx, getDeviceProperties): what is left
        # of it tells the parts of one GPU (MIG) from each other, and the bus tells the GPUs of a host.
        self.uuid: str = f"{bus}-{bytes(told['uuid'])[:16].hex()}"
        self._blocks: int = told["multiProcessorCount"] * BLOCKS_PER_PROCESSOR
        self._kernels: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"CupyDriver({self.number})"

    @contextlib.contextmanager
    def _current(self, does: str, number: int | None = None) -> Iterator[None]:
        """This GPU, or another, is the calling thread's; what CUDA refuses is an error of ours."""
        runtime, wanted = self._runtime, self.number if number is None else number
        try:
            before = runtime.getDevice()
            if before != wanted:
                runtime.setDevice(wanted)
            try:
                yield
            finally:
                if before != wanted:
                    runtime.setDevice(before)
        except self._errors as error:
            raise self._failed(does, error) from error

    def _failed(self, does: str, error: Exception) -> MpikvError:
        status = getattr(error, "status", 0)
        lost = ""
        if status in LOST:
            lost = (
                ". This process cannot use the GPU any more. The cause may be an earlier kernel of any library: run it "
                "again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer"
            )
        return MpikvError(f"GPU {self.number} ({self.name or 'unknown'}) {does}: {_text(error)}{lost}")

    # --- memory

    def allocate(self, n_bytes: int) -> int:
        """See `Driver`. It takes a multiple of 2 MiB."""
        with self._current(f"makes {n_bytes} bytes of memory"):
            try:
                return int(self._runtime.malloc(-(-max(n_bytes, 1) // ALLOCATION_BYTES) * ALLOCATION_BYTES))
            except self._runtime.CUDARuntimeError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                free, total = self._runtime.memGetInfo()
                raise OutOfDeviceMemory(
                    f"GPU {self.number} ({self.name}) has no room for {n_bytes} bytes: {free} of {total} are free. "
                    "Other ranks may use this GPU, too; and libraries keep what they do not need: "
                    "torch.cuda.empty_cache(), cupy.get_default_memory_pool().free_all_blocks(), or "
                    "XLA_PYTHON_CLIENT_PREALLOCATE=false for JAX give it back"
                ) from error

    def free(self, address: int) -> None:
        """See `Driver`. CUDA waits for the whole device."""
        with self._current("gives memory back"):
            self._runtime.free(address)

    def pinned(self, n_bytes: int) -> HostArray:
        """See `Driver`. It is given back with the last array of it."""
        if not n_bytes:
            return np.empty(0, np.uint8)
        with self._current(f"makes {n_bytes} bytes of page-locked host memory"):
            address = int(self._runtime.hostAlloc(n_bytes, PORTABLE))
        memory: Any = (ctypes.c_uint8 * n_bytes).from_address(address)
        # At the end of the process the system takes it back, when CUDA may be gone already.
        weakref.finalize(memory, self._free_pinned, address).atexit = False
        array: HostArray = np.frombuffer(memory, np.uint8)
        return array

    def _free_pinned(self, address: int) -> None:
        # A GPU that has failed says so elsewhere.
        with contextlib.suppress(MpikvError), self._current("gives page-locked host memory back"):
            self._runtime.freeHost(address)

    def register(self, memory: HostArray) -> None:
        """See `Driver`. MpikvError where the system does not allow it, or it is locked already."""
        if memory.nbytes:
            with self._current(f"locks {memory.nbytes} bytes of host memory (`ulimit -l` may limit that)"):
                self._runtime.hostRegister(memory.ctypes.data, memory.nbytes, PORTABLE)

    def unregister(self, memory: HostArray) -> None:
        """See `Driver`."""
        if memory.nbytes:
            with self._current("unlocks host memory"):
                self._runtime.hostUnregister(memory.ctypes.data)

    def export(self, address: int) -> bytes:
        """See `Driver`. CUDA's handle, of 64 bytes."""
        with self._current("lets other processes open its memory"):
            return bytes(self._runtime.ipcGetMemHandle(address))

    def open(self, exported: bytes) -> int:
        """See `Driver`. MpikvError where processes may not share memory (containers without --ipc=host, say)."""
        with self._current("opens memory of another process, which has to be on this host, in the same IPC namespace"):
            return int(self._runtime.ipcOpenMemHandle(exported))

    def close(self, address: int) -> None:
        """See `Driver`."""
        with self._current("closes memory of another process"):
            self._runtime.ipcCloseMemHandle(address)

    def as_caller(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object) -> Any:
        """See `Driver`. bfloat16 needs CuPy 14."""
        cupy = self._cupy
        if dtype == BFLOAT16 and int(str(cupy.__version__).partition(".")[0]) < 14:
            raise UnsupportedError(
                f"CuPy {cupy.__version__} has no bfloat16; CuPy 14 has (pip install -U), and PyTorch and JAX have it"
            )
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._current("makes an array for a caller"):
            memory = cupy.cuda.UnownedMemory(address, n_bytes, owner, self.number)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    # --- order

    def current(self) -> contextlib.AbstractContextManager[None]:
        """See `Driver`."""
        return self._current("is made the current one of a thread")

    def stream(self) -> int:
        """See `Driver`. It lives as long as the process."""
        with self._current("makes a stream"):
            return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def record(self, stream: int, number: int | None = None) -> Event:
        """See `Driver`."""
        with self._current("records an event", number):
            event = self._cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream)
        return event

    def wait(self, stream: int, event: Event, number: int | None = None) -> None:
        """See `Driver`."""
        with self._current("orders a stream behind an event", number):
            self._runtime.streamWaitEvent(stream, event.ptr)

    def done(self, event: Event) -> bool:
        """See `Driver`."""
        with self._current("was asked whether work is done"):
            status = self._runtime.eventQuery(event.ptr)  # returned, not raised
            if status not in (0, NOT_READY):
                raise self._runtime.CUDARuntimeError(status)
        return bool(status == 0)

    # --- work

    def copy(self, to: int, source: int, n_bytes: int, stream: int) -> None:
        """See `Driver`."""
        if n_bytes:
            with self._current(f"copies {n_bytes} bytes"):
                self._runtime.memcpyAsync(to, source, n_bytes, self._runtime.memcpyDefault, stream)

    def copy_strided(
        self,
        to: tuple[int, Sequence[int]],
        source: tuple[int, Sequence[int]],
        shape: Sequence[int],
        itemsize: int,
        stream: int,
    ) -> None:
        """See `Driver`. One kernel; UnsupportedError for more dimensions than it takes (`kernels.strided_table`)."""
        n_elems = int(np.prod(shape, dtype=np.int64))
        if n_elems:
            self._start(("strided", itemsize), n_elems, 1, kernels.strided_table(to, source, shape), stream)

    def launch(
        self, program: Program | Routine, n_elems: int, addresses: Sequence[int], numbers: Sequence[Any], stream: int
    ) -> None:
        """See `Driver`."""
        self.launch_many(program, [(n_elems, addresses, numbers)], stream)

    def launch_many(self, program: Program | Routine, entries: Sequence[Entry], stream: int) -> None:
        """See `Driver`. As many keys in a launch as the arguments of a kernel have room for, some dozens."""
        entries = [entry for entry in entries if entry[0]]
        if all(one.last is None for one in program.arguments):
            return
        room = 1 if len(entries) == 1 else kernels.most_entries(program)
        for i in range(0, len(entries), room):
            some = entries[i : i + room]
            n_threads = max(kernels.threads(program, n_elems) for n_elems, _, _ in some)
            self._start((program, room), n_threads, len(some), kernels.table(program, some, room), stream)

    def _start(self, what: Any, n_threads: int, n_rows: int, table: HostArray, stream: int) -> None:
        """Launch a kernel with so many threads for each row of blocks, or fewer that do more."""
        n_blocks = min(-(-n_threads // kernels.THREADS), max(1, self._blocks // n_rows))
        with self._current("launches a kernel"):
            kernel = self._kernels.get(what)
            if kernel is None:
                kernel = self._kernels[what] = self._compiled(*what)
            # An array of one element is passed by value (cupy/cuda/function.pyx, _pointer).
            kernel((n_blocks, n_rows, 1), (kernels.THREADS, 1, 1), (table,), 0, _Stream(stream))

    def _compiled(self, what: Any, room: int) -> Any:
        strided = what == "strided"
        text = kernels.strided_source(room) if strided else kernels.source(what, room)
        module = self._cupy.RawModule(code=text, options=kernels.OPTIONS)
        return module.get_function(kernels.STRIDED_NAME if strided else kernels.NAME).kernel


def _text(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
