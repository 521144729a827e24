"""Keys that travel together: a bucket is a queue of several keys that lie one behind the other in one buffer.

Its round is complete, and starts, when each of them has been pushed once more. A key that is not trained any more must
be skipped in each round, or those that travel with it would wait for it.

Memory: that of a queue, and one buffer that is kept to be used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpikv.codecs.compression import of_text
from mpikv.collectives.stages import Span
from mpikv.common.checks import shown
from mpikv.engine.operation import Steps
from mpikv.errors import MpikvError
from mpikv.observe.stall import Waiting
from mpikv.optimizers.owner import JoinedKey, Owner
from mpikv.placement import buckets
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import Labels
from mpikv.session.base import Pending
from mpikv.session.workers import Workers
from mpikv.spaces.base import Space, SpaceArray
from mpikv.strategies.paths import KeyPaths
from mpikv.strategies.queues import Round, RoundQueue, RoundReached, Unders, bytes_of


class Bucket(RoundQueue):
    """A queue of several keys of one dtype, which travel by one codec, in one space."""

    def __init__(self, infos: Sequence[KeyInfo], space: Space) -> None:
        begins = buckets.offsets([info.n_elems for info in infos])
        # It goes by the number of its first key, whose tags it uses.
        name = f"{infos[0].key}, {infos[1].key}{', ...' if len(infos) > 2 else ''}"
        first = infos[0]
        super().__init__(KeyInfo(name, first.id, (begins[-1],), first.dtype, first.codec, first.space), space)
        self._infos = tuple(infos)
        self._spans = {info.id: slice(*begins[i : i + 2]) for i, info in enumerate(infos)}
        self._counts = dict.fromkeys(self._spans, 0)
        self._open: deque[Round] = deque()  # those that lack keys
        self._spare: SpaceArray | None = None

    def go(self, paths: KeyPaths) -> None:
        """With what was pushed of rounds that are not complete, in the dtype of the new paths."""
        super().go(paths)
        self._spare = None
        if self.space.device is None:
            for i, round_ in enumerate(self._open):
                self._open[i] = round_._replace(values=self.space.cast(round_.values, paths.dtype))

    @property
    def keys(self) -> Sequence[KeyInfo]:
        """The keys, in the order of the buffer."""
        return self._infos

    def span(self, info: KeyInfo) -> slice:
        """Where a key's values lie in the bucket's."""
        return self._spans[info.id]

    def pushes_of(self, info: KeyInfo) -> int:
        """How often a key has been pushed, or skipped."""
        return self._counts[info.id]

    def add(self, info: KeyInfo, round_: Round | None) -> bool:
        """One more push of a key; None: it takes no part in this round, on no worker."""
        place = self._counts[info.id] - self.pushed
        while len(self._open) <= place:
            self._open.append(Round({} if self.space.device is not None else self._buffer(), {}))
        whole = self._open[place]
        if round_ is not None and round_.op is not whole.op:
            if any(under is not None for under in whole.under.values()):
                raise MpikvError(
                    f"pushpull of key {shown(info.key)} with op={round_.op.name!r}: keys that travel with it were "
                    f"pushed with {whole.op.name!r}, and all keys of a bucket need the same"
                )
            whole = self._open[place] = whole._replace(op=round_.op)
        if round_ is not None:
            first = all(under is None for under in whole.under.values())
            highest = round_.priority if first else max(whole.priority, round_.priority)
            whole = self._open[place] = whole._replace(priority=highest, plain=whole.plain or round_.plain)
        self._counts[info.id] += 1
        if self.space.device is None:
            self.space.copy(whole.values[self._spans[info.id]], 0 if round_ is None else round_.values)
        elif round_ is not None:
            whole.values[info.id] = round_.values
        whole.under[info.id] = None if round_ is None else round_.under
        completed = False
        while self._open and len(self._open[0].under) == len(self._infos):
            self.waiting.append(self._open.popleft())
            self.pushed += 1
            completed = True
        return completed

    @property
    def held_bytes(self) -> int:
        """With the rounds that are being filled, and the buffer kept for the next one."""
        spare: int = 0 if self._spare is None else self._spare.nbytes
        filling: int = sum(bytes_of(round_) for round_ in self._open)
        return super().held_bytes + spare + filling

    def _buffer(self) -> SpaceArray:
        spare, self._spare = self._spare, None
        return self.space.empty(self.info.n_elems, self.paths.dtype) if spare is None else spare

    def brought(self, round_: Round) -> Steps[SpaceArray]:
        """All keys' values, which a round on a GPU has by their numbers until it begins, in one array."""
        for values in round_.values.values():
            yield self.space.written(values)
        self.space.wait_for_callers(*round_.values.values())
        buf = self._buffer()
        parts = [round_.values.get(info.id) for info in self._infos]
        for i, info in enumerate(self._infos):
            if parts[i] is None:  # nobody has pushed it
                parts[i] = np.zeros_like(buf, shape=(info.n_elems,))
        np.concatenate(parts, out=buf)
        return buf

    def labels(self, under: Unders) -> Labels:
        """Of a round, key by key."""
        return tuple(None if (one := under[info.id]) is None else one.label for info in self._infos)

    def apply(self, owner: Owner, buf: SpaceArray, under: Unders, span: Span) -> None:
        """Update the parts of the keys that lie in [begin, end)."""
        parts = []
        for info in self._infos:
            place, one = self._spans[info.id], under[info.id]
            first, last = max(span[0], place.start), min(span[1], place.stop)
            if first < last and one is not None:
                parts.append(JoinedKey(info, first, last, one.number))
        owner.apply_joined(parts, self.own, buf)

    def finish(self, buf: SpaceArray) -> None:
        """A round is done."""
        super().finish(buf)
        self._spare = buf


def agreed_buckets(session: Workers, infos: Sequence[KeyInfo], queues: Mapping[int, RoundQueue]) -> list[Bucket]:
    """The buckets of several keys that these keys make, in this order. Collective, blocks until all have their values.

    ConfigError on every worker where workers name different keys.
    """
    groups = buckets.plan([info.n_bytes for info in infos], [kind_of(info) for info in infos])
    session.agree("bucket", [[infos[i].id for i in group] for group in groups], "bucket")
    for info in infos:
        session.wait(Pending(RoundReached(queues[info.id], 0), Waiting("bucket", info.key, info.id)))
    found = [[infos[i] for i in group if infos[i].n_elems] for group in groups]
    return [Bucket(group, session.spaces.of(group[0])) for group in found if len(group) > 1]


def kind_of(info: KeyInfo) -> str:
    """What keys of one bucket have in common. A codec that sees a key's rows sees those of one key alone."""
    alone = of_text(info.codec).push.row_elems > 1
    return f"{info.dtype} {info.space} {info.codec} {info.id if alone else ''}"


class Bucketed:
    """The keys that were named together. start: lets a queue's rounds be done; called under the engine's lock."""

    def __init__(self, session: Workers, queues: Mapping[int, RoundQueue], start: Callable[[RoundQueue], None]) -> None:
        self._session, self._queues, self._start = session, queues, start
        self._skipped: list[Key] = []  # in the last round

    def skip(self, keys: Sequence[Key]) -> None:
        """These take no part in the round that follows, on no worker."""
        if list(keys) != self._skipped:
            self._session.agree("skip", list(keys), "a step with other parameters frozen than before")
            self._skipped = list(keys)
        with self._session.engine.lock:
            for key in keys:
                info = self._session.infos[key]
                queue = self._queues[info.id]
                if isinstance(queue, Bucket) and queue.add(info, None):
                    self._start(queue)
