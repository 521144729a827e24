"""The direct path of a blocking `pushpull`: all workers of one host make the same call together, in shared memory.

A call that can take this path becomes a `DirectCall`, which is kept and used again when the caller passes the same
arrays again. At each call the workers find out whether all of them make the same one (hostmemory/common_calls.py). If
not, the call goes through the keys' queues, with the same bits. Where the newest value is then: docs/adr/0015.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mpikv.arrays.as_numpy import HostArray, sum_dtype
from mpikv.arrays.reductions import Reduction
from mpikv.collectives.shared import WORDS, Executor, Plan
from mpikv.collectives.shared_plans import Interval, Region, Update, in_place_plan, same_plan, staged_plan, update_plan
from mpikv.common.checks import shown
from mpikv.common.digests import digest, history_hash
from mpikv.errors import MpikvError
from mpikv.hostmemory.common_calls import WAIT_S, CommonCalls
from mpikv.hostmemory.counters import Counters, Reached
from mpikv.hostmemory.polling import Polling
from mpikv.hostmemory.segment import ALIGN_BYTES, aligned
from mpikv.observe.stall import Waiting
from mpikv.optimizers.owner import Owner
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import digest_of
from mpikv.session.base import Pending
from mpikv.session.stalls import EARLY
from mpikv.session.workers import Workers
from mpikv.strategies.base import Entry, Flat, PreparedCall
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.queues import RoundQueue


class Direct:
    """One worker's. Direct calls and copies to a key's place are numbered events, so that the last one is known."""

    def __init__(self, session: Workers, host_keys: HostKeys, queues: Mapping[int, RoundQueue], owner: Owner) -> None:
        self._session = session
        memory, config = host_keys.memory, session.members.config
        assert host_keys.slots is not None
        self._host_keys, self._slots = host_keys, host_keys.slots
        self._queues = queues
        self._owner = owner
        counters = Counters(memory, 0, WORDS, polling=Polling.of(memory, memory.size))
        self._common_calls = CommonCalls(
            counters,
            step=session.engine.step,
            clock=session.engine.clock,
            # The wait in the queues, of which others are told, comes after it.
            wait_s=min(WAIT_S, config.timeout_s / 4, EARLY * config.stall_warn_s),
            waited=lambda seconds: session.waits.spent.add("pushpull", seconds),
            failed=lambda: session.engine.failure is not None,
        )
        self._executor = Executor(counters)
        self._lock = threading.Lock()
        self._last_event = 0
        self._parity = 0
        self._scratch: HostArray = np.empty(0, np.uint8)
        self.queue_changes = 0  # how often a queue has got a push, which changes a value
        self.epoch = 0  # how often optimizers have changed: calls prepared in an earlier epoch are not valid
        self._numbers: dict[int, int] = {}  # by slot, the number of its attributes in the current call
        self._current: DirectCall | None = None
        self._failure: BaseException | None = None  # ended a call half-way: the others' counters are ahead since then
        self.calls = 0
        self.declined = 0
        self._told: set[str] = set()  # why calls were declined
        self.copied_bytes = 0
        self.added_bytes = 0

    # --- memory

    def scratch(self, n_elems: int, dtype: np.dtype[Any]) -> HostArray:
        n_bytes = n_elems * dtype.itemsize
        if self._scratch.size < n_bytes:
            self._scratch = np.empty(aligned(n_bytes), np.uint8)
        return self._scratch[:n_bytes].view(dtype)

    @property
    def held_bytes(self) -> int:
        """This worker's scratch memory: its slots, and the memory for the sums that an optimizer applies."""
        return self._slots.per_rank_bytes + self._scratch.size

    def stats(self) -> dict[str, int]:
        return {
            "direct_calls": self.calls,
            "declined_calls": self.declined,
            "bytes_copied": self.copied_bytes,
            "bytes_added": self.added_bytes,
            "held_bytes": self.held_bytes,
        }

    # --- keys

    def note_push(self, queue: RoundQueue) -> None:
        """Note a push through a queue. To be called before other workers can notice the push."""
        self._common_calls.pushed(queue.direct_calls.digest, 1)
        self._copy_to_place(queue)
        self.queue_changes += 1

    def _copy_to_place(self, queue: RoundQueue) -> None:
        """Copy the newest value to the key's place if it is in a call's arrays. All workers write the same bytes."""
        array = queue.direct_calls.array()
        if array is not None:
            queue.stored[...] = array
        self._last_event += 1
        queue.direct_calls.copied_at = self._last_event

    # --- calls

    def prepare(self, entries: Sequence[Entry], op: Reduction, fallback: PreparedCall) -> DirectCall | None:
        """Prepare a direct call, with arrays that the caller lends. None where it cannot take the direct path.

        fallback: the same call through the keys' queues, made when not all workers make the same call.
        """
        infos = [entry.info for entry in entries]
        queues = [self._queues[info.id] for info in infos]
        flat: list[Flat] = [(entry.total, entry.outs or ()) for entry in entries]
        optimizers = [self._owner.optimizer_of(info.id) for info in infos]
        if 0 < optimizers.count(None) < len(optimizers):
            return None
        replicas = [self._host_keys.replicas(value) for value, _ in flat]
        where_they_are = all(
            one is not None
            and len(targets) == 1
            and targets[0].__array_interface__["data"] == value.__array_interface__["data"]
            for one, (value, targets) in zip(replicas, flat, strict=True)
        )
        kind = "update" if optimizers and optimizers[0] is not None else "in place" if where_they_are else "staged"
        if kind == "in place":
            plan = same_plan(_in_place(self._host_keys, replicas, op))
        elif kind == "staged":
            plan = staged_plan(self._slots, _regions(self._host_keys, queues, flat), op)
        else:
            plan = self._update(queues, flat, replicas)
        offset_of = self._host_keys.memory.offset_of
        offsets = [None if one is None or kind == "staged" else offset_of(one[0]) for one in replicas]
        call_digest = digest(kind, [info.id for info in infos], offsets, op.name)
        call = DirectCall(self, queues, plan, call_digest, fallback=fallback)
        call.slots = {self._session.slot_of(info): info for info in infos}
        call.hash = history_hash(queue.direct_calls.digest for queue in queues)
        if kind == "in place":
            call.values = {info.id: value for info, (value, _) in zip(infos, flat, strict=True)}
        for queue in queues:
            queue.direct_calls.kept.append(call)
        return call

    def release(self, call: DirectCall) -> None:
        """Forget the call and its arrays; values that are only there are first copied to their keys' places."""
        for queue in call.queues:
            if queue.direct_calls.newest is call and not self._session.closed:  # nobody reads a closed store
                self._copy_to_place(queue)
            elif not call.values:  # the call has written to the key's place
                queue.direct_calls.copied_at = max(queue.direct_calls.copied_at, call.last)
            queue.direct_calls.released_rounds += call.rounds
            queue.direct_calls.kept.remove(call)
        call.rounds = 0

    def reset(self) -> None:
        """Invalidate all prepared calls, as optimizers change, and copy every value to its key's place."""
        for queue in self._queues.values():
            self._copy_to_place(queue)
        self.epoch += 1
        self.queue_changes += 1

    def _update(
        self,
        queues: Sequence[RoundQueue],
        flat: Sequence[tuple[HostArray, tuple[HostArray, ...]]],
        replicas: Sequence[list[HostArray] | None],
    ) -> Callable[[int], Plan]:
        me, keys = self._host_keys.rank, []
        longest = max(
            (queue.bounds[me + 1] - queue.bounds[me]) * sum_dtype(queue.info.dtype).itemsize for queue in queues
        )
        self.scratch(longest, np.dtype(np.uint8))  # before views of it are taken
        for queue, (value, outs), shared in zip(queues, flat, replicas, strict=True):
            if not value.size:
                continue
            values: Sequence[HostArray | None] = shared or [
                value if rank == me else None for rank in range(self._host_keys.size)
            ]
            keys.append(Update(values, queue.stored, outs, queue.bounds, self._applier(queue)))
        return same_plan(update_plan(self._slots, keys, self.scratch))

    def _applier(self, queue: RoundQueue) -> Callable[[HostArray], None]:
        me = self._host_keys.rank
        own = queue.stored[queue.bounds[me] : queue.bounds[me + 1]]
        slot = self._session.slot_of(queue.info)

        def apply(total: HostArray) -> None:
            self._owner.apply(queue.info, own, total, (0, self._numbers[slot]))

        return apply

    def run(self, call: DirectCall) -> bool:
        """Make the call together with the others. False: nothing was done; make it through the keys' queues instead."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread of this worker is making one
        try:
            if self._failure is not None:
                raise MpikvError(
                    f"pushpull: an earlier call ended half-way on this worker ({type(self._failure).__name__}: "
                    f"{self._failure}), and the other workers wait for it to go on: this store can sum no more"
                ) from self._failure
            if self._session.engine.failure is not None or not call.ready():
                return False
            plan = call.plan(self._parity)
            # This may raise, so it is done before the other workers depend on this one.
            label = self._number_attributes(call) if self._session.attributes.slots else 0
            if label is None:
                return self._decline("values of this worker have to be scaled")
            self._executor.begin(plan)
            recorder = self._session.recorder
            part = recorder.begin(call, self.calls + 1, call.n_bytes) if recorder.on else None
            try:
                together = self._common_calls.begin(call.digest + label)
            except BaseException as error:  # Ctrl-C: the others may have seen this worker and wait for it
                self._failure = error
                self._session.engine.interrupted("pushpull", error)
                raise
            if part is not None:
                part.done("meet")
            if not together:
                return self._decline("not all workers came to the same call in time")
            self._parity ^= 1
            self._current = call
            try:
                self._executor.finish(plan, self._wait)
            except BaseException as error:
                self._failure = error
                raise
            finally:
                with self._session.engine.lock:
                    self._last_event += 1
                    call.last = self._last_event
                    call.rounds += 1
                    self._common_calls.end(call.hash, call.n_keys)
            if part is not None:
                part.done("add")
            self._session.activity.note(call.name)
            self.calls += 1
            self.copied_bytes += plan.copied_bytes
            self.added_bytes += plan.added_bytes
            return True
        finally:
            self._current = None  # so that nothing keeps its arrays alive
            self._lock.release()

    def _decline(self, why: str) -> Literal[False]:
        """Count a call that goes through the queues; the first one of its kind is a line of the log."""
        self.declined += 1
        if why not in self._told:
            self._told.add(why)
            self._session.log.rank(lambda: f"a direct call goes through the queues of its keys: {why} (told once)")
        return False

    def _number_attributes(self, call: DirectCall) -> int | None:
        """Number the optimizers' changed attributes. Returns a digest of the labels under which the call pushes.

        Where labels differ between workers, so do the digests, and the calls go through the keys' queues, which compare
        labels. None: it must go there, because this worker's values have to be scaled in a copy.
        """
        self._numbers = {}
        label = 0
        for slot, info in call.slots.items():
            under = self._session.under(info)
            if under.ratio != 1.0:
                return None
            self._numbers[slot] = under.number
            label = label * 31 + digest_of(under.label)
        return label

    def _wait(self, request: Reached) -> None:
        assert self._current is not None
        queue = self._current.queues[0]
        self._session.wait(Pending(request, Waiting("pushpull", queue.info.key, queue.info.id)))


class DirectCall(PreparedCall):
    """One prepared direct call.

    plan: makes the steps of this worker from the parity of the call's number. digest: identifies the call, on all
    workers. hash: of its keys. slots: of its keys' optimizers, each with one of its keys. values: the arrays of each
    key, by its number, if the call adds in place. rounds: how often it was made. last: the number of its last event.
    """

    def __init__(
        self,
        direct: Direct,
        queues: Sequence[RoundQueue],
        plan: Callable[[int], Plan],
        call_digest: int,
        *,
        fallback: PreparedCall,
    ) -> None:
        self._direct, self._fallback = direct, fallback
        self.queues, self.n_keys, self.plan = queues, len(queues), plan
        self.name = f"pushpull of key {shown(queues[0].info.key)}"  # for a stall report
        self.digest, self.hash = call_digest, 0
        self.slots: dict[int, KeyInfo] = {}
        self.values: dict[int, HostArray] = {}
        self.rounds = self.last = 0
        self._checked, self._epoch = -1, direct.epoch

    @property
    def n_bytes(self) -> int:
        return sum(queue.info.n_bytes for queue in self.queues)

    def __str__(self) -> str:
        return str(self.queues[0]) + (f" and {self.n_keys - 1} more" if self.n_keys > 1 else "")

    @property
    def valid(self) -> bool:  # type: ignore[override]
        return self._epoch == self._direct.epoch

    def ready(self) -> bool:
        if self._checked == self._direct.queue_changes:
            return True
        if not all(queue.idle for queue in self.queues):
            return False
        self._checked = self._direct.queue_changes
        return True

    def start(self, priority: int = 0) -> list[Pending]:
        return [] if self._direct.run(self) else self._fallback.start(priority)

    def wait(self, pending: Sequence[Pending]) -> None:
        self._fallback.wait(pending)

    def release(self) -> None:
        self._direct.release(self)
        self._fallback.release()


def _in_place(host_keys: HostKeys, replicas: Sequence[list[HostArray] | None], op: Reduction) -> Plan:
    """Make the plan to add arrays in place in shared memory. replicas: of each array, in rank order; None: skip it."""
    found = [one for one in replicas if one is not None and one[0].size]
    joined: list[list[HostArray]] = []
    for one in sorted(found, key=lambda one: host_keys.memory.offset_of(one[0]) or 0):
        both = host_keys.join(joined[-1], one) if joined else None  # adjacent arrays are added as one
        if both is None:
            joined.append(one)
        else:
            joined[-1] = both
    return in_place_plan(host_keys.rank, joined, op)


def _regions(host_keys: HostKeys, queues: Sequence[RoundQueue], flat: Sequence[Flat]) -> list[Region]:
    """Join keys, in the order of their places, into regions. Gaps shorter than a cache line are part of a region."""
    begins = [host_keys.memory.offset_of(queue.stored) or 0 for queue in queues]
    order = sorted(range(len(queues)), key=begins.__getitem__)
    found: list[tuple[int, np.dtype[Any], list[Interval]]] = []
    end = -1
    for i in order:
        begin, (value, outs) = begins[i], flat[i]
        if value.size == 0:
            continue
        gap = begin - end
        if found and found[-1][1] == value.dtype and 0 <= gap < ALIGN_BYTES:
            if gap:
                found[-1][2].append(Interval(gap // value.itemsize, None, ()))
        else:
            found.append((begin, value.dtype, []))
        found[-1][2].append(Interval(value.size, value, outs))
        end = begin + value.nbytes
    return [
        Region(host_keys.memory.array(begin, sum(piece.n_elems for piece in pieces), dtype), pieces)
        for begin, dtype, pieces in found
    ]
