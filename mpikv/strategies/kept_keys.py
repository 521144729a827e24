"""What outlives the generations of a store that goes on after deaths: keys, optimizers, and pushes under way.

What is pushed and pulled, and what becomes of it when a rank dies, is in kept_rounds.py and continued.py for
synchronous stores, and in kept_pushes.py and continued_pushes.py for asynchronous ones.
"""

from __future__ import annotations

import itertools
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from mpikv.arrays.as_numpy import dtype_of
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.arrays.row_sparse import RowSparse
from mpikv.common.checks import shown
from mpikv.errors import ConfigError, MpikvError, ShapeMismatch
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import StateRecord
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import AttributeLog
from mpikv.session.base import NewKey, Pending
from mpikv.session.continued import ContinuedSession
from mpikv.strategies.base import Entry, PreparedCall, Strategy, wait_for_all

SET = "set_optimizer"


def pickled_copy(optimizer: Optimizer) -> Optimizer:
    """A copy, as an owner in another process would get it. Raises ConfigError where that is not possible."""
    try:
        return cloudpickle.loads(cloudpickle.dumps(optimizer))  # type: ignore[no-any-return]
    except Exception as error:
        raise ConfigError(f"set_optimizer: {type(optimizer).__name__} cannot be pickled: {error}") from error


class Served(NamedTuple):
    """An optimizer that all workers have set. as_set: as it was then. keys: None for all that have no other.

    applied: by the store; else by the workers themselves.
    """

    optimizer: Optimizer
    as_set: Optimizer
    keys: Sequence[Key] | None
    applied: bool


class KeptTotal:
    """What this worker has pushed of a key, as long as a death may undo it.

    attributes: of the key's optimizer then. owed: what this worker's codec held before it.
    """

    def __init__(
        self, info: KeyInfo, total: Any, attributes: Mapping[str, Any] | None, owed: Sequence[StateRecord]
    ) -> None:
        self.info, self.total, self.attributes, self.owed = info, total, attributes, owed
        self.done = False


class Transfer:
    """A transfer of a store that goes on. pending: see `UnderWay`."""

    def __init__(self, strategy: KeptKeys, pending: Callable[[], Pending | None]) -> None:
        self.pending, self._again = pending, strategy.again

    def test(self) -> bool:
        return self._again(self.pending) is None


class ContinuedCall(PreparedCall):
    """waits: the caller waits right after `start`, which may do so itself."""

    def __init__(self, strategy: KeptKeys, entries: Sequence[Entry], op: Reduction, *, waits: bool) -> None:
        self._strategy, self._entries, self._op, self._waits = strategy, entries, op, waits

    def start(self, priority: int = 0) -> list[Pending]:
        return self._strategy.start(self._entries, self._op, priority, waits=self._waits)

    def wait(self, pending: Sequence[Pending]) -> None:
        wait_for_all(self._strategy.session, pending)

    def release(self) -> None:
        self.valid, self._entries = False, ()


