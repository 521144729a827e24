"""A transport around another one, on which messages are late, overtake each other, and ranks die, as a script says.

For tests: what a real network does once in a thousand runs, it does in every run, and nobody has to sleep for it. A
receive is handed on, or a message that has arrived is found, only some *looks* later; each call of `poll` or `probe` of
this rank is a look. So messages of different senders or tags overtake each other; those of one sender with one tag
stay in their order, as MPI promises.

A rank dies in the n-th call of its transports. From then on each of them raises `Death`, in every thread, so that
nothing of it goes on. Others learn of it some looks later, each at another time. Then `PeerGone`, where MPI has
MPI_ERR_PROC_FAILED, ends each `probe`, and what is under way with the dead rank; and all that is under way once a rank
has given up the fabric, as after MPI_Comm_revoke.

All that is random follows from a seed and from the order of this rank's own calls.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Waiter, Waking, wakes
from mpikv.transports.base import Incoming, Transport, take_first
from mpikv.transports.threads import Fabric

Route = tuple[int, int]  # source and tag


@dataclass(frozen=True)
class Faults:
    """The script of one rank.

    seed: of the delays; with None nothing is late by chance. most_looks: how many looks later something comes at most.
    """

    seed: int | None = None
    most_looks: int = 4


class Death(Exception):  # noqa: N818 - it is one
    """This rank is dead."""


class PeerGone(Exception):  # noqa: N818 - it is
    """Another rank is dead, or has given up the fabric because one is."""


class Deaths:
    """Which ranks of a job die, and which are dead. Ranks are counted as at its start, whatever fabric they talk over.

    script: of a rank that dies, in the how manieth call of its transports. changed: notified when one dies.
    """

    def __init__(self, script: Mapping[int, int] | None = None) -> None:
        self.changed = threading.Condition()
        self.dead: frozenset[int] = frozenset()
        self._left = dict(script or {})  # calls until it dies
        self._in_sends: set[int] = set()  # ranks of which sends are counted alone

    def die_in(self, rank: int, calls: int, *, sends: bool = False) -> None:
        """Let a rank die in so many calls from now on. sends: in so many of those that send."""
        with self.changed:
            self._left[rank] = calls
            self._in_sends |= {rank} if sends else set()

    def count(self, rank: int, *, sends: bool = False) -> bool:
        """Count a call of a rank's transport, which sends or not. Returns whether it is dead."""
        if rank in self._left and (sends or rank not in self._in_sends):
            with self.changed:
                self._left[rank] -= 1
                if self._left[rank] <= 0:
                    self.dead |= {rank}
                    self.changed.notify_all()
        return rank in self.dead


class _Send:
    """A send that ends by an error where the other rank has died. It wakes nobody: that rank cannot."""

    def __init__(self, transport: FaultyTransport, started: Operation, dest: int) -> None:
        self._transport, self._started, self._dest = transport, started, dest

    def test(self) -> bool:
        return self._started.test() or self._transport.check(self._dest)


class _DelayedReceive(Waking):
    """A receive that was asked for, and that the transport below begins only later."""

    def __init__(self, transport: FaultyTransport, start: Callable[[], Operation], due: int, source: int) -> None:
        self._transport = transport
        self._start = start
        self._source = source
        self._started: Operation | None = None
        self._waiter: Waiter | None = None
        self.due = due  # the look from which on it may be started

    def begin(self) -> None:
        self._started = self._start()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def test(self) -> bool:
        if self._started is None:
            self._transport.poll()
        return (self._started is not None and self._started.test()) or self._transport.check(self._source)

    def wakes(self, waiter: Waiter) -> bool:
        if self._transport.may_lose:
            return False  # the dead wake nobody
        if self._started is not None:
            return wakes(self._started, waiter)
        self._waiter = waiter
        return True


