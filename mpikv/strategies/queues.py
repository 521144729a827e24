"""The queue of a key's rounds: what this worker has pushed and is done one after another, and the key's value.

A push puts a round into its queue; the strategy runs the queue's generator (round_steps.py), which takes round after
round out of it. A queue of several keys is a bucket (bucketed.py).

Memory: the value, one buffer for each round under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.reductions import SUM, Reduction
from mpikv.collectives.stages import Span
from mpikv.common.checks import shown
from mpikv.engine.operation import Steps
from mpikv.engine.running import Running
from mpikv.errors import ConfigError
from mpikv.optimizers.owner import Owner
from mpikv.placement.keys import KeyInfo
from mpikv.placement.labels import Comparison, Labels
from mpikv.placement.placement import Placement
from mpikv.spaces.base import Space, SpaceArray
from mpikv.strategies.base import Sink
from mpikv.strategies.key_calls import KeyCalls
from mpikv.strategies.paths import KeyPaths

Unders = Any  # of a round: its `Under` (labels.py), or by its number for each key of a bucket (None: not pushed)


class Round(NamedTuple):
    """One push of a queue's values. plain: they travel as they are, whatever the key's codec.

    values: in the dtype of the queue's paths, unless they are on a GPU (`RoundQueue.brought`).
    """

    values: SpaceArray
    under: Unders = None
    callers: bool = False
    changeable: bool = True
    outs: tuple[HostArray, ...] = ()
    op: Reduction = SUM
    plain: bool = False
    priority: int = 0


def bytes_of(round_: Round) -> int:
    """What a round holds; a bucket's on a GPU has the values of each key until it begins."""
    values = round_.values.values() if isinstance(round_.values, dict) else [round_.values]
    return sum(int(one.nbytes) for one in values)


class RoundQueue:
    """One key: its value, and the rounds this worker has pushed, done one after another. space: the key's."""

    def __init__(self, info: KeyInfo, space: Space) -> None:
        self.info, self.space = info, space
        self.paths: KeyPaths  # which its rounds go, once it is placed
        self.own: SpaceArray  # its value's home
        self.calls = KeyCalls(info.id)
        self.waiting: deque[Round] = deque()
        self.pushed = 0  # complete rounds
        self.done = 0
        self.has_value = False
        self.comparison: Comparison | None = None  # of labels; None: before the first round, or there are none
        self.running: Running[None] | None = None
        self.refused: ConfigError | None = None  # the round after the last one that is done
        self.deliveries: list[Delivery] = []

    def go(self, paths: KeyPaths) -> None:
        """Its rounds go these paths from now on. Not during a round."""
        self.paths, self.own, self.comparison = paths, paths.value, None

    @property
    def placement(self) -> Placement:
        """Which named its paths."""
        return self.paths.placement

    @property
    def bounds(self) -> tuple[int, ...]:
        """What each worker owns of the value."""
        return self.paths.placement.bounds

    @property
    def round(self) -> int:
        """The round under way, as the user counts: with those that went the direct path."""
        return self.done + 1 + self.calls.rounds

    @property
    def may_start(self) -> bool:
        """Return whether nothing does the rounds of this queue now."""
        return self.running is None or self.running.done

    @property
    def name(self) -> str:
        """What errors call the queue."""
        return f"key {shown(self.info.key)}"

    @property
    def idle(self) -> bool:
        """Whether it has a value and nothing is under way."""
        return (
            self.has_value
            and not self.waiting
            and (self.running is None or (self.running.done and self.running.error is None))
        )

    def value(self) -> SpaceArray:
        """The newest value, wherever it is; to be read only."""
        array = self.calls.array()
        return self.own if array is None else array

    @property
    def held_bytes(self) -> int:
        """This worker's copy of the value or of what it adds, and what is under way."""
        under_way: int = sum(bytes_of(round_) for round_ in self.waiting if not round_.callers)
        return self.paths.held_bytes + under_way

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
        """Add a push of a key, and return whether it completed a round."""
        self.pushed += 1
        self.waiting.append(round_)
        return True

    def brought(self, round_: Round) -> Steps[SpaceArray]:
        """The values of a round on a GPU as its path adds them, once what the caller was writing is there.

        Only then is anything done with them in the store's stream, which has other keys' rounds to do meanwhile.
        """
        yield self.space.written(round_.values)
        return self.space.cast(round_.values, self.paths.dtype)

    def labels(self, under: Unders) -> Labels:
        """Return the labels of a round, key by key."""
        return (under.label,)

    def apply(self, owner: Owner, buf: SpaceArray, under: Unders, span: Span) -> None:
        """Update elements [begin, end) of the value with a round's sum."""
        begin, end = span
        owner.apply(self.info, self.own[begin:end], buf[begin:end], (0, under.number))

    def finish(self, buf: SpaceArray) -> None:
        """Note that a round is done, and its buffer free."""
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
        """End a round that updated nothing, and after which none follows: all pulls get the value as it is, and the
        error.
        """
        self.refused = error
        for delivery in self.deliveries:
            self.refuse_pull(delivery)
        self.deliveries = []

    def refuse_pull(self, delivery: Delivery) -> None:
        """Refuse a pull that comes after the round that was refused."""
        delivery.take(self.value())
        delivery.error = self.refused


class Delivery:
    """A pull: a request that is done when the queue has done its round and the value has been written out."""

    def __init__(self, queue: RoundQueue, info: KeyInfo, sink: Sink) -> None:
        self.round = queue.pushes_of(info)
        self._queue = queue
        self._span = queue.span(info)
        self._sink = sink
        self._done = False
        self.error: Exception | None = None

    def take(self, value: SpaceArray) -> None:
        """Write the key's part of the value into the caller's arrays. What goes wrong there is the caller's."""
        try:
            self._sink.deliver(value[self._span])
        except Exception as error:  # noqa: BLE001 - raised by `test`, to whoever waits for this pull
            self.error = error
        self._done = True

    def test(self) -> bool:
        """Whether the arrays are filled; raises what went wrong."""
        if self.error is not None:
            raise self.error
        if not self._done:
            self._queue.reached(self.round)
        return self._done


class RoundReached:
    """A request that is done when a queue has done a round."""

    def __init__(self, queue: RoundQueue, round_: int) -> None:
        self._queue = queue
        self._round = round_

    def test(self) -> bool:
        """Whether the round is done; raises what went wrong in the queue."""
        return self._queue.reached(self._round)
