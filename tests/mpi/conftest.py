"""Tests that all ranks of `mpirun -n N python -m pytest --with-mpi tests/mpi` run together (`tests/lockstep.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from lockstep import comm, pytest_configure

__all__ = ["comm", "pytest_configure"]


@pytest.hookimpl(tryfirst=True)  # before pytest-mpi, which skips what is marked where there is no mpirun
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, so that none runs without mpirun."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("mpi") is None:
            item.add_marker(pytest.mark.mpi)
