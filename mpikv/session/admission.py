"""How spares become workers of a store that goes on after deaths (continued.py).

A spare begins its program when a place is free, in a store of its own alone. When it calls `take_place` it first makes
all come together, so that they know of it and of how many steps each has made. After the next step that none of them
has ended they come together once more, with it, and one of them gives it what it goes on from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpikv.errors import ConfigError, UnsupportedError
from mpikv.observe.stall import say
from mpikv.session.generation import AllClosedError

if TYPE_CHECKING:
    from mpikv.session.continued import ContinuedSession

Give = Callable[[], bytes]  # see `Session.between_steps`
Take = Callable[[bytes], None]
ADMISSION, TO_SPARES = "the admission of a spare", "a spare's begin"  # topics
WHOLE = b"\0"  # before what a spare begins with; else there is an error


class Admission:
    """One worker's, or spare's, end.

    new: the ranks of workers that have not got yet what they go on from, and is_new: whether this is one. has_come:
    whether it was a spare, and has not made a step yet.
    """

    def __init__(self, session: ContinuedSession) -> None:
        self._session = session
        self.new: Sequence[int] = ()
        self.is_new = self._lacks = session.alone  # the second: as far as this worker has learned
        self._gets_in = 0  # in which of the calls that give it
        self.has_come = False
        self._gives: list[Give] = []  # of what makes the steps of the program
        self._asked = 0  # how often the workers have come together for an admission
        self._steps = 0  # that have ended
        self._admits_after = 0  # so many, if spares are ready

    def told(self) -> dict[str, Any]:
        """What this worker tells the others when they come together, as JSON. Local."""
        return {"lacks": self._lacks, "gets_in": self._gets_in, "steps": self._steps, "asked": self._asked}

    def heard(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Take what all have told, by rank. Local."""
        given = max(report["ended"].get(TO_SPARES, 0) for report in reports if not report["lacks"])
        # One that has come to such a call has what it gives where others have seen it end.
        self.new = [i for i, one in enumerate(reports) if one["lacks"] and not 0 < one["gets_in"] <= given]
        self.is_new = self._session.now.session.rank in self.new
        self._admits_after = max(report["steps"] for report in reports)
        if self.new:
            self._asked = max(report["asked"] for report in reports)
        if self.is_new:  # all others are between the same two steps
            self._steps, self._gets_in = self._admits_after, given + 1

    def ended(self) -> dict[str, int]:
        """Calls that have ended on all workers, by topic: where one is new all had come to its admission, also where
        none of those is left that had seen it end.
        """
        return {ADMISSION: self._asked} if self.new else {}

    def between_steps(self, give: Give, take: Take) -> bool:
        session, self.has_come = self._session, False
        if session.alone:
            raise ConfigError("a spare (MPIKV_SPARES) takes a worker's place in resume(), before the first step")
        return session.has_spares and self._let_in(give, take)

    def _let_in(self, give: Give, take: Take) -> bool:
        session = self._session
        if give not in (self._gives or [give]):
            raise ConfigError("with spares (MPIKV_SPARES) one Trainer, or one Snapshots, makes all steps of a store")
        self._gives, number = [give], session.now.number
        while True:
            present = session.now.number
            if self.new:
                self._begin_new(give, take)
            elif self._steps == self._admits_after and any(seat.ready for seat in session.now.seats):
                session.keeper.finish(ADMISSION)
                self._asked += 1
                session.whole(ADMISSION, lambda: session.now.session.barrier())  # noqa: PLW0108 - each time that of now
                session.recover(present, admits=True)
            elif session.has_news():
                session.recover(present)
            else:
                self._steps += 1
                return present != number

    def _begin_new(self, give: Give, take: Take) -> None:
        """Let new workers go on from what others have. Collective, blocks."""
        found = self._session.whole(TO_SPARES, lambda: self.from_an_old_one(lambda: self._given(give)))
        if self._lacks and found[:1] != WHOLE:
            raise UnsupportedError(f"a spare cannot take a worker's place: {found.decode()}")
        if self._lacks:
            agreed, _, state = found[len(WHOLE) :].partition(b"\n")
            take(state)
            for name, one in json.loads(agreed).items():
                if name in self._session.passed_on:
                    self._session.passed_on[name].agreed = one
        self.is_new, self._lacks, self.new = False, False, ()

    def from_an_old_one(self, give: Give) -> bytes:
        """What the first worker that is not new gives to those that are. Collective, blocks."""
        session = self._session.now.session
        giver = next(rank for rank in range(session.num_workers) if rank not in self.new)
        gathered = session.gather(TO_SPARES, give() if session.rank == giver else b"")
        parts = [b"".join(gathered) if rank in self.new else b"" for rank in range(session.num_workers)]
        return session.scatter(TO_SPARES, parts)

    def take_place(self, give: Give, take: Take) -> None:
        session = self._session
        self.has_come = True
        session.survivors.is_ready(admits=False)
        try:
            session.recover(session.now.number)
        except AllClosedError:
            session.abandon()
            raise SystemExit(0) from None
        say(f"mpikv: a spare has taken the place of worker {session.number}: {session.num_workers} workers go on")
        self._let_in(give, take)

    def _given(self, give: Give) -> bytes:
        """What this worker gives to a spare, or why it cannot, for which the others must not wait."""
        agreed = {name: one.agreed for name, one in self._session.passed_on.items()}
        try:
            return WHOLE + json.dumps(agreed).encode() + b"\n" + give()
        except Exception as error:  # noqa: BLE001 - of the user's objects
            return f"{type(error).__name__}: {error}".encode()
