"""`mpikv bench ps`: pushpull of one key through server ranks, beside MPI_Allreduce over the workers alone.

Every variant at every size is a store of its own: `kv.create` on a server rank serves until the workers close their
store and then raises SystemExit, which is caught here, so that the same ranks serve the next one. Servers do not take
part in the measuring. One worker has nothing to add: raw MPI is then left out.

The limit is `limits.server_limit`. With --device the workers' arrays are on their GPUs, and servers hold host memory:
so each array also goes down and up once (`device_limits.staged_limit`).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from mpikv import kv
from mpikv.arrays.as_numpy import HostArray
from mpikv.commands.bench.allreduce import beside, sizes_of, titles
from mpikv.commands.bench.device import Bound, Device, Servers, summary
from mpikv.commands.bench.job import Job, job_of
from mpikv.commands.bench.limits import Limit, Rates, server_limit
from mpikv.commands.bench.pattern import Pattern
from mpikv.commands.bench.probes import latency
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.stores import Way, store_contender
from mpikv.config import Config
from mpikv.server.roles import Roles, assign

TYPES = {"sync": ("dist_sync", ""), "sync-sgd": ("dist_sync", "sgd"), "async-sgd": ("dist_async", "sgd")}


def run(session: Session) -> None:
    """Measure what the options ask for. Collective over workers and servers."""
    everybody, options = session.job, session.options
    config = everybody.config.with_(num_servers=options.servers)
    roles = assign(everybody.hosts, options.servers, config.server_placement)
    is_server = everybody.rank in roles.servers
    comm = everybody.comm.Split(int(is_server), everybody.rank)
    session.job = job_of(comm, config)
    session.progress.say(f"# {len(roles.workers)} workers, {len(roles.servers)} servers")
    device = None if is_server or not options.device else Device(session, paths=("auto",))
    if device is None:
        titles(session)
    host_pattern = Pattern(session.dtype, comm.Get_rank(), comm.Get_size())
    for n_bytes in sizes_of(session):
        for place, variant in enumerate(options.variants):
            type_, optimizer = TYPES[variant]
            type_ += "_device" * options.device
            if is_server:
                latency(everybody)
                _serve(everybody, type_, config)
                continue

            def bound(rates: Rates, n_bytes: int = n_bytes) -> Limit:
                return server_limit(n_bytes, len(roles.workers), len(roles.servers), _remote(everybody, roles), rates)

            shape = (n_bytes // session.dtype.itemsize,)
            way = Way(variant, (shape,), session.dtype, config, optimizer=optimizer, type_=type_, single=True)
            if device is not None:
                device.compare(session, [replace(way, device=True)], Servers(everybody, bound, place == 0))
                continue
            probes = session.probes(n_bytes, over=everybody)
            array: HostArray = np.zeros(shape, session.dtype)
            made = [store_contender(session.job, host_pattern, way, [array], everybody.comm)]
            made += beside(session, host_pattern, [array])

            def bounds(rates: Rates, what: str = variant, bound: Bound = bound) -> dict[str, Limit]:
                return {what: bound(rates)}

            session.compare(n_bytes, 1, made, probes, bounds, show_raw=place == 0)
    if device is not None:
        summary(session)


def _serve(everybody: Job, type_: str, config: Config) -> None:
    """Be a server of one store, and return when the workers have closed it."""
    with contextlib.suppress(SystemExit):
        kv.create(type_, comm=everybody.comm, config=config)


def _remote(everybody: Job, roles: Roles) -> int:
    """Return how many workers are on other hosts than a server, for the server with most."""
    return max(
        sum(everybody.hosts[worker] != everybody.hosts[server] for worker in roles.workers) for server in roles.servers
    )
