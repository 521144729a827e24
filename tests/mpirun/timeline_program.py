"""A few steps with servers or without, of which one rank may be killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from mpikv import kv

with kv.create("dist_sync") as store:
    store.init(["w", "v"], [np.zeros(300_000, "float32"), np.zeros(7, "float32")])
    values = [np.ones(300_000, "float32"), np.ones(7, "float32")]
    for step in range(5):
        with store.span("forward"):
            time.sleep(0.2 if store.rank == 1 else 0.001)
        store.pushpull(["w", "v"], values)
        if step == 2 and "killed" in sys.argv and store.rank == 1:
            time.sleep(2.5)  # timelines are written each second
            os.kill(os.getpid(), signal.SIGKILL)
