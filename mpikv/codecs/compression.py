"""The compression of a key: the codec of pushes, the codec of pulls, and whether they are used even if they lose time.

It is a value, the same on every rank. All ranks agree on it when a key is initialised, by its text (`text`, `of_text`).
`Compressions` holds those of one store: of keys that are initialised from now on, and of single keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from mpikv.codecs import registry
from mpikv.codecs.base import Codec
from mpikv.codecs.identity import IDENTITY
from mpikv.common.checks import shown
from mpikv.placement.encoding import Wire
from mpikv.placement.keys import Key, KeyInfo


@dataclass(frozen=True)
class KeyCompression:
    """The codecs of what workers push, and of what owners send back. force: use them even if they lose time."""

    push: Codec = IDENTITY
    pull: Codec = IDENTITY
    force: bool = False

    @property
    def uncompressed(self) -> bool:
        return self.push == IDENTITY and self.pull == IDENTITY

    def for_shape(self, shape: tuple[int, ...]) -> KeyCompression:
        return replace(self, push=self.push.for_shape(shape), pull=self.pull.for_shape(shape))

    @property
    def text(self) -> str:
        """The name of the codec alone, or JSON; the same text for equal compressions."""
        params: dict[str, Any] = registry.params_of(self.push)
        if self.pull != IDENTITY:
            params["pull"] = registry.params_of(self.pull, feedback=False)
        if self.force:
            params["force"] = True
        return self.push.name if len(params) == 1 else json.dumps(params, sort_keys=True)


NONE = KeyCompression()


def make(params: Mapping[str, Any] | str | None) -> KeyCompression:
    """Make one from a codec's name, or from a dict with its name as 'type', its parameters, 'pull' and 'force'.

    pull: a codec in the same form; default none. It has no error feedback unless its parameters ask for that, since
    every pull sends the whole value, not a change of it. force: default False. Raises ValueError for an unknown codec
    (lists the known ones) or a parameter's value that it does not take, TypeError for anything else.
    """
    if params is None:
        return NONE
    given = {"type": params} if isinstance(params, str) else params
    if not isinstance(given, Mapping):
        raise TypeError(f"compression is the name of a codec, or a dict with its 'type', not {shown(params)}")
    force = given.get("force", False)
    if not isinstance(force, bool):
        raise TypeError(f"compression: 'force' is True or False, not {shown(force)}")
    push = registry.create({name: value for name, value in given.items() if name not in ("pull", "force")})
    found = KeyCompression(push, registry.create(given.get("pull", IDENTITY), feedback=False), force)
    return NONE if found.uncompressed else found


Codecs = Callable[[str], KeyCompression]
"""Makes a key's codecs from the text that all ranks agreed on: `of_text`, or one whose codecs only cost time."""


@lru_cache(maxsize=256)
def of_text(text: str) -> KeyCompression:
    """Return the compression whose `text` this is. Raises what `make` raises."""
    return make(json.loads(text) if text.startswith("{") else text)


def wire_of(info: KeyInfo) -> Wire:
    """Return what the placement of a key needs to know about its encoded values."""
    travels = of_text(info.codec)
    push_bytes, pull_bytes = (codec.wire_bytes(info.n_elems, info.dtype) for codec in (travels.push, travels.pull))
    codec, back = travels.push != IDENTITY, travels.pull != IDENTITY
    on_device = (codec or back) and all(one.on_device for one in (travels.push, travels.pull))
    step = math.lcm(travels.push.row_elems, travels.pull.row_elems)
    return Wire(push_bytes, pull_bytes, codec, back, travels.force, on_device, step)


@dataclass
class Compressions:
    """The compressions of one store. of_new_keys: of keys that are initialised from now on. of_keys: of single keys.

    suspended: whether values are sent uncompressed at present, on all workers alike, as weights must be.
    """

    of_new_keys: KeyCompression = NONE
    of_keys: dict[Key, KeyCompression] = field(default_factory=dict)
    suspended: bool = False

    @property
    def any(self) -> bool:
        return not self.of_new_keys.uncompressed or not all(one.uncompressed for one in self.of_keys.values())

    def set(self, found: KeyCompression, keys: Sequence[Key] | None, known: Collection[Key]) -> Key | None:
        """Set the compression of these keys, or (None) of all others. Returns a key for which that is too late."""
        initialised = known if keys is None else [key for key in keys if key in known]
        late = next((key for key in initialised if keys is not None or key not in self.of_keys), None)
        if late is not None:
            return late
        if keys is None:
            self.of_new_keys = found
        else:
            self.of_keys.update(dict.fromkeys(keys, found))
        return None

    def exempt(self, *keys: Key) -> None:
        """Never compress these keys, whatever the compression of all others is: their sums must be exact."""
        self.of_keys.update(dict.fromkeys(keys, NONE))

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Send values uncompressed inside the `with` block. All workers do so for the same calls."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def of(self, key: Key, dtype: np.dtype[Any], *, links: bool) -> KeyCompression:
        """Return the compression of a key that is initialised now. links: whether the store has ranks on several hosts.

        Integers are never compressed. If all ranks are on one host, shared memory is faster than any codec.
        """
        found = self.of_keys.get(key, self.of_new_keys)
        return NONE if dtype.kind in "iu" or not (links or found.force) else found
