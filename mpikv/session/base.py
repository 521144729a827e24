"""What a session is: the workers of one store as seen by one of them.

A store holds a session and a strategy. The session is the same for every mode over several processes: the keys that
the workers agreed on, waiting with a limit, stopping together, reports of what a worker is doing, and the end. The
strategy moves values. `Session` itself is that of one process, which agrees with itself at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from mpikv.arrays.row_sparse import RowSparse
from mpikv.codecs.compression import Compressions
from mpikv.config import Config
from mpikv.engine.operation import Operation
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.observe.activity import Activity
from mpikv.observe.log import StoreLog
from mpikv.observe.metrics import MetricsFile
from mpikv.observe.program import WorkerStatus, this_process
from mpikv.observe.recorder import Recorder
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import DEFAULT_SLOT
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import AttributeLog
from mpikv.session.given import GivenErrors
from mpikv.spaces.base import SpaceArray
from mpikv.spaces.named import HOST, Spaces

Updater = Callable[[Key, Any, Any], None]
T = TypeVar("T")


class Pending(NamedTuple):
    """A transfer under way, and what reports of a wait for it contain. others: of further keys that end with it."""

    request: Operation
    waiting: Waiting
    others: Sequence[Waiting] = ()


class NewKey(NamedTuple):
    """A key as one worker initialises it. value: flat, in the space of this name; where it is `sparse`, its rows."""

    key: Key
    shape: tuple[int, ...]
    value: SpaceArray | RowSparse
    space: str
    sparse: bool = False


class Agreed(Protocol):
    """Something that workers agree on as they go. agreed: what that is, as JSON; a new worker sets it to another's."""

    agreed: Any


