"""What the driver says of the GPUs, asked of drivers in Python that have the functions of the real one."""

from __future__ import annotations

import ctypes
import types
from pathlib import Path
from typing import Any

import pytest

from mpikv.runtime import cuda_driver
from mpikv.runtime.cuda_driver import Devices, ask

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


class Driver:
    """A driver with these GPUs. fails: the function that returns an error."""

    def __init__(self, *names: bytes, fails: str = "") -> None:
        self.names = names
        self.fails = fails
        self.started = False

    def _status(self, name: str) -> int:
        assert self.started or name == "cuInit"
        return NO_DEVICE if name == self.fails else 0

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the names are NVIDIA's
        assert flags == 0
        self.started = True
        return self._status("cuInit")

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 12040
        return self._status("cuDriverGetVersion")

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.names)
        return self._status("cuDeviceGetCount")

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        device._obj.value = 70 + number  # a handle, not the number
        return self._status("cuDeviceGet")

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        assert size == len(name)
        name.value = self.names[device.value - 70]
        return self._status("cuDeviceGetName")

    def cuGetErrorName(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_NO_DEVICE" if status == NO_DEVICE else None
        return 0


@pytest.fixture(autouse=True)
def no_kernel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "KERNEL_MODULE", "/nowhere")


def test_two_gpus() -> None:
    driver = Driver(b"NVIDIA H100 80GB HBM3", b"NVIDIA A2")
    asked = []
    found = ask(lambda name: asked.append(name) or driver)
    assert asked == ["libcuda.so.1"]
    assert found == Devices(("NVIDIA H100 80GB HBM3", "NVIDIA A2"), "CUDA 12.4", "")


def test_the_version_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 1\nGCC version:  12.2.0\n")
    monkeypatch.setattr(cuda_driver, "KERNEL_MODULE", str(file))
    assert ask(lambda _: Driver(b"A2")).version == "CUDA 12.4, 570.86.15"


@pytest.mark.parametrize("name", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName"])
def test_a_driver_that_fails(name: str) -> None:
    found = ask(lambda _: Driver(b"A2", fails=name))
    assert found == Devices(
        problem=f"the driver shows no GPU: {name} of libcuda.so.1 returned CUDA_ERROR_NO_DEVICE (100)"
    )


def missing(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (missing, "no driver (libcuda.so.1 cannot be loaded)"),
        (lambda _: Driver(), "the driver shows no GPU to this process"),
        (lambda _: types.SimpleNamespace(), "no driver: libcuda.so.1 is there, but "),  # another library of this name
        (lambda _: ctypes.CDLL(None), "no driver: libcuda.so.1 is there, but "),
    ],
)
def test_no_driver_or_no_gpu(load: Any, problem: str) -> None:
    found = ask(load)
    assert found.names == ()
    assert found.problem.startswith(problem)
