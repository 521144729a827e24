"""What the tests without MPI share: looks whose errors are not hidden."""

from __future__ import annotations

import pytest

from mpikv.observe import looks


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