class Session:
    """The only worker of a store of one process; `Workers` is that of several.

    name: the store's type. spaces: where this worker's shards are. infos: what was agreed on each key.
    any_sparse: whether one of them is row-sparse. synchronous: whether all workers make the same steps.
    shares_memory: whether all workers add in memory that they share, so that no value travels over a link.
    compressions: how the values of keys travel that are initialised from now on. pid: the process whose session it
    is; 0: a child that is forked has a copy that is as good. stop_file: where a trainer saves when the workers
    stop. stopped: whether they have. snapshot_dir, snapshot_s: where, and how often, a trainer saves what a restart
    goes on from. updater: a function of the user's that changes stored values in place of optimizers. before_barrier:
    called by `barrier` first. before_close, after_close: called by `close` of the store, before anything else and at
    its end, whatever happened. given: which errors callers have been given.
    own_keys: keys of this library's own, which lie where their first values are, whatever the store's type says.
    recorder: gets what this rank does, while a timeline is written.
    passed_on: what a spare gets when it becomes a worker, by names. resumed: whether the program has called `resume`.
    log: of what is decided here. metrics: the file of this rank's metrics, if any.
    """

    rank = 0
    num_workers = 1
    hosts: Sequence[str] = ("",)  # of the workers
    synchronous = True
    shares_memory = False
    pid = 0
    generation = 0  # how often workers have come together after a death, or for a spare
    continues = False  # whether they do
    number = 0  # this worker's at the start
    at_start = 1  # how many workers there were
    numbers: Sequence[int] = (0,)  # of those that `num_workers` counts
    coming: Sequence[int] = (0,)  # of those that are here or will come
    alone = False  # whether this is a spare, whose program has begun and which is no worker yet
    has_spares = False
    has_come = False  # whether this was a spare, and has not made a step yet
    activity: Activity | None = None  # what this rank does in the store; None where nobody ever waits for it

    def __init__(self, name: str, config: Config | None = None, spaces: Spaces | None = None) -> None:
        config = config or Config()
        self.name, self.stop_file = name, config.stop_file
        self.snapshot_dir, self.snapshot_s = config.snapshot_dir, config.snapshot_s
        self.spaces = Spaces() if spaces is None else spaces
        self.compressions = Compressions()
        self.recorder = Recorder()
        self.infos: dict[Key, KeyInfo] = {}
        self.own_keys: set[Key] = set()
        self.any_sparse = False
        self.passed_on: WeakValueDictionary[str, Agreed] = WeakValueDictionary()
        self.stopped = self.closed = self.resumed = False
        self.given = GivenErrors()
        self.log = StoreLog("worker", 0, this_process().host)
        self.metrics: MetricsFile | None = None
        self.unsaved_warned = False  # whether one of several trainers has warned that none of them saves
        self.namespaces = 0
        self.updater: Updater | None = None
        self._optimizers: dict[int, Optimizer] = {}  # slot -> the user's
        self._slots: dict[int, int] = {}  # key id -> slot, for keys with an optimizer of their own
        self._n_slots = 0
        self.attributes = AttributeLog()  # of several workers: what each push is made under
        self.before_barrier: list[Callable[[], None]] = []
        self.before_close: list[Callable[[], None]] = []
        self.after_close: list[Callable[[], None]] = []
        self.on_change: list[Callable[[], None]] = []  # called when workers have gone, or come
        self._wished = False
        self._asked: Callable[[], str | None] = lambda: None

    # --- what it is

    def adds_in_memory(self, keys: Sequence[Key]) -> bool:
        """Whether all workers add the values of these keys in host memory that they share: no value travels."""
        return self.shares_memory and all(self.infos[key].space == HOST for key in keys)

    def new_namespace(self) -> int:
        """A number for a new trainer; the same on all workers that make their trainers in the same order. Local."""
        self.namespaces += 1
        return self.namespaces - 1

    def check_open(self, call: str) -> None:
        """MpikvError on a closed store, and in a process that was forked from its worker. Local."""
        self.check_process(call)
        if self.closed:
            raise MpikvError(f"{call} on a closed store ({self.name}, worker {self.rank} of {self.num_workers})")

    def check_process(self, call: str) -> None:
        """MPI, threads and shared memory do not survive a fork: what a child did there would be the parent's."""
        if self.pid and self.pid != os.getpid():
            raise MpikvError(
                f"{call} in a process that was forked from worker {self.rank} of {self.num_workers}: a store serves "
                "the process that made it. Let the parent make the call, or make a 'local' store here"
            )

    def check_all_stay(self, needs: str, instead: str = "") -> None:
        """Raise UnsupportedError where workers go on after a death. needs: as in 'join needs'. Local."""
        if self.continues:
            raise UnsupportedError(f"{needs} all workers: leave MPIKV_ON_FAILURE unset{instead}")

    def check_no_spares(self, call: str, why: str) -> None:
        """Raise UnsupportedError where a spare may take a worker's place. Local."""
        if self.has_spares:
            raise UnsupportedError(f"{call} takes no spares (MPIKV_SPARES): {why}")

    def lookup(self, key: Key) -> KeyInfo | None:
        """What was agreed on `key`; None before its `init`. Local."""
        return self.infos.get(key)

    def in_order(self) -> list[KeyInfo]:
        """All keys, by their numbers. Local."""
        return sorted(self.infos.values(), key=lambda info: info.id)

    def stats(self) -> dict[str, Any]:
        """Messages that this worker has sent so far, and their bytes. Local."""
        return {"messages_sent": 0, "bytes_sent": 0, "control_messages_sent": 0}

    def by_key(self) -> dict[Key | None, int]:
        """Bytes of messages by key; of one process there are none. Local."""
        return {}

    def workers(self) -> list[WorkerStatus]:
        """What each worker does. Blocks while one does not answer, for some seconds at most."""
        process = this_process()
        return [WorkerStatus(0, process.host, process.pid, alive=True, seen_s=0.0, doing="this worker")]

    # --- what updates keys

    def serve(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> tuple[int, list[int]]:
        """Let `optimizer` serve `keys` from now on (None: all that have no other). Returns its slot, and the keys'
        numbers. Local.
        """
        slot, key_ids = DEFAULT_SLOT, list[int]()
        if keys is not None:
            slot, key_ids = self.new_slot([self.infos[key] for key in keys])
        self._optimizers[slot] = optimizer
        self.updater = None
        return slot, key_ids

    def new_slot(self, infos: Sequence[KeyInfo]) -> tuple[int, list[int]]:
        """A slot for these keys, and their numbers. Local."""
        self._n_slots += 1
        key_ids = [info.id for info in infos]
        self._slots.update(dict.fromkeys(key_ids, self._n_slots))
        return self._n_slots, key_ids

    def set_updater(self, updater: Updater) -> None:
        """Let a function of the user's change stored values. UnsupportedError where owners are other processes."""
        self.updater = updater

    def updates(self, info: KeyInfo) -> bool:
        """Whether a push changes the key's value by an optimizer or an updater. Local."""
        return self.updater is not None or self.optimizer_of(info) is not None

    def needs_whole(self, info: KeyInfo) -> bool:
        """Whether the key's optimizer needs all of it at one owner, as its formula is not elementwise. Local."""
        optimizer = self.optimizer_of(info)
        return optimizer is not None and not optimizer.elementwise

    def slot_of(self, info: KeyInfo) -> int:
        """The slot whose optimizer serves this key. Local."""
        return self._slots.get(info.id, DEFAULT_SLOT)

    def optimizer_of(self, info: KeyInfo) -> Optimizer | None:
        """The user's optimizer that serves this key, None where there is none. Local."""
        return self._optimizers.get(self.slot_of(info))

    def optimizers(self) -> dict[Key, Optimizer]:
        """Return the optimizers of all keys that have one. Local."""
        found = {key: self.optimizer_of(info) for key, info in self.infos.items()}
        return {key: optimizer for key, optimizer in found.items() if optimizer is not None}

    def agree_on_factor(self, key: Key) -> None:
        """Where several workers add: let owners apply the factor of now to this key from now on. Collective, blocks."""

    # --- waiting and agreeing

    def wait(self, pending: Pending, timeout_s: float | None = None, further: Sequence[Pending] = ()) -> None:
        """Block until a transfer is done. Raises its error, PeerError or StallError.

        further: those of the same call, whose caller has that error for all of them.
        """

    def progress(self) -> None:
        """Move transfers on without waiting, for a caller who asks whether one is done."""

    def whole(self, topic: str, attempt: Callable[[], T]) -> T:
        """Make a call of several parts that all workers make. Where workers go on after a death, it is made again as a
        whole, or ended on all of them. Collective, blocks.
        """
        return attempt()

    def agree(self, topic: str, payload: Any, call: str, *, patient: bool = False) -> Any:
        """One agreement of all workers under a topic that has no name but its count. Collective, blocks."""
        return payload

    def barrier(self) -> None:
        """Wait for all workers. Collective, blocks."""

    def decide(self, call: str, attempt: Callable[[], Any]) -> Any:
        """Let worker 0 try something; its result (JSON), or MpikvError or OSError, comes to every worker. Collective,
        blocks.
        """
        self.check_open(call)
        return attempt()

    def gather(self, call: str, data: bytes) -> list[bytes]:
        """Every worker's bytes, by its number, at worker 0; elsewhere none. Collective, blocks."""
        return [data]

    def at_first(self, call: str, bring: Callable[[], bytes], attempt: Callable[[Sequence[bytes]], Any]) -> Any:
        """Let worker 0 try something with what all workers bring, as a whole; see `gather` and `decide`."""

        def both() -> Any:
            gathered = self.gather(call, bring())
            return self.decide(call, lambda: attempt(gathered))

        return self.whole(call, both)

    def scatter(self, call: str, parts: Sequence[bytes] | None) -> bytes:
        """This worker's part of those that worker 0 brings, one for each worker. Collective, blocks."""
        return parts[0] if parts else b""

    def swap(self, call: str, data: bytes, dests: Sequence[int]) -> dict[int, bytes]:
        """Send bytes to worker `dests[rank]`; return those that came here, by worker. Collective, blocks."""
        return {}

    # --- spares

    def between_steps(self, give: Callable[[], bytes], take: Callable[[bytes], None]) -> bool:
        """Let spares in that are ready to be workers. Called by all workers after each step; blocks only then. Returns
        whether some have come.

        give: what a worker goes on from, local. take: lets a new one go on from that, local. Both are of one object.
        """
        return False

    def take_place(self, give: Callable[[], bytes], take: Callable[[bytes], None]) -> None:
        """Become a worker, when the others let this spare in. Blocks. See `between_steps`."""

    # --- stopping together

    def stop_requested(self) -> bool:
        """Whether all workers stop at this read of it (stop.py). Blocks only while they agree."""
        self.stopped = self.stopped or self._wished or self._asked() is not None
        return self.stopped

    def request_stop(self, why: str) -> None:
        """Ask all workers to stop. Local."""
        self._wished = True

    def listen_for(self, asked: Callable[[], str | None]) -> None:
        """Ask all workers to stop as soon as `asked()` says why, which may be asked at any time. Local."""
        self._asked = asked

    # --- the end

    def not_given(self) -> Iterator[BaseException]:
        """Errors that last and that no caller has been given. Local."""
        return iter(())

    def abandon(self) -> None:
        """Stop threads without talking to anybody, when the process is going down."""
        if self.metrics is not None:
            self.metrics.stop()
