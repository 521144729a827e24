"""What a strategy is: it decides who adds the pushed arrays, when, and where the optimizer runs.

The store hands it flat arrays, one per key and call, already summed over this worker's devices. Every transfer comes
back as a request together with what a wait for it is about, so that the blocking and the `_async` calls are one path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpikv.arrays import HostArray, write
from mpikv.engine.request import Request
from mpikv.keys import Key, KeyInfo
from mpikv.observe.activity import Activity
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.reductions import Reduction

Updater = Callable[[Key, Any, Any], None]


class Pending(NamedTuple):
    """A transfer under way, and what to say of a wait for it."""

    request: Request
    waiting: Waiting


class Sink:
    """Where one pulled value goes: one or several arrays of the caller's, or a new array.

    `buffer()` is contiguous memory for the value in the key's dtype: the caller's own array where that is possible.
    `deliver(value)` brings the value to every array; it costs nothing for the one that was the buffer.
    """

    def __init__(self, info: KeyInfo, outs: Sequence[Any]) -> None:
        self._info = info
        self._outs = outs
        self._direct: HostArray | None = None  # the array of the caller's that is the buffer

    def buffer(self) -> HostArray:
        """Memory for the flat value, (n,)."""
        for out in self._outs:
            if isinstance(out, np.ndarray) and out.dtype == self._info.dtype and out.flags.c_contiguous:
                self._direct = out
                return np.asarray(out).reshape(-1)  # of a subclass of ndarray, too, the plain view
        return np.empty(self._info.n_elems, self._info.dtype)

    def deliver(self, value: HostArray) -> None:
        """Write the flat value into every array."""
        for out in self._outs:
            if out is not self._direct:
                write(out, value, "out")


class OneByOne:
    """Base of strategies that do nothing more for the keys of one call together than for each of them."""

    def push(self, info: KeyInfo, total: HostArray, priority: int) -> Pending:
        """See `Strategy`."""
        raise NotImplementedError

    def pull(self, info: KeyInfo, sink: Sink, priority: int) -> Pending:
        """See `Strategy`."""
        raise NotImplementedError

    def pushpull(self, info: KeyInfo, total: HostArray, sink: Sink, priority: int, op: Reduction) -> Pending:
        """See `Strategy`."""
        raise NotImplementedError

    def push_many(self, entries: Sequence[tuple[KeyInfo, HostArray]], priority: int) -> list[Pending]:
        """Each key for itself."""
        return [self.push(info, total, priority) for info, total in entries]

    def pull_many(self, entries: Sequence[tuple[KeyInfo, Sink]], priority: int) -> list[Pending]:
        """Each key for itself."""
        return [self.pull(info, sink, priority) for info, sink in entries]

    def pushpull_many(
        self, entries: Sequence[tuple[KeyInfo, HostArray, Sink]], priority: int, op: Reduction
    ) -> list[Pending]:
        """Each key for itself."""
        return [self.pushpull(info, total, sink, priority, op) for info, total, sink in entries]


class PreparedCall(Protocol):
    """A blocking `pushpull` that is ready to be made, as often as its arrays come again."""

    @property
    def valid(self) -> bool:
        """Whether it may still be made."""
        ...

    def run(self, priority: int = 0) -> bool:
        """Make it, blocking. False: nothing was done, push and pull in the ordinary way."""
        ...

    def release(self) -> None:
        """Forget the arrays."""
        ...


class OwnUpdates(Protocol):
    """The steps of a trainer that updates by itself; see strategies/own_updates.py."""

    def may_leave(self) -> bool:
        """Whether gradients may be contributed before the next step begins."""
        ...

    def begin(self, *, separate: bool = False, contributed: bool = False) -> float:
        """The next step begins: what to multiply one's gradients by."""
        ...

    def end(self) -> float | None:
        """The factor to update with."""
        ...

    def settle(self) -> None:
        """Raise what is wrong with the last step."""
        ...


