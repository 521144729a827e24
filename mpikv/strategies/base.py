"""The interface of a strategy, which decides who adds the pushed arrays, when, and where the optimizer runs.

The store passes flat arrays to it, one per key and call, already summed over this worker's devices. Every call returns
its transfers as requests, so that blocking and `_async` calls share one path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray, is_space_array
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.arrays.row_ids import Ids
from mpikv.arrays.row_sparse import RowSparse
from mpikv.errors import ConfigError
from mpikv.hostmemory.segment import HostMemory
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import StatesFile
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.base import NewKey, Pending, Session
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import DEVICE, HOST, Spaces

Loaded = tuple[list[Key], list[Any]]
"""What all workers must know about a loaded states file: its keys, and each key's optimizer config if it was saved."""

Read = Callable[[], StatesFile]
"""Reads a states file and checks that it fits the store."""


def wait_for_all(
    session: Session, pending: Sequence[Pending], refuses: Callable[[Pending, ConfigError], bool] = lambda *_: True
) -> None:
    """Wait for all keys of a call, even if one is refused: the arrays of the others are in use until they are done.

    refuses: whether an error is of this key alone; any other is raised at once.
    """
    refused: ConfigError | None = None
    for one in pending:
        try:
            session.wait(one, None, pending)
        except ConfigError as error:
            if not refuses(one, error):
                raise
            refused = refused or error
    if refused is not None:
        raise refused


class Entry(NamedTuple):
    """One key of a call.

    total: what is pushed, (n,), in the key's space; None: nothing. sink: where the pulled value is written; None: it is
    not pulled. outs: in place of `sink` when a call pushes and pulls: the caller's flat arrays. The caller then lends
    `outs` and `total`: it does not touch them until the call has ended. None: the strategy may keep and change `total`.
    """

    info: KeyInfo
    total: SpaceArray | None
    sink: Sink | None
    outs: tuple[HostArray, ...] | None = None


Flat = tuple[SpaceArray, tuple[SpaceArray, ...]]  # a key's value and its outs, flat


def flattened(infos: Sequence[KeyInfo], values: Sequence[Any], outs: Sequence[Sequence[Any]]) -> list[Flat] | None:
    """The arrays of a call as flat views; None where one of them cannot be used in place, or where they overlap."""
    flat: list[Flat] = []
    for info, value, targets in zip(infos, values, outs, strict=True):
        if not usable_in_place(value, info):
            return None
        own = _flat(value)
        if len(targets) == 1 and targets[0] is value:  # as in most calls
            flat.append((own, (own,)))
            continue
        if not all(usable_in_place(target, info) for target in targets):
            return None
        flat.append((own, tuple(map(_flat, targets))))
    return None if overlap(flat) else flat


def _flat(array: Any) -> SpaceArray:
    """A flat view. np.asarray first, because a reshaped np.matrix still has two axes."""
    return np.asarray(array).reshape(-1) if isinstance(array, np.ndarray) else array.reshape(-1)


