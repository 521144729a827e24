"""`mpikv plan` against measurements: steps of a Trainer across shaped links, beside what is predicted.

    python scripts/check_plan.py --mtu 9000          # as root: makes the hosts, prints the table, removes the hosts

Each host is a network namespace of this machine (`tests/cluster/namespaces.py`) with one rank. For every number of
hosts one job runs. In it each workload is trained with all ranks as workers (`dist_sync` without servers) and, where
there are workers left, with 1 and 2 of them as servers (`dist_sync` and `dist_async`): one step to make connections,
then `--turns` steps or, of short ones, more, of which the median counts, each begun by all workers together. What is
predicted comes from what `mpikv plan` runs, told nothing but the links' rate, packets and latency.
Messages and bytes are counted by the store and must be those of the plan. Which short messages share a bundle depends
on time, so that those of an allreduce are counted in steps of their own, with MPIKV_BUCKET_BYTES=0; times are those of
the store as it is, `sent` is what it sent with bundles. The status is 1 where a prediction is off by more than
`--limit` percent, or a count by one.

`--compression` trains with gradients compressed so, each time with `force`: what is compared is what travels encoded,
not which form the store has found to be faster. How fast the codec is, worker 0 measures before.

The pretended network works on the same cores as the ranks. With few of them use `--mtu 9000`: packets of 1500 bytes
keep 2 cores so busy that from 3 hosts on they, and not the links, are what is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import _hosts  # lies beside this file
from _hosts import quiet_barrier

LATENCY_S = 100e-6  # between two such hosts, through two token buckets and a bridge
TURNS = 5
LEAST_S, MOST_TURNS = 3.0, 15  # short steps are measured more often


def main() -> int:
    """One job for each number of hosts; or be a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _hosts.add_options(parser)
    parser.add_argument("--hosts", default="2,3,4", help="numbers of hosts (default 2,3,4)")
    parser.add_argument("--workloads", default="lenet,16M,resnet18", help="networks or bytes (default %(default)s)")
    text = "names of codecs, or JSON (default none)"
    parser.add_argument("--compression", nargs="+", default=["none"], help=text)
    parser.add_argument("--turns", type=int, default=TURNS, help=f"measured steps of each (default {TURNS})")
    parser.add_argument("--limit", type=float, default=15.0, help="allowed difference in percent (default 15)")
    parser.add_argument("--json", type=Path, help="add what was measured to this file, one line each")
    options = parser.parse_args()
    if options.rank:
        return run_rank(options)
    print(f"{'compression':>34} {'hosts':>5} {'workload':>9} {'mode':>26} {'W+S':>4} {'measured ms':>12} {'plan ms':>9}"
          f" {'off %':>6} {'messages':>9} {'MB':>8} {'sent':>6}", flush=True)  # fmt: skip
    statuses = [_hosts.run(options, int(n_hosts), 1) for n_hosts in options.hosts.split(",")]
    return int(any(statuses))


def run_rank(options: argparse.Namespace) -> int:
    """Measure every workload in every mode; rank 0 compares. 1 where something is off."""
    from mpi4py import MPI  # noqa: PLC0415

    from mpikv import Config  # noqa: PLC0415

    comm, bad = MPI.COMM_WORLD, 0
    size = comm.Get_size()
    modes = [("dist_sync", 0, "all")]
    modes += [
        (name, servers, take)
        for servers in (1, 2)
        if size - servers > servers - 1
        for name, take in (("dist_sync", "all"), ("dist_sync", "auto"), ("dist_async", "all"))
    ]
    for text in options.compression:
        params, speeds = params_of(text), {}
        if comm.Get_rank() == 0:
            speeds = speeds_of(params)
        quiet_barrier(comm)
        for workload in options.workloads.split(","):
            for name, servers, take in modes:
                link = f"{options.rate}mbit,{1e6 * LATENCY_S}us"
                config = Config.from_environ().with_(num_servers=servers, servers_take=take, link=link)
                found = measure(workload, name, config, options.turns, params)
                if not servers or take == "auto":
                    one_by_one = measure(workload, name, config.with_(bucket_bytes=0), 1, params)
                    if found is not None and one_by_one is not None:
                        found |= {"sent_messages": found["messages"]}
                        found |= {what: one_by_one[what] for what in ("messages", "sent_bytes")}
                if found is not None and comm.Get_rank() == 0:
                    bad += compare(options, (workload, name, config, text, speeds), size, found)
    return bad_status(comm, bad)


def bad_status(comm: Any, bad: int) -> int:
    """The same on every rank, so that mpirun has one status to tell."""
    return int(comm.bcast(bad) > 0)


def params_of(text: str) -> dict[str, Any] | None:
    """What a Trainer takes."""
    if text == "none":
        return None
    return {**(json.loads(text) if text.startswith("{") else {"type": text}), "force": True}


