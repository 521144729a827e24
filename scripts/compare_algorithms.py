"""Compare the allreduce algorithms on this machine: the measurement behind the table in `mpikv/placement/place.py`.

    mpirun --oversubscribe --bind-to none -n 4 python scripts/compare_algorithms.py

One blocking `pushpull` of one float32 key at a time; the algorithms take turns (A B C, A B C, ...), so that a noisy
neighbour hits all of them alike. Prints the median in microseconds of each, and the fastest.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from mpikv import Config, kv


def main() -> None:
    """Sweep sizes; rank 0 prints one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default="naive,halving_doubling,ring,native")
    parser.add_argument("--bytes", default="4,4096,65536,262144,1048576,4194304,16777216")
    parser.add_argument("--turns", type=int, default=30, help="turns of all algorithms at each size (default 30)")
    options = parser.parse_args()
    names = options.algorithms.split(",")
    stores = {name: kv.create("dist_sync", config=Config.from_environ().with_(algorithm=name)) for name in names}
    first = next(iter(stores.values()))
    if first.rank == 0:
        print(f"{first.num_workers} workers; microseconds, median of {options.turns}")
        print(f"{'bytes':>10} " + " ".join(f"{name:>17}" for name in names) + "  fastest")
    for n_bytes in map(int, options.bytes.split(",")):
        value = np.ones(max(1, n_bytes // 4), np.float32)
        for store in stores.values():
            store.init(n_bytes, value)
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.turns + 3):
            for name, store in stores.items():
                value[:] = 1
                store.barrier()
                start_s = time.perf_counter()
                store.pushpull(n_bytes, value)
                times[name].append((time.perf_counter() - start_s) * 1e6)
                if not (value == store.num_workers).all():
                    raise SystemExit(f"{name} gave a wrong sum for {n_bytes} bytes")
        medians = {name: float(np.median(values[3:])) for name, values in times.items()}
        if first.rank == 0:
            line = " ".join(f"{medians[name]:17.0f}" for name in names)
            print(f"{n_bytes:>10} {line}  {min(medians, key=lambda name: medians[name])}", flush=True)
    for store in stores.values():
        store.close()


if __name__ == "__main__":
    main()
