"""Many stores, one after the other: `stores_program.py FOLDER STORES WARM_UP`."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import numpy as np
from holdings import holdings
from mpi4py import MPI

import mpikv
from mpikv import kv

KINDS = (("dist_sync", 0), ("dist_async", 0), ("dist_sync", 2), ("dist_async", 2))  # and pretended hosts


def main(folder: Path, stores: int, warm_up: int) -> None:
    for number in range(1, stores + 1):
        kind, hosts = KINDS[number % len(KINDS)]
        with kv.create(kind, config=mpikv.Config.from_environ().with_(test_hosts=hosts)) as store:
            store.set_optimizer("adam")
            store.init("w", np.ones(50))
            store.pushpull("w", np.ones(50))
            store.pushpull_async("w", np.ones(50)).wait()
            store.barrier()
        del store
        gc.collect()  # else what waits for it would be counted, once more and once less
        if number in (warm_up, stores):
            duplicate, group = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Get_group()
            found = holdings() | {"communicators": duplicate.py2f(), "groups": group.py2f()}
            duplicate.Free()
            group.Free()
            (folder / f"{MPI.COMM_WORLD.rank}-{int(number == stores)}").write_text(json.dumps(found))


main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