def address_of(array: SpaceArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def usable_in_place(array: Any, info: KeyInfo) -> bool:
    return (
        is_space_array(array)
        and array.dtype == info.dtype
        and array.flags.c_contiguous
        and array.flags.aligned
        and array.shape == info.shape
    )


def overlap(flat: Sequence[Flat]) -> bool:
    """Whether writing one result could change another key's result, or a value that has not been read yet."""
    spans = []
    for value, outs in flat:
        if not value.nbytes:
            continue
        begins = {address_of(array) for array in {id(one): one for one in (value, *outs)}.values()}
        spans += [(begin, begin + value.nbytes) for begin in begins]
    spans.sort()
    return any(second[0] < first[1] for first, second in pairwise(spans))


class Sink:
    """The caller's arrays, one or several, that one pulled value is written to. Made in the thread that makes the call.

    `deliver` writes the value into every array, except the one that is the `buffer()` and has it already.
    """

    def __init__(self, info: KeyInfo, outs: Sequence[Any], spaces: Spaces) -> None:
        self._info, self._spaces = info, spaces
        self._outs = spaces.callers_arrays(outs)
        self._direct: HostArray | None = None  # the caller's array that is the buffer

    def buffer(self) -> HostArray:
        """Contiguous host memory for the value, (n,): one of the caller's arrays, or new if none of them fits."""
        for out in self._outs:
            if isinstance(out, np.ndarray) and out.dtype == self._info.dtype and out.flags.c_contiguous:
                self._direct = out
                return np.asarray(out).reshape(-1)  # a base-class view, also of an ndarray subclass
        buffer: HostArray = self._spaces.host.empty(self._info.n_elems, self._info.dtype)
        return buffer

    @property
    def space_names(self) -> set[str]:
        return {self._spaces.space_of(out) for out in self._outs}

    def deliver(self, value: SpaceArray, on_host: HostArray | None = None) -> None:
        """Write the flat value into every array. value: in the key's space or in host memory.

        on_host: a copy of it in host memory, for arrays that are there, if the value exists in both memories.
        """
        for out in self._outs:
            if out is not self._direct:
                source = value if on_host is None or self._spaces.space_of(out) == DEVICE else on_host
                space = HOST if isinstance(source, np.ndarray) else self._info.space
                self._spaces.write(space, out, source, "out")


class PreparedCall(ABC):
    """A call whose arguments have been checked. It can be started again for the same arrays while it is `valid`."""

    valid = True

    @abstractmethod
    def start(self, priority: int = 0) -> list[Pending]:
        """Start the call. Returns the transfers to wait for, one for each key that is pulled. Local."""

    @abstractmethod
    def wait(self, pending: Sequence[Pending]) -> None:
        """Wait for what `start` returned. Blocks."""

    @abstractmethod
    def release(self) -> None:
        """Forget the arrays."""


class SparseKeys(Protocol):
    """The row-sparse keys of a strategy. Local; blocks only while thousands of transfers are in progress."""

    def push(self, info: KeyInfo, total: RowSparse, priority: int) -> None:
        """Push rows, in memory that the strategy may keep and change."""

    def pull(self, info: KeyInfo, ids: Ids, priority: int, call: str) -> tuple[HostArray, list[Pending]]:
        """Start to pull rows, (len(ids), columns), as they are after this worker's last push.

        ids: in ascending order, each once. The array is filled when the returned transfers are done.
        """

    def changed(self, info: KeyInfo, priority: int) -> tuple[list[Pending], Callable[[], RowSparse]]:
        """Start to pull the rows that changed since this worker's last such call; the first call returns none.

        Rows have their values after this worker's last push. Call the returned function when the transfers are done.
        """


class Strategy(ABC):
    """How one mode of a store moves values. Collective calls are collective over the workers."""

    rows: SparseKeys

    @abstractmethod
    def init(self, values: Sequence[NewKey]) -> None:
        """Agree with all workers on new keys and their first values (flat). Collective, blocks."""

    lends = True  # whether callers lend their arrays (`Entry.outs`) where they can
    # Where workers go on after a death: a slot, and by the number that each worker had at the start, what a sum of one
    # of its keys is divided by if the worker is in it, in pushes from now on. Else sums are divided by nothing.
    weights: tuple[int, Sequence[float]] | None = None

    def contributors(self, key: Key) -> Sequence[int]:
        """Where workers go on after a death: those, by their numbers at the start, in the last sum of a key. Local."""
        return ()

    @abstractmethod
    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        """Prepare a call that pushes, pulls or does both, the same for all keys. Local; never blocks, nor does `start`.

        A pull returns the value after this worker's last push. op: another one than SUM only in a call that pushes and
        pulls keys that no optimizer updates. waits: whether the caller waits right after it has started the call. The
        engine then need not run the call in the background, and workers of one host may make it together.
        """

    @abstractmethod
    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Let `optimizer` update `keys` (None: all keys that have no other optimizer). Collective, blocks."""

    def compare_updates(self, optimizer: Optimizer, keys: Sequence[Key] | None, *, scales: bool = False) -> int:
        """Check, now and at each push, that all workers update these keys with the same optimizer. Returns its slot.

        For keys that workers update by themselves; None: all that have no other optimizer. scales: whether every push
        has the factor of its worker, as where owners update. Collective, blocks. ConfigError on all where optimizers
        differ.
        """
        return 0  # one worker has none to compare with

    def follow(self, optimizer: Optimizer, keys: Sequence[Key]) -> int:
        """Let pushes of these keys have the attributes of this optimizer, of which a copy serves them. Returns the
        slot. Of a worker that has taken another's place; local.
        """
        return 0

    @abstractmethod
    def own_states(self, call: str, *, alone: bool = False) -> list[StateRecord]:
        """This worker's share of all owners' states, after all pushes of all workers. Collective, blocks.

        alone: the states of all owners as they are now, without other workers; in asynchronous stores.
        """

    @abstractmethod
    def load_states(self, read: Read) -> Loaded:
        """Call `read` at worker 0, and send each owner the states of its shards. Collective, blocks.

        Raises what `read` raises, on every worker, and has changed nothing then.
        """

    def cuts(self) -> dict[Key, int]:
        """Where keys are divided between workers and servers: the first element of the servers'. Local."""
        return {}

    def codec_states(self, call: str) -> list[StateRecord]:
        """The states of this worker's codecs, piece by piece, after all of its pushes. Collective, blocks."""
        return []

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:  # noqa: B027 - most modes have no codecs
        """Replace the states of this worker's codecs. Local."""

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Zeroed memory that the workers of a host share; None where they share none. Collective, blocks.

        text: what it is for; ShapeMismatch on every worker where it differs.
        """
        return None

    def reserve(self, n_bytes: int) -> tuple[HostMemory, int | None] | None:
        """The memory that a host's workers share, and at worker 0 the offset of zeroed `n_bytes` for each. Local.

        None: they share none. No offset: there is no room, or this is another worker, who has to be told.
        """
        return None

    def ask_servers(self, request: bytes, number: int | None = None) -> list[bytes]:
        """Send servers that are ranks of their own (number: one of them) a request about timelines. Blocks."""
        return []

    def stats(self) -> dict[str, int]:
        """Counts other than those of messages, and the bytes of memory held. Local."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End the store, and its session. Collective, blocks."""