def speeds_of(params: dict[str, Any] | None) -> dict[Any, Any]:
    """Of the codecs, on this machine."""
    from mpikv.codecs import compression  # noqa: PLC0415
    from mpikv.commands.plan.calibrate import speed_of  # noqa: PLC0415

    travels = compression.make(params)
    return {} if travels.uncompressed else {codec: speed_of(codec) for codec in (travels.push, travels.pull)}


def measure(
    workload: str, name: str, config: Any, turns: int, params_of_codec: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Steps of one kind, on every worker; None on servers."""
    import numpy as np  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    import mpikv  # noqa: PLC0415
    from mpikv import kv  # noqa: PLC0415

    config, servers, comm = config.with_(server_placement="last"), config.num_servers, MPI.COMM_WORLD
    workers = comm.Split(int(comm.Get_rank() >= comm.Get_size() - servers), comm.Get_rank())
    try:
        store = kv.create(name, config=config)
    except SystemExit:  # a server whose workers have closed
        return None
    shapes = plan_of(workload).shapes
    # Names in the order of the layers, as a trainer sorts them.
    params = {f"{i:04}": mpikv.Parameter(np.zeros(shape, np.float32)) for i, shape in enumerate(shapes)}
    trainer = mpikv.Trainer(params, "sgd", {"learning_rate": 0.5}, kvstore=store, compression_params=params_of_codec)
    for parameter in params.values():
        parameter.grad[...] = 1.0
    seconds: list[float] = []
    while len(seconds) <= turns or (len(seconds) <= MOST_TURNS and sum(seconds) < LEAST_S):
        quiet_barrier(workers)
        time.sleep(0.1)  # let the links' queues and tokens come to rest
        workers.Barrier()
        before = store.stats()
        start_s = time.perf_counter()
        trainer.step(1)
        seconds.append(workers.allreduce(time.perf_counter() - start_s, MPI.MAX))
    after = store.stats()
    counts = [int(workers.allreduce(after[what] - before[what], MPI.MAX)) for what in ("messages_sent", "bytes_sent")]
    if name == "dist_sync" and params_of_codec is None:
        expected = -0.5 * workers.Get_size() * len(seconds)
        assert all((parameter.data == expected).all() for parameter in params.values()), "wrong weights"
    store.close()
    return {"seconds": seconds[1:], "messages": counts[0], "sent_bytes": counts[1]}


def plan_of(workload: str) -> Any:
    """What the plan exchanges."""
    from mpikv.commands import models  # noqa: PLC0415
    from mpikv.commands.plan.workload import of_bytes, of_model  # noqa: PLC0415

    return of_model(workload) if workload in models.NAMES else of_bytes(int(float(workload[:-1]) * (1 << 20)))


def compare(
    options: argparse.Namespace, case: tuple[str, str, Any, str, dict[Any, Any]], size: int, found: dict[str, Any]
) -> bool:
    """Print one line; whether the prediction is off by more than the limit, or a count by one.

    case: workload, type of the store, its settings, compression, and how fast its codecs are.
    """
    from mpikv.codecs import compression  # noqa: PLC0415
    from mpikv.commands.plan import allreduce, hybrid  # noqa: PLC0415
    from mpikv.commands.plan import servers as with_servers  # noqa: PLC0415
    from mpikv.commands.plan.workload import StepSettings  # noqa: PLC0415
    from mpikv.placement.costs import Costs, Link  # noqa: PLC0415

    workload, name, config, text, speeds = case
    servers, synchronous = config.num_servers, name == "dist_sync"
    travels = compression.make(params_of(text))
    link = Link(options.rate * 1e6 / 8, LATENCY_S, options.mtu)
    workers = size - servers
    settings = StepSettings(travels, speeds, servers=servers, synchronous=synchronous, take=config.servers_take)
    predict = allreduce.predict if not servers else hybrid.predict if synchronous else with_servers.predict
    plan = predict(plan_of(workload), workers, link, Costs(), settings)
    measured_s = statistics.median(found["seconds"])
    off = plan.exchange_s / measured_s - 1
    same = (plan.messages, plan.sent_bytes) == (found["messages"], found["sent_bytes"])
    line = f"{text:>34} {size:>5} {workload:>9} {plan.mode:>26} {f'{workers}+{servers}':>4} {1e3 * measured_s:12.1f}"
    line += f" {1e3 * plan.exchange_s:9.1f} {100 * off:6.1f} {found['messages']:9} {found['sent_bytes'] / 1e6:8.2f}"
    line += f" {found.get('sent_messages', found['messages']):6}"
    print(line if same else f"{line}  plan: {plan.messages} messages, {plan.sent_bytes} bytes", flush=True)
    if options.json:
        with options.json.open("a") as file:
            entry = {
                "hosts": size,
                "workload": workload,
                "mode": plan.mode,
                "workers": workers,
                "servers": servers,
                "compression": text,
            }
            entry |= {**found, "plan_s": plan.exchange_s, "mtu": options.mtu, "rate_mbit": options.rate}
            file.write(json.dumps(entry) + "\n")
    return bool(abs(off) > options.limit / 100 or not same)


if __name__ == "__main__":
    sys.exit(main())
