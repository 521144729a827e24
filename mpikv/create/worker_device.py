"""The GPU that this worker uses, if any. It is looked for only where something asks for one.

Asked for it is by a store's type (`device`, `dist_sync_device`), by MPIKV_LOCAL_DEVICE, MPIKV_DEVICE_PATH or
MPIKV_ALGORITHM=nccl, or by an array library that this program has imported and that has GPUs in use. Else nothing is
imported, and no driver is asked: a program of NumPy alone pays nothing. Local.

Cost: where it is asked for, CUDA's driver is asked for its GPUs, and CuPy is imported if there are any.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mpikv.config import Config
from mpikv.create.spec import StoreSpec
from mpikv.errors import ConfigError, MpikvError, UnsupportedError
from mpikv.placement.device_paths import DeviceReport
from mpikv.runtime import cuda_driver, device_choice
from mpikv.spaces.callers import gpu_of
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.named import Spaces

CUPY = "cupy-cuda12x, or cupy-cuda13x for CUDA 13"


class WorkerGpu(NamedTuple):
    """gpu: None where none is used. told: what the other ranks learn of it. warning: for the user."""

    gpu: Gpu | None = None
    told: DeviceReport = DeviceReport()
    warning: str = ""

    @property
    def spaces(self) -> Spaces:
        """For a store of this worker: a device's where there is one."""
        if self.gpu is None:
            return Spaces(missing=self.told.why_none or Spaces.missing)
        return Spaces(device=DeviceSpace(self.gpu))


def asks(spec: StoreSpec | None, config: Config, modules: Mapping[str, Any] | None = None) -> str:
    """What asks for a GPU, "" where nothing does. modules: those that are imported, by default `sys.modules`."""
    modules = sys.modules if modules is None else modules
    if spec is not None and spec.on_device:
        return "the type of the store"
    if config.local_device != device_choice.AUTO:
        return "MPIKV_LOCAL_DEVICE"
    if config.device_path != "auto":
        return "MPIKV_DEVICE_PATH"
    if config.algorithm == "nccl":
        return "MPIKV_ALGORITHM"
    if modules.get("cupy"):
        return "CuPy"
    torch = modules.get("torch")
    with contextlib.suppress(Exception):  # a PyTorch that is being imported, or has no CUDA at all
        if torch is not None and torch.cuda.is_available():
            return "PyTorch"
    if modules.get("numba.cuda.cudadrv.driver"):
        return "Numba"
    if any(name.startswith("jax_cuda") for name in tuple(modules)):  # JAX imports it to use GPUs
        return "JAX"
    return ""


def find(
    spec: StoreSpec | None,
    config: Config,
    local_rank: int,
    *,
    modules: Mapping[str, Any] | None = None,
    ask: Callable[[], cuda_driver.Devices] = cuda_driver.ask,
    open_gpu: Callable[[int], Gpu] | None = None,
) -> WorkerGpu:
    """The GPU of a rank. spec: None for a program that is only a server. local_rank: among the ranks of its host.

    ask, open_gpu: of CUDA's driver, and of one GPU, for tests. Never raises: what is wrong is announced to all.
    """
    asker = asks(spec, config, modules)
    if not asker:
        return WorkerGpu()
    gpus = ask()
    try:
        number = device_choice.choose(config.local_device, local_rank, len(gpus.names))
        if number is None:
            return WorkerGpu(told=DeviceReport(why_none=gpus.problem))
        if open_gpu is None and not cuda_driver.has_cupy():
            why = f"CuPy is not installed (pip install {CUPY})"
            text = f"mpikv: {asker} asks for a GPU, and {why}: keys are in host memory"
            return WorkerGpu(
                told=DeviceReport(why_none=why), warning=text if asker.startswith(("the type", "MPIKV")) else ""
            )
        gpu = (open_gpu or Gpu)(number)
    except ConfigError as error:
        return WorkerGpu(told=DeviceReport(error=str(error)))
    except MpikvError as error:
        return WorkerGpu(told=DeviceReport(why_none=str(error)))
    return WorkerGpu(gpu, DeviceReport(gpu.number, gpu.uuid, gpu.name, why_none=""))


def spaces_for(arrays: Iterable[Any]) -> Spaces:
    """Where these arrays of a program without a store are: with the GPU of the first one that is on a GPU, if any.

    Without CuPy host memory alone, to which all others then come.
    """
    number = next((found for found in map(gpu_of, arrays) if found is not None), None)
    try:
        return Spaces() if number is None else Spaces(device=DeviceSpace(open_gpu(number)))
    except MpikvError as error:
        return Spaces(missing=str(error))


def open_gpu(number: int) -> Gpu:
    if not cuda_driver.has_cupy():
        raise UnsupportedError(f"CuPy is not installed (pip install {CUPY})")
    return Gpu(number)