class Strategy(Protocol):
    """One mode of a store. Collective calls are collective over the workers."""

    rank: int
    num_workers: int
    synchronous: bool
    shares_memory: bool  # all workers share memory: nothing travels over a link
    pid: int  # the process whose store it is; 0: a child that is forked has a copy that is as good

    def init(self, values: Sequence[tuple[Key, tuple[int, ...], HostArray]]) -> None:
        """Agree on new keys and their first values (flat). Collective, blocks."""
        ...

    def lookup(self, key: Key) -> KeyInfo | None:
        """What was agreed on `key`; None before its `init`."""
        ...

    def infos(self) -> Sequence[KeyInfo]:
        """All keys of the store, in the order of their numbers."""
        ...

    def push(self, info: KeyInfo, total: HostArray, priority: int) -> Pending:
        """Start pushing a flat array, which becomes the strategy's own. Local, never blocks."""
        ...

    def pull(self, info: KeyInfo, sink: Sink, priority: int) -> Pending:
        """Start pulling the value after this worker's last push."""
        ...

    def pushpull(self, info: KeyInfo, total: HostArray, sink: Sink, priority: int, op: Reduction) -> Pending:
        """Both, in one exchange. op: what all workers' arrays become; not SUM only where nothing `updates` the key."""
        ...

    def push_many(self, entries: Sequence[tuple[KeyInfo, HostArray]], priority: int) -> list[Pending]:
        """`push` of all keys of one call, which may share messages."""
        ...

    def pull_many(self, entries: Sequence[tuple[KeyInfo, Sink]], priority: int) -> list[Pending]:
        """`pull` of all keys of one call."""
        ...

    def pushpull_many(
        self, entries: Sequence[tuple[KeyInfo, HostArray, Sink]], priority: int, op: Reduction
    ) -> list[Pending]:
        """`pushpull` of all keys of one call."""
        ...

    def updates(self, info: KeyInfo) -> bool:
        """Whether a push changes the key's value by an optimizer or an updater. Local."""
        ...

    def prepare(
        self, infos: Sequence[KeyInfo], values: Sequence[Any], outs: Sequence[Sequence[Any]], op: Reduction
    ) -> PreparedCall | None:
        """A shorter way for a blocking `pushpull` of one array per key; None where there is none. Local."""
        ...

    def allocate(self, text: str, n_bytes: int) -> HostArray | None:
        """Zeroed memory that the host's workers share, None where they do not. Collective, blocks.

        text: what it is for; ShapeMismatch on every worker where it differs.
        """
        ...

    def bucket(self, keys: Sequence[Key]) -> None:
        """Let keys travel together that are always pushed together, in this order. Collective, blocks."""
        ...

    def skip(self, infos: Sequence[KeyInfo], *, changed: bool) -> None:
        """Keys that travel with others take no part in this round, on no worker.

        changed: they are others than in the last round. Then collective, and ConfigError where workers differ.
        """
        ...

    def own_updates(self, optimizer: Optimizer, keys: Sequence[Key]) -> OwnUpdates | None:
        """Let workers compare what they update these keys with by themselves; None: there is one worker.

        Collective, blocks. Raises ConfigError on every worker for different optimizers.
        """
        ...

    def stats(self) -> dict[str, int]:
        """What has been counted so far, and the memory held. Local."""
        ...

    def wait(self, pending: Pending, timeout_s: float | None = None) -> None:
        """Block until a transfer is done. Raises its error, PeerError or StallError."""
        ...

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        """Let `optimizer` serve `keys` (None: all that have no other). Collective, blocks."""
        ...

    def set_updater(self, updater: Updater) -> None:
        """Let a function of the user's change stored values. UnsupportedError where owners are other processes."""
        ...

    def save_states(self, path: str, keys: Sequence[Key] | None = None, *, dump_optimizer: bool) -> None:
        """Write the optimizer's states of `keys` (None: of all) into one file. Collective, blocks."""
        ...

    def load_states(self, path: str) -> None:
        """Read them. Collective, blocks. Changes nothing when it raises."""
        ...

    def barrier(self) -> None:
        """Wait for all workers. Collective, blocks."""
        ...

    def decide(self, call: str, attempt: Callable[[], Any]) -> Any:
        """Let worker 0 try something; its result (JSON), or MpikvError or OSError, on every worker. Collective, blocks.

        call: 'save' or 'resume'.
        """
        ...

    def stop_requested(self) -> bool:
        """Whether all workers stop at this read of it (control/stop.py). Blocks only while they agree."""
        ...

    def request_stop(self, why: str) -> None:
        """Ask all workers to stop. Local."""
        ...

    def listen_for(self, asked: Callable[[], str | None]) -> None:
        """Ask all workers to stop as soon as `asked()` says why, which may be asked at any time. Local."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Let workers whose last epoch had another number of batches be told (control/epochs.py). Local."""
        ...

    def close(self) -> None:
        """End the store. Collective, blocks."""
        ...

    def progress(self) -> None:
        """Move transfers on without waiting, for a caller who asks whether one is done."""
        ...

    @property
    def activity(self) -> Activity | None:
        """What this rank does in the store; None where nobody ever waits for it."""
        ...

    def abandon(self) -> None:
        """Stop threads without talking to anybody, when the process is going down."""
        ...
