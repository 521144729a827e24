"""The ranks of `test_interfaces.py`, one on each host: push and pull a key, say which interfaces carried it.

    counted.py N_BYTES

Rank 0 prints `carried` and, as JSON, the bytes that each interface of its host has sent while the key was exchanged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from mpikv import kv


def sent_bytes() -> dict[str, int]:
    """What each interface of this host has sent (Linux, Documentation/networking/statistics.rst)."""
    lines = (line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return {name.strip(): int(numbers.split()[8]) for name, _, numbers in lines}


def main() -> None:
    n = int(sys.argv[1]) // 4
    before = sent_bytes()
    with kv.create("dist_sync") as store:
        store.init("w", np.zeros(n, np.float32))
        value = np.full(n, store.rank + 1, np.float32)
        store.pushpull("w", value)
        assert (value == sum(range(1, store.num_workers + 1))).all()
        after = sent_bytes()
        if store.rank == 0:
            print("carried", json.dumps({name: n_bytes - before[name] for name, n_bytes in after.items()}), flush=True)


if __name__ == "__main__":
    main()
