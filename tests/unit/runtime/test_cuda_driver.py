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
        self._names, self._fails, self._started = names, fails, False

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self._call(name, given)

    def _call(self, name: str, given: tuple[Any, ...]) -> int:
        if name == "cuGetErrorName":
            given[1]._obj.value = b"CUDA_ERROR_NO_DEVICE" if given[0] == NO_DEVICE else None
            return 0
        self._started |= name == "cuInit" and given == (0,)
        assert self._started
        if name == "cuDriverGetVersion":
            given[0]._obj.value = 12040
        elif name == "cuDeviceGetCount":
            given[0]._obj.value = len(self._names)
        elif name == "cuDeviceGet":
            given[0]._obj.value = 70 + given[1]  # a handle, not the number
        elif name == "cuDeviceGetName":
            assert given[1] == len(given[0])
            given[0].value = self._names[given[2].value - 70]
        return NO_DEVICE if name == self._fails else 0


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
