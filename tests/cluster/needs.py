"""What a test on clusters needs; where it is not there the test is skipped with the reason."""

from __future__ import annotations

import jobs
import pytest


def need(*reasons: str) -> None:
    """Skip where one of these, as `missing` of `namespaces` and the others gives them, is not ""."""
    for reason in filter(None, reasons):
        pytest.skip(f"{reason}; scripts/test --cluster, as root, installs it")


def find(kind: str) -> jobs.Mpi:
    found = jobs.find_mpi(kind)
    if found is None:
        pytest.skip(f"no {kind} in any known environment")
    return found
