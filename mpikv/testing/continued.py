"""Stores over thread ranks that go on without those that die (`MPIKV_ON_FAILURE=continue`), in one process.

What create/survivors.py does for ranks of MPI: who notices a death gives up what the ranks of this generation talk
over; each rank that lives comes to the next one, or has closed its store; when all have come, those that still live are
the ranks of a new store, over a new fabric and new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from mpikv.config import Config
from mpikv.errors import StallError
from mpikv.kvstore import KVStore
from mpikv.placement.spares import Seat, after, at_start
from mpikv.server.kept import Kept
from mpikv.server.roles import Roles, assign
from mpikv.session.continued import ContinuedSession
from mpikv.session.generation import AllClosedError, Generation
from mpikv.session.workers import Workers
from mpikv.strategies.continued_pushes import strategy_of
from mpikv.testing.ranks import spawn
from mpikv.testing.stores import StoreRanks, for_tests
from mpikv.transports.faulty import Death, Deaths, Faults, FaultyFabric, PeerGone

T = TypeVar("T")


class _Made(NamedTuple):
    """What a generation has in common. ranks: of the job, by their numbers in it. seats: of these."""

    ranks: Sequence[int]
    fabric: FaultyFabric
    store: StoreRanks
    seats: Sequence[Seat]


class Job:
    """What all ranks of a job have in common. They are counted as at its start.

    name: of the store's type. hosts, roles: of the ranks. deaths: which of them die. faults: makes each one's script.

    >>> from mpikv.server.roles import Roles
    >>> from mpikv.testing.continued import Job
    >>> job = Job('dist_sync', mpikv.Config(), ['a', 'a', 'b'], Roles((0, 2), (1,)))
    >>> job.deaths.die_in(0, calls=1)
    >>> job.deaths.count(0), job.all_came(0), job.nobody_is_at_work
    (True, False, False)
    >>> job.made(0).ranks, job.made(0).store.members.servers
    ([1, 2], (0,))
    """

    def __init__(
        self,
        name: str,
        config: Config,
        hosts: Sequence[str],
        roles: Roles,
        *,
        deaths: Deaths | None = None,
        faults: Callable[[int], Faults] = Faults,
    ) -> None:
        self.name, self.config, self.hosts, self.roles = name, config, hosts, roles
        self.deaths, self._faults = Deaths() if deaths is None else deaths, faults
        self.came: dict[int, int] = {}  # rank -> to which generation
        self.closed = False  # a rank has seen all agree to close
        told = {rank: Seat(rank in roles.servers) for rank in range(len(hosts))}
        self.seats = at_start(told, 0, config.spares)
        self._made: list[_Made] = []

    def all_came(self, number: int) -> bool:
        """Whether every rank that lives has come to this generation, or one will never come as all have closed."""
        living = set(range(len(self.hosts))) - self.deaths.dead
        return self.closed or all(self.came.get(rank, -1) >= number for rank in living)

    @property
    def nobody_is_at_work(self) -> bool:
        """Whether all have closed, or only spares are left, who wait. Under `deaths.changed`."""
        return self.closed or all(seat.spare for rank, seat in self.seats.items() if rank not in self.deaths.dead)

    def made(self, number: int) -> _Made:
        """The generation of this number. Who asks first makes it of those that live then. Under `deaths.changed`."""
        if number == len(self._made):
            ranks = [rank for rank in range(len(self.hosts)) if rank not in self.deaths.dead]
            if number:
                self.seats = after({rank: self.seats[rank] for rank in ranks})
            ranks = [rank for rank in ranks if not self.seats[rank].spare]
            ranks.sort(key=lambda rank: self.seats[rank].number % (len(ranks) + self.seats[rank].of + 1))
            hosts = [self.hosts[rank] for rank in ranks]
            servers, workers = list[int](), list[int]()
            for i, rank in enumerate(ranks):
                (servers if self.seats[rank].serves else workers).append(i)
            if not number:
                for i in workers:
                    self.seats[ranks[i]] = Seat(number=workers.index(i), of=len(workers))
            scripts = list(map(self._faults, ranks))
            fabric = FaultyFabric(len(ranks), scripts.__getitem__, hosts, deaths=self.deaths, ranks=ranks)
            store = StoreRanks(self.name, self.config, hosts, Roles((*workers,), (*servers,)))
            self._made.append(_Made(ranks, fabric, store, [*self.seats.values()]))
        return self._made[number]


class ThreadSurvivors:
    """One rank's way to the others that are left (`Survivors`).

    >>> from mpikv.server.roles import Roles
    >>> from mpikv.testing.continued import Job, ThreadSurvivors
    >>> survivors = ThreadSurvivors(Job('dist_sync', mpikv.Config(), ['a'], Roles((0,), ())), 0)
    >>> survivors.regroup().number, survivors.regroup().number
    (0, 1)
    >>> survivors.is_death(ValueError()), survivors.has_news(), survivors.is_ready(admits=False)
    (False, False, None)
    >>> survivors.closed()
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._number = -1
        self._fabric: FaultyFabric | None = None
        self._alone = self._was_ready = False
        self._kept = Kept()

    def is_death(self, error: BaseException) -> bool:
        """Whether an error comes from another rank's death: any may, as long as one is dead in this generation."""
        if self._alone or isinstance(error, (Death, AllClosedError)) or self._rank in self._job.deaths.dead:
            return False
        return isinstance(error, PeerGone) or (self._fabric is not None and bool(self._fabric.ended()))

    def regroup(self) -> Generation:
        """See `Survivors`. At a server it ends by SystemExit when all workers have closed."""
        self._alone = False
        while True:
            made = self._come()
            mine, store, fabric = self._job.seats[self._rank], made.store, made.fabric
            if not mine.spare:
                place = made.ranks.index(self._rank)
            elif mine.number >= 0 and not mine.ready:
                self._alone, place = True, 0
                store = StoreRanks(self._job.name, self._job.config, ["localhost"], Roles((0,), ()))
                fabric = FaultyFabric(1, lambda _: Faults(), ["localhost"])
            else:
                continue
            self._fabric = None if self._alone else fabric
            self._kept.number = self._number
            found = store.assemble(fabric.rank(place), lambda _error: None, kept=self._kept)
            if found is None:
                raise SystemExit(0)
            assert isinstance(found.session, Workers)
            parts = found.session, found.strategy, found.workers_group
            return Generation(self._number, *parts, made.seats, mine, self._alone)

    def _come(self) -> _Made:
        job, changed = self._job, self._job.deaths.changed
        self._number += 1
        with changed:
            mine = job.seats[self._rank]
            if mine.spare and mine.ready == self._was_ready and self._number:
                changed.wait_for(lambda: max(job.came.values()) >= self._number or job.nobody_is_at_work)
            if self._fabric is not None:
                self._fabric.give_up()
            job.came[self._rank] = self._number
            changed.notify_all()
            limit_s = None if mine.spare else job.config.timeout_s
            if not changed.wait_for(lambda: job.all_came(self._number), limit_s):
                raise StallError(f"rank {self._rank}: only {job.came} of the ranks have come to {self._number}")
            if self._rank in job.deaths.dead:
                raise Death
            if job.closed:
                raise AllClosedError
            self._was_ready = mine.ready
            return job.made(self._number)

    def has_news(self) -> bool:
        """See `Survivors`."""
        job = self._job
        with job.deaths.changed:
            coming = {rank for rank, seat in job.seats.items() if seat.spare and seat.number >= 0}
            return any(job.came[rank] > self._number or rank in job.deaths.dead for rank in coming)

    def is_ready(self, *, admits: bool) -> None:
        """See `Survivors`."""
        with self._job.deaths.changed:
            seat = self._job.seats[self._rank]
            self._job.seats[self._rank] = seat._replace(admits=True) if admits else seat._replace(ready=True)

    def closed(self) -> None:
        """See `Survivors`."""
        with self._job.deaths.changed:
            self._job.closed = True
            self._job.deaths.changed.notify_all()


