"""Optimizers as the workers of a store agree on them, and what each push is made under (labels.py).

All workers bring equal optimizers to `set_optimizer`; an error names what differs. Afterwards each push carries a
label, which is compared in its round.

Cost: two messages per worker and `set_optimizer`, two per worker in the first step of a trainer; none for a push.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from mpikv.codecs import compression
from mpikv.engine.operation import Steps
from mpikv.errors import ConfigError, UnsupportedError
from mpikv.observe.stall import Waiting
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import DEFAULT_SLOT
from mpikv.placement.described import several
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import Labels, PushLabel
from mpikv.session.agreed_keys import KeySession, check_pull
from mpikv.session.agreement import ROUND
from mpikv.session.base import Updater


class OptimizerSession(KeySession):
    """A session of several workers that agree on keys and on what updates them; `Workers` is all of it.

    on_attributes: bring attributes of an optimizer that have changed to owners: slot, number, attributes.
    """

    on_attributes: list[Callable[[int, int, dict[str, Any]], None]]

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
        on_servers = self.members.path == "servers"
        owners = several(len(self.members.owners), "server") if on_servers else "the workers, each for its shards"
        return f"optimizer {type(optimizer).__name__} updates {which}: it goes to {owners}"

    def _compare(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        config = json.dumps(optimizer.config(), sort_keys=True)
        self.agree("set_optimizer", [config, None if keys is None else list(keys)], "set_optimizer")

    def agree_on_own_updates(self, optimizer: Optimizer, keys: Sequence[Key]) -> tuple[int, list[int]]:
        """All workers bring equal optimizers, to update these keys with by themselves. The slot, the keys' numbers."""
        self._compare(optimizer, keys)
        slot, key_ids = self.new_slot([self.infos[key] for key in keys])
        exact = any(self.infos[key].dtype.kind in "iu" for key in keys)
        self.attributes.watch(slot, optimizer, exact=exact, scales=False)
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

    def different(self, info: KeyInfo, round_: int, labels: Labels) -> Steps[ConfigError]:
        """The error of a round that workers have pushed under different labels, as all of them know. Worker 0 says what
        differs. For the engine.
        """
        proposal = self.agreeing.propose([(ROUND, info.id, [info.key, round_, labels])])
        yield proposal
        return proposal.decisions[ROUND, info.id].exception()  # type: ignore[return-value]

    def agree_on_factor(self, key: Key) -> None:
        """Owners apply worker 0's factor of now to this key, and those beside it, from now on. Collective, blocks."""
        slot, optimizer = self.slot_of(self.infos[key]), self.attributes
        waiting = Waiting("the first step", agreed=("factor", self._count("factor")))
        optimizer.agree(slot, self.agreeing.agree("factor", slot, optimizer.own_factor(slot), waiting))

    def set_updater(self, updater: Updater) -> None:
        """Not here: the owner is another process."""
        raise UnsupportedError("set_updater works in local stores only; use set_optimizer with a callable")
