"""Random right programs in a real job, one after another: `waits_program.py SEED...`; prints `right` for each worker.

Each has stores of its own on all ranks, and with MPIKV_NUM_SERVERS=0 a process group for each of its threads.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from mpikv import Config, kv
from mpikv.groups import world

sys.path.insert(0, str(Path(__file__).parents[1]))
import waiting_programs

config = Config.from_environ()
seeds = list(map(int, sys.argv[1:]))
several = config.progress == "thread" and not config.num_servers  # a server serves one store, and ends with it
opened = world.opened() if several else None
errors: list[str] = []

for seed in seeds:
    stores = [kv.create("dist_sync") for _ in range(3 if several else 1)]
    rank, workers = stores[0].rank, stores[0].num_workers
    program = waiting_programs.program(seed, workers, [2, 1] if several else [1], groups=several)
    groups = [None] * len(program.stores)
    if opened is not None:
        groups = [opened.group(range(opened.size), 2 * seed + i + 1, config.timeout_s) for i in range(len(groups))]
    waiting_programs.prepare(program, stores)

    def body(thread: int, given: tuple = (program, rank, stores, groups, seed)) -> None:
        program, rank, stores, groups, seed = given
        try:
            waiting_programs.run(program, rank, thread, stores, groups[thread])
        except Exception as error:
            errors.append(f"seed {seed}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(program.stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        sys.exit("; ".join(errors))
    for store in stores:
        store.close()
    if opened is not None:
        for group in groups:
            opened.drop(group)
print("right", flush=True)
