"""The GPU that this worker uses, if any. It is looked for only where something asks for one.

Asked for it is by a store's type (`device`, `dist_sync_device`), by MPIKV_LOCAL_DEVICE, MPIKV_DEVICE_PATH or
MPIKV_ALGORITHM=nccl, or by an array library that this program has imported and that has GPUs in use. Else nothing is
imported, and no driver is asked: a program of NumPy alone pays nothing. Local.

MPIKV_LOCAL_DEVICE names it. Otherwise it is the local rank, the worker's number on its host, modulo the number of GPUs
that the worker sees. So ranks that all see every GPU of their host take one each, or share them evenly; a rank that was
given a GPU of its own, by its scheduler or by CUDA_VISIBLE_DEVICES, sees one and takes that. Numbers count what is
visible, as CUDA does: GPU 0 under CUDA_VISIBLE_DEVICES=3 is the machine's fourth.

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
from mpikv.runtime import cuda_driver
from mpikv.spaces.callers import gpu_of
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.named import Spaces

AUTO = "auto"


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
    if config.local_device != AUTO:
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


def choose(setting: int | str, local_rank: int, visible: int) -> int | None:
    """Return the number of the GPU to use, None where none is visible and none was asked for.

    setting: of MPIKV_LOCAL_DEVICE, a number from 0 or `auto`. local_rank: from 0, among the ranks of the host. Raises
    ConfigError where the GPU that was asked for is not among the visible ones.
    """
    if setting == AUTO:
        return local_rank % visible if visible else None
    number = int(setting)
    if number < visible:
        return number
    if visible == 0:
        raise ConfigError(
            f"MPIKV_LOCAL_DEVICE={number}, but this process sees no GPU: unset it to work on the processor, ask the "
            "scheduler for a GPU, or look at CUDA_VISIBLE_DEVICES; `mpikv info` says what is seen"
        )
    seen = "one GPU, number 0" if visible == 1 else f"{visible} GPUs, numbers 0 to {visible - 1}"
    raise ConfigError(
        f"MPIKV_LOCAL_DEVICE={number}, but this process sees {seen}: name one of these, or unset it and each rank "
        "takes one by its local rank. Numbers count the GPUs that are visible, not those of the machine "
        "(CUDA_VISIBLE_DEVICES, --gpus-per-task)"
    )


def describe(setting: int | str, local_rank: int, visible: int) -> str:
    """Say which GPU is used, and why that one. Raises as `choose` does."""
    number = choose(setting, local_rank, visible)
    if number is None:
        return "none"
    if setting != AUTO:
        return f"gpu:{number}, by MPIKV_LOCAL_DEVICE"
    if visible == 1:
        return "gpu:0, the only one that is visible"
    return f"gpu:{number}, by local rank {local_rank}"


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
        number = choose(config.local_device, local_rank, len(gpus.names))
        if number is None:
            return WorkerGpu(told=DeviceReport(why_none=gpus.problem))
        if open_gpu is None and not cuda_driver.has_cupy():
            text = f"mpikv: {asker} asks for a GPU, and {cuda_driver.NO_CUPY}: keys are in host memory"
            warns = asker.startswith(("the type", "MPIKV"))
            return WorkerGpu(told=DeviceReport(why_none=cuda_driver.NO_CUPY), warning=text if warns else "")
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
        raise UnsupportedError(cuda_driver.NO_CUPY)
    return Gpu(number)
