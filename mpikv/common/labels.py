"""The label under which a worker pushes: it says how the gradient of a round is to be used in the update.

Every worker gives its own label to a round. Where these are equal, which is nearly always, a round is what it
would be without them. Where only the factors differ (`rescale_grad`: what `Trainer.step(batch_size)` sets, and what
differs in the last, short batch of an epoch), each worker's gradient counts with its own factor: contributions are
brought into the *units* of one factor before they are added, and the update is made with that factor. Any other
difference is an error. How it is found: collectives/labelled.py, session/contests.py, and at servers server/shard.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Label(NamedTuple):
    """text: every attribute of the optimizer but the factor, as JSON. factor: `rescale_grad`.

    op: how workers' values are put together.
    """

    text: str
    factor: float
    op: str = "sum"

    @property
    def rest(self) -> tuple[str, str]:
        """What must be equal on all workers."""
        return self.text, self.op

    @property
    def digest(self) -> int:
        """Return 64 bits that differ for different labels."""
        return int.from_bytes(hashlib.blake2b(repr(self[:]).encode(), digest_size=8).digest(), "little")


PLAIN = Label("{}", 1.0)  # of a key that no optimizer is applied to


def label_of(attributes: Mapping[str, Any], factor: str, op: str = "sum") -> Label:
    """Make the label from an optimizer's attributes (`Optimizer.attributes`).

    factor: the name of the one that may differ.
    """
    rest = {name: value for name, value in attributes.items() if name != factor}
    return Label(json.dumps(rest, sort_keys=True), float(attributes[factor]), op)
