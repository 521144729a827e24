"""The direct path of a blocking `pushpull`: all workers of one host, in the same call, through shared memory.

Where a call can go this path it becomes a `DirectCall`, which is kept and used again when the same arrays come again.
The workers find out whether all of them make the same call (hostmemory/common_calls.py). If so, they make it in common,
without a message; if not, the call goes through the keys' queues. Both paths add in the order of the ranks, so the bits
do not tell which one it was.

The newest value of a key is in its place in the host's memory, once for all workers; or, after a call that added in
place, in the arrays of that call, until a push of another kind brings it home.

Memory: scratch, see collectives/shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.reductions import Reduction
from mpikv.collectives.shared import WORDS, Executor, Plan
from mpikv.collectives.shared_plans import Update, same_plan, staged_plan, update_plan
from mpikv.common.checks import shown
from mpikv.common.digests import digest, history_hash
from mpikv.errors import MpikvError
from mpikv.hostmemory.common_calls import WAIT_S, CommonCalls
from mpikv.hostmemory.counters import Counters, Reached
from mpikv.hostmemory.polling import Polling
from mpikv.hostmemory.segment import aligned
from mpikv.observe.stall import Waiting
from mpikv.optimizers.owner import Owner
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import digest_of
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.strategies.arguments import Flat
from mpikv.strategies.base import Entry, PreparedCall
from mpikv.strategies.direct_plans import in_place, regions
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.key_calls import KeyCall
from mpikv.strategies.queues import RoundQueue


class Direct:
    """The direct path of one worker."""

    def __init__(self, session: Workers, places: HostKeys, queues: Mapping[int, RoundQueue], owner: Owner) -> None:
        self._session = session
        memory = places.memory
        assert places.slots is not None
        self._places, self._slots = places, places.slots
        self._queues = queues
        self._owner = owner
        counters = Counters(memory, 0, WORDS, polling=Polling.of(memory, memory.size))
        self._together = CommonCalls(
            counters,
            step=session.engine.step,
            clock=session.engine.clock,
            wait_s=min(WAIT_S, session.members.config.timeout_s / 4),  # the wait in the queues comes after it
        )
        self._executor = Executor(counters, self._wait)
        self._lock = threading.Lock()
        # Counts calls and pushes, to tell which was the last; the queues may have been used before.
        self._clock = max((queue.calls.at_home for queue in queues.values()), default=0)
        self._turn = 0
        self._scratch: HostArray = np.empty(0, np.uint8)
        self.pushes_elsewhere = 0  # changes whenever a queue has changed a value
        self.epoch = 0  # changes with the optimizers: calls made before are of no use
        self._numbers: dict[int, int] = {}  # slot -> number of its attributes in this call
        self._current: DirectCall | None = None
        self._failure: BaseException | None = None  # what ended a call half-way: the others' counters are ahead since
        self.calls = 0
        self.declined = 0
        self.copied_bytes = 0
        self.added_bytes = 0

    # --- memory

    def scratch(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        """Memory of this worker's alone, for one key after another."""
        n_bytes = n_elems * dtype.itemsize
        if self._scratch.size < n_bytes:
            self._scratch = np.empty(aligned(n_bytes), np.uint8)
        return self._scratch[:n_bytes].view(dtype)

    @property
    def held_bytes(self) -> int:
        """Scratch memory of this worker: its slots, and what an optimizer's sums need."""
        return self._slots.per_rank_bytes + self._scratch.size

    def stats(self) -> dict[str, int]:
        """Counted since the start: calls made together, calls that did not meet; bytes copied and added by this worker.

        held_bytes: scratch memory of this worker.
        """
        return {
            "direct_calls": self.calls,
            "declined_calls": self.declined,
            "bytes_copied": self.copied_bytes,
            "bytes_added": self.added_bytes,
            "held_bytes": self.held_bytes,
        }

    # --- keys

    def pushed(self, queue: RoundQueue) -> None:
        """A push of the queue's key that goes through the queue, before the others can learn of it."""
        self._together.pushed(queue.calls.digest, 1)
        self._bring_home(queue)
        self.pushes_elsewhere += 1

    def _bring_home(self, queue: RoundQueue) -> None:
        """Where the newest value is in the arrays of a call, copy it to the key's place. All workers write the same."""
        array = queue.calls.array()
        if array is not None:
            queue.own[...] = array
        self._clock += 1
        queue.calls.at_home = self._clock

    # --- calls

    def prepare(self, entries: Sequence[Entry], op: Reduction, otherwise: PreparedCall) -> DirectCall | None:
        """A call of keys whose path it is, with arrays of the caller's; None where it cannot go the direct path.

        otherwise: the same call through the keys' queues, for when workers are in different calls.
        """
        infos = [entry.info for entry in entries]
        queues = [self._queues[info.id] for info in infos]
        flat: list[Flat] = [(entry.total, entry.outs or ()) for entry in entries]
        optimizers = [self._owner.optimizer_of(info.id) for info in infos]
        if 0 < optimizers.count(None) < len(optimizers):
            return None
        replicas = [self._places.replicas(value) for value, _ in flat]
        where_they_are = all(
            one is not None
            and len(targets) == 1
            and targets[0].__array_interface__["data"] == value.__array_interface__["data"]
            for one, (value, targets) in zip(replicas, flat, strict=True)
        )
        kind = "update" if optimizers and optimizers[0] is not None else "in place" if where_they_are else "staged"
        if kind == "in place":
            plan = same_plan(in_place(self._places, replicas, op))
        elif kind == "staged":
            plan = staged_plan(self._slots, regions(self._places, queues, flat), op)
        else:
            plan = self._update(queues, flat, replicas)
        offset_of = self._places.memory.offset_of
        places = [None if one is None or kind == "staged" else offset_of(one[0]) for one in replicas]
        named = digest(kind, [info.id for info in infos], places, op.name)
        call = DirectCall(self, kind, queues, plan, named, otherwise=otherwise)
        call.slots = {self._session.slot_of(info): info for info in infos}
        call.hash = history_hash(queue.calls.digest for queue in queues)
        if kind == "in place":
            call.values = {info.id: value for info, (value, _) in zip(infos, flat, strict=True)}
        for queue in queues:
            queue.calls.kept.append(call)
        return call

    def release(self, call: DirectCall) -> None:
        """The call's arrays are forgotten: values that are only there go home."""
        for queue in call.queues:
            if queue.calls.newest is call:
                self._bring_home(queue)
            elif not call.values:  # it has written to the key's place
                queue.calls.at_home = max(queue.calls.at_home, call.last)
            queue.calls.released_rounds += call.rounds
            queue.calls.kept.remove(call)
        call.rounds = 0

    def reset(self) -> None:
        """Optimizers change: calls prepared so far are of no use, and every value goes home."""
        for queue in self._queues.values():
            self._bring_home(queue)
        self.epoch += 1
        self.pushes_elsewhere += 1

    def _update(
        self,
        queues: Sequence[RoundQueue],
        flat: Sequence[tuple[HostArray, tuple[HostArray, ...]]],
        replicas: Sequence[list[HostArray] | None],
    ) -> Callable[[int], Plan]:
        me, keys = self._places.rank, []
        longest = max(
            (queue.bounds[me + 1] - queue.bounds[me]) * sum_dtype(queue.info.dtype).itemsize for queue in queues
        )
        self.scratch(longest, np.dtype(np.uint8))  # before views of it are taken
        for queue, (value, outs), shared in zip(queues, flat, replicas, strict=True):
            if not value.size:
                continue
            values: Sequence[HostArray | None] = shared or [
                value if rank == me else None for rank in range(self._places.size)
            ]
            keys.append(Update(values, queue.own, outs, queue.bounds, self._applier(queue)))
        return same_plan(update_plan(self._slots, keys, self.scratch))

    def _applier(self, queue: RoundQueue) -> Callable[[HostArray], None]:
        me = self._places.rank
        own = queue.own[queue.bounds[me] : queue.bounds[me + 1]]
        slot = self._session.slot_of(queue.info)

        def apply(total: HostArray) -> None:
            self._owner.apply(queue.info, own, total, (0, self._numbers[slot]))

        return apply

    def run(self, call: DirectCall) -> bool:
        """Make the call together with the others; False: nothing was done, it must go through the keys' queues."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread of this worker is in one
        try:
            if self._failure is not None:
                raise MpikvError(
                    f"pushpull: an earlier call ended half-way on this worker ({type(self._failure).__name__}: "
                    f"{self._failure}), and the other workers count on its part of it: this store can sum no more"
                ) from self._failure
            if self._session.engine.failure is not None or not call.ready():
                return False
            plan = call.plan(self._turn)
            # It may raise, so before the others count on this worker.
            label = self._number_attributes(call) if self._session.attributes.slots else 0
            if label is None:
                self.declined += 1
                return False
            self._executor.begin(plan)
            try:
                together = self._together.begin(call.digest + label)
            except BaseException as error:  # Ctrl-C; whether the others go on with this worker's part is not known
                self._failure = error
                self._session.engine.interrupted("pushpull", error)
                raise
            if not together:
                self.declined += 1
                return False
            self._turn ^= 1
            self._current = call
            try:
                self._executor.finish(plan)
            except BaseException as error:
                self._failure = error
                raise
            finally:
                with self._session.engine.lock:
                    self._clock += 1
                    call.last = self._clock
                    call.rounds += 1
                    self._together.end(call.hash, call.n_keys)
            self._session.activity.note(call.name)
            self.calls += 1
            self.copied_bytes += plan.copied_bytes
            self.added_bytes += plan.added_bytes
            return True
        finally:
            self._current = None  # it holds the arrays
            self._lock.release()

    def _number_attributes(self, call: DirectCall) -> int | None:
        """Changed attributes of the optimizers get a number, which they keep if the call goes through the keys' queues.

        Returns a digest of the labels. Where those of workers differ, they do not meet: then the call goes through the
        keys' queues, where they are compared. None: it has to, since this worker's values are to be scaled, in a copy.
        """
        self._numbers = {}
        label = 0
        for slot, info in call.slots.items():
            under, attributes = self._session.under(info)
            if attributes is not None:
                self._owner.add_attributes(slot, 0, under.number, attributes)
            if under.ratio != 1.0:
                return None
            self._numbers[slot] = under.number
            label = label * 31 + digest_of(under.label)
        return label

    def _wait(self, request: Reached) -> None:
        assert self._current is not None
        queue = self._current.queues[0]
        self._session.wait(Pending(request, Waiting("pushpull", queue.info.key, queue.info.id)))


class DirectCall(KeyCall, PreparedCall):
    """One call, ready to be made: which keys, which arrays, what this worker does."""

    def __init__(
        self,
        direct: Direct,
        kind: str,
        queues: Sequence[RoundQueue],
        plan: Callable[[int], Plan],
        digest_: int,
        *,
        otherwise: PreparedCall,
    ) -> None:
        super().__init__()
        self._direct, self._otherwise = direct, otherwise
        self.kind = kind
        self.name = f"pushpull of key {shown(queues[0].info.key)}"  # for a stall report
        self.queues = queues
        self.plan = plan
        self.digest = digest_
        self.hash = 0
        self.slots: dict[int, KeyInfo] = {}  # of the optimizers of its keys, with one of the keys
        self.n_keys = len(queues)
        self._checked = -1
        self._epoch = direct.epoch

    @property
    def valid(self) -> bool:  # type: ignore[override]
        """Whether the optimizers are still those it was made for."""
        return self._epoch == self._direct.epoch

    def ready(self) -> bool:
        """Whether nothing is under way in the queues of its keys."""
        if self._checked == self._direct.pushes_elsewhere:
            return True
        if not all(queue.idle for queue in self.queues):
            return False
        self._checked = self._direct.pushes_elsewhere
        return True

    def start(self, priority: int = 0) -> list[Pending]:
        """Make it together with the others, blocking; else start it through the keys' queues."""
        return [] if self._direct.run(self) else self._otherwise.start(priority)

    def wait(self, pending: Sequence[Pending]) -> None:
        """See `PreparedCall`."""
        self._otherwise.wait(pending)

    def release(self) -> None:
        """See `Direct.release`."""
        self._direct.release(self)
        self._otherwise.release()
