"""What the tests without MPI share: looks whose errors are not hidden, and what is printed of waits that last."""

from __future__ import annotations

import pytest

from mpikv.observe import looks
from mpikv.session import stalls


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


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What all ranks print of waits that last."""
    texts: list[str] = []
    monkeypatch.setitem(stalls.Stalls.__init__.__kwdefaults__, "say", texts.append)
    return texts
