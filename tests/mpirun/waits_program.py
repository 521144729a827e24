"""Random right programs in a real job, one after another: `waits_program.py SEED...`; prints `right` for each worker.

Each has stores of its own on all ranks, and a process group for each of its threads.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from mpikv import Config, kv
from mpikv.groups import world

sys.path.insert(0, str(Path(__file__).parents[1]))
import waiting_programs

opened = world.opened()
errors: list[str] = []

for seed in map(int, sys.argv[1:]):
    stores = [kv.create("dist_sync") for _ in range(3)]
    rank = stores[0].rank
    program = waiting_programs.program(seed, stores[0].num_workers, [2, 1], groups=True)
    numbers = range(2 * seed + 1, 2 * seed + 1 + len(program.stores))
    groups = [opened.group(range(opened.size), number, Config.from_environ().timeout_s) for number in numbers]
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
    for group in groups:
        opened.drop(group)
print("right", flush=True)
