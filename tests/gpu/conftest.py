"""Tests on this machine's GPU have the mark `gpu`; those that can run on a fake one do that, too, everywhere.

The fake kind shows that the tests themselves work. The other is skipped where no GPU can be used, and scripts/test
counts it; `scripts/test --gpu` runs it alone.
"""

from __future__ import annotations

import os

import gpus
import pytest
from report import GPU

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the GPU's memory for itself


@pytest.fixture(params=["fake", pytest.param("cuda", marks=getattr(pytest.mark, GPU))])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = gpus.missing()
    for item in items:
        if why and item.get_closest_marker(GPU) is not None:
            item.add_marker(pytest.mark.skip(reason=why))
