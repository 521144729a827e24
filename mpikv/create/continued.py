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
from mpikv.server.kept import Kept
from mpikv.session.continued import ContinuedSession
from mpikv.strategies.continued_pushes import strategy_of

Made = Callable[..., KVStore]  # `kv._made`


def create(name: str, spec: StoreSpec | None, config: Config, comm: MPI.Intracomm, made: Made) -> KVStore:
    """The store of a worker, or of a spare that begins. At a server: SystemExit when all workers have closed theirs."""
    check(library.describe().fault_tolerance, config)
    if spec is not None and not spec.synchronous and config.spares:
        raise ConfigError(
            f"kv.create({name!r}): MPIKV_SPARES is for synchronous stores: a spare takes a worker's place between two "
            "steps of all workers, and those of an asynchronous store make none together"
        )
    kept = Kept()

    def make(present: MPI.Intracomm) -> KVStore:
        settings, its_spec = config.with_(test_hosts=min(config.test_hosts, present.Get_size())), spec
        if survivors.begun:  # roles stay what they are
            settings, its_spec = settings.with_(num_servers=0), None if survivors.serves else spec

        def on_fatal(error: BaseException) -> None:
            if not survivors.is_death(error):  # which the next call of the store finds
                abort.fatal(error)

        kept.number = survivors.number
        of_rank = {"own": survivors.began, "has_role": survivors.met, "kept": kept}
        return made(name, its_spec, settings, present, on_fatal=on_fatal, named=comm, **of_rank)

    def make_alone() -> KVStore:
        settings = config.with_(num_servers=0, test_hosts=0)
        return made(name, spec, settings, MPI.COMM_SELF, named=comm)

    survivors = MpiSurvivors(comm, config, make, make_alone, serves=spec is None)
    try:
        session = ContinuedSession(name, config, survivors)
    except SystemExit:
        survivors.closed()
        raise
    store = KVStore(session, strategy_of(session), on_device=spec is not None and spec.on_device)
    session.start()
    return store
