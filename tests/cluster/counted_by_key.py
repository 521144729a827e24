"""The workers of `test_by_key.py`: rounds of a long key and of short ones, and what was sent meanwhile, counted twice.

    counted_by_key.py N_BYTES ROUNDS HOST=PID...

PID is a process of each host: worker 0 reads through it what the host's interface has counted. It prints `carried` and,
as JSON, for each host the bytes and packets that its interface has sent, and received, and the segments that TCP has
sent again. Each worker prints `ledger` and what `store.stats(by_key=True)` has counted, by key, leg and link.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpikv import kv

SHORT = 250  # elements
QUIET_S = 0.2  # after a barrier: then nothing is on its way any more


def carried(pid: str) -> list[int]:
    """Bytes and packets sent, and received (Linux, Documentation/networking/statistics.rst); segments sent again."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    counters = [int(word) for word in line.split(":")[1].split()]
    names, values = (line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if "Tcp:" in line)
    again = int(values[names.index("RetransSegs")])
    return [counters[8], counters[9], counters[0], counters[1], again]


def more(before: Any, after: Any) -> Any:
    """What has been added, in dicts of dicts of counts."""
    if isinstance(after, dict):
        return {str(name): more((before or {}).get(name), value) for name, value in after.items()}
    return after - (before or 0)


def main() -> None:
    n, rounds, hosts = int(sys.argv[1]) // 4, int(sys.argv[2]), dict(word.split("=") for word in sys.argv[3:])
    with kv.create("dist_sync") as store:
        values = {"long": np.ones(n, np.float32)} | {f"short {i}": np.ones(SHORT, np.float32) for i in range(8)}
        store.init([*values], [*values.values()])
        store.pushpull([*values], [*values.values()])  # connections are made now

        def counted() -> tuple[Any, Any]:
            store.barrier()
            time.sleep(QUIET_S)
            return store.stats(by_key=True)["by_key"], {host: carried(pid) for host, pid in hosts.items()}

        before, before_there = counted()
        store.barrier()  # nobody sends before all have counted
        for _ in range(rounds):
            for value in values.values():
                value[:] = store.rank + 1
            store.pushpull([*values], [*values.values()])
            assert all((value == sum(range(1, store.num_workers + 1))).all() for value in values.values())
        after, after_there = counted()
        print("ledger", json.dumps(more(before, after)), flush=True)
        if store.rank == 0:
            found = {
                host: [b - a for a, b in zip(before_there[host], after_there[host], strict=True)] for host in hosts
            }
            print("carried", json.dumps(found), flush=True)
        store.barrier()  # nobody ends before all have counted


main()
