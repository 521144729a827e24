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
from mpikv.server.roles import Roles, assign
from mpikv.session.continued import AllClosedError, ContinuedSession, Generation
from mpikv.session.workers import Workers
from mpikv.strategies.continued import ContinuedStrategy
from mpikv.testing.ranks import spawn
from mpikv.testing.stores import StoreRanks, for_tests
from mpikv.transports.faulty import Death, Deaths, Faults, FaultyFabric, PeerGone

T = TypeVar("T")


class _Made(NamedTuple):
    """What a generation has in common. ranks: of the job, by their numbers in it."""

    ranks: Sequence[int]
    fabric: FaultyFabric
    store: StoreRanks


class Job:
    """What all ranks of a job have in common. They are counted as at its start.

    name: of the store's type. hosts, roles: of the ranks. deaths: which of them die. faults: makes each one's script.

    >>> from mpikv.server.roles import Roles
    >>> from mpikv.testing.continued import Job
    >>> job = Job('dist_sync', mpikv.Config(), ['a', 'a', 'b'], Roles((0, 2), (1,)))
    >>> job.deaths.die_in(0, calls=1)
    >>> job.deaths.count(0), job.all_came(0)
    (True, False)
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
        self._made: list[_Made] = []

    def all_came(self, number: int) -> bool:
        """Whether every rank that lives has come to this generation, or one will never come as all have closed."""
        living = set(range(len(self.hosts))) - self.deaths.dead
        return self.closed or all(self.came.get(rank, -1) >= number for rank in living)

    def made(self, number: int) -> _Made:
        """The generation of this number. Who asks first makes it of those that live then. Under `deaths.changed`."""
        if number == len(self._made):
            ranks = [rank for rank in range(len(self.hosts)) if rank not in self.deaths.dead]
            hosts = [self.hosts[rank] for rank in ranks]
            workers, servers = (tuple(map(ranks.index, filter(ranks.count, one))) for one in self.roles)
            scripts = list(map(self._faults, ranks))
            fabric = FaultyFabric(len(ranks), scripts.__getitem__, hosts, deaths=self.deaths, ranks=ranks)
            store = StoreRanks(self.name, self.config, hosts, Roles(workers, servers))
            self._made.append(_Made(ranks, fabric, store))
        return self._made[number]


class ThreadSurvivors:
    """One rank's way to the others that are left (`Survivors`).

    >>> from mpikv.server.roles import Roles
    >>> from mpikv.testing.continued import Job, ThreadSurvivors
    >>> survivors = ThreadSurvivors(Job('dist_sync', mpikv.Config(), ['a'], Roles((0,), ())), 0)
    >>> survivors.regroup().number, survivors.regroup().number
    (0, 1)
    >>> survivors.is_death(ValueError())
    False
    >>> survivors.closed()
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._number = -1
        self._fabric: FaultyFabric | None = None

    def is_death(self, error: BaseException) -> bool:
        """Whether an error comes from another rank's death: any may, as long as one is dead in this generation."""
        if isinstance(error, (Death, AllClosedError)) or self._rank in self._job.deaths.dead:
            return False
        return isinstance(error, PeerGone) or (self._fabric is not None and bool(self._fabric.ended()))

    def regroup(self) -> Generation:
        """See `Survivors`. At a server it ends by SystemExit when all workers have closed."""
        job, changed = self._job, self._job.deaths.changed
        self._number += 1
        with changed:
            if self._fabric is not None:
                self._fabric.give_up()
            job.came[self._rank] = self._number
            changed.notify_all()
            if not changed.wait_for(lambda: job.all_came(self._number), job.config.timeout_s):
                raise StallError(f"rank {self._rank}: only {job.came} of the ranks have come to {self._number}")
            if self._rank in job.deaths.dead:
                raise Death
            if job.closed:
                raise AllClosedError
            made = job.made(self._number)
        self._fabric = made.fabric
        store = made.store.assemble(made.fabric.rank(made.ranks.index(self._rank)), lambda _error: None)
        if store is None:
            raise SystemExit(0)
        assert isinstance(store.session, Workers)
        return Generation(self._number, store.session, store.strategy, store.workers_group)

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

    Returns what it has returned, in the order of the workers at the start, None for those that are dead. The store is
    closed after `body`. deaths: of ranks, counted as at the start; one worker has to be left. faults: makes the script
    of each rank from its number at the start. Otherwise as `spawn_stores`.

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
    config = for_tests(config)
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
        store = KVStore(session, ContinuedStrategy(session), on_device=False)
        try:
            result = body(store)
            store.close()
        except Exception:
            if rank in job.deaths.dead:
                return None
            raise
        finally:
            session.abandon()
        return None if rank in job.deaths.dead else result

    results = spawn(size, lambda transport: rank_body(transport.rank), timeout_s=3 * config.timeout_s + 10)
    return [results[rank] for rank in roles.workers]
