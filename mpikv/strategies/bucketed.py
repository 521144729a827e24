"""Buckets: a bucket is a queue of several keys whose values lie one after another in one buffer and are sent together.

A round of a bucket is complete, and starts, when each of its keys has been pushed once more. A key that is not trained
any more must be skipped in each round, or the other keys of its bucket would wait for it.
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
from mpikv.spaces.named import DEVICE
from mpikv.strategies.paths import KeyPaths
from mpikv.strategies.queues import Round, RoundQueue, Unders, bytes_of


class Bucket(RoundQueue):
    """A queue of several keys of one dtype, one codec and one space."""

    def __init__(self, infos: Sequence[KeyInfo], space: Space) -> None:
        begins = buckets.offsets([info.n_elems for info in infos])
        # The bucket has the number, and so the message tags, of its first key.
        name = f"{infos[0].key}, {infos[1].key}{', ...' if len(infos) > 2 else ''}"
        first = infos[0]
        super().__init__(KeyInfo(name, first.id, (begins[-1],), first.dtype, first.codec, first.space), space)
        self.keys = tuple(infos)
        self._spans = {info.id: slice(*begins[i : i + 2]) for i, info in enumerate(infos)}
        self._counts = dict.fromkeys(self._spans, 0)
        self._incomplete: deque[Round] = deque()  # rounds in which keys are still missing, oldest first
        self._spare: SpaceArray | None = None

    def use_paths(self, paths: KeyPaths) -> None:
        """Use these paths, also for incomplete rounds, whose values are cast to the dtype of the new paths."""
        super().use_paths(paths)
        self._spare = None
        if self.space.device is None:
            for i, round_ in enumerate(self._incomplete):
                self._incomplete[i] = round_._replace(values=self.space.cast(round_.values, paths.dtype))

    def span(self, info: KeyInfo) -> slice:
        return self._spans[info.id]

    def pushes_of(self, info: KeyInfo) -> int:
        return self._counts[info.id]

    def add(self, info: KeyInfo, round_: Round | None) -> bool:
        """Add one more push of a key. None: the key is skipped in this round, on all workers."""
        at = self._counts[info.id] - self.pushed  # which of the incomplete rounds
        while len(self._incomplete) <= at:
            self._incomplete.append(Round({} if self.space.device is not None else self._buffer(), {}))
        whole = self._incomplete[at]
        if round_ is not None and round_.op is not whole.op:
            if any(under is not None for under in whole.under.values()):
                raise MpikvError(
                    f"pushpull of key {shown(info.key)} with op={round_.op.name!r}: other keys of its bucket were "
                    f"pushed with {whole.op.name!r}, and all keys of a bucket need the same"
                )
            whole = self._incomplete[at] = whole._replace(op=round_.op)
        if round_ is not None:
            first = all(under is None for under in whole.under.values())
            highest = round_.priority if first else max(whole.priority, round_.priority)
            whole = self._incomplete[at] = whole._replace(
                priority=highest, uncompressed=whole.uncompressed or round_.uncompressed
            )
        self._counts[info.id] += 1
        if self.space.device is None:
            self.space.copy(whole.values[self._spans[info.id]], 0 if round_ is None else round_.values)
        elif round_ is not None:
            whole.values[info.id] = round_.values
        whole.under[info.id] = None if round_ is None else round_.under
        completed = False
        while self._incomplete and len(self._incomplete[0].under) == len(self.keys):
            self.waiting.append(self._incomplete.popleft())
            self.pushed += 1
            completed = True
        return completed

    @property
    def held_bytes(self) -> int:
        spare: int = 0 if self._spare is None else self._spare.nbytes
        filling: int = sum(bytes_of(round_) for round_ in self._incomplete)
        return super().held_bytes + spare + filling

    def _buffer(self) -> SpaceArray:
        spare, self._spare = self._spare, None
        return self.space.empty(self.info.n_elems, self.paths.dtype) if spare is None else spare

    def device_values(self, round_: Round) -> Steps[SpaceArray]:
        """Concatenate the keys' values, of which a round on a GPU has a dict by the keys' numbers until it begins."""
        for values in round_.values.values():
            yield self.space.written(values)
        self.space.wait_for_callers(*round_.values.values())
        buf = self._buffer()
        arrays = [round_.values.get(info.id) for info in self.keys]
        for i, info in enumerate(self.keys):
            if arrays[i] is None:  # skipped
                arrays[i] = np.zeros_like(buf, shape=(info.n_elems,))
        np.concatenate(arrays, out=buf)
        return buf

    def labels(self, under: Unders) -> Labels:
        return tuple(None if (one := under[info.id]) is None else one.label for info in self.keys)

    def apply(self, owner: Owner, buf: SpaceArray, under: Unders, span: Span) -> None:
        joined = []
        for info in self.keys:
            of_key, one = self._spans[info.id], under[info.id]
            first, last = max(span[0], of_key.start), min(span[1], of_key.stop)
            if first < last and one is not None:
                joined.append(JoinedKey(info, first, last, one.number))
        owner.apply_joined(joined, self.stored, buf)

    def finish(self, buf: SpaceArray) -> None:
        super().finish(buf)
        self._spare = buf


def agreed_buckets(session: Workers, infos: Sequence[KeyInfo], queues: Mapping[int, RoundQueue]) -> list[Bucket]:
    """Divide keys, in this order, into buckets; a key alone gets none. Collective, blocks until all have values."""
    on_gpu = [info.space == DEVICE for info in infos]
    groups = buckets.plan([info.n_bytes for info in infos], [kind_of(info) for info in infos], on_gpu=on_gpu)
    session.agree("bucket", [[infos[i].id for i in group] for group in groups], "bucket")
    for info in infos:
        session.wait(Pending(queues[info.id].at(0), Waiting("bucket", info.key, info.id)))
    found = [kept for group in groups if len(kept := [infos[i] for i in group if infos[i].n_elems]) > 1]
    session.buckets.update({group[0].id: group for group in found})
    return [Bucket(group, session.spaces.of(group[0])) for group in found]


def kind_of(info: KeyInfo) -> str:
    """A text that is equal for keys that may share a bucket. A codec that works on rows needs a key by itself."""
    alone = of_text(info.codec).push.row_elems > 1
    return f"{info.dtype} {info.space} {info.codec} {info.id if alone else ''}"


class WorkersBuckets:
    """The buckets of one `Strategy.bucket` call. start: starts a queue's rounds; called under the engine's lock."""

    def __init__(self, session: Workers, queues: Mapping[int, RoundQueue], start: Callable[[RoundQueue], None]) -> None:
        self._session, self._queues, self._start = session, queues, start
        self._skipped: list[Key] = []  # in the last round

    def skip(self, keys: Sequence[Key]) -> None:
        if list(keys) != self._skipped:
            self._session.agree("skip", list(keys), "a step with other parameters frozen than before")
            self._skipped = list(keys)
        with self._session.engine.lock:
            for key in keys:
                info = self._session.infos[key]
                queue = self._queues.get(info.id)
                if isinstance(queue, Bucket) and queue.add(info, None):
                    self._start(queue)
