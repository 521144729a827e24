"""`mpikv bench model`: the gradients of a network in one pushpull, in the order in which a backward pass makes them."""

from __future__ import annotations

from mpikv.bench.lists import compare_lists
from mpikv.bench.session import Session
from mpikv.models import shapes


def run(session: Session) -> None:
    """Measure what the options ask for. Collective, blocks."""
    compare_lists(session, tuple(reversed(shapes(session.options.model))))