def spawn_continued(
    name: str,
    num_workers: int,
    body: Callable[[KVStore], T],
    *,
    num_servers: int = 0,
    config: Config | None = None,
    hosts: Sequence[str] | None = None,
    deaths: Deaths | None = None,
    faults: Callable[[int], Faults] = Faults,
) -> list[T | None]:
    """Run `body(store)` on thread ranks that are workers of one store and go on without those that die. Blocks.

    Returns what it has returned, in the order of the workers at the start and then the spares, None for those that are
    dead or were not needed. num_workers: with the spares (`config.spares`). The store is closed after `body`.
    deaths: of ranks, counted as at the start; one worker has to be left. faults: makes the script of each rank from its
    number at the start. Otherwise as `spawn_stores`.

    >>> from mpikv.testing.continued import spawn_continued
    >>> from mpikv.transports.faulty import Deaths
    >>> deaths = Deaths()
    >>> def body(store):
    ...     grad = np.full(2, 2.0**store.rank)
    ...     store.init('g', np.zeros(2))
    ...     if store.rank == 1:
    ...         deaths.die_in(1, calls=1)
    ...         store.barrier()
    ...     store.pushpull('g', grad)
    ...     return grad.tolist(), store.num_workers
    >>> spawn_continued('dist_sync', 3, body, deaths=deaths)
    [([5.0, 5.0], 2), None, ([5.0, 5.0], 2)]
    """
    config = for_tests(config).with_(on_failure="continue")
    size = num_workers + num_servers
    places = hosts or ["localhost"] * size
    roles = assign(places, num_servers, config.server_placement)
    job = Job(name, config, places, roles, deaths=deaths, faults=faults)

    def rank_body(rank: int) -> T | None:
        survivors = ThreadSurvivors(job, rank)
        try:
            session = ContinuedSession(name.lower(), config, survivors)
        except (SystemExit, Death):
            return None
        store = KVStore(session, strategy_of(session), on_device=False)
        try:
            session.start()
            result = body(store)
            store.close()
        except SystemExit:  # of a spare that nobody needs any more
            return None
        except Exception:
            if rank in job.deaths.dead:
                return None
            raise
        finally:
            session.abandon()
        return None if rank in job.deaths.dead else result

    results = spawn(size, lambda transport: rank_body(transport.rank), timeout_s=3 * config.timeout_s + 10)
    return [results[rank] for rank in roles.workers]
