"""One GPU of this process, by CuPy: its identity, how it is made the current one of a thread, and CUDA's errors.

A thread of the store makes its GPU the current one once. In a caller's thread the GPU that was current before is so
again after each call (`devices.current`); a thread that has never used a GPU keeps the store's.

Source: CuPy 14, `cupy.cuda`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpikv.arrays.devices import CUPY_PACKAGES, current, has_context, import_cupy
from mpikv.errors import MpikvError, UnsupportedError

LEAST_CUPY = 14  # 13 takes and gives another type for NCCL's ids, has no bfloat16, and does not find the NCCL wheel
NO_DRIVER = 35  # CUDA's number (driver_types.h)
FATAL = (700, 702, 709, 710, 714, 715, 716, 717, 718, 719)  # errors after which a process cannot use its GPU any more
HINT = "nvidia-smi and CUDA_VISIBLE_DEVICES say which there are"


class OutOfDeviceMemory(MpikvError, MemoryError):  # noqa: N818 - reads like its siblings
    """A GPU has too little free memory."""


def _why_not(number: int, cupy: Any) -> str:
    """Return why a GPU cannot be used, "" where it can."""
    if int(str(cupy.__version__).partition(".")[0]) < LEAST_CUPY:
        return f"CuPy {cupy.__version__} is too old, {LEAST_CUPY} is needed: pip install -U {CUPY_PACKAGES}"
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # noqa: BLE001 - CUDA's own, or a library that cannot be loaded
        hint = "the driver of NVIDIA is missing or too old" if getattr(error, "status", 0) == NO_DRIVER else HINT
        return f"CUDA finds no GPU ({_text(error)}): {hint}"
    if not count:
        return f"CUDA finds no GPU: {HINT}"
    return "" if 0 <= number < count else f"this process sees {count}, counted from 0 (CUDA_VISIBLE_DEVICES)"


class Gpu:
    """One GPU, by its number among those that this process sees. Raises UnsupportedError if there is no such GPU.

    name: of its model. uuid: the same for one GPU in every process of a host, whatever number it has there. cupy: the
    module; None: the installed one. has_context: tells whether this process has a context on a GPU.
    """

    def __init__(self, number: int, cupy: Any = None, has_context: Callable[[int], bool] = has_context) -> None:
        self.cupy: Any = import_cupy(f"GPU {number}") if cupy is None else cupy
        if why := _why_not(number, self.cupy):
            raise UnsupportedError(f"GPU {number} cannot be used: {why}")
        self._runtime: Any = self.cupy.cuda.runtime
        self._has_context = has_context
        self.errors = (self._runtime.CUDARuntimeError, self.cupy.cuda.memory.OutOfMemoryError)
        self.number, self.name = number, ""
        with self.current("is asked for its properties"):
            found, bus = self._runtime.getDeviceProperties(number), self._runtime.deviceGetPCIBusId(number)
        self.name = found["name"].decode() if isinstance(found["name"], bytes) else str(found["name"])
        # CuPy reads CUDA's uuid as a text, which ends at a zero byte (runtime.pyx, getDeviceProperties). The bytes
        # before it distinguish the instances of one GPU (MIG), and the bus distinguishes the GPUs of a host.
        self.uuid: str = f"{bus}-{bytes(found['uuid'])[:16].hex()}"

    def __repr__(self) -> str:
        return f"GPU {self.number} ({self.name}, {self.uuid})"

    @contextmanager
    def current(self, does: str = "", number: int | None = None) -> Iterator[None]:
        """Make this GPU, or the one of this number, the calling thread's current one in the `with` block.

        Errors of CUDA and CuPy are raised as those of this library. does: what the block does, for errors.
        """
        try:
            with current(self.number if number is None else number, self._runtime, self._has_context):
                yield
        except self.errors as error:
            raise self.failed(error, does) from error

    def take(self) -> None:
        """Make it the current one of a thread of the store, for good."""
        self._runtime.setDevice(self.number)

    def event(self) -> Any:
        return self.cupy.cuda.Event(block=True, disable_timing=True)

    def array_at(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        owner: object,
        *,
        strides: tuple[int, ...] | None = None,
        number: int | None = None,
    ) -> Any:
        """Return CuPy's array of memory that exists. owner: kept alive. number: of the memory's GPU; None: this one."""
        n_bytes = dtype.itemsize * math.prod(shape)
        if strides is not None and n_bytes:
            n_bytes = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(address, n_bytes, owner, self.number if number is None else number)
        return self.cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0), strides)

    def failed(self, error: Exception, does: str = "") -> MpikvError:
        """Return the error to raise in place of one of CUDA's."""
        which = f"GPU {self.number} ({self.name or 'unknown'})"
        if isinstance(error, self.errors[1]):
            return OutOfDeviceMemory(
                f"{which} is out of memory: {_text(error)}. Other ranks may use this GPU, too; and libraries keep what "
                "they do not need: torch.cuda.empty_cache(), cupy.get_default_memory_pool().free_all_blocks(), or "
                "XLA_PYTHON_CLIENT_PREALLOCATE=false for JAX give it back"
            )
        hint = ""
        if getattr(error, "status", 0) in FATAL:
            hint = (
                ". This process cannot use the GPU any more. The cause may be an earlier kernel of any library: run it "
                "again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer"
            )
        return MpikvError(f"{which} {does + ': ' if does else ''}{_text(error)}{hint}")


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
