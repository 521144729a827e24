"""PyTorch, JAX and optax, for the tests that need them.

    torch = frameworks.need("torch")

A missing library fails the test where the environment was made with it, and skips the test elsewhere. `scripts/test`
names the libraries in MPIKV_TEST_FRAMEWORKS for the stages of the environment that has the extra `frameworks`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

VARIABLE = "MPIKV_TEST_FRAMEWORKS"
ALL = ("torch", "jax", "optax", "expecttest")  # the last one: what the tests in PyTorch's wheel import


def need(module: str) -> Any:
    """The imported module, such as "torch" or "torch.utils.data"."""
    if module.partition(".")[0] in os.environ.get(VARIABLE, "").split(","):
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"{module} is not installed")
