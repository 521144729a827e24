"""The paths that the rounds of a key can go, by name, and which of them each round of a key goes.

A key's placement names its path, so that keys of one store may go different paths, side by side. Most keys have one. A
key whose values travel encoded may have a second one, for rounds whose values travel as they are: its queue asks for
each round which of the two it goes. A bucket of several keys counts as one key.

Where the value is, in one sentence: the key's home is that of its path, or on the GPU where that path is staged; a
second path completes the value there, or in the memory of its host, from which it is copied home.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from mpikv.engine.operation import Steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Path
from mpikv.placement.placement import Placement
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.encoded_path import EncodedPath
from mpikv.strategies.hosted_path import HostedPath
from mpikv.strategies.ipc_path import IpcPath
from mpikv.strategies.key_path import KeyPath, Means
from mpikv.strategies.message_path import MessagePath
from mpikv.strategies.mpi_path import MpiPath
from mpikv.strategies.native_path import NativePath
from mpikv.strategies.nccl_path import NcclPath
from mpikv.strategies.one_host_path import OneHostPath
from mpikv.strategies.staging import Staging
from mpikv.transports import wire

PATHS: Mapping[Path, type[KeyPath]] = {
    "direct": OneHostPath,
    "hosted": HostedPath,
    "messages": MessagePath,
    "native": NativePath,
    "encoded": EncodedPath,
    "ipc": IpcPath,
    "mpi": MpiPath,
    "nccl": NcclPath,
}


class KeyPaths:
    """Those of one key. place: the key's in the memory of its host; None: it has none.

    value: the key's home, (n,). dtype: of what is pushed. usual, plain: the path of its rounds, and the one of those
    that travel as they are while others travel encoded; None: they go the usual path. codec: of the usual path.
    """

    def __init__(self, means: Means, info: KeyInfo, placement: Placement, place: Any) -> None:
        self.placement, self._is_first, self._key_id = placement, means.group.rank == 0, info.id
        self.usual = path_of(means, info, placement, place)
        staging = self.usual.staging
        self.value: SpaceArray = self.usual.value if staging is None else staging.value
        self.dtype: np.dtype[Any] = self.usual.dtype
        self.codec = self.usual.codec
        self.plain: KeyPath | None = None
        if (plain := placement.unencoded) is not None:
            self.plain = path_of(means, info, plain, place, self.value)

    @property
    def shared(self) -> bool:
        """Whether the value, or that of rounds as they are, is in memory that the ranks of a host share."""
        return self.usual.shared or (self.plain is not None and self.plain.shared)

    @property
    def home_is_shared(self) -> bool:
        """Whether the home of the value is in memory that the ranks of a host share.

        A round then writes the value to the caller's arrays as it comes.
        """
        return self.usual.shared and self.usual.staging is None

    @property
    def changes(self) -> bool:
        """Whether a round may change what is pushed, if it begins now and nobody forbids it."""
        if self.codec is None:
            return self.usual.changes
        # Then a caller's result is a better place for a copy than memory of the round's own.
        changes = self.plain is not None and self.plain.changes
        return changes and self.codec.choice is not None and self.codec.choice.plain

    @property
    def held_bytes(self) -> int:
        """Memory of this worker's own that is held for the value, or for what it adds."""
        held = self.usual.held_bytes + (0 if self.codec is None else self.codec.held_bytes)
        if (path := self.plain) is not None:  # which counts the home, too, unless its value is elsewhere
            held += path.held_bytes - (int(self.value.nbytes) if path.value is self.value else 0)
            held += 0 if path.staging is None else path.staging.held_bytes - int(self.value.nbytes)
        return held + (0 if self.usual.staging is None else self.usual.staging.held_bytes)

    def cut(self, placement: Placement) -> None:
        """From the next round on the owners own other parts, and labels are compared anew. Not during a round."""
        self.usual.cut(placement)
        if self.plain is not None and placement.unencoded is not None:
            self.plain.cut(placement.unencoded)
        if self.codec is not None:
            self.codec.cut(self.placement, placement)
        self.placement = placement

    # --- the first value

    def share(self) -> Steps[None]:
        """Bring the value of worker 0 to all. Collective; once, before the first round."""
        path = self.usual
        if path.staging is None:
            return path.share()
        return path.staging.share(path.value, path.share(), is_first=self._is_first)

    def share_now(self) -> bool:
        """Do what `share` does, where nothing has to be waited for. False: nothing was done."""
        return self.usual.staging is None and self.usual.share_now()

    # --- rounds

    def begin(self, *, plain: bool) -> KeyPath:
        """The path of a round that begins. A `plain` one's values travel as they are, whatever the key's codec."""
        if self.codec is None:
            return self.usual
        self.codec.begin(plain=plain)
        return self.plain if self.plain is not None and self.codec.plain else self.usual

    def end(self) -> Steps[None]:
        """A round has ended whose time is compared with that of others."""
        assert self.codec is not None
        return self.codec.end(wire.key_tag(self._key_id, 0))


def path_of(means: Means, info: KeyInfo, placement: Placement, place: Any, value: SpaceArray | None = None) -> KeyPath:
    """Make the path that a placement names. value: the home of a key that has another path; None: it gets one here."""
    name, staging = placement.path, None
    if name == "staged":
        assert placement.host is not None
        name = placement.host
        hosts = means.hosts if PATHS[name].shared else None
        staging = Staging(cast(DeviceSpace, means.spaces.of(info)), info, hosts, value)
    path = PATHS[name](means, info, placement, place, staging)
    if value is not None and staging is None and not path.shared:
        path.value = value
    return path
