"""Ranks that are told to stop; the first has children of every kind that Python can start, such as data loaders are.

Each prints `saved` when it has stopped, the first one once its children have ended as it ends them, and not before.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"


def sleep(begun) -> None:
    begun.set()
    time.sleep(600)


def main() -> None:
    import numpy as np  # here, since children that are started anew import this file

    from mpikv import kv

    store = kv.create("dist_sync")
    store.init("w", np.zeros(3))
    children = []
    for kind in ("fork", "spawn", "forkserver") if store.rank == 0 else ():
        context = multiprocessing.get_context(kind)
        begun = context.Event()
        children.append(context.Process(target=sleep, args=(begun,)))
        children[-1].start()
        begun.wait()
    for ours in (None, lambda: None) if store.rank == 0 else ():  # with and without Python's hooks at a fork
        children.append(subprocess.Popen([sys.executable, "-c", SLEEP], stdout=-1, preexec_fn=ours))  # noqa: PLW1509
        children[-1].stdout.readline()
    store.barrier()
    print(f"ready {store.rank} {os.getpid()}", flush=True)
    while not store.stop_requested:
        store.pushpull("w", np.ones(3))
        time.sleep(0.002)
    for child in children:
        child.terminate()
        status = child.wait() if isinstance(child, subprocess.Popen) else (child.join(), child.exitcode)[1]
        assert status == -signal.SIGTERM, (child, status)
    print(f"saved {store.rank}", flush=True)
    store.close()


if __name__ == "__main__":
    main()