class FaultyTransport:
    """One rank of `inner`, with the faults of its script."""

    local: None = None  # all are messages

    def __init__(self, inner: Transport, faults: Faults, fabric: FaultyFabric) -> None:
        self._inner = inner
        self._faults = faults
        self._fabric, self.may_lose = fabric, fabric.deaths is not None
        self._news: frozenset[int] = frozenset()  # ranks with which nothing goes on, as this one will know at a look
        self._known, self._known_from = self._news, 0
        self._dice = None if faults.seed is None else random.Random(f"{faults.seed} {inner.rank}")
        self._looks = self._found = 0
        self._receives: dict[Route, deque[_DelayedReceive]] = {}
        self._arrived: dict[Route, deque[tuple[int, int, Incoming]]] = {}  # due, order
        self.rank, self.size, self.max_tag, self.hosts = inner.rank, inner.size, inner.max_tag, inner.hosts
        self.clock, self.recorder, self.ledger = inner.clock, inner.recorder, inner.ledger

    def _due(self) -> int:
        return self._looks + (0 if self._dice is None else self._dice.randint(0, self._faults.most_looks))

    def _is_dead(self, *, sends: bool = False) -> bool:
        """Count a call, and learn what is due. Returns whether this rank is dead."""
        if not self.may_lose:
            return False
        now = self._fabric.ended()
        if now != self._news:
            self._news, self._known_from = now, self._due()
        if self._known_from <= self._looks:
            self._known = self._news
        return self._fabric.counts(self.rank, sends=sends)

    def _live(self, *, sends: bool = False) -> None:
        if self._is_dead(sends=sends):
            raise Death

    def check(self, rank: int) -> bool:
        """Raise PeerGone where nothing that is under way with this rank can end any more, as far as is known here."""
        if rank in self._known:
            raise PeerGone
        return False

    def isend(self, buf: HostArray, dest: int, tag: int) -> Operation:
        self._live(sends=True)
        self.check(dest)
        started = self._inner.isend(buf, dest, tag)
        return _Send(self, started, dest) if self.may_lose else started

    def irecv(self, buf: HostArray, source: int, tag: int, room_bytes: int = 0) -> Operation:
        self._live()
        receive = _DelayedReceive(self, lambda: self._inner.irecv(buf, source, tag, room_bytes), self._due(), source)
        self._receives.setdefault((source, tag), deque()).append(receive)
        self._begin_receives()
        return receive

    def _begin_receives(self) -> None:
        for route in tuple(self._receives):
            while route in self._receives and self._receives[route][0].due <= self._looks:
                take_first(self._receives, route).begin()

    def probe(self, tag: int) -> Incoming | None:
        """Do what `Transport.probe` does, later, and with messages of any sender in any order."""
        self._looks += 1
        self._live()
        if self._known:
            raise PeerGone
        while (incoming := self._inner.probe(tag)) is not None:
            self._arrived.setdefault((incoming.source, tag), deque()).append((self._due(), self._found, incoming))
            self._found += 1
        routes = [route for route, queue in self._arrived.items() if route[1] == tag and queue[0][0] <= self._looks]
        if not routes:
            return None
        in_order = min(routes, key=lambda route: self._arrived[route][0][1])
        route = in_order if self._dice is None else self._dice.choice(routes)
        return take_first(self._arrived, route)[2]

    def poll(self) -> None:
        self._looks += 1
        if not self._is_dead():
            self._begin_receives()
            self._inner.poll()

    def close(self) -> None:
        self._inner.close()


class FaultyFabric(Fabric):
    """Thread ranks with faults. faults: makes the script of each rank from its number; hosts: as of `Fabric`.

    deaths: of ranks; None: none dies. ranks: the numbers that these have there, by default those that they have here.
    """

    def __init__(
        self,
        size: int,
        faults: Callable[[int], Faults],
        hosts: Sequence[str] | None = None,
        *,
        deaths: Deaths | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(size, hosts)
        self._faults, self.deaths = faults, deaths
        self._ranks = range(size) if ranks is None else ranks
        self._given_up = False

    def rank(self, rank: int) -> Transport:
        return FaultyTransport(super().rank(rank), self._faults(rank), self)

    def counts(self, rank: int, *, sends: bool) -> bool:
        """Count a call of a rank. Returns whether it is dead."""
        return self.deaths is not None and self.deaths.count(self._ranks[rank], sends=sends)

    def give_up(self) -> None:
        """End all that is under way, and that will be, as soon as the ranks learn of it."""
        self._given_up = True

    def ended(self) -> frozenset[int]:
        """The ranks with which nothing goes on any more."""
        if self._given_up:
            return frozenset(range(self.size))
        dead = frozenset() if self.deaths is None else self.deaths.dead
        return frozenset(rank for rank in range(self.size) if self._ranks[rank] in dead) if dead else dead
