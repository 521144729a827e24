"""What a worker of an asynchronous store that goes on does when a rank has died.

The owners of the generation that has ended stay as they were (server/kept.py). Of a key's two owners one is left,
unless both have died: worker 0 of the next generation takes values and states from there, and initialises all keys with
them anew. Each owner knows how many pushes of each worker it had applied to a key; so a worker knows which of its own
are not in what all begin with, and pushes these again. So every push of a survivor is applied once; and one of the dead
is in what all begin with, or is not.

A generation counts only when all have agreed that all its owners have begun. Where a rank dies before that, the next
one begins with what the last generation that counts has left.

Cost: the keys and states once to worker 0, and from there to two owners each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpikv.common.checks import shown
from mpikv.errors import PeerError
from mpikv.optimizers import archive
from mpikv.optimizers.states import StateRecord, record_of
from mpikv.optimizers.states_file import KIND, StatesFile
from mpikv.placement.keys import Key
from mpikv.session.base import NewKey
from mpikv.session.continued import RECOVERY, ContinuedSession
from mpikv.strategies.base import Loaded, Read
from mpikv.strategies.continued import ContinuedStrategy
from mpikv.strategies.kept_keys import SET, KeptKeys
from mpikv.strategies.kept_pushes import KeptPushes
from mpikv.strategies.states import LOAD

BEGUN = "all owners have begun"  # a topic
Left = tuple[int, list[int]]  # of a key, the owner that has what all begin with, and how many pushes of each worker


def chosen(counts: Sequence[Sequence[tuple[Key, list[int], bool]]]) -> dict[Key, Left]:
    """Which owner's values all begin with. counts: see `AskedOwners.counts`. Pure."""
    best: dict[Key, Left] = {}
    for owner, counted in enumerate(counts):
        for key, seen, answers in counted:
            if key not in best or answers:  # so that no value that was pulled goes back
                best[key] = owner, seen
    return best


class ContinuedPushes(KeptPushes):
    def __init__(self, session: ContinuedSession) -> None:
        super().__init__(session)
        session.keeper = self
        self._last = -1 if session.generation else 0  # the last generation that counts, as far as this worker knows
        self._ranks = {session.generation: session.now.session.rank}  # of this worker, by generation

    # --- deaths

    def settle(self) -> None:
        self._before = self.session.attributes

    def report(self) -> dict[str, Any]:
        return {"keys": [[*one, one[0] in self._early] for one in self._described()], "last": self._last}

    def catch_up(self, reports: Sequence[Mapping[str, Any]]) -> None:
        now = self.session.now
        self._ranks[now.number] = now.session.rank
        keys = {key: rest for report in reports for key, *rest in report["keys"]}
        last, left, lenders = self._left(keys, reports)
        held = self._lent(lenders)
        if now.session.rank == 0:
            by_owner: dict[int, list[Key]] = {}
            for key, (owner, _) in left.items():
                by_owner.setdefault(owner, []).append(key)
            held |= now.strategy.owners.held(last, by_owner, RECOVERY)
        new = [self._anew(key, of_key, held[key]["value"] if key in held else None) for key, of_key in keys.items()]
        if new:
            now.strategy.init(new)  # in the same order everywhere
        for served in self._served[: max(report["ended"].get(SET, 0) for report in reports)]:
            self._agree_on(served, self._before)
        if now.session.rank == 0:
            self._send_states({key: found["state"] for key, found in held.items() if found["state"] is not None})
        for push in self._open.values():
            seen = left[push.info.key][1] if push.info.key in left else None
            push.found = now.number, push.is_in(last, None if seen is None else seen[self._ranks[last]])
        now.session.agree(BEGUN, None, RECOVERY)
        self._last, self._ranks = now.number, {now.number: now.session.rank}
        self._begin(new)

    def _left(
        self, keys: Mapping[Key, Any], reports: Sequence[Mapping[str, Any]]
    ) -> tuple[int, dict[Key, Left], dict[Key, int]]:
        """The last generation that counts, what all begin with of it, and who lends the value that it has brought to
        `init`, where no owner has got a first one. Collective, blocks.
        """

        def choose() -> list[Any]:
            last, counts = self.session.now.strategy.owners.counts(max(one["last"] for one in reports), RECOVERY)
            best = chosen(counts)
            early = {key: i for i, report in enumerate(reports) for key, *_, is_early in report["keys"] if is_early}
            for key, *_ in (one for report in reports for one in report["keys"] if not one[-1]):
                early.pop(key, None)  # its owners had it
            lenders = {key: early[key] for key in keys if key in early and key not in best}
            lost = [key for key, (shape, *_) in keys.items() if math.prod(shape) and key not in {*best, *lenders}]
            if lost:
                raise PeerError(
                    f"key {shown(lost[0])}{' and others' * (len(lost) > 1)} cannot be brought back: all of its owners "
                    "have died. mpikv launch --restarts N starts the job again from a snapshot"
                )
            return [last, [[key, *one] for key, one in best.items() if key in keys], [*lenders.items()]]

        last, found, lenders = self.session.now.session.decide(RECOVERY, choose)
        return last, {key: (owner, seen) for key, owner, seen in found}, dict(lenders)

    def _lent(self, lenders: Mapping[Key, int]) -> dict[Key, dict[str, Any]]:
        """At worker 0 the values that are lent. Collective, blocks."""
        now, mine = self.session.now, []
        if not lenders:
            return {}
        for new in (self._early[key] for key, rank in lenders.items() if rank == now.session.rank):
            value: Any = new.value
            to_host = self.session.spaces.by_name(new.space).to_host
            mine.append([new.key, [value.indices, value.values] if new.sparse else to_host(value)])
        gathered = now.session.gather(RECOVERY, archive.to_bytes(KIND, {"lent": mine}))
        found = [one for share in gathered for one in archive.from_bytes(share, KIND, RECOVERY)["lent"]]
        return {key: {"value": value, "state": None} for key, value in found}

    def _send_states(self, states: Mapping[Key, Any]) -> None:
        """Give owners the states of keys, and wait until they have these and the values. At worker 0; blocks."""
        now = self.session.now
        infos = [now.session.infos[key] for key in states]
        entries = {info.key: record_of(info, 0, info.n_elems, states[info.key]) for info in infos}
        now.strategy.owners.send_states(
            StatesFile(entries, {"optimizers": [[key, ""] for key in states], "configs": []})
        )
        now.strategy.owners.settle(RECOVERY)

    def _begin(self, new: Sequence[NewKey]) -> None:
        """Begin in this generation, which counts from now on: push what is missing. Blocks."""
        now = self.session.now
        for one in new:
            if one.key not in self._known:
                self._add(one)
        self._early.clear()
        if now.session.rank == 0:
            now.strategy.owners.held(now.number, {}, RECOVERY)  # the others are forgotten
        with self._lock:
            for push in tuple(self._open.values()):
                if push.found == (now.number, True):
                    self._end(push)
        self._push_again()

    # --- states

    def own_states(self, call: str, *, alone: bool = False) -> list[StateRecord]:
        if not alone:
            self.finish(call)
        return self.again(lambda: self.session.now.strategy.own_states(call, alone=alone))

    def load_states(self, read: Read) -> Loaded:
        self.finish(LOAD)
        return self.session.now.strategy.load_states(read)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.finish("close")
        super().close()


def strategy_of(session: ContinuedSession) -> KeptKeys:
    """The strategy of a store that goes on."""
    return ContinuedStrategy(session) if session.synchronous else ContinuedPushes(session)
