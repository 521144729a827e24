"""What the tests without MPI share: short allocations of device memory, and looks whose errors are not hidden."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from mpikv.observe import looks
from mpikv.spaces import device


@pytest.fixture(autouse=True, scope="session")
def _short_chunks() -> Iterator[None]:
    """The fake CuPy fills each allocation: 32 MiB for each store would take half the time of many tests.

    More of them have several allocations, so. Jobs and the tests on a GPU use the true length.
    """
    with mock.patch.object(device, "CHUNK_BYTES", 1 << 20):
        yield


@pytest.fixture(autouse=True)
def _looks_raise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job the error of a look is only counted: a mistake there would pass every test unseen."""

    def raise_it(looks: looks.Looks, failed: int) -> None:
        looks.__dict__["failed"] = failed
        if failed and not request.node.get_closest_marker("looks_fail"):
            raise  # noqa: PLE0704 - what is being handled

    monkeypatch.setattr(
        looks.Looks, "failed", property(lambda looks: looks.__dict__["failed"], raise_it), raising=False
    )
