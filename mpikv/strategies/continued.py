"""What a worker of a store that goes on does when a rank has died: what survivors give each other, and make again.

Any survivor has all values and states (kept_rounds.py), so a death costs the rounds that are under way: who has
completed one gives the others its result, and where nobody has all make it again (placement/recovery.py).

What codecs of pushes hold of earlier rounds goes on in the next generation; of a round that is made again, what they
held before it, since it is encoded again. Those on GPUs begin anew, as do owners' codecs of answers. A spare that has
become a worker gets everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.optimizers import archive
from mpikv.optimizers.states import StateRecord, on_host
from mpikv.optimizers.states_file import KIND, InMemory, load_states, packed
from mpikv.optimizers.step import State
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.recovery import EARLY, Report, givers
from mpikv.session.base import NewKey
from mpikv.session.continued import RECOVERY, ContinuedSession
from mpikv.strategies.base import Loaded, Read
from mpikv.strategies.kept_keys import SET, Served, pickled_copy
from mpikv.strategies.kept_rounds import KeptRounds
from mpikv.strategies.states import LOAD

KIND_OF_VALUES = "mpikv values of survivors"


class ContinuedStrategy(KeptRounds):
    """A local strategy, whose pushes are sums over the workers that are left."""

    def __init__(self, session: ContinuedSession) -> None:
        super().__init__(session)
        session.keeper = self

    # --- deaths

    def settle(self) -> None:
        for round_ in tuple(self._open.values()):
            with contextlib.suppress(Exception):  # it has not come, and is made again
                if round_.transfer is not None:
                    self.under_way(round_)
        self._before = self.session.attributes

    def report(self) -> dict[str, Any]:
        keys = [[*one, EARLY if one[0] in self._early else self._rounds[one[0]].done] for one in self._described()]
        return {"keys": [] if self.session.admission.is_new else keys, "attributes": self._before.told()}

    def catch_up(self, reports: Sequence[Mapping[str, Any]]) -> None:
        now, admission = self.session.now, self.session.admission
        keys = {key: rest for report in reports for key, *rest in report["keys"]}
        new = [self._anew(key, described) for key, described in keys.items()]
        if new:
            now.strategy.init(new)  # in the same order everywhere
        if admission.is_new:
            for one in new:
                if one.key not in self._known:
                    self._add(one)
        old = [report for rank, report in enumerate(reports) if rank not in admission.new]
        n_served = max(report["ended"].get(SET, 0) for report in old)
        if admission.new:
            self._take_over(n_served)
        for served in self._served[:n_served]:
            slot = self._agree_on(served, self._before)
            if admission.is_new:
                self._serves(slot, served)
        if admission.is_new:
            now.session.attributes.take_up(old[0]["attributes"])
        giving = givers([Report({key: done for key, *_, done in report["keys"]}) for report in reports])
        if giving:
            self._give(
                {new.key: new for new in new}, [key for key, worker in giving.items() if worker == now.session.rank]
            )
        self._push_again()

    def _give(self, keys: Mapping[Key, NewKey], mine: Sequence[Key]) -> None:
        """Give the others the values and states of these keys, and take those that this worker lacks. Collective."""
        session, spaces = self.session.now.session, self.session.spaces
        given = []
        for info in (self._known[key] for key in mine):
            state, early = self._owner.states.get(info.id), self._early.get(info.key)
            if info.sparse:
                value, state = self.rows.given(info, early)
            else:
                value = [spaces.of(info).to_host(self._stored[info.id] if early is None else early.value)]
            of_key = [info.key, self._rounds[info.key].done, [*self.contributors(info.key)]]
            given.append([*of_key, value, None if state is None else on_host(state)])
        gathered = session.gather(RECOVERY, archive.to_bytes(KIND_OF_VALUES, {"given": given}))
        shares = [np.frombuffer(one, np.uint8) for one in gathered]
        everything = archive.to_bytes(KIND_OF_VALUES, {"shares": shares}) if session.rank == 0 else b""
        everything = session.scatter(RECOVERY, [everything] * session.num_workers)
        for share in archive.from_bytes(everything, KIND_OF_VALUES, RECOVERY)["shares"]:
            found = archive.from_bytes(share.tobytes(), KIND_OF_VALUES, RECOVERY)
            for key, done, contributors, value, state in found["given"]:
                if key not in self._known:
                    self._add(keys[key])
                if key in self._early or self._rounds[key].done < done or self.session.admission.is_new:
                    self._contributors[key] = contributors
                    self._take(self._known[key], done, value, state)

    def _take(self, info: KeyInfo, done: int, value: Sequence[HostArray], state: State | None) -> None:
        """Take the value of a round from another survivor, which has completed it."""
        with self._lock:
            space = self.session.spaces.of(info)
            if info.key in self._early:
                none = self._tables[info.id] if info.sparse else space.empty(info.n_elems, info.dtype)
                self._has_value(info.key, none)
            if info.sparse:
                self.rows.take(info, value, state)
            else:
                space.copy(self._stored[info.id], space.from_host(*value))
                self._owner.states.pop(info.id, None)
                if state is not None:
                    self._owner.set_state(info, state)
            if self._rounds[info.key].catch_up(done):
                self._end(self._open[info.key])

    def _take_over(self, n: int) -> None:
        """Let new workers serve the first `n` optimizers that the others have set, with their own where their programs
        have set them, too. Collective, blocks.

        Those that they will set themselves, of keys that their programs have not initialised yet, are noted.
        """
        found = self.session.admission.from_an_old_one(lambda: cloudpickle.dumps([one[1:] for one in self._served[:n]]))
        if self.session.admission.is_new:
            for i, (as_set, keys, applied) in enumerate(cloudpickle.loads(found)):
                if i == len(self._served):
                    self._served.append(Served(pickled_copy(as_set), as_set, keys, applied))
                    if keys and not any(key in self._infos for key in keys):
                        self._given.add(tuple(keys))

    # --- states

    def own_states(self, call: str, *, alone: bool = False) -> list[StateRecord]:
        """All of them, of worker 0."""
        self.finish(call)
        return super().own_states(call) if alone or not self.session.rank else []

    def load_states(self, read: Read) -> Loaded:
        self.finish(LOAD)
        found: list[bytes] = []

        def give() -> None:
            file = read()
            content = packed([*file.entries.values(), *file.codecs], file.meta)
            found.append(archive.to_bytes(KIND, content))

        self.session.decide(LOAD, give)
        data = self.session.scatter(LOAD, found * self.session.num_workers)
        file = load_states(InMemory(LOAD, archive.from_bytes(data, KIND, LOAD)))
        return super().load_states(lambda: file)
