"""Allreduce across shaped links, against MPI's own and the bound that the links set.

    python scripts/bench_links.py                    # as root: makes the hosts, prints the tables, removes the hosts
    python scripts/bench_links.py --hosts 2 --rate 1000 --mib "" --model resnet50       # its 161 keys in one call
    python scripts/bench_links.py --hosts 2 --rate 1000 --mib "" --keys 1000x1024       # 1000 keys of 1024 bytes

Each host is a network namespace of this machine with a link of `--rate` Mbit/s out and as much in. For every number of
hosts one job runs, in which these take turns: raw TCP between two hosts (its goodput B, with one socket and bytes that
somebody counts at the receiver), in-place `MPI_Allreduce` through mpi4py, and a blocking `pushpull` of one float32 key
by each algorithm asked for. The bound is 2(h-1)/h * S/B seconds for S bytes on h hosts: what every host must send at
least (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)). Every result is checked. `bytes out` is what the
interfaces of all hosts counted while the key was exchanged, per host, relative to 2(h-1)/h * S; packet headers are in.

With several keys each algorithm has two rows: all keys in one call, and one key of the same bytes, `one buffer`.

The row `plain sockets` is what this machine can do at all: the bytes of the bound, sent by every host to the next one
through plain sockets at the same time; `plain sockets, to all`: the same bytes, in equal parts to all other hosts, as
the owners of compressed keys send them. The pretended network runs on the same processors as the ranks, and with
packets of 1500 bytes they are busy before the links are, from 3 hosts on with 2 processors; `--mtu 9000` leaves room.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import _hosts  # lies beside this file
from _hosts import quiet_barrier, sent_bytes

TCP_BYTES = 16 << 20
TCP_PORT = 29777
WAIT_S = 60.0


def main() -> int:
    """Make the hosts and run one job for each number of them; or be a rank of such a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,3,4", help="numbers of hosts (default 2,3,4)")
    parser.add_argument("--ranks-per-host", default="1", help="e.g. 1,2 (default 1)")
    parser.add_argument("--mib", default="16,64", help="sizes in MiB (default 16,64)")
    parser.add_argument("--model", default="", help="keys of the sizes of a model's parameters, e.g. resnet50")
    parser.add_argument("--keys", default="", help="COUNTxBYTES, e.g. 1000x1024")
    parser.add_argument("--turns", type=int, default=3, help="turns of each contender (default 3)")
    parser.add_argument("--algorithms", default="auto", help="of MPIKV_ALGORITHM (default auto)")
    parser.add_argument("--json", type=Path, help="write all measured times to this file")
    _hosts.add_options(parser)
    options = parser.parse_args()
    if options.rank:
        run_rank(options)
        return 0

    for n_hosts in map(int, options.hosts.split(",")):
        for ranks in map(int, options.ranks_per_host.split(",")):
            status = _hosts.run(options, n_hosts, ranks)
            if status != 0:
                return status
    return 0


