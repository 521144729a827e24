"""Devices by name, and arrays on them.

A device is 'cpu' (with any number: host memory is one) or a GPU, 'gpu:1' or 'cuda:1'. A plain integer n is GPU n,
and so is an object that converts to an integer (CuPy's `Device`). Objects that print themselves like these names
(`torch.device('cuda:1')`, 'gpu(1)') are taken too. CuPy is imported when the first array goes to a GPU, not before.

CUDA has a current GPU for each thread, 0 at first. A thread that is given another one for a while (`current`) has its
own again only where this process already has a context there: since CUDA 12 making a GPU the current one also makes a
context on it, of some 0.5 GB, which nobody has asked for, and which GPUs in exclusive mode refuse.

Source: CUDA Runtime API, cudaSetDevice; CUDA Driver API, cuDevicePrimaryCtxGetState.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsIndex, SupportsInt

import numpy as np

from mpikv.arrays import as_numpy
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError

Device = str | SupportsIndex | SupportsInt

DRIVER = "libcuda.so.1"
CUPY_PACKAGES = "cupy-cuda12x (or cupy-cuda13x for CUDA 13)"
_NAME = re.compile(r"(cpu|gpu|cuda)(?:[:(](\d+)\)?)?", re.IGNORECASE)


def gpu_number(device: Device) -> int | None:
    """Return the number of the GPU that `device` names, None for the CPU. ValueError for anything else."""
    number = -1
    with contextlib.suppress(Exception):  # of an object's own `__str__` or `__int__`
        name = _NAME.fullmatch(str(device).strip())
        if name:
            return None if name[1].lower() == "cpu" else checks.whole("a GPU", int(name[2] or 0))
        number = -1 if isinstance(device, (bool, float)) else checks.whole("a GPU", int(device))
    if number < 0:
        valid = "write 'cpu', 'cpu:0', 'gpu:0', 'cuda:0' or the number of a GPU"
        raise ValueError(f"{shown(device)} is no device; {valid}")
    return number


def is_any_gpu(device: Device) -> bool:
    return str(device).strip().lower() in ("gpu", "cuda")


def several(devices: Sequence[Device] | Device) -> list[Device]:
    listed: list[Device] = list(devices) if isinstance(devices, (list, tuple)) else [devices]  # type: ignore[list-item]
    if not listed:
        raise ValueError("devices is empty: name at least one, such as 'cpu', or leave it out")
    return listed


def put(array: Any, device: Device) -> Any:
    """Return `array` on `device`: a NumPy array on the CPU, a CuPy array on a GPU. Local.

    It is the array itself where that is there already. array: of any library, or what `numpy.asarray` takes. Raises
    UnsupportedError where CuPy or the GPU is missing.
    """
    number = gpu_number(device)
    if number is None:
        return array.get() if as_numpy.is_device(array) else as_numpy.as_host("data", array)
    cupy = import_cupy(device)
    available = cupy.cuda.runtime.getDeviceCount()
    if number >= available:
        raise UnsupportedError(f"device {shown(device)} does not exist: this process sees {available} GPUs, from 0")
    with current(number, cupy.cuda.runtime):
        if as_numpy.is_device(array) or not as_numpy.is_array(array):
            return cupy.asarray(array)
        # A tensor of another library: by DLPack where it lies on a GPU, through NumPy where it lies in host memory.
        on_host = isinstance(array, (np.ndarray, np.generic)) or array.__dlpack_device__()[0] == 1
        return cupy.asarray(np.asarray(array)) if on_host else cupy.from_dlpack(array)


def use(device: Device) -> AbstractContextManager[Any]:
    """Return a context in which new CuPy arrays and calculations are on `device`; it does nothing for the CPU."""
    number = gpu_number(device)
    return nullcontext() if number is None else current(number, import_cupy(device).cuda.runtime)


def has_context(number: int, load: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Return whether this process has a context on one of its GPUs. Never raises; makes none. load: opens a library."""
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    try:
        driver = load(DRIVER)
        if driver.cuDeviceGet(ctypes.byref(device), number) != 0:
            return False
        status = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    except (OSError, AttributeError):
        return False
    return bool(status == 0 and active.value)


@contextlib.contextmanager
def current(number: int, runtime: Any, has_context: Callable[[int], bool] = has_context) -> Iterator[None]:
    """This GPU is the calling thread's. runtime: CuPy's, whose errors are raised as they are."""
    before = runtime.getDevice()
    if before == number:
        yield
        return
    runtime.setDevice(number)
    try:
        yield
    finally:
        if has_context(before):
            runtime.setDevice(before)


def import_cupy(why: object) -> Any:
    """Import CuPy, or raise UnsupportedError with the command that installs it."""
    try:
        import cupy  # noqa: PLC0415 - only where a GPU is asked for
    except ImportError as error:
        raise UnsupportedError(
            f"{shown(why)} needs CuPy, which is not installed: pip install {CUPY_PACKAGES}"
        ) from error
    return cupy
