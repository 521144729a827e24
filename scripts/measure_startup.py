"""How long a store of many ranks takes to start and to end, and what that costs in messages.

    python scripts/measure_startup.py                            # 16, 64 and 256 thread ranks
    mpirun --oversubscribe --bind-to none -n 64 python scripts/measure_startup.py --mpi       # these ranks
    mpirun -n 64 python scripts/measure_startup.py --mpi         # the same with MPICH

Each rank makes a `dist_sync` store, initialises `--keys` keys of 1000 values in one call, closes it, and makes another
one for `--turns` turns; the ranks begin each call together. Printed are the seconds of the slowest rank (the fastest
turn of each call: with many more ranks than cores the rest is the scheduler's), and what all ranks and rank 0 sent in
`init` and in `close`, counted by the store. Messages inside MPI's own calls, which `create` makes, are not counted.
With `--servers S` the last S ranks are servers, who are started with the workers and end with them.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from _hosts import quiet_barrier  # lies beside this file

HEAD = (
    f"{'ranks':>12} {'create s':>9} {'init s':>9} {'close s':>9} {'init msgs':>10} {'of rank 0':>10} {'KB':>9}"
    f" {'close msgs':>10} {'KB':>9}"
)


def main() -> int:
    """Thread ranks, or this rank of an MPI job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", action="store_true", help="measure the ranks that mpirun has started")
    parser.add_argument("--ranks", default="16,64,256", help="numbers of thread ranks (default %(default)s)")
    parser.add_argument("--servers", type=int, default=0, help="of the ranks (default 0)")
    parser.add_argument("--keys", type=int, default=20, help="keys to initialise (default 20)")
    parser.add_argument("--turns", type=int, default=3, help="stores made, one after the other (default 3)")
    options = parser.parse_args()
    if options.mpi:
        return measure_mpi(options)
    print(HEAD)
    for ranks in map(int, options.ranks.split(",")):
        print_line(f"{ranks} threads", measure_threads(options, ranks))
    return 0


def print_line(what: str, rows: list[list[tuple[float, float, float, tuple[int, int], tuple[int, int]]]]) -> None:
    """rows: of each turn, for each worker: seconds of create, init and close, messages and bytes of init and close."""
    seconds = [min(max(row[i] for row in turn) for turn in rows) for i in range(3)]
    last = rows[-1]
    messages, n_bytes = (sum(row[3][i] for row in last) for i in (0, 1))
    closing, closing_bytes = (sum(row[4][i] for row in last) for i in (0, 1))
    line = f"{what:>12} " + " ".join(f"{one:9.3f}" for one in seconds)
    line += f" {messages:10} {last[0][3][0]:10} {n_bytes / 1e3:9.1f} {closing:10} {closing_bytes / 1e3:9.1f}"
    print(line, flush=True)


def sent(store: Any) -> tuple[int, int]:
    """Messages and bytes so far."""
    stats = store.stats()
    return stats["messages_sent"], stats["bytes_sent"]


def used(store: Any, keys: int, began_s: float, meet: Any) -> tuple[Any, ...]:
    """`init` and `close` of a store that was begun at `began_s`."""
    import numpy as np  # noqa: PLC0415

    created_s = time.perf_counter()
    meet()
    start_s, before = time.perf_counter(), sent(store)
    store.init([f"key {i}" for i in range(keys)], [np.ones(1000, np.float32) for _ in range(keys)])
    init_s, after = time.perf_counter() - start_s, sent(store)
    meet()
    start_s = time.perf_counter()
    store.close()
    close_s, end = time.perf_counter() - start_s, sent(store)
    return (
        created_s - began_s,
        init_s,
        close_s,
        (after[0] - before[0], after[1] - before[1]),
        (end[0] - after[0], end[1] - after[1]),
    )


def measure_threads(options: argparse.Namespace, ranks: int) -> list[list[Any]]:
    """Stores over thread ranks, on as many hosts."""
    import threading  # noqa: PLC0415

    from mpikv.config import Config  # noqa: PLC0415
    from mpikv.create.assembly import assemble  # noqa: PLC0415
    from mpikv.create.spec import parse  # noqa: PLC0415
    from mpikv.placement.members import Members  # noqa: PLC0415
    from mpikv.server.roles import assign  # noqa: PLC0415
    from mpikv.testing.ranks import spawn  # noqa: PLC0415

    hosts = tuple(f"h{i}" for i in range(ranks))
    roles = assign(hosts, options.servers, "last")
    members = Members(hosts, roles.workers, roles.servers, config=Config(timeout_s=300))
    rows = []
    for _ in range(options.turns):
        barrier = threading.Barrier(len(roles.workers))

        def body(transport: Any, barrier: threading.Barrier = barrier) -> Any:
            if transport.rank in roles.workers:
                barrier.wait()
            began_s = time.perf_counter()
            store = assemble("dist_sync", parse("dist_sync"), transport, members, threaded=True, on_fatal=print)
            return None if store is None else used(store, options.keys, began_s, barrier.wait)

        rows.append([row for row in spawn(ranks, body, hosts=hosts, timeout_s=300) if row is not None])
    return rows


def measure_mpi(options: argparse.Namespace) -> int:
    """Stores over the ranks of this job."""
    from mpi4py import MPI  # noqa: PLC0415

    from mpikv import Config, kv  # noqa: PLC0415

    comm, rows = MPI.COMM_WORLD, []
    size = comm.Get_size()
    workers = comm.Split(int(comm.Get_rank() >= size - options.servers), comm.Get_rank())
    # Shared memory would be used in place of messages, since all ranks are on one host.
    config = Config.from_environ().with_(
        num_servers=options.servers, server_placement="last", shared_memory="off", timeout_s=300
    )
    for _ in range(options.turns):
        quiet_barrier(comm)
        began_s = time.perf_counter()
        try:
            store = kv.create("dist_sync", config=config)
        except SystemExit:  # a server whose workers have closed
            continue
        row = used(store, options.keys, began_s, lambda: quiet_barrier(workers))
        rows.append(workers.gather(row))
    if comm.Get_rank() == 0:
        print(HEAD)
        print_line(f"{size} MPI", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
