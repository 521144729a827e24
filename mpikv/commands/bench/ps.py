"""`mpikv bench ps`: pushpull of one key through server ranks, beside MPI_Allreduce over the workers alone.

Every variant at every size is a store of its own: `kv.create` on a server rank serves until the workers close their
store and then raises SystemExit, which is caught here, so that the same ranks serve the next one. Servers do not take
part in the measuring. One worker has nothing to add: raw MPI is then left out.

The limit is `limits.server_limit`. With --device the workers' arrays are on their GPUs, and servers hold host memory:
so each array also goes down and up once (`device.staged_limit`).
"""

from __future__ import annotations

import contextlib

from mpikv import kv
from mpikv.commands.bench.allreduce import beside, titles
from mpikv.commands.bench.device import GpuComparison
from mpikv.commands.bench.job import job_of
from mpikv.commands.bench.limits import Limit, Rates, server_limit
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.session import BenchRun
from mpikv.commands.bench.stores import StoreUse, store_contender
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
    device = "_device" * options.device
    if is_server:
        for type_, _ in list(TYPES.values()) * len(session.sizes):
            with contextlib.suppress(SystemExit):
                kv.create(f"{type_}{device}", comm=everybody.comm, config=config)
        return
    hosts = everybody.hosts
    remote = max(sum(hosts[worker] != hosts[server] for worker in roles.workers) for server in roles.servers)
    comparison = GpuComparison(session, paths=("auto",)) if device else None
    if comparison is None:
        titles(session)
    for n_bytes in session.sizes:

        def limits(what: str, rates: Rates, n_bytes: int = n_bytes) -> Limit | None:
            rates = rates._replace(latency_s=session.latency_s)  # a server may be farther than the workers
            bound = server_limit(n_bytes, len(roles.workers), len(roles.servers), remote, rates)
            return bound if what in TYPES else None

        for what, (type_, optimizer) in TYPES.items():
            shape, first = (n_bytes // session.dtype.itemsize,), what == next(iter(TYPES))
            use = StoreUse(
                what, (shape,), session.dtype, config, optimizer=optimizer, type_=f"{type_}{device}", single=True
            )
            if comparison is not None:
                comparison.compare(session, [use], everybody.comm, limits, show_raw=first)
                continue
            pattern = Pattern(session.dtype, session.job.rank, session.job.size)
            arrays = [pattern.zeros(shape)]
            made = [store_contender(session.job, pattern, use, arrays, everybody.comm)]
            session.compare(n_bytes, 1, [*made, *beside(session, pattern, arrays)], limits, show_raw=first)
    if comparison is not None:
        comparison.summary(session)
