"""The queue of a key's rounds: what this worker has pushed and is done one after another, and the key's value.

A push puts a round into its queue; the strategy runs the queue's generator (round_steps.py), which takes round after
round out of it. A bucket is a queue of several keys that lie one behind the other in one buffer: its round is complete,
and starts, when each of them has been pushed once more.

Memory: the value, one buffer for each round under way; a bucket keeps one buffer to use again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpikv import buckets
from mpikv.arrays import HostArray, sum_dtype
from mpikv.checks import shown
from mpikv.collectives.labelled import Comparison
from mpikv.collectives.stages import Span
from mpikv.engine.running import Running
from mpikv.errors import ConfigError, MpikvError
from mpikv.keys import KeyInfo
from mpikv.labels import Label
from mpikv.optimizers.owner import Owner
from mpikv.reductions import SUM, Reduction
from mpikv.session.contests import Labels
from mpikv.spaces.base import Space
from mpikv.strategies.base import Sink
from mpikv.strategies.key_calls import KeyCalls
from mpikv.strategies.ways import Way


class Under(NamedTuple):
    """What a push was made under: the number of the optimizer's attributes, and its label."""

    number: int
    label: Label


Unders = Any  # of a round: what it was pushed under, or by its number for each key of a bucket (None: not pushed)


class Round(NamedTuple):
    """One push of a queue's values.

    values: flat, in the dtype they are added in. callers: they are the array of a caller who blocks until the round has
    ended. The round may change such an array only where it is `changeable`. outs: arrays of the caller's that the
    result is written to. op: what the values of all workers become.
    """

    values: HostArray
    under: Unders = None
    callers: bool = False
    changeable: bool = True
    outs: tuple[HostArray, ...] = ()
    op: Reduction = SUM


class RoundQueue:
    """One key: its value, and the rounds this worker has pushed, done one after another. space: where they are."""

    def __init__(self, info: KeyInfo, space: Space) -> None:
        self.info, self.space = info, space
        self.way: Way  # of its rounds, once it is placed
        self.own: HostArray  # its value's place, from then on
        self.calls = KeyCalls(info.id)
        self.waiting: deque[Round] = deque()
        self.pushed = 0  # complete rounds
        self.done = 0
        self.has_value = False
        self.comparison: Comparison | None = None  # of labels; None: nobody else is there, or there are no elements
        self.running: Running[None] | None = None
        self.refused: ConfigError | None = None  # the round after the last one that is done
        self.deliveries: list[Delivery] = []

    @property
    def bounds(self) -> tuple[int, ...]:
        """What each worker owns of the value."""
        return self.way.placement.bounds

    @property
    def round(self) -> int:
        """The round under way, as the user counts: with those that went the direct way."""
        return self.done + 1 + self.calls.rounds

    @property
    def may_start(self) -> bool:
        """Whether nothing does its rounds now."""
        return self.running is None or self.running.done

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"key {shown(self.info.key)}"

    @property
    def idle(self) -> bool:
        """Whether it has a value and nothing is under way."""
        return (
            self.has_value
            and not self.waiting
            and (self.running is None or (self.running.done and self.running.error is None))
        )

    def value(self) -> HostArray:
        """The newest value, wherever it is; to be read only."""
        array = self.calls.array()
        return self.own if array is None else array

    @property
    def held_bytes(self) -> int:
        """This worker's copy of the value or of what it adds, and what is under way."""
        return self.way.held_bytes + sum(round_.values.nbytes for round_ in self.waiting if not round_.callers)

    def go(self, way: Way) -> None:
        """From the next round on go this way. The value is where the way has it, and has to be set there."""
        self.way, self.own = way, way.value

    # --- rounds

    @property
    def keys(self) -> Sequence[KeyInfo]:
        """The keys of this queue."""
        return (self.info,)

    def span(self, info: KeyInfo) -> slice:
        """Where a key's values lie in the queue's."""
        return slice(0, self.info.n_elems)

    def pushes_of(self, info: KeyInfo) -> int:
        """How often a key has been pushed."""
        return self.pushed

    def add(self, info: KeyInfo, round_: Round) -> bool:
        """One more push of a key; whether that completed a round."""
        self.pushed += 1
        self.waiting.append(round_)
        return True

    def labels(self, under: Unders) -> Labels:
        """Of a round, key by key."""
        return (under.label,)

    def apply(self, owner: Owner, buf: HostArray, under: Unders, span: Span, factor: float | None) -> None:
        """Update elements [begin, end) of the value with a round's sum. factor: its units; None: this worker's own."""
        begin, end = span
        owner.apply(self.info, self.own[begin:end], buf[begin:end], (0, under.number), factor=factor)

    def finish(self, buf: HostArray) -> None:
        """A round is done, and its buffer free."""
        self.done += 1

    def reached(self, round_: int) -> bool:
        """Whether that round is done; raises what went wrong in the queue."""
        if self.running is not None and self.running.error is not None:
            raise self.running.error
        return self.has_value and self.done >= round_

    def deliver(self) -> None:
        """Give the value to the pulls that wait for this round, before another one changes it."""
        ready = [delivery for delivery in self.deliveries if delivery.round <= self.done]
        self.deliveries = [delivery for delivery in self.deliveries if delivery.round > self.done]
        for delivery in ready:
            delivery.take(self.value())

    def refuse(self, error: ConfigError) -> None:
        """Nothing was updated in this round, and no other follows: all pulls get the value as it is, and the error."""
        self.refused = error
        for delivery in self.deliveries:
            self.refuse_pull(delivery)
        self.deliveries = []

    def refuse_pull(self, delivery: Delivery) -> None:
        """The same for a pull that comes after it."""
        delivery.take(self.value())
        delivery.error = self.refused


