"""One step's gradients of a network across shaped links, compressed and not.

    python scripts/bench_compression.py              # as root: makes the hosts, prints the tables, removes the hosts
    python scripts/bench_compression.py --rates 100 --compression fp16 '{"type": "fp16", "pull": "fp16"}'

Each host is a network namespace of this machine with a link of so many Mbit/s out and as much in, and one worker. For
every rate and number of hosts one job runs, in which stores without compression (two of them: how far they are apart is
noise) and with each kind asked for take turns, in another order each time: one blocking `pushpull` of all gradients in
one call, float32, without an optimizer. `speed` is how many times as fast as the mean of the two without compression,
the median over the turns of the ratio within one turn; `MB out` is what a host's interface sent in a step, packet
headers in, and `of plain` how much that is of the bytes without compression; `encoded` how many keys travelled so,
without being forced. All workers must have the same result to the last bit, and that of a codec that rounds each
value must be near the sum.

The hosts share the processors of this machine: with more hosts than cores encoding and decoding take turns, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from typing import Any

import _hosts  # lies beside this file
from _hosts import sent_bytes

KINDS = ["fp16", '{"type": "fp16", "pull": "fp16"}', "2bit", '{"type": "topk", "ratio": 0.01}']


def main() -> int:
    """Make the hosts and run one job for each rate and number of them; or be a rank of such a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts (default 2,4)")
    parser.add_argument(
        "--rates", default="100,1000", help="of the links, in Mbit/s (default 100,1000); 0: as fast as it goes"
    )
    parser.add_argument("--network", default="resnet18", help="whose gradients (default resnet18)")
    parser.add_argument("--compression", nargs="+", default=KINDS, help="names of codecs, or JSON with 'type'")
    parser.add_argument("--turns", type=int, default=3, help="turns of each contender (default 3)")
    parser.add_argument("--warm-up", type=int, default=1, help="turns before those that count (default 1)")
    _hosts.add_options(parser)
    options = parser.parse_args()
    if options.rank:
        run_rank(options)
        return 0
    for rate in map(float, options.rates.split(",")):
        for n_hosts in map(int, options.hosts.split(",")):
            options.rate = rate
            print(f"\n{rate:g} Mbit/s" if rate else "\nas fast as it goes")
            if status := _hosts.run(options, n_hosts, 1):
                return status
    return 0


def run_rank(options: argparse.Namespace) -> None:
    """One worker: take turns; worker 0 prints the table."""
    import numpy as np  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    from mpikv import kv  # noqa: PLC0415
    from mpikv.commands import models  # noqa: PLC0415

    comm = MPI.COMM_WORLD
    shapes = models.shapes(options.network)
    keys = list(range(len(shapes)))
    kinds: dict[str, Any] = {"none": None, "none again": None}
    kinds |= {text: json.loads(text) if text.startswith("{") else {"type": text} for text in options.compression}
    stores = {}
    for name, params in kinds.items():
        stores[name] = kv.create("dist_sync")
        stores[name].set_gradient_compression(params)
        stores[name].init(keys, [np.zeros(shape, np.float32) for shape in shapes])
    numbers = np.random.default_rng(comm.Get_rank())
    gradients = [numbers.standard_normal(shape).astype(np.float32) for shape in shapes]
    sums = [comm.allreduce(float(gradient.sum())) for gradient in gradients[:3]]
    outs = [np.empty(shape, np.float32) for shape in shapes]
    times: dict[str, list[float]] = {name: [] for name in kinds}
    sent: dict[str, float] = {}
    for turn in range(options.warm_up + options.turns):
        for i in np.random.default_rng(turn).permutation(len(stores)):
            name, store = list(stores.items())[i]
            time.sleep(0.05)  # let the link's queue and its tokens come to rest
            comm.Barrier()
            before_bytes, start_s = sent_bytes(), time.perf_counter()
            store.pushpull(keys, gradients, outs)
            seconds = comm.allreduce(time.perf_counter() - start_s, MPI.MAX)
            sent[name] = comm.allreduce(sent_bytes() - before_bytes) / comm.Get_size()
            if turn >= options.warm_up:
                times[name].append(seconds)
            digest = hashlib.sha256(b"".join(out.tobytes() for out in outs)).digest()
            if len(set(comm.allgather(digest))) != 1:
                raise SystemExit(f"{name}: workers have different results")
            near = [abs(float(out.sum()) - total) <= 1e-3 * out.size for out, total in zip(outs, sums, strict=False)]
            if rounds_each(kinds[name]) and not all(near):
                raise SystemExit(f"{name}: a wrong sum")
    if comm.Get_rank() == 0:
        plain = np.mean([times["none"], times["none again"]], axis=0)
        n_bytes = sum(out.nbytes for out in outs)
        print(f"{comm.Get_size()} hosts, {options.network}, {n_bytes / 1e6:.1f} MB in {len(keys)} keys, {options.mpi}")
        print(f"{'compression':>34} {'s':>8} {'speed':>7} {'MB out':>8} {'of plain':>8} {'encoded':>8}")
        for name in kinds:
            speed = float(np.median(plain / np.array(times[name])))
            rows = stores[name].stats().get("compressed_keys", {}).values()
            n_encoded = sum(row["travels"] == "encoded" for row in rows)
            seconds, out_mb = float(np.median(times[name])), sent[name] / 1e6
            print(
                f"{name:>34} {seconds:8.3f} {speed:7.2f} {out_mb:8.2f} {sent[name] / sent['none']:8.3f} {n_encoded:>8}",
                flush=True,
            )
    for store in stores.values():
        store.close()


def rounds_each(params: dict[str, Any] | None) -> bool:
    """Whether such compression only rounds each value."""
    return params is None or {params["type"], params.get("pull", "none")} <= {"none", "fp16"}


if __name__ == "__main__":
    sys.exit(main())
