"""What a strategy is: it decides who adds the pushed arrays, when, and where the optimizer runs.

The store hands it flat arrays, one per key and call, already summed over this worker's devices. Every transfer comes
back as a request together with what a wait for it is about, so that the blocking and the `_async` calls are one path.
What is the same in every mode, the session has (session/base.py). What most modes have none of has a default here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse
from mpikv.hostmemory.segment import HostMemory
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import StatesFile
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.base import NewKey, Pending
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import DEVICE, HOST, Spaces

Loaded = tuple[list[Key], list[Any]]
"""What all workers must know of a file of states: its keys, and the optimizer's config of each, if it was saved."""

Write = Callable[[Sequence[Sequence[StateRecord]]], None]
"""Writes a file of states. Takes the parts that each owner has."""

Read = Callable[[], StatesFile]
"""Reads a file of states and checks that it fits the store."""


class Entry(NamedTuple):
    """One key of a call: what is pushed, flat, in the key's space, and where the value after it goes.

    None: no push, or no pull. outs: of a push and a pull, in place of `sink`, flat arrays of the caller's that the
    value goes to. The caller lends them, and `total`, until the call has ended. None: `total` is the strategy's own.
    """

    info: KeyInfo
    total: SpaceArray | None
    sink: Sink | None
    outs: tuple[HostArray, ...] | None = None


class Sink:
    """Where one pulled value goes: one or several arrays of the caller's. Made in the thread that makes the call.

    `buffer()` is contiguous host memory for the value in the key's dtype: the caller's own array where that can be.
    `deliver(value)` brings the value to every array; it costs nothing for the one that was the buffer.
    """

    def __init__(self, info: KeyInfo, outs: Sequence[Any], spaces: Spaces) -> None:
        self._info, self._spaces = info, spaces
        self._outs = spaces.callers_arrays(outs)
        self._direct: HostArray | None = None  # the array of the caller's that is the buffer

    def buffer(self) -> HostArray:
        """Host memory for the flat value, (n,); new memory, if it is no array of the caller's."""
        for out in self._outs:
            if isinstance(out, np.ndarray) and out.dtype == self._info.dtype and out.flags.c_contiguous:
                self._direct = out
                return np.asarray(out).reshape(-1)  # of a subclass of ndarray, too, the plain view
        buffer: HostArray = self._spaces.host.empty(self._info.n_elems, self._info.dtype)
        return buffer

    @property
    def places(self) -> set[str]:
        """The names of the spaces that the arrays are in."""
        return {self._spaces.space_of(out) for out in self._outs}

    def deliver(self, value: SpaceArray, on_host: HostArray | None = None) -> None:
        """Write the flat value, which is in the key's space or in host memory, into every array.

        on_host: the same value for the arrays that are there, where it is in both.
        """
        for out in self._outs:
            if out is not self._direct:
                found = value if on_host is None or self._spaces.space_of(out) == DEVICE else on_host
                space = HOST if isinstance(found, np.ndarray) else self._info.space
                self._spaces.write(space, out, found, "out")


class PreparedCall(ABC):
    """A call that is ready to be made: once, or as often as its arrays come again.

    valid: whether it may still be made.
    """

    valid = True

    @abstractmethod
    def start(self, priority: int = 0) -> list[Pending]:
        """Make it; what is still to be waited for, one transfer for each key that is pulled. Local."""

    @abstractmethod
    def wait(self, pending: Sequence[Pending]) -> None:
        """Wait for what `start` returned. Blocks."""

    @abstractmethod
    def release(self) -> None:
        """Forget the arrays."""


class Travelling(Protocol):
    """Keys of which some travel together."""

    def skip(self, keys: Sequence[Key]) -> None:
        """These take no part in the round that follows, on no worker: those that travel with them do not wait for them.

        Collective where they are others than in the last round, then ConfigError where workers differ; else local.
        """
        ...


class Strategy(ABC):
    """How one mode of a store moves values. Collective calls are collective over the workers."""

    @abstractmethod
    def init(self, values: Sequence[NewKey]) -> None:
        """Agree on new keys and their first values (flat). Collective, blocks."""

    lends = True  # whether callers lend their arrays (`Entry.outs`) where they can

    @abstractmethod
    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """A call that pushes, pulls or both, all keys alike. Local; never blocks, nor does starting it.

        What is pulled is the value after this worker's last push. op: what all workers' arrays become; not SUM only in
        a push with a pull, where nothing updates the key. waits: whether the caller waits for it as soon as it has
        started it, so that it need not be moved on meanwhile, and may be made by all workers together.
        """

    @abstractmethod
    def push_rows(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        """Push rows of a row-sparse key, which become the strategy's own. Local, never blocks."""

    @abstractmethod
    def pull_rows(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        """Start to pull rows of a row-sparse key, (len(ids), columns), as they are after this worker's last push.

        ids: in ascending order, each once. The array is filled when what is pending is done. Local, blocks only while
        thousands of transfers are under way.
        """

    @abstractmethod
    def changed_rows(self, info: KeyInfo, priority: int) -> tuple[list[Pending], Callable[[], RowSparse]]:
        """Start to pull the rows of a key that were changed since this worker's last such call; none in the first one.

        They are as they are after this worker's last push. The function returns them when what is pending is done.
        """

    def bucket(self, keys: Sequence[Key]) -> Travelling | None:
        """Let keys that are always pushed together, in this order, travel together; None: each travels alone.

        Before any of them is pushed. Collective, blocks.
        """
        return None

    @abstractmethod
    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Let `optimizer` serve `keys` (None: all that have no other). Collective, blocks."""

    def compare_updates(self, optimizer: Optimizer, keys: Sequence[Key]) -> None:  # noqa: B027 - one worker has none
        """Compare what workers update these keys with by themselves, now and with each push; the store sums.

        Collective, blocks. Raises ConfigError on every worker for different optimizers.
        """

    @abstractmethod
    def save_states(self, write: Write) -> None:
        """Give `write`, at worker 0, the states of all owners after what all workers have pushed. Collective, blocks.

        Raises what `write` raises, on every worker.
        """

    @abstractmethod
    def load_states(self, read: Read) -> Loaded:
        """Let worker 0 `read` a file, and give all owners their parts of it; what all must know of it.

        Collective, blocks. Raises what `read` raises, on every worker, and has changed nothing then.
        """

    def codec_states(self, call: str) -> list[StateRecord]:
        """What this worker's codecs remember, piece by piece, after all that it has pushed. Collective, blocks."""
        return []

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:  # noqa: B027 - most modes have no codecs
        """Let the codecs remember this, and forget what they remembered. Local."""

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Zeroed memory that the host's workers share, None where they do not. Collective, blocks.

        text: what it is for; ShapeMismatch on every worker where it differs.
        """
        return None

    def reserve(self, call: str, n_bytes: int) -> tuple[HostMemory, int] | None:
        """Zeroed memory that the host's workers share, `n_bytes` for each, and where it begins; None as in `allocate`.

        Collective, blocks. call: whose it is; ShapeMismatch on every worker where it differs.
        """
        return None

    def stats(self) -> dict[str, int]:
        """What has been counted besides messages, and the memory held. Local."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End the store, and its session. Collective, blocks."""
