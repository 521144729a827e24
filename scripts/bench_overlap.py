"""How much communication a backward pass hides, across shaped links.

    python scripts/bench_overlap.py                  # as root: makes the hosts, prints the table, removes the hosts

Each host is a network namespace of this machine with a link of `--rate` Mbit/s out and as much in. A synthetic backward
pass has `--layers` layers, last one first. Each computes for a while, then hands its gradient to `pushpull_async`;
after the pass the values are waited for. The work of a layer is chosen so that computing alone takes as long as
communicating alone. Computing is either BLAS (matrix products on one thread, which release Python's global lock) or a
loop in pure Python (which never does), or sleeping, as a processor does whose GPU computes.

The pretended network runs on the same processors as the ranks, and with packets of 1500 bytes it takes a third of two
of them at 200 Mbit/s. So computing is also measured beside plain sockets that move the same bytes at the same time, in
processes that do nothing else: what is lost to them is lost to the pretended network, not to the store.

    python scripts/bench_overlap.py --forward        # a backward pass and the forward pass behind it

With `--forward` the layers are those of `--model`: as many bytes as its arrays, and the same work for each convolution
or dense layer, as residual networks have it. A forward pass follows, first layer first, each of which waits for its
own weights and takes half as long as backward; computing both passes takes as long as communicating. Two ways take
turns, each in a store of its own, since one that has been given a priority orders messages from then on: no priorities,
first come, first served; and the first layer first (`priority=-layer`), whose weights are needed first and whose
gradient is ready last. `speedup` is the median of the ratios of neighbouring turns.

hidden: (computing alone + communicating alone - both together) / communicating alone.
slowed: time spent computing while gradients are under way, against computing alone. sockets: the same beside the
sockets. calls: what the calls of `pushpull_async` took themselves. idle: computing beside an open store in which
nothing is under way, against computing before there was one.
"""

from __future__ import annotations

import argparse
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import _hosts  # lies beside this file

SOCKET_PORT = 29778
MATRIX = 160  # columns: a product takes some 100 us


