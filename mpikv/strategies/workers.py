"""What the strategies of several workers have in common: in which order workers agree, and then do what they agreed on.

A subclass says where values and states are. All workers call its methods in the same order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpikv.errors import ConfigError
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import StatesFile
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.agreed_keys import KeyEvents
from mpikv.session.base import NewKey
from mpikv.session.workers import Workers
from mpikv.spaces.base import SpaceArray
from mpikv.strategies.base import Loaded, Read, Strategy, Write
from mpikv.strategies.sparse import RowClient
from mpikv.strategies.states import LOAD, SAVE, restored


class WorkersStrategy(Strategy):
    """A strategy of several workers. events: what it does with keys as they are agreed on, for `Workers.start`.

    first_values: at worker 0, of dense keys that are being agreed on.
    """

    events: KeyEvents
    rows: RowClient

    def __init__(self, session: Workers) -> None:
        self._session = session
        self.first_values: dict[Key, SpaceArray] = {}

    # --- what a subclass does

    def wait_for_values(self, agreed: Sequence[KeyInfo]) -> None:
        """Wait until the keys that were agreed on can be pushed and pulled."""

    @abstractmethod
    def settle(self, call: str) -> None:
        """Wait until what this worker pushed is where it is added, and cannot meet what follows. Blocks."""

    @abstractmethod
    def use_optimizer(self, slot: int, pickled: bytes, key_ids: list[int], *, elementwise: bool) -> None:
        """Let owners update keys with an optimizer that all agreed on."""

    @abstractmethod
    def use_attributes(self, slot: int, attributes: dict[str, Any], key_ids: list[int]) -> None:
        """Let owners compare these attributes, of an optimizer that workers apply by themselves."""

    @abstractmethod
    def settle_all(self, call: str) -> None:
        """Wait until everything that all workers pushed so far has been applied."""

    @abstractmethod
    def gather_states(self) -> Callable[[], list[list[StateRecord]]]:
        """Return what gives worker 0 the states of all owners, each owner's in a list."""

    @abstractmethod
    def send_states(self, file: StatesFile) -> None:
        """Give owners their states of a file, at worker 0 alone."""

    @abstractmethod
    def take_states(self, replaced: Sequence[KeyInfo]) -> None:
        """Use what `send_states` has given. replaced: the keys that lose the states that they have."""

    @abstractmethod
    def leave(self, common: Mapping[int, int]) -> ConfigError | None:
        """Do what is left when all workers have agreed to close. Returns the error of a round that was refused.

        common: of keys that were pushed unequally often, the rounds that all workers have in common.
        """

    def free(self) -> None:
        """Free what only workers that are all still there can free."""

    # --- what is the same for all

    def init(self, values: Sequence[NewKey]) -> None:
        if self._session.rank == 0:
            for new in values:
                if not new.sparse:
                    self.first_values[new.key] = new.value
        self.rows.propose(values)
        agreed, error = self._session.agree_on_keys(values)
        self.wait_for_values(agreed)
        for new in values:
            self.first_values.pop(new.key, None)
        self.rows.drop_first_rows(values)
        if error is not None:
            raise error

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Key] | None) -> None:
        self.settle("set_optimizer")
        slot, key_ids, pickled = self._session.agree_on_optimizer(optimizer, keys)
        self.use_optimizer(slot, pickled, key_ids, elementwise=optimizer.elementwise)

    def compare_updates(self, optimizer: Optimizer, keys: Sequence[Key]) -> None:
        self.settle("set_optimizer")
        slot, key_ids = self._session.agree_on_own_updates(optimizer, keys)
        self.use_attributes(slot, optimizer.attributes(), key_ids)

    def save_states(self, write: Write) -> None:
        self.settle_all(SAVE)
        gathered = self.gather_states()
        self._session.decide(SAVE, lambda: write(gathered()))

    def load_states(self, read: Read) -> Loaded:
        self.settle_all(LOAD)

        def give() -> Loaded:
            file = read()
            self.send_states(file)
            return restored(file)

        keys, configs = self._session.decide(LOAD, give)
        self.take_states([self._session.infos[key] for key in keys])
        return keys, configs

    def close(self) -> None:
        """Wait until all workers close. Rounds that all workers have pushed are done first."""
        session = self._session
        self.settle("close")
        common, error = session.leave(matched=session.synchronous)
        refused = self.leave(common)
        if error is not None:  # raised before the waits below, which do not end where a worker is gone
            raise error
        self.free()
        session.end()
        if refused is not None:
            raise refused
