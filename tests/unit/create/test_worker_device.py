"""Which GPU a worker uses: looked for only where something asks for one, and what it says where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fresh
import pytest
from fake_cupy import Machine
from fake_gpus import gpu_of

from mpikv.config import Config
from mpikv.create import spec
from mpikv.create.worker_device import asks, choose, describe, find
from mpikv.errors import ConfigError, MpikvError
from mpikv.placement.device_paths import DeviceReport
from mpikv.runtime import cuda_driver

SYNC, ON_DEVICE = spec.parse("dist_sync"), spec.parse("dist_sync_device")
TWO = cuda_driver.Devices(("a GPU", "a GPU"), "CUDA 12.8")
NO_DRIVER = cuda_driver.Devices(problem="no driver")
UNASKED = DeviceReport().why_none


def opened(number: int) -> Any:
    return gpu_of(Machine(2).process(), number)


def torch(available: Any) -> dict[str, Any]:
    return {"torch": SimpleNamespace(cuda=SimpleNamespace(is_available=available))}


def broken() -> bool:
    raise RuntimeError("still being imported")


ASKING: list[tuple[spec.StoreSpec | None, dict[str, Any], dict[str, Any], str]] = [
    (SYNC, {}, {}, ""),
    (None, {}, {}, ""),
    (SYNC, {}, {"numpy": 1, "torch": None, "cupy": None, "jax": 1, "numba": 1}, ""),
    (SYNC, {}, torch(lambda: False), ""),
    (SYNC, {}, torch(broken), ""),
    (SYNC, {}, torch(lambda: True), "PyTorch"),
    (SYNC, {}, {"cupy": 1}, "CuPy"),
    (SYNC, {}, {"numba.cuda.cudadrv.driver": 1}, "Numba"),
    (SYNC, {}, {"jax": 1, "jax_cuda12_plugin": 1}, "JAX"),
    (ON_DEVICE, {}, {}, "the type of the store"),
    (spec.parse("device"), {}, {}, "the type of the store"),
    (SYNC, {"local_device": 0}, {}, "MPIKV_LOCAL_DEVICE"),
    (SYNC, {"device_path": "mpi"}, {}, "MPIKV_DEVICE_PATH"),
    (SYNC, {"algorithm": "nccl"}, {}, "MPIKV_ALGORITHM"),
    (SYNC, {"algorithm": "ring"}, {}, ""),
    (SYNC, {"device_path": "host"}, {}, "MPIKV_DEVICE_PATH"),
]


@pytest.mark.parametrize(("kind", "settings", "modules", "asker"), ASKING)
def test_what_asks_for_one(kind: Any, settings: dict[str, Any], modules: dict[str, Any], asker: str) -> None:
    assert asks(kind, Config(**settings), modules) == asker


def test_nothing_is_asked_where_nobody_asks_for_it() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("asked")

    found = find(SYNC, Config(), 0, modules={}, ask=refuse, open_gpu=refuse)
    assert (found.gpu, found.told, found.warning, found.spaces.device) == (None, DeviceReport(), "", None)


@pytest.mark.parametrize(
    ("local_rank", "setting", "driver", "expected"),
    [  # the number of the GPU, why there is none, and the error
        *((0, "auto", TWO, (0, "", "")), (3, "auto", TWO, (1, "", "")), (0, 1, TWO, (1, "", ""))),
        (0, "auto", NO_DRIVER, (None, "no driver", "")),
        (0, 2, TWO, (None, UNASKED, "MPIKV_LOCAL_DEVICE=2, but this process sees 2 GPUs")),
        (0, 0, NO_DRIVER, (None, UNASKED, "MPIKV_LOCAL_DEVICE=0, but this process sees no GPU")),
    ],
)
def test_the_gpu_of_a_worker(local_rank: int, setting: Any, driver: Any, expected: tuple[Any, str, str]) -> None:
    config, (number, why_none, error) = Config(local_device=setting), expected
    found = find(ON_DEVICE, config, local_rank, modules={}, ask=lambda: driver, open_gpu=opened)
    uuid, name = (found.gpu.uuid, "Fake GPU") if found.gpu else ("", "")
    assert found.told._replace(error="") == DeviceReport(number, uuid, name, why_none)
    assert (found.told.error[: len(error) or None], found.warning) == (error, "")
    assert (found.spaces.device.device if found.spaces.device else None) == number


@pytest.mark.parametrize(
    ("kind", "modules", "warned"), [(ON_DEVICE, {}, True), (SYNC, torch(lambda: True), False)], ids=["type", "PyTorch"]
)
def test_a_gpu_without_cupy(kind: Any, modules: Any, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning only for who has asked for it in the store's type or a setting."""
    monkeypatch.setattr(cuda_driver, "has_cupy", lambda: False)
    found = find(kind, Config(), 0, modules=modules, ask=lambda: TWO)
    assert found.gpu is None
    assert found.told.why_none.startswith("CuPy is not installed: pip install cupy-cuda12x")
    assert found.warning.startswith("mpikv: the type of the store asks for a GPU, and CuPy is not") == warned


def test_a_gpu_that_cannot_be_opened() -> None:
    def taken(number: int) -> Any:
        raise MpikvError(f"GPU {number} is taken")

    found = find(ON_DEVICE, Config(), 1, modules={}, ask=lambda: TWO, open_gpu=taken)
    assert (found.gpu, found.told) == (None, DeviceReport(why_none="GPU 1 is taken"))


def test_a_store_of_numpy_imports_no_array_library() -> None:
    made = "import numpy, sys; from mpikv import kv; kv.create('local').init('w', numpy.zeros(2))"
    assert fresh.python(f"{made}; sys.exit(bool({{'cupy', 'torch', 'jax'}} & sys.modules.keys()))").returncode == 0


@pytest.mark.parametrize(
    ("setting", "local_rank", "visible", "expected", "says"),
    [
        *(("auto", 0, 4, 0, "gpu:0, by local rank 0"), ("auto", 3, 4, 3, "gpu:3, by local rank 3")),
        ("auto", 5, 4, 1, "gpu:1, by local rank 5"),  # more ranks than GPUs share them
        ("auto", 3, 1, 0, "gpu:0, the only one that is visible"),  # the scheduler has given each rank its own
        ("auto", 3, 0, None, "none"),
        *((2, 0, 4, 2, "gpu:2, by MPIKV_LOCAL_DEVICE"), (0, 3, 1, 0, "gpu:0, by MPIKV_LOCAL_DEVICE")),
    ],
)
def test_the_device(setting: int | str, local_rank: int, visible: int, expected: int | None, says: str) -> None:
    assert choose(setting, local_rank, visible) == expected
    assert describe(setting, local_rank, visible) == says


def test_a_device_that_is_not_visible() -> None:
    for function in (choose, describe):
        with pytest.raises(ConfigError, match=r"MPIKV_LOCAL_DEVICE=1, but this process sees no GPU: unset it"):
            function(1, 0, 0)
        with pytest.raises(ConfigError, match=r"sees one GPU, number 0: name one.*CUDA_VISIBLE_DEVICES"):
            function(1, 0, 1)
        with pytest.raises(ConfigError, match=r"sees 4 GPUs, numbers 0 to 3: "):
            function(9, 0, 4)
