"""`mpikv bench ps`: pushpull of one key through server ranks, beside MPI_Allreduce over the workers alone.

Every variant at every size is a store of its own: `kv.create` on a server rank serves until the workers close their
store and then raises SystemExit, which is caught here, so that the same ranks serve the next one. Servers do not take
part in the measuring, and hold host memory: arrays on a GPU go down and up. One worker has nothing to add: raw MPI is
then left out.
"""

from __future__ import annotations

import contextlib

from mpikv import kv
from mpikv.commands.bench.allreduce import beside, titles
from mpikv.commands.bench.job import job_of
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.session import BenchRun
from mpikv.commands.bench.stores import GPU, StoreUse, gpu_everywhere, store_contender
from mpikv.server.roles import assign

TYPES = {"sync": ("dist_sync", ""), "sync-sgd": ("dist_sync", "sgd"), "async-sgd": ("dist_async", "sgd")}


def run(session: BenchRun) -> None:
    """Measure what the options ask for. Collective over workers and servers."""
    everybody, options = session.job, session.options
    config = everybody.config.with_(num_servers=options.servers)
    roles = assign(everybody.hosts, options.servers, config.server_placement)
    is_server = everybody.rank in roles.servers
    session.job = job_of(everybody.comm.Split(int(is_server), everybody.rank), config)
    session.progress.say(f"# {len(roles.workers)} workers, {len(roles.servers)} servers")
    types = dict(TYPES)
    if gpu_everywhere(everybody):
        types |= {f"{GPU}, {what}": (f"{type_}_device", optimizer) for what, (type_, optimizer) in TYPES.items()}
    if is_server:
        for type_, _ in list(types.values()) * len(session.sizes):
            with contextlib.suppress(SystemExit):
                kv.create(type_, comm=everybody.comm, config=config)
        return
    titles(session)
    pattern = Pattern(session.dtype, session.job.rank, session.job.size)
    for n_bytes in session.sizes:
        arrays = [pattern.zeros((n_bytes // session.dtype.itemsize,))]
        for what, (type_, optimizer) in types.items():
            use = StoreUse(
                what,
                (arrays[0].shape,),
                session.dtype,
                config,
                optimizer=optimizer,
                type_=type_,
                on_gpu=what.startswith(GPU),
                single=True,
            )
            made = [store_contender(session, use, pattern, arrays, everybody.comm)]
            session.compare(n_bytes, 1, [*made, *beside(session, pattern, arrays)], show_raw=what == "sync")