def run_rank(options: argparse.Namespace) -> None:
    """One rank: take turns, rank 0 prints a line for each size."""
    import numpy as np  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    from mpikv import Config, kv  # noqa: PLC0415

    comm = MPI.COMM_WORLD
    names = options.algorithms.split(",")
    host_names = comm.allgather(socket.gethostname())
    hosts = list(dict.fromkeys(host_names))
    h, p = len(hosts), comm.Get_size()
    is_first = host_names.index(host_names[comm.Get_rank()]) == comm.Get_rank()  # of its host: counts its bytes
    stores = {name: kv.create("dist_sync", config=Config.from_environ().with_(algorithm=name)) for name in names}
    results: list[dict[str, Any]] = []
    sockets = Sockets(comm, host_names)
    if comm.Get_rank() == 0:
        print(
            f"\n{h} hosts of {p // h} ranks, {options.rate:g} Mbit/s each way, {options.mpi}, median of {options.turns}"
        )
        print(f"{'MiB':>6} {'TCP MB/s':>9} {'bound s':>8} {'what':>22} {'s':>8} {'% of bound':>10} {'bytes out':>9}")
    for title, sizes in cases(options):
        n_bytes = 4 * sum(sizes)
        value = np.empty(n_bytes // 4, np.float32)
        ends = list(itertools.accumulate(sizes))
        keys = [f"{title} {i}" for i in range(len(sizes))]
        parts = [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        calls: dict[str, Callable[[], object]] = {}
        for name, store in stores.items():
            if len(sizes) > 1:
                store.init(keys, parts)
                calls[f"{name}, {len(sizes)} keys"] = partial(store.pushpull, keys, parts)
            store.init(title, value)
            calls[f"{name}, one buffer" if len(sizes) > 1 else name] = partial(store.pushpull, title, value)
        goodputs: list[float] = []
        times: dict[str, list[float]] = {}
        sent: dict[str, list[float]] = {}
        for turn in range(options.turns + 1):
            comm.Barrier()
            goodput = raw_tcp(comm, host_names.index(hosts[1])) if h > 1 else None
            contenders: dict[str, Callable[[], object]] = {
                "plain sockets": partial(sockets.move, 2 * (h - 1) * n_bytes // h),
                **(
                    {"plain sockets, to all": partial(sockets.move, 2 * (h - 1) * n_bytes // h, h - 1)} if h > 2 else {}
                ),
                "MPI_Allreduce": partial(comm.Allreduce, MPI.IN_PLACE, value),
                **calls,
            }
            for name, call in contenders.items():
                value[:] = comm.Get_rank() + 1
                comm.Barrier()
                time.sleep(0.05)  # let the link's queue and its tokens come to rest
                before_bytes = sent_bytes()
                comm.Barrier()
                start_s = time.perf_counter()
                call()
                seconds = comm.allreduce(time.perf_counter() - start_s, MPI.MAX)
                out = comm.allreduce(sent_bytes() - before_bytes if is_first else 0) / h
                if not name.startswith("plain sockets") and not (value == p * (p + 1) / 2).all():
                    raise SystemExit(f"{name} gave a wrong sum")
                if turn:
                    times.setdefault(name, []).append(seconds)
                    sent.setdefault(name, []).append(out / (2 * (h - 1) / h * n_bytes))
            if turn and goodput:
                goodputs.append(goodput)
        if comm.Get_rank() == 0:
            goodput = float(np.median(goodputs))
            bound_s = 2 * (h - 1) / h * n_bytes / goodput
            for name, seconds_of in times.items():
                s, out = float(np.median(seconds_of)), float(np.median(sent[name]))
                line = f"{n_bytes / (1 << 20):>6.5g} {goodput / 1e6:9.2f} {bound_s:8.4f} {name:>22} {s:8.4f}"
                print(f"{line} {100 * bound_s / s:10.1f} {out:9.3f}", flush=True)
                results.append({"hosts": h, "ranks": p, "bytes": n_bytes, "goodput": goodputs, "name": name,
                                "seconds": seconds_of, "sent": sent[name]})  # fmt: skip
    for store in stores.values():
        store.close()
    if comm.Get_rank() == 0 and options.json:
        with options.json.open("a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)


def cases(options: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """Names, and the elements of each key that is exchanged in one call."""
    from mpikv.commands.models import shapes  # noqa: PLC0415

    for n_mib in options.mib.split(",") if options.mib else ():
        yield f"{n_mib} MiB", [int(n_mib) << 18]
    if options.model:
        yield options.model, [math.prod(shape) for shape in shapes(options.model)][::-1]
    if options.keys:
        count, n_bytes = map(int, options.keys.split("x"))
        yield options.keys, [n_bytes // 4] * count


class Sockets:
    """Plain connections between the first ranks of all hosts. Collective."""

    def __init__(self, comm: Any, host_names: list[str]) -> None:
        first = [host_names.index(host) for host in dict.fromkeys(host_names)]
        self._comm, self._open = comm, comm.Get_rank() in first
        self._pairs: list[tuple[socket.socket, socket.socket]] = []  # to the next host and from the one before, and on
        address = None
        if self._open:
            server = socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
            server.settimeout(WAIT_S)
            address, at = server.getsockname(), first.index(comm.Get_rank())
        addresses = comm.allgather(address)
        for step in range(1, len(first)):
            if self._open:
                out = socket.create_connection(addresses[first[(at + step) % len(first)]], WAIT_S)
                self._pairs.append((out, server.accept()[0]))
            comm.Barrier()
        if self._open:
            server.close()

    def move(self, n_bytes: int, n_peers: int = 1) -> None:
        """Send so many bytes to the next hosts, in equal parts, while as many come from those before."""
        each = n_bytes // n_peers
        threads = [
            threading.Thread(target=work, args=(end, each))
            for pair in self._pairs[:n_peers]
            for work, end in zip((send, receive), pair, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        quiet_barrier(self._comm)


def send(connection: socket.socket, n_bytes: int) -> None:
    """Send so many bytes."""
    connection.sendall(bytes(n_bytes))


def receive(connection: socket.socket, n_bytes: int) -> None:
    """Receive so many bytes."""
    buffer, got = bytearray(1 << 18), 0
    while got < n_bytes:
        got += connection.recv_into(buffer)


def raw_tcp(comm: Any, receiver: int) -> float:
    """Bytes per second of one TCP connection from rank 0 to rank `receiver`, counted there. Collective."""
    goodput = 0.0
    if comm.Get_rank() == receiver:
        with socket.create_server((socket.gethostbyname(socket.gethostname()), TCP_PORT)) as server:
            server.settimeout(WAIT_S)
            comm.send(server.getsockname(), 0)
            peer, _ = server.accept()
        with peer:
            buffer = bytearray(1 << 18)
            got = peer.recv_into(buffer)
            begin_s, first = time.perf_counter(), got
            while got < TCP_BYTES:
                got += peer.recv_into(buffer)
            goodput = (got - first) / (time.perf_counter() - begin_s)
    elif comm.Get_rank() == 0:
        with socket.create_connection(comm.recv(source=receiver), WAIT_S) as connection:
            connection.sendall(bytes(TCP_BYTES))
    quiet_barrier(comm)
    return float(comm.bcast(goodput, receiver))


if __name__ == "__main__":
    sys.exit(main())
