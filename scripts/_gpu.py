"""Print which of the extras for GPUs fits this machine: 12 or 13, the major version of the CUDA that its driver serves.

Where no GPU can be used it says why on standard error, with status 1. Needs nothing but Python: the driver is asked by
a module of the package that imports nothing else of it, and that is loaded here by its path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

DRIVER = Path(__file__).resolve().parents[1] / "mpikv" / "runtime" / "cuda_driver.py"
OLDEST, NEWEST = 12, 13  # that there are extras for; a newer driver serves older CUDA, too


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
    major = int(found.version.removeprefix("CUDA ").partition(".")[0])
    if major < OLDEST:
        print(f"scripts/test --gpu needs a driver for CUDA {OLDEST}; this one is for {found.version}", file=sys.stderr)
        return 1
    print(min(major, NEWEST))
    return 0


if __name__ == "__main__":
    sys.exit(main())
