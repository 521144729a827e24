"""What the workers of a store agree on: keys, the optimizers that update them, what each push is made under, and calls
that are about no key.

Every worker proposes its new keys, by name, in whatever order it initialises them. The first verdict on a key begins it
here: its number, and what the strategy has reserved for it, are the same everywhere. An `init` may return before all
workers have come to that key (agreement.py); if they turn out to disagree, the next use of the key raises the error.
All workers bring equal optimizers to `set_optimizer`; an error names what differs. Afterwards each push carries a label
(labels.py), which is compared in its round. An agreement about no key has a topic, and no name but its count: the third
`barrier` of each worker is one.

Cost: two messages per worker and `init`, however many keys it has; two per worker and other agreement, as
`set_optimizer` and the first step of a trainer are; none for a push.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle

from mpikv.arrays import compiled
from mpikv.arrays.as_numpy import dtype_of
from mpikv.codecs import compression
from mpikv.codecs.compression import KeyCompression
from mpikv.codecs.error_feedback import ErrorFeedback
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.worth import Worth, worth_of
from mpikv.common.checks import shown
from mpikv.config import Config
from mpikv.engine.operation import Steps
from mpikv.errors import ConfigError, MpikvError, PeerError, StallError, UnsupportedError
from mpikv.observe.stall import INIT, Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import DEFAULT_SLOT
from mpikv.placement import described
from mpikv.placement.described import several
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import Label, PushLabel
from mpikv.placement.members import Members
from mpikv.session.agreeing import Agreeing
from mpikv.session.agreement import ROUND, Disagreement, Name, Verdict
from mpikv.session.base import NewKey, Session, Updater
from mpikv.session.waits import Waits
from mpikv.spaces.named import Spaces


class KeyEvents(NamedTuple):
    """What a strategy does with keys as they are agreed on, as functions. Called under the engine's lock.

    reserve: at worker 0: what all ranks must know of a new key beyond what they brought, as JSON. begin: the key exists
    from now on, with what was reserved for it: its first verdict has come, maybe a provisional one. broken: workers did
    not agree on a key that has begun. pushes: how often this worker has pushed each key, by number. agreed: all workers
    agreed on it; called in the same order on every worker.
    """

    reserve: Callable[[KeyInfo], Any]
    begin: Callable[[KeyInfo, Any], None]
    broken: Callable[[KeyInfo], None]
    pushes: Callable[[], dict[int, int]]
    agreed: Callable[[KeyInfo], None] | None = None


class Compared(NamedTuple):
    """What worker 0 has found of a key with a codec that is not forced. codec: its text. worth: what decides."""

    codec: str
    worth: Worth

    def row(self) -> dict[str, Any]:
        return {"codec": self.codec, "travels": "encoded" if self.worth.encodes else "as it is", **self.worth._asdict()}

    def __str__(self) -> str:
        form, (encoded_s, plain_s) = "is used" if self.worth.encodes else "is not used", self.worth
        return f"codec {self.codec} {form}: a round takes {encoded_s:.2g} s encoded, {plain_s:.2g} s as it is"


def check_pull(call: str, key: Key, travels: KeyCompression) -> None:
    """ConfigError where owners would send back an updated value by a codec that is for sums of gradients."""
    if isinstance(travels.pull, ErrorFeedback) and travels.pull.codec.rounds:
        raise ConfigError(
            f"{call}: with an optimizer the value of key {shown(key)} comes back, and 'pull': {travels.pull.name!r} "
            "with 'error_feedback' is for sums of gradients: leave 'error_feedback' away"
        )
    if not travels.pull.rounds:
        raise ConfigError(
            f"{call}: with an optimizer the value of key {shown(key)} comes back, and 'pull': {travels.pull.name!r} is "
            "for sums of gradients: leave 'pull' away, or take 'fp16', 'bf16' or another codec that rounds each value"
        )


class AgreedSession(Session):
    """A session of several workers that agree on keys and on what updates them; `Workers`, which sets what is declared
    here, is all of it.

    most_keys: for how many the transport has tags. on_attributes: bring attributes of an optimizer that have changed to
    owners: slot, number, attributes.
    """

    members: Members
    waits: Waits
    agreeing: Agreeing
    on_attributes: list[Callable[[int, int, dict[str, Any]], None]]

    def __init__(self, name: str, config: Config, spaces: Spaces | None, most_keys: int) -> None:
        super().__init__(name, config, spaces)
        self._events: KeyEvents
        self._broken: dict[Key, MpikvError] = {}
        self._released: set[Key] = set()
        self._proposed: set[Key] = set()  # by this worker
        self.compared: dict[Key, Compared] = {}
        self._next_id, self._most_keys = 0, most_keys
        self._counts: dict[str, int] = {}

    # --- calls that are about no key

    def _count(self, topic: str) -> int:
        self._counts[topic] = self._counts.get(topic, 0) + 1
        return self._counts[topic]

    def agree(self, topic: str, payload: Any, call: str, *, patient: bool = False) -> Any:
        count = self._count(topic)
        waiting = Waiting(call, agreed=(topic, count))
        try:
            return self.agreeing.agree(topic, count, payload, waiting, patient=patient)
        except MpikvError as error:
            if not isinstance(error, (StallError, PeerError)):
                # Refused on every worker that made this call, and others were never in it: the count stays in step.
                self._counts[topic] -= 1
            raise

    # --- keys

    def _pushes(self) -> dict[int, int]:
        return self._events.pushes()

    def _reserve(self, name: Name, payload: Any) -> Any:
        key_id = self._next_id
        if key_id >= self._most_keys:
            raise Disagreement(
                MpikvError, f"init of key {shown(name)}: this MPI library has tags for {self._most_keys} keys only"
            )
        self._next_id += 1
        result = [key_id, *payload]
        info = self._info(name, result)
        compared = None
        if info.codec != IDENTITY.name:
            worth = worth_of(self.members, info, updated=DEFAULT_SLOT in self._optimizers)
            if worth is not None:
                compared = [info.codec, *worth]
                info = info if worth.encodes else info._replace(codec=IDENTITY.name)
        return [*result[:3], info.codec, *result[4:], self._events.reserve(info), compared]

    @staticmethod
    def _info(name: Name, result: Sequence[Any]) -> KeyInfo:
        return KeyInfo(name, result[0], tuple(result[1]), dtype_of(result[2]), *result[3:6])

    def _verdict(self, decision: Verdict) -> None:
        name = decision.name
        if decision.topic != "init":
            return
        if decision.error is None:
            info = self._info(name, decision.result)
            if name not in self.infos:
                self.infos[name] = info
                self.any_sparse |= info.sparse
                if (compared := decision.result[7]) is not None:
                    codec, *seconds = compared
                    self.compared[name] = Compared(codec, Worth(*seconds))
                    self.log.detail(lambda: f"{described.key(info)}: {self.compared[name]}")
                self._events.begin(info, decision.result[6])
            if decision.final:
                self._released.discard(name)
                if self._events.agreed is not None:
                    self._events.agreed(info)
            else:
                self._released.add(name)
        elif name in self._released:
            # `init` has returned already, so the next use of the key raises it.
            self._released.discard(name)
            self._broken[name] = decision.exception()
            self._events.broken(self.infos.pop(name))

    def agree_on_keys(self, values: Sequence[NewKey]) -> tuple[list[KeyInfo], MpikvError | None]:
        """Propose new keys and wait; the placement begins each of them when its verdict comes. Collective.

        Returns the keys that are there, and the error to raise: ShapeMismatch on every worker when they brought
        different values.
        """
        names_of = {dtype: str(dtype) for dtype in {new.value.dtype for new in values}}
        items, links, compresses = [], self.members.links, self.compressions.any
        for new in values:
            dtype, codec = new.value.dtype, IDENTITY.name
            if dtype.itemsize == 2:  # half precision
                compiled.prepare_key(dtype, new.value.nbytes)
            if compresses and not new.sparse:  # rows travel as they are
                travels = self.compressions.of(new.key, dtype, links=links).for_shape(new.shape)
                codec = travels.text
                if DEFAULT_SLOT in self._optimizers:
                    check_pull("init", new.key, travels)
            items.append(("init", new.key, [list(new.shape), names_of[dtype], codec, new.space, new.sparse]))
        proposal = self.agreeing.propose(items)
        self._proposed |= {new.key for new in values}
        names = ", ".join(shown(new.key) for new in values[:3]) + (", ..." if len(values) > 3 else "")
        text = f"init({names})"
        first, *others = [Waiting(text, agreed=(INIT, new.key)) for new in values]
        self.waits.wait(proposal, first, others=others)
        decisions = [(item[1], proposal.verdicts[item]) for item in proposal.items]
        agreed = [
            self.infos.get(name) or self._info(name, decision.result)
            for name, decision in decisions
            if decision.error is None
        ]
        errors = [decision.exception() for _, decision in decisions if decision.error is not None]
        return agreed, errors[0] if errors else None

    def _check_key(self, key: Key) -> None:
        if key in self._broken:
            raise self._broken[key]
        info = self.infos.get(key)
        if info is not None and info.id in self.waits.refused:
            raise self.waits.refused[info.id]

    def is_released(self, info: KeyInfo) -> bool:
        """Whether `init` of this key has to return before all workers have come to it."""
        return info.key in self._released or info.key in self._broken

    def lookup(self, key: Key) -> KeyInfo | None:
        """What was agreed on `key`. Raises what became of an `init` that returned before all workers had come."""
        info = self.infos.get(key)
        try:
            self._check_key(key)
        except MpikvError as error:
            self.given.note(error, () if info is None else (info.id,))
            raise
        return info

    # --- optimizers

    def agree_on_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> tuple[int, list[int], bytes]:
        """All workers bring equal optimizers. Returns the slot, the keys' numbers and the pickled optimizer."""
        try:
            pickled = cloudpickle.dumps(optimizer)
        except Exception as error:
            name = type(optimizer).__name__
            raise ConfigError(f"set_optimizer: {name} cannot be pickled for its owners: {error}") from error
        for info in self.infos.values() if keys is None else [self.infos[key] for key in keys]:
            if keys is not None or self.slot_of(info) == DEFAULT_SLOT:
                check_pull("set_optimizer", info.key, compression.of_text(info.codec))
        self._compare(optimizer, keys)
        slot, key_ids = self.serve(optimizer, keys)
        self.attributes.watch(slot, optimizer)
        self.log.job(lambda: self._described(optimizer, keys))
        return slot, key_ids, pickled

    def _described(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> str:
        which = "all keys that have no other one" if keys is None else several(len(keys), "key")
        owners = "the workers, each for its shards"
        if not self.members.workers_own:
            owners = several(len(self.members.owners), "server")
        return f"optimizer {type(optimizer).__name__} updates {which}: it goes to {owners}"

    def _compare(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        config = json.dumps(optimizer.config(), sort_keys=True)
        self.agree("set_optimizer", [config, None if keys is None else list(keys)], "set_optimizer")

    def agree_on_own_updates(
        self, optimizer: Optimizer, keys: Sequence[Key] | None, *, scales: bool
    ) -> tuple[int, list[int]]:
        """All workers bring equal optimizers, to update these keys with by themselves. The slot, the keys' numbers.

        scales: see `AttributeLog.watch`.
        """
        self._compare(optimizer, keys)
        slot, key_ids = DEFAULT_SLOT, list[int]()
        if keys is not None:
            slot, key_ids = self.new_slot([self.infos[key] for key in keys])
        exact = not scales and any(self.infos[key].dtype.kind in "iu" for key in keys or ())
        self.attributes.watch(slot, optimizer, exact=exact, scales=scales)
        return slot, key_ids

    # --- labels

    def under(self, info: KeyInfo) -> PushLabel:
        """What a push of this key is made under now; attributes that are new under its number go to owners. Local."""
        exact, slot = not self.synchronous or self.num_workers == 1 or info.dtype.kind in "iu", self.slot_of(info)
        under, attributes = self.attributes.push_label(slot, exact=exact)
        if attributes is not None:
            for take in self.on_attributes:
                take(slot, under.number, attributes)
        return under

    def different(self, info: KeyInfo, round_: int, label: Label) -> Steps[ConfigError]:
        """The error of a round that workers have pushed under different labels, as all of them know. Worker 0 says what
        differs. For the engine.
        """
        proposal = self.agreeing.propose([(ROUND, info.id, [info.key, round_, label])])
        yield proposal
        return proposal.verdicts[ROUND, info.id].exception()  # type: ignore[return-value]

    def agree_on_factor(self, key: Key) -> None:
        """Owners apply worker 0's factor of now to this key, and those beside it, from now on. Collective, blocks."""
        slot, optimizer = self.slot_of(self.infos[key]), self.attributes
        waiting = Waiting("the first step", agreed=("factor", self._count("factor")))
        optimizer.agree(slot, self.agreeing.agree("factor", slot, optimizer.own_factor(slot), waiting))

    def set_updater(self, updater: Updater) -> None:
        """Not here: the owner is another process."""
        raise UnsupportedError("set_updater works in local stores only; use set_optimizer with a callable")
