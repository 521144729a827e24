"""Three ranks, of which worker 1 makes a fault: `fault_program.py FAULT TYPE`, its name below, and the store's type.

Each worker makes two good steps before. Prints `survived` where a worker gets to the end.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import mpikv._version
from mpikv import data, kv
from mpikv.runtime import launcher

ONES = np.ones(4, np.float32)
EVER_S = 1000


# What worker 1 does alone.
ALONE = {
    "sys_exit": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(5),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "loop_in_c": lambda: re.match("(a+)+$", "a" * 60 + "b"),
    "sleep_in_c": lambda: ctypes.PyDLL(None).sleep(EVER_S),  # holds the lock of the interpreter
}


def none(store: kv.KVStore) -> None:
    """No fault."""


def other_order_of_mixed_waits(store: kv.KVStore) -> None:
    if store.rank == 1:
        store.barrier()
    store.push("a", ONES)
    store.pull("a")
    store.barrier()


def shape(store: kv.KVStore) -> None:
    store.init("x", np.ones(2 + (store.rank == 1), np.float32))


def exception(store: kv.KVStore) -> None:
    if store.rank == 1:
        raise RuntimeError("boom on one worker")


def loop_in_python(store: kv.KVStore) -> None:
    if store.rank == 1:
        while True:
            pass


def sleep_in_python(store: kv.KVStore) -> None:
    if store.rank == 1:
        time.sleep(EVER_S)


def uneven_batches(store: kv.KVStore) -> None:
    sampler = data.SplitSampler.for_store(13, store, last="uneven", shuffle=False)  # 5, 4 and 4 of them
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _ in sampler:
            store.pushpull("a", ONES.copy())


def out_of_memory(store: kv.KVStore) -> None:
    value = np.ones(1 << 24, np.float32)  # 64 MiB
    if store.rank == 1:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (32 << 20),) * 2)
    store.init("large", value)


def two_stores(store: kv.KVStore) -> None:
    stores = [kv.create("dist_sync"), store]
    for one in reversed(stores) if store.rank == 1 else stores:
        one.close()


def create_alone(store: kv.KVStore) -> None:
    if store.rank == 1:
        kv.create("dist_sync")


def version() -> None:
    mpikv._version.__version__ = "0.0.1"
    globals()["fault"] = none


def other_type() -> None:
    globals()["kind"] = "dist_async"
    globals()["fault"] = none


def failing(weight, grad, state):
    weight -= grad
    if weight.min() < -6:
        raise ZeroDivisionError("in the user's optimizer")
    return state


def leaving(weight, grad, state):
    sys.exit(3)


def optimizer_raises(store: kv.KVStore) -> None:
    store.set_optimizer(failing)
    for _ in range(20):
        store.pushpull("a", ONES.copy())


def optimizer_exits(store: kv.KVStore) -> None:
    store.set_optimizer(leaving)
    store.pushpull("a", ONES.copy())


def other_call(store: kv.KVStore) -> None:
    store.init("x", ONES) if store.rank == 1 else store.barrier()


def second_store(store: kv.KVStore) -> None:
    kv.create("dist_sync")


def store_after_store(store: kv.KVStore) -> None:
    store.close()
    kv.create("dist_sync")


def interrupted_at_exit(store: kv.KVStore) -> None:
    if store.rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 1.0)  # while the exit waits in `close`
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        sys.exit(0)
    time.sleep(20)


def killed(store: kv.KVStore) -> None:
    """From outside. Who then waits for that rank says so: half a second in one call is a wait for it."""
    print(f"ready {store.rank}", flush=True)

    def say_when_it_waits() -> None:
        while not Path(os.environ["FOLDER"], "stopped").exists():
            time.sleep(0.01)
        while not re.search(r" for (0\.[5-9]|[1-9].*) s$", store.session.activity.waiting() or ""):
            time.sleep(0.05)
        os.write(1, b"it waits\n")

    threading.Thread(target=say_when_it_waits, daemon=True).start()
    for _ in range(2000):
        store.pushpull("a", ONES.copy())
        time.sleep(0.01)


def alone(store: kv.KVStore) -> None:
    if store.rank == 1:
        ALONE[sys.argv[1]]()


fault, kind = globals().get(sys.argv[1], alone), sys.argv[2]
if fault in (version, other_type) and launcher.said_rank(os.environ) == 1:
    fault()
with kv.create(kind) as store:
    if "async" in kind:
        store.set_optimizer("test")
    store.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
    for _ in range(2):
        for key in "ab":
            store.pushpull(key, ONES.copy())
    fault(store)
    store.pushpull("a", ONES.copy())
print("survived", flush=True)
