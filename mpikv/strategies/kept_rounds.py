"""The rounds of a store whose workers go on without those that die: each has all values and all optimizer states.

A push is added over the workers by the strategy of the present generation, whatever its exchange, which has no
optimizer: its owners and servers hold nothing that a round does not bring. Every worker gets the sum, and updates its
own value with it, with the same bits everywhere. Each worker keeps what it has brought to a round until it has the sum,
and can bring it again (continued.py).

A worker makes one round of a key after the other: a second push of a key waits for the round before it.

Cost: values, states and their updates once on each worker, as in data-parallel training without owners; a copy of what
is pushed, and of its codec's state; no message more.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.arrays.reductions import Reduction
from mpikv.arrays.row_sparse import RowSparse
from mpikv.errors import ConfigError
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import AS_SET, KEPT_ATTRIBUTES, Owner
from mpikv.optimizers.row_table import RowTable
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import FACTOR, AttributeLog
from mpikv.placement.recovery import Rounds
from mpikv.session.base import NewKey, Pending
from mpikv.session.continued import ContinuedSession
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.base import Entry, Sink
from mpikv.strategies.continued_rows import ContinuedRows, added, rows_of
from mpikv.strategies.kept_keys import KeptKeys, KeptTotal, Served, Transfer, pickled_copy
from mpikv.strategies.local import LocalStrategy


class KeptRound(KeptTotal):
    """A round that this worker has opened. weights: see `Strategy`. sinks: where its value goes."""

    op: Reduction
    weights: Sequence[float] | None
    sum: SpaceArray
    rows: Callable[[], RowSparse]  # of a row-sparse key: gives the sum, once it has come
    transfer: Pending | None = None  # in the present generation; None: it has none yet, or the caller waits
    sinks: list[Sink]


class KeptRounds(KeptKeys, LocalStrategy):
    """A local strategy, whose pushes are sums over the workers."""

    rows: ContinuedRows
    _open: dict[Key, KeptRound]

    def __init__(self, session: ContinuedSession) -> None:
        LocalStrategy.__init__(self, session)
        KeptKeys.__init__(self, session)
        self._owner = Owner(session.spaces)
        self.rows = ContinuedRows(self, self._owner)
        self._tables = self.rows.tables
        self._rounds: dict[Key, Rounds] = {}
        self._contributors: dict[Key, Sequence[int]] = {}  # of the last round that is complete
        self._given: set[tuple[Key, ...]] = set()  # keys whose optimizers this worker's program has yet to set
        self._numbers: dict[tuple[int, str], int] = {}  # of attributes, by slot and text
        self._next_number = itertools.count(1)

    # --- keys

    def _add(self, new: NewKey) -> None:
        super()._add(new)
        self._rounds[new.key] = Rounds()
        if new.sparse:
            info = self._known[new.key]
            self._tables[info.id] = RowTable(info, 0, new.shape[0])

    def _fetch(self, keys: Sequence[NewKey]) -> None:
        """Take worker 0's values of keys that have none here yet."""
        if not keys:
            return
        now, spaces = self.session.now, self.session.spaces
        for new in (one for one in keys if one.sparse):
            pending, rows = rows_of(now, new.key)
            now.session.wait(pending)
            if new.key not in self._known:
                self._add(new)
            table, first = self._tables[self._known[new.key].id], rows()
            table.take(first.indices, first.values)
            self._has_value(new.key, table)
        if not (keys := [one for one in keys if not one.sparse]):
            return
        infos = [now.session.infos[new.key] for new in keys]
        buffers = [spaces.of(info).empty(info.n_elems, info.dtype) for info in infos]
        sinks = [Sink(info, [buffer], spaces) for info, buffer in zip(infos, buffers, strict=True)]
        call = now.strategy.prepare([Entry(info, None, sink) for info, sink in zip(infos, sinks, strict=True)])
        call.wait(call.start())
        for new, buffer in zip(keys, buffers, strict=True):
            if new.key not in self._known:
                self._add(new)
            self._has_value(new.key, buffer)

    def _has_value(self, key: Key, value: SpaceArray) -> None:
        del self._early[key]
        self._stored[self._known[key].id] = value

    # --- rounds

    def start(self, entries: Sequence[Entry], op: Reduction, priority: int, *, waits: bool) -> list[Pending]:
        """Push and pull. Blocks while an earlier push of one of the keys is under way, and with `waits` to the end; and
        where a key has no value yet, as its `init` has returned early.
        """
        if self.session.alone and any(entry.total is not None for entry in entries):
            raise ConfigError(
                "push: this is a spare (MPIKV_SPARES), which takes a worker's place in resume() of a Trainer or of "
                "Snapshots, before the first step"
            )
        self.fetch_early(entries)
        self._wait_for_earlier(entries)
        opened = [self._opened(entry, op) for entry in entries if entry.total is not None]
        self.again(
            lambda: self._send([one for one in opened if not one.done and one.transfer is None], priority, waits=waits)
        )
        pending = []
        for info, _, sink, _ in entries:
            if sink is not None:
                pending.append(self._pull(info, sink))
        return pending

    def _pull(self, info: KeyInfo, sink: Sink) -> Pending:
        with self._lock:
            round_ = self._open.get(info.key)
            if round_ is None:
                self.pull(info, sink)
            else:
                round_.sinks.append(sink)
        pending = partial(self.under_way, round_) if round_ is not None else lambda: None
        return Pending(Transfer(self, pending), Waiting("pull", info.key))

    def _opened(self, entry: Entry, op: Reduction) -> KeptRound:
        info, total = entry.info, entry.total
        assert total is not None
        slot = self.session.slot_of(info)
        of_slot, weights = self.weights or (slot, None)
        round_ = KeptRound(info, total, self._attributes(info), self._encodes.owed(info.key))
        round_.op, round_.weights, round_.sinks = op, weights if of_slot == slot else None, []
        with self._lock:
            self._rounds[info.key].begin()
            self._open[info.key] = round_
        return round_

    def _send(self, rounds: Sequence[KeptRound], priority: int = 0, *, waits: bool = False) -> None:
        """Let the present generation add what is brought to these rounds."""
        if not rounds:
            return
        now, entries = self.session.now, []
        if rounds[0].info.sparse:
            (one,) = rounds
            one.transfer, one.rows = added(now, one.info.key, one.total, priority)
            return
        for one in rounds:
            one.sum = self.session.spaces.of(one.info).empty(one.total.size, one.total.dtype)
            entries.append(Entry(now.session.infos[one.info.key], one.total, None, (one.sum,)))
        call = now.strategy.prepare(entries, rounds[0].op, waits=waits)
        pending = call.start(priority)
        if waits or not pending:
            call.wait(pending)
            call.release()  # it is made anew for each round, and one through shared memory would be kept
            for one in rounds:
                self._complete(one)
            return
        for one, transfer in zip(rounds, pending, strict=True):
            one.transfer = transfer

    def under_way(self, round_: KeptRound) -> Pending | None:
        with self._lock:
            if round_.done:
                return None
            assert round_.transfer is not None
            if not round_.transfer.request.test():
                return round_.transfer
            self._complete(round_)
            return None

    def _complete(self, round_: KeptRound) -> None:
        """Update the value with the sum, which has come."""
        with self._lock:
            if round_.done:
                return
            info = round_.info
            self._contributors[info.key] = self.session.numbers
            if info.sparse:
                self.rows.update(info, round_.rows(), self._number(round_))
            else:
                total = self.session.spaces.of(info).cast(round_.sum, sum_dtype(info.dtype))
                self._owner.apply(info, self._stored[info.id], total, self._number(round_))
            self._rounds[info.key].complete()
            self._end(round_)

    def _end(self, round_: KeptRound) -> None:
        round_.done = True
        del self._open[round_.info.key]
        for sink in round_.sinks:
            self.pull(round_.info, sink)

    def _number(self, round_: KeptRound) -> tuple[int, int]:
        """By which the owner knows the attributes that a round was pushed under, with the factor that all agreed on."""
        slot = self._owner.slot_of(round_.info.id)
        if round_.attributes is None or self._owner.optimizer_of(round_.info.id) is None:
            return AS_SET
        factor = self.session.attributes.slots[slot].agreed
        if round_.weights is not None:
            factor /= sum(round_.weights[worker] for worker in self.session.numbers) or 1  # 0: so is the sum
        attributes = {**round_.attributes, FACTOR: factor}
        text = json.dumps(attributes, sort_keys=True)
        number = self._numbers.get((slot, text))
        if number is None:
            if len(self._numbers) >= KEPT_ATTRIBUTES:
                self._numbers.clear()
            number = self._numbers[slot, text] = next(self._next_number)
            self._owner.add_attributes(slot, AS_SET[0], number, attributes)
        return AS_SET[0], number

    def contributors(self, key: Key) -> Sequence[int]:
        return self._contributors.get(key, self.session.numbers)

    # --- optimizers

    def compare_updates(self, optimizer: Optimizer, keys: Sequence[Key] | None, *, scales: bool = False) -> int:
        return self._serve(optimizer, keys, applied=False)

    def _serve(self, optimizer: Optimizer, keys: Sequence[Key] | None, *, applied: bool) -> int:
        if keys is not None and tuple(keys) in self._given:
            self._given.remove(tuple(keys))
            return self.follow(optimizer, keys)
        return super()._serve(optimizer, keys, applied=applied)

    def _serves(self, slot: int, served: Served) -> None:
        kept = pickled_copy(served.optimizer) if served.applied else served.optimizer.attributes()
        self._owner.set_optimizer(slot, kept, [self._known[key].id for key in served.keys or ()])
        super()._serves(slot, served)

    def follow(self, optimizer: Optimizer, keys: Sequence[Key]) -> int:
        slot = self.session.slot_of(self._known[keys[0]])
        self.session.attributes.take_over(slot, optimizer, self.session.attributes)
        last = [i for i, served in enumerate(self._served) if keys[0] in (served.keys or ())]
        at = (last or [i for i, served in enumerate(self._served) if served.keys is None])[-1]
        self._served[at] = self._served[at]._replace(optimizer=optimizer)
        if self.session.optimizer_of(self._known[keys[0]]) is not None:
            self.session.serve_in(slot, optimizer, ())
        return slot

    def _agree_on(self, served: Served, before: AttributeLog | None = None) -> int:
        """Let this generation compare under what its workers push. before: the log of the generation before."""
        now = self.session.now
        slot: int = now.strategy.compare_updates(served.as_set, served.keys, scales=served.applied)
        now.session.attributes.take_over(slot, served.optimizer, before)
        return slot
