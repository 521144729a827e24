"""NVIDIA's driver on this host, and the GPUs that it shows to this process.

The driver is asked through ctypes, so no array library is imported, and no memory is taken on a GPU. What the
scheduler or the user decided by CUDA_VISIBLE_DEVICES is the driver's own matter: other GPUs are not counted. Without a
driver the answer takes microseconds; with one `cuInit` takes up to some tenths of a second for each GPU.

`cuInit` fixes what this process sees: a program that sets CUDA_VISIBLE_DEVICES itself does so before. Local.
Source: CUDA driver API, "Initialization", "Version Management" and "Device Management".
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mpikv.arrays.devices import CUPY_PACKAGES, DRIVER

NAME_BYTES = 256  # more than the name of any GPU
KERNEL_MODULE = "/proc/driver/nvidia/version"
NO_CUPY = f"CuPy is not installed: pip install {CUPY_PACKAGES}"


class Devices(NamedTuple):
    """The GPUs that this process sees, by name. problem: why there is no GPU, "" where there is one.

    version: of the CUDA that the driver serves, and of the driver where the kernel shows it: `CUDA 12.8, 570.86.15`.
    """

    names: tuple[str, ...] = ()
    version: str = ""
    problem: str = ""


def ask(load: Callable[[str], Any] | None = None) -> Devices:
    """Ask the driver for the GPUs of this process. Never raises. load: opens a library; None: as ctypes does."""
    try:
        driver = (load or ctypes.CDLL)(DRIVER)
    except OSError:
        return Devices(problem=f"no driver ({DRIVER} cannot be loaded)")
    try:
        return _ask(driver)
    except _Failed as failed:
        return Devices(problem=f"the driver shows no GPU: {failed}")
    except AttributeError as error:  # a library of this name that is not NVIDIA's
        return Devices(problem=f"no driver: {DRIVER} is there, but has not the functions of one ({error})")


class _Failed(Exception):  # noqa: N818 - never seen outside
    """A function of the driver returned an error."""


def _ask(driver: Any) -> Devices:
    def call(name: str, *arguments: Any) -> None:
        status = getattr(driver, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            driver.cuGetErrorName(status, ctypes.byref(text))
            raise _Failed(f"{name} of {DRIVER} returned {(text.value or b'an error').decode()} ({status})")

    number, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
    call("cuInit", 0)
    call("cuDriverGetVersion", ctypes.byref(number))
    version = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}{_of_kernel_module()}"
    call("cuDeviceGetCount", ctypes.byref(number))
    names = []
    for i in range(number.value):
        call("cuDeviceGet", ctypes.byref(device), i)
        call("cuDeviceGetName", name, NAME_BYTES, device)
        names.append(name.value.decode(errors="replace"))
    return Devices(tuple(names), version, "" if names else "the driver shows no GPU to this process")


def has_cupy() -> bool:
    return sys.modules["cupy"] is not None if "cupy" in sys.modules else importlib.util.find_spec("cupy") is not None


def _of_kernel_module() -> str:
    """Return `, VERSION` of the driver's kernel module, "" where it is not shown, as in some containers."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path(KERNEL_MODULE).read_text())
    except OSError:
        return ""
    return f", {found[0]}" if found else ""