class KeptKeys(Strategy):
    lends = False

    def __init__(self, session: ContinuedSession) -> None:
        self.session, self.again, self._infos = session, session.again, session.infos
        self._known: dict[Key, KeyInfo] = {}  # to any survivor; `session.infos` has what this program has initialised
        self._early: dict[Key, NewKey] = {}  # of which `init` has returned before all had come, so without a value
        self._served: list[Served] = []
        self._before = session.attributes  # the log of the generation that has ended
        self._encodes = session.now.strategy  # of the last generation that has got what this worker's codecs hold
        self._open: dict[Key, Any] = {}  # each a `KeptTotal`
        self._lock = threading.RLock()

    @abstractmethod
    def start(self, entries: Sequence[Entry], op: Reduction, priority: int, *, waits: bool) -> list[Pending]:
        """Push and pull. Blocks as long as what this worker has pushed before is not safe from a death."""

    @abstractmethod
    def _send(self, kept: Sequence[Any], priority: int = 0) -> None:
        """Push these in the present generation, under what is set now."""

    @abstractmethod
    def under_way(self, kept: Any) -> Pending | None:
        """What a push waits for before no death can undo it; None: none can. Raises its error."""

    def prepare(self, entries: Sequence[Entry], op: Reduction = SUM, *, waits: bool = False) -> PreparedCall:
        return ContinuedCall(self, entries, op, waits=waits)

    def finish(self, call: str) -> None:
        """Wait until no death can undo what this worker has pushed. Blocks."""
        for kept in tuple(self._open.values()):
            self._wait(kept, call)

    def _wait(self, kept: KeptTotal, call: str) -> None:
        self.session.wait(Pending(Transfer(self, partial(self.under_way, kept)), Waiting(call, kept.info.key)))

    def _wait_for_earlier(self, entries: Sequence[Entry]) -> None:
        """A worker has one push of a key under way. Blocks."""
        for entry in entries:
            if entry.total is not None and (before := self._open.get(entry.info.key)) is not None:
                self._wait(before, "push")

    def _push_again(self) -> None:
        """Push in the present generation what is open, with codecs as they were before it. Blocks."""
        now, of_keys = self.session.now, {key: self._open.get(key) for key in self._known}
        owed = [self._encodes.owed(key) if kept is None else kept.owed for key, kept in of_keys.items()]
        now.strategy.take_codec_states([*itertools.chain(*owed)])
        self._encodes = now.strategy
        for kept in tuple(self._open.values()):
            with self.session.attributes.pushed_under(self.session.slot_of(kept.info), kept.attributes):
                self._send([kept])

    # --- keys

    def init(self, values: Sequence[NewKey]) -> None:
        error = self.again(lambda: self._init([new for new in values if new.key not in self._known]))
        for new in values:
            info = self._known.get(new.key)
            if info is not None and (info.shape, info.dtype, info.space) != (new.shape, new.value.dtype, new.space):
                error = ShapeMismatch(
                    f"init of key {shown(new.key)}: {new.value.dtype} {new.shape} here, and {info.dtype} {info.shape} "
                    "on the other workers"
                )
            elif info is not None:
                self._infos[new.key] = info
        if error is not None:
            raise error

    def _init(self, values: Sequence[NewKey]) -> Exception | None:
        """Agree on keys, and take worker 0's values. Returns the error where workers brought different ones."""
        now, error = self.session.now, None
        if not values:
            return None
        try:
            now.strategy.init(values)
        except MpikvError as raised:
            error = raised
        here = [new for new in values if new.key in now.session.infos]
        early = {new.key for new in here if now.session.is_released(now.session.infos[new.key])}
        self._fetch([new for new in here if new.key not in early])
        for new in here:
            if new.key in early:
                self._add(new)
        return error

    @abstractmethod
    def _fetch(self, keys: Sequence[NewKey]) -> None:
        """Wait until worker 0's values of keys are safe from a death. Blocks until it has come to their `init`."""

    def fetch_early(self, entries: Sequence[Entry]) -> None:
        """Do so for keys of a call whose `init` has returned early. Blocks."""
        if self._early:
            keys = [entry.info.key for entry in entries]
            self.again(lambda: self._fetch([self._early[key] for key in keys if key in self._early]))

    def _add(self, new: NewKey) -> None:
        info = self.session.now.session.infos[new.key]._replace(id=len(self._known))
        self.session.any_sparse |= new.sparse
        self._known[new.key], self._early[new.key] = info, new

    def _described(self) -> list[list[Any]]:
        """The keys that this worker knows, as JSON, to be initialised anew."""
        known = self._known.values()
        return [[info.key, list(info.shape), str(info.dtype), info.space, info.sparse] for info in known]

    def _anew(self, key: Key, described: Sequence[Any], value: Any = None) -> NewKey:
        """A key of `_described`, with this first value: in host memory, or ids and rows; None: zeros."""
        shape, name, space, sparse = described[:4]
        dtype, of_key = dtype_of(name), self.session.spaces.by_name(space)
        if sparse:
            ids, rows = (np.empty(0, np.int64), np.empty(0, dtype)) if value is None else value
            first: Any = RowSparse(ids, rows.reshape(len(ids), *shape[1:]), tuple(shape))
        else:
            first = of_key.zeros(math.prod(shape), dtype) if value is None else of_key.from_host(value)
        return NewKey(key, tuple(shape), first, space, sparse)

    # --- optimizers

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        self._serve(optimizer, keys, applied=True)

    def _serve(self, optimizer: Optimizer, keys: Sequence[Key] | None, *, applied: bool) -> int:
        self.finish(SET)
        served = Served(optimizer, pickled_copy(optimizer), keys, applied)
        self._served.append(served)
        try:
            slot = self.session.whole(SET, lambda: self._agree_on(served))
        except BaseException:
            self._served.remove(served)
            raise
        self._serves(slot, served)
        return slot

    @abstractmethod
    def _agree_on(self, served: Served, before: AttributeLog | None = None) -> int:
        """Let this generation agree on what updates keys. before: the log of the generation before. Returns the slot.
        Collective, blocks.
        """

    def _serves(self, slot: int, served: Served) -> None:
        """All have agreed on it. Local."""
        infos = [self._known[key] for key in served.keys or ()]
        self.session.serve_in(slot, served.optimizer if served.applied else None, infos)

    def _attributes(self, info: KeyInfo) -> Mapping[str, Any] | None:
        """Of a key's optimizer now, for a push that may have to be made again; None: it has none."""
        served = self.session.attributes.slots.get(self.session.slot_of(info))
        return None if served is None else served.optimizer.attributes()

    # --- the rest

    def codec_states(self, call: str) -> list[StateRecord]:
        self.finish(call)
        return [*itertools.chain(*map(self._encodes.owed, self._known))]

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        self._encodes.take_codec_states(parts)

    def ask_servers(self, request: bytes, number: int | None = None) -> list[bytes]:
        return self.session.now.strategy.ask_servers(request, number)  # type: ignore[no-any-return]

    def stats(self) -> dict[str, Any]:
        return self.session.now.strategy.stats()  # type: ignore[no-any-return]

    def close(self) -> None:
        self.session.end()
