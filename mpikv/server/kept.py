"""What the owners of one rank held in earlier generations, of a store that goes on when a rank has died.

When a generation ends, the core of its owner stays as it was then. Worker 0 of a later one asks every owner first how
many pushes of each worker it had applied to each key, and then for keys of a generation that counts: of which all
workers had agreed that its owners have begun. Who asks for one says so of it. Earlier ones are forgotten then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpikv.arrays.as_numpy import HostArray
from mpikv.errors import MpikvError
from mpikv.optimizers import archive
from mpikv.optimizers.states_file import KIND
from mpikv.placement.keys import Key

if TYPE_CHECKING:
    from mpikv.server.core import ServerCore


class Held(NamedTuple):
    """A key as one owner has it. seen: how many pushes of each worker are in it. answers: whether pulls are asked here.

    read: gives `value`, flat, or the ids and rows of a row-sparse key, and `state` of its optimizer or None.
    """

    key: Key
    seen: Sequence[int]
    answers: bool
    read: Callable[[], dict[str, Any]]


class Kept:
    """One rank's. number: of the present generation, to be set before its core is made."""

    def __init__(self) -> None:
        self.number = self._counts = 0  # the second: the last one that counts, as far as this rank knows
        self._cores: dict[int, ServerCore] = {}

    def begin(self, core: ServerCore) -> None:
        """Keep the core of the present generation. Local."""
        self._cores[self.number] = core

    def answer(self, request: HostArray) -> bytes:
        """Answer [the number of a generation that counts, keys], as JSON. Where keys are None: by the last one that
        counts, and how many pushes it, and each later one, has in which keys.
        """
        number, keys = json.loads(request.tobytes())
        self._counts = max(self._counts, number)
        self._cores = {at: core for at, core in self._cores.items() if at >= self._counts}
        if keys is None:
            seen = [[at, [one[:3] for one in core.held()]] for at, core in self._cores.items()]
            return json.dumps([self._counts, seen]).encode()
        held = self._cores[number].held() if number in self._cores else ()
        try:
            return archive.to_bytes(KIND, {"keys": [[one.key, one.read()] for one in held if one.key in keys]})
        except MpikvError as error:  # of a user's own optimizer, whose states can be no content of an archive
            return archive.to_bytes(KIND, {"error": str(error)})
