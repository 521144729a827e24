"""Allreduce across shaped links, against MPI's own and the bound that the links set.

    python scripts/bench_links.py                    # as root: makes the hosts, prints the tables, removes the hosts
    python scripts/bench_links.py --hosts 2 --rate 1000 --mib "" --model resnet50       # its 161 keys in one call
    python scripts/bench_links.py --hosts 2 --rate 1000 --mib "" --keys 1000x1024       # 1000 keys of 1024 bytes
    python scripts/bench_links.py --hosts 2,4 --servers 1,2,4 --mib 16 --model resnet50 --take 0.2  # with servers

Each host is a network namespace of this machine with a link of `--rate` Mbit/s out and as much in. For every number of
hosts one job runs, in which these take turns: raw TCP between two hosts (its goodput B, with one socket and bytes that
somebody counts at the receiver), in-place `MPI_Allreduce` through mpi4py, and a blocking `pushpull` of one float32 key
with each `MPIKV_ALGORITHM` asked for. The bound is 2(h-1)/h * S/B seconds for S bytes on h hosts: what every host must
send at least (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)). Every result is checked. `bytes out` is what
the interfaces of all hosts counted while the key was exchanged, per host, relative to 2(h-1)/h * S; packet headers are
in.

With several keys each of them has two rows: all keys in one call, and one key of the same bytes, `one buffer`.

The row `plain sockets` is what this machine can do at all: the bytes of the bound, sent by every host to the next one
through plain sockets at the same time; `plain sockets, to all`: the same bytes, in equal parts to all other hosts, as
values go to owners and back. The pretended network runs on the same processors as the ranks, and with
packets of 1500 bytes they are busy before the links are, from 3 hosts on with 2 processors; `--mtu 9000` leaves room.

With `--servers` so many further hosts have server ranks, one for each contender that has servers, and all contenders
are stores: `ring alone`, of the workers only; `servers alone`, whose servers take every key; `hybrid`, whose servers
take the share of each key that the store chooses, while the rest goes by the ring of the workers; and a `hybrid` for
each share in `--take`. Of n hosts with a worker and k with servers that take the share t, the link of a worker carries
2(n-1)/n (1-t) + t of S each way, that of a server n t/k: the larger one is the `bound`, in units of S/B; the column
before has the median in these units. The optimum is the bound of the best share, 2k(n-1) / (n^2 + kn - 2k) if that is
no more than 1 (as in Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training, OSDI 2020), and
`x of optimum` the median divided by it. `bytes out` is per host with a worker, relative to S. Keys of fewer than
`MPIKV_BIGARRAY_BOUND` elements have one server, and do not reach the bound of several. A server that waits for its turn
takes some 4 % of a core: with few cores, let few shares take turns in one run.

`--slow h2=50` gives the link of a worker's host another rate, which the bounds take into account: B is that of the
other links.
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
from _servers import Links, open_stores, takes

TCP_BYTES = 16 << 20
TCP_PORT = 29777
WAIT_S = 60.0
HEADER = f"{'MiB':>6} {'TCP MB/s':>9} {'bound s':>8} {'what':>22} {'s':>8} {'% of bound':>10} {'bytes out':>9}"
HEADER_WITH_SERVERS = (
    f"{'MiB':>6} {'TCP MB/s':>9} {'what':>14} {'s':>8} {'quartiles':>20} {'of S/B':>7} {'bound':>7} "
    f"{'x of optimum':>12} {'bytes out':>9}"
)


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
    parser.add_argument("--servers", default="0", help="numbers of further hosts, with servers, e.g. 1,2,4")
    parser.add_argument("--take", default="", help="shares of the servers in further contenders, e.g. 0.2,0.5")
    text = "another rate for the link of a host with workers, e.g. h2=50"
    parser.add_argument("--slow", type=rate_of_host, action="append", default=[], metavar="HOST=RATE", help=text)
    _hosts.add_options(parser)
    options = parser.parse_args()
    if options.rank:
        run_rank(options)
        return 0

    hosts, ranks, servers = map(numbers, (options.hosts, options.ranks_per_host, options.servers))
    if any(servers) and min(hosts) < 2:
        parser.error("--servers needs 2 --hosts or more")
    if not set(dict(options.slow)) <= {f"h{i + 1}" for i in range(min(hosts))} or (options.slow and not options.rate):
        parser.error("--slow is of hosts that have workers in every job, h1, h2, ..., and needs a --rate")
    for n, each, k in itertools.product(hosts, ranks, servers):
        per_host = [each] * n + [len(takes(options))] * k
        words = ["--hosts", str(n), "--servers", str(k)]
        if status := _hosts.run(options, n + k, per_host, words=words, rates=dict(options.slow)):
            return status
    return 0


def numbers(text: str) -> list[int]:
    """Read N,N,..."""
    return list(map(int, text.split(",")))


def rate_of_host(text: str) -> tuple[str, float]:
    """Read HOST=RATE."""
    host, _, rate = text.partition("=")
    return host, float(rate)


def run_rank(options: argparse.Namespace) -> None:
    """One rank: take turns, rank 0 prints a line for each size."""
    import numpy as np  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    comm, stores = open_stores(options)
    host_names = comm.allgather(socket.gethostname())
    hosts = list(dict.fromkeys(host_names))
    h, p, k = len(hosts), comm.Get_size(), int(options.servers)
    is_first = host_names.index(host_names[comm.Get_rank()]) == comm.Get_rank()  # of its host: counts its bytes
    rates = [dict(options.slow).get(host, options.rate) for host in hosts]
    links = Links(h, k, options.rate / min(rates) if options.slow else 1.0)
    others = options.rate / min(rates[:2]) if options.slow else 1.0  # links, relative to the one that TCP measures
    shares = {name: links.share(take) for name, take in takes(options).items()}  # of all others 0
    optimum = links.bound(links.best())
    results: list[dict[str, Any]] = []
    sockets = Sockets(comm, host_names)
    if comm.Get_rank() == 0:
        slow = "".join(f", {host} {rate:g}" for host, rate in options.slow)
        servers = f" and {k} of servers" * bool(k)
        print(
            f"\n{h} hosts of {p // h} ranks{servers}, {options.rate:g} Mbit/s each way{slow}, {options.mpi}, "
            f"median of {options.turns}"
        )
        if k:
            print(f"the optimum is {optimum:.3f} S/B, with {links.best():.3f} of each key to the servers")
        print(HEADER_WITH_SERVERS if k else HEADER)
    for title, sizes in cases(options):
        n_bytes = 4 * sum(sizes)
        value = np.empty(n_bytes // 4, np.float32)
        ends = list(itertools.accumulate(sizes))
        keys = [f"{title} {i}" for i in range(len(sizes))]
        parts = [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        calls: dict[str, Callable[[], object]] = {}
        if not k:
            calls["plain sockets"] = partial(sockets.move, 2 * (h - 1) * n_bytes // h)
            if h > 2:
                calls["plain sockets, to all"] = partial(sockets.move, 2 * (h - 1) * n_bytes // h, h - 1)
            calls["MPI_Allreduce"] = partial(comm.Allreduce, MPI.IN_PLACE, value)
        for name, store in stores.items():
            if len(sizes) > 1:
                store.init(keys, parts)
                calls[name if k else f"{name}, {len(sizes)} keys"] = partial(store.pushpull, keys, parts)
            if len(sizes) == 1 or not k:
                store.init(title, value)
                calls[f"{name}, one buffer" if len(sizes) > 1 else name] = partial(store.pushpull, title, value)
        goodputs: list[float] = []
        times: dict[str, list[float]] = {}
        sent: dict[str, list[float]] = {}
        for turn in range(options.turns + 1):
            comm.Barrier()
            goodput = raw_tcp(comm, host_names.index(hosts[1])) if h > 1 else None
            for name, call in calls.items():
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
                    sent.setdefault(name, []).append(out / n_bytes / (1.0 if k else links.sent(0.0)))
            if turn and goodput:
                goodputs.append(goodput * others)
        if comm.Get_rank() == 0:
            goodput = float(np.median(goodputs))
            unit_s = n_bytes / goodput
            for name, seconds_of in times.items():
                low_s, s, high_s = map(float, np.quantile(seconds_of, (0.25, 0.5, 0.75)))
                bound, out = links.bound(shares.get(name, 0.0)), float(np.median(sent[name]))
                line = f"{n_bytes / (1 << 20):>6.5g} {goodput / 1e6:9.2f}"
                if k:
                    line += f" {name:>14} {s:8.4f} {low_s:8.4f} to {high_s:8.4f} {s / unit_s:7.3f} {bound:7.3f}"
                    print(f"{line} {s / unit_s / optimum:12.3f} {out:9.3f}", flush=True)
                else:
                    line += f" {bound * unit_s:8.4f} {name:>22} {s:8.4f}"
                    print(f"{line} {100 * bound * unit_s / s:10.1f} {out:9.3f}", flush=True)
                results.append({"hosts": h, "ranks": p, "servers": k, "slow": dict(options.slow), "bytes": n_bytes,
                                "goodput": goodputs, "name": name, "bound": bound, "optimum": optimum,
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
        yield f"{n_mib} MiB", [round(float(n_mib) * (1 << 18))]
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