class Bucket(RoundQueue):
    """A queue of several keys of one dtype."""

    def __init__(self, infos: Sequence[KeyInfo], space: Space) -> None:
        begins = buckets.offsets([info.n_elems for info in infos])
        # It goes by the number of its first key, whose tags it uses.
        name = f"{infos[0].key}, {infos[1].key}{', ...' if len(infos) > 2 else ''}"
        super().__init__(KeyInfo(name, infos[0].id, (begins[-1],), infos[0].dtype), space)
        self._infos = tuple(infos)
        self._spans = {info.id: slice(*begins[i : i + 2]) for i, info in enumerate(infos)}
        self._counts = dict.fromkeys(self._spans, 0)
        self._open: deque[Round] = deque()  # those that lack keys
        self._spare: HostArray | None = None

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
            self._open.append(Round(self._buffer(), {}))
        whole = self._open[place]
        if round_ is not None and round_.op is not whole.op:
            if any(under is not None for under in whole.under.values()):
                raise MpikvError(
                    f"pushpull of key {shown(info.key)} with op={round_.op.name!r}: keys that travel with it were "
                    f"pushed with {whole.op.name!r}, and all keys of a bucket need the same"
                )
            whole = self._open[place] = whole._replace(op=round_.op)
        self._counts[info.id] += 1
        self.space.copy(whole.values[self._spans[info.id]], 0 if round_ is None else round_.values)
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
        spare = 0 if self._spare is None else self._spare.nbytes
        return super().held_bytes + spare + sum(round_.values.nbytes for round_ in self._open)

    def _buffer(self) -> HostArray:
        spare, self._spare = self._spare, None
        return self.space.empty(self.info.n_elems, sum_dtype(self.info.dtype)) if spare is None else spare

    def labels(self, under: Unders) -> Labels:
        """Of a round, key by key."""
        return tuple(None if (one := under[info.id]) is None else one.label for info in self._infos)

    def apply(self, owner: Owner, buf: HostArray, under: Unders, span: Span, factor: float | None) -> None:
        """Update the parts of the keys that lie in [begin, end)."""
        for info in self._infos:
            place, one = self._spans[info.id], under[info.id]
            first, last = max(span[0], place.start), min(span[1], place.stop)
            if first < last and one is not None:
                owner.apply(info, self.own[first:last], buf[first:last], (0, one.number), factor=factor)

    def finish(self, buf: HostArray) -> None:
        """A round is done."""
        super().finish(buf)
        self._spare = buf


class Delivery:
    """A pull: a request that is done when the queue has done its round and the value has been written out."""

    def __init__(self, queue: RoundQueue, info: KeyInfo, sink: Sink) -> None:
        self.round = queue.pushes_of(info)
        self._lane = queue
        self._span = queue.span(info)
        self._sink = sink
        self._done = False
        self.error: Exception | None = None

    def take(self, value: HostArray) -> None:
        """Write the key's part of the value into the caller's arrays. What goes wrong there is the caller's."""
        try:
            self._sink.deliver(value[self._span], self._lane.space)
        except Exception as error:  # noqa: BLE001 - raised by `test`, to whoever waits for this pull
            self.error = error
        self._done = True

    def test(self) -> bool:
        """Whether the arrays are filled; raises what went wrong."""
        if self.error is not None:
            raise self.error
        if not self._done:
            self._lane.reached(self.round)
        return self._done


class Reached:
    """A request that is done when a queue has done a round."""

    def __init__(self, queue: RoundQueue, round_: int) -> None:
        self._lane = queue
        self._round = round_

    def test(self) -> bool:
        """Whether the round is done; raises what went wrong in the queue."""
        return self._lane.reached(self._round)