def main() -> int:
    """Make the hosts and run one job; or be a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default 2)")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--kib", type=int, default=512, help="KiB of each layer's gradient (default 512)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each measurement (default 3)")
    parser.add_argument("--compute", default="blas,python", help="blas, python, sleep (default the first two)")
    parser.add_argument("--forward", action="store_true", help="compare priorities, with a forward pass")
    parser.add_argument("--model", default="resnet18", help="of --forward (default resnet18)")
    parser.add_argument("--sockets", nargs=2, help=argparse.SUPPRESS)
    _hosts.add_options(parser)
    options = parser.parse_args()
    if options.sockets:
        run_sockets(options.sockets[0], int(options.sockets[1]))
        return 0
    if options.rank:
        run_rank(options)
        return 0

    return _hosts.run(options, options.hosts, options.ranks_per_host, timeout_s=600)


def run_sockets(peer: str, n_bytes: int) -> None:
    """Send `n_bytes` to the next host and receive as many, each time a line comes in; a line goes out when done."""
    server = socket.create_server((socket.gethostbyname(socket.gethostname()), SOCKET_PORT))
    print(flush=True)
    sys.stdin.readline()
    out = socket.create_connection((peer, SOCKET_PORT))
    incoming, _ = server.accept()
    block, buffer = bytes(1 << 18), bytearray(1 << 18)

    def send() -> None:
        for _ in range(n_bytes // len(block)):
            out.sendall(block)

    while sys.stdin.readline():
        sender = threading.Thread(target=send)
        sender.start()
        got = 0
        while got < n_bytes // len(block) * len(block):
            got += incoming.recv_into(buffer)
        sender.join()
        print(flush=True)


def blas() -> Callable[[int], None]:
    """Units of work that release the global lock."""
    import numpy as np  # noqa: PLC0415

    a, c = np.ones((MATRIX, MATRIX), np.float32), np.empty((MATRIX, MATRIX), np.float32)

    def work(units: int) -> None:
        for _ in range(units):
            np.matmul(a, a, out=c)

    return work


def pure_python() -> Callable[[int], None]:
    """Units of work that hold it."""

    def work(units: int) -> None:
        total = 0
        for i in range(units * 1000):
            total += i & 7

    return work


def elsewhere() -> Callable[[int], None]:
    """Units of work of some 100 us that a GPU would do: this processor waits for it."""

    def work(units: int) -> None:
        time.sleep(units * 100e-6)

    return work


def run_rank(options: argparse.Namespace) -> None:
    """One rank: calibrate, take turns, rank 0 prints a line for each kind of computing."""
    import numpy as np  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    from mpikv import kv  # noqa: PLC0415
    from mpikv.commands.models import shapes  # noqa: PLC0415

    comm = MPI.COMM_WORLD
    layers = range(options.layers)
    kinds = {"blas": blas, "python": pure_python, "sleep": elsewhere}
    sizes = [options.kib * 256 for _ in layers]
    weight = [1 for _ in layers]  # of the work, by layer
    if options.forward:
        found = shapes(options.model)
        layers, sizes, weight = range(len(found)), [math.prod(one) for one in found], [len(one) > 1 for one in found]

    def timed(call: Callable[[], None]) -> float:
        comm.Barrier()
        time.sleep(0.1)  # let the link come to rest
        comm.Barrier()
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s

    def most(seconds: float) -> float:
        return float(comm.allreduce(seconds, MPI.MAX))

    names = comm.allgather(socket.gethostname())
    hosts = list(dict.fromkeys(names))
    sockets = None
    if names.index(names[comm.Get_rank()]) == comm.Get_rank():
        peer = hosts[(hosts.index(socket.gethostname()) + 1) % len(hosts)]
        n_bytes = 2 * (len(hosts) - 1) * 4 * sum(sizes) // len(hosts)
        command = [sys.executable, sys.argv[0], "--sockets", peer, str(n_bytes)]
        sockets = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)

    def start_sockets() -> None:
        if sockets is not None:
            sockets.stdin.write("\n")
            sockets.stdin.flush()

    def wait_for_sockets() -> None:
        if sockets is not None:
            sockets.stdout.readline()

    wait_for_sockets()
    comm.Barrier()
    start_sockets()
    works = {name: kinds[name]() for name in options.compute.split(",")}
    before = {name: unit_s(work) for name, work in works.items()}
    store = kv.create("dist_sync")
    grads = [np.empty(n, np.float32) for n in sizes]
    store.init(list(layers), grads)

    def fill() -> None:
        for grad in grads:
            grad[:] = 1

    def check() -> None:
        if not all((grad == comm.Get_size()).all() for grad in grads):
            raise SystemExit("a wrong sum")

    def communicate() -> None:
        for layer in reversed(layers):
            store.pushpull_async(layer, grads[layer])
        store.wait_all()

    if options.forward:
        by_layer = kv.create("dist_sync")
        by_layer.init(list(layers), grads)
        for name, work in works.items():
            fill()
            communication_s = min(most(timed(communicate)) for _ in range(3))
            units = max(1, int(communication_s / sum(weight) / 3 / comm.allreduce(before[name], MPI.MAX)))

            def step(work: Callable[[int], None] = work, units: int = units, *, first: int = 0) -> None:
                requests = {}
                chosen = by_layer if first else store
                for layer in reversed(layers):
                    work(2 * units * weight[layer])
                    requests[layer] = chosen.pushpull_async(layer, grads[layer], priority=-layer * first)
                for layer in layers:
                    requests[layer].wait()
                    work(units * weight[layer])

            seconds: dict[int, list[float]] = {0: [], 1: []}
            for turn in range(2 * options.turns):
                # 0 1 1 0 0 1 1 0: what gets slower in the course of time hits both alike.
                first = (turn + 1) // 2 % 2
                fill()
                seconds[first].append(most(timed(lambda first=first, step=step: step(first=first))))
                check()
            if comm.Get_rank() == 0:
                served, by_priority = (float(np.median(seconds[first])) for first in (0, 1))
                ratio = float(np.median(np.array(seconds[0]) / np.array(seconds[1])))
                print(f"{options.hosts} hosts of {options.ranks_per_host} ranks, {options.rate:g} Mbit/s each way, "
                      f"{options.model}, {name}, {options.turns} pairs: communicating "
                      f"{communication_s:.3f} s, first come, first served {served:.3f} s, by priority "
                      f"{by_priority:.3f} s, speedup {ratio:.3f}", flush=True)  # fmt: skip
        by_layer.close()
        works = {}
    elif comm.Get_rank() == 0:
        size = f"{options.layers} layers of {options.kib} KiB"
        print(f"{options.hosts} hosts of {options.ranks_per_host} ranks, {options.rate:g} Mbit/s each way, {size}")
        print(f"{'computing':>9} {'comm s':>7} {'comp s':>7} {'both s':>7} {'hidden %':>8} {'slowed %':>8} "
              f"{'sockets %':>9} {'calls ms':>8} {'idle %':>7}")  # fmt: skip
    for name, work in works.items():
        fill()
        communication_s = most(timed(communicate))
        communication_s = most(timed(communicate))
        units = max(1, int(communication_s / options.layers / comm.allreduce(before[name], MPI.MAX)))
        rows = []
        for _ in range(options.turns):
            communication_s = most(timed(communicate))
            idle_s = unit_s(work)
            computing_s = timed(lambda work=work, units=units: [work(units) for _ in layers])
            start_sockets()
            beside_s = timed(lambda work=work, units=units: [work(units) for _ in layers])
            wait_for_sockets()
            calls_s = spent_s = 0.0
            fill()

            def both(work: Callable[[int], None] = work, units: int = units) -> None:
                nonlocal calls_s, spent_s
                for layer in reversed(layers):
                    at = [time.perf_counter()]
                    work(units)
                    at.append(time.perf_counter())
                    store.pushpull_async(layer, grads[layer])
                    spent_s += at[1] - at[0]
                    calls_s += time.perf_counter() - at[1]
                store.wait_all()

            both_s = most(timed(both))
            check()
            alone_s = most(computing_s)
            rows.append(
                (
                    communication_s,
                    alone_s,
                    both_s,
                    100 * (alone_s + communication_s - both_s) / communication_s,
                    100 * most(spent_s / computing_s - 1),
                    100 * most(beside_s / computing_s - 1),
                    1e3 * most(calls_s),
                    100 * most(idle_s / before[name] - 1),
                )
            )
        row = [float(value) for value in np.median(rows, axis=0)]
        if comm.Get_rank() == 0:
            print(f"{name:>9} {row[0]:7.3f} {row[1]:7.3f} {row[2]:7.3f} {row[3]:8.1f} {row[4]:8.1f} "
                  f"{row[5]:9.1f} {row[6]:8.1f} {row[7]:7.1f}", flush=True)  # fmt: skip
    store.close()
    if sockets is not None:
        sockets.communicate()


def unit_s(work: Callable[[int], None]) -> float:
    """Seconds of one unit of work, undisturbed as far as the machine lets us."""
    found = []
    for _ in range(5):
        start_s = time.perf_counter()
        work(400)
        found.append((time.perf_counter() - start_s) / 400)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
