"""A worker of the jobs that fail: `program.py CASE TYPE`. Trains a little, then does what the case says on worker 1.

Prints `ready RANK PID` before the fault, and `survived` where a worker gets to the end, which none may. In the case
"killed", where a test stops and kills a rank from outside, a worker that waits for it says `waits`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpikv import StatesFileError, kv, optimizers
from mpikv.runtime import abort

case, kind = sys.argv[1:3]
world = MPI.COMM_WORLD
ONES = np.ones((2, 3), np.float32)


def failing(weight, grad, state):
    """An optimizer of the user's that raises in its third round."""
    weight -= grad
    if weight.min() < -6:
        raise ZeroDivisionError("in the user's optimizer")
    return state


def leaving(weight, grad, state):
    """An optimizer of the user's that ends the program."""
    sys.exit(3)


def before_create() -> None:
    """Faults in what ranks bring to `kv.create`."""
    if world.rank == 1:
        if case == "other number of servers":
            os.environ["MPIKV_NUM_SERVERS"] = "2"
        elif case == "variable is no number":
            os.environ["MPIKV_TIMEOUT_S"] = "ten"


def type_of_store() -> str:
    if world.rank == 1 and case == "other type":
        return "dist_async" if kind == "dist_sync" else "dist_sync"
    return kind


def fault(store: kv.KVStore, folder: Path) -> None:
    """What worker 1 does (or what all do, where they must differ)."""
    mine = store.rank == 1
    if case == "second store":
        kv.create(kind)
    elif case == "store after store":
        store.close()
        kv.create(kind)
    elif case == "other call":
        store.init("x", ONES) if mine else store.barrier()
    elif case == "damaged states":
        broken_states(store, folder)
    elif mine:
        fault_of_one(store)
    elif case == "Ctrl-C at exit":
        time.sleep(20)


def fault_of_one(store: kv.KVStore) -> None:
    if case == "raises":
        raise RuntimeError("boom on one worker")
    if case == "Ctrl-C at exit":
        signal.setitimer(signal.ITIMER_REAL, 1.0)  # while the exit waits in `close`
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        sys.exit(0)
    if case == "returns early":
        sys.exit(0)
    if case == "leaves by os._exit":
        os._exit(5)
    if case == "never pushes":
        time.sleep(60)


def say_when_it_waits() -> None:
    """From a thread, once the test has stopped a rank: half a second in one call is a wait for that rank."""
    (activity,) = abort.guard().activities
    while not Path(os.environ["FOLDER"], "stopped").exists():
        time.sleep(0.01)
    while not re.search(r" for (0\.[5-9]|[1-9].*) s$", activity.waiting() or ""):
        time.sleep(0.05)
    os.write(1, b"waits\n")


def broken_states(store: kv.KVStore, folder: Path) -> None:
    """Loading a broken file raises everywhere and changes nothing: the next update is as if nobody had tried."""
    path = folder / "states"
    store.save_optimizer_states(path)
    before = store.pull("w")
    if store.rank == 0:
        data = path.read_bytes()
        half = len(data) // 2
        path.write_bytes(data[:half] + bytes([data[half] ^ 0xFF]) + data[half + 1 :])
    store.barrier()
    try:
        store.load_optimizer_states(path)
    except StatesFileError:
        store.push("w", ONES)
        # Momentum 0.5 and a rate of 1 after two equal rounds of W ones: the third step is 1.75 W.
        step = float((before - store.pull("w")).max())
        print(f"the next step was {step / store.num_workers}", flush=True)
        raise


def main() -> None:
    before_create()
    store = kv.create(type_of_store())
    store.init("w", ONES)
    if case == "optimizer raises":
        store.set_optimizer(failing)
    elif case == "optimizer exits":
        store.set_optimizer(leaving)
    elif "async" in kind or "states" in case:
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, momentum=0.5))
    for _ in range(2):
        store.push("w", ONES)
        store.pull("w")
    print(f"ready {world.rank} {os.getpid()}", flush=True)
    fault(store, Path(os.environ["FOLDER"]))
    if case == "killed":
        threading.Thread(target=say_when_it_waits, daemon=True).start()
    for _ in range(2000 if case == "killed" else 3):
        store.push("w", ONES)
        store.pull("w")
        time.sleep(0.01)
    store.close()
    print("survived", flush=True)


if __name__ == "__main__":
    main()
