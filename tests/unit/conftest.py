"""What the tests without MPI share: short allocations of device memory."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from mpikv.spaces import device


@pytest.fixture(autouse=True, scope="session")
def _short_chunks() -> Iterator[None]:
    """The fake CuPy fills each allocation: 32 MiB for each store would take half the time of many tests.

    More of them have several allocations, so. Jobs and the tests on a GPU use the true length.
    """
    with mock.patch.object(device, "CHUNK_BYTES", 1 << 20):
        yield
