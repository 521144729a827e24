"""Stores whose workers go on without those that die: of each generation one is made, behind that of the program.

A rank of which the settings make a server, or which runs no other program, serves each of them. A spare waits, and
begins its program when a worker has died, with a store of its own alone at first (session/continued.py).
"""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from mpikv.config import Config
from mpikv.create.spec import StoreSpec
from mpikv.create.survivors import MpiSurvivors, check
from mpikv.errors import ConfigError
from mpikv.kvstore import KVStore
from mpikv.runtime import abort, library
from mpikv.session.continued import ContinuedSession
from mpikv.strategies.continued import ContinuedStrategy

Made = Callable[..., KVStore]  # `kv._made`


def create(name: str, spec: StoreSpec | None, config: Config, comm: MPI.Intracomm, made: Made) -> KVStore:
    """The store of a worker, or of a spare that begins. At a server: SystemExit when all workers have closed theirs."""
    check(library.describe().fault_tolerance, config)
    if spec is not None and not spec.synchronous:
        raise ConfigError(
            f"kv.create({name!r}): MPIKV_ON_FAILURE=continue is for synchronous stores: the values of an asynchronous "
            "one are at its owners alone. mpikv launch --restarts N starts the job again from a snapshot"
        )

    def make(present: MPI.Intracomm) -> KVStore:
        settings, its_spec = config.with_(test_hosts=min(config.test_hosts, present.Get_size())), spec
        if survivors.begun:  # roles stay what they are
            settings, its_spec = settings.with_(num_servers=0), None if survivors.serves else spec

        def on_fatal(error: BaseException) -> None:
            if not survivors.is_death(error):  # which the next call of the store finds
                abort.fatal(error)

        own, has_role = survivors.began, survivors.met
        return made(name, its_spec, settings, present, own=own, on_fatal=on_fatal, has_role=has_role, named=comm)

    def make_alone() -> KVStore:
        settings = config.with_(num_servers=0, test_hosts=0)
        return made(name, spec, settings, MPI.COMM_SELF, named=comm)

    survivors = MpiSurvivors(comm, config, make, make_alone, serves=spec is None)
    try:
        session = ContinuedSession(name, config, survivors)
    except SystemExit:
        survivors.closed()
        raise
    return KVStore(session, ContinuedStrategy(session), on_device=spec is not None and spec.on_device)
